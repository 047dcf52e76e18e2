"""The protocol of cache policies, and what a step tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax

from kvjax.partial import PartialAttention
from kvjax.selection import Selection
from kvjax.spec import CacheSpec


class Info(NamedTuple):
    """The tokens that a decode step read: how many, which ones, and which were selected.

    XLA removes fields that a program does not use.
    """

    attended: Array  # f32[B, K] tokens whose keys and values were read, mean over the group's own selections
    selection: Selection | None  # slots that a selector selected; None where everything is read
    fresh: Array | None = None  # bool[B, K] heads that selected with this step's query; None where all heads always do
    positions: Array | None = None  # i32[B, K, H, M] tokens that were read, once each, in any order; -1 where none
    log_weights: Array | None = (
        None  # f32[B, K, H, M] added to the logits of `positions`; None where attention is plain
    )


class Policy(Protocol):
    """The verbs that `kvjax.attention` calls. All are pure, and see kv heads before tokens: [B, K, ...]."""

    def init(self, spec: CacheSpec) -> Any: ...

    def prefill(self, st: Any, k: Array, v: Array, lengths: Array) -> Any:
        """Stores the first `lengths` i32[B] tokens of k, v [B, K, T, D]."""
        ...

    def update(self, st: Any, k: Array, v: Array, active: Array) -> Any:
        """Stores k, v [B, K, 1, D] of the rows where `active` bool[B]."""
        ...

    def attend(self, st: Any, q: Array, *, scale: float, window: int | None = None) -> tuple[Array, Any, Info]:
        """Attention [B, K, G, D], in any float dtype, of q [B, K, G, D]: the queries of each row's newest token."""
        ...

    def attend_stored(self, st: Any, q: Array, *, scale: float, window: int | None = None) -> PartialAttention:
        """Exact attention of a chunk's queries q [B, K, G, T, D] over all that is stored, a part over Q = G*T.

        Query t of the chunk stands t tokens past what is stored.
        """
        ...

    def full_rows(self, st: Any) -> Array | None:
        """bool[B]: rows that `flush` would demote from; None for a policy that never needs a flush."""
        ...

    def flush(self, st: Any) -> Any: ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes that a token of a long context takes in a layer, over all kv heads."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A policy that selects what to keep of a prompt by its queries too; the hook calls this in place of `prefill`."""

    def prefill_observed(
        self, st: Any, q: Array, k: Array, v: Array, lengths: Array, *, scale: float, window: int | None = None
    ) -> Any:
        """`prefill` of k, v with the queries q [B, K, G, T, D]."""
        ...


@runtime_checkable
class Growing(Protocol):
    """A policy whose state has numbers that depend on the capacity; `kvjax.grow` asks it to renumber them."""

    def grown(self, st: Any, before: Any) -> Any:
        """`st`, whose arrays are those of `before` in the first slots of larger ones, as if it had been so large."""
        ...


@runtime_checkable
class MultiStep(Protocol):
    """A policy that takes several decode steps at once; without it `kvjax.decode` takes them one after the other."""

    def decode(
        self, st: Any, q: Array, k: Array, v: Array, count: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, Any, Info]:
        """The first `count` i32[B] of T steps with q [B, K, G, T, D] and k, v [B, K, T, D], and no flush between them.

        Attention [B, K, G, T, D], the state after all steps, and the Infos of the steps, stacked in front. A token
        without room sets `overflow`. Law: this is `update` and `attend` for one token after the other.
        """
        ...

    def free(self, st: Any) -> Array:
        """i32[B]: tokens that each row takes before it must be flushed, or is full."""
        ...


@runtime_checkable
class Reversible(Protocol):
    """A policy that can take back its newest tokens, as far as nothing was flushed for them: see `kvjax.rollback`."""

    def free(self, st: Any) -> Array:
        """i32[B]: tokens that each row takes before it must be flushed, or is full."""
        ...

    def earliest(self, st: Any) -> Array:
        """i32[B]: the smallest length that `rollback` can take each row back to."""
        ...

    def rollback(self, st: Any, lengths: Array) -> Any:
        """`st` with the first `lengths` i32[B] tokens of each row, from `earliest` to what it holds.

        Law: as if later tokens had never come. A row whose length lies outside stays and sets `overflow`.
        """
        ...


@runtime_checkable
class Truncatable(Protocol):
    """A policy that can shorten a cache to any earlier length: see `kvjax.truncate`."""

    def truncate(self, st: Any, lengths: Array) -> Any:
        """`st` with the first `lengths` i32[B] tokens of each row, from 0 to what it holds.

        Law: in all that is held, the state of a prompt of so many tokens, to the bit. A row whose length lies outside
        stays and sets `overflow`. Raises ValueError, with the reason, where a part of the policy has lost what a
        shorter prompt would hold.
        """
        ...


def chunk_starts(length: Array, T: int, window: int | None) -> Array | None:
    """i32[B, T]: the lowest position that each query of a chunk of T sees past `length` i32[B]; None if it sees all."""
    if window is None:
        return None
    return lowest_visible(length[:, None] + jnp.arange(T, dtype=jnp.int32)[None], window)


def lowest_visible(position: Array, window: int | None) -> Array:
    """The lowest position that a query at `position` sees; a window counts the query's own token."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def step_lengths(length: Array, count: Array, T: int, free: Array) -> Array:
    """i32[T, B]: the length of each row after each of T steps, of which it takes the first `count` i32[B].

    `length` i32[B] is that before them. A token is dropped if a row has no room for it: `free` i32[B] before them.
    """
    stored = jnp.minimum(count, free)
    return length[None] + jnp.minimum(jnp.arange(1, T + 1, dtype=jnp.int32)[:, None], stored[None])


def steps_as_heads(q: Array) -> Array:
    """Queries [B, K, G, T, D] of T steps as [B, K, T*G, D]: the query heads of one step after those of the other."""
    B, K, G, T, D = q.shape
    return jnp.swapaxes(q, 2, 3).reshape(B, K, T * G, D)


def heads_as_steps(out: Array, T: int) -> Array:
    """[B, K, G, T, D] of what [B, K, T*G, D] is for the query heads of T steps; undoes `steps_as_heads`."""
    B, K, _, D = out.shape
    return jnp.swapaxes(out.reshape(B, K, T, -1, D), 2, 3)


def in_range(lengths: Array, earliest: Array, length: Array) -> tuple[Array, Array]:
    """`lengths` i32[B] with those outside of earliest to length replaced by length, and bool[B]: which were outside."""
    outside = (lengths < earliest) | (lengths > length)
    return jnp.where(outside, length, lengths), outside


def attend_in_turn(
    attend: Callable[..., tuple[Array, Any, Info]], st: Any, q: Array, *of_each: Any
) -> tuple[Array, Any, Info]:
    """T steps over tokens that are stored already: attend(state, q [B, K, G, D], *of_each) -> out, state, Info.

    q is [B, K, G, T, D], and the arrays of `of_each` have T in front. Returns attention [B, K, G, T, D], the last state
    and the Infos, stacked in front.
    """

    def step(st: Any, x: Any) -> tuple[Any, tuple[Array, Info]]:
        out, st, info = attend(st, *x)
        return st, (out, info)

    st, (out, info) = lax.scan(step, st, (jnp.moveaxis(q, 3, 0), *of_each))
    return jnp.moveaxis(out, 0, 3), st, info
