"""MiKV: important tokens are kept exact, all others in few bits, and none is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.evictors import Evictor, HeavyHitter
from kvjax.numerics.blocks import Block, empty_block, whole_units
from kvjax.numerics.partial import (
    PartialAttention,
    Span,
    attend_part,
    keep_valid,
    merge,
    merge_sinks,
)
from kvjax.ops.chunk import attend_zone
from kvjax.policies import PerLayer
from kvjax.policies.evicting import Evicting, EvictingState
from kvjax.policies.policy import Info, Step
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers
from kvjax.spec import CacheSpec, keep_ints, require_int
from kvjax.stores import Quantized, Store
from kvjax.validation import check_verbs

__all__ = ["Mixed", "mikv"]


@published(
    "the most recent and most attended tokens exactly, the rest in 2 bits; reads all",
    paper="MiKV 2024",
)
def mikv(
    budget: int = 1024,
    *,
    bits: int = 2,
    value_bits: int | None = None,
    group: int = 32,
    chunk: int = 128,
    recent: float = 0.5,
    queries: int | None = 1024,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """MiKV: every token is attended; the `budget` most important ones are exact, and all others
    have `bits` bits.

    The exact tokens are the newest ones and those with the most accumulated attention, as in
    `h2o`. Tokens that `h2o` would evict are stored in few bits: keys by channel, values by
    token.

    Args:
      budget: tokens that a layer and KV head keeps exact.
      group: tokens of a key's channel, and channels of a value, that share a scale and a zero
        point.
      chunk: tokens that are quantised together.
      recent: share of the budget that the newest tokens take.
      queries: how many queries of a longer prompt vote, as in `h2o`; None: all.

    **Source:** MiKV (Yang et al. 2024, arXiv 2402.18096). **Differs:** see `Mixed`: keys are
    quantised by channel in place of the paper's channel balancer.

    **Checklist:** unit: tokens that stay exact, for each KV head; besides: every other token,
    in 2 bits; zones: no sink, window of half of the budget; budget: the exact tokens;
    generated: compete for exact slots as the prompt's do.
    """
    require_int("mikv(budget=...)", budget, at_least=1)
    store = Quantized(bits=bits, key_group=group, value_bits=value_bits, value_group=group)
    policy = Mixed(
        evictor=HeavyHitter(recent=recent, queries=queries),
        budget=budget,
        store=store,
        chunk=chunk,
    )
    return over_layers("mikv", layers, policy)


@register_dataclass
@dataclass(frozen=True)
class MixedState(EvictingState):
    """The important tokens, and the pending and stored ones."""

    low: Any  # the state of the store
    # [B, K, chunk, D] tokens that are no longer important, until they fill a chunk
    pending: Block
    next: Array  # i32[B, K] the slot whose token leaves next, if all are full
    next_k: Array  # dtype[B, K, 1, D] its key
    next_v: Array  # dtype[B, K, 1, D] its value
    dropped: Array  # bool[B] a token of this row found no room

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return self.dropped


@dataclass(frozen=True, kw_only=True)
class Mixed(Evicting):
    """Keeps the `budget` most important tokens of a KV head in full precision, and all others
    in `store`.

    When a new token comes, the `evictor` says which token is no longer important. Its key and
    value stay pending, in full precision, until there are `chunk` such tokens; these move to
    the store together, so the tokens of a quantisation group left at about the same time. No
    token returns. A step attends to all exact, pending and stored tokens.

    **Source:** MiKV (Yang et al. 2024, arXiv 2402.18096): importance by accumulated attention,
    as H2O; evicted tokens in 2 to 4 bits. **Differs:** the paper divides channels of queries
    and keys by a balancer before it quantises keys by token; here keys are quantised by
    channel, where a large channel has its own scale. In a prompt of several chunks, tokens that
    earlier chunks moved to the store take no part in the votes of later ones.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=32, capacity=512)
    >>> layer = kvjax.init_layer(kvjax.contrib.mikv.Mixed(budget=128), spec)
    """

    evictor: Evictor = HeavyHitter()
    store: Store = Quantized()
    chunk: int = 128
    evicts_several = False

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_ints(self, chunk=1)
        if self.evictor.arrival is None:
            raise ValueError(
                f"Mixed got {self.evictor}, which ranks tokens by position alone; use kvjax.evictors.HeavyHitter()"
            )
        check_verbs(
            "Mixed(store=...)",
            self.store,
            "a store",
            ("init", "append"),
            "kvjax.stores.Quantized()",
        )

    def init(self, spec: CacheSpec) -> MixedState:
        self.store.check(spec, self.chunk)
        st = super().init(spec)
        slots = max(whole_units(spec.capacity - st.tokens.slots, self.chunk), self.chunk)
        token = (spec.batch, spec.kv_heads, 1, spec.head_dim)
        return MixedState(
            **vars(st),
            low=self.store.init(spec, slots),
            pending=empty_block(spec, self.chunk),
            next=jnp.zeros((spec.batch, spec.kv_heads), jnp.int32),
            next_k=jnp.zeros(token, spec.dtype),
            next_v=jnp.zeros(token, spec.dtype),
            dropped=jnp.zeros(spec.batch, bool),
        )

    def update(self, st: Any, k: Array, v: Array, active: Array) -> MixedState:
        leaves = active & (st.tokens.count == st.tokens.slots)
        room = st.pending.count < st.pending.slots
        new: Any = super().update(st, k, v, active & (room | ~leaves))
        (pending,), dropped = ops.put_token(
            [st.pending], st.next_k, st.next_v, leaves, st.dropped
        )
        return replace(new, pending=pending, dropped=dropped)

    def attend(self, st: Any, q: Array, step: Step) -> tuple[Array, EvictingState, Info]:
        self._check_window(step.window)
        logits = step.logits
        exact_valid = self._valid(st)[:, :, None]
        exact = attend_part(q, st.tokens.k, st.tokens.v, exact_valid, logits=logits)
        first = jnp.zeros_like(st.length)
        pending = Span(st.pending.k, st.pending.v, first, st.pending.count)
        whole = merge(
            exact,
            self.store.attend_with(st.low, q, first, pending, None, logits=logits, part=True),
        )
        if st.evidence is not None and st.due is not None:
            weights = step.weights(q, st.tokens.k, exact_valid, whole.lse)
            seen = self.evictor.see_step(st.evidence, weights)
            evidence = jnp.where(st.due[:, None, None], seen, st.evidence)
            st = replace(st, evidence=evidence, due=jnp.zeros_like(st.due))
        attended = st.tokens.count + st.pending.count + st.low.count
        attended = jnp.broadcast_to(attended.astype(jnp.float32)[:, None], q.shape[:2])
        return (
            merge_sinks(whole, step.sinks).out.astype(q.dtype),
            self._with_next(st),
            Info(attended, None),
        )

    def attend_stored(self, st: Any, q: Array, step: Step) -> PartialAttention:
        self._check_window(step.window)
        exact = self._attend_kept(st, q, step)
        low = self.store.attend_chunk(st.low, q, None, logits=step.logits)
        waiting = st.pending
        pending = attend_zone(q, waiting.k, waiting.v, None, waiting.count, logits=step.logits)
        return merge(exact, low, pending)

    def full_rows(self, st: Any) -> Array:
        return (st.pending.count == self.chunk) & (st.low.count + self.chunk <= st.low.slots)

    def flush(self, st: Any) -> MixedState:
        count = jnp.where(self.full_rows(st), self.chunk, 0)
        low = self.store.append(st.low, st.pending.k, st.pending.v, count)
        return replace(st, low=low, pending=replace(st.pending, count=st.pending.count - count))

    # ---------------------------------------------------------------------------------------------------------- parts

    def _settled(
        self, st: Any, valid: Array, takes: Array, leaving: Callable[[], tuple[Array, Array]]
    ) -> MixedState:
        """Stores the tokens that a prompt has made unimportant: whole chunks of pending and
        leaving ones, in order.
        """
        slots = st.tokens.slots
        pending_count = st.pending.count
        W = self.chunk
        total = jnp.maximum(st.length - slots, 0) - st.low.count  # pending and leaving tokens
        k, v = (
            jnp.concatenate([a, b], axis=2)
            for a, b in zip((st.pending.k, st.pending.v), leaving(), strict=True)
        )
        room = (st.low.slots - st.low.count) // W
        chunks = jnp.minimum(total // W, room)
        max_chunks = min(k.shape[2] // W, st.low.slots // W)

        def line(place: Array) -> tuple[Array, Array]:
            """Tokens at places i32[B, X] of the line of pending and leaving ones."""
            source = jnp.where(
                place < pending_count[:, None], place, W + place - pending_count[:, None]
            )
            source = jnp.minimum(source, k.shape[2] - 1)[:, None, :, None]
            return jnp.take_along_axis(k, source, axis=2), jnp.take_along_axis(
                v, source, axis=2
            )

        low = st.low
        if max_chunks > 0:
            low = self.store.append(
                low, *line(jnp.arange(max_chunks * W, dtype=jnp.int32)[None]), chunks * W
            )
        left = total - chunks * W
        valid = (jnp.arange(W, dtype=jnp.int32)[None] < left[:, None])[:, None]
        rest_k, rest_v = (
            keep_valid(a, valid)
            for a in line(chunks[:, None] * W + jnp.arange(W, dtype=jnp.int32)[None])
        )
        pending = Block(rest_k, rest_v, jnp.minimum(left, W))
        return self._with_next(
            replace(st, low=low, pending=pending, dropped=st.dropped | (left > W))
        )

    def _slot(self, st: Any, end: Array, step: Step | None) -> Array:
        return jnp.where(
            (st.tokens.count < st.tokens.slots)[:, None], st.tokens.count[:, None], st.next
        )

    def _with_next(self, st: MixedState) -> MixedState:
        """The state with a copy of the token that leaves next. If an update read that token
        from the slots that it then writes, XLA would copy the slots."""
        slot = self._to_evict(
            st, jnp.broadcast_to(self._valid(st), st.position.shape), st.length + 1
        )
        k, v = (
            jnp.take_along_axis(a, slot[:, :, None, None], axis=2)
            for a in (st.tokens.k, st.tokens.v)
        )
        return replace(st, next=slot, next_k=k, next_v=v)

    def _check_window(self, window: int | None) -> None:
        if window is not None:
            raise ValueError(
                f"Mixed stores tokens in the order in which they left, so it cannot serve a sliding window of {window};"
                " use kivi, or kvjax.Compressed()"
            )
