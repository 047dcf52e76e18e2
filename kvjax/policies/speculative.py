"""FreeKV: a step attends with what the previous step recalled, so that attention need not wait
for a recall.

To recall is to read selected keys and values from where the store keeps them. The token that
leaves the local window after a recall, its *edge*, is kept beside it, so that a step that
reuses the recall misses none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.numerics.partial import Logits, PartialAttention
from kvjax.numerics.selection import (
    Selection,
    membership,
    reduce_queries,
    split_selection,
    unpack,
)
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.shared import Follower
from kvjax.policies.zones import Visible, ZonedState
from kvjax.selectors import Candidates
from kvjax.sharding.context import Axis, no_share
from kvjax.spec import CacheSpec, keep_ints, keep_number
from kvjax.stores.store import Recalled, flat


class Recall(NamedTuple):
    """The keys and values of a step's selection, read from where the store keeps them."""

    selection: Selection  # slots of the history, and S + r for slot r of the recent block
    k: Array  # dtype[B, K, R, D], R > H*M, in the order of the selection; from H*M the edge, then any finite values
    v: Array  # dtype[B, K, R, D]
    edge: Array  # bool[B] whether there is an edge: the oldest token of a full local window, which the next step drops


class Decision(NamedTuple):
    """Says what a step does with the recall of the previous one."""

    # The previous recall, of which slots are valid only in rows where they are up to date, so
    # that no store takes an old copy for the token that its slot has now.
    previous: Recall
    last: Selection  # of the previous recall, as it was: reused heads attend to it
    query: Array  # f32[B, K, G, D] which the next step compares with its own
    reused: Array  # bool[B, K] heads that attend with the previous recall
    urgent: Array | None  # bool[B, K] heads that wait for a new one; None: all do
    renewed: Array  # bool[B] the new recall is kept for the next step


@register_dataclass
@dataclass(frozen=True)
class SpeculativeState:
    """The tokens, and the query and the recall of each row's last step."""

    zones: ZonedState
    recall: Recall  # its slots are where the tokens lie now
    query: Array  # f32[B, K, G, D]
    recalled_at: Array  # i32[B] tokens that the row held then; -1 before its first step
    due: Array  # bool[B] a token was stored whose query has not attended yet

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.zones.length

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return self.zones.overflow


