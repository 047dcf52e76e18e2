"""The highest scores: of each row, and of all heads of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.indexing import quotient, remainder
from kvjax.numerics.selection import GroupReduce, Selection, no_kernel_for, reduce_scores
from kvjax.numerics.types import Bool, Float
from kvjax.ops.op import Implementation, for_gpu, op


@op(
    kernel="select.top_k",
    static_argnames=("k",),
    derivative="zero",
    limit=lambda kernel, a: kernel.unsupported(a.scores.shape, a.scores.dtype, a.k),
    mosaic=lambda kernel, a: Selection(*kernel.top_k(a.scores, a.valid, a.k)),
)
def top_k(
    scores: Float[Array, "*rows U"],
    valid: Bool[Array, "*#rows #U"],
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """The k largest of scores f32[..., U] where `valid` (broadcastable bool) is true; ties go to the lower index.

    A row with fewer than k valid units gives all of them, and the rest of its selection is not valid. `implementation`:
    see `explain`; all give the same result.
    """
    valid = jnp.broadcast_to(valid, scores.shape)
    # A valid score of -inf must still come before units that are not valid, and NaN must not rank first.
    low = jnp.finfo(scores.dtype).min
    ranked = jnp.where(valid, jnp.where(scores >= low, scores, low), -jnp.inf)
    best, slots = for_gpu(partial(_top_of_blocks, k=k), partial(lax.top_k, k=k), ranked)
    return Selection(slots.astype(jnp.int32), best > -jnp.inf)


def _top_of_blocks(ranked: Array, k: int) -> Sequence[Array]:
    """`lax.top_k`, from the k blocks of adjacent values that have the highest maxima.

    These hold the k highest values: each block that comes before the block of one has a value that comes before it. Two
    sorts of fewer values take a GPU less time, because it sorts a long row in ever more kernels.
    """
    if ranked.dtype != jnp.float32 or ranked.shape[-1] < max(8 * k, 65536):
        return lax.top_k(ranked, k)
    *lead, U = ranked.shape
    block = 2 ** round(math.log2(U / k) / 2)  # U / block and k * block values are sorted
    bits = lax.bitcast_convert_type(ranked, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # in the order of `lax.top_k`: -0 is below 0
    keys = jnp.pad(keys, [(0, 0)] * len(lead) + [(0, -U % block)], constant_values=jnp.iinfo(jnp.int32).min)
    blocks = keys.reshape(*lead, -1, block)
    at = jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)  # in order, so that ties go to the lower slot
    best, place = lax.top_k(jnp.take_along_axis(blocks, at[..., None], axis=-2).reshape(*lead, -1), k)
    slots = jnp.take_along_axis(at, quotient(place, block), axis=-1) * block + remainder(place, block)
    return [lax.bitcast_convert_type(jnp.where(best < 0, best ^ jnp.int32(0x7FFFFFFF), best), jnp.float32), slots]


def _top_k_grouped_limit(kernel: Any, a: Any) -> str | None:
    if any(valid.shape[2] != 1 for _, valid in a.parts):
        return "the kernel top_k_grouped takes units that are valid for all query heads of a group"
    return no_kernel_for(a.group_reduce) or kernel.unsupported(a.parts, a.group_reduce, a.k)


@op(
    kernel="select.top_k_grouped",
    static_argnames=("group_reduce", "k"),
    derivative="zero",
    limit=_top_k_grouped_limit,
    mosaic=lambda kernel, a: Selection(*kernel.top_k_grouped(a.parts, a.group_reduce, a.k)),
)
def top_k_grouped(
    parts: Sequence[tuple[Float[Array, "B K G _"], Bool[Array, "B _ _ _"]]],
    group_reduce: GroupReduce,
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """The k highest units of all parts for a group of heads: `top_k` of `selection.reduce_scores`, in one kernel.

    A part has scores f32[B, K, G, U'] and `valid` bool[B, 1 or K, 1, U'], or [B, K, G, U'] under "per_head". Units are
    numbered on from part to part; softmax is over the valid units of all parts. `implementation`: see `explain`; the
    kernel may order units differently if their ranks differ by less than rounding.
    """
    heads = jnp.broadcast_shapes(*(ok.shape[:-1] for _, ok in parts))
    valid = jnp.concatenate([jnp.broadcast_to(ok, (*heads, ok.shape[-1])) for _, ok in parts], axis=-1)
    return top_k(reduce_scores(parts, group_reduce), valid, k)
