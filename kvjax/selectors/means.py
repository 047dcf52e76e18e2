"""ShadowKV's landmarks: pages by the mean of their keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.blocks import page_means, write
from kvjax.numerics.partial import attention_logits
from kvjax.numerics.selection import GroupReduce
from kvjax.selectors.pending import Paged
from kvjax.spec import CacheSpec


@dataclass(frozen=True, kw_only=True)
class MeanPages(Paged):
    """Scores pages of `page` tokens by the mean of their keys: the mean of the exact scores of
    a page.

    Index: D values of the cache's dtype per page and KV head.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465), landmarks: pages of 8, the maximum
    of softmax over the group. **Differs:** a page is indexed with its chunk; until then it
    competes by the best exact score of its tokens.
    """

    page: int = 8
    group_reduce: GroupReduce = "max_softmax"

    def init(self, spec: CacheSpec, slots: int) -> Array:
        return jnp.zeros(
            (spec.batch, spec.kv_heads, slots // self.page, spec.head_dim), spec.dtype
        )

    def append(self, ix: Array, k: Array, at: Array, count: Array) -> Array:
        means = page_means(k, self.page).astype(ix.dtype)
        return write(ix, means, at // self.page, count // self.page)

    def score(self, ix: Array, q: Array, *, scale: float) -> Array:
        # Behind a barrier, or XLA would copy all landmarks to join them with the pending keys
        # for one product.
        ix = ix.astype(q.dtype) if self.group_reduce == "mean_query" else ix
        return attention_logits(lax.optimization_barrier(q), ix, scale)
