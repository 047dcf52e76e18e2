"""The protocols of cache policies, and `Info`, the report of what a step read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.partial import PartialAttention
from kvjax.numerics.selection import Selection
from kvjax.spec import CacheSpec


class Info(NamedTuple):
    """The tokens that a decode step read: how many, which ones, and which were selected.

    XLA removes fields that a program does not use.
    """

    attended: Array  # f32[B, K] tokens whose keys and values were read; mean over the selections of a GQA group
    selection: Selection | None  # slots that a selector selected; None where everything is read
    fresh: Array | None = None  # bool[B, K] heads that selected with this step's query; None where all heads always do
    positions: Array | None = None  # i32[B, K, H, M] tokens that were read, once each, in any order; -1 is padding
    log_weights: Array | None = (
        None  # f32[B, K, H, M] added to the logits of `positions`; None where attention is plain
    )


class Policy(Protocol):
    """The verbs that `kvjax.attention` calls. All are pure and take arrays with kv heads before tokens: [B, K, ...]."""

    def init(self, spec: CacheSpec) -> Any: ...

    def prefill(self, st: Any, k: Array, v: Array, lengths: Array) -> Any:
        """Stores the first `lengths` i32[B] tokens of k, v [B, K, T, D]."""
        ...

    def update(self, st: Any, k: Array, v: Array, active: Array) -> Any:
        """Stores k, v [B, K, 1, D] of the rows where `active` bool[B] is true."""
        ...

    def attend(self, st: Any, q: Array, *, scale: float, window: int | None = None) -> tuple[Array, Any, Info]:
        """Attends with q [B, K, G, D], the queries of each row's newest token: [B, K, G, D] in any float dtype."""
        ...

    def attend_stored(self, st: Any, q: Array, *, scale: float, window: int | None = None) -> PartialAttention:
        """Exact attention of a chunk's queries q [B, K, G, T, D] over all stored tokens, a part over Q = G*T.

        The position of query t is `length` + t.
        """
        ...

    def full_rows(self, st: Any) -> Array | None:
        """bool[B]: rows from which `flush` would move tokens; None for a policy that never needs a flush."""
        ...

    def flush(self, st: Any) -> Any: ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes per token of a long context, in one layer over all kv heads."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A policy that decides by a prompt's queries what to keep; `kvjax.attention` calls this in place of `prefill`."""

    def prefill_observed(
        self, st: Any, q: Array, k: Array, v: Array, lengths: Array, *, scale: float, window: int | None = None
    ) -> Any:
        """`prefill` of k, v with the queries q [B, K, G, T, D]."""
        ...


@runtime_checkable
class Growing(Protocol):
    """A policy whose state holds numbers that depend on the capacity; `kvjax.grow` calls it to renumber them."""

    def grown(self, st: Any, before: Any) -> Any:
        """Renumbers `st`, the arrays of `before` copied into larger ones, as if it had always been this large."""
        ...


@runtime_checkable
class Pausing(Protocol):
    """A policy that spares reads of host memory for rows that take no step; `kvjax.attention` calls this in place of
    `attend`."""

    def attend_active(
        self, st: Any, q: Array, active: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, Any, Info]:
        """`attend` for the rows where `active` bool[B] is true. Output and Info of other rows mean nothing."""
        ...


@runtime_checkable
class MultiStep(Protocol):
    """A policy that takes several decode steps in one pass; with others `kvjax.decode` takes one after the other."""

    def decode(
        self, st: Any, q: Array, k: Array, v: Array, count: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, Any, Info]:
        """Takes the first `count` i32[B] of T steps with q [B, K, G, T, D] and k, v [B, K, T, D], without a flush.

        Returns attention [B, K, G, T, D], the state after all steps, and the Infos of the steps, stacked along a first
        axis. A token without room sets `overflow`. Law: equals `update` and `attend` for one token after the other.
        """
        ...

    def free(self, st: Any) -> Array:
        """i32[B]: tokens that each row can take before it needs a flush or is full."""
        ...


