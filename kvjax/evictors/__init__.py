"""Evictors: which token is evicted when a cache of fixed size is full."""

from kvjax.evictors.base import Evictor
from kvjax.evictors.last_use import LastUse
from kvjax.evictors.scores import HeavyHitter, LastQuery, LogSpaced, Observation, Pooling, Sliding

__all__ = [
    "Evictor",
    "HeavyHitter",
    "LastQuery",
    "LastUse",
    "LogSpaced",
    "Observation",
    "Pooling",
    "Sliding",
]
