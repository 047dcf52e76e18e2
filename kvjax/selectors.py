"""Selectors: which stored tokens a query needs, from an index that is much smaller than the keys.

A selector indexes keys as they leave the recent block and scores units of `unit` tokens (1, or a page) for a query.
Scores estimate scale * q.k, so that they compare with the exact scores of tokens that still wait to be indexed;
`Retrieval` pools over the group, and picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.blocks import write
from kvjax.pick import Pool, require_pool
from kvjax.quant import OneBit, quantize_1bit
from kvjax.spec import CacheSpec, require_int


class Selector(Protocol):
    """Indexes keys and scores them. Laws: a score depends only on its own unit and the query; appending in one call or
    chunk by chunk gives the same index; slots at or past count may score anything, the caller masks them."""

    @property
    def unit(self) -> int:
        """Tokens a scored unit has: 1, or the page size."""
        ...

    @property
    def pool(self) -> Pool:
        """How scores of the G query heads of a group become one."""
        ...

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError where this selector cannot index chunks of `chunk` tokens of such a cache."""
        ...

    def init(self, spec: CacheSpec, slots: int) -> Any: ...

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        """Indexes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...; whole chunks."""
        ...

    def score(self, ix: Any, q: Array, *, scale: float) -> Array:
        """f32[B, K, G, units] estimates of scale * q.k for q [B, K, G, D]."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes of index that a stored token takes in a layer, over all kv heads."""
        ...


@dataclass(frozen=True, kw_only=True)
class All:
    """Every stored token: no index and no choice. `Retrieval` then reads the whole store and takes no budget."""

    unit: int = 1
    pool: Pool = "mean_score"

    def check(self, spec: CacheSpec, chunk: int) -> None:
        pass

    def init(self, spec: CacheSpec, slots: int) -> tuple[()]:
        return ()

    def append(self, ix: tuple[()], k: Array, at: Array, count: Array) -> tuple[()]:
        return ()

    def score(self, ix: tuple[()], q: Array, *, scale: float) -> Array:
        raise NotImplementedError("All keeps no index and scores nothing; it reads every stored token")

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Fier:
    """Scores tokens by 1-bit keys: sign against the middle of a group of tokens, a channel at a time.

    Index: D/8 bytes a key for the bits and 4 D/g for scale and zero in 16 bits; at g = 32 and D = 128, 32 bytes a key
    and kv head, 1/8 of a bf16 key.

    **Source:** FIER, section 3 and Algorithm 1. **Differs:** the paper chooses for each query head of models without
    GQA; here the group shares a choice by `pool`, and "per_head" is the paper's rule (G times the reads). A group is
    sealed when its chunk leaves the recent block; until then its tokens compete by exact scores.
    """

    group: int = 32
    pool: Pool = "mean_softmax"

    def __post_init__(self) -> None:
        require_int("Fier(group=...)", self.group, at_least=1)
        require_pool(self.pool)

    @property
    def unit(self) -> int:
        return 1

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if chunk % self.group:
            raise ValueError(f"Fier(group={self.group}) does not divide the chunk of {chunk}; use a divisor of {chunk}")
        if spec.head_dim % 8:
            raise ValueError(
                f"Fier packs 8 channels a byte and cannot index head_dim={spec.head_dim}; use a multiple of 8"
            )

    def init(self, spec: CacheSpec, slots: int) -> OneBit:
        lead, D = (spec.batch, spec.kv_heads), spec.head_dim
        groups = (*lead, slots // self.group, D)
        dtype = _scale_dtype(spec)
        return OneBit(jnp.zeros((*lead, slots, D // 8), jnp.uint8), jnp.zeros(groups, dtype), jnp.zeros(groups, dtype))

    def append(self, ix: OneBit, k: Array, at: Array, count: Array) -> OneBit:
        new = quantize_1bit(k, self.group, ix.scale.dtype)
        first, groups = at // self.group, count // self.group
        return OneBit(
            write(ix.bits, new.bits, at, count),
            write(ix.scale, new.scale, first, groups),
            write(ix.zero, new.zero, first, groups),
        )

    def score(self, ix: OneBit, q: Array, *, scale: float) -> Array:
        return ops.score_1bit(q, ix, scale=scale)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        per_channel = 1 / 8 + 2 * _scale_dtype(spec).itemsize / self.group
        return spec.kv_heads * spec.head_dim * per_channel


def _scale_dtype(spec: CacheSpec) -> jnp.dtype:
    """16 bits: that of the cache, and bf16 for an f32 cache (f16 could overflow)."""
    return jnp.dtype(spec.dtype if jnp.dtype(spec.dtype).itemsize == 2 else jnp.bfloat16)
