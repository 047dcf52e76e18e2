"""The oracle: tokens by their exact scores."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.blocks import write
from kvjax.numerics.partial import Logits, attention_logits
from kvjax.numerics.selection import GROUP_REDUCES, GroupReduce
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec
from kvjax.validation import check_one_of


@dataclass(frozen=True, kw_only=True)
class Exact(Selector):
    """Scores tokens by their exact scale * q.k: the best that a selector can do, without its
    savings.

    With group_reduce="mean_softmax" the selection is by the attention mass of the group, with
    "per_head" by that of each query head; with "mean_score" and "mean_query" (equal here,
    because q.k is linear) it is by the mean of the true scores. Index: a second copy of the
    keys, D values of the cache's dtype per key and kv head, because a selector has no access to
    the store; every step reads all of it.
    """

    group_reduce: GroupReduce = "mean_softmax"

    def __post_init__(self) -> None:
        check_one_of(type(self).__name__, GROUP_REDUCES, group_reduce=self.group_reduce)

    def init(self, spec: CacheSpec, slots: int) -> Array:
        return jnp.zeros((spec.batch, spec.kv_heads, slots, spec.head_dim), spec.dtype)

    def append(self, ix: Array, k: Array, at: Array, count: Array) -> Array:
        return write(ix, k, at, count)

    def score(self, ix: Array, q: Array, *, logits: Logits) -> Array:
        # A mean of queries stays in f32, whose products take a GPU twice the time of those of
        # 16 bits.
        return attention_logits(
            q, ix.astype(q.dtype) if self.group_reduce == "mean_query" else ix, logits
        )
