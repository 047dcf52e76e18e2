"""Compressed caches: every token is kept in few bits and attended, as in LogQuant and KIVI."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.derivatives import refuse_derivative
from kvjax.numerics.partial import PartialAttention
from kvjax.policies.policy import Info, Step, attend_in_turn
from kvjax.policies.zones import Visible, Zoned, ZonedState
from kvjax.spec import keep_ints
from kvjax.stores import Quantized, Store
from kvjax.stores.demotion import Demotion, Fifo


@dataclass(frozen=True, kw_only=True)
class Compressed(Zoned):
    """Keeps every token and attends to all of them: sink and recent block exactly, the history
    as its store keeps it.

    `demote` says which tokens leave the recent block for the store, `local` how many of the
    newest ones never do. A row's history has capacity - sink - local + 1 slots, rounded down to
    whole chunks (at least one).

    With `value_window`, at most `local`, keys and values of the recent block are rounded at
    different times, as in KIVI and LogQuant: the newest `value_window` values are exact. Keys
    are exact until their chunk is complete, or, if the demotion is not in order, as long as
    they are in the block. A key or value that is rounded before its counterpart is read as it
    will be stored, which costs each step the rounding of the block; both are stored together.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=32, capacity=512)
    >>> layer = kvjax.init_layer(kvjax.Compressed(store=kvjax.stores.Quantized(bits=4)), spec)
    """

    store: Store = Quantized()
    sink: int = 0
    local: int = 1
    demote: Demotion = Fifo(leave=128)
    value_window: int | None = None

    shares_prefixes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_ints(self, value_window=1)
        if self.value_window is not None and self.value_window > self.local:
            raise ValueError(
                f"Compressed(value_window={self.value_window}) keeps more values than the local window of "
                f"{self.local} tokens has; use local={self.value_window}, or a smaller window"
            )

    def attend(self, st: ZonedState, q: Array, step: Step) -> tuple[Array, ZonedState, Info]:
        if step.lengths is not None and self.value_window is not None:
            # each step rounds another part of the recent block
            return attend_in_turn(self, self.shortened, st, q, step)
        return self.attend_all(st, q, step)

    def visible(
        self, st: ZonedState, window: int | None = None, lengths: Array | None = None
    ) -> Visible:
        seen = super().visible(st, window, lengths)
        if self.value_window is None:
            return seen
        k, v = self._rounded(st)
        return seen._replace(recent=seen.recent._replace(k=k, v=v))

    def attend_stored(self, st: ZonedState, q: Array, step: Step) -> PartialAttention:
        if self.value_window is not None:
            k, v = self._rounded(st)
            st = replace(st, recent=replace(st.recent, k=k, v=v))
        return super().attend_stored(st, q, step)

    def _rounded(self, st: ZonedState) -> tuple[Array, Array]:
        """Keys and values of the recent block; those that are no longer exact are as the store
        will return them.
        """
        assert self.value_window is not None
        chunk = self.demote.leave
        count = st.recent.count[:, None, None, None]
        whole = st.recent.slots // chunk * chunk
        k, v = refuse_derivative(
            f"{self} rounds keys and values of the recent block, which has no derivative; use value_window=None, or "
            "jax.lax.stop_gradient on k and v",
            st.recent.k,
            st.recent.v,
        )
        slot = jnp.arange(st.recent.slots, dtype=jnp.int32)[None, None, :, None]
        in_chunks = (
            (count - 1) // chunk * chunk if self.demote.ordered else jnp.zeros_like(count)
        )
        rounded = self.store.decoded(k[:, :, :whole], v[:, :, :whole])
        k_rounded, v_rounded = (
            jnp.concatenate([new.astype(old.dtype), old[:, :, whole:]], axis=2)
            for new, old in zip(rounded, (k, v), strict=True)
        )
        return jnp.where(slot < in_chunks, k_rounded, k), jnp.where(
            slot < count - self.value_window, v_rounded, v
        )
