"""Zones: sink, history and recent block, which `Retrieval` and `Compressed` share.

A row's first `sink` tokens stay in the sink. All others enter the recent block, and leave it in
chunks for the history, which a store holds. So each token lies in exactly one zone:

    sink | history (store) | recent block
         | slots 0 ... S-1 | slots S ... S+R-1

Three numbers name a token. Its *position* is that in the text, its *place* the position less
the row's sink, and its *slot* says where it is stored now, as above. A selection names slots,
because kernels read slots; reports and laws need positions. `Zoned.positions` gives the
position of a slot, `lowest_slot` the first slot of a zone at or past a position, and a
`Demotion` the places of tokens that leave the recent block in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.memory import computed_last
from kvjax.numerics.blocks import (
    Block,
    empty_block,
    put,
    put_first,
    take_places,
    take_rows,
    whole_units,
)
from kvjax.numerics.partial import PartialAttention, Span, keep_valid, merge
from kvjax.numerics.selection import PackedSelection, Selection, unpack
from kvjax.ops.chunk import attend_zone
from kvjax.policies.policy import (
    Info,
    Policy,
    Step,
    attend_in_turn,
    heads_as_steps,
    in_range,
    lowest_visible,
    steps_as_heads,
)
from kvjax.sharding.context import Axis, Stripes
from kvjax.sharding.context.stores import split_store
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores import Store
from kvjax.stores.demotion import Demotion
from kvjax.validation import check_verbs

MOST_EMPTY = 16  # times the capacity that a recent block may have


@register_dataclass
@dataclass(frozen=True)
class ZonedState:
    """The tokens of each row by zone, and the selector's index of the history."""

    # [B, K, sink, D] the first tokens of a row; None if the policy keeps none
    sink: Block | None
    store: Any  # the history
    index: Any  # what the selector knows of the history; () without a selector
    recent: Block  # [B, K, R, D] the newest tokens, in order of arrival; the demotion sets R
    overflow: Array  # bool[B] a token of this row was dropped

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.offset_recent + self.recent.count

    @property
    def offset_store(self) -> Array:
        """i32[B] tokens before the history."""
        return jnp.zeros_like(self.recent.count) if self.sink is None else self.sink.count

    @property
    def offset_recent(self) -> Array:
        """i32[B] tokens before the recent block, if tokens leave in order of arrival."""
        return self.offset_store + self.store.count


class Visible(NamedTuple):
    """The tokens that the query of a row's newest token may attend to: all, or those of a
    sliding window.

    T steps at once have no window; length and the spans of sink and recent block then have a
    step axis.
    """

    length: Array  # i32[B] or i32[B, T] tokens held
    first: Array | None  # i32[B] the lowest visible position; None if all tokens are visible
    window: int | None  # tokens that a query sees; None if all
    store: Array  # i32[B] the first visible slot of the history
    recent: Span
    sink: Span | None


