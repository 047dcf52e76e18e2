"""Sorts candidates of a block, then finds each one's rank among the candidates of all blocks of
a row.

A block sorts its list by a bitonic network and sends it to the other blocks of its cluster, or
to a next launch. A thread then finds the rank of an element by bisection in each list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import tiling
from kvjax.kernels_pallas.select.keys import SLOTS
from kvjax.kernels_pallas.simt import (
    Word,
    cluster_barrier,
    loop,
    ptx,
    when,
    word,
)

# Words of `small`, after totals of warps: for the length of this block's list, and for those of
# all blocks' lists.
LENGTH = 32
LENGTHS = 33


class Out(NamedTuple):
    """Where the slots of a row go, whether their keys are not 0, and the keys if these are
    wanted.
    """

    k: int
    slots: Any
    found: Any
    keys: Any = None

    @classmethod
    def of(cls, k: int, *refs: Any) -> Out:
        """In device memory, for this block's row."""
        sizes = (4, 1, 4)[: len(refs)]
        at = (
            simt.offset_rows(simt.global_address(m), simt.row(), n * k)
            for m, n in zip(refs, sizes, strict=True)
        )
        return cls(k, *at)

    def write(self, at: Word, pair: list[Word]) -> None:
        """Writes the slot of a pair at place `at`, if that is one of k."""
        rank, key = pair
        with when(at < self.k):
            ptx("st.global.u32 [$0], $1;", simt.offset(self.slots, at * 4), word(SLOTS) - rank)
            ptx(
                "st.global.u8 [$0], $1;",
                simt.offset(self.found, at),
                key.differs(0).select(1, 0),
            )
            if self.keys is not None:
                ptx("st.global.u32 [$0], $1;", simt.offset(self.keys, at * 4), key)


