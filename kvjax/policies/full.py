"""Full attention: every token is kept, and every query attends to all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.numerics.blocks import Block, empty_block, put, take_rows
from kvjax.numerics.partial import PartialAttention, Span, merge_sinks
from kvjax.ops.chunk import attend_zone
from kvjax.policies.policy import (
    Info,
    Policy,
    Step,
    chunk_starts,
    heads_as_steps,
    in_range,
    lowest_visible,
    steps_as_heads,
)
from kvjax.sharding.context import Axis, Stripes, merge_chunk, merge_parts
from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class FullState:
    """The tokens of each row, in order."""

    tokens: Block  # [B, K, capacity, D], slot = position
    overflow: Array  # bool[B] a token of this row was dropped

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.tokens.count


class AroundFull:
    """A base of states that keep all tokens in their field `full`."""

    full: FullState

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.full.length

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return self.full.overflow


@dataclass(frozen=True)
class Full(Policy):
    """Keeps every token and attends to all of them: an ordinary KV cache, the baseline for all
    other policies.
    """

    takes_steps = True
    takes_sinks = True
    takes_exact = True  # as every step
    shares_prefixes = True
    reversible = True

    def init(self, spec: CacheSpec) -> FullState:
        return FullState(empty_block(spec, spec.capacity), jnp.zeros(spec.batch, bool))

    def prefill(self, st: FullState, k: Array, v: Array, lengths: Array) -> FullState:
        overflow = st.overflow | (st.length + lengths > st.tokens.slots)
        return FullState(put(st.tokens, k, v, lengths), overflow)

    def update(self, st: FullState, k: Array, v: Array, active: Array) -> FullState:
        (tokens,), overflow = ops.put_token([st.tokens], k, v, active, st.overflow)
        return FullState(tokens, overflow)

    def store_steps(self, st: FullState, k: Array, v: Array, count: Array) -> FullState:
        (tokens,), overflow = ops.put_tokens([st.tokens], k, v, count, st.overflow)
        return FullState(tokens, overflow)

    def attend(self, st: FullState, q: Array, step: Step) -> tuple[Array, FullState, Info]:
        if step.lengths is not None:
            return self._attend_steps(st, q, step.lengths, step)
        # Values past count are finite: zeros, or tokens of a row that was replaced.
        span = self._span(st, step.window)
        return self._attend_span(st, q, span, step), st, self._info(st, span)

    def _attend_span(self, st: FullState, q: Array, span: Span, step: Step) -> Array:
        """Attention [B, K, T*G, D] of q [B, K, T*G, D] of T steps over a span of the row."""
        out: Array = ops.attend_span(q, span, step.sinks, logits=step.logits)
        return out

    def _attend_steps(
        self, st: FullState, q: Array, lengths: Array, step: Step
    ) -> tuple[Array, FullState, Info]:
        """Each step sees the tokens up to its own: the same arrays with a smaller length, in
        one pass over them. Rows that take none of the steps read nothing.
        """
        k = st.tokens.k
        v = st.tokens.v
        stop = lengths.T
        if step.active is not None:
            stop = jnp.where(step.active[:, None], stop, 0)
        # Without a window, one for all steps.
        start = lowest_visible((stop if step.window else stop[:, :1]) - 1, step.window)
        out = self._attend_span(st, steps_as_heads(q), Span(k, v, start, stop), step)

        def info(length: Array) -> Info:
            state = self._shortened(st, length)
            return self._info(state, self._span(state, step.window))

        return heads_as_steps(out, q.shape[3]), st, jax.vmap(info)(lengths)

    def _span(self, st: FullState, window: int | None) -> Span:
        return Span(st.tokens.k, st.tokens.v, lowest_visible(st.length - 1, window), st.length)

    def _info(self, st: FullState, span: Span) -> Info:
        """The `Info` of a step that reads `span`, whose slots are those of the whole row."""
        heads = st.tokens.k.shape[:2]
        slots = self._slots(st)
        slot = lax.broadcasted_iota(jnp.int32, (span.stop.shape[0], slots), 1)
        positions = jnp.where(
            (slot >= span.start[:, None]) & (slot < span.stop[:, None]), slot, -1
        )
        attended = lax.broadcast_in_dim(
            span.size.astype(jnp.float32), (span.stop.shape[0], heads[1]), (0,)
        )
        return Info(
            attended,
            None,
            positions=lax.broadcast_in_dim(positions, (*heads, 1, slots), (0, 3)),
        )

    def attend_stored(self, st: FullState, q: Array, step: Step) -> PartialAttention:
        start = chunk_starts(st.length, q.shape[3], step.window)
        tokens = st.tokens
        return attend_zone(q, tokens.k, tokens.v, start, st.length, logits=step.logits)

    def free(self, st: FullState) -> Array:
        return self._slots(st) - st.length

    def earliest(self, st: FullState) -> Array:
        return jnp.zeros_like(st.length)

    def rollback(self, st: FullState, lengths: Array) -> FullState:
        lengths, outside = in_range(lengths, self.earliest(st), st.length)
        return replace(self._shortened(st, lengths), overflow=st.overflow | outside)

    def truncate(self, st: FullState, lengths: Array) -> FullState:
        """As `rollback`; and values past the new lengths become 0, as after a shorter prompt. A
        step gives them no weight, but 0 * NaN is NaN, and a model may have stored that.
        """
        cut = self.rollback(st, lengths)
        own = self._own(cut)
        held = jnp.arange(own.slots, dtype=jnp.int32)[None] < own.count[:, None]
        v = jnp.where(held[:, None, :, None], own.v, jnp.zeros((), own.v.dtype))
        return replace(cut, tokens=replace(cut.tokens, v=v))

    def _own(self, st: FullState) -> Block:
        """The tokens that this device holds."""
        return st.tokens

    def _shortened(self, st: FullState, lengths: Array) -> FullState:
        return replace(st, tokens=replace(st.tokens, count=lengths))

    def _slots(self, st: FullState) -> int:
        return st.tokens.slots

    def stored(self, st: FullState) -> tuple[Array, Array, Array]:
        """Keys and values [B, K, capacity, D] in order of position, and lengths i32[B]."""
        return st.tokens.k, st.tokens.v, st.length

    def over_context(self, axis: Axis, parts: int) -> StripedFull:
        return StripedFull(Stripes(axis, parts, tokens=1))

    def stripes_per_device(self, spec: CacheSpec, parts: int) -> int:
        return spec.capacity // parts


@dataclass(frozen=True)
class StripedFull(Full):
    """`Full` on one device of a context axis: it stores its stripes, and attends to the tokens
    of all devices.

    The state's `count` is that of the whole row, its arrays are those of the device.
    """

    stripes: Stripes  # of one token each

    def init(self, spec: CacheSpec) -> FullState:
        parts = self.stripes.parts
        if spec.capacity % parts:
            raise ValueError(
                f"Placement(context={self.stripes.axis!r}) cannot split a capacity of {spec.capacity} tokens evenly "
                f"over {parts} devices; use capacity={spec.capacity // parts * parts + parts}"
            )
        return FullState(empty_block(spec, spec.capacity // parts), jnp.zeros(spec.batch, bool))

    def prefill(self, st: FullState, k: Array, v: Array, lengths: Array) -> FullState:
        before = st.length
        own = self._own(st)
        after = jnp.minimum(before + lengths, self._slots(st))
        slots = (
            own.count[:, None]
            + jnp.arange(self.stripes.max_tokens(k.shape[2]), dtype=jnp.int32)[None]
        )
        source = self.stripes.place(slots) - before[:, None]
        own = put(
            own,
            take_rows(k, source),
            take_rows(v, source),
            self.stripes.count_own(after) - own.count,
        )
        return FullState(replace(own, count=after), st.overflow | (before + lengths > after))

    def update(self, st: FullState, k: Array, v: Array, active: Array) -> FullState:
        _, here = self.stripes.slot(st.length)
        fits = active & (st.length < self._slots(st))
        (own,), _ = ops.put_token([self._own(st)], k, v, fits & here, st.overflow)
        return FullState(
            replace(own, count=st.length + fits.astype(jnp.int32)),
            st.overflow | (active & ~fits),
        )

    def _attend_span(self, st: FullState, q: Array, span: Span, step: Step) -> Array:
        """One pass over this device's tokens of the span, and one exchange, for all steps."""
        start = self.stripes.count_own(span.start)
        own = span._replace(start=start, stop=self.stripes.count_own(span.stop))
        part = ops.attend_span(q, own, logits=step.logits, part=True)
        whole = merge_sinks(merge_parts(part, self.stripes.axis), step.sinks)
        return whole.out.astype(q.dtype)

    def attend_stored(self, st: FullState, q: Array, step: Step) -> PartialAttention:
        start = chunk_starts(st.length, q.shape[3], step.window)
        start = None if start is None else self.stripes.count_own(start)
        own = self._own(st)
        part = attend_zone(q, own.k, own.v, start, own.count, logits=step.logits)
        return merge_chunk(part, self.stripes.axis)

    def store_steps(self, st: FullState, k: Array, v: Array, count: Array) -> FullState:
        return self.prefill(st, k, v, count)

    def _own(self, st: FullState) -> Block:
        return replace(st.tokens, count=self.stripes.count_own(st.length))

    def _slots(self, st: FullState) -> int:
        return st.tokens.slots * self.stripes.parts
