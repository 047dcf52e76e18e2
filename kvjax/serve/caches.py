"""The cache of an engine, as its arguments describe it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from kvjax import presets
from kvjax.cache.cache import Cache, init
from kvjax.memory import default_device, in_units, making_on, nbytes, places_of
from kvjax.serve.keeping import is_out_of_memory
from kvjax.spec import require_int

T = TypeVar("T")


def cache_of_checkpoint(
    checkpoint: Any, policy: Any, slots: int | None, capacity: int | None
) -> Cache:
    """An empty cache of a checkpoint, with a row for each slot."""
    if slots is None or capacity is None:
        raise ValueError(
            "Engine(checkpoint) needs slots=..., the rows of its cache, and capacity=... of a row"
        )
    rows = require_int("slots", slots, at_least=1)
    with making_on(places_of(checkpoint.model)):
        return allocated(
            f"slots={slots} of capacity={capacity}",
            lambda: checkpoint.init_cache(policy, batch=rows, capacity=capacity),
        )


def cache_of_model(model: Any, policy: Any, slots: int | None, capacity: int | None) -> Cache:
    """An empty cache of a model that says its sizes, with a row for each slot."""
    layers = getattr(getattr(model, "config", None), "layers", None)
    if layers is None or not callable(getattr(model, "spec", None)):
        raise ValueError(
            "Engine(slots=..., capacity=...) makes the cache of a checkpoint, or of a model with `spec` and "
            "`config.layers`; for another make it: kvjax.init(policy, kvjax.CacheSpec(batch=slots, ..., "
            "capacity=capacity), layers=...)"
        )
    if slots is None or capacity is None:
        raise ValueError(
            "Engine(model, policy) needs slots=..., the rows of its cache, and capacity=... of a row"
        )
    policies = presets.parse(policy) if isinstance(policy, str) else policy
    rows = require_int("slots", slots, at_least=1)
    spec = model.spec(batch=rows, capacity=capacity)
    with making_on(places_of(model)):
        return allocated(
            f"slots={slots} of capacity={capacity}", lambda: init(policies, spec, layers=layers)
        )


def allocated(what: str, make: Callable[[], T]) -> T:
    """`make()`, or a ValueError of one sentence if the device has no memory for it; `what` are the
    arguments of the engine that ask for it.
    """
    needed = nbytes(jax.eval_shape(make)).total
    has = memory_bytes()
    too_large = ValueError(
        f"Engine({what}) needs {in_units(needed)} of memory, and there are {in_units(has)} in all; ask for fewer or "
        "smaller ones"
    )
    if needed > has:
        raise too_large
    try:
        return make()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise too_large from error


def memory_bytes() -> int:
    """Bytes of memory that the default device has, whoever uses them."""
    stats = default_device().memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
