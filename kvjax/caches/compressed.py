"""Every token kept in few bits, all of them attended: LogQuant, KIVI."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.caches.policy import Info, attend_in_turn, heads_as_steps, step_lengths, steps_as_heads
from kvjax.caches.zones import Zoned, ZonedState
from kvjax.demotion import Demotion, Fifo
from kvjax.partial import PartialAttention
from kvjax.prompt import in_order
from kvjax.stores import FusedStore, Quantized, Store

QUERIES = 8  # of a KV head, which kernels take at once


@dataclass(frozen=True, kw_only=True)
class Compressed(Zoned):
    """Keeps every token and attends to all of them: sink and recent block exactly, the history as its store keeps it.

    `demote` says which tokens leave the recent block for the store, `local` how many newest ones never do. A store that
    is a `FusedStore` attends to all zones in one operation. A row's history has capacity - sink - local + 1 slots,
    rounded down to whole chunks (at least one).

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=32, capacity=512)
    >>> layer = kvjax.init_layer(kvjax.Compressed(store=kvjax.Quantized(bits=4)), spec)
    """

    store: Store = Quantized()
    sink: int = 0
    local: int = 1
    demote: Demotion = Fifo(leave=128)

    def attend(
        self, st: ZonedState, q: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, ZonedState, Info]:
        seen = self.visible(st, window)
        if isinstance(self.store, FusedStore):
            out = self.store.attend_with(st.store, q, seen.store, seen.recent, seen.sink, scale=scale)
        else:
            history = self.store.attend(st.store, q, seen.store, scale=scale)
            out = ops.attend_beside(history, q, None, seen.recent, seen.sink, scale=scale)
        return out, st, self._info(st, window)

    def decode(
        self, st: ZonedState, q: Array, k: Array, v: Array, count: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, ZonedState, Info]:
        """Each step sees the tokens up to its own: the same arrays with smaller counts.

        Without a sliding window all steps see the same history, so as many as kernels take, `QUERIES` of a KV head,
        read it together.
        """
        # Counts are read before they change in place; XLA would copy them otherwise.
        lengths, count = in_order(step_lengths(st.length, count, k.shape[2], self.free(st)), count)
        after = self.put_tokens(st, k, v, count)
        if window is None:
            return self._attend_steps(after, q, lengths, scale=scale)

        def attend(st: ZonedState, q: Array, length: Array) -> tuple[Array, ZonedState, Info]:
            return self.attend(self.shortened(st, length), q, scale=scale, window=window)

        return attend_in_turn(attend, after, q, lengths)

    def _attend_steps(
        self, st: ZonedState, q: Array, lengths: Array, *, scale: float
    ) -> tuple[Array, ZonedState, Info]:
        """The steps of q [B, K, G, T, D], after each of which a row holds `lengths` i32[T, B] tokens."""
        G, T = q.shape[2:4]
        seen, queries = self.visible_steps(st, jnp.moveaxis(lengths, 0, 1)), steps_as_heads(q)
        of_pass = max(QUERIES // G, 1) * G
        parts = [
            self.store.attend(st.store, queries[:, :, first : first + of_pass], seen.store, scale=scale)
            for first in range(0, T * G, of_pass)
        ]
        history = PartialAttention(*(jnp.concatenate(same, axis=2) for same in zip(*parts, strict=True)))
        out = ops.attend_beside(history, queries, None, seen.recent, seen.sink, scale=scale)
        info = jax.vmap(lambda length: self._info(self.shortened(st, length), None))(lengths)
        return heads_as_steps(out, T), st, info

    def _info(self, st: ZonedState, window: int | None) -> Info:
        (B, K), seen = st.recent.k.shape[:2], self.visible(st, window)
        attended = jnp.maximum(st.store.count - seen.store, 0) + seen.recent.size
        if seen.sink is not None:
            attended += seen.sink.size
        slots = self.sink + st.store.slots + st.recent.slots
        position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (B, K, 1, slots))
        read = position < st.length[:, None, None, None]
        if seen.first is not None:
            read &= position >= seen.first[:, None, None, None]
        counted = jnp.broadcast_to(attended.astype(jnp.float32)[:, None], (B, K))
        return Info(counted, None, None, jnp.where(read, position, -1))
