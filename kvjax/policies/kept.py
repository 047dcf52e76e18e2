"""A policy whose steps keep what they selected, so that the steps after them select nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.retrieval import Retrieval


@register_dataclass
@dataclass(frozen=True)
class KeptState:
    """The state of a policy, and the selection of a step."""

    state: Any
    # With room for the tokens that leave the local window later; None: no step has selected yet.
    selection: Selection | PackedSelection | None = None
    first: Array | None = None  # i32[B] the position of the first of those

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        length: Array = self.state.length
        return length

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        overflow: Array = self.state.overflow
        return overflow


@dataclass(frozen=True)
class Kept(Policy):
    """A `Retrieval` for decode steps of one token without a flush between them, of which the
    first selects.

    The `later` steps after it, at most, attend to the same tokens, and to those that have left
    the local window since.
    """

    policy: Retrieval
    later: int
    again: bool = False  # a step after the first one

    takes_steps = True  # a model may feed its token as one of several
    takes_sinks = True

    def update_for_step(
        self, st: KeptState, k: Array, v: Array, active: Array, step: Step
    ) -> KeptState:
        return replace(st, state=self.policy.update_for_step(st.state, k, v, active, step))

    def attend(self, st: KeptState, q: Array, step: Step) -> tuple[Array, KeptState, Info]:
        policy = self.policy
        if self.again:
            step = replace(step, selection=self._with_later(st))
            out, state, info = policy.attend(st.state, q, step)
            return out, replace(st, state=state), info
        selection = policy.select(st.state, q, step)
        out, state, info = policy.attend(st.state, q, replace(step, selection=selection))
        first = jnp.maximum(st.length - policy.local, policy.sink)
        return out, KeptState(state, self._with_room(st.state, selection, first), first), info

    def _with_room(
        self, st: Any, selection: Selection | PackedSelection, first: Array
    ) -> Selection | PackedSelection:
        """A selection with the slots of the tokens from `first` i32[B] on, none of which is valid
        yet: after those that are found, or after all where these are not packed.
        """
        size = selection.slots.shape[3]
        found: Array | int = size
        if isinstance(selection, PackedSelection):
            found = selection.found[..., None]
        place = jnp.arange(size + self.later, dtype=jnp.int32)[None, None, None] - found
        position = first[:, None, None, None] + jnp.clip(place, 0, self.later - 1)
        last = st.store.slots + st.recent.slots - 1
        slots = jnp.minimum(self.policy.slots_at(st, position), last)
        wider = ((0, 0),) * 3 + ((0, self.later),)
        slots = jnp.where(place < 0, jnp.pad(selection.slots, wider), slots)
        if isinstance(selection, PackedSelection):
            return PackedSelection(slots, selection.found)
        return Selection(slots, jnp.pad(selection.valid, wider))

    def _with_later(self, st: KeptState) -> Selection | PackedSelection:
        """The kept selection, and the tokens that have left the local window."""
        kept = st.selection
        assert kept is not None
        assert st.first is not None
        left = jnp.clip(st.length - self.policy.local - st.first, 0, self.later)
        left = left[:, None, None]
        if isinstance(kept, PackedSelection):
            return PackedSelection(kept.slots, kept.found + left)
        size = kept.slots.shape[3]
        place = jnp.arange(size, dtype=jnp.int32)[None, None, None] - (size - self.later)
        return Selection(kept.slots, kept.valid | ((place >= 0) & (place < left[..., None])))
