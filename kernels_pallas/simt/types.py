"""Types that the operations of the kernels share with the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Value = Any  # a register of each thread, in the backend's own representation
Arithmetic = Literal["add", "sub", "mul", "div", "and", "or", "xor", "shl", "shr"]
Comparison = Literal["lt", "le", "gt", "ge", "eq", "ne"]


@dataclass(frozen=True)
class Launch:
    """The grid of a kernel and the shared memory of its blocks."""

    name: str
    blocks: int  # or clusters, if a cluster has more than one block
    warpgroups: int  # of a block, 128 threads each
    cluster: int | None = None  # blocks of a cluster
    parts: int = 1  # adjacent blocks that share a row, if they are no cluster
    scratch: tuple[int, ...] = ()  # words of each array in shared memory
    sparse: tuple[int, ...] = ()  # numbers of the outputs that may stay unwritten in part
