"""Quest, ArkVale and FreeKV: pages by a box around their keys.

A page is summed up by two corners, a low and a high value of each channel. A query's score of a page is its largest
product with any point of the box, sum_i max(q_i low_i, q_i high_i). With the true minima and maxima that is an upper
bound of every q.k of the page; a smaller box gives it up to follow the typical key, not an outlier in each channel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.blocks import write
from kvjax.context import Stripes
from kvjax.reductions import sum_pairs
from kvjax.selection import Candidates, GroupReduce, Selection, require_group_reduce
from kvjax.selectors.striped import StripedSelector
from kvjax.spec import CacheSpec, keep_int

Pending = Literal["exact", "box"]


class Boxes(NamedTuple):
    """A box a page. The score of a page is the largest q.x of a point x of its box."""

    low: Array  # dtype[B, K, P, D]
    high: Array  # dtype[B, K, P, D]


@dataclass(frozen=True, kw_only=True)
class _Pages:
    """Scores pages of `page` tokens by a box each; what the box is, a subclass says."""

    page: int
    group_reduce: GroupReduce

    def __post_init__(self) -> None:
        keep_int(self, "page", at_least=1)
        require_group_reduce(self.group_reduce)

    def box(self, keys: Array) -> Boxes:
        """The corners [B, K, P, D] of pages of keys [B, K, P, page, D]."""
        raise NotImplementedError

    def with_pending(self, among: Candidates, q: Array) -> Candidates:
        return among

    @property
    def unit(self) -> int:
        return self.page

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if chunk % self.page:
            name = type(self).__name__
            raise ValueError(f"{name}(page={self.page}) does not divide the chunk of {chunk}; use a divisor of {chunk}")

    def init(self, spec: CacheSpec, slots: int) -> Boxes:
        shape = (spec.batch, spec.kv_heads, slots // self.page, spec.head_dim)
        return Boxes(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))

    def append(self, ix: Boxes, k: Array, at: Array, count: Array) -> Boxes:
        B, K, T, D = k.shape
        new = self.box(k.reshape(B, K, T // self.page, self.page, D))
        first, pages = at // self.page, count // self.page
        return Boxes(write(ix.low, new.low, first, pages), write(ix.high, new.high, first, pages))

    def score(self, ix: Boxes, q: Array, *, scale: float) -> Array:
        return ops.score_pages(q, ix.low, ix.high, scale=scale)

    @property
    def selects_in_window(self) -> bool:
        return True

    @property
    def lowest_is_last(self) -> bool:
        return True

    def select(self, ix: Boxes, q: Array, among: Candidates, *, scale: float) -> Selection:
        scored = self.with_pending(among, q)
        pages = ops.select_pages(q, *ix, scored, self.group_reduce, unit=self.page, scale=scale)
        return among.tokens(pages.selection, ix.low.shape[2], self.page)

    def truncate(self, ix: Boxes, count: Array) -> Boxes:
        return ix

    def over_context(self, stripes: Stripes) -> StripedSelector:
        return StripedSelector(self, stripes)

    def select_steps(self, ix: Boxes, q: Array, among: Candidates, *, scale: float) -> Selection:
        return self.select(ix, q, among, scale=scale)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return 2.0 * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize / self.page

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        return self.bytes_per_token(spec) * length


@dataclass(frozen=True, kw_only=True)
class MinMaxPages(_Pages):
    """Scores pages of `page` tokens by the box of their smallest and largest keys, an upper bound of scale * q.k.

    Index: 2 D/page values of the cache's dtype a key, exact; at page = 16 and D = 128 in bf16, 32 bytes a key and kv
    head, 1/8 of the key.

    **Source:** Quest (Tang et al. 2024), Algorithm 1 (page 16); FreeKV (page 32). **Differs:** Quest selects for each
    query head; here the group shares a selection by `group_reduce`, FreeKV's mean of softmax by default, and "per_head"
    is Quest's rule (G times the reads). A page is indexed with its chunk. Until then its score is the best exact score
    of its tokens (pending="exact"), or the score of the box of those that it has ("box"), as in Quest's evaluation. An
    exact score is below the bounds of other pages, so the newest page often loses by it.
    """

    page: int = 16
    group_reduce: GroupReduce = "mean_softmax"
    pending: Pending = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pending not in get_args(Pending):
            raise ValueError(f"MinMaxPages(pending=...) must be 'exact' or 'box'; got {self.pending!r}")

    def check(self, spec: CacheSpec, chunk: int) -> None:
        super().check(spec, chunk)
        if self.pending == "box" and self.group_reduce != "mean_query" and self.page < spec.group:
            raise ValueError(
                f"MinMaxPages(page={self.page}, pending='box') needs pages of at least as many tokens as a KV head has "
                f"query heads, {spec.group}; use larger pages, or pending='exact'"
            )

    def box(self, keys: Array) -> Boxes:
        return Boxes(jnp.min(keys, axis=3), jnp.max(keys, axis=3))

    def with_pending(self, among: Candidates, q: Array) -> Candidates:
        if self.pending == "exact":
            return among
        keys, start, stop = among.pending
        B, K, _, D = keys.shape
        steps, wide, heads = among.steps, among.pending_slots, q.shape[2] // among.steps
        shape = (B, K, 1, wide // self.page, self.page, D)
        ends = jnp.asarray(stop, jnp.int32)
        there = (
            jnp.arange(wide)[None, None] < (ends if ends.ndim == 2 else ends.reshape(-1, 1))[..., None]
        )  # [B or 1, T or 1, W]
        there = there.reshape(there.shape[0], 1, -1, *shape[3:5], 1)
        pages = keys[:, :, :wide].reshape(shape)
        largest = jnp.asarray(jnp.finfo(keys.dtype).max, keys.dtype)
        # One after the other, so that XLA makes one kernel of all this: a reduction would be one of its own.
        low, high = (jnp.full((B, K, steps, shape[3], 1, D), x) for x in (largest, -largest))
        for i in range(self.page):
            key, seen = pages[..., i : i + 1, :], there[..., i : i + 1, :]
            low = jnp.where(seen, jnp.minimum(low, key), low)
            high = jnp.where(seen, jnp.maximum(high, key), high)
        # The point of its box at which a query head has its best score, one after the other in the page's slots. All
        # are points of the box, so the best of them for any head is its own.
        best = jnp.where(q.reshape(B, K, steps, 1, heads, D) > 0, high, low)
        points = jnp.take(best, jnp.arange(self.page) % heads, axis=4).reshape(B, K, steps, -1, D)
        first, end = start // self.page * self.page, -(-(stop - among.local) // self.page) * self.page
        end = jnp.where(jnp.asarray(stop) - among.local > start, end, first)
        return replace(among, pending=(points if steps > 1 else points[:, :, 0], first, end), local=0)


@dataclass(frozen=True, kw_only=True)
class CentrePages(_Pages):
    """Scores pages of `page` tokens by the box centre - d to centre + d, with d the mean deviation from the centre.

    For each channel, centre = (max + min) / 2 over the page and d = mean |k - centre|. Not a bound: a key may lie
    outside of the box. Index: as `MinMaxPages`, rounded to the cache's dtype.

    **Source:** ArkVale (Chen et al. 2024), the bounding cuboid with mean radius ("cuboid-mean"), page 32, mean of raw
    scores over the group; FreeKV's CUDA code has the same summary and group_reduce. **Differs:** ArkVale adds a page
    when it is full; here it comes with its chunk, and its tokens compete by exact scores until then.
    """

    page: int = 32
    group_reduce: GroupReduce = "mean_score"

    def box(self, keys: Array) -> Boxes:
        keys = keys.astype(jnp.float32)
        centre = (jnp.max(keys, axis=3) + jnp.min(keys, axis=3)) / 2
        deviation = sum_pairs(jnp.abs(keys - centre[:, :, :, None])) / self.page
        return Boxes(centre - deviation, centre + deviation)
