"""AdaKV: SnapKV with one budget for all KV heads of a layer, divided among them by what their
tokens are worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.evictors import Observation, Pooling
from kvjax.numerics.blocks import put_last
from kvjax.numerics.partial import PartialAttention, Span
from kvjax.numerics.selection import Selection
from kvjax.policies import PerLayer
from kvjax.policies.evicting import Evicting, EvictingState
from kvjax.policies.policy import Step
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers
from kvjax.spec import CacheSpec, keep_number, require_int

__all__ = ["HeadBudgets", "adakv"]


@published(
    "as snapkv, with more tokens in KV heads that attend widely",
    paper="AdaKV 2024",
)
def adakv(
    budget: int = 1024,
    *,
    floor: float = 0.2,
    ceiling: float = 2.0,
    window: int = 32,
    kernel_size: int = 7,
    pooling: Pooling = "max",
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """AdaKV: SnapKV with one budget for all KV heads of a layer, `budget` per head on average.

    The tokens of a prompt compete across all heads for the slots of the layer, so heads that
    attend widely keep more.

    Args:
      budget: tokens that a layer and KV head keeps, as the mean over the heads; a step attends
        to all of them.
      floor: share of the budget besides the window that every KV head keeps at least, besides
        the window.
      ceiling: multiple of the budget that a KV head keeps at most; memory is allocated for it.

    **Source:** AdaKV (Feng et al. 2024, arXiv 2407.11550): floor 0.2, over SnapKV. **Differs:**
    see `HeadBudgets` and `Observation`. The budget counts the window and generated tokens; the
    original keeps all generated tokens.

    **Checklist:** unit: tokens of the prompt, once, for the layer's KV heads together; besides:
    all kept tokens; zones: no sink, the prompt's last 32 tokens; budget: kept tokens, as the
    mean over KV heads, prompt and answer; generated: kept, and evict those of the prompt with
    the fewest votes.
    """
    require_int("adakv(budget=...)", budget, at_least=1)
    evictor = Observation(window=window, kernel_size=kernel_size, pooling=pooling)
    policy = HeadBudgets(evictor=evictor, budget=budget, floor=floor, ceiling=ceiling)
    return over_layers("adakv", layers, policy)


ALL = 2**30  # a sliding window that hides nothing


@register_dataclass
@dataclass(frozen=True)
class HeadBudgetsState(EvictingState):
    """Heads hold different numbers of tokens, each in its first slots; `tokens.count` is the
    largest of them.
    """

    head_counts: Array  # i32[B, K] tokens of a head
    limit: Array  # i32[B, K] tokens that a head may hold until the next prompt


@dataclass(frozen=True, kw_only=True)
class HeadBudgets(Evicting):
    """Keeps `budget` tokens per KV head on average, and more in heads whose attention is spread
    widely.

    When a prompt exceeds the budget, all its tokens in all KV heads compete for the slots of
    the layer by their score, and each head keeps as many as it wins. Each head keeps at least
    the observation window and `floor` of what the budget leaves besides it, as in the released
    code. In later steps a head evicts its own tokens. Each head has room for `ceiling * budget`
    tokens, and a step reads all of it.

    **Source:** AdaKV (Feng et al. 2024, arXiv 2407.11550), Algorithm 1 over SnapKV's votes:
    floor 0.2. **Differs:** the paper has no `ceiling`, because it stores heads one after the
    other; here tokens beyond it go to other heads. The paper's safeguard mixes each head's
    budget with an equal share; here each head is guaranteed an equal share of `floor`, and
    heads compete for the rest. A GQA group shares what it keeps, and generated tokens count.

    >>> import kvjax
    >>> policy = kvjax.contrib.adakv.HeadBudgets(evictor=kvjax.evictors.Observation(), budget=256)
    >>> policy.head_bounds
    (76, 512)
    """

    floor: float = 0.2
    ceiling: float = 2.0
    evicts_several = False

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_number(self, "floor", at_least=0, at_most=1)
        keep_number(self, "ceiling", at_least=1, at_most=1e6)
        if self.evictor.arrival is None:
            raise ValueError(
                f"HeadBudgets got {self.evictor}, which ranks tokens by position alone; "
                "use kvjax.evictors.Observation()"
            )

    @property
    def head_bounds(self) -> tuple[int, int]:
        """The fewest and the most tokens that a head with a full cache holds."""
        window = min(getattr(self.evictor, "window", 0), self.budget)
        return max(window + int(self.floor * (self.budget - window)), 1), int(
            self.ceiling * self.budget
        )

    @property
    def joins_heads(self) -> bool:
        """True: all heads compete for one budget, so none can be computed without the others."""
        return True

    def init(self, spec: CacheSpec) -> HeadBudgetsState:
        largest_head = replace(self, budget=self.head_bounds[1])
        st = Evicting.init(largest_head, spec)
        heads = (spec.batch, spec.kv_heads)
        return HeadBudgetsState(
            **vars(st),
            head_counts=jnp.zeros(heads, jnp.int32),
            limit=jnp.full(heads, min(self.budget, spec.capacity), jnp.int32),
        )

    def update(self, st: Any, k: Array, v: Array, active: Array) -> HeadBudgetsState:
        new: Any = super().update(st, k, v, active)
        counts = st.head_counts + (active[:, None] & (st.head_counts < st.limit)).astype(
            jnp.int32
        )
        # At least the old count, whose buffer it reuses.
        largest = jnp.maximum(st.tokens.count, jnp.max(counts, axis=1))
        return replace(new, head_counts=counts, tokens=replace(new.tokens, count=largest))

    # ---------------------------------------------------------------------------------------------------------- parts

    def _attend_kept(self, st: Any, q: Array, step: Step) -> PartialAttention:
        return super()._attend_kept(
            st, q, step if step.window is not None else replace(step, window=ALL)
        )

    def _attend_held(self, st: Any, q: Array, step: Step) -> Array:
        # Heads hold different numbers of tokens, so here heads are rows.
        rows, k, v = (a.reshape(-1, 1, *a.shape[2:]) for a in (q, st.tokens.k, st.tokens.v))
        stop = st.head_counts.reshape(-1)
        sinks = None if step.sinks is None else jnp.tile(step.sinks, (q.shape[0], 1))[:, None]
        span = Span(k, v, jnp.zeros_like(stop), stop)
        return ops.attend_span(rows, span, sinks, logits=step.logits).reshape(q.shape)

    def _valid(self, st: Any) -> Array:
        return (
            jnp.arange(st.tokens.slots, dtype=jnp.int32)[None, None] < st.head_counts[..., None]
        )

    def _slot(self, st: Any, end: Array, step: Step | None) -> Array:
        evicted = self._to_evict(st, self._valid(st), end, step)
        return jnp.where(st.head_counts < st.limit, st.head_counts, evicted)

    def _best(self, score: Array, eligible: Array, slots: int) -> Selection:
        """Selects the best tokens of all heads together, at most `slots` per head."""
        B, K, _ = score.shape
        share = self._share(slots)
        own = ops.top_k(score, eligible, slots)  # highest score first
        score = jnp.take_along_axis(score, own.slots, axis=-1)
        certain = jnp.arange(slots, dtype=jnp.int32) < min(self.head_bounds[0], share)
        score = jnp.where(certain[None, None], jnp.inf, score)
        # Ties go to the head in which the token ranks higher.
        line, valid = (jnp.swapaxes(a, 1, 2).reshape(B, 1, -1) for a in (score, own.valid))
        winners = ops.top_k(line, valid, K * share)
        place = jnp.where(winners.valid, winners.slots, line.shape[2])[:, 0]
        wins = put_last(jnp.zeros((B, line.shape[2]), bool), place, True)
        return Selection(own.slots, own.valid & jnp.swapaxes(wins.reshape(B, slots, K), 1, 2))

    def _settled(
        self, st: Any, valid: Array, takes: Array, leaving: Callable[[], tuple[Array, Array]]
    ) -> HeadBudgetsState:
        counts = jnp.sum(valid, axis=-1, dtype=jnp.int32)
        share = self._share(st.tokens.slots)
        # A short prompt is kept whole.
        limit = jnp.where((st.length <= share)[:, None], share, counts)
        counts, limit = (
            jnp.where(takes[:, None], *two)
            for two in ((counts, st.head_counts), (limit, st.limit))
        )
        return replace(
            st,
            head_counts=counts,
            limit=limit,
            tokens=replace(st.tokens, count=jnp.max(counts, axis=1)),
        )