@dataclass(frozen=True)
class Speculative(Policy):
    """A `Retrieval` whose steps attend with the previous step's recall, except in heads whose
    query changed direction.

    For each kv head, C = mean over its query heads of cosine(q_t, q_{t-1}). Heads with C >= tau
    attend with the keys and values that step t-1 recalled, the others with a fresh recall; the
    fresh recall of all heads is kept for t+1. So tau > 1 is a new selection at every step, and
    tau <= -1 always attends with one that is a step old. A step recalls anew if it is the first
    of its row, or if a prompt, a replaced row or a dropped token came before it.

    Besides a reused recall, a step reads the token that has left the local window since then,
    in place of the recall's lowest-ranked token if that would exceed the budget. The recall
    holds tokens as they were, before a quantised store rounded them. Costs, per row and kv
    head, 2 M D values of the store's precision and the query in f32, in device memory: M are
    the selected tokens of the budget, or room for `dense_below`.

    With `topk` a step selects only that part of the budget among all tokens; the rest are the
    best of those that the step before attended to. Scores are scaled as attention is, or by
    `selection_scale`.

    Over a store in whose tokens a step attends in place (`Store.recalls` is false, as of
    `TurboQuant`), nothing is copied: a head then attends with the slots that an earlier step
    selected.

    With a store that recalls in two parts (`Store.recall`, as `HostOffload` does), a step waits
    only for what its own heads need. The rest runs beside other work in programs compiled with
    `memory.CONCURRENT`, as that of `kvjax.generate` is.

    **Source:** FreeKV, speculative retrieval and fine-grained correction; tau 0.8 for long
    inputs, 0.9 for long generation. `topk` is of ArkVale's released code. **Differs:** FreeKV
    selects for all heads only if one needs it, which the host decides; here every step selects
    and recalls and the device decides which recall is used, so that no step waits for the host.
    """

    retrieval: Retrieval
    tau: float = field(default=0.8, kw_only=True)
    selection_scale: float | None = field(default=None, kw_only=True)
    # Tokens, sink and window included; None: the whole budget.
    topk: int | None = field(default=None, kw_only=True)

    takes_sinks = True

    def __post_init__(self) -> None:
        if not isinstance(self.retrieval, Retrieval):
            raise ValueError(
                f"Speculative got {self.retrieval!r}; it reuses what a selector selected, so give it a "
                "kvjax.Retrieval(...)"
            )
        if (
            isinstance(self.tau, bool)
            or not isinstance(self.tau, int | float)
            or math.isnan(self.tau)
        ):
            raise ValueError(
                f"Speculative(tau={self.tau!r}) must be a number to compare cosines with: 0.8 or 0.9 as in FreeKV, "
                "above 1 to select at every step, -1 to always reuse"
            )
        keep_number(
            self,
            "selection_scale",
            what="None for attention's scale, 1 for unscaled products, or ",
            above=0,
        )
        keep_ints(self, topk=1)
        if self.topk is not None:
            self._check_topk(self.topk)
        demote = self.retrieval.demote
        local = self.retrieval.local
        if demote.slots(local) - demote.leave < local - 1:
            raise ValueError(
                f"{demote} moves tokens out of the local window in chunks, which the previous step's recall does not "
                f"hold; use kvjax.Fifo(leave={demote.leave})"
            )
        if self.retrieval.selected == 0:
            base = self.retrieval.sink + self.retrieval.local
            unit = self.retrieval.selector.unit
            raise ValueError(
                f"budget={self.retrieval.budget} leaves nothing besides sink + local = {self.retrieval.sink} + "
                f"{self.retrieval.local} that Speculative could reuse; raise it to at least {base + unit}"
            )

    def _check_topk(self, topk: int) -> None:
        policy = self.retrieval
        unit = policy.selector.unit
        least = policy.sink + policy.local + unit
        if not least <= topk <= policy.budget:
            raise ValueError(
                f"Speculative(topk={topk}) must be from sink + local + one unit = {policy.sink} + {policy.local} + "
                f"{unit} to the budget of {policy.budget}"
            )
        if policy.selector.group_reduce == "per_head":
            raise ValueError(
                "Speculative(topk=...) keeps tokens by KV head, and the selector selects by query head; use another "
                "group_reduce, or topk=None"
            )

    def init(self, spec: CacheSpec) -> SpeculativeState:
        policy = self.retrieval
        st = policy.init(spec)

        def recall(q: Array) -> Recall:
            selection = unpack(policy.select(st, q, Step(Logits(1.0))))
            if not policy.store.recalls and policy.demote.ordered:
                # A token of which nothing is read.
                one = jnp.zeros((spec.batch, spec.kv_heads, 1, spec.head_dim), spec.dtype)
                return Recall(selection, one, one, jnp.zeros(spec.batch, bool))
            # of all heads one after the other, and room for the edge, moved as a unit
            *_, H, M = selection.slots.shape
            listed = flat(selection, H * M + policy.selector.unit)
            stored, _ = split_selection(listed, st.store.slots)
            k, v = policy.store.gather(st.store, stored)
            return Recall(selection, k, v, jnp.zeros(spec.batch, bool))

        q = jax.ShapeDtypeStruct(
            (spec.batch, spec.kv_heads, spec.group, spec.head_dim), spec.dtype
        )
        return SpeculativeState(
            zones=st,
            recall=jax.tree.map(
                lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(recall, q)
            ),
            query=jnp.zeros(q.shape, jnp.float32),
            recalled_at=jnp.full(spec.batch, -1, jnp.int32),
            due=jnp.zeros(spec.batch, bool),
        )

    # ----------------------------------------------------------------------------------------------------- attending

    @property
    def rounds(self) -> bool:
        return self.retrieval.rounds

    def attend(
        self, st: SpeculativeState, q: Array, step: Step
    ) -> tuple[Array, SpeculativeState, Info]:
        """Selects; decides which heads reuse their recall, recalls, attends, and remembers for
        the next step.
        """
        selection = (
            self.select(st, q, step) if step.selection is None else unpack(step.selection)
        )
        decision = self._decide(st, q)
        zones, now, fresh = self._recall(st.zones, selection, decision)
        out, info = self._attend_recalled(zones, q, selection, decision, now, step)
        return out, self._remember(st, zones, fresh, decision), info

    def select(self, st: SpeculativeState, q: Array, step: Step) -> Selection:
        """Selects as `Retrieval` does, with scores scaled by `selection_scale`, which no soft
        cap follows.

        A step attends to the selection in heads that recall anew, and in the others to that of
        the step before.
        """
        if self.selection_scale is not None:
            step = replace(step, logits=Logits(self.selection_scale))
        if self.topk is not None:
            return self._select_beside_kept(st, q, step)
        return unpack(
            self.retrieval.select(st.zones, q, step, num_sorted_last=self._dropped(st.zones))
        )

    def _select_beside_kept(self, st: SpeculativeState, q: Array, step: Step) -> Selection:
        """Selects the best `topk` of all units, then the best of those that the step before
        attended to.
        """
        policy = self.retrieval
        zones = st.zones
        unit = policy.selector.unit
        queries = reduce_queries(q, policy.selector.group_reduce)
        seen = policy.visible(zones, step.window)
        every = policy.candidates(zones, seen, num_sorted_last=self._dropped(zones))

        def selected(candidates: Candidates) -> Selection:
            found = policy.selector.select(zones.index, queries, candidates, logits=step.logits)
            return unpack(found)

        # The best of all units.
        assert self.topk is not None
        best = jnp.minimum(every.k, (self.topk - policy.sink - policy.local) // unit)
        top = selected(replace(every, k=best))

        # Units that are neither among them nor in a recall that is up to date rank last.
        known = self._known(st)
        held = self._known_selection(st, known)
        kept = membership(top, zones.store.slots) | membership(held, zones.store.slots)
        B, K, H, S = kept.shape
        others = ~jnp.any(kept.reshape(B, K, H, S // unit, unit), axis=(2, 4))
        return selected(replace(every, last=others & known[:, None, None]))

    def _known(self, st: SpeculativeState) -> Array:
        """bool[B]: rows whose last step was the previous one, so that the slots of its recall
        are up to date.
        """
        return st.recalled_at + st.due.astype(jnp.int32) == st.zones.length

    def _known_selection(self, st: SpeculativeState, known: Array) -> Selection:
        """The selection of the last recall, without that of rows whose slots are out of date."""
        last = st.recall.selection
        return last._replace(valid=last.valid & known[:, None, None, None])

    def _decide(self, st: SpeculativeState, q: Array) -> Decision:
        """Which heads reuse their recall, and which are recalled now. After a prompt a recall's
        slots are out of date, so none is known."""
        query = q.astype(jnp.float32)
        selection = self._known_selection(st, self._known(st))
        previous = st.recall._replace(selection=selection)
        if self.tau > 1:  # no cosine is: nothing is decided, and the query need not be kept
            return Decision(
                previous=previous,
                last=st.recall.selection,
                query=st.query,
                reused=jnp.zeros(q.shape[:2], bool),
                urgent=None,
                renewed=st.due,
            )
        similarity = _mean_cosine(query, st.query)
        follows_recall = st.recalled_at + 1 == st.zones.length
        reused = (similarity >= self.tau) & follows_recall[:, None]
        return Decision(
            previous=previous,
            last=st.recall.selection,
            query=query,
            reused=reused,
            urgent=~reused & st.due[:, None],  # a row without a token recalls nothing
            renewed=st.due,
        )

    def _recall(
        self, st: ZonedState, selection: Selection, decision: Decision
    ) -> tuple[ZonedState, tuple[Array, Array], Recall]:
        """Recalls the selection.

        Returns the zones, whose store may have changed; keys and values [B, K, R, D] for the
        heads that attend with them now; and the recall of all heads for the next step.
        """
        previous = decision.previous
        oldest = (
            st.recent.count - self.retrieval.local
        )  # slot of the edge; below 0: there is none
        if in_place(previous):
            now = previous.k, previous.v
            return st, now, Recall(selection, previous.k, previous.v, oldest >= 0)
        listed = flat(previous.selection, previous.k.shape[2])
        store, now, rest = self.retrieval.store.recall(
            st.store,
            selection,
            (st.recent.k, st.recent.v),
            oldest,
            Recalled(listed, previous.k, previous.v),
            decision.renewed,
            decision.urgent,
        )
        k, v = rest()
        return replace(st, store=store), now, Recall(selection, k, v, oldest >= 0)

    def _attend_recalled(
        self,
        zones: ZonedState,
        q: Array,
        selection: Selection,
        decision: Decision,
        now: tuple[Array, Array],
        step: Step,
    ) -> tuple[Array, Info]:
        """Attention to sink, local window and the recall, old or new, with the token that left
        the window since.
        """
        policy = self.retrieval
        seen = policy.visible(zones, step.window)
        reused = decision.reused[:, :, None, None]
        used = jax.tree.map(partial(jnp.where, reused), decision.last, selection)

        # The token that left the local window after the last recall takes the place of the
        # lowest-ranked one, where the budget has no room for both.
        edge = decision.previous.edge[:, None, None]
        position = zones.length[:, None, None] - 1 - policy.local
        if seen.first is not None:
            edge &= position >= seen.first[:, None, None]
        edges = jnp.sum(edge, axis=2, dtype=jnp.int32)
        used = self._keep_reused(zones, used, reused, edges, seen)
        with_edge = edge[:, :, None] & reused

        read = _in_order(used.valid, with_edge)
        if in_place(decision.previous):
            left = policy.slots_at(zones, position)[:, :, None]
            left = jnp.broadcast_to(left, (*used.slots.shape[:3], 1))
            read = read._replace(slots=jnp.concatenate([used.slots, left], axis=3))
            out, _ = policy.store.attend_zones(
                zones.store,
                q,
                read,
                seen.recent,
                seen.sink,
                policy.local,
                logits=step.logits,
                sinks=step.sinks,
            )
        else:
            out = self._attend_copies(q, decision, now, read, seen, step)
        return out, self._info(zones, seen, used, with_edge, position, ~decision.reused)

    def _attend_copies(
        self,
        q: Array,
        decision: Decision,
        now: tuple[Array, Array],
        read: Selection,
        seen: Visible,
        step: Step,
    ) -> Array:
        """Attention to sink, local window, and the places `read` of recalled keys and values."""
        k, v = now
        more = None
        if decision.urgent is not None:
            # Places from R on are those of the new recall, which heads that wait for it read.
            k = decision.previous.k
            v = decision.previous.v
            more = now
            moved = jnp.where(decision.urgent, k.shape[2], 0)[..., None, None]
            read = read._replace(slots=read.slots + moved)
        return ops.attend_zones(
            q,
            k,
            v,
            read,
            seen.recent,
            seen.sink,
            self.retrieval.local,
            more=more,
            sinks=step.sinks,
            logits=step.logits,
        )

    def _remember(
        self, st: SpeculativeState, zones: ZonedState, fresh: Recall, decision: Decision
    ) -> SpeculativeState:
        """The state for the next step: the new recall in the heads that were recalled, the old
        one in the others.
        """
        renewed = decision.renewed.reshape(-1, 1, 1, 1)
        kept = jax.tree.map(partial(jnp.where, renewed), fresh.selection, st.recall.selection)
        return SpeculativeState(
            zones=zones,
            recall=Recall(
                kept, fresh.k, fresh.v, jnp.where(st.due, fresh.edge, st.recall.edge)
            ),
            query=jnp.where(renewed, decision.query, st.query),
            recalled_at=jnp.where(st.due, zones.length, st.recalled_at),
            due=jnp.zeros_like(st.due),
        )

    def _dropped(self, zones: ZonedState) -> int:
        """The number of units that a step may leave out of a reused recall: one, for the edge,
        or more once a row has outgrown `dense_below`."""
        policy = self.retrieval
        _, gathered = policy.sizes(zones)
        return 1 if gathered * policy.selector.unit <= policy.selected else zones.store.slots

    def _keep_reused(
        self, st: ZonedState, selection: Selection, reused: Array, edge: Array, seen: Visible
    ) -> Selection:
        """The part of a reused selection that this step sees, cut to the budget that the edge
        leaves.
        """
        policy = self.retrieval
        slots = st.store.slots

        # Tokens within a sliding window.
        start = jnp.where(
            selection.slots < slots,
            seen.store[:, None, None, None],
            slots + seen.recent.start[:, None, None, None],
        )
        valid = selection.valid & ((selection.slots >= start) | ~reused)

        # The first of them by rank, if there are more than fit.
        rank = jnp.arange(selection.slots.shape[-1], dtype=jnp.int32)[None, None, None]
        room = jnp.minimum(policy.budget - policy.sink - policy.local - edge, policy.selected)
        dense = (st.length < policy.dense_below)[:, None]
        limit = jnp.where(dense, rank.shape[-1], room)[..., None, None]
        fits = jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.int32) <= limit
        return Selection(selection.slots, valid & ((rank < limit) | fits | ~reused))

    def _info(
        self,
        st: ZonedState,
        seen: Visible,
        used: Selection,
        with_edge: Array,
        position: Array,
        fresh: Array,
    ) -> Info:
        info = self.retrieval.info(st, seen, used, fresh)
        edge = jnp.where(with_edge, position[:, :, None], -1)
        edge = jnp.broadcast_to(edge, (*used.slots.shape[:3], 1))
        assert info.positions is not None
        return info._replace(
            attended=info.attended + jnp.sum(with_edge[:, :, 0], axis=-1, dtype=jnp.float32),
            positions=jnp.concatenate([info.positions, edge], axis=-1),
        )

    # ------------------------------------------------------------------------------------------------------- storing

    def update(
        self, st: SpeculativeState, k: Array, v: Array, active: Array
    ) -> SpeculativeState:
        return replace(
            st, zones=self.retrieval.update(st.zones, k, v, active), due=st.due | active
        )

    def prefill(
        self, st: SpeculativeState, k: Array, v: Array, lengths: Array
    ) -> SpeculativeState:
        zones = self.retrieval.prefill(st.zones, k, v, lengths)
        # A prompt of no tokens flushes a full block as well. The recall of such a row stays
        # known.
        moved = zones.store.count != st.zones.store.count
        recalled_at = jnp.where(moved & (lengths > 0), -1, st.recalled_at)
        return replace(
            st,
            zones=zones,
            recall=self._moved(st, moved & (lengths == 0)),
            recalled_at=recalled_at,
        )

    def full_rows(self, st: SpeculativeState) -> Array:
        return self.retrieval.full_rows(st.zones)

    def flush(self, st: SpeculativeState) -> SpeculativeState:
        """Flushes the zones, and updates the slots of the recall to where its tokens then are."""
        recall = self._moved(st, self.retrieval.full_rows(st.zones))
        return replace(st, zones=self.retrieval.flush(st.zones), recall=recall)

    def _moved(self, st: SpeculativeState, rows: Array) -> Recall:
        """The recall with the slots that its tokens have once the full blocks of `rows` bool[B]
        are flushed.
        """
        policy = self.retrieval
        zones = st.zones
        slots = zones.store.slots
        leaving = policy.demote.leaving(policy.local)
        staying = policy.demote.staying(policy.local)
        # new place of slot r: in the chunk that leaves, or from `slots` on
        place = [0] * zones.recent.slots
        for i, r in enumerate(leaving):
            place[r] = i
        for i, r in enumerate(staying):
            place[r] = slots + i
        to = jnp.asarray(place, jnp.int32)[None]
        to += jnp.where(to < slots, zones.store.count[:, None], 0)
        slots_read = st.recall.selection.slots
        moved = jnp.take_along_axis(
            to[:, None, None], jnp.clip(slots_read - slots, 0, to.shape[1] - 1), axis=-1
        )
        slots_read = jnp.where(
            rows[:, None, None, None] & (slots_read >= slots), moved, slots_read
        )
        return st.recall._replace(selection=st.recall.selection._replace(slots=slots_read))

    def grown(self, st: SpeculativeState, before: SpeculativeState) -> SpeculativeState:
        """Moves slots of the recent block, S + r, behind those of the longer history, and the
        recalled tokens to where a selection with more room has them."""
        old = before.zones.store.slots
        new = st.zones.store.slots
        selection = st.recall.selection
        slots = jnp.where(selection.slots < old, selection.slots, selection.slots + (new - old))
        B, K, H, M = before.recall.selection.slots.shape
        more = selection.slots.shape[3] - M

        def moved(a: Array) -> Array:
            lists = jnp.pad(
                a[:, :, : H * M].reshape(B, K, H, M, -1),
                ((0, 0), (0, 0), (0, 0), (0, more), (0, 0)),
            )
            return jnp.concatenate(
                [lists.reshape(B, K, H * (M + more), -1), a[:, :, H * M :]], axis=2
            )

        recall = st.recall._replace(selection=selection._replace(slots=slots))
        if more and not in_place(before.recall):
            recall = recall._replace(k=moved(before.recall.k), v=moved(before.recall.v))
        return replace(st, recall=recall)

    def attend_stored(self, st: SpeculativeState, q: Array, step: Step) -> PartialAttention:
        return self.retrieval.attend_stored(st.zones, q, step)

    def follower(self, heads: tuple[int, ...] | None = None) -> Follower:
        """The policy of a layer that attends to what a layer of this policy attends to, except
        for the token that has just left the local window.

        A flush moves recalled tokens to the history. So a store that reads whole pages needs a
        demotion that moves the tokens of a page together.
        """
        store = self.retrieval.store
        demote = self.retrieval.demote
        if store.page > 1 and not demote.ordered:
            raise ValueError(
                f"{demote} moves the tokens of a page to several pages of {store}, where no layer can follow a reused "
                f"recall; use kvjax.Fifo(leave={demote.leave}), or pages of 1 token"
            )
        return self.retrieval.follower(heads)

    def with_divisible_chunks(self, parts: int) -> Speculative:
        return replace(self, retrieval=self.retrieval.with_divisible_chunks(parts))

    def over_context(self, axis: Axis, parts: int) -> Speculative:
        """Keeps recalled tokens on all devices, so that they serve the next step as they do on
        one device.
        """
        return replace(self, retrieval=self.retrieval.over_context(axis, parts))

    def over_context_by_share(self, axis: Axis, parts: int) -> Speculative:
        raise ValueError(no_share(self))

    def stripes_per_device(self, spec: CacheSpec, parts: int) -> int:
        return self.retrieval.stripes_per_device(spec, parts)


def in_place(recall: Recall) -> bool:
    """True if nothing is copied: a step attends to selected tokens where the store has them."""
    return recall.k.shape[2] == 1


def _mean_cosine(query: Array, last: Array) -> Array:
    """f32[B, K]: the mean over a group of the cosines of queries f32[B, K, G, D] with the last
    ones; 0 for a query of zeros."""
    sizes = jnp.sqrt(jnp.sum(query * query, axis=-1) * jnp.sum(last * last, axis=-1))
    cosines = jnp.sum(query * last, axis=-1) / jnp.maximum(sizes, jnp.finfo(jnp.float32).tiny)
    return jnp.clip(jnp.mean(cosines, axis=-1), -1.0, 1.0)


def _in_order(valid: Array, edge: Array) -> Selection:
    """The valid slots of a recall, in the order of `valid` bool[B, K, H, M], and after them the
    edge, bool [B, K, 1, tokens]."""
    H, M = valid.shape[2:]
    extra = edge.shape[3]
    own = jnp.arange(H, dtype=jnp.int32)[:, None] * M + jnp.arange(M, dtype=jnp.int32)[None]
    after = jnp.broadcast_to(H * M + jnp.arange(extra, dtype=jnp.int32)[None], (H, extra))
    slots = jnp.concatenate([own, after], axis=1, dtype=jnp.int32)
    valid = jnp.concatenate([valid, jnp.broadcast_to(edge, (*valid.shape[:3], extra))], axis=3)
    return Selection(jnp.broadcast_to(slots[None, None], valid.shape), valid)
