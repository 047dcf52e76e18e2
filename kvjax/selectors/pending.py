"""Pending pages, which are not full and so not indexed, compete by the summary of their tokens
so far.

A page's score is that of a point: the point of its box with the largest product with a query
head. So the tokens of such a page are replaced by these points, one for each query head in
turn, and are scored like pending keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.selection import GROUP_REDUCES, Candidates, GroupReduce
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec, keep_ints
from kvjax.validation import check_divides, check_one_of


@dataclass(frozen=True, kw_only=True)
class Paged(Selector):
    """Scores pages of `page` tokens."""

    page: int
    group_reduce: GroupReduce

    def __post_init__(self) -> None:
        keep_ints(self, page=1)
        check_one_of(type(self).__name__, GROUP_REDUCES, group_reduce=self.group_reduce)

    @property
    def unit(self) -> int:
        return self.page

    def check(self, spec: CacheSpec, chunk: int) -> None:
        check_divides(self, "the chunk of ", chunk, page=self.page)


def pending_pages(candidates: Candidates, page: int) -> tuple[Array, Array]:
    """Returns the pending keys by page, [B, K, 1, P, page, D], and which slots hold a token,
    bool[B or 1, 1, T, P, page, 1].
    """
    keys, _, stop = candidates.pending
    B, K, _, D = keys.shape
    slots = candidates.pending_slots
    ends = jnp.asarray(stop, jnp.int32)
    ends = (ends if ends.ndim == 2 else ends.reshape(-1, 1))[..., None]
    valid = jnp.arange(slots, dtype=jnp.int32)[None, None] < ends  # [B or 1, T or 1, W]
    valid = valid.reshape(valid.shape[0], 1, -1, slots // page, page, 1)
    return keys[:, :, :slots].reshape(B, K, 1, slots // page, page, D), valid


def with_points(candidates: Candidates, best: Array, page: int) -> Candidates:
    """`candidates` with points for the pending keys: best [B, K, T, P, heads, D], of each page
    and query head.

    They fill the page's slots one after the other. All are points of the page, so the best for
    any head is its own.
    """
    _, start, stop = candidates.pending
    B, K, T = best.shape[:3]
    heads = best.shape[4]
    D = best.shape[5]
    points = jnp.take(best, jnp.arange(page, dtype=jnp.int32) % heads, axis=4).reshape(
        B, K, T, -1, D
    )
    first = start // page * page
    end = -(-(stop - candidates.local) // page) * page
    end = jnp.where(jnp.asarray(stop) - candidates.local > start, end, first)
    return replace(
        candidates, pending=(points if T > 1 else points[:, :, 0], first, end), local=0
    )
