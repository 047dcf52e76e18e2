"""Schedules: in which step a selection is made and used.

A step selects with its own query, or it attends with what the step before recalled, so that finding and moving tokens
need not stand between a query and its attention. What was recalled is then one step old. Tokens never move out of
sight for that: the one token that has left the local window since is kept beside what was recalled, and a row whose
last step was not the one before (a prompt came between, or the row was replaced) selects anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.selection import PackedSelection, Selection
from kvjax.spec import CacheSpec


class Recall(NamedTuple):
    """What a step selected, read from wherever it lies."""

    selection: Selection  # slots of the store, and S + r for slot r of the recent block
    k: Array  # dtype[B, K, R, D], R > H*M, in the order of the selection; at H*M the edge, and then anything finite
    v: Array  # dtype[B, K, R, D]
    edge: Array  # bool[B] whether there is an edge: the oldest token of a full local window, which the next step leaves


class Read(NamedTuple):
    """What a step attends with that is read already."""

    last: Recall  # of the step before
    anew: tuple[Array, Array]  # keys and values like those of `last`, that heads `now` attend with instead
    now: Array  # bool[B, K]; of rows that make no step none, as nothing was read for them
    reused: Array  # bool[B, K] heads whose selection is that of the step before, edge included


class Choice(NamedTuple):
    """What a step attends to beside sink and local window."""

    selection: Selection | PackedSelection
    read: Read | None  # None: read the store


Recaller = Callable[[Recall, Array, Array], tuple[tuple[Array, Array], Callable[[], Recall]]]
"""Reads a selection, given what was recalled before, which has some of it; the rows bool[B] that make a step, for of
others nothing is read; and the heads bool[B, K] of these that attend with it in this step. It returns the keys and
values for these heads, anything of others; and what reads for the rest of the rows' heads and returns it all, of other
rows the keys and values of before. The rest may be under way while the step goes on."""


class Schedule(Protocol):
    """Decides whether a step uses a selection for its own query or one that was made before."""

    def init(self, spec: CacheSpec, recall: Callable[[], Recall]) -> Any:
        """`recall` gives the shapes of what a step recalls."""
        ...

    def arrive(self, st: Any, active: Array) -> Any:
        """Rows where `active` bool[B] are about to attend with a new token."""
        ...

    def move(self, st: Any, slots: int, full: Array, place: Array) -> Any:
        """A flush of the rows where `full` bool[B] put slot r of the recent block at slot place[b, r], i32[B, R]; slots
        from `slots` on are those of the recent block."""
        ...

    def choose(
        self,
        st: Any,
        q: Array,
        length: Array,
        selection: Selection | PackedSelection,
        recall: Recaller,
    ) -> tuple[Choice, Any]:
        """What the step of q [B, K, G, D] attends with, and what the next step needs.

        `selection` is that for q, which `recall` reads; `length` i32[B] counts the tokens that rows hold.
        """
        ...


@dataclass(frozen=True)
class EveryStep:
    """Each step selects with its own query. No state."""

    def init(self, spec: CacheSpec, recall: Callable[[], Recall]) -> tuple[()]:
        return ()

    def arrive(self, st: tuple[()], active: Array) -> tuple[()]:
        return ()

    def move(self, st: tuple[()], slots: int, full: Array, place: Array) -> tuple[()]:
        return ()

    def choose(
        self,
        st: tuple[()],
        q: Array,
        length: Array,
        selection: Selection | PackedSelection,
        recall: Recaller,
    ) -> tuple[Choice, tuple[()]]:
        return Choice(selection, None), ()


@register_dataclass
@dataclass(frozen=True)
class SpeculativeState:
    """What a row's last step asked and recalled."""

    query: Array  # f32[B, K, G, D]
    slots: Array  # i32[B, K, H, M] where what was recalled lies now
    valid: Array  # bool[B, K, H, M]
    k: Array  # dtype[B, K, R, D]
    v: Array  # dtype[B, K, R, D]
    edge: Array  # bool[B]
    length: Array  # i32[B] tokens that the row held; -1 if it made no step yet
    due: Array  # bool[B] a token came that has not attended yet


