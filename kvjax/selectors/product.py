"""PQCache: tokens by product quantisation of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.blocks import write
from kvjax.context import Stripes
from kvjax.selection import GroupReduce, require_group_reduce
from kvjax.selectors.striped import StripedSelector
from kvjax.spec import CacheSpec, keep_int


class ProductIndex(NamedTuple):
    """The codes of keys, one centroid for each part of a key."""

    codes: Array  # u8[B, K, S, m] by part of the key
    centroids: Array  # f32[B, K m C D/m] the codebooks of each head and part; flat, because they have no slots


@dataclass(frozen=True, kw_only=True)
class ProductCodes:
    """Scores tokens by product quantisation: each of `parts` parts of a key is replaced by its nearest centroid.

    A kv head has a codebook of 2**bits centroids for each part. Lloyd's k-means learns them, for each row, from the
    first `learn` tokens of the row's history; later tokens get the nearest of these centroids. A step multiplies its
    queries with the centroids once, and scores a token by `parts` lookups.

    Index: `parts` bytes per key and kv head, 2 at the defaults, and 2**bits D float32 of centroids per row and kv head,
    32 KiB at D = 128. Chunks must be a multiple of `learn`, so that the centroids can be learnt from the first one.
    Tokens with the same codes tie, and the lower slot wins.

    **Source:** PQCache (Zhang et al. 2024, arXiv 2407.12820): 2 parts, 6 bits, sum of softmax over the group.
    **Differs:** the paper learns from the whole prompt; here from the first `learn` tokens, so that codebooks do not
    depend on how a prompt is split into chunks. k-means starts from evenly spaced tokens and runs `iterations` times;
    the paper bounds the iterations by a time limit. A code takes a byte, not 6 bits.
    """

    parts: int = 2
    bits: int = 6
    learn: int = 1024
    iterations: int = 10
    group_reduce: GroupReduce = "sum_softmax"

    def __post_init__(self) -> None:
        for name, at_least in (("parts", 1), ("bits", 1), ("learn", 1), ("iterations", 0)):
            keep_int(self, name, at_least=at_least)
        require_group_reduce(self.group_reduce)
        if self.bits > 8:
            raise ValueError(f"ProductCodes(bits={self.bits}) does not fit the byte of a code; use 1 to 8 bits")
        if self.learn < 2**self.bits:
            raise ValueError(
                f"ProductCodes(learn={self.learn}) is too few tokens to learn {2**self.bits} centroids from; use at "
                f"least {2**self.bits}, or fewer bits"
            )

    @property
    def unit(self) -> int:
        return 1

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if spec.head_dim % self.parts:
            raise ValueError(
                f"ProductCodes(parts={self.parts}) does not divide head_dim={spec.head_dim}; use a divisor of "
                f"{spec.head_dim}"
            )
        if chunk % self.learn:
            raise ValueError(
                f"ProductCodes(learn={self.learn}) needs chunks of a multiple of {self.learn} tokens, got chunks of "
                f"{chunk}; use Fifo(leave={self.learn}), or a learn that divides {chunk}"
            )

    def init(self, spec: CacheSpec, slots: int) -> ProductIndex:
        B, K, D = spec.batch, spec.kv_heads, spec.head_dim
        codes = jnp.zeros((B, K, slots, self.parts), jnp.uint8)
        return ProductIndex(codes, jnp.zeros((B, K * 2**self.bits * D), jnp.float32))

    def append(self, ix: ProductIndex, k: Array, at: Array, count: Array) -> ProductIndex:
        codes, centroids = self._encode(ix.centroids, k, at, count)
        return ProductIndex(write(ix.codes, codes, at, count), centroids)

    def _encode(self, centroids: Array, k: Array, at: Array, count: Array) -> tuple[Array, Array]:
        """Codes u8[B, K, T, m] of a chunk's keys, and the centroids, learnt from the chunk if it starts a history."""
        k = lax.stop_gradient(k)
        starts = (at == 0) & (count > 0)

        def learnt(centroids: Array) -> Array:
            new = self._learn(self._split(k[:, :, : self.learn])).reshape(centroids.shape)
            return jnp.where(starts[:, None], new, centroids)

        centroids = lax.cond(jnp.any(starts), learnt, lambda centroids: centroids, centroids)
        books = self._books(centroids, k.shape)
        B, K, T, D = k.shape
        blocks = jnp.moveaxis(k.reshape(B, K, T // self.learn, self.learn, D), 2, 0)
        codes = lax.map(lambda block: _nearest(self._split(block), books), blocks)  # [blocks, B, K, m, learn]
        codes = jnp.moveaxis(codes, 0, 3).reshape(B, K, self.parts, T)
        return jnp.swapaxes(codes, 2, 3), centroids

    def truncate(self, ix: ProductIndex, count: Array) -> ProductIndex:
        return ix._replace(centroids=jnp.where((count > 0)[:, None], ix.centroids, 0))

    def score(self, ix: ProductIndex, q: Array, *, scale: float) -> Array:
        B, K, G, D = q.shape
        books = self._books(ix.centroids, q.shape)
        parts = q.astype(jnp.float32).reshape(B, K, G, self.parts, D // self.parts)
        tables = jnp.einsum("bkgmd,bkmcd->mbkgc", parts, books, precision="highest") * scale
        # Indices for each query head: XLA looks up the tables and adds in one pass, which writes the scores once.
        codes = jnp.broadcast_to(jnp.moveaxis(ix.codes, 3, 0)[:, :, :, None], (self.parts, B, K, G, ix.codes.shape[2]))
        found = [
            jnp.take_along_axis(table, own.astype(jnp.int32), axis=-1, mode="promise_in_bounds")
            for table, own in zip(tables, codes, strict=True)
        ]
        return sum(found[1:], found[0])

    def over_context(self, stripes: Stripes) -> StripedProductCodes:
        return StripedProductCodes(self, stripes)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return float(spec.kv_heads * self.parts)

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        return self.bytes_per_token(spec) * length

    def _split(self, k: Array) -> Array:
        """f32[B, K, m, n, D/m] parts of keys [B, K, n, D]."""
        B, K, n, D = k.shape
        return jnp.swapaxes(k.astype(jnp.float32).reshape(B, K, n, self.parts, D // self.parts), 2, 3)

    def _books(self, centroids: Array, shape: tuple[int, ...]) -> Array:
        """f32[B, K, m, C, D/m] of flat centroids, for arrays of shape [B, K, ..., D]."""
        return centroids.reshape(*shape[:2], self.parts, 2**self.bits, shape[-1] // self.parts)

    def _learn(self, points: Array) -> Array:
        """f32[B, K, m, C, d] centroids of points f32[B, K, m, n, d], by Lloyd's algorithm.

        A centroid without points stays where it is.
        """
        C, n = 2**self.bits, points.shape[3]
        start = points[:, :, :, jnp.arange(C) * n // C]

        def improve(_: Array, books: Array) -> Array:
            own = jax.nn.one_hot(_nearest(points, books), C, dtype=jnp.float32)
            sums = jnp.einsum("bkmnc,bkmnd->bkmcd", own, points, precision="highest")
            counts = jnp.sum(own, axis=3)[..., None]
            return jnp.where(counts > 0, sums / jnp.maximum(counts, 1), books)

        return lax.fori_loop(0, self.iterations, improve, start)


@dataclass(frozen=True)
class StripedProductCodes(StripedSelector):
    """`ProductCodes` on one device of a context axis: it has the codes of its stripes, and all centroids."""

    selector: ProductCodes

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.selector.check(spec, chunk)

    def append(self, ix: ProductIndex, k: Array, at: Array, count: Array) -> ProductIndex:
        """Encodes the whole chunk on every device, because all learn from the first keys; stores the device's own."""
        codes, centroids = self.selector._encode(ix.centroids, k, at, count)
        parts = self.stripes.parts
        return ProductIndex(write(ix.codes, self.stripes.own(codes), at // parts, count // parts), centroids)


def _nearest(points: Array, books: Array) -> Array:
    """u8[B, K, m, n]: the nearest centroid of books [B, K, m, C, d] to each point [B, K, m, n, d]."""
    products = jnp.einsum("bkmnd,bkmcd->bkmnc", points, books, precision="highest")
    sizes = jnp.sum(books * books, axis=-1)[:, :, :, None]
    return jnp.argmin(sizes - 2 * products, axis=-1).astype(jnp.uint8)
