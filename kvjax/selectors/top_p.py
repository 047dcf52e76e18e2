"""Adaptive budgets: select as many tokens as hold a given share of the attention, by a selector's own estimates.

A head whose attention is peaked needs few tokens, and one whose attention is flat needs many. So a rule keeps some of
the units that a selector ranks highest: the first ones whose estimated shares sum up to `p`, or the best ones of all
heads of the layer together. A step gathers room for the whole budget and masks the units that it does not keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.partial import attention_logits
from kvjax.numerics.selection import Candidates, GroupReduce, PackedSelection, Selection, reduce_scores
from kvjax.selectors.selector import Selector, Wrapper
from kvjax.sharding.context import Stripes
from kvjax.spec import keep_number
from kvjax.validation import check_verbs


@dataclass(frozen=True, kw_only=True)
class ByShare(Wrapper):
    """Keeps some of the units that `selector` ranks highest, by their shares of the attention; a subclass says which.

    Shares are the softmax of the scores over all units that a step may select, averaged over the query heads that share
    a selection. They leave out sink and local window. Scores are computed in f32, even where `selector` alone would
    select in one kernel. Give the policy a sink: in many heads the first tokens take most of the attention, so without
    one the shares of other tokens say little. With `Paris` only candidates have shares. Rows with fewer than
    `dense_below` tokens keep all units.
    """

    selector: Selector

    def __post_init__(self) -> None:
        check_verbs(
            f"{type(self).__name__}(selector=...)", self.selector, "a selector", ("init", "score"), "kvjax.Fier()"
        )

    def keep(self, share: Array, valid: Array, order: Array) -> Array:
        """bool[B, K, H, M]: which of the valid units to keep; `order` sorts them by `share` f32[B, K, H, M], highest
        first."""
        raise NotImplementedError

    def over_context(self, stripes: Stripes) -> Selector:
        """This selector, whole: every device holds the index of the whole history, as shares are of all its tokens."""
        return self

    def select(self, ix: Any, q: Array, candidates: Candidates, *, scale: float) -> Selection | PackedSelection:
        if not candidates.fit(in_order=1, window=True):
            return super().select(ix, q, candidates, scale=scale)
        unit, group_reduce = self.unit, self.group_reduce
        scores = self.score_visible(ix, q, candidates, scale=scale)
        scored = self.with_pending(candidates, q)
        best = ops.select_top(scores, q, scored, group_reduce, unit=unit, scale=scale)
        pending = scored.pending_units(attention_logits(q, scored.pending[0], scale), unit)
        stored = scores, candidates.inside(*candidates.span, scores.shape[-1], unit)
        # "per_head" keeps the shares of each query head: one selection each.
        rule: GroupReduce = "mean_softmax" if best.slots.shape[2] == 1 else "per_head"
        shares = reduce_scores((stored, pending), rule)
        if rule == "per_head":
            shares -= jnp.max(shares, axis=-1, keepdims=True)
            shares -= jnp.log(jnp.sum(jnp.exp(shares), axis=-1, keepdims=True))
        share = jnp.where(best.valid, jnp.exp(jnp.take_along_axis(shares, best.slots, axis=-1)), 0.0)
        kept = self.keep(share, best.valid, jnp.argsort(-share, axis=-1, stable=True))
        if candidates.dense is not None:
            kept |= best.valid & (candidates.of_groups(candidates.dense) != 0)
        return candidates.tokens(Selection(best.slots, kept), scores.shape[-1], unit)


@dataclass(frozen=True, kw_only=True)
class Nucleus(ByShare):
    """Selects the fewest units of `selector` whose estimated shares of the attention sum up to `p`, within the budget.

    With p = 1 it selects what `selector` does. `ByShare` defines shares.

    **Source:** Twilight (Lin et al. 2025), hierarchical top-p pruning. **Differs:** the paper makes a first, larger
    selection and estimates shares among its tokens by 4-bit keys; here shares are the selector's scores, over all
    tokens.

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=kvjax.selectors.Nucleus(selector=kvjax.Fier(), p=0.9), budget=1024)
    """

    p: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_number(self, "p", what="a share of the attention, ", above=0, at_most=1)

    def keep(self, share: Array, valid: Array, order: Array) -> Array:
        if self.p == 1:
            return valid
        falling = jnp.take_along_axis(share, order, axis=-1)
        before = jnp.cumsum(falling, axis=-1) - falling
        return valid & jnp.take_along_axis(before < self.p, jnp.argsort(order, axis=-1), axis=-1)


@dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(ByShare):
    """Selects the units with the largest shares of the attention over all heads of a layer, `mean` of the budget each.

    A head keeps on average `mean` of the units that it could, and up to the whole budget if its attention is spread
    widely; its best `floor` of that mean are guaranteed. `ByShare` defines shares. In addition, a step sorts the units
    of all heads, in plain JAX.

    **Source:** AdaKV (Feng et al. 2024, arXiv 2407.11550), Algorithm 1: floor 0.2, as `HeadBudgets`, which evicts.
    **Differs:** the paper divides its budget once, over the tokens that it keeps of a prompt; here each step divides
    its reads. The policy's budget bounds each head.

    >>> import kvjax
    >>> selector = kvjax.selectors.AdaptiveHeads(selector=kvjax.Fier())
    >>> policy = kvjax.Retrieval(selector=selector, budget=2048)  # 1024 on average
    """

    mean: float = 0.5
    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_number(self, "mean", what="a share of the budget, ", above=0, at_most=1)
        keep_number(self, "floor", what="a share of the mean, ", at_least=0, at_most=1)

    @property
    def joins_heads(self) -> bool:
        """True: all heads compete for one budget, so none can be computed without the others."""
        return True

    def keep(self, share: Array, valid: Array, order: Array) -> Array:
        B, K, H, M = share.shape
        available = jnp.sum(valid, axis=-1, dtype=jnp.float32, keepdims=True)  # units that a head could keep
        floor = jnp.ceil(self.floor * self.mean * available).astype(jnp.int32)
        certain = jnp.arange(M, dtype=jnp.int32)[None, None, None] < floor
        falling, exists = (jnp.take_along_axis(a, order, axis=-1) for a in (share, valid))
        worth = jnp.where(exists, jnp.where(certain, jnp.inf, falling), -1.0)
        # Equal shares are in the order of their ranks within their heads.
        line = jnp.moveaxis(worth, 3, 1).reshape(B, -1)
        place = jnp.argsort(jnp.argsort(-line, axis=-1, stable=True), axis=-1)
        total = jnp.ceil(self.mean * jnp.sum(available, axis=(1, 2))).astype(place.dtype)
        wins = jnp.moveaxis((place < total).reshape(B, M, K, H), 1, 3)
        return jnp.take_along_axis((wins | certain) & exists, jnp.argsort(order, axis=-1), axis=-1)
