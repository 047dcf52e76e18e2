"""Every token kept, a few of them attended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.blocks import Block, empty_block, put, take_rows
from kvjax.caches.policy import Info, chunk_starts, lowest_visible
from kvjax.demotion import Demotion, Fifo, plan
from kvjax.layouts import whole_units
from kvjax.partial import (
    PartialAttention,
    Span,
    attention_logits,
    group_queries,
    keep_valid,
    merge,
    ungroup,
)
from kvjax.prompt import attend_zone
from kvjax.schedules import EveryStep, Recall, Schedule
from kvjax.selection import PackedSelection, Selection, expand_units, reduce_queries, split_selection
from kvjax.selectors import All, Candidates, FusedSelector, Selector
from kvjax.spec import CacheSpec, require_int
from kvjax.stores import Dense, HostOffload, Quantized, Store
from kvjax.validation import check_verbs


@register_dataclass
@dataclass(frozen=True)
class RetrievalState:
    """A token is in exactly one of sink, store and recent, which hold positions in this order."""

    sink: Block | None  # [B, K, sink, D] the first tokens of a row; None if the policy keeps none
    store: Any  # the history; its slot s is position sink + s
    index: Any  # what the selector knows of the history
    recent: Block  # [B, K, R, D] the newest tokens, in order of arrival; R is what the demotion asks for
    schedule: Any  # what the schedule carries between steps
    overflow: Array  # bool[B] a token of this row was dropped

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.offset_recent + self.recent.count

    @property
    def offset_store(self) -> Array:
        """i32[B] position of the history's slot 0."""
        return jnp.zeros_like(self.recent.count) if self.sink is None else self.sink.count

    @property
    def offset_recent(self) -> Array:
        """i32[B] position of the recent block's slot 0."""
        return self.offset_store + self.store.count


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Keeps every token and attends to `budget` of them a step: sink, local window and what the selector finds.

    `budget` counts each token whose keys and values a step reads. Fewer than a chunk of recent tokens wait to be
    indexed beside the `local` ones; they compete with the history by their exact scores (their keys are read for
    that), so a budget of 32 attends to 32 tokens. A row that holds fewer than `dense_below` tokens attends to all of
    them; as shapes are static, every step then gathers room for that many.

    A row's history has capacity - sink - local + 1 slots, rounded down to whole chunks (at least one).
    """

    selector: Selector
    store: Store = Dense()
    budget: int | None = 1024  # None only with the selector All
    sink: int = 4
    local: int = 256
    demote: Demotion = Fifo(leave=256)
    schedule: Schedule = EveryStep()
    dense_below: int = 2048

    def __post_init__(self) -> None:
        for name, at_least in (("sink", 0), ("local", 1), ("dense_below", 0)):
            require_int(f"Retrieval({name}=...)", getattr(self, name), at_least=at_least)
        check_verbs("Retrieval(selector=...)", self.selector, "a selector", ("init", "score"), "kvjax.Fier()")
        check_verbs("Retrieval(store=...)", self.store, "a store", ("init", "append"), "kvjax.Dense()")
        if isinstance(self.selector, All):
            if not isinstance(self.schedule, EveryStep):
                raise ValueError(
                    f"the selector All chooses nothing that {self.schedule} could keep for the next step; leave the "
                    "schedule EveryStep(), or give another selector"
                )
            if self.budget is not None:
                raise ValueError(
                    f"the selector All reads every stored token, so budget={self.budget} cannot hold; "
                    "give budget=None, or another selector"
                )
            return
        if self.budget is None:
            raise ValueError("budget=None needs the selector All; give the tokens to attend to in a step")
        require_int("Retrieval(budget=...)", self.budget, at_least=1)
        if self.budget < self.sink + self.local:
            raise ValueError(
                f"budget={self.budget} is below sink + local = {self.sink} + {self.local}, which every step attends "
                f"to; raise the budget to at least {self.sink + self.local}, or lower sink and local"
            )
        if self.demote.leave % self.selector.unit:
            raise ValueError(
                f"{self.selector} scores pages of {self.selector.unit} tokens, which do not divide the chunk of "
                f"{self.demote.leave}; make {self.demote} leave a multiple of {self.selector.unit}"
            )
        if not isinstance(self.schedule, EveryStep) and self._chosen == 0:
            raise ValueError(
                f"budget={self.budget} leaves nothing beside sink + local = {self.sink} + {self.local} that "
                f"{self.schedule} could reuse; raise it to at least {self.sink + self.local + self.selector.unit}"
            )
        if isinstance(self.store, HostOffload) and self.selector.unit % self.store.page:
            raise ValueError(
                f"{self.store} moves whole pages, but {self.selector} chooses {self.selector.unit} tokens at a time; "
                f"use HostOffload(page={self.selector.unit})"
            )

    def init(self, spec: CacheSpec) -> RetrievalState:
        self.selector.check(spec, self.demote.leave)
        self.store.check(spec, self.demote.leave)
        chunk = self.demote.leave
        stay = len(self.demote.staying(self.local))
        slots = max(whole_units(spec.capacity - self.sink - stay, chunk), chunk)
        st = RetrievalState(
            sink=empty_block(spec, self.sink) if self.sink else None,
            store=self.store.init(spec, slots),
            index=self.selector.init(spec, slots),
            recent=empty_block(spec, self.demote.slots(self.local)),
            schedule=(),
            overflow=jnp.zeros(spec.batch, bool),
        )

        def recall(q: Array) -> Recall:
            selection = _with_mask(self._select(st, q, jnp.zeros_like(st.length), 1.0))
            stored, _ = split_selection(self._flat(selection), st.store.slots)
            return Recall(selection, *self.store.gather(st.store, stored), jnp.zeros(spec.batch, bool))

        q = jax.ShapeDtypeStruct((spec.batch, spec.kv_heads, spec.group, spec.head_dim), spec.dtype)
        return replace(st, schedule=self.schedule.init(spec, lambda: jax.eval_shape(recall, q)))

    # ------------------------------------------------------------------------------------------------------- storing

    def update(self, st: RetrievalState, k: Array, v: Array, active: Array) -> RetrievalState:
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        zones = [st.recent] if st.sink is None else [st.sink, st.recent]
        (*sink, recent), overflow = ops.put_token(zones, k, v, active, st.overflow)
        schedule = self.schedule.arrive(st.schedule, active)
        return RetrievalState(sink[0] if sink else None, st.store, st.index, recent, schedule, overflow)

    def prefill(self, st: RetrievalState, k: Array, v: Array, lengths: Array) -> RetrievalState:
        dtype, slots, chunk = st.recent.k.dtype, st.recent.slots, self.demote.leave
        k, v = (jnp.swapaxes(a, 1, 2).astype(dtype) for a in (k, v))
        T = k.shape[2]
        sink, to_sink = st.sink, jnp.zeros_like(lengths)
        if sink is not None:
            to_sink = jnp.minimum(sink.slots - sink.count, lengths)
            sink = put(sink, k, v, to_sink)

        # What the recent block holds and what is new make one line of tokens a row; some of its front goes to the
        # history, as token by token updates and flushes would have sent it, and the rest is the new block.
        held, total = st.recent.count, st.recent.count + lengths - to_sink
        room = (st.store.slots - st.store.count) // chunk
        stay = len(self.demote.staying(self.local))
        chunks = jnp.clip((total - stay) // chunk, 0, room)
        most = max(min((slots + T - stay) // chunk, st.store.slots // chunk), 0)
        leaving, blocks = plan(self.demote, self.local, most)

        def line(old: Array, new: Array, at: Array) -> Array:
            source = jnp.where(at < held[:, None], at, slots + at - held[:, None] + to_sink[:, None])
            return take_rows(jnp.concatenate([old, new], axis=2), source)

        store, index = st.store, st.index
        moved = chunks * chunk
        if most > 0:
            front = jnp.asarray(leaving.reshape(1, -1))
            hk, hv = (line(a, b, front) for a, b in ((st.recent.k, k), (st.recent.v, v)))
            index = self.selector.append(index, hk, store.count, moved)
            store = self.store.append(store, hk, hv, moved)
        block = jnp.asarray(blocks)[chunks]
        rk, rv = (line(a, b, block) for a, b in ((st.recent.k, k), (st.recent.v, v)))
        left = total - moved
        recent = Block(*self._finite(rk, rv, left), jnp.minimum(left, slots))
        return RetrievalState(sink, store, index, recent, st.schedule, st.overflow | (left > slots))

    @staticmethod
    def _finite(k: Array, v: Array, count: Array) -> tuple[Array, Array]:
        """Zeros past count, where padding of the prompt may have come along."""
        valid = (jnp.arange(k.shape[2])[None] < count[:, None])[:, None]
        return keep_valid(k, valid), keep_valid(v, valid)

    def full_rows(self, st: RetrievalState) -> Array:
        full = st.recent.count >= st.recent.slots
        return full & (st.store.count + self.demote.leave <= st.store.slots)

    def flush(self, st: RetrievalState) -> RetrievalState:
        full = self.full_rows(st)
        leaving, staying = self.demote.leaving(self.local), self.demote.staying(self.local)
        count = jnp.where(full, len(leaving), 0)
        k, v = (a[:, :, leaving] for a in (st.recent.k, st.recent.v))
        index = self.selector.append(st.index, k, st.store.count, count)
        store = self.store.append(st.store, k, v, count)

        def keep(a: Array) -> Array:
            stay = len(staying)
            front = jnp.where(full[:, None, None, None], a[:, :, staying], a[:, :, :stay])
            return jnp.concatenate([front, a[:, :, stay:]], axis=2)

        recent = Block(keep(st.recent.k), keep(st.recent.v), st.recent.count - count)
        place = np.zeros(st.recent.slots, np.int32)
        place[leaving], place[staying] = np.arange(len(leaving)), st.store.slots + np.arange(len(staying))
        left = jnp.asarray(place < st.store.slots)[None]
        schedule = self.schedule.move(
            st.schedule, st.store.slots, full, jnp.asarray(place)[None] + jnp.where(left, st.store.count[:, None], 0)
        )
        return RetrievalState(st.sink, store, index, recent, schedule, st.overflow)

    # ----------------------------------------------------------------------------------------------------- attending

    def attend(
        self, st: RetrievalState, q: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, RetrievalState, Info]:
        B, K = q.shape[0], st.recent.k.shape[1]
        qg = group_queries(q, K)
        self._check_window(window)
        first = None if window is None else lowest_visible(st.length - 1, window)
        from_store, from_recent = _slot_of(first, st.offset_store), _slot_of(first, st.offset_recent)
        selection: Selection | PackedSelection | None = None
        schedule, fresh = st.schedule, None
        # Values past the counts of recent and sink are finite: `prefill` and `flush` see to it, and they need no mask.
        kept = recent = Span(st.recent.k, st.recent.v, from_recent, st.recent.count)
        if not isinstance(self.selector, All):
            recent = kept._replace(start=jnp.maximum(st.recent.count - self.local, from_recent))
        sink = None
        if st.sink is not None:
            sink = Span(st.sink.k, st.sink.v, _slot_of(first, jnp.zeros_like(st.sink.count)), st.sink.count)

        def around(history: PartialAttention, pending: Selection | None) -> Array:
            return ops.attend_beside(history, qg, pending, recent, sink, scale=scale)

        if isinstance(self.selector, All):
            if isinstance(self.store, Quantized):
                coded = st.store.k, st.store.v, from_store, st.store.count
                out = ops.attend_quantized_zones(qg, *coded, recent, sink, scale=scale)
            else:
                out = around(self.store.attend(st.store, qg, from_store, scale=scale), None)
            attended = jnp.maximum(st.store.count - from_store, 0)[:, None, None]
        else:
            found = self._select(st, qg, first, scale)
            choice, schedule = self.schedule.choose(
                st.schedule, qg, st.length, found, partial(self._recall, st, _with_mask(found))
            )
            selection = choice.selection
            if choice.read is None:
                attended = jnp.sum(selection.valid, axis=-1)
                if isinstance(self.store, Dense):
                    k, v = st.store.k, st.store.v
                    out = ops.attend_zones(qg, k, v, selection, kept, sink, self.local, scale=scale)
                else:
                    stored, pending = split_selection(selection, st.store.slots)
                    out = around(self.store.attend_slots(st.store, qg, stored, scale=scale), pending)
            else:
                last, anew, now, reused = choice.read
                fresh, reused = ~reused, reused[..., None, None]
                edge = self._edge(st, last.edge, first)
                selection = self._keep_reused(st, selection, reused, edge, first)
                with_edge = edge[:, None, None, None] & reused  # bool[B, K, 1, 1]
                attended = jnp.sum(selection.valid, axis=-1) + with_edge[..., 0].astype(jnp.int32)
                recalled = _all_of(selection.valid, with_edge)
                at = recalled.slots + jnp.where(now, last.k.shape[2], 0)[..., None, None]
                recalled = recalled._replace(slots=at)
                out = ops.attend_zones(qg, last.k, last.v, recalled, kept, sink, self.local, anew, scale=scale)
        beside = recent.size if sink is None else recent.size + sink.size
        attended = jnp.mean(attended + beside[:, None, None], axis=-1, dtype=jnp.float32)
        state = RetrievalState(st.sink, st.store, st.index, st.recent, schedule, st.overflow)
        chosen = None if selection is None else _with_mask(selection)
        return ungroup(out, q.dtype), state, Info(jnp.broadcast_to(attended, (B, K)), chosen, fresh)

    def select(
        self, st: RetrievalState, q: Array, *, scale: float | None = None, window: int | None = None
    ) -> Selection:
        """What a step with q [B, N, D] would choose beside the sink and the local window.

        Slots below the store's are slots of the history, most relevant first; S + r is slot r of the recent block.
        """
        if isinstance(self.selector, All):
            raise ValueError("the selector All chooses nothing: it reads every stored token")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        first = None if window is None else lowest_visible(st.length - 1, window)
        return _with_mask(self._select(st, group_queries(q, st.recent.k.shape[1]), first, scale, ranked=True))

    def _select(
        self, st: RetrievalState, q: Array, first: Array | None, scale: float, *, ranked: bool = False
    ) -> Selection | PackedSelection:
        """Top units of history and pending tokens together. `first` i32[B] is the lowest visible position; None if all
        are.

        In order of rank where `ranked`, or where the schedule may drop more than the unit that ranks lowest, which else
        comes last.
        """
        unit, group_reduce, slots = self.selector.unit, self.selector.group_reduce, st.store.slots
        from_store, from_recent = _slot_of(first, st.offset_store), _slot_of(first, st.offset_recent)
        queries = reduce_queries(q, group_reduce)

        # Waiting tokens stand in the first slots of the recent block, before the local ones.
        wide = -(-(st.recent.slots - self.local) // unit) * unit
        room = self._most((slots + wide) // unit)
        limit: Array | int = self._chosen  # a number where it is one for all, as an array takes a kernel
        if room * unit != limit:
            limit = jnp.where(st.length < self.dense_below, room * unit, limit)
        if isinstance(self.selector, FusedSelector) and not isinstance(self.schedule, EveryStep):
            # A reused recall may have to leave out its last token, or more once a row has outgrown `dense_below`.
            ranked = ranked or not self.selector.lowest_is_last or room * unit > self._chosen
        if isinstance(self.selector, FusedSelector) and not ranked and (first is None or self.selector.picks_in_window):
            starts = (0, 0) if first is None else (from_store, from_recent)
            span, waits = (starts[0], st.store.count), (st.recent.k, starts[1], st.recent.count)
            among = Candidates(span, waits, limit=limit, room=room, wide=wide, last=self.local)
            return self.selector.select(st.index, queries, among, scale=scale)
        estimates = self.selector.score(st.index, queries, scale=scale)
        slot = jnp.arange(wide)[None]
        pending = (slot < (st.recent.count - self.local)[:, None]) & (slot >= from_recent[:, None])
        stored_slot = jnp.arange(slots)[None]
        stored = (stored_slot < st.store.count[:, None]) & (stored_slot >= from_store[:, None])
        # Their scores are attention's own logits.
        exact = attention_logits(queries, st.recent.k, scale)[..., :wide]
        exact = jnp.where(pending[:, None, None], exact, -jnp.inf)
        exact = jnp.max(exact.reshape(*exact.shape[:-1], wide // unit, unit), axis=-1)

        tokens = jnp.concatenate([stored, pending], axis=1)  # bool[B, S + wide]
        units = jnp.any(tokens.reshape(tokens.shape[0], -1, unit), axis=-1)[:, None, None]
        split = slots // unit
        parts = [(estimates, units[..., :split]), (exact, units[..., split:])]
        picked = expand_units(ops.top_k_grouped(parts, group_reduce, room), unit)

        visible = jnp.take_along_axis(tokens[:, None, None], picked.slots, axis=-1)
        rank = jnp.arange(room * unit)[None, None, None]
        within = rank < jnp.reshape(limit, (-1, 1, 1, 1))
        return Selection(picked.slots, picked.valid & visible & within)

    def _recall(
        self, st: RetrievalState, selection: Selection, last: Recall, rows: Array, now: Array
    ) -> tuple[tuple[Array, Array], Callable[[], Recall]]:
        """Keys and values of the selection, stored or pending, and the token that the next step's window leaves. See
        `Recaller`."""
        B, K, H, M = selection.slots.shape
        recent, oldest = (st.recent.k, st.recent.v), st.recent.count - self.local
        if isinstance(self.store, HostOffload):
            held, edge = (self._flat(last.selection), last.k, last.v), jnp.maximum(oldest, -1)
            used, rest = self.store.recall(st.store, selection, recent, edge, held, rows, now)
            return used, lambda: Recall(selection, *rest(), oldest >= 0)

        stored, pending = split_selection(self._flat(selection), st.store.slots)
        here = pending.valid.reshape(B, K, -1, 1)
        at_edge = (jnp.arange(here.shape[2]) == H * M)[None, None, :, None]

        def whole(old: Array, new: Array, zone: Array) -> Array:
            edge = take_rows(zone, jnp.maximum(oldest, 0)[:, None])
            return jnp.where(at_edge, edge.astype(old.dtype), jnp.where(here, new.astype(old.dtype), old))

        found = self.store.gather(st.store, stored), ops.gather_slots(*recent, pending), recent
        k, v = (whole(*zones) for zones in zip(*found, strict=True))
        kept_k, kept_v = (jnp.where(rows[:, None, None, None], *two) for two in ((k, last.k), (v, last.v)))
        return (k, v), lambda: Recall(selection, kept_k, kept_v, oldest >= 0)

    def _flat(self, selection: Selection) -> Selection:
        """[B, K, 1, H*M + unit]: those of all heads one after the other, and room for the edge that moves as a unit."""
        width = ((0, 0), (0, 0), (0, 0), (0, self.selector.unit))
        return Selection(*(jnp.pad(a.reshape(*a.shape[:2], 1, -1), width) for a in selection))

    def _edge(self, st: RetrievalState, there: Array, first: Array | None) -> Array:
        """bool[B]: whether there is a token that left the local window with the newest one, and a query sees it."""
        return there if first is None else there & (st.length - 1 - self.local >= first)

    def _keep_reused(
        self,
        st: RetrievalState,
        selection: Selection | PackedSelection,
        reused: Array,
        edge: Array,
        first: Array | None,
    ) -> Selection:
        """Of what the step before recalled, what this step sees, and what the budget holds beside the edge."""
        slots = st.store.slots
        from_store, from_recent = _slot_of(first, st.offset_store), _slot_of(first, st.offset_recent)
        start = jnp.where(
            selection.slots < slots, from_store[:, None, None, None], slots + from_recent[:, None, None, None]
        )
        rank = jnp.arange(selection.slots.shape[-1])[None, None, None]
        assert self.budget is not None
        room = jnp.minimum(self.budget - self.sink - self.local - edge.astype(jnp.int32), self._chosen)
        limit = jnp.where(st.length < self.dense_below, rank.shape[-1], room)
        kept = (selection.slots >= start) & (rank < limit[:, None, None, None])
        return Selection(selection.slots, selection.valid & (kept | ~reused))

    def _check_window(self, window: int | None) -> None:
        if window is not None and not self.demote.ordered:
            raise ValueError(
                f"{self.demote} forgets the order of tokens, so it cannot serve a sliding window of {window}"
            )

    @property
    def _chosen(self) -> int:
        """Tokens of the budget that the selector chooses, in whole units."""
        assert self.budget is not None
        return whole_units(self.budget - self.sink - self.local, self.selector.unit)

    def _most(self, units: int) -> int:
        """Units that a step gathers room for: those of the budget, or all of a row that is still attended densely."""
        dense = -(-max(self.dense_below - self.sink - self.local, 0) // self.selector.unit)
        return min(max(self._chosen // self.selector.unit, dense), units)

    def attend_stored(
        self, st: RetrievalState, q: Array, *, scale: float, window: int | None = None
    ) -> PartialAttention:
        self._check_window(window)
        first = chunk_starts(st.length, q.shape[3], window)

        def start(offset: Array) -> Array | None:
            return None if first is None else _slot_of(first, offset[:, None])

        parts = [self.store.attend_chunk(st.store, q, start(st.offset_store), scale=scale)]
        zones = [(st.recent, st.offset_recent)]
        if st.sink is not None:
            zones.append((st.sink, jnp.zeros_like(st.recent.count)))
        for zone, offset in zones:
            parts.append(attend_zone(q, zone.k, zone.v, start(offset), zone.count, scale=scale))
        return merge(*parts)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return self.store.bytes_per_token(spec) + self.selector.bytes_per_token(spec)


def _with_mask(selection: Selection | PackedSelection) -> Selection:
    return selection.selection if isinstance(selection, PackedSelection) else selection


def _all_of(valid: Array, edge: Array) -> Selection:
    """Of what was recalled in the order of `valid` bool[B, K, H, M], that which is; and, after it all, the edge."""
    H, M = valid.shape[2:]
    own = jnp.arange(H)[:, None] * M + jnp.arange(M)[None]
    slots = jnp.concatenate([own, jnp.full((H, 1), H * M)], axis=1, dtype=jnp.int32)
    valid = jnp.concatenate([valid, jnp.broadcast_to(edge, (*valid.shape[:3], 1))], axis=3)
    return Selection(jnp.broadcast_to(slots[None, None], valid.shape), valid)


def _slot_of(position: Array | None, offset: Array) -> Array:
    """The slot of `position` in a zone whose slot 0 is position `offset`; 0 where the position lies before it, and for
    None, which costs a step no kernel."""
    return jnp.zeros_like(offset) if position is None else jnp.maximum(position - offset, 0)
