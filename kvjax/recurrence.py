"""The function that a layer with a state of fixed size calls, as others call `kvjax.attention`.

    out, cache = advance(cache, inputs, weights)

T > 1 is a chunk of a prompt, T == 1 a decode step, as in `kvjax.attention`. The policy of the
cache computes the outputs: see `kvjax.policies.Recurrent`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from kvjax.attention import MOST_STEPS
from kvjax.cache.cache import LayerCache, check_layer_cache, placement_of, specs_of
from kvjax.call import row_counts
from kvjax.numerics.blocks import where_rows
from kvjax.policies.recurrent import Recurrent, RecurrentState
from kvjax.sharding.placement import run_on_parts, to_context
from kvjax.validation import check_flags

T = TypeVar("T")


def advance(
    cache: LayerCache,
    inputs: Any,
    weights: Any = None,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    steps: bool = False,
) -> tuple[Array, LayerCache]:
    """The outputs [B, T, ...] of a layer with a state of fixed size, and its cache after T
    tokens.

    Flush before decode steps: without room beside the state, a token is dropped, which
    `kvjax.raise_on_overflow` reports.

    Args:
      cache: the layer's cache, whose policy is a `kvjax.policies.Recurrent`.
      inputs: what the layer computed of its tokens, a tree of arrays [B, T, ...].
      weights: the parameters that the policy needs, any tree.
      lengths: i32[B], real tokens of each row of a right-padded chunk (default T). Outputs of
        padding are meaningless.
      active: bool[B], rows that take this decode token.
      steps: the T <= 16 tokens are decode steps, which `kvjax.rollback` can take back.

    Raises:
      ValueError: the cache of a layer with attention; inputs of another number of rows, or that
        differ in their tokens; more than 16 steps.
    """
    policy, size, tokens = _check(cache, inputs)
    check_flags("advance", steps=steps)
    if steps and tokens > MOST_STEPS:
        raise ValueError(
            f"advance(steps=True) takes 1 to {MOST_STEPS} tokens per row, got T={tokens}; leave steps out for a "
            "chunk of a prompt"
        )
    count = row_counts(size, tokens, lengths, active)
    if lengths is not None or active is not None:
        inputs = _without_padding(inputs, count)
    run: Callable[..., tuple[Array, RecurrentState]] = policy.decode
    if tokens > 1 and not steps:
        run = partial(_read, policy, all_rows=lengths is None)
    if cache.placement is not None:
        return _run_on_parts(run, cache, inputs, weights, count)
    out, state = run(cache.state, inputs, weights, count)
    return out, dataclasses.replace(cache, state=state)


def _run_on_parts(
    run: Callable[..., tuple[Array, RecurrentState]],
    cache: LayerCache,
    inputs: Any,
    weights: Any,
    count: Array,
) -> tuple[Array, LayerCache]:
    """`run` by each device for its rows; all devices of heads and of context do the same."""
    placement = placement_of(cache)
    rows = placement.spec("B")
    state = specs_of(cache)
    in_specs = (
        state,
        jax.tree.map(lambda _: rows, inputs),
        jax.tree.map(lambda _: PartitionSpec(), weights),
        rows,
    )
    out, new = run_on_parts(
        placement, run, in_specs, (rows, state), cache.state, inputs, weights, count
    )
    return to_context(out, rows), dataclasses.replace(cache, state=new)


def _read(
    policy: Recurrent,
    st: RecurrentState,
    inputs: Any,
    weights: Any,
    count: Array,
    *,
    all_rows: bool,
) -> tuple[Array, RecurrentState]:
    """Folds what is beside the state into it, and then the chunk."""
    folded = policy.fold(st.memory, st.count)
    out, memory = policy.read(folded, inputs, weights, count)
    beside = jnp.zeros_like(st.count)
    if not all_rows:  # a row without tokens stays as it is, so that it can still take some back
        memory = where_rows(count > 0, memory, st.memory)
        beside = jnp.where(count > 0, 0, st.count)
    return out, RecurrentState(memory, beside, st.length + count, st.overflow)


def _without_padding(inputs: T, count: Array) -> T:
    """`inputs` with zeros past the first `count` i32[B] tokens of each row: NaN of padding would
    stay, because 0 * NaN is NaN.
    """

    def zeroed(x: Array) -> Array:
        real = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < count[:, None]
        return jnp.where(
            real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)
        )

    return jax.tree.map(zeroed, inputs)


def _check(cache: Any, inputs: Any) -> tuple[Recurrent, int, int]:
    """The policy, rows and tokens of a call; raises ValueError for arrays that do not fit."""
    check_layer_cache("advance", cache)
    if not isinstance(cache.policy, Recurrent):
        raise ValueError(
            f"advance takes the cache of a layer with a state of fixed size, got one of {cache.policy!r}; "
            "kvjax.attention takes this one"
        )
    shapes = {tuple(jnp.shape(x)[:2]) for x in jax.tree.leaves(inputs)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            f"advance(inputs=...) must be arrays [B, T, ...] of the same tokens, got {sorted(shapes)}"
        )
    size, tokens = next(iter(shapes))
    if size != cache.spec.batch or not tokens:
        raise ValueError(
            f"advance(inputs=...) has B={size}, T={tokens}, but the cache has B={cache.spec.batch} rows, and T must "
            "be at least 1"
        )
    return cache.policy, size, tokens
