"""Evictors by keys and values alone, or by chance: none of them needs a query.

`KeyNorm` and `Random` rank a token by itself. `KeyDiff` and `Lag` compare it with others, so a
cache should evict several at once (`Evicting(every=...)`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.evictors.base import Evictor, Tokens
from kvjax.numerics.partial import keep_valid
from kvjax.spec import keep_ints
from kvjax.validation import check_flags


@dataclass(frozen=True)
class KeyNorm(Evictor):
    """Keeps the tokens with the shortest keys, to which queries tend to attend most.

    **Source:** Devoto et al. 2024 (arXiv 2406.11430). **Differs:** the paper leaves the first
    layers whole; use `dense_layers`.
    """

    def see_tokens(self, k: Array, v: Array) -> Array:
        return length(k)

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        assert evidence is not None
        return -evidence


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """Keeps the tokens whose keys point furthest from the mean direction of all keys.

    **Source:** KeyDiff (Park et al. 2025, arXiv 2504.15364): -cos(k, mean of k / |k|).
    """

    def score_all(self, tokens: Tokens) -> Array:
        unit = keep_valid(_unit(tokens.k), tokens.position >= 0)
        mean = jnp.sum(unit, axis=2, keepdims=True)
        return -jnp.sum(unit * _unit(mean), axis=-1)


@dataclass(frozen=True, kw_only=True)
class Lag(Evictor):
    """Keeps the tokens that stand out of the `partition` tokens after theirs, in keys and
    values.

    In partitions past the `sink`, keys are scaled by the smallest and largest value of each
    channel in the next partition; a token stands out by the softmax over its partition of the
    deviation across channels, the mean of that of keys and of values. Its score is its rank in
    the partition. The sink, the last whole partition and what follows it are kept.

    **Source:** LagKV (Liang et al. 2025, arXiv 2504.04704): sink 4, partitions of 128.
    """

    sink: int = 4
    partition: int = 128

    def __post_init__(self) -> None:
        keep_ints(self, sink=0, partition=2)

    def check(self, budget: int) -> None:
        if budget < (least := self.sink + 2 * self.partition):
            raise ValueError(
                f"{self} compares a partition with the next, so it needs a budget of at least {least}, got {budget}; "
                "raise it, or use a smaller partition"
            )

    def score_all(self, tokens: Tokens) -> Array:
        L = tokens.position.shape[2]
        size = self.partition
        groups = max((L - self.sink) // size, 0)
        if groups < 2:
            return jnp.where(tokens.position >= 0, jnp.float32(jnp.inf), jnp.float32(0))
        order = in_order(tokens.position)

        def deviation(g: Array) -> Array:
            """f32[B, K, size]: how the tokens of partition g stand out of the next one."""
            place = lax.dynamic_slice_in_dim(order, self.sink + g * size, 2 * size, axis=2)
            k = jnp.take_along_axis(tokens.k, place[..., None], axis=2)
            v = jnp.take_along_axis(tokens.v, place[..., None], axis=2)
            return (_standing_out(k) + _standing_out(v)) / 2

        # The score of a token is its rank in its partition.
        partition = jnp.arange(groups - 1, dtype=jnp.int32)
        deviations = jnp.moveaxis(lax.map(deviation, partition), 0, 2)  # [B, K, groups-1, size]
        rank = jnp.argsort(jnp.argsort(deviations, axis=-1), axis=-1).astype(jnp.float32) / size

        # A row's last whole partition has none after it to be compared with, so it is kept.
        count = jnp.sum(tokens.position >= 0, axis=-1, dtype=jnp.int32)
        whole = (count - self.sink) // size
        compared = partition[None, None] < (whole - 1)[..., None]
        rank = jnp.where(compared[..., None], rank, jnp.inf)

        # The sink before them and all tokens behind them are kept.
        by_age = rank.reshape(*rank.shape[:2], -1)
        ends = (self.sink, L - self.sink - by_age.shape[2])
        by_age = jnp.pad(by_age, ((0, 0), (0, 0), ends), constant_values=jnp.inf)
        return jnp.take_along_axis(by_age, jnp.argsort(order, axis=-1), axis=2)


def _standing_out(x: Array) -> Array:
    """f32[B, K, n]: how the first n of keys or values [B, K, 2n, D] stand out of the n after
    them.
    """
    own, after = jnp.split(x.astype(jnp.float32), 2, axis=2)
    low = jnp.min(after, axis=2, keepdims=True)
    high = jnp.max(after, axis=2, keepdims=True)
    scaled = (own - low) / jnp.maximum(high - low, np.finfo(np.float32).tiny)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)


@dataclass(frozen=True, kw_only=True)
class Random(Evictor):
    """Keeps a uniform sample of all tokens: each has a random number from its position and
    head, and the largest stay.

    With `afresh` the numbers are drawn again at each eviction, among the tokens still held,
    which favours young ones. KV heads on different devices draw alike.

    **Source:** arXiv 2609.03430, whose abstract evicts at random within each head and keeps the
    prompt, as `BesidePrompt` does. It does not say which of the two laws holds.
    """

    seed: int = 0
    afresh: bool = False

    def __post_init__(self) -> None:
        keep_ints(self, seed=0)
        check_flags("Random", afresh=self.afresh)

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        head = jnp.arange(position.shape[1], dtype=jnp.uint32)[None, :, None]
        draw = _mixed(head + np.uint32(self.seed % 2**32 * 0x9E3779B9 % 2**32))
        if self.afresh:
            draw = _mixed(draw ^ end.astype(jnp.uint32)[:, None, None])
        number = _mixed(draw ^ position.astype(jnp.uint32))
        return (number >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def in_order(position: Array) -> Array:
    """i32[B, K, L]: the slots of tokens in order of position, then those without a token."""
    last = jnp.iinfo(jnp.int32).max
    return jnp.argsort(jnp.where(position < 0, last, position), axis=-1).astype(jnp.int32)


def _mixed(x: Array) -> Array:
    """u32 of x u32: a bijection whose output bits each depend on all input bits (the finaliser
    of MurmurHash3).
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def length(x: Array) -> Array:
    """f32[...]: the lengths of vectors [..., D]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


def _unit(x: Array) -> Array:
    return x.astype(jnp.float32) / jnp.maximum(length(x), 1e-12)[..., None]
