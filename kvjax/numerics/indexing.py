"""Arithmetic of indices that are never negative, and writes at indices along the last axis, separately for each row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike


def quotient(indices: Array, unit: int) -> Array:
    """`indices // unit` in the dtype of the indices, none of which may be negative.

    One operation; `//` traces ten, to handle signs.

    >>> quotient(jnp.array([0, 7, 8]), 8).tolist()
    [0, 0, 1]
    """
    return lax.div(indices, np.asarray(unit, indices.dtype))


def remainder(indices: Array, unit: int) -> Array:
    """`indices % unit` in the dtype of the indices, none of which may be negative; one operation.

    >>> remainder(jnp.array([0, 7, 8]), 8).tolist()
    [0, 7, 0]
    """
    return lax.rem(indices, np.asarray(unit, indices.dtype))


def put_last(x: Array, at: Array, values: ArrayLike) -> Array:
    """x [..., S] with `values`, broadcastable to [..., M], at the indices `at` i32[..., M] of its last axis.

    Values whose index is below 0 or past S - 1 are dropped. If indices are equal, any of their values may win. This is
    one scatter; `x.at[b, k, at].set(...)` traces more operations, to count negative indices from the end.

    >>> put_last(jnp.zeros((1, 4), int), jnp.array([[2, 9]], dtype=jnp.int32), 5).tolist()
    [[0, 0, 5, 0]]
    """
    rows = tuple(range(x.ndim - 1))
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(len(rows),),
        scatter_dims_to_operand_dims=(len(rows),),
        operand_batching_dims=rows,
        scatter_indices_batching_dims=rows,
    )
    values = jnp.broadcast_to(jnp.asarray(values, x.dtype), at.shape)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, at[..., None], values, dims, mode=drop)
