"""Quest, ArkVale and FreeKV: pages by a box around their keys.

A page is summarised by two corners, a low and a high value of each channel. A query's score of
a page is its largest product with any point of the box, sum_i max(q_i low_i, q_i high_i). With
the true minima and maxima that is an upper bound of every q.k of the page; a smaller box
follows the typical key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.blocks import sum_pairs, write
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Candidates, GroupReduce, PackedSelection, Selection, unpack
from kvjax.selectors.pending import Paged, pending_pages, with_points
from kvjax.spec import CacheSpec
from kvjax.validation import check_one_of

Pending = Literal["exact", "box"]


class Boxes(NamedTuple):
    """One box per page. The score of a page is the largest q.x of a point x of its box."""

    low: Array  # dtype[B, K, P, D]
    high: Array  # dtype[B, K, P, D]


@dataclass(frozen=True, kw_only=True)
class _Boxes(Paged):
    """Scores pages of `page` tokens by one box each; a subclass defines the box, also of
    pending pages.
    """

    pending: Pending

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(type(self).__name__, get_args(Pending), pending=self.pending)

    def check(self, spec: CacheSpec, chunk: int) -> None:
        super().check(spec, chunk)
        if (
            self.pending == "box"
            and self.group_reduce != "mean_query"
            and self.page < spec.group
        ):
            raise ValueError(
                f"{type(self).__name__}(page={self.page}, pending='box') needs pages of at least {spec.group} tokens, "
                "one for each query head of a KV head; use larger pages, or pending='exact'"
            )

    def box(self, keys: Array) -> Boxes:
        """Returns the corners [B, K, P, D] of pages of keys [B, K, P, page, D]."""
        raise NotImplementedError

    def box_of_seen(self, keys: Array, seen: Array) -> tuple[Array, Array]:
        """Returns the corners [B, K, T, P, 1, D] of the tokens of pages [B, K, 1, P, page, D]
        that are `seen`.

        Here the smallest and largest keys. Takes one key after the other, so that XLA fuses
        everything into one kernel: a reduction would be a second one.
        """
        B, K, _, P, page, D = keys.shape
        largest = jnp.asarray(jnp.finfo(keys.dtype).max, keys.dtype)
        shape = (B, K, seen.shape[2], P, 1, D)
        low = jnp.full(shape, largest, keys.dtype)
        high = jnp.full(shape, -largest, keys.dtype)
        for i in range(page):
            key = keys[..., i : i + 1, :]
            here = seen[..., i : i + 1, :]
            low = jnp.where(here, jnp.minimum(low, key), low)
            high = jnp.where(here, jnp.maximum(high, key), high)
        return low, high

    def with_pending(self, candidates: Candidates, q: Array) -> Candidates:
        if self.pending == "exact":
            return candidates
        low, high = self.box_of_seen(*pending_pages(candidates, self.page))
        # Queries that broadcast against corners.
        heads = q.reshape(*q.shape[:2], candidates.steps, 1, -1, q.shape[3])
        return with_points(candidates, jnp.where(heads > 0, high, low), self.page)

    def init(self, spec: CacheSpec, slots: int) -> Boxes:
        shape = (spec.batch, spec.kv_heads, slots // self.page, spec.head_dim)
        return Boxes(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))

    def append(self, ix: Boxes, k: Array, at: Array, count: Array) -> Boxes:
        B, K, T, D = k.shape
        new = self.box(k.reshape(B, K, T // self.page, self.page, D))
        first = at // self.page
        pages = count // self.page
        return Boxes(
            write(ix.low, new.low, first, pages), write(ix.high, new.high, first, pages)
        )

    def score(self, ix: Boxes, q: Array, *, logits: Logits) -> Array:
        return ops.score_pages(q, ix.low, ix.high, logits=logits)

    def select(
        self, ix: Boxes, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        if not candidates.fit(num_sorted_last=1, window=True):
            return super().select(ix, q, candidates, logits=logits)
        scored = self.with_pending(candidates, q)
        pages = ops.select_pages(
            q, *ix, scored, self.group_reduce, unit=self.page, logits=logits
        )
        return candidates.tokens(unpack(pages), ix.low.shape[2], self.page)


@dataclass(frozen=True, kw_only=True)
class MinMaxPages(_Boxes):
    """Scores pages of `page` tokens by the box of their smallest and largest keys, an upper
    bound of the logits of all keys in the page.

    For each channel i of a page, over its keys k:

        low_i = min k_i     high_i = max k_i
        score(q) = scale * sum_i max(q_i low_i, q_i high_i)

    `box` computes the corners when a chunk of keys is appended, and `kvjax.ops.score_pages` the
    score in each step; `kvjax.ops.select_pages` scores and selects in one kernel.

    Index: 2 D/page values of the cache's dtype per key, exact; at page = 16 and D = 128 in
    bf16, 32 bytes per key and kv head, 1/8 of the key.

    **Source:** Quest (Tang et al. 2024), Algorithm 1 (page 16); FreeKV (page 32). **Differs:**
    Quest selects for each query head; here the group shares a selection by `group_reduce`,
    FreeKV's mean of softmax by default, and "per_head" is Quest's rule (G times the reads). A
    page is indexed with its chunk. Until then its score is that of the box of its tokens so far
    (pending="box"), as in Quest's evaluation, or the best exact score of its tokens ("exact"),
    which is below the bounds of other pages: use that where no tokens are pending, as with
    `Buffer`.
    """

    page: int = 16
    group_reduce: GroupReduce = "mean_softmax"
    pending: Pending = "box"

    def box(self, keys: Array) -> Boxes:
        return Boxes(jnp.min(keys, axis=3), jnp.max(keys, axis=3))


@dataclass(frozen=True, kw_only=True)
class CentrePages(_Boxes):
    """Scores pages of `page` tokens by the box centre - d to centre + d, with d the mean
    deviation from the centre.

    For each channel, centre = (max + min) / 2 over the page and d = mean |k - centre|. Not a
    bound: a key may lie outside of the box. Index: as `MinMaxPages`, rounded to the cache's
    dtype.

    **Source:** ArkVale (Chen et al. 2024), the bounding cuboid with mean radius
    ("cuboid-mean"), page 32, mean of raw scores over the group; FreeKV's CUDA code has the same
    summary and group_reduce. **Differs:** ArkVale adds a page when it is full; here it is added
    with its chunk, and until then competes by the box of its tokens so far, or with
    pending="exact" by their exact scores (see `MinMaxPages`).
    """

    page: int = 32
    group_reduce: GroupReduce = "mean_score"
    pending: Pending = "box"

    def box(self, keys: Array) -> Boxes:
        keys = keys.astype(jnp.float32)
        centre = (jnp.max(keys, axis=3) + jnp.min(keys, axis=3)) / 2
        deviation = sum_pairs(jnp.abs(keys - centre[:, :, :, None])) / self.page
        return Boxes(centre - deviation, centre + deviation)

    def box_of_seen(self, keys: Array, seen: Array) -> tuple[Array, Array]:
        low, high = (x.astype(jnp.float32) for x in super().box_of_seen(keys, seen))
        centre = (high + low) / 2
        distance = jnp.zeros_like(centre)
        count = jnp.zeros((), jnp.float32)
        for i in range(self.page):
            here = seen[..., i : i + 1, :]
            key = keys[..., i : i + 1, :].astype(jnp.float32)
            distance = distance + jnp.where(here, jnp.abs(key - centre), 0)
            count = count + here.astype(jnp.float32)
        deviation = distance / jnp.maximum(count, 1)
        return (centre - deviation).astype(keys.dtype), (centre + deviation).astype(keys.dtype)
