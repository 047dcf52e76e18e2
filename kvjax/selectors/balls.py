"""ArkVale's other page summary: pages by a ball around their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.blocks import write
from kvjax.numerics.partial import scaled
from kvjax.numerics.reductions import sum_pairs
from kvjax.numerics.selection import Candidates, GroupReduce
from kvjax.selectors.pending import PageSelector, Pending, pending_pages, with_points
from kvjax.spec import CacheSpec
from kvjax.validation import check_one_of

Radius = Literal["mean", "max"]


class Balls(NamedTuple):
    """One ball per page."""

    centre: Array  # dtype[B, K, P, D] mean of the keys
    radius: Array  # bf16[B, K, P] distance of the keys from the centre, their mean or their largest


@dataclass(frozen=True, kw_only=True)
class BallPages(PageSelector):
    """Scores pages of `page` tokens by a ball: scale * (q.centre + |q| radius).

    The centre is the mean of the page's keys. With radius="max" all keys lie in the ball, so the score is an upper
    bound of scale * q.k; "mean" is the mean distance, which a single outlier changes less. Index: D values and a
    bfloat16 per page, half the size of the boxes of `CentrePages`.

    **Source:** ArkVale (Chen et al. 2024), page digests by a bounding sphere; pages of 32, mean of raw scores over the
    group. **Differs:** see `CentrePages`, the digest that the paper chose.
    """

    page: int = 32
    radius: Radius = "mean"
    group_reduce: GroupReduce = "mean_score"
    pending: Pending = "box"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("BallPages", get_args(Radius), radius=self.radius)

    def with_pending(self, candidates: Candidates, q: Array) -> Candidates:
        if self.pending == "exact":
            return candidates
        keys, seen = pending_pages(candidates, self.page)
        keys = jnp.where(seen, keys.astype(jnp.float32), 0)  # [B, K, T, P, page, D]
        count = jnp.maximum(jnp.sum(seen, axis=4, keepdims=True, dtype=jnp.float32), 1)
        centre = jnp.sum(keys, axis=4, keepdims=True) / count
        distance = jnp.where(seen, jnp.linalg.norm(keys - centre, axis=5, keepdims=True), 0)
        if self.radius == "max":
            radius = jnp.max(distance, axis=4, keepdims=True)
        else:
            radius = jnp.sum(distance, axis=4, keepdims=True) / count
        heads = q.astype(jnp.float32).reshape(*q.shape[:2], candidates.steps, 1, -1, q.shape[3])
        norms = jnp.maximum(jnp.linalg.norm(heads, axis=5, keepdims=True), jnp.finfo(jnp.float32).tiny)
        best = centre + radius * heads / norms  # its product with q is the score of the ball
        return with_points(candidates, best.astype(candidates.pending[0].dtype), self.page)

    def init(self, spec: CacheSpec, slots: int) -> Balls:
        pages = (spec.batch, spec.kv_heads, slots // self.page)
        return Balls(jnp.zeros((*pages, spec.head_dim), spec.dtype), jnp.zeros(pages, jnp.bfloat16))

    def append(self, ix: Balls, k: Array, at: Array, count: Array) -> Balls:
        B, K, T, D = k.shape
        keys = k.reshape(B, K, T // self.page, self.page, D).astype(jnp.float32)
        centre = (sum_pairs(keys) / self.page).astype(ix.centre.dtype)
        # Distances are from the centre as stored, rounded. `sum_pairs` gives the same bits in every program.
        off = keys - centre[:, :, :, None].astype(jnp.float32)
        distance = jnp.sqrt(sum_pairs(jnp.moveaxis(off * off, 4, 3)))
        if self.radius == "max":
            radius = jnp.max(distance, axis=3) * (1 + 2**-7)  # at least the distance, also after rounding
        else:
            radius = sum_pairs(distance) / self.page
        first, pages = at // self.page, count // self.page
        return Balls(
            write(ix.centre, centre, first, pages),
            write(ix.radius, radius, first, pages),
        )

    def score(self, ix: Balls, q: Array, *, scale: float) -> Array:
        q = q.astype(jnp.float32)
        products = jnp.einsum("bkgd,bkpd->bkgp", q, ix.centre.astype(jnp.float32), precision="highest")
        norms = jnp.linalg.norm(q, axis=-1, keepdims=True)
        return scaled(products + norms * ix.radius[:, :, None].astype(jnp.float32), scale)
