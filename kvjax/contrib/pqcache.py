"""PQCache: every token is kept, and a step attends to those that score best by product
quantisation of their keys.

The paper learns centroids from the whole prompt; here a block of tokens has its own, so that the
result does not depend on how a prompt is split into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.blocks import write
from kvjax.numerics.partial import Logits, attention_logits
from kvjax.numerics.selection import GROUP_REDUCES, GroupReduce
from kvjax.policies import PerLayer, Retrieval
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, history, over_layers
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec, keep_ints, require_int
from kvjax.stores import Store
from kvjax.stores.demotion import Fifo
from kvjax.validation import check_divides, check_one_of

__all__ = ["ProductCodes", "pqcache"]


@published(
    "all tokens, and product codes of keys; attends to the budget",
    paper="PQCache 2024",
    released="sink=32,local=512",
)
def pqcache(
    budget: int = 1024,
    *,
    parts: int = 2,
    bits: int = 6,
    learn: int = 1024,
    group_reduce: GroupReduce = "sum_softmax",
    sink: int = 4,
    local: int = 64,
    chunk: int | None = None,
    store: Store | str = "device",
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """PQCache: every token is kept, and a step attends to the `budget` tokens whose
    product-quantised keys score best.

    A code names the nearest of the centroids that k-means found among a block of `learn`
    tokens. Tokens compete by their exact scores until they are encoded.

    Args:
      parts: parts of a key, each with a code.
      bits: bits of a part's code.
      learn: tokens that share centroids, which are learnt from them.
      chunk: tokens encoded together: a multiple of `learn`, times the devices of a context
        axis. None: `learn`.

    **Source:** PQCache (Zhang et al. 2024, arXiv 2407.12820). **Differs:** see `ProductCodes`.
    The budget counts sink and local window: 4 and 64 tokens here, 32 and half of the budget in
    the released code. The paper keeps keys and values in host memory with a cache of blocks on
    the device; here that is store="host", without the cache.

    **Checklist:** unit: tokens, for each KV head; besides: sink and window; zones: sink 4,
    window 64; budget: every token that a step reads; generated: compete by exact scores until a
    block of 1024 has its centroids.
    """
    require_int("pqcache(budget=...)", budget, at_least=1)
    policy = Retrieval(
        selector=ProductCodes(parts=parts, bits=bits, learn=learn, group_reduce=group_reduce),
        store=history("pqcache", store),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=learn if chunk is None else chunk),
    )
    return over_layers("pqcache", layers, policy)


TOGETHER = 8  # blocks of all rows that are learnt at once: one block of one row is too little work for a GPU


class ProductIndex(NamedTuple):
    """The codes of keys, one centroid for each part of a key."""

    codes: Array  # u8[B, K, S, m] by part of the key
    centroids: Array  # dtype[B, K, S / learn, C D] of each block of keys: centroid c of all parts, side by side


@dataclass(frozen=True, kw_only=True)
class ProductCodes(Selector):
    """Scores tokens by product quantisation: each of `parts` parts of a key is replaced by its
    nearest centroid.

    The history of a row is divided into blocks of `learn` tokens. In each block a kv head has a
    codebook of 2**bits centroids for each part, which Lloyd's k-means learns from the keys of
    the block. A step multiplies its queries with the centroids of all blocks, and scores a
    token by `parts` lookups.

    Index: `parts` bytes per key and kv head, and 2**bits D numbers of the cache's dtype per
    block and kv head: together 18 bytes a key at the defaults, with D = 128 in 16 bits. Chunks
    must be a multiple of `learn`. Tokens of a block with the same codes tie, and the lower slot
    wins.

    **Source:** PQCache (Zhang et al. 2024, arXiv 2407.12820): 2 parts, 6 bits, sum of softmax
    over the group. **Differs:** the paper learns one codebook from the whole prompt and keeps
    it. Here each block has its own, so that codes do not depend on how a prompt is split into
    chunks; that takes 16 more bytes a key. k-means starts from evenly spaced tokens; the paper
    bounds its iterations by a time limit. A code takes a byte, not 6 bits.
    """

    parts: int = 2
    bits: int = 6
    learn: int = 1024
    iterations: int = 10
    group_reduce: GroupReduce = "sum_softmax"

    def __post_init__(self) -> None:
        keep_ints(self, parts=1, bits=1, learn=1, iterations=0)
        check_one_of("ProductCodes", GROUP_REDUCES, group_reduce=self.group_reduce)
        if self.bits > 8:
            raise ValueError(
                f"ProductCodes(bits={self.bits}) does not fit the byte of a code; use 1 to 8 bits"
            )
        if self.learn < 2**self.bits:
            raise ValueError(
                f"ProductCodes(learn={self.learn}) is too few tokens to learn {2**self.bits} centroids from; use at "
                f"least {2**self.bits}, or fewer bits"
            )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        check_divides(self, "head_dim=", spec.head_dim, parts=self.parts)
        if chunk % self.learn:
            raise ValueError(
                f"ProductCodes(learn={self.learn}) needs chunks of a multiple of {self.learn} tokens, for each device "
                f"of a context axis, got chunks of {chunk}; use Fifo(leave={self.learn}), or chunk={self.learn} of the "
                f"preset, times the devices, or a learn that divides {chunk}"
            )

    def init(self, spec: CacheSpec, slots: int) -> ProductIndex:
        B = spec.batch
        K = spec.kv_heads
        D = spec.head_dim
        codes = jnp.zeros((B, K, slots, self.parts), jnp.uint8)
        return ProductIndex(
            codes, jnp.zeros((B, K, slots // self.learn, 2**self.bits * D), spec.dtype)
        )

    def append(self, ix: ProductIndex, k: Array, at: Array, count: Array) -> ProductIndex:
        B, K, T, D = k.shape
        blocks = jnp.moveaxis(
            lax.stop_gradient(k).reshape(B, K, T // self.learn, self.learn, D), 2, 0
        )

        def encode(block: Array) -> tuple[Array, Array]:
            points = self._split(block)
            books = self._learn(points).astype(ix.centroids.dtype)
            return _nearest(points, books.astype(jnp.float32)), books

        # [blocks, B, K, m, learn] and [blocks, B, K, m, C, D/m]
        codes, books = lax.map(encode, blocks, batch_size=max(TOGETHER // B, 1))
        codes = jnp.swapaxes(jnp.moveaxis(codes, 0, 3).reshape(B, K, self.parts, T), 2, 3)
        books = jnp.transpose(books, (1, 2, 0, 4, 3, 5)).reshape(B, K, T // self.learn, -1)
        centroids = write(ix.centroids, books, at // self.learn, count // self.learn)
        return ProductIndex(write(ix.codes, codes, at, count), centroids)

    def score(self, ix: ProductIndex, q: Array, *, logits: Logits) -> Array:
        B, K, G, D = q.shape
        S = ix.codes.shape[2]
        C = 2**self.bits
        books = ix.centroids.reshape(B, K, -1, D)
        first = (
            lax.div(lax.broadcasted_iota(jnp.int32, (B, K, G, S), 3), jnp.int32(self.learn)) * C
        )
        channel = jnp.arange(D, dtype=jnp.int32) // (D // self.parts)

        def looked_up(part: int) -> Array:
            # A query of one part only: so the centroids are read as they lie. XLA looks up and
            # adds in one pass.
            table = attention_logits(jnp.where(channel == part, q, 0), books, Logits(1.0))
            own = jnp.broadcast_to(ix.codes[:, :, None, :, part], first.shape).astype(jnp.int32)
            return jnp.take_along_axis(table, first + own, axis=-1, mode="promise_in_bounds")

        found = [looked_up(part) for part in range(self.parts)]
        return logits.of(sum(found[1:], found[0]))

    def _split(self, k: Array) -> Array:
        """f32[B, K, m, n, D/m] parts of keys [B, K, n, D]."""
        B, K, n, D = k.shape
        return jnp.swapaxes(
            k.astype(jnp.float32).reshape(B, K, n, self.parts, D // self.parts), 2, 3
        )

    def _learn(self, points: Array) -> Array:
        """f32[B, K, m, C, d] centroids of points f32[B, K, m, n, d], by Lloyd's algorithm.

        A centroid without points stays where it is.
        """
        C = 2**self.bits
        n = points.shape[3]
        start = points[:, :, :, jnp.arange(C, dtype=jnp.int32) * n // C]

        def improve(_: Array, books: Array) -> Array:
            own = jax.nn.one_hot(_nearest(points, books), C, dtype=jnp.float32)
            sums = jnp.einsum("bkmnc,bkmnd->bkmcd", own, points, precision="highest")
            counts = jnp.sum(own, axis=3)[..., None]
            return jnp.where(counts > 0, sums / jnp.maximum(counts, 1), books)

        return lax.fori_loop(0, self.iterations, improve, start)


def _nearest(points: Array, books: Array) -> Array:
    """u8[B, K, m, n]: the nearest centroid of books [B, K, m, C, d] to each point [B, K, m, n,
    d].
    """
    products = jnp.einsum("bkmnd,bkmcd->bkmnc", points, books, precision="highest")
    sizes = jnp.sum(books * books, axis=-1)[:, :, :, None]
    return jnp.argmin(sizes - 2 * products, axis=-1).astype(jnp.uint8)
