"""Schedules: in which step a selection is made and used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jax import Array

from kvjax.pick import Selection
from kvjax.spec import CacheSpec


class Schedule(Protocol):
    """Decides whether a step uses a selection for its own query or one that was made before."""

    def init(self, spec: CacheSpec) -> Any: ...

    def choose(self, st: Any, q: Array, select: Callable[[Array], Selection]) -> tuple[Selection, Any]:
        """The selection that the step of q [B, K, G, D] attends with, and what the next step needs."""
        ...


@dataclass(frozen=True)
class EveryStep:
    """Each step selects with its own query. No state."""

    def init(self, spec: CacheSpec) -> tuple[()]:
        return ()

    def choose(self, st: tuple[()], q: Array, select: Callable[[Array], Selection]) -> tuple[Selection, tuple[()]]:
        return select(q), ()