@runtime_checkable
class Reversible(Protocol):
    """A policy that can remove its newest tokens again, back to the last flush: see `kvjax.rollback`."""

    def free(self, st: Any) -> Array:
        """i32[B]: tokens that each row can take before it needs a flush or is full."""
        ...

    def earliest(self, st: Any) -> Array:
        """i32[B]: the smallest length to which `rollback` can return each row."""
        ...

    def rollback(self, st: Any, lengths: Array) -> Any:
        """`st` with the first `lengths` i32[B] tokens of each row, between `earliest` and its length.

        Law: equals a state to which later tokens never came. A row whose length is out of range stays as it is and sets
        `overflow`.
        """
        ...


@runtime_checkable
class Truncatable(Protocol):
    """A policy that can shorten a cache to any earlier length: see `kvjax.truncate`."""

    def truncate(self, st: Any, lengths: Array) -> Any:
        """`st` with the first `lengths` i32[B] tokens of each row, between 0 and its length.

        Law: everything it holds equals, to the bit, the state after a prompt of that many tokens. A row whose length is
        out of range stays as it is and sets `overflow`. Raises ValueError, with the reason, if a part of the policy has
        lost what a shorter prompt would hold.
        """
        ...


def chunk_starts(length: Array, T: int, window: int | None) -> Array | None:
    """i32[B, T]: the lowest position that each of T queries past `length` i32[B] tokens sees; None without a window."""
    if window is None:
        return None
    return lowest_visible(length[:, None] + jnp.arange(T, dtype=jnp.int32)[None], window)


def lowest_visible(position: Array, window: int | None) -> Array:
    """The lowest position that a query at `position` sees; a window counts the query's own token."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def step_lengths(length: Array, count: Array, T: int, free: Array) -> Array:
    """i32[T, B]: the length of each row after each of T steps, of which it takes the first `count` i32[B].

    `length` i32[B] is the length before the steps, `free` i32[B] the room of each row; tokens without room are dropped.
    """
    stored = jnp.minimum(count, free)
    return length[None] + jnp.minimum(jnp.arange(1, T + 1, dtype=jnp.int32)[:, None], stored[None])


def steps_as_heads(q: Array) -> Array:
    """Queries [B, K, G, T, D] of T steps as [B, K, T*G, D]: each step's query heads after the previous step's."""
    B, K, G, T, D = q.shape
    return jnp.swapaxes(q, 2, 3).reshape(B, K, T * G, D)


def heads_as_steps(out: Array, T: int) -> Array:
    """Outputs [B, K, T*G, D] of the query heads of T steps as [B, K, G, T, D]; the inverse of `steps_as_heads`."""
    B, K, _, D = out.shape
    return jnp.swapaxes(out.reshape(B, K, T, -1, D), 2, 3)


def in_range(lengths: Array, earliest: Array, length: Array) -> tuple[Array, Array]:
    """`lengths` i32[B], with `length` where they are not in [earliest, length], and bool[B]: where they are not."""
    outside = (lengths < earliest) | (lengths > length)
    return jnp.where(outside, length, lengths), outside


def attend_in_turn(
    attend: Callable[..., tuple[Array, Any, Info]], st: Any, q: Array, *of_each: Any
) -> tuple[Array, Any, Info]:
    """Runs T steps, one after the other, over tokens that are already stored.

    Each step is attend(state, q [B, K, G, D], *of_each) -> (out, state, Info). Here q is [B, K, G, T, D], and the
    arrays of `of_each` have T as their first axis. Returns attention [B, K, G, T, D], the last state, and the Infos,
    stacked along a first axis.
    """

    def step(st: Any, x: Any) -> tuple[Any, tuple[Array, Info]]:
        out, st, info = attend(st, *x)
        return st, (out, info)

    st, (out, info) = lax.scan(step, st, (jnp.moveaxis(q, 3, 0), *of_each))
    return jnp.moveaxis(out, 0, 3), st, info
