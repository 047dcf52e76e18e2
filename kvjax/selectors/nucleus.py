"""Adaptive budgets: as many tokens as hold a share of the attention, by a selector's own estimates.

A head whose attention is peaked needs few tokens, and one whose attention is flat needs many. So of the units that a
selector ranks highest, a step takes the first ones whose estimated shares of the softmax sum up to `p`. The budget of
the policy is the cap. Shapes stay static: a step gathers room for the whole budget and masks what it does not take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.partial import attention_logits
from kvjax.selection import Candidates, GroupReduce, Selection, reduce_scores
from kvjax.selectors.selector import Selector, WindowedSelector, require_truncatable, with_own_pending
from kvjax.spec import CacheSpec
from kvjax.validation import check_verbs, finite_number


@dataclass(frozen=True, kw_only=True)
class Nucleus:
    """Selects the fewest units of `selector` whose estimated shares of the attention sum up to `p`, within the budget.

    Shares are the softmax of the scores over all units that a step may select, the mean over the query heads that share
    a choice. They leave out sink and local window, which every step reads. With p = 1 it selects what `selector` does.
    It always takes the score matrix in f32, also where `selector` alone would select in one kernel. The reads that it
    saves are those of the kernel that attends, which skips what is masked. Over `Paris` the shares are those of the
    candidates alone: a key with too few votes has none. A row of fewer than `dense_below` tokens is not cut by `p`.

    **Source:** Twilight (Lin et al. 2025), hierarchical top-p pruning. **Differs:** the paper estimates shares anew by
    4-bit keys among the tokens of a first, larger choice; here they are the selector's scores, over all tokens.

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=kvjax.Nucleus(selector=kvjax.Fier(), p=0.9), budget=1024)
    """

    selector: Selector
    p: float = 0.9

    def __post_init__(self) -> None:
        check_verbs("Nucleus(selector=...)", self.selector, "a selector", ("init", "score"), "kvjax.Fier()")
        p = finite_number("Nucleus(p=...)", self.p)
        if not 0 < p <= 1:
            raise ValueError(f"Nucleus(p={self.p!r}) is a share of the attention, above 0 and at most 1; use 0.9")
        object.__setattr__(self, "p", p)

    @property
    def unit(self) -> int:
        return self.selector.unit

    @property
    def group_reduce(self) -> GroupReduce:
        return self.selector.group_reduce

    @property
    def selects_in_window(self) -> bool:
        return True

    @property
    def lowest_is_last(self) -> bool:
        return True

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.selector.check(spec, chunk)

    def init(self, spec: CacheSpec, slots: int) -> Any:
        return self.selector.init(spec, slots)

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        return self.selector.append(ix, k, at, count)

    def truncate(self, ix: Any, count: Array) -> Any:
        return require_truncatable(self.selector).truncate(ix, count)

    def score(self, ix: Any, q: Array, *, scale: float) -> Array:
        return self.selector.score(ix, q, scale=scale)

    def select(self, ix: Any, q: Array, among: Candidates, *, scale: float) -> Selection:
        unit, group_reduce = self.unit, self.group_reduce
        if among.window is not None and isinstance(self.selector, WindowedSelector):
            scores = self.selector.score_visible(ix, q, among, window=among.window, scale=scale)
        else:
            scores = self.score(ix, q, scale=scale)
        scored = with_own_pending(self.selector, among, q)
        best = ops.select_top(scores, q, scored, group_reduce, unit=unit, scale=scale)
        pending = scored.pending_units(attention_logits(q, scored.pending[0], scale), unit)
        stored = scores, among.stored_units(scores.shape[-1], unit)
        # "per_head" keeps the shares of each query head, of which there may be one for each choice.
        rule: GroupReduce = "mean_softmax" if best.slots.shape[2] == 1 else "per_head"
        shares = reduce_scores((stored, pending), rule)
        if rule == "per_head":
            shares -= jnp.max(shares, axis=-1, keepdims=True)
            shares -= jnp.log(jnp.sum(jnp.exp(shares), axis=-1, keepdims=True))
        share = jnp.where(best.valid, jnp.exp(jnp.take_along_axis(shares, best.slots, axis=-1)), 0.0)
        order = jnp.argsort(-share, axis=-1, stable=True)
        falling = jnp.take_along_axis(share, order, axis=-1)
        before = jnp.cumsum(falling, axis=-1) - falling
        rank = jnp.argsort(order, axis=-1)
        enough = jnp.take_along_axis(before >= self.p, rank, axis=-1)
        if among.dense is not None:
            enough &= among.of_groups(among.dense) == 0
        valid = best.valid & ~enough if self.p < 1 else best.valid
        return among.tokens(Selection(best.slots, valid), scores.shape[-1], unit)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return self.selector.bytes_per_token(spec)

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        return self.selector.bytes_read(spec, length)
