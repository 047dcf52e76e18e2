"""Drafts by a selection of the step that verified the last one, to measure beside those that select
in every step.

A verification reads all tokens. So it can also say which of them the next draft should read,
and the draft steps need no scores of their own: one selection serves them all.

- `Verified(Retrieval(selector=Exact()))` selects by the attention of the verified queries, of
  which the verification has the scores anyway. It needs no index: that of `Exact`, a copy of the
  keys, stands for scores that the kernel would keep.
- `Verified(Retrieval(selector=Fier()))` and other selectors select by their index, once in a
  round instead of once in a step.

**Source:** SparseSpec, PillarAttn (arXiv 2607.27735): critical tokens of the next draft by the
scores of the verification. **Differs:** all verified tokens count, because which of them are
accepted is known after the step; and tokens that leave the local window since then are read, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.attention import MOST_STEPS
from kvjax.numerics.partial import PartialAttention
from kvjax.numerics.selection import Selection, unpack
from kvjax.policies import Info, PerLayer, Policy, Retrieval, Step
from kvjax.policies.policy import attend_in_turn
from kvjax.policies.zones import ZonedState
from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class VerifiedState:
    """The tokens, and those that the last verification selected."""

    zones: ZonedState
    positions: Array  # i32[B, K, 1, M] selected; -1: none
    verified: Array  # i32[B] tokens that the row held then

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return self.zones.length

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return self.zones.overflow


@dataclass(frozen=True)
class Verified(Policy):
    """A `Retrieval` whose exact steps select for the steps after them.

    A step that is not exact attends to sink, local window, that selection, and the tokens that
    have left the window since, of which a draft has fewer than `MOST_STEPS`. Before the first
    exact step nothing is selected. So it is for `kvjax.SelfDraft` only.
    """

    retrieval: Retrieval

    takes_steps = True
    takes_sinks = True
    takes_exact = True
    reversible = True

    def __post_init__(self) -> None:
        policy = self.retrieval
        if not policy.demote.ordered or policy.selector.group_reduce == "per_head":
            raise ValueError(
                f"Verified takes a Retrieval that keeps tokens in order and selects for a group, got {policy!r}; use "
                "kvjax.Fifo and a group_reduce other than per_head"
            )

    @property
    def selects(self) -> bool:
        return True

    @property
    def selector(self) -> Any:
        return self.retrieval.selector

    @property
    def budget(self) -> int:
        return self.retrieval.budget

    @property
    def demote(self) -> Any:
        return self.retrieval.demote

    def init(self, spec: CacheSpec) -> VerifiedState:
        zones = self.retrieval.init(spec)
        _, units = self.retrieval.sizes(zones)
        lists = (spec.batch, spec.kv_heads, 1, units * self.selector.unit)
        return VerifiedState(
            zones=zones,
            positions=jnp.full(lists, -1, jnp.int32),
            verified=jnp.zeros(spec.batch, jnp.int32),
        )

    # ------------------------------------------------------------------------------ attending

    def attend(
        self, st: VerifiedState, q: Array, step: Step
    ) -> tuple[Array, VerifiedState, Info]:
        if step.exact:
            out, zones, info = self.retrieval.attend(st.zones, q, step)
            return out, self._selected_by(replace(st, zones=zones), q, step), info
        if step.lengths is not None:
            return attend_in_turn(self, self._shortened, st, q, step)
        selection = self.select(st, q, step)
        out, zones, info = self.retrieval.attend_selected(st.zones, q, selection, step)
        return out, replace(st, zones=zones), info

    def _selected_by(self, st: VerifiedState, q: Array, step: Step) -> VerifiedState:
        """Selects by the queries of an exact step, [B, K, G, D] or [B, K, G, T, D]: those of all
        tokens that a row fed, as if they were one larger group.
        """
        policy = self.retrieval
        if step.lengths is not None:
            q = _fed(q, step.lengths)
            B, K, G, T, D = q.shape
            q = q.reshape(B, K, G * T, D)
        selection = unpack(policy.select(st.zones, q, Step(step.logits, step.window)))
        positions = policy.positions(st.zones, selection.slots)
        return replace(
            st,
            positions=jnp.where(selection.valid, positions, -1),
            verified=st.zones.length,
        )

    def select(self, st: VerifiedState, q: Array, step: Step) -> Selection:
        """What the last exact step selected, and the tokens that left the local window since."""
        policy = self.retrieval
        window = (st.length - policy.local)[
            :, None, None, None
        ]  # where the local window begins
        before = st.verified[:, None, None, None] - policy.local
        later = window - 1 - jnp.arange(MOST_STEPS, dtype=jnp.int32)[None, None, None]
        later = jnp.where(later >= jnp.maximum(before, policy.sink), later, -1)
        heads = st.positions.shape[:3]
        later = jnp.broadcast_to(later, (*heads, MOST_STEPS))
        positions = jnp.concatenate([st.positions, later], axis=3)
        # A token that was verified and not accepted is gone, and the window may reach further
        # back than before.
        valid = (positions >= 0) & (positions < window)
        first = policy.visible(st.zones, step.window).first
        if first is not None:
            valid &= positions >= first[:, None, None, None]
        slots = policy.slots_at(st.zones, jnp.where(valid, positions, policy.sink))
        return Selection(jnp.maximum(slots, 0), valid)

    def attend_stored(self, st: VerifiedState, q: Array, step: Step) -> PartialAttention:
        return self.retrieval.attend_stored(st.zones, q, step)

    # -------------------------------------------------------------------------------- storing

    def prefill(self, st: VerifiedState, k: Array, v: Array, lengths: Array) -> VerifiedState:
        return replace(st, zones=self.retrieval.prefill(st.zones, k, v, lengths))

    def update(self, st: VerifiedState, k: Array, v: Array, active: Array) -> VerifiedState:
        return replace(st, zones=self.retrieval.update(st.zones, k, v, active))

    def store_steps(self, st: VerifiedState, k: Array, v: Array, count: Array) -> VerifiedState:
        return replace(st, zones=self.retrieval.store_steps(st.zones, k, v, count))

    def full_rows(self, st: VerifiedState) -> Array:
        return self.retrieval.full_rows(st.zones)

    def flush(self, st: VerifiedState) -> VerifiedState:
        return replace(st, zones=self.retrieval.flush(st.zones))

    def free(self, st: VerifiedState) -> Array:
        return self.retrieval.free(st.zones)

    def earliest(self, st: VerifiedState) -> Array:
        return self.retrieval.earliest(st.zones)

    def rollback(self, st: VerifiedState, lengths: Array) -> VerifiedState:
        return replace(st, zones=self.retrieval.rollback(st.zones, lengths))

    def _shortened(self, st: VerifiedState, lengths: Array) -> VerifiedState:
        return replace(st, zones=self.retrieval.shortened(st.zones, lengths))


def _fed(q: Array, lengths: Array) -> Array:
    """Queries [B, K, G, T, D] in which later tokens have the query of the last one that a row fed."""
    fed = jnp.diff(lengths, axis=0) > 0
    last = jnp.concatenate(
        [jnp.zeros_like(lengths[:1]), jnp.cumsum(fed, axis=0, dtype=jnp.int32)]
    )
    return jax.vmap(lambda row, order: row[:, :, order], (0, 1))(q, last)


def verified(policies: PerLayer) -> PerLayer:
    """The policies of a method, each `Retrieval` as a `Verified`."""

    def of(policy: Policy) -> Policy:
        return Verified(policy) if isinstance(policy, Retrieval) else policy

    return PerLayer(tuple(map(of, policies.first)), of(policies.rest))
