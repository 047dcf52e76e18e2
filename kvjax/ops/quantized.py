"""Attention over quantised keys and values, from their codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.blocks import quotient
from kvjax.numerics.partial import (
    Logits,
    PartialAttention,
    Span,
    attend_part,
    exp_weights,
    keep_valid,
    merge_blocks,
)
from kvjax.numerics.quant import (
    QuantArray,
    dequantize,
    slice_tokens,
    split_scales,
    unpack_codes,
)
from kvjax.numerics.rotate import Directions, decode, rotate_back, rotate_few, sizes_of, turned
from kvjax.numerics.selection import PackedSelection, Selection, split_selection
from kvjax.numerics.types import Float, Int32
from kvjax.ops import kernels
from kvjax.ops.attend import attend_beside, attend_gathered, merge_beside
from kvjax.ops.op import Implementation, for_gpu, op

Codes = QuantArray | Directions  # of uniform levels, or of a codebook


@op(
    kernel=lambda: kernels.attend_quantized,
    static_argnames=("logits",),
    derivative="reference",
    limit=lambda a: kernels.attend_quantized.unsupported(
        a.q, a.keys, a.values, a.start, a.stop
    ),
    mosaic=lambda a: PartialAttention(
        *kernels.attend_quantized.attend_quantized(
            a.q, a.keys, a.values, a.start, a.stop, scale=a.logits.uncapped
        )
    ),
)
def attend_quantized(
    q: Float[Array, "B K Q D"],
    keys: Codes,
    values: Codes,
    start: Int32[Array, " B *Q"],
    stop: Int32[Array, " B *Q"],
    *,
    logits: Logits,
    implementation: Implementation | None = None,
) -> PartialAttention:
    """Attention of q [B, K, Q, D] over the slots [start, stop) of codes of k, v [B, K, S, D],
    in f32.

    start and stop are i32[B] or i32[B, Q]. Reads codes and scales a block of S/64 tokens (at
    least 256) at a time, so it never holds the decoded cache. The products use the codes
    themselves: scales of keys by channel multiply the queries, scales of keys by token the
    scores, and scales of values the weights. That costs Q multiplications per group instead of
    one for each of its values. With more queries than a group has values (a prompt), each block
    is decoded instead. With few, a GPU decodes a quarter of the tokens at a time, to the dtype
    of q. Slots outside of [start, stop) may hold anything. Codes of a codebook are those of
    rotated keys and values: q is rotated, and so is the result; they are decoded.

    `implementation`: see `explain`. The kernel rounds q, and products of scales with q and with
    weights (for keys by token and for more than 8 queries, decoded ones), to bfloat16, and sums
    in f32.
    """
    slots = keys[0].shape[2]
    D = q.shape[-1]
    # A block has whole groups: it is a multiple of the longer of keys' and values'.
    group = slots // min(keys[-1].shape[2], values[-1].shape[2])
    block = min(max(256, slots // 64) // group * group or group, slots)
    # With more queries than the smallest group has values, decoding takes fewer products.
    scales = max(keys[-1][0, 0].size, values[-1][0, 0].size)  # of a row and head
    few = q.shape[2] <= slots * D // scales
    folds = few and isinstance(keys, QuantArray)
    half = q.dtype if q.dtype.itemsize == 2 else jnp.float32
    q = q.astype(jnp.float32)
    if start.ndim == 1:
        start = start[:, None]
    if stop.ndim == 1:
        stop = stop[:, None]

    def in_blocks(block: int, folds: bool, dtype: Any) -> Callable[..., PartialAttention]:
        """`block` tokens at a time: their codes are multiplied if it `folds`, or else decoded to
        `dtype`.
        """

        def one(
            i: Array, q: Array, keys: Codes, values: Codes, start: Array, stop: Array
        ) -> PartialAttention:
            # The last block ends at the last slot, and masks what the one before it has read.
            first = jnp.minimum(i * block, slots - block)
            slot = (first + jnp.arange(block, dtype=jnp.int32))[None, None]
            begun = slot >= jnp.maximum(start, i * block)[..., None]
            mask = begun & (slot < stop[..., None])  # [B, Q, block]
            seen = jnp.any(mask, axis=1)[:, None]
            # Without the barrier XLA widens all codes and scales ahead of the loop.
            some_keys, some_values = lax.optimization_barrier(
                (slice_tokens(keys, first, block), slice_tokens(values, first, block))
            )
            if not folds:
                k = decoded(some_keys, D).astype(dtype)
                v = keep_valid(decoded(some_values, D), seen).astype(dtype)
                return attend_part(q, k, v, mask[:, None], logits=logits)
            scores = logits.of(_scores(q, some_keys))
            weights, total, lse = exp_weights(scores, mask[:, None])
            mixed = _mix(weights, some_values, seen, D)
            return PartialAttention(mixed / total[..., None], lse)

        def bounds(*operands: Any) -> tuple[int, Array]:
            return 0, quotient(jnp.max(operands[-1]) + (block - 1), block)

        return lambda *operands: merge_blocks(
            one, *operands, bounds=bounds, blocks=-(-slots // block), shape=q.shape
        )

    blocks = in_blocks(block, folds, jnp.float32)
    quarter = min(-(-slots // (4 * group)) * group, slots)
    for_a_gpu = in_blocks(max(block, quarter), False, half)
    operands = q, keys, values, start, stop
    return for_gpu(for_a_gpu, blocks, *operands) if few else blocks(*operands)


def _attend_quantized_zones_mosaic(a: Any) -> Any:
    zones = a.keys, a.values, a.start, a.stop, a.recent
    made = kernels.attend_quantized.attend_quantized(
        a.q, *zones, scale=a.logits.uncapped, part=a.part
    )
    return PartialAttention(*made) if a.part else made


@op(
    kernel=lambda: kernels.attend_quantized,
    static_argnames=("logits", "part"),
    derivative="reference",
    limit=lambda a: kernels.attend_quantized.unsupported(
        a.q, a.keys, a.values, a.start, a.stop, a.recent, a.sink
    ),
    mosaic=_attend_quantized_zones_mosaic,
)
def attend_quantized_zones(
    q: Float[Array, "B K Q D"],
    keys: Codes,
    values: Codes,
    start: Int32[Array, " B"],
    stop: Int32[Array, " B"],
    recent: Span,
    sink: Span | None,
    sinks: Float[Array, "K G"] | None = None,
    *,
    logits: Logits,
    part: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """[B, K, Q, D] in the dtype of q [B, K, Q, D]: `attend_quantized`, merged with the spans of
    `recent` and `sink` and with `sinks`.

    start and stop are i32[B]; there may be no sink. Each of T decode steps may have its own
    spans, as in `attend_span`. `implementation`: as for `attend_quantized`; the kernel takes a
    recent span in bfloat16 and no sink. With `part`, the result is a PartialAttention over Q,
    without `sinks`.
    """
    history = attend_quantized(q, keys, values, start, stop, logits=logits)
    if part:
        return merge_beside(history, q, None, recent, sink, logits=logits)
    return attend_beside(history, q, None, recent, sink, sinks, logits=logits)


def _attend_coded_zones_mosaic(a: Any) -> Any:
    known = a.selection.found if isinstance(a.selection, PackedSelection) else a.selection.valid
    made = kernels.attend_coded_zones.attend_coded_zones(
        a.q,
        a.keys,
        a.values,
        a.offset,
        a.selection.slots,
        known,
        a.recent,
        a.sink,
        a.local,
        a.sinks,
        centres=(sizes_of(a.keys), sizes_of(a.values)),
        turned=turned(a.q.shape[-1], a.seed),
        scale=a.logits.scale,
        cap=a.logits.cap,
        part=a.part,
    )
    return PartialAttention(*made) if a.part else made


@op(
    kernel=lambda: kernels.attend_coded_zones,
    static_argnames=("local", "seed", "logits", "part"),
    derivative="reference",
    limit=lambda a: kernels.attend_coded_zones.unsupported(
        a.q, a.keys, a.values, a.selection.slots, a.recent, a.sink, a.local
    ),
    mosaic=_attend_coded_zones_mosaic,
)
def attend_coded_zones(
    q: Float[Array, "B K G D"],
    keys: Directions,
    values: Directions,
    offset: Float[Array, "B K D"],
    selection: Selection | PackedSelection,
    recent: Span,
    sink: Span | None,
    local: int,
    sinks: Float[Array, "K G"] | None = None,
    *,
    seed: int,
    logits: Logits,
    part: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """`attend_zones` over a history of codes of whole heads: of values, and of keys less their
    `offset`, rotated by `seed`.

    `implementation`: see `explain`. The kernel rounds q, before and after its rotation, and
    weights to bfloat16; the sizes that codes stand for are exact to 1.2e-3.
    """
    stored, pending = split_selection(selection, keys[0].shape[2])
    k, v = (gather_quantized(code, stored, q.shape[-1]) for code in (keys, values))
    history = attend_rotated(q, k, v, offset, stored, seed=seed, logits=logits)
    recent = recent._replace(start=jnp.maximum(recent.start, recent.stop - local))
    if part:
        return merge_beside(history, q, pending, recent, sink, logits=logits)
    return attend_beside(history, q, pending, recent, sink, sinks, logits=logits)


def attend_rotated(
    q: Array,
    k: Array,
    v: Array,
    offset: Array,
    selection: Selection,
    *,
    seed: int,
    logits: Logits,
) -> PartialAttention:
    """Attention of q [B, K, G, D] over selected tokens that were gathered: rotated k, v f32[B,
    K, H*M, D], in order, the keys without their offset f32[B, K, D]."""
    if logits.cap is not None:  # what is added to logits counts before the cap
        k = rotate_back(k, seed) + offset[:, :, None]
        v = rotate_back(v, seed)
        return attend_gathered(q, k, v, selection, logits=logits)
    part = attend_gathered(rotate_few(q, seed), k, v, selection, logits=logits)
    return turn_back(part, q, offset, seed=seed, scale=logits.uncapped)


def turn_back(
    part: PartialAttention, q: Array, offset: Array, *, seed: int, scale: float
) -> PartialAttention:
    """Returns the attention of q [B, K, Q, D] to keys and values as they were, from that to
    rotated ones without their offset, which adds `scale` times q.offset to all logits.
    """
    shift = jnp.einsum("bkqd,bkd->bkq", q.astype(jnp.float32), offset, precision="highest")
    none = jnp.isneginf(part.lse)  # no slot: then nothing has a derivative
    return PartialAttention(
        rotate_back(part.out, seed), jnp.where(none, part.lse, part.lse + scale * shift)
    )


def _scores(q: Array, keys: QuantArray) -> Array:
    """Products q.k~ of q f32[B, K, Q, D], from products of codes: f32[B, K, Q, S]."""
    B, K, Q, D = q.shape
    groups, slices = keys.scales.shape[2:]
    codes = unpack_codes(keys.codes, D).astype(jnp.float32).reshape(B, K, groups, -1, D)
    scale, zero = split_scales(keys.scales)
    if slices == D:
        scaled = q[:, :, :, None] * scale[:, :, None]
        scores = jnp.einsum("bkqnd,bkntd->bkqnt", scaled, codes, precision="highest")
        scores += jnp.einsum("bkqd,bknd->bkqn", q, zero, precision="highest")[..., None]
        return scores.reshape(B, K, Q, -1)
    sliced = q.reshape(B, K, Q, slices, -1)
    codes = codes.reshape(B, K, groups, slices, -1)
    products = jnp.einsum("bkqjc,bksjc->bkqsj", sliced, codes, precision="highest")
    offsets = jnp.einsum("bkqj,bksj->bkqs", jnp.sum(sliced, axis=-1), zero, precision="highest")
    return jnp.sum(products * scale[:, :, None], axis=-1) + offsets


def _mix(weights: Array, values: QuantArray, seen: Array, channels: int) -> Array:
    """Returns the sum of weights f32[B, K, Q, S] times v~, values by token; `seen` bool[B, 1,
    S]: f32[B, K, Q, D].
    """
    B, K, Q, S = weights.shape
    codes = unpack_codes(values.codes, channels).astype(jnp.float32)
    scale, zero = (keep_valid(a, seen) for a in split_scales(values.scales))
    codes = codes.reshape(B, K, S, scale.shape[-1], -1)
    scaled = weights[..., None] * scale[:, :, None]
    mean = jnp.einsum("bkqsj,bksjc->bkqjc", scaled, codes, precision="highest")
    mean += jnp.einsum("bkqs,bksj->bkqj", weights, zero, precision="highest")[..., None]
    return mean.reshape(B, K, Q, channels)


def decoded(code: Codes, channels: int) -> Array:
    """f32[..., S, D] of D = `channels`; rotated if they are of a codebook."""
    return dequantize(code, channels) if isinstance(code, QuantArray) else decode(code)


def gather_quantized(code: Codes, selection: Selection, channels: int) -> Array:
    """f32[B, K, H*M, D], the selected tokens of codes of [B, K, S, D]: reads and decodes only
    those rows.
    """
    index = selection.slots.reshape(*selection.slots.shape[:2], -1, 1)
    slots = code[0].shape[2]
    rows = [
        jnp.take_along_axis(a, index // (slots // a.shape[2]), axis=2, mode="clip")
        for a in code
    ]
    return decoded(type(code)(*rows), channels)