class Zoned(Policy):
    """Stores tokens in zones. A subclass is a dataclass with these fields, and says what a step
    attends to.
    """

    store: Store
    sink: int
    local: int
    demote: Demotion

    takes_sinks = True
    takes_steps = True
    reversible = True
    takes_exact = True

    def __post_init__(self) -> None:
        keep_ints(self, sink=0, local=1)
        where = f"{type(self).__name__}(store=...)"
        check_verbs(where, self.store, "a store", ("init", "append"), "kvjax.Dense()")
        check_verbs(
            f"{type(self).__name__}(demote=...)",
            self.demote,
            "a demotion",
            ("slots", "leaving", "staying", "place"),
            "kvjax.Fifo(leave=256)",
            fields=("leave", "ordered"),
            protocol="kvjax.stores.Demotion",
        )

    @property
    def rounds(self) -> bool:
        return not self.store.lossless

    def init(self, spec: CacheSpec) -> ZonedState:
        self.store.check(spec, self.demote.leave)
        return ZonedState(
            sink=empty_block(spec, self.sink) if self.sink else None,
            store=self.store.init(spec, self._slots(spec)),
            index=(),
            recent=empty_block(spec, self._recent_slots(spec)),
            overflow=jnp.zeros(spec.batch, bool),
        )

    def _recent_slots(self, spec: CacheSpec) -> int:
        """Slots of the recent block. Raises ValueError if nearly all of them would stay empty."""
        slots = self.demote.slots(self.local)
        if self.sink + slots > MOST_EMPTY * max(spec.capacity, 4096):
            raise ValueError(
                f"{type(self).__name__}(sink={self.sink}, local={self.local}, demote={self.demote!r}) makes room for "
                f"{self.sink + slots} tokens beside the history, in a cache of {spec.capacity}; make them smaller"
            )
        return slots

    @property
    def _stay(self) -> int:
        """Tokens that remain in a full recent block after a flush.

        Not the length of `Demotion.staying`: that list may be as long as a setting which `init`
        refuses.
        """
        return self.demote.slots(self.local) - self.demote.leave

    def _slots(self, spec: CacheSpec) -> int:
        """Slots of the history: whole chunks."""
        chunk = self.demote.leave
        stay = self._stay
        return max(whole_units(spec.capacity - self.sink - stay, chunk), chunk)

    def append(self, st: ZonedState, k: Array, v: Array, count: Array) -> ZonedState:
        """Adds the first `count` i32[B] tokens of k, v [B, K, T, D] to the history, in whole
        chunks.
        """
        return replace(st, store=self.store.append(st.store, k, v, count))

    # ------------------------------------------------------------------------------------------------------- storing

    def update(self, st: ZonedState, k: Array, v: Array, active: Array) -> ZonedState:
        zones = [st.recent] if st.sink is None else [st.sink, st.recent]
        zones, overflow = ops.put_token(zones, k, v, active, st.overflow)
        return self._with_zones(st, zones, overflow)

    def prefill(self, st: ZonedState, k: Array, v: Array, lengths: Array) -> ZonedState:
        dtype = st.recent.k.dtype
        k = k.astype(dtype)
        v = v.astype(dtype)
        sink = st.sink
        to_sink = jnp.zeros_like(lengths)
        if sink is not None:
            to_sink = jnp.minimum(sink.slots - sink.count, lengths)
            sink = put(sink, k, v, to_sink)

        # The recent block and the new tokens are one line of tokens per row. Its front goes to
        # the history, as updates and flushes token by token would have moved it, and the rest
        # is the new block.
        chunk = self.demote.leave
        slots = st.recent.slots
        was_recent = st.recent.count
        total = was_recent + lengths - to_sink
        room = self.store.free(st.store) // chunk
        chunks = jnp.clip((total - self._stay) // chunk, 0, room)
        moved = chunks * chunk

        def from_line(number: Array) -> tuple[Array, Array]:
            """Keys and values of the tokens with the numbers i32[B or 1, X] in the line."""
            among_new = slots + number - was_recent[:, None] + to_sink[:, None]
            source = jnp.where(number < was_recent[:, None], number, among_new)
            return (
                take_rows(jnp.concatenate([st.recent.k, k], axis=2), source),
                take_rows(jnp.concatenate([st.recent.v, v], axis=2), source),
            )

        # Chunk by chunk, in the order in which flushes would take tokens from the block.
        longest = (slots + k.shape[2] - self._stay) // chunk
        max_chunks = max(min(longest, st.store.slots // chunk), 0)
        if max_chunks > 0:
            history_slots = jnp.arange(max_chunks * chunk, dtype=jnp.int32)
            front_k, front_v = from_line(self._place_of(history_slots)[None])
            st = self.append(st, front_k, front_v, moved)

        # The tokens that stay, in the order that those flushes would leave them in.
        recent_slots = jnp.arange(slots, dtype=jnp.int32)[None]
        rest_k, rest_v = from_line(self.demote.place(chunks[:, None], recent_slots))
        left = total - moved
        # Zeros past count, where padding of the prompt may have been copied.
        valid = (recent_slots < left[:, None])[:, None]
        recent = Block(
            keep_valid(rest_k, valid), keep_valid(rest_v, valid), jnp.minimum(left, slots)
        )
        return replace(st, sink=sink, recent=recent, overflow=st.overflow | (left > slots))

    def full_rows(self, st: ZonedState) -> Array:
        full = st.recent.count >= st.recent.slots
        return full & (self.demote.leave <= self.store.free(st.store))

    def flush(self, st: ZonedState) -> ZonedState:
        full = self.full_rows(st)
        recent = st.recent

        # The chunk that leaves goes to the history of full rows.
        leaving = self.demote.leaving(self.local)
        count = jnp.where(full, len(leaving), 0)
        leaving_k = take_places(recent.k, leaving)
        leaving_v = take_places(recent.v, leaving)
        after = self.append(st, leaving_k, leaving_v, count)

        # The tokens that stay move to the front of the block.
        staying = self.demote.staying(self.local)

        def front_of(a: Array) -> Array:
            first = a[:, :, : len(staying)]
            return jnp.where(full[:, None, None, None], take_places(a, staying), first)

        front = [front_of(recent.k), front_of(recent.v)]
        # In place, once all else is read; XLA would otherwise copy the block twice in every
        # step, full or not.
        front, after = computed_last(front, after, st)
        k = put_first(recent.k, front[0])
        v = put_first(recent.v, front[1])
        return replace(after, recent=Block(k, v, recent.count - count))

    # ---------------------------------------------------------------------------------------------- several tokens

    def store_steps(self, st: ZonedState, k: Array, v: Array, count: Array) -> ZonedState:
        zones = [st.recent] if st.sink is None else [st.sink, st.recent]
        zones, overflow = ops.put_tokens(zones, k, v, count, st.overflow)
        return self._with_zones(st, zones, overflow)

    @staticmethod
    def _with_zones(st: ZonedState, zones: Sequence[Block], overflow: Array) -> ZonedState:
        """`st` with another recent block, the last of `zones`, and sink, if it has one."""
        sink = None if st.sink is None else zones[0]
        return replace(st, sink=sink, recent=zones[-1], overflow=overflow)

    def free(self, st: ZonedState) -> Array:
        sink = 0 if st.sink is None else st.sink.slots - st.sink.count
        return sink + st.recent.slots - st.recent.count

    def earliest(self, st: ZonedState) -> Array:
        """The length at which the history last grew; 0 while it is empty."""
        return jnp.where(st.store.count > 0, st.offset_recent + self._stay, 0)

    def rollback(self, st: ZonedState, lengths: Array) -> ZonedState:
        lengths, outside = in_range(lengths, self.earliest(st), st.length)
        return replace(self.shortened(st, lengths), overflow=st.overflow | outside)

    def shortened(self, st: ZonedState, lengths: Array) -> ZonedState:
        """`st` cut to its first `lengths` i32[B] tokens, at least `earliest`. No array moves."""
        sink = st.sink
        if sink is not None:
            sink = replace(sink, count=jnp.minimum(lengths, sink.slots))
            lengths = lengths - sink.count
        return replace(st, sink=sink, recent=replace(st.recent, count=lengths - st.store.count))

    def truncate(self, st: ZonedState, lengths: Array) -> ZonedState:
        """Tokens return from the history to the recent block, where `prefill` would place them."""
        if not self.demote.ordered:
            raise ValueError(
                f"truncate cannot shorten a cache of {self.demote}, which forgets the order of tokens; "
                "kvjax.rollback can remove tokens of the recent block"
            )
        lengths, outside = in_range(lengths, jnp.zeros_like(lengths), st.length)
        sink = st.sink
        rest = lengths  # tokens past the sink
        if sink is not None:
            sink = replace(sink, count=jnp.minimum(lengths, sink.slots))
            rest = lengths - sink.count
        chunk = self.demote.leave
        chunks = jnp.clip((rest - self._stay) // chunk, 0, st.store.count // chunk)
        history_count = chunks * chunk
        history = self.store.truncate(st.store, history_count)
        index = self.truncate_index(st.index, history_count)

        # Slot r of the recent block gets the token at place history_count + r, from the history
        # or from the block.
        recent_slots = st.recent.slots
        place = history_count[:, None] + jnp.arange(recent_slots, dtype=jnp.int32)[None]
        left = rest - history_count
        valid = (place - history_count[:, None] < left[:, None])[:, None]

        # A store may gather whole pages only.
        whole = -(-recent_slots // self.store.page) * self.store.page
        slots = history_count[:, None] + jnp.arange(whole, dtype=jnp.int32)[None]
        stored = slots < st.store.count[:, None]
        shape = (*st.recent.k.shape[:2], 1, whole)
        selection = Selection(
            jnp.broadcast_to(jnp.where(stored, slots, 0)[:, None, None], shape),
            jnp.broadcast_to(stored[:, None, None], shape),
        )
        in_history = stored[:, None, :recent_slots, None]

        def moved(gathered: Array, block: Array) -> Array:
            later = take_rows(block, jnp.maximum(place - st.store.count[:, None], 0))
            token = jnp.where(in_history, gathered[:, :, :recent_slots], later)
            return keep_valid(token, valid)

        k, v = self.store.gather(st.store, selection)
        recent = Block(moved(k, st.recent.k), moved(v, st.recent.v), left)
        return replace(
            st,
            sink=sink,
            store=history,
            index=index,
            recent=recent,
            overflow=st.overflow | outside,
        )

    def truncate_index(self, ix: Any, count: Array) -> Any:
        """The index of the first `count` i32[B] tokens of the history."""
        if jax.tree.leaves(ix):
            raise ValueError(
                f"truncate is not implemented for the index of {type(self).__name__}; prefill the shorter prompt "
                "instead"
            )
        return ix

    # -------------------------------------------------------------------------------------------- slots and positions

    def positions(self, st: ZonedState, slots: Array) -> Array:
        """i32[B, ...] positions of `slots` i32[B, ...]: s below S is a slot of the history, S +
        r one of the recent block."""
        by_row = (-1, *(1,) * (slots.ndim - 1))
        sink = st.offset_store.reshape(by_row)
        count = st.store.count.reshape(by_row)
        # The block continues where the history ends: fewer operations than `Demotion.place`.
        if self.demote.ordered:
            of_block = slots - st.store.slots + count
            return sink + jnp.where(slots < st.store.slots, slots, of_block)
        chunks = count // self.demote.leave
        recent = self.demote.place(chunks, jnp.maximum(slots - st.store.slots, 0))
        return sink + jnp.where(slots < st.store.slots, self._place_of(slots), recent)

    def slots_at(self, st: ZonedState, positions: Array) -> Array:
        """The slots i32[B, ...] of `positions` i32[B, ...] past the sink, as `positions` counts
        them, if tokens leave the recent block in order."""
        by_row = (-1, *(1,) * (positions.ndim - 1))
        place = positions - st.offset_store.reshape(by_row)
        count = st.store.count.reshape(by_row)
        return jnp.where(place < count, place, st.store.slots + place - count)

    def _place_of(self, slots: Array) -> Array:
        """The place past the sink of the tokens in slots of the history, counted from the first
        chunk: those of a chunk lie in it in the order of `Demotion.leaving`."""
        leaving = jnp.asarray(self.demote.leaving(self.local), jnp.int32)
        return self.demote.place(slots // self.demote.leave, leaving[slots % self.demote.leave])

    def visible(
        self, st: ZonedState, window: int | None = None, lengths: Array | None = None
    ) -> Visible:
        """The tokens that the query of the newest token may attend to, or those of T steps,
        after each of which a row holds `lengths` i32[T, B] tokens."""
        if lengths is not None:
            return self._visible_steps(st, jnp.moveaxis(lengths, 0, 1))
        first = None
        if window is not None:
            self._require_order(window)
            first = lowest_visible(st.length - 1, window)
        # Values past the counts of recent and sink need no mask: `prefill` and `flush` keep
        # them finite.
        recent_start = lowest_slot(first, st.offset_recent)
        sink = None
        if st.sink is not None:
            sink_start = lowest_slot(first, jnp.zeros_like(st.sink.count))
            sink = Span(st.sink.k, st.sink.v, sink_start, st.sink.count)
        return Visible(
            length=st.length,
            first=first,
            window=window,
            store=lowest_slot(first, st.offset_store),
            recent=Span(st.recent.k, st.recent.v, recent_start, st.recent.count),
            sink=sink,
        )

    @staticmethod
    def _visible_steps(st: ZonedState, lengths: Array) -> Visible:
        """`visible` of T steps with lengths i32[B, T]."""
        start = jnp.zeros((lengths.shape[0], 1), jnp.int32)  # one for all steps
        sink = None
        recent_stop = lengths - st.store.count[:, None]
        if st.sink is not None:
            sink_stop = jnp.minimum(lengths, st.sink.slots)
            sink = Span(st.sink.k, st.sink.v, start, sink_stop)
            recent_stop = recent_stop - sink_stop
        return Visible(
            length=lengths,
            first=None,
            window=None,
            store=jnp.zeros_like(st.store.count),
            recent=Span(st.recent.k, st.recent.v, start, recent_stop),
            sink=sink,
        )

    def _require_order(self, window: int) -> None:
        if not self.demote.ordered:
            raise ValueError(
                f"{self.demote} forgets the order of tokens, so it cannot serve a sliding window of {window}; use "
                f"kivi, or in a policy of your own kvjax.Fifo(leave={self.demote.leave})"
            )

    def attend_all(
        self, st: ZonedState, q: Array, step: Step
    ) -> tuple[Array, ZonedState, Info]:
        """Attends to sink, recent block and the whole history, as the store keeps it: `attend`
        of a policy without a selection, and of all policies if `step.exact`.

        Without a sliding window, T steps see the same history and read it together; to a row
        that takes none of them the cache looks empty, so that nothing of it is read.
        """
        if step.lengths is None:
            seen = self.visible(st, step.window)
            out = self.store.attend_with(
                st.store,
                q,
                seen.store,
                seen.recent,
                seen.sink,
                logits=step.logits,
                sinks=step.sinks,
            )
            return out, st, self._info_of_all(st, step.window)
        if step.window is not None:
            return attend_in_turn(self, self.shortened, st, q, step)
        store = st.store
        lengths = step.lengths
        if step.active is not None:
            store = self.store.with_count(store, jnp.where(step.active, store.count, 0))
            lengths = jnp.where(step.active, lengths, 0)
        seen = self.visible(replace(st, store=store), lengths=lengths)
        out = self.store.attend_with(
            store,
            steps_as_heads(q),
            seen.store,
            seen.recent,
            seen.sink,
            logits=step.logits,
            sinks=step.sinks,
        )

        def info(length: Array) -> Info:
            return self._info_of_all(self.shortened(st, length), None)

        return heads_as_steps(out, q.shape[3]), st, jax.vmap(info)(step.lengths)

    def _info_of_all(self, st: ZonedState, window: int | None) -> Info:
        """The `Info` of a step that attends to all tokens that a window shows."""
        B, K = st.recent.k.shape[:2]
        seen = self.visible(st, window)
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

    def attend_stored(self, st: ZonedState, q: Array, step: Step) -> PartialAttention:
        if step.window is not None:
            self._require_order(step.window)
        first = step.starts(st.length, q.shape[3])

        def start(offset: Array) -> Array | None:
            return None if first is None else lowest_slot(first, offset[:, None])

        history_start = start(st.offset_store)
        parts = [self.store.attend_chunk(st.store, q, history_start, logits=step.logits)]
        zones = [(st.recent, st.offset_recent)]
        if st.sink is not None:
            zones.append((st.sink, jnp.zeros_like(st.recent.count)))
        for zone, offset in zones:
            parts.append(
                attend_zone(q, zone.k, zone.v, start(offset), zone.count, logits=step.logits)
            )
        return merge(*parts)

    # ---------------------------------------------------------------------------------------------- context parallelism

    def stripes(self, axis: Axis, parts: int) -> Stripes:
        """How the history is split over devices: every device takes one stripe of each chunk
        that leaves the recent block."""
        chunk = self.demote.leave
        if chunk % parts:
            raise ValueError(
                f"Placement(context={axis!r}) cannot split chunks of {chunk} tokens evenly over {parts} devices; make "
                f"{self.demote} leave a multiple of {parts} (`chunk` of a preset)"
            )
        return Stripes(axis, parts, chunk // parts)

    def over_context(self, axis: Axis, parts: int) -> Any:
        stripes = self.stripes(axis, parts)
        return dataclasses.replace(self, store=split_store(self.store, stripes))  # type: ignore[type-var]

    def stripes_per_device(self, spec: CacheSpec, parts: int) -> int:
        return self._slots(spec) // self.demote.leave


class SelectedZones(Zoned):
    """Zones in which a step attends to sink, local window and a selection, whichever layer
    selected it.
    """

    def attend_selected(
        self, st: ZonedState, q: Array, selection: Selection | PackedSelection, step: Step
    ) -> tuple[Array, ZonedState, Info]:
        """Attention [B, K, G, D] of q [B, K, G, D] over sink, selection and local window; the
        state, and what was read.

        Selected slots below S, the slots of the store, are in the history; S + r is slot r of
        the recent block. The store attends: `Dense`, `TurboQuant`, `HostOffload` and `HotSet` have
        their own `attend_zones`, by one kernel for all zones; others have that of `Store`, which
        merges the zones' parts.
        """
        seen = self.visible(st, step.window)
        out, store = self.store.attend_zones(
            st.store,
            q,
            selection,
            seen.recent,
            seen.sink,
            self.local,
            logits=step.logits,
            sinks=step.sinks,
        )
        st = replace(st, store=store)
        return out, st, self.info(st, seen, unpack(selection))

    def info(
        self, st: ZonedState, seen: Visible, selection: Selection, fresh: Array | None = None
    ) -> Info:
        """The `Info` of a step that attends to sink, local window and `selection`: M + sink +
        local positions.
        """
        length = st.length[:, None]
        first = st.offset_recent[:, None]
        lead = selection.slots.shape[:3]
        sink = lax.broadcasted_iota(jnp.int32, (lead[0], self.sink), 1)
        local = length - self.local + jnp.arange(self.local, dtype=jnp.int32)[None]
        visible = jnp.concatenate([sink < length, local >= first], axis=1)
        beside = jnp.concatenate([sink, local], axis=1)
        if seen.first is not None:
            visible &= beside >= seen.first[:, None]
        shape = (*lead, beside.shape[1])
        beside = lax.broadcast_in_dim(beside, shape, (0, 3))
        visible = lax.broadcast_in_dim(visible, shape, (0, 3))
        positions = jnp.concatenate([self.positions(st, selection.slots), beside], axis=-1)
        positions = jnp.where(
            jnp.concatenate([selection.valid, visible], axis=-1), positions, -1
        )
        attended = jnp.sum(positions >= 0, axis=(2, 3), dtype=jnp.float32) / positions.shape[2]
        return Info(attended, selection, fresh, positions)


def lowest_slot(position: Array | None, offset: Array) -> Array:
    """The first slot at or past `position` in a zone in order, whose slot 0 holds position
    `offset`.

    None means position 0, which costs a step no kernel.
    """
    return jnp.zeros_like(offset) if position is None else jnp.maximum(position - offset, 0)
