"""One selection for all KV heads of a layer, as in ArkVale's released code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.selection import Candidates, PackedSelection, Selection
from kvjax.selectors.selector import LAST, Selector, Wrapper
from kvjax.sharding.context import Stripes
from kvjax.validation import check_verbs


@dataclass(frozen=True, kw_only=True)
class LayerWide(Wrapper):
    """Selects the same units for all KV heads of a layer: all query heads of the layer rank
    them as one group.

    `selector` scores, and its `group_reduce` reduces the scores of all query heads to one.
    Scores are computed in f32 and sorted in plain JAX.

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=LayerWide(selector=kvjax.CentrePages()), demote=kvjax.Fifo(leave=32))
    """

    selector: Selector

    def __post_init__(self) -> None:
        check_verbs(
            "LayerWide(selector=...)",
            self.selector,
            "a selector",
            ("init", "score"),
            "kvjax.CentrePages()",
        )
        if self.group_reduce == "per_head":
            raise ValueError(
                "LayerWide(selector=...) shares one selection in a layer, so its selector cannot have "
                "group_reduce='per_head'; use 'mean_score', or the selector without LayerWide"
            )

    @property
    def joins_heads(self) -> bool:
        """True: the heads of a layer select together, so none can be computed without the
        others.
        """
        return True

    def over_context(self, stripes: Stripes) -> Selector:
        """This selector, whole: every device holds the index of the whole history."""
        return self

    def select(
        self, ix: Any, q: Array, candidates: Candidates, *, scale: float
    ) -> Selection | PackedSelection:
        B, K = q.shape[:2]
        scores = self.score_visible(ix, q, candidates, scale=scale)
        if candidates.last is not None:
            scores = jnp.where(candidates.last[:, :, None], LAST, scores)
        scored = self.with_pending(candidates, q)
        pending = scored.pending_units(q, scale, self.unit)
        parts = (
            (scores, candidates.inside(*candidates.span, scores.shape[3], self.unit)),
            pending,
        )
        layer = [(part.reshape(B, 1, -1, part.shape[3]), valid) for part, valid in parts]
        best = ops.top_k_grouped(layer, self.group_reduce, candidates.k_max)
        valid = best.valid & (
            jnp.arange(candidates.k_max)[None, None, None] < candidates.of_groups(candidates.k)
        )
        shape = (B, K, 1, candidates.k_max)
        units = Selection(jnp.broadcast_to(best.slots, shape), jnp.broadcast_to(valid, shape))
        return candidates.tokens(units, scores.shape[3], self.unit)
