"""Caches whose steps keep what they selected, for drafts of which not every step selects."""

from __future__ import annotations

from dataclasses import replace

from kvjax.cache.cache import Cache, LayerCache, map_layers
from kvjax.policies import Retrieval
from kvjax.policies.kept import Kept, KeptState

MOST_SLOTS = 4096  # of a row, which the kernels of attention take


def steps_together(cache: Cache, asked: int | None, tokens: int) -> int:
    """How many steps of a draft of `tokens` tokens attend to one selection: as many as `asked`,
    None: all; 1 if no layer of the cache can keep what a step selected.
    """
    steps = tokens if asked is None else min(asked, tokens)
    kept = any(keeps_selection(layer, steps) for layer in cache.layers)
    return steps if kept else 1


def keeps_selection(layer: LayerCache, steps: int) -> bool:
    """True for a layer on one device that selects single tokens, which stay in order."""
    policy = layer.policy
    if not isinstance(policy, Retrieval) or layer.placement is not None:
        return False
    single = policy.selector.unit == 1 and policy.demote.ordered
    slots = max(policy.selected, policy.dense_below) + steps - 1
    return single and slots <= MOST_SLOTS


def keeping_selections(cache: Cache, steps: int) -> Cache:
    """The cache for a step that keeps what its layers select, the first of `steps`."""

    def layer(own: LayerCache) -> LayerCache:
        policy = own.policy
        if not isinstance(policy, Retrieval) or not keeps_selection(own, steps):
            return own
        return replace(own, policy=Kept(policy, steps - 1), state=KeptState(own.state))

    return map_layers(layer, cache)


def attending_again(cache: Cache) -> Cache:
    """The cache after that step, for the others, which attend to what was kept."""

    def layer(own: LayerCache) -> LayerCache:
        policy = own.policy
        if not isinstance(policy, Kept):
            return own
        return replace(own, policy=replace(policy, again=True))

    return map_layers(layer, cache)


def without_selections(cache: Cache) -> Cache:
    """The cache without what was kept."""

    def layer(own: LayerCache) -> LayerCache:
        policy = own.policy
        if not isinstance(policy, Kept):
            return own
        return replace(own, policy=policy.policy, state=own.state.state)

    return map_layers(layer, cache)
