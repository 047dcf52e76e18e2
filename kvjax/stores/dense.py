"""Keys and values, unchanged, in device memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from kvjax import ops
from kvjax.numerics.blocks import Block, empty_block, put
from kvjax.numerics.partial import PartialAttention
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.ops.chunk import attend_zone
from kvjax.spec import CacheSpec
from kvjax.stores.store import Store


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

    def attend_chunk(self, st: Block, q: Array, start: Array | None, *, scale: float) -> PartialAttention:
        return attend_zone(q, st.k, st.v, start, st.count, scale=scale)

    def attend_slots(self, st: Block, q: Array, selection: Selection, *, scale: float) -> PartialAttention:
        return ops.attend_slots(q, st.k, st.v, selection, scale=scale)

    def attend_zones(
        self, st: Block, q: Array, selection: Selection | PackedSelection, *zones: Any, **logits: Any
    ) -> tuple[Any, Block]:
        return ops.attend_zones(q, st.k, st.v, selection, *zones, **logits), st

    def attend_zones_part(self, st: Block, *zones: Any, scale: float) -> PartialAttention:
        part: PartialAttention = self.attend_zones(st, *zones, scale=scale, part=True)[0]
        return part