@dataclass(frozen=True, kw_only=True)
class Speculative:
    """A step attends with what the step before recalled, except for heads whose query has turned.

    For each kv head, C = mean over its query heads of cosine(q_t, q_{t-1}). Heads with C >= tau attend with the keys
    and values that step t-1 recalled, the others with a fresh recall; the fresh recall of all heads is kept for t+1. So
    tau > 1 is a selection at every step, and tau <= -1 one that is always a step late. A row's first step selects anew,
    and so does one that a prompt, a replaced row or a dropped token parts from its last.

    A reused recall has the token that left the local window since beside it, in the place of its lowest-ranked one if
    that would exceed the budget. It holds tokens as they were, for a step also exact ones that a store of few bits has
    rounded since. Costs 2 M D values of the store's precision and the query in f32, a row and kv head,
    in device memory: the M tokens of the budget that are selected, or room for `dense_below`.

    Over a `HostOffload` store a step waits for what its own heads need. The rest of the recall, which it reads for the
    next one, goes on beside attention, the matrix products and the layers that follow, where the program was compiled
    with `memory.CONCURRENT`, as that of `kvjax.generate` is. Without it, and in plain JAX, attention waits for all.

    **Source:** FreeKV, speculative retrieval and fine-grained correction; tau 0.8 for long inputs, 0.9 for long
    generation. **Differs:** FreeKV selects for all heads only if one needs it, which the host decides; here every step
    selects and recalls and the device decides which recall is used, so that no step waits for the host.
    """

    tau: float = 0.8

    def __post_init__(self) -> None:
        if isinstance(self.tau, bool) or not isinstance(self.tau, int | float) or math.isnan(self.tau):
            raise ValueError(
                f"Speculative(tau={self.tau!r}) must be a number to compare cosines with: 0.8 or 0.9 as in FreeKV, "
                "above 1 to select at every step, -1 to always reuse"
            )

    def init(self, spec: CacheSpec, recall: Callable[[], Recall]) -> SpeculativeState:
        shapes = recall()
        selection, k, v, edge = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return SpeculativeState(
            query=jnp.zeros((spec.batch, spec.kv_heads, spec.group, spec.head_dim), jnp.float32),
            slots=selection.slots,
            valid=selection.valid,
            k=k,
            v=v,
            edge=edge,
            length=jnp.full(spec.batch, -1, jnp.int32),
            due=jnp.zeros(spec.batch, bool),
        )

    def arrive(self, st: SpeculativeState, active: Array) -> SpeculativeState:
        return replace(st, due=st.due | active)

    def move(self, st: SpeculativeState, slots: int, full: Array, place: Array) -> SpeculativeState:
        index = jnp.clip(st.slots - slots, 0, place.shape[1] - 1)
        moved = jnp.take_along_axis(place[:, None, None], index, axis=-1)
        moves = full[:, None, None, None] & (st.slots >= slots)
        return replace(st, slots=jnp.where(moves, moved, st.slots))

    def choose(
        self,
        st: SpeculativeState,
        q: Array,
        length: Array,
        selection: Selection | PackedSelection,
        recall: Recaller,
    ) -> tuple[Choice, SpeculativeState]:
        q = q.astype(jnp.float32)
        # Where a prompt came between, slots are not what they were.
        known = st.length + st.due.astype(jnp.int32) == length
        last = Recall(Selection(st.slots, st.valid & known[:, None, None, None]), st.k, st.v, st.edge)

        reused = (_similarity(q, st.query) >= self.tau) & (st.length + 1 == length)[:, None]
        now = ~reused & st.due[:, None]
        anew, rest = recall(last, st.due, now)

        def use(old: Array, new: Array) -> Array:
            return jnp.where(reused[:, :, None, None], old, new)

        chosen = Selection(use(st.slots, selection.slots), use(st.valid, selection.valid))
        fresh = rest()

        def keep(old: Array, new: Array) -> Array:
            return jnp.where(st.due.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        state = SpeculativeState(
            query=keep(st.query, q),
            slots=keep(st.slots, selection.slots),
            valid=keep(st.valid, selection.valid),
            k=fresh.k,
            v=fresh.v,
            edge=keep(st.edge, fresh.edge),
            length=keep(st.length, length),
            due=jnp.zeros_like(st.due),
        )
        return Choice(chosen, Read(last, anew, now, reused)), state


def _similarity(a: Array, b: Array) -> Array:
    """f32[B, K]: mean over the group of the cosine of a and b [B, K, G, D], within -1 and 1; 0 for a query of zeros."""
    sizes = jnp.sqrt(jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1))
    cosines = jnp.sum(a * b, axis=-1) / jnp.maximum(sizes, jnp.finfo(jnp.float32).tiny)
    return jnp.clip(jnp.mean(cosines, axis=-1), -1.0, 1.0)
