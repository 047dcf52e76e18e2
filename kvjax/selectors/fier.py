"""FIER: tokens by 1-bit keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array, lax

from kvjax import ops
from kvjax.numerics.blocks import write
from kvjax.numerics.partial import Logits
from kvjax.numerics.platforms import for_tpu
from kvjax.numerics.quant import OneBit, quantize_1bit
from kvjax.numerics.selection import (
    GROUP_REDUCES,
    Candidates,
    GroupReduce,
    PackedSelection,
    Selection,
)
from kvjax.selectors.pending import pending_pages, with_points
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec, keep_ints
from kvjax.validation import check_divides, check_one_of

PageReduce = Literal["max", "mean"]


@dataclass(frozen=True, kw_only=True)
class Fier(Selector):
    """Scores tokens by 1-bit keys: for each channel, whether it is above the middle of its
    group of tokens.

    For each channel of a group of g consecutive keys k, with their smallest and largest value:

        middle = (max + min) / 2     half = (max - min) / 2     bit = (k >= middle)
        score(q, k) = scale * q . k~     where k~ = middle + half if bit, else middle - half

    `kvjax.numerics.quant.quantize_1bit` computes the first line when a chunk of keys is
    appended, and `kvjax.ops.score_1bit` the second in each step, with the model's `scale` of
    the logits; `kvjax.ops.select_1bit` scores and selects in one kernel. In a `OneBit`, half is
    `scale` and middle is `zero`.

    Index: D/8 bytes per key for the bits and 4 D/g for half and middle in 16 bits; at g = 32
    and D = 128, 32 bytes per key and kv head, 1/8 of a bf16 key.

    With `page` above 1 whole pages are selected, each by the best score of its tokens, or by
    the mean of its scores: an ablation in which FIER reads pages as Quest does. All but the
    scores then runs in plain JAX.

    **Source:** FIER, section 3 and Algorithm 1; section 4.4 for pages by the mean. **Differs:**
    the paper selects for each query head of models without GQA; here the group shares a
    selection by `group_reduce`, and "per_head" is the paper's rule (G times the reads). A group
    is indexed when its chunk leaves the recent block; until then its tokens compete by exact
    scores.
    """

    group: int = 32  # tokens that share half and middle
    group_reduce: GroupReduce = "mean_softmax"  # for the heads of a GQA group
    page: int = 1  # tokens that are selected together
    page_reduce: PageReduce = "max"  # the score of a page

    def __post_init__(self) -> None:
        keep_ints(self, group=1, page=1)
        check_one_of("Fier", GROUP_REDUCES, group_reduce=self.group_reduce)
        check_one_of("Fier", get_args(PageReduce), page_reduce=self.page_reduce)

    @property
    def unit(self) -> int:
        return self.page

    def check(self, spec: CacheSpec, chunk: int) -> None:
        check_divides(self, "the chunk of ", chunk, group=self.group, page=self.page)
        if spec.head_dim % 8:
            raise ValueError(
                f"Fier packs 8 channels into a byte and cannot index head_dim={spec.head_dim}; use a multiple of 8"
            )

    def init(self, spec: CacheSpec, slots: int) -> OneBit:
        lead = (spec.batch, spec.kv_heads)
        D = spec.head_dim
        groups = (*lead, slots // self.group, D)
        # The keys' own 16 bits, else bf16: f16 could overflow.
        dtype = jnp.dtype(spec.dtype if jnp.dtype(spec.dtype).itemsize == 2 else jnp.bfloat16)
        return OneBit(
            jnp.zeros((*lead, slots, D // 8), jnp.uint8),
            jnp.zeros(groups, dtype),
            jnp.zeros(groups, dtype),
        )

    def append(self, ix: OneBit, k: Array, at: Array, count: Array) -> OneBit:
        new = quantize_1bit(k, self.group, ix.scale.dtype)
        first = at // self.group
        groups = count // self.group
        return OneBit(
            write(ix.bits, new.bits, at, count),
            write(ix.scale, new.scale, first, groups),
            write(ix.zero, new.zero, first, groups),
        )

    def score(self, ix: OneBit, q: Array, *, logits: Logits) -> Array:
        scores = ops.score_1bit(q, ix, logits=logits)
        if self.page == 1:
            return scores
        return for_tpu(self._of_windows, self._of_pages, scores)

    def _of_pages(self, scores: Array) -> Array:
        """Scores [B, K, G, S / page] of pages."""
        pages = scores.reshape(*scores.shape[:3], -1, self.page)
        return (
            jnp.mean(pages, axis=-1) if self.page_reduce == "mean" else jnp.max(pages, axis=-1)
        )

    def _of_windows(self, scores: Array) -> Array:
        """`_of_pages` without an axis of its own for the tokens of a page, which a TPU would pad
        to 128 places."""
        window = (1, 1, 1, self.page)

        def reduced(first: float, combine: Callable[[Array, Array], Array]) -> Array:
            return lax.reduce_window(scores, first, combine, window, window, "VALID")

        if self.page_reduce == "mean":
            return reduced(0.0, lax.add) / self.page
        return reduced(-jnp.inf, lax.max)

    def with_pending(self, candidates: Candidates, q: Array) -> Candidates:
        """A pending page is scored by its exact keys so far: by the best of them, or by their
        mean.
        """
        if self.page_reduce == "max":
            return candidates
        keys, valid = pending_pages(candidates, self.page)
        total = jnp.sum(jnp.where(valid, keys, 0), axis=4, dtype=jnp.float32)
        mean = total / jnp.maximum(jnp.sum(valid, axis=4, dtype=jnp.float32), 1)
        return with_points(candidates, mean[:, :, :, :, None].astype(keys.dtype), self.page)

    def select(
        self, ix: OneBit, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        # The kernel selects single tokens, and puts the one of lowest rank last.
        if self.page > 1 or not candidates.fit(num_sorted_last=1, window=True):
            return super().select(ix, q, candidates, logits=logits)
        return ops.select_1bit(q, ix, candidates, self.group_reduce, logits=logits)
