"""Every token, attended by every query."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.blocks import Block, empty_block, put
from kvjax.caches.policy import Info, chunk_starts, lowest_visible
from kvjax.partial import PartialAttention, Span
from kvjax.prompt import attend_zone
from kvjax.spec import CacheSpec
from kvjax.stores import Dense


@register_dataclass
@dataclass(frozen=True)
class FullState:
    tokens: Block  # [B, K, capacity, D], slot = position
    overflow: Array  # bool[B] a token of this row was dropped

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.tokens.count


@dataclass(frozen=True)
class Full:
    """Keeps every token and attends to all of them: ordinary KV-cache attention, and the yardstick."""

    def init(self, spec: CacheSpec) -> FullState:
        return FullState(empty_block(spec, spec.capacity), jnp.zeros(spec.batch, bool))

    def prefill(self, st: FullState, k: Array, v: Array, lengths: Array) -> FullState:
        overflow = st.overflow | (st.length + lengths > st.tokens.slots)
        return FullState(put(st.tokens, k, v, lengths), overflow)

    def update(self, st: FullState, k: Array, v: Array, active: Array) -> FullState:
        (tokens,), overflow = ops.put_token([st.tokens], k, v, active, st.overflow)
        return FullState(tokens, overflow)

    def attend(
        self, st: FullState, q: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, FullState, Info]:
        # Values past count are finite: zeros, or tokens of a row that was replaced.
        span = Span(st.tokens.k, st.tokens.v, lowest_visible(st.length - 1, window), st.length)
        out = ops.attend_span(q, span, scale=scale)
        attended = span.size.astype(jnp.float32)[:, None]
        position = jnp.arange(st.tokens.slots, dtype=jnp.int32)[None]
        positions = jnp.where((position >= span.start[:, None]) & (position < span.stop[:, None]), position, -1)
        positions = jnp.broadcast_to(positions[:, None, None], (*q.shape[:2], 1, st.tokens.slots))
        info = Info(jnp.broadcast_to(attended, q.shape[:2]), None, positions=positions)
        return out, st, info

    def attend_stored(self, st: FullState, q: Array, *, scale: float, window: int | None = None) -> PartialAttention:
        start = chunk_starts(st.length, q.shape[3], window)
        return attend_zone(q, st.tokens.k, st.tokens.v, start, st.length, scale=scale)

    def full_rows(self, st: FullState) -> None:
        return None

    def flush(self, st: FullState) -> FullState:
        return st

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return Dense().bytes_per_token(spec)
