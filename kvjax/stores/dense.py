"""Keys and values, unchanged, in device memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.blocks import Block, empty_block, put
from kvjax.numerics.partial import Logits, PartialAttention, Span, merge, merge_sinks
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.ops.chunk import attend_zone
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores.store import Store

SPANS = 32  # queries, each from a slot of its own on, that read all slots together
TOGETHER = 16  # queries of a step that the kernel `attend_span` takes


@dataclass(frozen=True)
class Dense(Store):
    """Keeps keys and values unchanged in device memory, [B, K, S, D].

    A selection always has `together` tokens that follow each other, from a multiple of that
    many on, as a selector of pages selects them. A TPU then reads them at once: it takes as
    long to begin to read 256 bytes as to read several KiB.
    """

    # How a selection is read, not what is stored: a save has no note of it.
    together: int = field(default=1, kw_only=True, metadata={"saved": False})

    takes_steps = True

    def __post_init__(self) -> None:
        keep_ints(self, together=1)

    def init(self, spec: CacheSpec, slots: int) -> Block:
        return empty_block(spec, slots)

    def append(self, st: Block, k: Array, v: Array, count: Array) -> Block:
        return put(st, k, v, count)

    def gather(self, st: Block, selection: Selection) -> tuple[Array, Array]:
        return ops.gather_slots(st.k, st.v, selection)

    def truncate(self, st: Block, count: Array) -> Block:
        return replace(st, count=count)

    def attend(self, st: Block, q: Array, start: Array, *, logits: Logits) -> PartialAttention:
        steps = next(
            n
            for n in range(1, q.shape[2] + 1)
            if q.shape[2] % n == 0 and q.shape[2] // n <= TOGETHER
        )
        return self._attend_from(st, q, start, steps, logits)

    def attend_with(
        self,
        st: Block,
        q: Array,
        start: Array,
        recent: Span,
        sink: Span | None,
        *,
        logits: Logits,
        sinks: Array | None = None,
        part: bool = False,
    ) -> Any:
        steps = recent.stop.shape[1] if recent.stop.ndim == 2 else 1
        history = self._attend_from(st, q, start, steps, logits)
        if steps > 1:
            # A product takes the queries of all steps, so that each zone is read once.
            zones = [_by_step(zone, steps) for zone in (recent, sink) if zone is not None]
            whole = merge(
                history, *(ops.attend_span(q, zone, logits=logits, part=True) for zone in zones)
            )
        else:
            # One kernel reads what is beside the history: as slots of a step that selects none.
            nothing = jnp.zeros((*q.shape[:2], steps, 1), jnp.int32)
            beside = ops.attend_zones(
                q,
                recent.k,
                recent.v,
                Selection(nothing, nothing > 0),
                recent,
                sink,
                recent.k.shape[2],
                logits=logits,
                part=True,
            )
            whole = merge(history, beside)
        return whole if part else merge_sinks(whole, sinks).out.astype(q.dtype)

    def _attend_from(
        self, st: Block, q: Array, start: Array, steps: int, logits: Logits
    ) -> PartialAttention:
        """`attend` of queries that come as those of several steps, which a kernel takes by the
        product, and which all see the same slots.
        """
        stop = st.count
        if steps > 1:
            start = start[:, None]
            stop = jnp.broadcast_to(stop[:, None], (stop.shape[0], steps))
        part: PartialAttention = ops.attend_span(
            q, Span(st.k, st.v, start, stop), logits=logits, part=True
        )
        return part

    def attend_chunk(
        self, st: Block, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        B, K, G, T, D = q.shape
        if start is None or T > SPANS:
            return attend_zone(q, st.k, st.v, start, st.count, logits=logits)
        span = Span(st.k, st.v, start, jnp.broadcast_to(st.count[:, None], start.shape))
        # The tokens are to the kernel the steps of a row: it takes the queries of each together.
        by_token = jnp.swapaxes(q, 2, 3).reshape(B, K, T * G, D)
        part = ops.attend_span(by_token, span, logits=logits, part=True)

        def by_head(x: Array) -> Array:
            """[B, K, T*G, ...] as [B, K, G*T, ...]."""
            rest = x.shape[3:]
            split = x.reshape(B, K, T, G, *rest)
            return jnp.swapaxes(split, 2, 3).reshape(B, K, G * T, *rest)

        return PartialAttention(by_head(part.out), by_head(part.lse))

    def attend_slots(
        self, st: Block, q: Array, selection: Selection, *, logits: Logits
    ) -> PartialAttention:
        return ops.attend_slots(q, st.k, st.v, selection, logits=logits)

    def attend_zones(
        self,
        st: Block,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> tuple[Array, Block]:
        out: Array = ops.attend_zones(
            q,
            st.k,
            st.v,
            selection,
            recent,
            sink,
            local,
            sinks=sinks,
            logits=logits,
            together=self.together,
        )
        return out, st

    def attend_zones_part(
        self,
        st: Block,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
    ) -> PartialAttention:
        part: PartialAttention = ops.attend_zones(
            q, st.k, st.v, selection, recent, sink, local, logits=logits, part=True
        )
        return part


def _by_step(zone: Span, steps: int) -> Span:
    """A zone with a span of its own for each step."""
    rows = zone.k.shape[0]

    def of_each(x: Array) -> Array:
        return jnp.broadcast_to(x.reshape(rows, -1), (rows, steps))

    return zone._replace(start=of_each(zone.start), stop=of_each(zone.stop))
