"""Demotion: which tokens leave the recent block, and when.

The recent block holds `local` tokens that are always attended and up to a chunk more. When it is full, two static index
arrays say which slots leave as one chunk of fixed size and which stay. Chunks are a multiple of every quantisation
group and page, so that none straddles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvjax.spec import require_int


class Demotion(Protocol):
    """When the block of `slots(local)` is full, `leaving(local)` go to the history and `staying(local)` remain."""

    @property
    def leave(self) -> int:
        """Tokens a chunk has."""
        ...

    def slots(self, local: int) -> int: ...

    def leaving(self, local: int) -> np.ndarray: ...

    def staying(self, local: int) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class Fifo:
    """The oldest `leave` tokens leave together, so the block stays in order of arrival.

    A larger chunk is demoted more rarely and keeps its tokens exact for longer. The block is full when the next token
    would make `leave` tokens older than the `local` newest, so local - 1 stay; no chunk waits longer than it must.
    """

    leave: int = 256

    def __post_init__(self) -> None:
        require_int("Fifo(leave=...)", self.leave, at_least=1)

    def slots(self, local: int) -> int:
        return local + self.leave - 1

    def leaving(self, local: int) -> np.ndarray:
        return np.arange(self.leave)

    def staying(self, local: int) -> np.ndarray:
        return np.arange(self.leave, self.slots(local))
