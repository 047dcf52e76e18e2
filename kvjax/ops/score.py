"""Scores of stored keys: by 1-bit keys, by the boxes of pages, and by 4-bit codes."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from kvjax.memory import vary_with
from kvjax.numerics.partial import scaled
from kvjax.numerics.quant import OneBit, dequantize_1bit
from kvjax.numerics.rotate import SUBSPACE, Directions, decode, lloyd_max
from kvjax.numerics.selection import PackedSelection
from kvjax.numerics.types import Float
from kvjax.ops.op import Implementation, for_gpu, op


@op(
    kernel="score.score_1bit",
    static_argnames=("scale",),
    derivative="reference",
    limit=lambda kernel, a: kernel.unsupported(a.q, a.keys.bits, a.keys.scale),
    mosaic=lambda kernel, a: kernel.score_1bit(a.q, *a.keys, scale=a.scale),
)
def score_1bit(
    q: Float[Array, "B K G D"], keys: OneBit, *, scale: float, implementation: Implementation | None = None
) -> Float[Array, "B K G S"]:
    """Scores scale * q.k~ of q [B, K, G, D] with every key k~ decoded from `keys` [B, K, S, ...]: f32[B, K, G, S].

    Reads D/8 + 4 D/g bytes per key and KV head. Keys are expanded in blocks of S/64, at least 512, or on a GPU as they
    are summed, so no f32 copy of all keys exists. The kernel multiplies in the 16 bits of the scales and sums in f32.
    """

    def summed(q: Array, keys: OneBit) -> Array:
        return scaled(sum_products(q, dequantize_1bit(keys)), scale)

    return for_gpu(summed, partial(_score_blocks, scale=scale), q, keys)


def sum_products(q: Float[Array, "B K G D"], keys: Float[Array, "B K S D"]) -> Float[Array, "B K G S"]:
    """f32[B, K, G, S]: q.k as a sum, of which a GPU makes one kernel together with what decodes the keys.

    A product would need the decoded keys in memory, at several times the bytes of their codes. Heads are summed side by
    side, so that a key is decoded once for all of them.
    """
    products = [q[:, :, head, None].astype(jnp.float32) * keys for head in range(q.shape[2])]
    sums = lax.reduce(products, [jnp.float32(0)] * len(products), lambda a, b: list(map(lax.add, a, b)), (3,))
    return jnp.stack(sums, axis=2)


def _score_blocks(q: Array, keys: OneBit, *, scale: float) -> Array:
    B, K, G, _ = q.shape
    S, groups = keys.bits.shape[2], keys.scale.shape[2]
    group = S // groups
    block = min(max(512, S // 64) // group or 1, groups)  # in groups
    q = q.astype(jnp.float32)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, groups - block)
        part = OneBit(
            lax.dynamic_slice_in_dim(keys.bits, first * group, block * group, axis=2),
            lax.dynamic_slice_in_dim(keys.scale, first, block, axis=2),
            lax.dynamic_slice_in_dim(keys.zero, first, block, axis=2),
        )
        # Without the barrier XLA widens all scales to f32 ahead of the loop: 1/8 of a bf16 key cache, twice.
        keys_f32 = dequantize_1bit(lax.optimization_barrier(part))
        s = scaled(jnp.einsum("bkgd,bksd->bkgs", q, keys_f32, precision="highest"), scale)
        return lax.dynamic_update_slice_in_dim(scores, s, first * group, axis=3)

    return lax.fori_loop(0, -(-groups // block), step, vary_with(jnp.zeros((B, K, G, S), jnp.float32), q, keys))


@op(
    kernel="score.score_pages",
    static_argnames=("scale",),
    derivative="reference",
    limit=lambda kernel, a: kernel.unsupported(a.q, a.low, a.high),
    mosaic=lambda kernel, a: kernel.score_pages(a.q, a.low, a.high, scale=a.scale),
)
def score_pages(
    q: Float[Array, "B K G D"],
    low: Float[Array, "B K P D"],
    high: Float[Array, "B K P D"],
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "B K G P"]:
    """f32[B, K, G, P]: scale * sum_i max(q_i low_i, q_i high_i) of q [B, K, G, D] and pages' corners [B, K, P, D].

    Because high >= low, the larger product is that with `high` where q_i > 0 and with `low` elsewhere, so the score is
    two matrix products. Reads 2 D values per page and KV head. The kernel rounds q to the 16 bits of the corners and
    sums in f32.
    """
    q = q.astype(jnp.float32)
    product = partial(jnp.einsum, "bkgd,bkpd->bkgp", precision="highest")
    up, down = jnp.maximum(q, 0.0), jnp.minimum(q, 0.0)
    return scaled(product(up, high.astype(jnp.float32)) + product(down, low.astype(jnp.float32)), scale)


@op(
    kernel="score.rerank",
    static_argnames=("scale",),
    derivative="reference",
    limit=lambda kernel, a: kernel.unsupported(a.q, *a.keys, a.listed.slots),
    mosaic=lambda kernel, a: kernel.rerank(a.q, *a.keys, a.listed.slots, centres=centres(), scale=a.scale),
)
def rerank(
    q: Float[Array, "B K G D"],
    keys: Directions,
    listed: PackedSelection,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "B K G M"]:
    """f32[B, K, G, M]: scale * q.k~ of q [B, K, G, D] with the `listed` keys k~, decoded from `keys` [B, K, S, ...].

    Reads 3/4 D bytes per listed key with subspaces of 8, in blocks of 512 or, on a GPU, as they are summed. The kernel
    takes subspaces of 8 with weights of 16 bits.
    """
    B, K, G, M = listed.slots.shape

    def summed(q: Array, keys: Directions, slots: Array) -> Array:
        index = slots.reshape(B, K, G * M, 1)
        decoded = decode(Directions(*(jnp.take_along_axis(a, index, axis=2, mode="clip") for a in keys)))
        products = q.astype(jnp.float32)[:, :, :, None] * decoded.reshape(B, K, G, M, -1)
        return scaled(jnp.sum(products, axis=-1), scale)

    return for_gpu(summed, partial(_rerank_blocks, scale=scale), q, keys, listed.slots)


def _rerank_blocks(q: Array, keys: Directions, slots: Array, *, scale: float) -> Array:
    B, K, G, M = slots.shape
    block = min(512, M)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, M - block)
        index = lax.dynamic_slice_in_dim(slots, first, block, axis=3).reshape(B, K, G * block, 1)
        part = Directions(*(jnp.take_along_axis(a, index, axis=2, mode="clip") for a in keys))
        decoded = decode(lax.optimization_barrier(part)).reshape(B, K, G, block, -1)
        s = scaled(jnp.einsum("bkgd,bkgsd->bkgs", q.astype(jnp.float32), decoded, precision="highest"), scale)
        return lax.dynamic_update_slice_in_dim(scores, s, first, axis=3)

    return lax.fori_loop(0, -(-M // block), step, vary_with(jnp.zeros((B, K, G, M), jnp.float32), q, keys, slots))


def centres() -> tuple[float, ...]:
    """The eight values that a 4-bit code's magnitude can have."""
    return tuple(lloyd_max(SUBSPACE)[1].tolist())
