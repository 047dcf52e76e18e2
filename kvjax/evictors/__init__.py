"""Evictors: which token is evicted when a cache of fixed size is full."""

from kvjax.evictors.base import Evictor, Tokens
from kvjax.evictors.keys import KeyDiff, KeyNorm, Lag, Random
from kvjax.evictors.queries import (
    Critical,
    ExpectedAttention,
    Redundancy,
    Trigonometric,
    ValueWeighted,
)
from kvjax.evictors.scores import (
    HeavyHitter,
    LastQuery,
    LastUse,
    LogSpaced,
    Observation,
    Pooling,
    Sliding,
)

__all__ = [
    "Critical",
    "Evictor",
    "ExpectedAttention",
    "HeavyHitter",
    "KeyDiff",
    "KeyNorm",
    "Lag",
    "LastQuery",
    "LastUse",
    "LogSpaced",
    "Observation",
    "Pooling",
    "Random",
    "Redundancy",
    "Sliding",
    "Tokens",
    "Trigonometric",
    "ValueWeighted",
]
