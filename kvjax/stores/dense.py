"""Keys and values, unchanged, in device memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.blocks import Block, empty_block, put
from kvjax.numerics.partial import PartialAttention, Span
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.ops.chunk import attend_zone
from kvjax.spec import CacheSpec
from kvjax.stores.store import Store

SPANS = 32  # queries, each from a slot of its own on, that read all slots together


@dataclass(frozen=True)
class Dense(Store):
    """Keeps keys and values unchanged in device memory, [B, K, S, D]."""

    takes_steps = True

    def init(self, spec: CacheSpec, slots: int) -> Block:
        return empty_block(spec, slots)

    def append(self, st: Block, k: Array, v: Array, count: Array) -> Block:
        return put(st, k, v, count)

    def gather(self, st: Block, selection: Selection) -> tuple[Array, Array]:
        return ops.gather_slots(st.k, st.v, selection)

    def truncate(self, st: Block, count: Array) -> Block:
        return replace(st, count=count)

    def attend_chunk(
        self, st: Block, q: Array, start: Array | None, *, scale: float
    ) -> PartialAttention:
        B, K, G, T, D = q.shape
        if start is None or T > SPANS:
            return attend_zone(q, st.k, st.v, start, st.count, scale=scale)
        span = Span(st.k, st.v, start, jnp.broadcast_to(st.count[:, None], start.shape))
        part = ops.attend_span(
            jnp.swapaxes(q, 2, 3).reshape(B, K, T * G, D), span, scale=scale, part=True
        )
        by_head = (jnp.swapaxes(x.reshape(B, K, T, G, *x.shape[3:]), 2, 3) for x in part)
        return PartialAttention(*(x.reshape(B, K, G * T, *x.shape[4:]) for x in by_head))

    def attend_slots(
        self, st: Block, q: Array, selection: Selection, *, scale: float
    ) -> PartialAttention:
        return ops.attend_slots(q, st.k, st.v, selection, scale=scale)

    def attend_zones(
        self,
        st: Block,
        q: Array,
        selection: Selection | PackedSelection,
        *zones: Any,
        **logits: Any,
    ) -> tuple[Any, Block]:
        return ops.attend_zones(q, st.k, st.v, selection, *zones, **logits), st

    def attend_zones_part(self, st: Block, *zones: Any, scale: float) -> PartialAttention:
        part: PartialAttention = self.attend_zones(st, *zones, scale=scale, part=True)[0]
        return part
