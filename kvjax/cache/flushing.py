"""Moves tokens of full recent blocks to the history, for all layers of a cache under one
condition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax import ops
from kvjax.cache.cache import C, check_cache, layers_of, rows_to_flush, run_by_part, with_states
from kvjax.memory import computed_last, has_host_arrays
from kvjax.policies import Policy

S = TypeVar("S")


def flush(cache: C) -> C:
    """Moves a chunk of tokens from each full recent block to the history, all layers under one
    `lax.cond`.

    A model that passes `flush=False` to `attention` calls this once before each step. Without
    it the block stays full, and the next token of that row is dropped, which
    `raise_on_overflow` reports.

    Layers that are stacked along a first axis, to be scanned over, are flushed together as
    well; inside of the scan, `attention` with its default `flush=True` flushes one layer at a
    time and copies less.

    Call it before the step, not after: attention then reads what the flush wrote, which fixes
    their order. After the step, XLA sees no order between the reads of the step and the writes
    of the flush, and copies the whole store.
    """
    check_cache("flush", cache)
    if cache.length.ndim > 1:
        return jax.vmap(flush)(cache)
    return _flush_on_parts(cache) if layers_of(cache)[0].placement else flush_full(cache)


def flush_full(cache: Any, taking: Array | None = None) -> Any:
    """`flush` of a checked cache that is on one device, or of a device's part; only if a full
    row is one of those that are `taking` bool[B] a token, if given."""
    layers = layers_of(cache)
    full = rows_to_flush(layers)
    if not full:
        return cache
    full = full if taking is None else [rows & taking for rows in full]
    states = tuple(layer.state for layer in layers)

    def demote(states: tuple[Any, ...]) -> tuple[Any, ...]:
        done: list[Any] = []
        for i, layer in enumerate(
            layers
        ):  # in turn: at the same time, each would have arrays of its own
            st = computed_last(states[i], done[-1], states[i - 1])[0] if done else states[i]
            done.append(_flush_layer(layer.policy, st, states[i]))
        return tuple(done)

    states = _if_any(full, demote, states)
    return with_states(cache, states)


def _flush_layer(policy: Policy, state: Any, before: Any) -> Any:
    """`policy.flush`, traced once for all layers of equal policies and shapes.

    An array that a flush does not change is the one of `before`, not a result of the shared
    trace.
    """
    if not ops.shares_traces():
        after = policy.flush(state)
        return _changed(after, state).keep_others(after, before)
    after, changed = _traced_flush(policy, state)
    return changed.keep_others(after, before)


@partial(jax.jit, static_argnums=0, inline=True)
def _traced_flush(policy: Policy, state: Any) -> tuple[Any, _Changed]:
    after = policy.flush(state)
    return _counted_last(after, state), _changed(after, state)


def _counted_last(after: S, before: S) -> S:
    """`after`, with counts i32[B] that are added to those of `before` once all else is written.

    XLA can then add in place. It would otherwise copy a layer's counts twice in every step,
    whether it flushes or not.
    """
    given, leaves = map(jax.tree.leaves, (before, after))
    pairs = enumerate(zip(given, leaves, strict=True))
    added = {
        i: new - old
        for i, (old, new) in pairs
        if new is not old and new.ndim == 1 and new.dtype == jnp.int32
    }
    added, after = computed_last(added, after, before)
    leaves, tree = jax.tree.flatten(after)
    return jax.tree.unflatten(
        tree, [given[i] + added[i] if i in added else leaf for i, leaf in enumerate(leaves)]
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Changed:
    """The arrays of a state that a flush changes: one bool per leaf. Static, so that a trace
    can return it.
    """

    leaves: tuple[bool, ...]

    def keep_others(self, after: S, before: S) -> S:
        """`after`, with the arrays of `before` that a flush does not change."""
        given, tree = jax.tree.flatten(before)
        leaves = zip(jax.tree.leaves(after), given, self.leaves, strict=True)
        return jax.tree.unflatten(
            tree, [new if changes else old for new, old, changes in leaves]
        )


def _changed(after: Any, before: Any) -> _Changed:
    """The arrays that a flush changes, by their identity. Called within the trace of the flush,
    because jax 0.11 returns new values for arguments that an inlined jit passes on."""
    leaves = zip(*map(jax.tree.leaves, (after, before)), strict=True)
    return _Changed(tuple(new is not old for new, old in leaves))


@partial(jax.jit, inline=True)
def _flush_on_parts(cache: Any) -> Any:
    """`flush_full`, by each device for its rows; devices need not agree, because no flush reads
    another's part.
    """
    return run_by_part(flush_full, cache) if rows_to_flush(layers_of(cache)) else cache


def _if_any(full: list[Array], demote: Callable[[S], S], states: S) -> S:
    """`demote(states)` if any of `full` is true, else `states`.

    Under vmap a condition becomes a select between both results, and XLA cannot select between
    arrays in host memory. `demote` changes only full rows, so under vmap all caches demote if
    any has a full row.
    """

    def run(full: list[Array], states: S) -> S:
        return lax.cond(jnp.any(jnp.stack(full)), demote, lambda states: states, states)

    if not has_host_arrays(states):
        return run(full, states)

    def batched(size: int, mapped: Any, full: list[Array], states: S) -> tuple[S, Any]:
        def whole(is_mapped: bool, leaf: Array) -> Array:
            return leaf if is_mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))

        full, states = jax.tree.map(whole, tuple(mapped), (full, states))
        return _if_any(full, jax.vmap(demote), states), jax.tree.map(lambda _: True, states)

    once = jax.custom_batching.custom_vmap(run)
    once.def_vmap(batched)
    # Arrays that `demote` does not change bypass `once` in a derivative. A derivative of `once`
    # itself would be a call, in which arrays of the host cannot be written.
    changed = jax.eval_shape(lambda states: _changed(demote(states), states), states)
    given, tree = jax.tree.flatten(states)
    inside = [
        a if changes else lax.stop_gradient(a)
        for a, changes in zip(given, changed.leaves, strict=True)
    ]
    return changed.keep_others(once(full, jax.tree.unflatten(tree, inside)), states)
