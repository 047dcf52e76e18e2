"""Blocks: buffers of slots per row, valid up to a count that differs by row; and indices, none
of which is negative.

Rows of a batch have different lengths, so every zone of a cache is a buffer with `count
i32[B]`, and every write goes to each row's own place. A write past the end is dropped, never
clamped onto a stored token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax.numerics.platforms import for_tpu, in_usual_layout
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


def where_rows(rows: Array, new: Any, old: Any) -> Any:
    """A tree of arrays [B, ...]: those of `new` where `rows` bool[B] is true, else of `old`."""

    def choose(one: Array, other: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

    return jax.tree.map(choose, new, old)


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

    In place when the buffer is donated: one scatter, or on a TPU a slice update a row. On CPU,
    jaxlib before 0.11 converts a 16-bit scatter to f32 and so copies the buffer; f32 caches are
    faster there.
    """
    return _write_alike((buffer,), (new,), start, count)[0]


def _write_alike(
    buffers: Sequence[Array],
    news: Sequence[Array],
    start: Array,
    count: Array,
) -> list[Array]:
    """`write` of each, in the same slots."""
    return for_tpu(_write_slices, _scatter_tokens, buffers, news, start, count)


def _write_slices(
    buffers: Sequence[Array],
    news: Sequence[Array],
    start: Array,
    count: Array,
) -> list[Array]:
    """`_write_alike` by slice updates. A scatter makes a TPU copy the buffer to a layout that
    suits the scatter, and back.

    Reads the slots of a row that its tokens could take, replaces those that they do take, and
    writes all of them.
    """
    rows, _, slots = buffers[0].shape[:3]
    tokens = min(news[0].shape[2], slots)  # a row has room for no more
    first = jnp.minimum(start, slots - tokens)  # of the slice, which ends within the buffer

    def write_row(row: int, buffers: list[Array]) -> list[Array]:
        token = lax.iota(jnp.int32, tokens) - (start[row] - first[row])
        taken = (token >= 0) & (token < count[row])
        written = []
        for buffer, new in zip(buffers, news, strict=True):
            buffer = in_usual_layout(buffer)
            mine = lax.dynamic_slice_in_dim(new[:, :, :tokens], row, 1).astype(buffer.dtype)
            # Those of a slice that begins before its tokens move towards its end.
            if tokens > 1:
                mine = _shifted(mine, start[row] - first[row])
            kept = jnp.expand_dims(taken, (0, 1, *range(3, new.ndim)))
            # An update of some rows of bytes makes the compiler tile them in another way, and
            # so copy them, but one of all rows does not.
            of_all_rows = rows > 1 and buffer.dtype.itemsize == 1 and rows * tokens <= slots
            if of_all_rows:
                own = lax.broadcasted_iota(jnp.int32, (rows,) + (1,) * (new.ndim - 1), 0) == row
                kept = kept & own
            size = (rows if of_all_rows else 1, new.shape[1], tokens, *new.shape[3:])
            # All of one type, also where Python's integers have 64 bits.
            zero = np.int32(0)
            zeros = (zero,) * (buffer.ndim - 3)
            at: list[Array | np.int32] = [
                zero if of_all_rows else np.int32(row),
                zero,
                first[row],
                *zeros,
            ]
            old = lax.dynamic_slice(buffer, at, size)
            buffer = lax.dynamic_update_slice(buffer, jnp.where(kept, mine, old), at)
            written.append(in_usual_layout(buffer))
        return written

    # Unrolled: a loop tiles narrow arrays of bytes in another way, and the compiler copies them.
    written = list(buffers)
    for row in range(rows):
        written = write_row(row, written)
    return written


def put_first(buffer: Array, new: Array) -> Array:
    """buffer [B, K, S, ...] with new [B, K, T, ...] in its first slots."""

    def in_place(buffer: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(buffer, new, 0, 2)

    def on_tpu(buffer: Array, new: Array) -> Array:
        return in_usual_layout(in_place(in_usual_layout(buffer), new))

    return for_tpu(on_tpu, in_place, buffer, new)


def _shifted(x: Array, places: Array) -> Array:
    """x [1, K, T, ...] moved `places` towards the end of axis 2; zeros, or anything, enter."""
    room = jnp.concatenate([jnp.zeros_like(x), x], axis=2)
    size = x.shape[2]
    return lax.dynamic_slice_in_dim(room, jnp.maximum(size - places, 0), size, axis=2)


def _scatter_tokens(
    buffers: Sequence[Array], news: Sequence[Array], start: Array, count: Array
) -> list[Array]:
    """`_write_alike` by one scatter each."""
    B, _, T, *_ = news[0].shape
    S = buffers[0].shape[2]
    count = jnp.minimum(count, T)
    alone = B == T == 1
    size = B, 2 if alone else T
    row = lax.broadcasted_iota(jnp.int32, size, 0)
    i = lax.broadcasted_iota(jnp.int32, size, 1)
    at = jnp.stack([row, jnp.where(i < count[:, None], start[:, None] + i, S)], axis=-1)

    written: list[Array] = []
    drop = lax.GatherScatterMode.FILL_OR_DROP
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


def take_places(x: Array, places: np.ndarray) -> Array:
    """x [B, K, S, ...] at `places` of axis 2, which are known when the program is traced.

    A gather, but on a TPU a slice for each run of places with equal distances: what follows a
    gather there has another layout, which the TPU then gives to whole buffers.
    """

    def sliced(x: Array) -> Array:
        runs = [
            lax.slice_in_dim(x, first, last + 1, step, axis=2)
            for first, last, step in _runs(places.tolist())
        ]
        return jnp.concatenate(runs or [x[:, :, :0]], axis=2)

    return for_tpu(sliced, lambda x: x[:, :, places], x)


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """First, last and distance of each run of increasing places with equal distances.

    >>> list(_runs([0, 2, 4, 5, 6, 3]))
    [(0, 4, 2), (5, 6, 1), (3, 3, 1)]
    """
    start = 0
    while start < len(places):
        stop = start + 1
        step = max(places[stop] - places[start], 1) if stop < len(places) else 1
        while stop < len(places) and places[stop] - places[stop - 1] == step:
            stop += 1
        yield places[start], places[stop - 1], step
        start = stop


def whole_units(tokens: int, unit: int) -> int:
    """`tokens` rounded down to whole pages, groups or chunks of `unit`."""
    return tokens // unit * unit


def sum_pairs(x: Array) -> Array:
    """Returns the sum over axis 3, by adding halves, which is the same to the bit in every
    program.

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
