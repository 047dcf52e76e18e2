"""Caches for the steps of a draft that attend to one selection:

keeping_selections      for the first step, which selects
attending_again         for each later step, which selects nothing
without_selections      after the draft: the cache as it was, with its tokens
"""

from __future__ import annotations

from dataclasses import replace

from kvjax.cache.cache import Cache, LayerCache, map_layers
from kvjax.policies import Retrieval
from kvjax.policies.kept import FirstStep, KeptState, LaterStep

MOST_SLOTS = 4096  # of a row, which the kernels of attention take


def steps_together(cache: Cache, asked: int | None, tokens: int) -> int:
    """How many steps of a draft of `tokens` tokens attend to one selection: as many as `asked`,
    None: all; 1 if no layer of the cache can keep what a step selected.
    """
    steps = tokens if asked is None else min(asked, tokens)
    kept = any(keeps_selection(layer, steps) for layer in cache.layers)
    return steps if kept else 1


def keeps_selection(layer: LayerCache, steps: int) -> bool:
    """True for a layer on one device that selects single tokens, which stay in order, and whose
    selection the kernels take with one more slot for each of `steps` but the first.
    """
    policy = layer.policy
    if not isinstance(policy, Retrieval) or layer.placement is not None:
        return False
    single = policy.selector.unit == 1 and policy.demote.ordered
    slots = max(policy.selected, policy.dense_below) + steps - 1
    return single and slots <= MOST_SLOTS


def keeping_selections(cache: Cache, steps: int) -> Cache:
    """The cache for a step that keeps what its layers select, the first of `steps`."""

    def for_first_step(layer: LayerCache) -> LayerCache:
        policy = layer.policy
        if not isinstance(policy, Retrieval) or not keeps_selection(layer, steps):
            return layer
        state = KeptState(layer.state)
        return replace(layer, policy=FirstStep(policy, later=steps - 1), state=state)

    return map_layers(for_first_step, cache)


def attending_again(cache: Cache) -> Cache:
    """The cache after that step, for the others, which attend to what was kept."""

    def for_later_step(layer: LayerCache) -> LayerCache:
        first = layer.policy
        if not isinstance(first, FirstStep):
            return layer
        return replace(layer, policy=LaterStep(first.policy, first.later))

    return map_layers(for_later_step, cache)


def without_selections(cache: Cache) -> Cache:
    """The cache without what was kept, after either kind of step."""

    def as_before(layer: LayerCache) -> LayerCache:
        step = layer.policy
        if not isinstance(step, FirstStep | LaterStep):
            return layer
        return replace(layer, policy=step.policy, state=layer.state.state)

    return map_layers(as_before, cache)
