"""Stores: where and in which format the keys and values of the history are kept.

A store is a policy object without arrays; its state is a pytree that has `count` i32[B] and
`slots`. Tokens arrive in chunks as they leave the recent block, and stay. `attend` reads all of
them, `attend_slots` only selected ones.
"""

from kvjax.stores.demotion import Buffer, Demotion, Fifo, LogSparse
from kvjax.stores.dense import Dense
from kvjax.stores.host import HostOffload
from kvjax.stores.host_codes import HostFloat8
from kvjax.stores.hot import HotSet
from kvjax.stores.prefixed import Prefixed
from kvjax.stores.quantized import Quantized
from kvjax.stores.store import Recalled, Store
from kvjax.stores.turbo import HostTurboQuant, TurboQuant

__all__ = [
    "Buffer",
    "Demotion",
    "Dense",
    "Fifo",
    "HostFloat8",
    "HostOffload",
    "HostTurboQuant",
    "HotSet",
    "LogSparse",
    "Prefixed",
    "Quantized",
    "Recalled",
    "Store",
    "TurboQuant",
]
