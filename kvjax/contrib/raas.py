"""RaaS: keeps the prompt, and evicts the generated tokens that have gone longest without attention.

`BesidePrompt` gives generated tokens a budget beside the prompt's, for this and other rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.evictors import LastUse
from kvjax.evictors.base import Evictor
from kvjax.policies import PerLayer
from kvjax.policies.evicting import Evicting, EvictingState
from kvjax.policies.policy import Step
from kvjax.presets.evicting import by_evictor
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers
from kvjax.spec import CacheSpec, keep_ints, require_int

__all__ = ["BesidePrompt", "raas"]


@published(
    "the prompt, and generated tokens that were attended to lately",
    paper="RaaS 2025",
    paper_setting="prompt=65536,page=16",
)
def raas(
    budget: int = 1024,
    *,
    threshold: float = 1e-4,
    prompt: int = 0,
    page: int = 1,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """RaaS: keeps the prompt, and evicts the generated token that has gone longest without
    attention.

    Args:
      budget: tokens that a layer and KV head keeps, those of `prompt` not counted; a step
        attends to all of them.
      threshold: softmax weight above which a token counts as attended.
      prompt: tokens of prompts that are kept beside the budget, as in the paper; memory is
        allocated for them.
      page: tokens that are stamped together: a page is attended if its share of a softmax over
        pages is large enough.

    **Source:** RaaS (Hu et al. 2025, arXiv 2502.11147); FreeKV's comparison, for the maximum
    over a group. **Differs:** see `LastUse` and `BesidePrompt`: the default stamps single
    tokens, and counts the prompt. With page=16 and a `prompt` it stamps by pages and keeps the
    prompt beside the budget, as the paper does.

    **Checklist:** unit: tokens or pages that are evicted, for each KV head; besides: all kept
    tokens; zones: no sink, no window; budget: kept tokens, the prompt's too unless `prompt`
    sets room for them; generated: evicted when they are not attended for longest.
    """
    require_int("raas(budget=...)", budget, at_least=1)
    evictor = LastUse(threshold=threshold)
    if prompt == 0 and page == 1:
        return by_evictor("raas", evictor, budget, layers)
    return over_layers(
        "raas", layers, BesidePrompt(evictor=evictor, budget=budget, prompt=prompt, page=page)
    )


@dataclass(frozen=True, kw_only=True)
class BesidePrompt(Evicting):
    """Keeps up to `prompt` tokens of prompts, and beside them at most `budget` generated
    tokens.

    Memory is allocated for both. A longer prompt takes slots of the budget; if it does not fit,
    its tokens compete. With `page`, the stamps of RaaS are those of pages: the attention to a
    page is the softmax over pages of the largest score in each; if it exceeds the evictor's
    threshold for one query head of the group, all held tokens of the page are stamped. Tokens
    leave one at a time, those of the page with the oldest stamp first.

    **Source:** RaaS (Hu et al. 2025, arXiv 2502.11147), pages of 16; the maximum over the group
    is FreeKV's adaptation (its section 5.1). **Differs:** a page's score is its largest exact
    score; the paper estimates it from a summary of the page. The paper evicts a whole page at
    once.
    """

    evictor: Evictor = LastUse()
    prompt: int = 0
    page: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_ints(self, prompt=0, page=1)
        if self.page > 1 and not isinstance(self.evictor, LastUse):
            raise ValueError(
                f"BesidePrompt(page={self.page}) stamps pages for kvjax.LastUse(); got {self.evictor}, so use page=1"
            )

    def init(self, spec: CacheSpec) -> EvictingState:
        st = super().init(spec)
        return replace(st, pinned=jnp.zeros(st.position.shape, bool))

    def _most(self, prompt: Any) -> Any:
        return np.minimum(prompt, self.prompt) + self.budget

    def _limit(self, st: EvictingState) -> Array | int:
        assert st.pinned is not None
        prompts = jnp.sum(st.pinned[:, 0] & self._valid(st)[:, 0], axis=-1, dtype=jnp.int32)
        return jnp.minimum(prompts + self.budget, st.tokens.slots)

    def _slot(self, st: EvictingState, end: Array, step: Step | None) -> Array:
        if self.every > 1:
            return super()._slot(st, end, step)
        held = st.tokens.count
        valid = jnp.broadcast_to(self._valid(st), st.position.shape)
        evicted = self._to_evict(st, valid, end, step)
        return jnp.where((held >= self._limit(st))[:, None], evicted, held[:, None])

    def _see_step(self, st: EvictingState, weights: Array, step: Step) -> Array:
        if self.page > 1:
            page = self._positions(st) // self.page
            weights = _weights_of_pages(weights, page, has_sinks=step.sinks is not None)
        return super()._see_step(st, weights, step)


def _weights_of_pages(weights: Array, page: Array, *, has_sinks: bool) -> Array:
    """f32[B, K, G, S]: for each slot the weight of its page, in a softmax over the largest
    score in each page.

    `weights` f32[B, K, G, S] are those of the tokens in the slots, and `page` i32[B, K, S] their
    pages. Sinks take what the weights lack to 1, and have no page of their own.
    """
    # The pages that a head holds tokens of, numbered from 0.
    order = jnp.argsort(page, axis=-1)
    in_order = jnp.take_along_axis(page, order, axis=-1)
    begins = jnp.concatenate(
        [jnp.zeros_like(in_order[..., :1]), jnp.diff(in_order) != 0], axis=-1, dtype=jnp.int32
    )
    number = jnp.cumsum(begins, axis=-1)
    number = jnp.take_along_axis(number, jnp.argsort(order, axis=-1), axis=-1)

    # The largest weight of each page is in proportion to the exponential of its largest score.
    def largest(weights: Array, number: Array) -> Array:
        return jnp.zeros_like(weights).at[:, number].max(weights)

    best = jax.vmap(jax.vmap(largest))(weights, number)
    total = jnp.sum(best, axis=-1, keepdims=True)
    if has_sinks:
        total += 1 - jnp.sum(weights, axis=-1, keepdims=True)
    best /= jnp.maximum(total, jnp.finfo(best.dtype).tiny)
    return jnp.take_along_axis(best, jnp.broadcast_to(number[:, :, None], best.shape), axis=-1)
