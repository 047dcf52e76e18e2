"""Stores: where and in which format the keys and values of the history are kept.

A store is a policy object without arrays; its state is a pytree that has `count` i32[B] and `slots`. Tokens arrive in
chunks as they leave the recent block, and stay. `attend` reads all of them, `attend_slots` only selected ones.
"""

from kvjax.stores.dense import Dense
from kvjax.stores.host import HostBlock, HostOffload
from kvjax.stores.host_codes import HostFloat8, HostQuantized
from kvjax.stores.hot import HotBlock, HotSet
from kvjax.stores.low_rank import LowRank, LowRankBlock
from kvjax.stores.quantized import Quantized
from kvjax.stores.store import (
    CachingStore,
    FusedSlotStore,
    FusedStore,
    Loaded,
    MultiStepStore,
    Recalled,
    RecallingStore,
    Store,
    TruncatableStore,
    require_truncatable,
)

__all__ = [
    "CachingStore",
    "Dense",
    "FusedSlotStore",
    "FusedStore",
    "HostBlock",
    "HostFloat8",
    "HostOffload",
    "HostQuantized",
    "HotBlock",
    "HotSet",
    "Loaded",
    "LowRank",
    "LowRankBlock",
    "MultiStepStore",
    "Quantized",
    "Recalled",
    "RecallingStore",
    "Store",
    "TruncatableStore",
    "require_truncatable",
]
