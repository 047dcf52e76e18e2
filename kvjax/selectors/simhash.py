"""Locality-sensitive hashing of keys: which of them a query samples, and with what probability."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.numerics.blocks import sum_pairs, write
from kvjax.sharding.context import Stripes
from kvjax.spec import CacheSpec, keep_ints

WORD = 32  # tables per word
TOGETHER = 256  # keys that are hashed at once; always so many, because a product's last bits depend on its shape
TILE = 8  # most keys whose words lie side by side: 32 bytes, which a GPU reads at once
MOST_BITS, MOST_TABLES = (
    32,
    4096,
)  # a hash of more bits collides with nothing; more tables take longer than attention
CENTRES = 16  # for any capacity, so that `kvjax.grow` copies them as they are


class HashIndex(NamedTuple):
    """Hashes of centred keys. Bit t % 32 of word (j, t // 32) is bit j of a key's hash in table
    t.
    """

    words: Array  # u32[B, K, S / tile, bits * ceil(tables / 32), tile]
    total: Array  # f32[B, K D] sum of the keys in the history; flat, because it has no slots
    centres: Array  # f32[B, K CENTRES D] centre j is the mean of the first 2**j blocks of `learn` keys


@dataclass(frozen=True, kw_only=True)
class SimHash:
    """Hashes vectors in `tables` tables by the signs of their products with `bits` random
    directions each.

    A query samples the keys that have its own hash in at least `least` tables. Two vectors at
    an angle of theta have equal signs with probability 1 - theta / pi, so the probability that
    a key is sampled is known.

    A centre is subtracted from each key before it is hashed, which spreads the angles. The
    probability is that of the centred key, so estimates are unbiased for any centre. The
    history of a row is divided into blocks of `learn` tokens. The first two blocks are centred
    by the mean of the first one. A later block is centred by the mean of the first 2**j blocks,
    with the largest 2**j, up to 2**15, that does not exceed the number of blocks before it.

    Index: bits * tables / 8 bytes per key and kv head, with tables rounded up to 32: 200 bytes
    at the defaults. A row also has 16 centres and a sum of keys for each kv head. The
    directions are drawn from `seed` and are constants of the program.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179): K = 10 bits, L = 150 tables, at
    least 2 collisions, keys centred. **Differs:** the paper centres all keys by the mean of the
    prompt; here hashes do not depend on how a prompt is split into chunks, and follow keys that
    drift along the row.
    """

    bits: int = 10
    tables: int = 150
    least: int = 2
    learn: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        keep_ints(self, bits=1, tables=1, least=1, learn=1, seed=0)
        if self.bits > MOST_BITS or self.tables > MOST_TABLES:
            raise ValueError(
                f"SimHash(bits={self.bits}, tables={self.tables}) takes at most {MOST_BITS} bits and {MOST_TABLES} "
                "tables; the paper has 10 and 150"
            )
        if self.least > self.tables:
            raise ValueError(
                f"SimHash(least={self.least}) needs at least {self.least} tables, got tables={self.tables}; use more "
                "tables, or fewer collisions"
            )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if chunk % self.learn:
            raise ValueError(
                f"SimHash(learn={self.learn}) needs chunks of a multiple of {self.learn} tokens, got chunks of "
                f"{chunk}; use Fifo(leave={self.learn}), or a learn that divides {chunk}"
            )

    def init(self, spec: CacheSpec, slots: int) -> HashIndex:
        B, K, D = spec.batch, spec.kv_heads, spec.head_dim
        return HashIndex(
            jnp.zeros(
                (B, K, slots // self.tile, self.bits * self._words, self.tile), jnp.uint32
            ),
            jnp.zeros((B, K * D), jnp.float32),
            jnp.zeros((B, K * CENTRES * D), jnp.float32),
        )

    def append(
        self, ix: HashIndex, k: Array, at: Array, count: Array, stripes: Stripes | None = None
    ) -> HashIndex:
        """Hashes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...;
        whole chunks.

        With `stripes`, slots are places of a history that is split over devices, and the index
        has those of this device. All devices have all centres.
        """
        k = lax.stop_gradient(k).astype(jnp.float32)
        total, centres = self._add(ix, k, at, count)
        if stripes is not None:
            k, at, count = stripes.own(k), at // stripes.parts, count // stripes.parts
        B, K, T, _ = k.shape
        place = at[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        if stripes is not None:
            place = stripes.place(place)

        more = -T % TOGETHER
        k, place = (
            jnp.pad(k, ((0, 0), (0, 0), (0, more), (0, 0))),
            jnp.pad(place, ((0, 0), (0, more))),
        )

        def hash_some(first: Array) -> Array:
            keys = lax.dynamic_slice_in_dim(k, first, TOGETHER, axis=2)
            here = lax.dynamic_slice_in_dim(place, first, TOGETHER, axis=1)
            return self._hash(keys - self._centres_of(centres, here[:, None], keys.shape))

        words = lax.map(hash_some, jnp.arange(0, T + more, TOGETHER, dtype=jnp.int32))
        words = jnp.moveaxis(words, 0, 2).reshape(B, K, T + more, -1)[:, :, :T]
        words = jnp.swapaxes(words.reshape(B, K, T // self.tile, self.tile, -1), 3, 4)
        return HashIndex(
            write(ix.words, words, at // self.tile, count // self.tile), total, centres
        )

    def hits(self, ix: HashIndex, q: Array) -> Array:
        """bool[B, K, G, S]: whether a query, q [B, K, G, D], has the hash of a key in at least
        `least` tables.
        """
        (B, K, G, _), W = q.shape, self._words
        query = self._hash(q.astype(jnp.float32)).reshape(B, K, G, 1, self.bits, W, 1)
        words = ix.words.reshape(B, K, -1, self.bits, W, self.tile)
        tables = np.full((1, 1, 1, W, 1), 2**WORD - 1, np.uint32)
        tables[..., -1, :] >>= -self.tables % WORD

        def found(unlike: Array) -> Array:
            alike = lax.population_count(~unlike & tables)
            return jnp.sum(alike, axis=3, dtype=jnp.uint32).reshape(B, K, -1) >= self.least

        # One reduction for all heads: a GPU reads the words of a key once.
        unlike = lax.reduce(
            [words ^ query[:, :, head] for head in range(G)],
            G * [jnp.uint32(0)],
            lambda a, b: [lax.bitwise_or(*pair) for pair in zip(a, b, strict=True)],
            (3,),
        )
        return jnp.stack([found(a) for a in unlike], axis=2)

    def log_probability(self, ix: HashIndex, q: Array, k: Array, place: Array) -> Array:
        """f32[B, K, G, M]: log of the probability that a query of q [B, K, G, D] samples keys k
        [B, K, G, M, D].

        The probability is over the random directions. It has no derivative.

        Args:
          place: i32[B, K, G, M], the slots of the keys in the history; with stripes, in that of
            all devices.
        """
        q, k = (lax.stop_gradient(a).astype(jnp.float32) for a in (q, k))
        k = k - self._centres_of(ix.centres, place, k.shape)
        norms = jnp.linalg.norm(q, axis=-1)[..., None] * jnp.linalg.norm(k, axis=-1)
        products = jnp.einsum("bkgd,bkgmd->bkgm", q, k, precision="highest")
        cosine = jnp.clip(products / jnp.maximum(norms, 1e-30), -1, 1)
        return jnp.log(self.inclusion(1 - jnp.arccos(cosine) / jnp.pi))

    def inclusion(self, alike: Array) -> Array:
        """f32: probability of at least `least` collisions of vectors whose signs agree with
        probability `alike`.
        """
        x = jnp.clip(alike**self.bits, 1e-30, 1 - 1e-6)
        L, n = self.tables, self.least

        def terms(counts: range) -> Array:
            logs = [
                math.log(math.comb(L, i)) + i * jnp.log(x) + (L - i) * jnp.log1p(-x)
                for i in counts
            ]
            return sum((jnp.exp(a) for a in logs[1:]), jnp.exp(logs[0]))

        # If collisions are rare, the sum of the lower counts is near 1, so the upper ones are
        # summed instead: those within seven standard deviations of the mean, which is less than
        # n.
        rare = terms(range(n, min(n + 4 + math.ceil(7 * math.sqrt(n)), L + 1)))
        return jnp.where(x * L < n, rare, jnp.maximum(1 - terms(range(n)), 1e-30))

    @property
    def tile(self) -> int:
        """Keys whose words lie side by side; keys are stored in whole tiles."""
        return math.gcd(self.learn, TILE)

    @property
    def _words(self) -> int:
        return -(-self.tables // WORD)

    def _add(self, ix: HashIndex, k: Array, at: Array, count: Array) -> tuple[Array, Array]:
        """The sum and the centres after `append`. Blocks are added in order, so no bit depends
        on their chunks.
        """
        B, K, _, D = k.shape
        starts = (at == 0) & (count > 0)  # a row that starts forgets the one before it
        total, centres = (jnp.where(starts[:, None], 0.0, a) for a in (ix.total, ix.centres))
        sums = jnp.moveaxis(
            sum_pairs(k.reshape(B, K, -1, self.learn, D)).reshape(B, K, -1, D), 2, 0
        )
        first, blocks = at // self.learn, count // self.learn

        def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
            i, keys = block
            total = jnp.where((i < blocks)[:, None], total + keys.reshape(B, K * D), total)
            return total, total

        total, totals = lax.scan(
            add, total, (jnp.arange(len(sums), dtype=jnp.int32), sums), unroll=16
        )
        sizes = 2 ** np.arange(CENTRES)
        # of k, the last one of each centre
        block = jnp.asarray(sizes - 1, jnp.int32)[None] - first[:, None]
        valid = (block >= 0) & (block < blocks[:, None])
        means = jnp.take_along_axis(
            jnp.moveaxis(totals, 0, 1), block[..., None], axis=1, mode="clip"
        )
        # [B, CENTRES, K D]
        means = means / jnp.asarray(sizes * self.learn, jnp.float32)[None, :, None]
        means = jnp.swapaxes(means.reshape(B, CENTRES, K, D), 1, 2)
        centres = jnp.where(valid[:, None, :, None], means, centres.reshape(B, K, CENTRES, D))
        return total, centres.reshape(B, K * CENTRES * D)

    def _centres_of(self, centres: Array, place: Array, shape: tuple[int, ...]) -> Array:
        """f32 of `shape` [B, K, ..., D]: the centre of each key, whose places are i32[B, K or
        1, ...].
        """
        B, K, D = shape[0], shape[1], shape[-1]
        level = jnp.minimum(31 - lax.clz(jnp.maximum(place // self.learn, 1)), CENTRES - 1)
        level = level.reshape(B, place.shape[1], -1, 1)
        return jnp.take_along_axis(
            centres.reshape(B, K, CENTRES, D), level, axis=2, mode="clip"
        ).reshape(shape)

    def _hash(self, x: Array) -> Array:
        """u32[..., bits * words] of x f32[..., D]."""
        directions = _directions(self.seed, x.shape[-1], self.bits * self._words * WORD)
        signs = jnp.matmul(x, directions, precision="highest") >= 0
        signs = signs.reshape(*x.shape[:-1], self.bits * self._words, WORD).astype(jnp.uint32)
        places = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
        return jnp.sum(
            signs * places.reshape(*(1,) * (x.ndim), WORD), axis=-1, dtype=jnp.uint32
        )


@functools.lru_cache(maxsize=16)
def _directions(seed: int, head_dim: int, count: int) -> np.ndarray:
    """f32[D, count]"""
    return np.random.default_rng(seed).normal(size=(head_dim, count)).astype(np.float32)
