"""Blocks: buffers of slots per row, valid up to a count that differs by row; and indices, none
of which is negative.

Rows of a batch have different lengths, so every zone of a cache is a buffer with `count
i32[B]`, and every write goes to each row's own place. A write past the end is dropped, never
clamped onto a stored token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class Block:
    """Keys and values of one zone. Slots at or past count hold finite leftovers."""

    k: Array  # dtype[B, K, S, D]
    v: Array  # dtype[B, K, S, D]
    count: Array  # i32[B] slots [0, count) are valid

    @property
    def slots(self) -> int:
        return self.k.shape[2]


def empty_block(spec: CacheSpec, slots: int) -> Block:
    k, v = (
        jnp.zeros((spec.batch, spec.kv_heads, slots, size), spec.dtype)
        for size in (spec.head_dim, spec.value_size)
    )
    return Block(k, v, jnp.zeros(spec.batch, jnp.int32))


def put(block: Block, k: Array, v: Array, count: Array) -> Block:
    """Appends the first `count` i32[B] of the tokens k, v [B, K, T, D] of each row; tokens
    without room are dropped.
    """
    start = block.count
    new_k, new_v = _write_alike((block.k, block.v), (k, v), start, count)
    return Block(new_k, new_v, jnp.minimum(start + count, block.slots))


def write(buffer: Array, new: Array, start: Array, count: Array) -> Array:
    """buffer [B, K, S, ...] with new[b, :, i] at slot start[b] + i for i < count[b]; out of
    range is dropped.

    One scatter, in place when the buffer is donated. On CPU, jaxlib before 0.11 converts a
    16-bit scatter to f32 and so copies the buffer; f32 caches are faster there.
    """
    return _write_alike((buffer,), (new,), start, count)[0]


def _write_alike(
    buffers: Sequence[Array], news: Sequence[Array], start: Array, count: Array
) -> list[Array]:
    """`write` of each, in the same slots."""
    (B, _, T, *_), S = news[0].shape, buffers[0].shape[2]
    count, alone = jnp.minimum(count, T), B == T == 1
    size = B, 2 if alone else T
    row, i = lax.broadcasted_iota(jnp.int32, size, 0), lax.broadcasted_iota(jnp.int32, size, 1)
    at = jnp.stack([row, jnp.where(i < count[:, None], start[:, None] + i, S)], axis=-1)

    written, drop = [], lax.GatherScatterMode.FILL_OR_DROP
    for buffer, new in zip(buffers, news, strict=True):
        # XLA turns a scatter of one token into a slice update, fuses that into the attention
        # that reads the buffer, and then copies the buffer (temp bytes of a decode step: 5
        # times the key cache). A second token, always dropped, keeps it a scatter.
        new = jnp.concatenate([new, new], axis=2) if alone else new
        # `buffer.at[row, :, slot].set` would trace three times as many operations, to count
        # from the end.
        new = jnp.moveaxis(new, 2, 1).astype(buffer.dtype)  # [B, T, K, ...]
        windows = tuple(range(2, new.ndim))
        dims = lax.ScatterDimensionNumbers(
            windows, inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(0, 2)
        )
        written.append(lax.scatter(buffer, at, new, dims, mode=drop))
    return written


def take_rows(tokens: Array, index: Array) -> Array:
    """tokens [B, K, S, D] at index i32[B, X], the same for all heads: [B, K, X, D]. Out of
    range is clipped.
    """
    return jax.vmap(lambda t, i: jnp.take(t, i, axis=1, mode="clip"))(tokens, index)


def whole_units(tokens: int, unit: int) -> int:
    """`tokens` rounded down to whole pages, groups or chunks of `unit`."""
    return tokens // unit * unit


def sum_pairs(x: Array) -> Array:
    """The sum over axis 3, by adding halves, which is the same to the bit in every program.

    A plain reduction may add in another order there, and a page of a prompt would differ from
    the same one of steps.
    """
    while (n := x.shape[3]) > 1:
        half = n // 2
        added = x[:, :, :, :half] + x[:, :, :, half : 2 * half]
        x = added if n % 2 == 0 else jnp.concatenate([added, x[:, :, :, 2 * half :]], axis=3)
    return x[:, :, :, 0]


def page_means(k: Array, page: int) -> Array:
    """Means of the pages of keys [B, K, T, D]: f32[B, K, T / page, D]."""
    B, K, T, D = k.shape
    return sum_pairs(k.reshape(B, K, T // page, page, D).astype(jnp.float32)) / page


def quotient(indices: Array, unit: int) -> Array:
    """`indices // unit` in the dtype of the indices, none of which may be negative.

    One operation; `//` traces ten, to handle signs.

    >>> quotient(jnp.array([0, 7, 8]), 8).tolist()
    [0, 0, 1]
    """
    return lax.div(indices, np.asarray(unit, indices.dtype))


def remainder(indices: Array, unit: int) -> Array:
    """`indices % unit` in the dtype of the indices, none of which may be negative; one
    operation.

    >>> remainder(jnp.array([0, 7, 8]), 8).tolist()
    [0, 7, 0]
    """
    return lax.rem(indices, np.asarray(unit, indices.dtype))


def put_last(x: Array, at: Array, values: ArrayLike) -> Array:
    """x [..., S] with `values`, broadcastable to [..., M], at the indices `at` i32[..., M] of
    its last axis.

    Values whose index is below 0 or past S - 1 are dropped. If indices are equal, any of their
    values may win. This is one scatter; `x.at[b, k, at].set(...)` traces more operations, to
    count negative indices from the end.

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
