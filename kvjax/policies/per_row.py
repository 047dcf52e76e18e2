"""Rows of one layer under one policy, in groups of different capacity: see the `small_slots` of
`kvjax.Engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.memory import in_host_memory, move_to
from kvjax.policies.policy import Info, Policy, Step
from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class PerRowState:
    """The states of the policy, one for each group of rows."""

    groups: tuple[Any, ...]

    @property
    def length(self) -> Array:
        """i32[B] tokens received."""
        return jnp.concatenate([group.length for group in self.groups])

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return jnp.concatenate([group.overflow for group in self.groups])


@dataclass(frozen=True, kw_only=True)
class PerRow(Policy):
    """`policy` for rows of several capacities; `sizes` has the number of rows and the capacity
    of each group.

    A decode step attends by one call for each group, and the model multiplies the tokens of all
    rows at once. Prompts are read into rows of the plain policy (`put_row`).
    """

    policy: Policy
    sizes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.policy.follows:
            raise ValueError(
                f"rows of {self.policy} must have one capacity: it needs other layers; leave out small_slots"
            )

    def init(self, spec: CacheSpec) -> PerRowState:
        specs = [replace(spec, batch=rows, capacity=capacity) for rows, capacity in self.sizes]
        return PerRowState(tuple(map(self.policy.init, specs)))

    takes_sinks = True  # a policy that takes none has refused them in the prompt

    def update(self, st: PerRowState, k: Array, v: Array, active: Array) -> PerRowState:
        parts = [
            self.policy.update(group, k[own], v[own], active[own])
            for own, group in self._parts(st)
        ]
        return PerRowState(tuple(parts))

    def update_for_step(
        self, st: PerRowState, k: Array, v: Array, active: Array, step: Step
    ) -> PerRowState:
        parts = [
            self.policy.update_for_step(group, k[own], v[own], active[own], step)
            for own, group in self._parts(st)
        ]
        return PerRowState(tuple(parts))

    def attend(self, st: PerRowState, q: Array, step: Step) -> tuple[Array, PerRowState, Info]:
        def attend(own: slice, group: Any) -> tuple[Array, Any, Info]:
            active = None if step.active is None else step.active[own]
            return self.policy.attend(group, q[own], replace(step, active=active))

        out, states, infos = zip(*(attend(*part) for part in self._parts(st)), strict=True)
        attended = jnp.concatenate([info.attended for info in infos])
        return jnp.concatenate(out), PerRowState(states), Info(attended, None)

    def full_rows(self, st: PerRowState) -> Array | None:
        rows = [
            full for group in st.groups if (full := self.policy.full_rows(group)) is not None
        ]
        return jnp.concatenate(rows) if rows else None

    def flush(self, st: PerRowState) -> PerRowState:
        return PerRowState(tuple(map(self.policy.flush, st.groups)))

    def group_of(self, row: int) -> tuple[int, int]:
        """The group of a row, and its place there."""
        for group, (rows, _) in enumerate(self.sizes):
            if row < rows:
                return group, row
            row -= rows
        raise IndexError(row)

    def put_row(self, st: PerRowState, row: Any, group: int, place: Array) -> PerRowState:
        """`st` with the row at a place replaced by `row`, the state of one row of at least that
        capacity.

        Slots fill in order, so a row of fewer tokens than the capacity is in the first slots of
        each array.
        """

        def put(whole: Array, new: Array) -> Array:
            new = lax.slice(
                move_to(new, host=False), (0,) * new.ndim, (1, *whole.shape[1:])
            ).astype(whole.dtype)
            return lax.dynamic_update_slice_in_dim(
                whole, move_to(new, host=in_host_memory(whole)), place, 0
            )

        states = list(st.groups)
        states[group] = jax.tree.map(put, states[group], row)
        return PerRowState(tuple(states))

    def take_row(self, st: PerRowState, group: int, place: Array, spec: CacheSpec) -> Any:
        """The state of the row at a place, as one of the plain policy for `spec`, which has at
        least its capacity.
        """
        row = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, place, 1), st.groups[group])

        def widen(new: Array, old: Array) -> Array:
            whole = lax.dynamic_update_slice(
                move_to(new, host=False), move_to(old, host=False), (0,) * old.ndim
            )
            return move_to(whole, host=in_host_memory(new))

        return self.policy.grown(jax.tree.map(widen, self.policy.init(spec), row), row)

    def _parts(self, st: PerRowState) -> Iterator[tuple[slice, Any]]:
        """The rows of each group, and its state."""
        first = 0
        for (rows, _), group in zip(self.sizes, st.groups, strict=True):
            yield slice(first, first + rows), group
            first += rows
