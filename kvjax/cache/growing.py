"""Growing a cache: a conversation that exceeds its capacity continues in a larger cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from kvjax.cache.cache import C, LayerCache, check_cache, init_layer, layers_of, with_layers
from kvjax.policies.short import refilled
from kvjax.sharding.placement import axes_of, in_order_of_place, mesh_of
from kvjax.spec import require_int


def grow(cache: C, capacity: int) -> C:
    """The same tokens in a cache of `capacity` tokens per row, which must be at least that of
    `cache`.

    Copies every array, so the old and the new cache are in memory together; programs compile
    again for the new shapes.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=64)
    >>> kvjax.grow(kvjax.init_layer(kvjax.Full(), spec), 128).spec.capacity
    128

    Raises:
      ValueError: a smaller capacity, a `cache` that is not a cache, or one whose arrays were
        donated.
    """
    check_cache("grow", cache)
    capacity = require_int("grow(capacity=...)", capacity, at_least=1)
    if capacity < cache.spec.capacity:
        raise ValueError(
            f"grow(capacity={capacity}) is below the cache's capacity of {cache.spec.capacity}, and a cache cannot "
            f"shrink; use at least {cache.spec.capacity}"
        )
    grown: C = with_layers(cache, [_grow(layer, capacity) for layer in layers_of(cache)])
    return grown


def _grow(layer: LayerCache, capacity: int) -> LayerCache:
    """Copies each array into the first slots of a larger one: in every array of a state, slots
    fill in order.
    """
    spec = dataclasses.replace(layer.spec, capacity=capacity)
    policy = layer.policy.of_size(spec)
    if (
        policy != layer.policy
        and (state := refilled(policy, spec, layer.policy, layer.state)) is not None
    ):
        return LayerCache(state, policy, spec)
    larger = init_layer(layer.policy, spec, layer.placement)

    def place(new: Any, old: Any) -> Any:
        if new.ndim != old.ndim or any(
            a < b for a, b in zip(new.shape, old.shape, strict=True)
        ):
            raise ValueError(
                f"{layer.policy} cannot grow: an array of shape {old.shape} becomes {new.shape}, and no axis may shrink"
            )
        if isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer):
            # The device of the cache need not be the default one.
            new = jax.device_put(new, old.sharding)
        with axes_of(mesh_of(old)):
            return lax.dynamic_update_slice(new, old, (0,) * new.ndim)

    ordered = in_order_of_place(layer.policy, layer.spec, layer.placement, layer.state)
    state = jax.tree.map(place, larger.state, ordered)
    state = in_order_of_place(layer.policy, larger.spec, layer.placement, state, back=True)
    with axes_of(mesh_of(layer.state.length)):
        state = layer.policy.grown(state, layer.state)
    return dataclasses.replace(layer, state=state, spec=larger.spec)
