"""A histogram of keys in the shared memory of each block, and the bin of the last place over
all blocks of a row.

A bin is found in two rounds: the sums of 32 bins each, then the bins of one such group. Blocks
read each other's counts through the cluster, or from device memory, where a launch before wrote
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import tiling
from kvjax.kernels_pallas.simt import (
    Word,
    block_barrier,
    cluster_barrier,
    loop,
    ptx,
    when,
    word,
)

BINS = 2048
GROUPS = 64  # of 32 bins
PASS = BINS + 5 * GROUPS  # words of the histogram of a pass, with those that `find_bin` needs
KEPT = BINS + GROUPS  # the first words, which `keep` writes to device memory


def clear(bins: Word) -> None:
    """Clears `PASS` words, which may count after a barrier."""
    loop(simt.special("tid.x"), PASS // 4, tiling.THREADS)(
        lambda i: ptx("st.shared.v4.u32 [$0], {$1, $1, $1, $1};", bins + i * 16, 0)
    )


def kept_of(rows: int, config: tiling.Config) -> jax.ShapeDtypeStruct:
    """The histograms of all blocks of all rows in device memory."""
    return jax.ShapeDtypeStruct((rows, config.blocks, KEPT), jnp.uint32)


class Found(NamedTuple):
    """The bin of the last of the `wanted` largest elements, and numbers of elements."""

    bin: Word
    need: Word  # wanted elements of the bin
    many: Word  # in the bin
    wanted: Word  # the number of all elements, if fewer than were asked for
    above: Word  # in higher bins, of the blocks before this one
    beside: Word  # in the bin, of the blocks before this one


def find_bin(bins: Word, wanted: Word, blocks: int, of_earlier: bool = True) -> Found:
    """The place of the last wanted element in the histograms of a cluster's blocks, `PASS`
    words each at `bins`.

    The words were zeros before the elements were counted. Numbers of earlier blocks are zeros
    without `of_earlier`.
    """
    _sum_groups(bins)
    cluster_barrier()

    def load(i: Word, block: Word) -> Word:
        return simt.load_remote(simt.remote(bins + i * 4, block))

    return _locate(bins, load, wanted, blocks, of_earlier)


def _sum_groups(bins: Word) -> None:
    """Writes the sums of 32 bins each, after a barrier."""
    thread = simt.special("tid.x")
    lane = thread & 31
    warp = thread >> 5
    block_barrier()
    here = simt.sum_of(simt.load_shared(bins + thread * 8, 2))
    low = simt.warp_sum((lane < 16).select(here, 0))
    high = simt.warp_sum(here) - low
    with when(lane.equals(0)):
        simt.store_shared(bins + BINS * 4 + warp * 8, *[low, high])


def keep(bins: Word, kept: Any) -> None:
    """Writes the histogram of this block of a row to its `KEPT` words of device memory, those
    of the row at `kept`.
    """
    _sum_groups(bins)
    block_barrier()
    to = simt.offset_rows(kept, simt.part(), KEPT * 4)

    @loop(simt.special("tid.x") * 4, KEPT, tiling.THREADS * 4)
    def _write(i: Word) -> None:
        four = simt.load_shared(bins + i * 4, 4)
        ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", simt.offset(to, i * 4), *four)


def find_kept(
    bins: Word, kept: Any, wanted: Word, blocks: int, of_earlier: bool = True
) -> Found:
    """As `find_bin`, in the histograms that the blocks of a row kept; `PASS` words at `bins`
    were cleared.
    """
    block_barrier()

    def load(i: Word, block: Word) -> Word:
        return simt.load(simt.offset(kept, (block * KEPT + i) * 4))

    return _locate(bins, load, wanted, blocks, of_earlier)


def _locate(
    bins: Word, load: Callable[[Word, Word], Word], wanted: Word, blocks: int, of_earlier: bool
) -> Found:
    """The place of the last wanted element; load(i, block) is word i of a block's histogram.

    A block reads from each block the sums of 32 bins each, then the 32 bins that include the
    wanted one, each time one word per lane.
    """
    thread = simt.special("tid.x")
    part = simt.part()
    lane = thread & 31
    warp = thread >> 5
    sums, sums_before, counts, counts_before = (
        bins + 4 * (BINS + i * GROUPS) for i in range(1, 5)
    )

    def add(i: Word, block: Word, to: Word, to_before: Word) -> None:
        theirs = load(i, block)
        ptx("red.shared.add.u32 [$0], $1;", to, theirs)
        if of_earlier:
            with when(block < part):
                ptx("red.shared.add.u32 [$0], $1;", to_before, theirs)

    def place(counts: list[Word], wanted: Word) -> list[Word]:
        """The lane whose count has the last wanted element, the number of elements after that
        lane, and its count.
        """
        above = simt.sum_of_next_lanes(simt.sum_of(counts))
        found = [word(0)] * 3
        for j in reversed(range(len(counts))):
            exists = (above < wanted) & (wanted <= above + counts[j])
            of_this = lane * len(counts) + j, above, counts[j]
            found = [exists.select(x, y) for x, y in zip(of_this, found, strict=True)]
            above = above + counts[j]
        return [simt.warp_sum(x) for x in found]

    with when(warp < 2 * blocks):
        group = (warp & 1) * 32 + lane
        add(group + BINS, warp >> 1, sums + group * 4, sums_before + group * 4)
    block_barrier()
    groups = simt.load_shared(sums + lane * 8, 2)
    total = simt.warp_sum(groups[0] + groups[1])
    wanted = (wanted < total).select(wanted, total)
    group, above, _ = place(groups, wanted)
    with when(warp < blocks):
        add(group * 32 + lane, warp, counts + lane * 4, counts_before + lane * 4)
    block_barrier()
    of_group, more, many = place([simt.load_shared(counts + lane * 4)], wanted - above)
    found = group * 32 + of_group, wanted - above - more, many, wanted
    if not of_earlier:
        return Found(*found, word(0), word(0))
    before = [
        (lane * 2 + j > group).select(x, 0)
        for j, x in enumerate(simt.load_shared(sums_before + lane * 8, 2))
    ]
    beside = simt.load_shared(counts_before + lane * 4)
    before.append((lane > of_group).select(beside, 0))
    return Found(
        *found,
        simt.warp_sum(simt.sum_of(before)),
        simt.warp_sum(lane.equals(of_group).select(beside, 0)),
    )
