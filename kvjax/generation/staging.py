"""Caches whose prompts are held exactly until they end (`kvjax.policies.staged`).

cache = with_room(cache, tokens, chunks)  # for the prompt, in layers that keep codes
...                                       # read it in these chunks
cache = settled(cache)                    # all of it is stored; the room is given back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

from kvjax.cache.cache import Cache, LayerCache, init_layer, map_layers
from kvjax.call import run
from kvjax.compiling import Program
from kvjax.policies import Full, FullState
from kvjax.policies.staged import Staged, StagedState

SMALLEST_ROOM = 1024  # tokens; smaller ones would save little and compile more programs


def needs_staging(cache: Cache) -> bool:
    """True if a layer keeps other keys and values than came, so that a prompt in several chunks
    would be another one than in one chunk.

    A policy that observes reads whole prompts anyway. A history that is split over devices
    stays as it is: each of them would hold the whole prompt.
    """
    if cache.placement is not None and cache.placement.parts("context") > 1:
        return False
    return any(_rounds(layer) for layer in cache.layers)


def _rounds(layer: LayerCache) -> bool:
    return layer.policy.rounds and not layer.policy.observes


def rooms(capacity: int) -> list[int]:
    """The few sizes of rooms for prompts, so that few programs read them.

    >>> rooms(5000)
    [1024, 2048, 4096, 5000]
    """
    doubled = [SMALLEST_ROOM << i for i in range(32) if SMALLEST_ROOM << i < capacity]
    return [*doubled, capacity]


def room_for(tokens: int, capacity: int) -> int:
    """The smallest room for a prompt; one that overflows the cache gets its own."""
    return next((room for room in rooms(capacity) if room >= tokens), tokens)


def empty_prompt(layer: LayerCache, room: int) -> FullState:
    """Room for a prompt of `room` tokens of a layer."""
    state: FullState = init_layer(
        Full(), replace(layer.spec, capacity=room), layer.placement
    ).state
    return state


def staged(
    cache: Cache, room: int, make: Callable[[LayerCache, int], FullState] = empty_prompt
) -> Cache:
    """`cache` with room for a prompt of `room` tokens in the layers that need it, which `make`
    makes.
    """

    def with_prompt(layer: LayerCache) -> LayerCache:
        if not _rounds(layer):
            return layer
        policy = Staged(policy=layer.policy, room=room)
        state = StagedState(layer.state, make(layer, room))
        return replace(layer, policy=policy, state=state)

    return map_layers(with_prompt, cache)


def with_room(cache: Cache, tokens: int, chunks: int) -> Cache:
    """`cache` with room for a prompt of `tokens` in so many chunks; as it is if it needs none."""
    if chunks == 1 or not needs_staging(cache):
        return cache
    return staged(cache, room_for(tokens, cache.spec.capacity))


def settled(cache: Cache) -> Cache:
    """`cache` after its prompt: stored, and without room for one, if there was any. Donates
    layers with room.
    """

    def settle(layer: LayerCache) -> LayerCache:
        return _settle(layer) if isinstance(layer.policy, Staged) else layer

    return without_room(map_layers(settle, cache))


def without_room(cache: Cache) -> Cache:
    """`cache` without the room for a prompt, and without what is held there."""

    def plain(layer: LayerCache) -> LayerCache:
        policy = layer.policy
        if not isinstance(policy, Staged):
            return layer
        return replace(layer, policy=policy.policy, state=layer.state.stored)

    return map_layers(plain, cache)


def settle_programs(cache: Cache) -> list[Program]:
    """The programs of `settled`, one for each kind of layer with room for a prompt."""
    layers = [layer for layer in cache.layers if isinstance(layer.policy, Staged)]
    kinds = {jax.tree.structure(layer): layer for layer in layers}
    return [Program(_settle, (layer,), {}) for layer in kinds.values()]


@partial(jax.jit, donate_argnums=0)
def _settle(layer: LayerCache) -> LayerCache:
    return run(_settled, layer, ())[1]


def _settled(layer: LayerCache, _: tuple[()]) -> tuple[None, LayerCache, None]:
    policy = layer.policy
    assert isinstance(policy, Staged)
    return None, replace(layer, state=policy.settled(layer.state)), None
