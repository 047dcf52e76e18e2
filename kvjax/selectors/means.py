"""ShadowKV's landmarks: pages by the mean of their keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.blocks import write
from kvjax.numerics.partial import scaled
from kvjax.numerics.reductions import page_means
from kvjax.numerics.selection import GroupReduce, require_group_reduce
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec, keep_ints
from kvjax.validation import check_divides


@dataclass(frozen=True, kw_only=True)
class MeanPages(Selector):
    """Scores pages of `page` tokens by the mean of their keys: the mean of the exact scores of a page.

    Index: D values of the cache's dtype per page and KV head.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465), landmarks: pages of 8, the maximum of softmax over the
    group. **Differs:** a page is indexed with its chunk; until then it competes by the best exact score of its tokens.
    """

    page: int = 8
    group_reduce: GroupReduce = "max_softmax"

    def __post_init__(self) -> None:
        keep_ints(self, page=1)
        require_group_reduce(self.group_reduce)

    @property
    def unit(self) -> int:
        return self.page

    def check(self, spec: CacheSpec, chunk: int) -> None:
        check_divides(self, "the chunk of ", chunk, page=self.page)

    def init(self, spec: CacheSpec, slots: int) -> Array:
        return jnp.zeros((spec.batch, spec.kv_heads, slots // self.page, spec.head_dim), spec.dtype)

    def append(self, ix: Array, k: Array, at: Array, count: Array) -> Array:
        means = page_means(k, self.page).astype(ix.dtype)
        return write(ix, means, at // self.page, count // self.page)

    def score(self, ix: Array, q: Array, *, scale: float) -> Array:
        q = q.astype(jnp.float32)
        return scaled(jnp.einsum("bkgd,bkpd->bkgp", q, ix.astype(jnp.float32), precision="highest"), scale)
