"""Tokens by the signs of their rotated keys, which a store of TurboQuant's codes holds anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import ops
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit
from kvjax.numerics.rotate import decode_weights, lloyd_max, rotate_few
from kvjax.numerics.selection import GROUP_REDUCES, GroupReduce
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec
from kvjax.stores.turbo import TurboBlock, TurboQuant
from kvjax.validation import check_one_of

BLOCK = 512  # tokens whose signs are expanded at a time


@dataclass(frozen=True, kw_only=True)
class SignPlane(Selector):
    """Scores tokens by the first plane of the store's own codes, the signs of rotated keys: no
    index is kept.

    A sign says of a random direction what the best 1-bit code does; with the code's scale, the
    estimate of q.k is unbiased. A step reads D/8 + 2 bytes per key and KV head. The store must
    be `TurboQuant` with keys of 2 to 4 bits.

    **Source:** none; the codes are TurboQuant's (arXiv 2504.19874), the retrieval by 1-bit keys
    is FIER's.
    """

    group_reduce: GroupReduce = "mean_softmax"

    reads_store = True

    def __post_init__(self) -> None:
        check_one_of(type(self).__name__, GROUP_REDUCES, group_reduce=self.group_reduce)

    def init(self, spec: CacheSpec, slots: int) -> tuple[()]:
        return ()

    def append(self, ix: tuple[()], k: Array, at: Array, count: Array) -> tuple[()]:
        return ()

    def check_store(self, store: Any) -> None:
        if not isinstance(store, TurboQuant) or store.bits == 8:
            raise ValueError(
                f"{self} scores the codes of keys that the store keeps, and {store} keeps none of 2 to 4 bits; use "
                "store=kvjax.TurboQuant(bits=4), or a selector with an index of its own, such as kvjax.Fier()"
            )

    def score(self, ix: tuple[TurboBlock, TurboQuant], q: Array, *, logits: Logits) -> Array:
        stored, store = ix
        signs = stored.k.signs
        D = q.shape[-1]
        groups = signs.shape[2] // math.gcd(signs.shape[2], BLOCK)
        one = jnp.full((*signs.shape[:2], groups, D), _sign_size(D, store.bits), jnp.float32)
        code = OneBit(signs, one, jnp.zeros_like(one))
        products = ops.score_1bit(rotate_few(q, store.seed), code, logits=Logits(1.0))
        shift = jnp.einsum(
            "bkgd,bkd->bkg", q.astype(jnp.float32), stored.offset, precision="highest"
        )
        sizes = decode_weights(stored.k)[:, :, None, :, 0]
        return logits.of(products * sizes + shift[..., None])

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        return spec.kv_heads * (spec.head_dim / 8 + 2) * length


@lru_cache
def _sign_size(D: int, bits: int) -> float:
    """Returns the size of a channel of a key of weight 1, by its sign alone, with which
    products are unbiased.

    The key's length is its weight times <u, c>, whose mean is that of |c|^2; and <u, sign(u)>
    has the mean D E|u|.
    """
    t = (np.arange(2**14) + 0.5) / 2**14
    density = (1 - t * t) ** ((D - 3) / 2)
    bounds, centres = lloyd_max(D, 2 ** (bits - 1))
    square = np.average(centres[np.searchsorted(bounds, t)] ** 2, weights=density)
    return float(square / np.average(t, weights=density))
