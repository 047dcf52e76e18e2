"""Retrieval: every token is kept and a few of them are attended, as in FIER, ParisKV and Quest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.memory import in_host_memory
from kvjax.numerics.selection import PackedSelection, Selection, reduce_queries, unpack
from kvjax.policies.policy import (
    Info,
    Policy,
    Step,
    attend_in_turn,
    heads_as_steps,
    steps_as_heads,
)
from kvjax.policies.shared import Follower, require_whole_pages
from kvjax.policies.short import DenseCapacity, check_dense_capacity, if_long
from kvjax.policies.zones import SelectedZones, Visible, ZonedState
from kvjax.selectors import Candidates, Selector
from kvjax.sharding.context import Axis
from kvjax.sharding.context.selectors import split_selector
from kvjax.sharding.context.shares import share_selector
from kvjax.spec import CacheSpec, keep_ints, require_int
from kvjax.stores import Dense, Store
from kvjax.stores.demotion import Buffer, Demotion, Fifo
from kvjax.validation import check_verbs


@dataclass(frozen=True, kw_only=True)
class Retrieval(SelectedZones):
    """Keeps every token and attends to `budget` of them per step: sink, local window and what
    the selector finds.

    `budget` counts each token whose keys and values a step reads. `local` is 64 by default, or
    a quarter of the budget if that is less. Besides the `local` tokens, fewer than a chunk of
    recent tokens are pending; they compete with the history by their exact scores. A row with
    fewer than `dense_below` tokens attends to all of them; because shapes are static, every
    step then gathers room for that many.

    `kvjax.init` makes a whole cache `Full` if its capacity is at most `dense_capacity` tokens
    (`kvjax.policies.short`). "auto" is the capacity below which a benchmark found that faster
    on this kind of GPU, and 0 elsewhere.

    A row's history has capacity - sink - local + 1 slots, rounded down to whole chunks (at
    least one).

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=kvjax.Fier(), budget=64)
    >>> policy.sink, policy.local
    (4, 16)
    """

    selector: Selector
    store: Store = Dense()
    budget: int = 1024
    sink: int = 4
    local: int = None  # type: ignore[assignment]  # `__post_init__` sets the default, which depends on the budget
    demote: Demotion = Fifo(leave=256)
    dense_below: int = 0
    dense_capacity: DenseCapacity = 0

    shares_prefixes = True

    def __post_init__(self) -> None:
        keep_ints(self, budget=1)
        if self.local is None:
            object.__setattr__(self, "local", max(1, min(64, self.budget // 4)))
        super().__post_init__()
        check_verbs(
            "Retrieval(selector=...)",
            self.selector,
            "a selector",
            ("check", "init", "append", "score", "select"),
            "kvjax.Fier()",
            fields=("unit", "group_reduce"),
            protocol="kvjax.Selector",
        )
        keep_ints(self, dense_below=0)
        check_dense_capacity(self)
        if self.budget < self.sink + self.local:
            raise ValueError(
                f"budget={self.budget} is below sink + local = {self.sink} + {self.local}, which every step attends "
                f"to; raise the budget to at least {self.sink + self.local}, or lower sink and local"
            )
        name = type(self.selector).__name__
        unit = require_int(f"{name}.unit", self.selector.unit, at_least=1)
        if self.demote.leave % unit:
            raise ValueError(
                f"{self.selector} scores pages of {unit} tokens, but {self.demote} has chunks of {self.demote.leave}; "
                f"make it leave a multiple of {unit}"
            )
        require_whole_pages(
            self.store, unit, f"{self.selector} selects {unit} tokens at a time"
        )

    def init(self, spec: CacheSpec) -> ZonedState:
        self.selector.check(spec, self.demote.leave)
        st = super().init(spec)
        self.selector.check_store(self.store)
        heads = spec.group if self.selector.group_reduce == "per_head" else 1
        _, gathered = self.sizes(st)
        self.store.require_room(heads * gathered * self.selector.unit)
        return replace(st, index=self.selector.init(spec, st.store.slots))

    def of_size(self, spec: CacheSpec) -> Policy:
        return if_long(self, type(self.selector).__name__, spec)

    def with_divisible_chunks(self, parts: int) -> Retrieval:
        """With chunks of one page, the least: of one page for each device, so that no device
        gets a part of a page.

        A `Buffer` attends to a whole chunk, so its local window grows with it.
        """
        unit = self.selector.unit
        if unit == 1 or self.demote.leave != unit:
            return self
        demote = replace(self.demote, leave=unit * parts)  # type: ignore[type-var]
        local = max(self.local, demote.leave) if isinstance(demote, Buffer) else self.local
        return replace(self, demote=demote, local=local)

    @property
    def selects(self) -> bool:
        return True

    def append(self, st: ZonedState, k: Array, v: Array, count: Array) -> ZonedState:
        index = self.selector.append(st.index, k, st.store.count, count)
        return replace(super().append(st, k, v, count), index=index)

    def truncate_index(self, ix: Any, count: Array) -> Any:
        return self.selector.truncate(ix, count)

    # ----------------------------------------------------------------------------------------------------- attending

    def attend(self, st: ZonedState, q: Array, step: Step) -> tuple[Array, ZonedState, Info]:
        """Selects (score, reduce, top k), and attends to sink, local window and the selection
        (gather, attend, merge).

        To a row that takes no step, a history in host memory looks empty, so that nothing of it
        is read.
        """
        if step.exact:
            return self.attend_all(st, q, step)
        if step.lengths is not None:
            return self._attend_steps(st, q, step.lengths, step)
        count = st.store.count
        active = step.active if in_host_memory(st.store) else None
        if active is not None:
            empty = jnp.where(active, count, 0)
            st = replace(st, store=self.store.with_count(st.store, empty))
        selection = self.select(st, q, step) if step.selection is None else step.selection
        out, st, info = self.attend_selected(st, q, selection, step)
        if active is not None:
            st = replace(st, store=self.store.with_count(st.store, count))
        return out, st, info

    def select(
        self, st: ZonedState, q: Array, step: Step, *, num_sorted_last: int = 0
    ) -> Selection | PackedSelection:
        """Scores the tokens besides sink and local window and selects the best for q [B, K, G,
        D], in whole units.

        Slots below S, the slots of the store, are in the history; S + r is slot r of the recent
        block. History and pending tokens compete. The last `num_sorted_last` units of the selection
        are those that rank lowest, in order of rank. With the `lengths` of T steps, q is [B, K,
        T*G, D] and the selection [B, K, T*H, M].

        `Fier`, `MinMaxPages` (Quest), `CentrePages` (ArkVale) and `Paris` have their own `select`,
        by kernels of their own; most others have that of `Selector`, which sorts what `score` gives.
        """
        steps = 1 if step.lengths is None else step.lengths.shape[0]
        candidates = self.candidates(
            st,
            self.visible(st, step.window, step.lengths),
            steps=steps,
            num_sorted_last=num_sorted_last,
        )
        queries = reduce_queries(q, self.selector.group_reduce, steps)
        index = (st.store, self.store) if self.selector.reads_store else st.index
        return self.selector.select(index, queries, candidates, logits=step.logits)

    def candidates(
        self, st: ZonedState, seen: Visible, *, steps: int = 1, num_sorted_last: int = 0
    ) -> Candidates:
        """The units of history and pending tokens that compete, and how many are selected."""
        pending_slots, k_max = self.sizes(st)
        # Numbers where they are the same for all rows: an array would cost a kernel.
        k: Array | int = self.selected // self.selector.unit
        dense = seen.length < self.dense_below if self.dense_below else None
        if k_max != k:
            k = jnp.where(seen.length < self.dense_below, k_max, k)
        start: Array | int = 0
        recent_start: Array | int = 0
        if seen.first is not None:
            start = seen.store
            recent_start = seen.recent.start
        return Candidates(
            span=(start, st.store.count),
            pending=(st.recent.k, recent_start, seen.recent.stop),
            k=k,
            k_max=k_max,
            pending_slots=pending_slots,
            local=self.local,
            steps=steps,
            window=seen.window,
            dense=dense,
            num_sorted_last=num_sorted_last,
            stored_slots=st.store.slots,
        )

    def _attend_steps(
        self, st: ZonedState, q: Array, lengths: Array, step: Step
    ) -> tuple[Array, ZonedState, Info]:
        """Each step sees the state as it is after its own token: the same arrays with smaller
        counts.

        One pass over the index selects for all steps, and one attention serves them, if
        selector and store can. Under a sliding window one step comes after the other.
        """
        if step.window is not None or not self.selector.takes_steps:
            return attend_in_turn(self, self.shortened, st, q, step)
        B, K, _, T, _ = q.shape
        queries = steps_as_heads(q)
        selection = self.select(st, queries, step)

        def by_step(selection: Any) -> Any:
            return jax.tree.map(
                lambda a: jnp.moveaxis(a.reshape(B, K, T, a.shape[2] // T, *a.shape[3:]), 2, 0),
                selection,
            )

        if not self.store.takes_steps:
            return attend_in_turn(
                self, self.shortened, st, q, replace(step, selection=by_step(selection))
            )
        seen = self.visible(st, None, lengths)
        out, _ = self.store.attend_zones(
            st.store,
            queries,
            selection,
            seen.recent,
            seen.sink,
            self.local,
            logits=step.logits,
            sinks=step.sinks,
        )

        def info(length: Array, selection: Selection) -> Info:
            state = self.shortened(st, length)
            return self.info(state, self.visible(state), selection)

        return heads_as_steps(out, T), st, jax.vmap(info)(lengths, by_step(unpack(selection)))

    # --------------------------------------------------------------------------------------------------------- parts

    @cached_property
    def selected(self) -> int:
        """Tokens of the budget that the selector selects, in whole units."""
        rest = self.budget - self.sink - self.local
        return rest - rest % self.selector.unit

    def sizes(self, st: ZonedState) -> tuple[int, int]:
        """Slots that can be pending, in whole units, and the most units that a step gathers.

        Pending slots are the first of the recent block, before those of the local window. The
        units are those of the budget, or of all of a row that is still attended densely.
        """
        unit = self.selector.unit
        pending = max(-(-(st.recent.slots - self.local) // unit), 1)
        stored = st.store.slots // unit
        of_budget = self.selected // unit
        of_dense_row = -(-max(self.dense_below - self.sink - self.local, 0) // unit)
        most = min(max(of_budget, of_dense_row), stored + pending)
        return pending * unit, most

    def over_context(self, axis: Axis, parts: int) -> Retrieval:
        policy = super().over_context(axis, parts)
        stripes = self.stripes(axis, parts)
        unit = self.selector.unit
        if stripes.tokens % unit:
            raise ValueError(
                f"Placement(context={axis!r}) splits chunks of {self.demote.leave} tokens over {parts} devices, which "
                f"would cut pages of {unit}; make {self.demote} leave a multiple of {parts * unit} (`chunk` of a "
                "preset)"
            )
        return replace(policy, selector=split_selector(self.selector, stripes))

    def over_context_by_share(self, axis: Axis, parts: int) -> Retrieval:
        selector = share_selector(self.selector, self.stripes(axis, parts))
        return replace(self.over_context(axis, parts), selector=selector)

    def follower(self, heads: tuple[int, ...] | None = None) -> Follower:
        return Follower(
            store=self.store,
            sink=self.sink,
            local=self.local,
            demote=self.demote,
            unit=self.selector.unit,
            heads=heads,
        )
