"""kvjax: KV caches for long-context LLM decoding in JAX.

The cache of a layer is a policy (what to keep, where, and what a query attends to; a frozen
dataclass) and a state (a pytree of arrays). A model calls `kvjax.attention` in place of its own
attention:

>>> import jax, kvjax
>>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=512, dtype="float32")
>>> layer = kvjax.init_layer(kvjax.Retrieval(selector=kvjax.Fier(), budget=64), spec)
>>> attention = jax.jit(kvjax.attention_info)
>>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 300, n, 16)) for i, n in enumerate((4, 2, 2)))
>>> out, layer, _ = attention(layer, q, k, v)                              # a prompt of 300 tokens
>>> out, layer, info = attention(layer, q[:, :1], k[:, :1], v[:, :1])      # a decode step
>>> int(layer.length[0]), float(info.attended[0, 0])
(301, 64.0)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvjax import evictors as evictors
from kvjax import memory as memory
from kvjax import ops as ops
from kvjax import policies as policies
from kvjax import presets
from kvjax import selectors as selectors
from kvjax import stores as stores
from kvjax.attention import attention, attention_info, decode, decode_info, prefill
from kvjax.cache.cache import Cache, LayerCache, init, init_layer, raise_on_overflow, shardings
from kvjax.cache.editing import insert, rollback, room, take_rows, truncate
from kvjax.cache.flushing import flush
from kvjax.cache.growing import grow
from kvjax.evictors import Evictor
from kvjax.generation import generate, stream
from kvjax.numerics.selection import Selection
from kvjax.policies import (
    Compressed,
    Evicting,
    Full,
    Info,
    PerLayer,
    Policy,
    Retrieval,
    Speculative,
)
from kvjax.selectors import Fier, Selector
from kvjax.serve import Engine
from kvjax.sharding.placement import Placement
from kvjax.spec import CacheSpec
from kvjax.steps import attend, select, update
from kvjax.stores import Dense, Fifo, HostOffload, Store
from kvjax.validation import naming_absent

if TYPE_CHECKING:
    from kvjax import contrib as contrib
    from kvjax import evaluate as evaluate
    from kvjax import models as models
    from kvjax import testing as testing
    from kvjax.cache.saving import restore as restore
    from kvjax.cache.saving import save as save
    from kvjax.compiling import use_compilation_cache as use_compilation_cache

__version__ = "0.1.0"


# Loaded on first use: `models` imports flax and `saving` imports orbax, which a cache in memory
# does not need.
_LAZY_MODULES = ("contrib", "evaluate", "models", "testing")
_LAZY = {
    "use_compilation_cache": "compiling",
    "save": "cache.saving",
    "restore": "cache.saving",
}
# Names of other modules work here too, without being listed: kvjax.HotSet is
# kvjax.stores.HotSet.
_PARTS = ("policies", "selectors", "stores", "evictors")
_LAZY |= dict.fromkeys(("DraftModel", "PromptLookup", "SelfDraft"), "generation.drafts") | {
    "explain": "ops"
}
_LAZY |= dict.fromkeys(("PartialAttention", "attend_part", "merge"), "numerics.partial") | {
    "any_full": "cache.cache"
}


if not TYPE_CHECKING:  # to a type checker, every name would exist

    def __getattr__(name: str) -> Any:
        with naming_absent(f"kvjax.{name}"):
            if name in _LAZY_MODULES:
                return import_module(f"kvjax.{name}")
            if name in _LAZY:
                return getattr(import_module(f"kvjax.{_LAZY[name]}"), name)
        for module in (import_module(f"kvjax.{part}") for part in _PARTS):
            if name in module.__all__:
                return getattr(module, name)
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(
        {
            *__all__,
            *_LAZY_MODULES,
            "evictors",
            "memory",
            "ops",
            "policies",
            "selectors",
            "stores",
        }
    )


__all__ = [
    "Cache",
    "CacheSpec",
    "Compressed",
    "Dense",
    "Engine",
    "Evicting",
    "Evictor",
    "Fier",
    "Fifo",
    "Full",
    "HostOffload",
    "Info",
    "LayerCache",
    "PerLayer",
    "Placement",
    "Policy",
    "Retrieval",
    "Selection",
    "Selector",
    "Speculative",
    "Store",
    "attend",
    "attention",
    "attention_info",
    "decode",
    "decode_info",
    "flush",
    "generate",
    "grow",
    "init",
    "init_layer",
    "insert",
    "prefill",
    "presets",
    "raise_on_overflow",
    "restore",
    "rollback",
    "room",
    "save",
    "select",
    "shardings",
    "stream",
    "take_rows",
    "truncate",
    "update",
]
