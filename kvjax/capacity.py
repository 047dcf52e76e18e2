"""A cache with room for more tokens: a conversation that outgrows its capacity goes on in a larger cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from kvjax.cache import C, Cache, LayerCache, check_cache, init_layer
from kvjax.caches import Growing
from kvjax.caches.short import Refillable, of_size, refilled
from kvjax.placement import axes_of, in_order_of_place, mesh_of
from kvjax.spec import require_int


def grow(cache: C, capacity: int) -> C:
    """The same tokens in a cache of `capacity` tokens a row, which must be at least that of `cache`.

    Copies every array, so that old and new cache are in memory together; programs compile anew for the new shapes.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=64)
    >>> kvjax.grow(kvjax.init_layer(kvjax.Full(), spec), 128).spec.capacity
    128

    Raises:
      ValueError: a smaller capacity, no cache, or one whose arrays were donated.
    """
    check_cache("grow", cache)
    capacity = require_int("grow(capacity=...)", capacity, at_least=1)
    if capacity < cache.spec.capacity:
        raise ValueError(
            f"grow(capacity={capacity}) is below the cache's capacity of {cache.spec.capacity}; a cache cannot shrink"
        )
    grown: Any
    if isinstance(cache, Cache):
        grown = Cache(tuple(_grow(layer, capacity) for layer in cache.layers))
    else:
        grown = _grow(cache, capacity)
    return grown


def _grow(layer: LayerCache, capacity: int) -> LayerCache:
    """Slots are filled from the first on in every array of a state, so the larger array begins with the smaller."""
    spec = dataclasses.replace(layer.spec, capacity=capacity)
    if isinstance(layer.policy, Refillable) and of_size(layer.policy, spec) != layer.policy:
        policy = of_size(layer.policy, spec)
        return LayerCache(refilled(policy, spec, layer.policy, layer.state), policy, spec)
    larger = init_layer(layer.policy, spec, layer.placement)

    def place(new: Any, old: Any) -> Any:
        if new.shape == old.shape:
            return old
        if new.ndim != old.ndim or any(a < b for a, b in zip(new.shape, old.shape, strict=True)):
            raise ValueError(f"{layer.policy} cannot grow: an array of shape {old.shape} becomes {new.shape}")
        if isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer):
            new = jax.device_put(new, old.sharding)  # the cache's own device need not be the default one
        with axes_of(mesh_of(old)):
            return lax.dynamic_update_slice(new, old, (0,) * new.ndim)

    held = in_order_of_place(layer.policy, layer.spec, layer.placement, layer.state)
    state = jax.tree.map(place, larger.state, held)
    state = in_order_of_place(layer.policy, larger.spec, layer.placement, state, back=True)
    if isinstance(layer.policy, Growing):
        with axes_of(mesh_of(layer.state.length)):
            state = layer.policy.grown(state, layer.state)
    return dataclasses.replace(layer, state=state, spec=larger.spec)