def load_pair(at: Word, index: Word, count: Word) -> list[Word]:
    """The pair at `at` if index < count, else zeros."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0; mov.u32 $1, 0; @p ld.shared.v2.u32 {$0, $1}, [$4]; }",
        *(index, count, at),
        results=2,
    )


def networks(capacity: int) -> list[int]:
    """The sizes of the networks for lists of at most `capacity` pairs."""
    return [n for n in (32, 256, 512, 1024, 2048) if n < capacity] + [capacity]


def sort_pairs(sizes: list[int], own: Word, spare: Word | None, length: Word, t: Word) -> None:
    """Sorts `own` by the smallest network that has room. There are few networks, as a branch
    past one takes long. Without `spare`, as much room again, threads wait once more for each
    exchange."""
    if len(sizes) == 1:
        # Fewer waits for others than with one.
        of_thread = max(2 if sizes[0] > 32 else 1, sizes[0] // tiling.THREADS)
        with when((t >> 5) * (32 * of_thread) < length):
            _bitonic(sizes[0], of_thread, own, spare, length, t)
        return
    half = len(sizes) // 2
    with when(length <= sizes[half - 1]):
        sort_pairs(sizes[:half], own, spare, length, t)
    with when(length > sizes[half - 1]):
        sort_pairs(sizes[half:], own, spare, length, t)


def _bitonic(
    size_all: int, m: int, own: Word, spare: Word | None, length: Word, t: Word
) -> None:
    """Sorts the first `length` pairs of `own`, largest first; the first threads have m of
    `size_all` pairs each.

    A larger pair always moves to the lower place, so zeros past the end stay there and warps
    that have nothing else take no part.
    """
    base = (t >> 5) * (32 * m) + (t & 31)
    at = [base + 32 * j for j in range(m)]
    x = [load_pair(own + e * 8, e, length) for e in at]
    buffers = [own if spare is None else spare, own]
    threads = simt.divide(length + (32 * m - 1), 32 * m) << 5
    end = threads * m

    def sync() -> None:
        simt.barrier_of(word(1), threads)

    def keep(own: list[Word], other: list[Word], first: Word) -> list[Word]:
        return ptx(
            "{ .reg .u64 x, y; .reg .pred p, q; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; setp.eq.u32 q, $6, 0; "
            "setp.gt.u64 p, x, y; xor.pred p, p, q; selp.b32 $0, $2, $4, p; selp.b32 $1, $3, $5, p; }",
            *(*own, *other, first),
            results=2,
        )

    size = 2
    while size <= size_all:
        gap = size - 1
        while gap:
            # the bit in which partners differ first
            half = (gap + 1) // 2 if gap == size - 1 else gap
            if half >= 32 * m:
                if spare is None:
                    sync()
                for e, v in zip(at, x, strict=True):
                    simt.store_shared(buffers[0] + e * 8, *v)
                sync()
                other = [load_pair(buffers[0] + (e ^ gap) * 8, e ^ gap, end) for e in at]
                buffers.reverse()
            else:
                other = [x[j ^ (gap // 32)] for j in range(m)]
                if gap & 31:
                    other = [[simt.bfly(w, gap & 31) for w in v] for v in other]
            first = [(e & half).equals(0).select(1, 0) for e in at]
            x = [keep(*three) for three in zip(x, other, first, strict=True)]
            gap = size // 4 if gap == size - 1 else gap // 2
        size *= 2
    sync()
    for e, v in zip(at, x, strict=True):
        simt.store_shared(own + e * 8, *v)


def write_by_rank(
    own: Word, lists: Word, small: Word, out: Out, length: Word, t: Word, blocks: int
) -> None:
    """Sends the sorted list `own` to the other blocks, and writes its slots at their ranks.

    `lists` has the lists of the other blocks, that of the next block first.
    """
    part = simt.part()
    share = tiling.THREADS // blocks  # threads that write to a block
    lengths = [
        simt.load_shared(small + (((part + b) & (blocks - 1)) + LENGTHS) * 4)
        for b in range(1, blocks)
    ]
    firsts = [word(0)]
    longest = word(0)
    for n in lengths:
        firsts.append(firsts[-1] + n)
        longest = (longest > n).select(longest, n)
    block = simt.divide(t, share)
    after = (part - block) & (blocks - 1)  # number of blocks from that block to this one
    between = [(after > b).select(lengths[-b], 0) for b in range(1, blocks - 1)]
    to = simt.remote(lists + simt.sum_of([word(0), *between]) * 8, block)

    @loop(after.equals(0).select(length, t & (share - 1)), length, share)
    def _give(i: Word) -> None:
        simt.store_remote(to + i * 8, *simt.load_shared(own + i * 8, 2))

    cluster_barrier()

    @loop(t, length, tiling.THREADS)
    def _write(i: Word) -> None:
        pair = load_pair(own + i * 8, i, length)
        out.write(simt.sum_of([i, *larger(pair, lists, lengths, firsts, longest)]), pair)


def larger(
    pair: list[Word], lists: Word, lengths: list[Word], firsts: list[Word], longest: Word
) -> list[Word]:
    """How many pairs of each sorted list are larger; list i has `lengths[i]` pairs from pair
    `firsts[i]` on.
    """
    if not lengths:
        return []
    bits = word(32) - ptx("clz.b32 $0, $1;", longest, results=1)

    def bisect(j: Word, *counts: Word) -> list[Word]:
        step = word(1) << (bits - 1 - j)
        return [
            ptx(
                "{ .reg .u64 x, y; .reg .pred p, q; setp.le.u32 p, $2, $3; mov.b64 x, {$4, $5}; mov.u64 y, 0; "
                "@p ld.shared.u64 y, [$6]; setp.gt.u64 q, y, x; selp.u32 $0, $2, $1, q; }",
                *(count, count + step, n, *pair, lists + (first + count + step - 1) * 8),
                results=1,
            )
            for n, first, count in zip(lengths, firsts, counts, strict=False)
        ]

    return loop(0, bits, 1, [word(0)] * len(lengths))(bisect)
