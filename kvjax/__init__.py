"""kvjax: KV caches for long-context LLM decoding in JAX.

The cache of a layer is a policy (what to keep, where, and what a query attends to; a frozen dataclass) and a state (a
pytree of arrays). A model calls `kvjax.attention` in place of its own attention:

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

from kvjax import memory, presets
from kvjax.attention import attention, attention_info, decode, decode_info, prefill
from kvjax.cache.cache import Cache, LayerCache, any_full, init, init_layer, raise_on_overflow, shardings
from kvjax.cache.editing import insert, rollback, room, take_rows, truncate
from kvjax.cache.flushing import flush
from kvjax.cache.growing import grow
from kvjax.evictors import Evictor, HeavyHitter, LastQuery, LogSpaced, Observation, Sliding
from kvjax.evictors.last_use import LastUse
from kvjax.generation import generate, stream
from kvjax.generation.drafts import DraftModel, PromptLookup
from kvjax.numerics.partial import PartialAttention, attend_part, merge
from kvjax.numerics.selection import Selection
from kvjax.ops import explain
from kvjax.policies import (
    Compensated,
    Compressed,
    Evicting,
    EvictingState,
    Follower,
    Full,
    FullState,
    HeadBudgets,
    Info,
    Mixed,
    OutlierRetrieval,
    PerHead,
    PerLayer,
    Policy,
    Retrieval,
    Sampled,
    Shared,
    Speculative,
    SpeculativeState,
    Step,
    ZonedState,
    share_selections,
)
from kvjax.selectors import (
    AdaptiveHeads,
    BallPages,
    CentrePages,
    Exact,
    Fier,
    MeanPages,
    MinMaxPages,
    Nucleus,
    Paris,
    ProductCodes,
    Selector,
)
from kvjax.selectors.simhash import SimHash
from kvjax.sharding.placement import Placement
from kvjax.spec import CacheSpec
from kvjax.steps import attend, select, update
from kvjax.stores import (
    Dense,
    HostFloat8,
    HostOffload,
    HostQuantized,
    HotSet,
    LowRank,
    Quantized,
    Store,
)
from kvjax.stores.demotion import Buffer, Demotion, Fifo, LogSparse

if TYPE_CHECKING:
    from kvjax import evaluate as evaluate
    from kvjax import models as models
    from kvjax import testing as testing
    from kvjax.cache.saving import restore, save

__version__ = "0.1.0"


# Loaded on first use: `models` imports flax and `saving` imports orbax, which a cache in memory does not need.
_LAZY_MODULES = ("evaluate", "models", "testing")
_LAZY = {"save": "kvjax.cache.saving", "restore": "kvjax.cache.saving"}


if not TYPE_CHECKING:  # to a type checker, every name would exist

    def __getattr__(name: str) -> Any:
        if name in _LAZY_MODULES:
            return import_module(f"kvjax.{name}")
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


__all__ = [
    "AdaptiveHeads",
    "BallPages",
    "Buffer",
    "Cache",
    "CacheSpec",
    "CentrePages",
    "Compensated",
    "Compressed",
    "Demotion",
    "Dense",
    "DraftModel",
    "Evicting",
    "EvictingState",
    "Evictor",
    "Exact",
    "Fier",
    "Fifo",
    "Follower",
    "Full",
    "FullState",
    "HeadBudgets",
    "HeavyHitter",
    "HostFloat8",
    "HostOffload",
    "HostQuantized",
    "HotSet",
    "Info",
    "LastQuery",
    "LastUse",
    "LayerCache",
    "LogSpaced",
    "LogSparse",
    "LowRank",
    "MeanPages",
    "MinMaxPages",
    "Mixed",
    "Nucleus",
    "Observation",
    "OutlierRetrieval",
    "Paris",
    "PartialAttention",
    "PerHead",
    "PerLayer",
    "Placement",
    "Policy",
    "ProductCodes",
    "PromptLookup",
    "Quantized",
    "Retrieval",
    "Sampled",
    "Selection",
    "Selector",
    "Shared",
    "SimHash",
    "Sliding",
    "Speculative",
    "SpeculativeState",
    "Step",
    "Store",
    "ZonedState",
    "any_full",
    "attend",
    "attend_part",
    "attention",
    "attention_info",
    "decode",
    "decode_info",
    "explain",
    "flush",
    "generate",
    "grow",
    "init",
    "init_layer",
    "insert",
    "memory",
    "merge",
    "prefill",
    "presets",
    "raise_on_overflow",
    "restore",
    "rollback",
    "room",
    "save",
    "select",
    "shardings",
    "share_selections",
    "stream",
    "take_rows",
    "truncate",
    "update",
]
