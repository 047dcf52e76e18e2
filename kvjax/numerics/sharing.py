"""Rows that share prefixes: the arrays of a prefix are stored once, and the queries of its rows
read them together.

A prefix has no row axis of its own: P prefixes take the place of the B rows. For a pass over
the prefixes, the rows are put into groups of one prefix each, [B, ...] becomes [P, n, ...], and
the results go back to their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.spec import CacheSpec, keep_ints


@register_dataclass
@dataclass(frozen=True)
class Shared:
    """Arrays of a state whose first axis counts prefixes, not rows: functions that move rows
    leave them alone.
    """

    value: Any


def is_shared(x: Any) -> bool:
    """True for arrays of prefixes, which have no rows."""
    return isinstance(x, Shared)


class Groups(NamedTuple):
    """The rows of each prefix."""

    row: Array  # i32[P, n] the rows that share prefix p; B where there are fewer than n
    place: Array  # i32[B] where each row is among the P * n; P * n for a row without a prefix

    def gather(self, x: Array) -> Array:
        """x [B, ...] as [P, n, ...], with zeros where a prefix has fewer rows."""
        return jnp.take(x, self.row, axis=0, mode="fill", fill_value=0)

    def scatter(self, x: Array, fill: float = 0) -> Array:
        """x [P, n, ...] as [B, ...], with `fill` for rows without a prefix."""
        return jnp.take(
            x.reshape(-1, *x.shape[2:]), self.place, axis=0, mode="fill", fill_value=fill
        )


def group_rows(prefix: Array, prefixes: int, sharers: int) -> Groups:
    """Returns the groups of rows with prefix i32[B], at most `sharers` of one prefix; negative
    is none.
    """
    B = prefix.shape[0]
    row = jnp.arange(B, dtype=jnp.int32)
    rank = jnp.sum(
        (prefix[:, None] == prefix[None]) & (row[None] < row[:, None]), axis=1, dtype=jnp.int32
    )
    held = (prefix >= 0) & (prefix < prefixes) & (rank < sharers)
    place = jnp.where(held, prefix * sharers + rank, prefixes * sharers)
    rows = jnp.full(prefixes * sharers, B, jnp.int32).at[place].set(row, mode="drop")
    return Groups(rows.reshape(prefixes, sharers), place)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a part of a policy shares prefixes: a base of the store and the selector that do so.

    Args:
      tokens: most tokens of the history in a prefix, whole chunks.
      prefixes: how many different prefixes the rows of a batch may have.
      sharers: most rows with one prefix; None for all. A pass over the prefixes computes with
        `prefixes * sharers` rows, used or not.
    """

    tokens: int
    prefixes: int = 1
    sharers: int | None = None

    def __post_init__(self) -> None:
        keep_ints(self, tokens=1, prefixes=1, sharers=1)

    def groups(self, prefix: Array) -> Groups:
        B = prefix.shape[0]
        return group_rows(
            prefix, self.prefixes, B if self.sharers is None else min(self.sharers, B)
        )

    def check_part(self, part: Any, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError if prefixes do not hold whole chunks, or if not all arrays of
        `part` have slots.
        """
        slot_axes(part, spec)
        if self.tokens % chunk:
            raise ValueError(
                f"{type(self).__name__}(tokens={self.tokens}) must be whole chunks of {chunk} tokens, in which the "
                f"history grows; use {-(-self.tokens // chunk) * chunk}"
            )


class SlotAxis(NamedTuple):
    """The axis of an array that grows with the slots of a store, by `size` entries for each
    `slots` slots.
    """

    axis: int
    size: int
    slots: int

    def entries(self, slots: Any) -> Any:
        return slots * self.size // self.slots


@lru_cache(maxsize=256)
def slot_axes(part: Any, spec: CacheSpec) -> tuple[SlotAxis | None, ...]:
    """Returns the axis of slots of each array of a store or selector; None for a count.

    Raises:
      ValueError: an array that belongs to a whole row.
    """
    slots = (1 << 20) * (part.unit if hasattr(part, "unit") else part.page)
    one, two = (jax.eval_shape(partial(part.init, spec, n * slots)) for n in (1, 2))
    found: list[SlotAxis | None] = []
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(two), strict=True):
        grown = [
            axis
            for axis, sizes in enumerate(zip(a.shape, b.shape, strict=True))
            if sizes[0] != sizes[1]
        ]
        if len(grown) == 1 and b.shape[grown[0]] == 2 * a.shape[grown[0]]:
            found.append(SlotAxis(grown[0], a.shape[grown[0]], slots))
        elif jax.tree_util.keystr(path).endswith(".count"):
            found.append(None)
        else:
            raise ValueError(
                f"rows of {part} cannot share a prefix: its array{jax.tree_util.keystr(path)} describes a row as a "
                "whole; use a store or a selector all of whose arrays have slots, or copies (kvjax.take_rows)"
            )
    return tuple(found)
