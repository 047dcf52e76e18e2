"""How the threads of a row's blocks divide its scores.

A thread takes four adjacent elements at a time. The first fours of all threads are spread over
the whole row, so the elements that are read first are a sample of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import (
    Word,
    ptx,
)

THREADS = 1024
MAX_PARTS = 16


@dataclass(frozen=True)
class Config:
    blocks: int = 8  # of a row; clusters of 16 are not portable, but Hopper has them
    unroll: int = 4  # loads of four keys in flight
    cluster: int = 1  # 0: the blocks are no cluster, and meet in device memory between launches

    def __post_init__(self) -> None:
        if self.cluster not in (0, 1):
            raise ValueError(f"cluster must be 0 or 1; got {self.cluster}")
        if self.cluster and self.blocks not in (1, 2, 4, 8, 16):
            raise ValueError(f"blocks must be 1, 2, 4, 8 or 16, a cluster's; got {self.blocks}")
        if not 1 <= self.blocks <= MAX_PARTS:
            raise ValueError(f"blocks must be 1 to {MAX_PARTS}; got {self.blocks}")
        if self.unroll < 1:
            raise ValueError(f"unroll must be at least 1; got {self.unroll}")

    @property
    def parted(self) -> bool:
        """True if a row has several blocks that are no cluster."""
        return self.blocks > 1 and not self.cluster


def config_for(rows: int, units: int, target: simt.Target | None = None) -> Config:
    """As many blocks per row as run at once, one per multiprocessor; whole clusters cannot use
    all of the 132.

    A short row has fewer, as merging blocks takes longer than reading the row. Without
    clusters, a row that the registers of one block hold has one, as launches take longer than
    reading it.
    """
    target = target or simt.target()
    if not target.clusters:
        for unroll in (4, 5):
            if in_one_step(units, Config(1, unroll, cluster=0)):
                return Config(1, unroll, cluster=0)
        of_row = min(MAX_PARTS, target.multiprocessors // rows, units // (THREADS * 4))
        return Config(max(of_row, 2), cluster=0)
    limit = 1 if units <= THREADS * 4 else 2 if units <= 8192 else 4 if units <= 16384 else 8
    at_once = target.multiprocessors * 112 // 132
    return Config(
        blocks=next((b for b in (8, 4) if b <= limit and rows * b <= at_once), min(limit, 2))
    )


def fours(i: Word, U: int, config: Config) -> list[Word]:
    """The first element of each four that this thread has in step i of a row of U. A step has
    elements from all over the row, as a sample."""
    stride, unroll, number = steps(U, config)
    first = i * stride + simt.part() * (THREADS * 4) + simt.special("tid.x") * 4
    return [first + u * (number * stride) for u in range(unroll)]


def steps(U: int, config: Config) -> tuple[int, int, int]:
    """The distance between a thread's fours of one step and the next, the fours of a step, and
    the number of steps.
    """
    stride = THREADS * 4 * config.blocks
    number = -(-U // (stride * config.unroll))
    return stride, -(-U // (stride * number)), number


def ends(U: int, config: Config) -> list[int]:
    """The ends before which each of `fours` is, for all threads and steps."""
    stride, unroll, number = steps(U, config)
    return [(u + 1) * number * stride for u in range(unroll)]


def in_one_step(U: int, config: Config) -> bool:
    """Whether the threads of a row hold all of it in registers, and read it once."""
    return steps(U, config)[2] == 1


def load_four(row: Any, at: Word, U: int) -> list[Word]:
    """Words at .. at + 3 of a row in device memory; zeros past its end."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, $4, $5; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        "@p ld.global.v4.u32 {$0, $1, $2, $3}, [$6]; }",
        *(at, U, simt.offset(row, at * 4)),
        results=4,
    )


def store_four(row: Any, at: Word, U: int, four: list[Word]) -> None:
    """Writes words at .. at + 3 of a row in device memory, none past its end."""
    with simt.when(at < U):
        ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", simt.offset(row, at * 4), *four)
