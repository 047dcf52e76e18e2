"""Locality-sensitive hashing of keys: which of them a query samples, and with what probability."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.blocks import write
from kvjax.context import Stripes
from kvjax.spec import CacheSpec, keep_int

WORD = 32  # tables per word
MOST_BITS, MOST_TABLES = 32, 4096  # a hash of more bits collides with nothing; more tables take longer than attention


class HashIndex(NamedTuple):
    """Hashes of centred keys. Bit t % 32 of word (j, t // 32) is bit j of a key's hash in table t."""

    words: Array  # u32[B, K, S, bits * ceil(tables / 32)]
    centre: Array  # f32[B, K D] subtracted from the keys of each head; flat, because it has no slots


@dataclass(frozen=True, kw_only=True)
class SimHash:
    """Hashes vectors in `tables` tables by the signs of their products with `bits` random directions each.

    A query samples the keys that have its own hash in at least `least` tables. Two vectors at an angle of theta have
    equal signs with probability 1 - theta / pi, so the probability that a key is sampled is known. Keys are centred by
    the mean of the first `learn` tokens of the row's history, which leaves the softmax unchanged and spreads their
    angles.

    Index: bits * tables / 8 bytes per key and kv head, with tables rounded up to 32: 200 bytes at the defaults. The
    directions are drawn from `seed` and are constants of the program.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179): K = 10 bits, L = 150 tables, at least 2 collisions, keys
    centred. **Differs:** the mean is that of the first `learn` tokens, not of the prompt, so that it does not depend on
    how a prompt is split into chunks.
    """

    bits: int = 10
    tables: int = 150
    least: int = 2
    learn: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name, at_least in (("bits", 1), ("tables", 1), ("least", 1), ("learn", 1), ("seed", 0)):
            keep_int(self, name, at_least=at_least)
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
        B, K = spec.batch, spec.kv_heads
        words = jnp.zeros((B, K, slots, self.bits * self._words), jnp.uint32)
        return HashIndex(words, jnp.zeros((B, K * spec.head_dim), jnp.float32))

    def append(self, ix: HashIndex, k: Array, at: Array, count: Array, stripes: Stripes | None = None) -> HashIndex:
        """Hashes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...; whole chunks.

        With `stripes`, slots are places of a history that is split over devices, and the index has those of this
        device.
        """
        k = lax.stop_gradient(k).astype(jnp.float32)
        B, K, _, D = k.shape
        starts = (at == 0) & (count > 0)
        mean = jnp.mean(k[:, :, : self.learn], axis=2).reshape(B, K * D)
        centre = jnp.where(starts[:, None], mean, ix.centre)
        block = self.learn
        if stripes is not None:
            k, block, at, count = stripes.own(k), stripes.tokens, at // stripes.parts, count // stripes.parts
        blocks = jnp.moveaxis(k.reshape(B, K, -1, block, D), 2, 0)
        words = lax.map(lambda block: self._hash(block - centre.reshape(B, K, 1, D)), blocks)
        words = jnp.moveaxis(words, 0, 2).reshape(B, K, k.shape[2], -1)
        return HashIndex(write(ix.words, words, at, count), centre)

    def collisions(self, ix: HashIndex, q: Array) -> Array:
        """i32[B, K, G, S]: tables in which a key has the hash of the query, q [B, K, G, D]."""
        query, W, last = self._hash(q.astype(jnp.float32)), self._words, self.tables % WORD
        total = jnp.zeros((*q.shape[:3], ix.words.shape[2]), jnp.uint32)
        for w in range(W):
            unlike = jnp.zeros_like(total)
            for j in range(self.bits):
                at = j * W + w
                unlike |= ix.words[:, :, None, :, at] ^ query[:, :, :, None, at]
            tables = jnp.uint32(2**last - 1 if w == W - 1 and last else 2**WORD - 1)
            total += lax.population_count(~unlike & tables)
        return total.astype(jnp.int32)

    def log_probability(self, ix: HashIndex, q: Array, k: Array) -> Array:
        """f32[B, K, G, M]: log of the probability that a query of q [B, K, G, D] samples keys k [B, K, G, M, D].

        The probability is over the random directions. It has no derivative.
        """
        B, K, _, D = q.shape
        q, k = (lax.stop_gradient(a).astype(jnp.float32) for a in (q, k))
        k = k - ix.centre.reshape(B, K, 1, 1, D)
        norms = jnp.linalg.norm(q, axis=-1)[..., None] * jnp.linalg.norm(k, axis=-1)
        products = jnp.einsum("bkgd,bkgmd->bkgm", q, k, precision="highest")
        cosine = jnp.clip(products / jnp.maximum(norms, 1e-30), -1, 1)
        return jnp.log(self.inclusion(1 - jnp.arccos(cosine) / jnp.pi))

    def inclusion(self, alike: Array) -> Array:
        """f32: probability of at least `least` collisions of vectors whose signs agree with probability `alike`."""
        x = jnp.clip(alike**self.bits, 1e-30, 1 - 1e-6)
        L, n = self.tables, self.least

        def terms(counts: range) -> Array:
            logs = [math.log(math.comb(L, i)) + i * jnp.log(x) + (L - i) * jnp.log1p(-x) for i in counts]
            return sum((jnp.exp(a) for a in logs[1:]), jnp.exp(logs[0]))

        # If collisions are rare, the sum of the lower counts is near 1, so the upper ones are summed instead.
        rare = terms(range(n, min(n + 12, L + 1)))
        return jnp.where(x * L < n, rare, jnp.maximum(1 - terms(range(n)), 1e-30))

    @property
    def _words(self) -> int:
        return -(-self.tables // WORD)

    def _hash(self, x: Array) -> Array:
        """u32[..., bits * words] of x f32[..., D]."""
        directions = _directions(self.seed, x.shape[-1], self.bits * self._words * WORD)
        signs = jnp.matmul(x, directions, precision="highest") >= 0
        signs = signs.reshape(*x.shape[:-1], self.bits * self._words, WORD).astype(jnp.uint32)
        places = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
        return jnp.sum(signs * places.reshape(*(1,) * (x.ndim), WORD), axis=-1, dtype=jnp.uint32)


@functools.lru_cache(maxsize=16)
def _directions(seed: int, head_dim: int, count: int) -> np.ndarray:
    """f32[D, count]"""
    return np.random.default_rng(seed).normal(size=(head_dim, count)).astype(np.float32)
