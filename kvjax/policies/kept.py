"""Policies of a draft's steps, of which the first selects and the others attend to the same.

    first step      sink | what it selected                    | local window
    a later step    sink | what it selected | have left since  | local window

The local window moves on with each token. A token that leaves it was not selected, and later
steps must not miss it: so the selection of the first step has room for one token of each later
step, and a later step counts those that have left by then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.zones import ZonedState


@register_dataclass
@dataclass(frozen=True)
class KeptState:
    """The state of a `Retrieval`, and what the first step of a draft selected."""

    state: ZonedState
    # The selection, with the slots of the tokens from `first_to_leave` on, of which none is
    # valid yet; None: no step has selected.
    selection: Selection | PackedSelection | None = None
    # i32[B] the position of the oldest token in the local window of that step, which leaves it
    # first; None as `selection`
    first_to_leave: Array | None = None

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.state.length

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return self.state.overflow


@dataclass(frozen=True)
class _DraftStep(Policy):
    """A step of a draft over a `Retrieval`, without a flush since the draft began."""

    policy: Retrieval
    later: int  # steps after the first one, at most

    takes_steps = True  # a model may feed its token as one of several
    takes_sinks = True

    def update_for_step(
        self, st: KeptState, k: Array, v: Array, active: Array, step: Step
    ) -> KeptState:
        return replace(st, state=self.policy.update_for_step(st.state, k, v, active, step))


@dataclass(frozen=True)
class FirstStep(_DraftStep):
    """Attends as the `Retrieval`, and keeps what it selected."""

    def attend(self, st: KeptState, q: Array, step: Step) -> tuple[Array, KeptState, Info]:
        policy = self.policy
        selection = policy.select(st.state, q, step)
        out, state, info = policy.attend(st.state, q, replace(step, selection=selection))
        first_to_leave = jnp.maximum(st.length - policy.local, policy.sink)
        kept = self._with_room(st.state, selection, first_to_leave)
        return out, KeptState(state, kept, first_to_leave), info

    def _with_room(
        self, st: ZonedState, selection: Selection | PackedSelection, first_to_leave: Array
    ) -> Selection | PackedSelection:
        """The selection [B, K, H, M] as one of M + `later` slots, of which the new ones are those
        of the tokens from `first_to_leave` i32[B] on, none of them valid yet.

        They follow the valid slots of a packed selection, and all slots of another.
        """
        size = selection.slots.shape[3]
        end: Array | int = size
        if isinstance(selection, PackedSelection):
            end = selection.found[..., None]
        # The number of each new slot among the new ones; below 0 for those of the selection.
        number = jnp.arange(size + self.later, dtype=jnp.int32)[None, None, None] - end

        position = first_to_leave[:, None, None, None] + jnp.clip(number, 0, self.later - 1)
        last_slot = st.store.slots + st.recent.slots - 1
        new_slots = jnp.minimum(self.policy.slots_at(st, position), last_slot)
        wider = ((0, 0), (0, 0), (0, 0), (0, self.later))
        slots = jnp.where(number < 0, jnp.pad(selection.slots, wider), new_slots)
        if isinstance(selection, PackedSelection):
            return PackedSelection(slots, selection.found)
        return Selection(slots, jnp.pad(selection.valid, wider))


@dataclass(frozen=True)
class LaterStep(_DraftStep):
    """Attends to what the `FirstStep` selected, and to what has left the local window since."""

    def attend(self, st: KeptState, q: Array, step: Step) -> tuple[Array, KeptState, Info]:
        step = replace(step, selection=self._with_those_that_left(st))
        out, state, info = self.policy.attend(st.state, q, step)
        return out, replace(st, state=state), info

    def _with_those_that_left(self, st: KeptState) -> Selection | PackedSelection:
        """The kept selection, in which the slots of tokens that have left the local window are
        valid.
        """
        kept = st.selection
        assert kept is not None
        assert st.first_to_leave is not None
        left = jnp.clip(st.length - self.policy.local - st.first_to_leave, 0, self.later)
        left = left[:, None, None]
        if isinstance(kept, PackedSelection):
            return PackedSelection(kept.slots, kept.found + left)
        size = kept.slots.shape[3]
        number = jnp.arange(size, dtype=jnp.int32)[None, None, None] - (size - self.later)
        has_left = (number >= 0) & (number < left[..., None])
        return Selection(kept.slots, kept.valid | has_left)
