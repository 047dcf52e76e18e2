"""Writes the slots of the selected units, once the last place is known.

A block writes the slots above the bin of the last place in thread order. Elements of that bin go to a list that every
block holds. A warp places each of them by counting the larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import tiling
from kvjax.kernels_pallas.select.elements import Elements, InLists, InRegisters, Pair
from kvjax.kernels_pallas.select.keys import SLOTS
from kvjax.kernels_pallas.select.threshold import LastPlace
from kvjax.kernels_pallas.simt import (
    Word,
    block_barrier,
    instr,
    ptx,
    when,
    word,
)


def sum_before(x: Word, small: Word) -> Word:
    """The sum of x over the threads of the block that come before this one."""
    thread = simt.special("tid.x")
    lane, warp = thread & 31, thread >> 5
    later = simt.sum_of_next_lanes(x)
    of_warp = simt.warp_sum(x)
    with when(lane.equals(0)):
        simt.store_shared(small + warp * 4, of_warp)
    block_barrier()
    return simt.warp_sum((lane < warp).select(simt.load_shared(small + lane * 4), 0)) + of_warp - later - x


class _Thread(NamedTuple):
    """The numbers of a thread and its block, and the addresses of the list and its length."""

    thread: Word
    part: Word
    lane: Word
    warp: Word
    length: Word
    listed: Word


def write_slots(
    row: InRegisters | InLists, cut: LastPlace, here: _Thread, slots: Any, found: Any, small: Word,
    name: Callable[[Word], Word], room: int, config: tiling.Config,
) -> None:  # fmt: skip
    """Selects all keys above the bin; if slots were counted, also keys equal to `low` that rank above the last bin of
    slots. Keys in the bin go to a list that each block gets, with rank and key of [many] elements."""
    blocks, (thread, part, lane, warp, length, listed) = config.blocks, here
    wanted, need, is_held = cut.wanted, cut.need, isinstance(row, InRegisters)
    by_rank, none = cut.least.differs(0), wanted.equals(0)
    low, high = none.select(0xFFFFFFFF, cut.low), none.select(0xFFFFFFFF, cut.low + cut.size)
    many = none.select(0, cut.many)

    def bits(conditions: str, elements: Iterable[Pair], *limits: Word) -> Word:
        found = word(0)
        for e, element in enumerate(elements):
            mark = f"{{ .reg .pred p; {conditions} mov.b32 $0, $1; @p or.b32 $0, $0, $2; }}"
            found = ptx(mark, found, 1 << e, *element, *limits, results=1)
        return found

    def marks(elements: list[Pair]) -> list[Word]:
        """Bits of the selected elements, and of those that go to the list."""
        taken = bits("setp.gt.u32 p, $3, $5;", elements, high)
        level = bits("setp.ge.u32 p, $3, $5;", elements, low)

        def of_rank() -> list[Word]:
            higher, rank = "setp.eq.u32 p, $3, $5; setp.g{}.and.u32 p, $4, $6, p;", (elements, low, cut.least)
            return [taken | bits(higher.format("t"), *rank), taken | bits(higher.format("e"), *rank)]

        taken, level = simt.branch(by_rank, of_rank, [taken, level])
        return [taken, none.select(0, level & (taken ^ 0xFFFFFFFF))]

    def number(flags: Word) -> Word:
        return instr("popc.b32", flags)

    def numbered(flags: Word, visit: Callable[[Word, Word], None]) -> None:
        """Calls visit(i, e) for the i-th bit that is 1, which is bit e."""

        @simt.loop(0, number(flags), 1, [flags])
        def _each(i: Word, flags: Word) -> Word:
            visit(i, word(31) - instr("clz.b32", flags & (word(0) - flags)))
            return flags & (flags - 1)

    def collect(elements: Elements, before: Word) -> list[Word]:
        pairs = list(elements.pairs)
        taken, level = marks(pairs)
        with when(level.differs(0)):
            at = cut.beside + ptx("atom.shared.add.u32 $0, [$1], $2;", length, number(level), results=1)

            def share(i: Word, e: Word) -> None:
                key, rank = pairs[0]
                for j, other in enumerate(pairs[1:], 1):
                    key, rank = (e.equals(j).select(x, y) for x, y in zip(other, (key, rank), strict=True))
                for block in range(blocks):
                    to = simt.remote(listed + (at + i) * 8, block)
                    ptx("st.shared::cluster.v2.u32 [$0], {$1, $2};", to, rank, key)

            numbered(level, share)
        return [taken if is_held else before + number(taken)]

    (mine_taken,) = row.each(collect, [word(0)])
    simt.cluster_arrive()

    def write(elements: Elements, at: Word) -> list[Word]:
        taken = mine_taken if is_held else marks(list(elements.pairs))[0]

        def store(i: Word, e: Word) -> None:
            ptx("st.global.u32 [$0], $1;", simt.offset(slots, (at + i) * 4), name(elements.slot(e)))

        numbered(taken, store)
        return [at + number(taken)]

    row.each(write, [cut.above + sum_before(number(mine_taken) if is_held else mine_taken, small)])
    with when(thread.equals(0) & part.equals(0)):
        ptx("st.global.u32 [$0], $1;", found, wanted)
    simt.loop(wanted + part * tiling.THREADS + thread, room, tiling.THREADS * blocks)(
        lambda i: ptx("st.global.u32 [$0], $1;", simt.offset(slots, i * 4), 0)
    )
    simt.cluster_wait()

    @simt.loop(part * 32 + warp, many, 32 * blocks)
    def _from_list(i: Word) -> None:
        """Counts the larger elements of the list for element i, one warp an element."""

        @simt.loop(lane, many, 32, [word(0)])
        def larger(j: Word, n: Word) -> Word:
            compare = (
                "{ .reg .u64 x, y; .reg .pred p; ld.shared.u64 x, [$1]; ld.shared.u64 y, [$2]; "
                "setp.gt.u64 p, x, y; selp.u32 $0, 1, 0, p; }"
            )
            return n + ptx(compare, listed + j * 8, listed + i * 8, results=1)

        place = simt.warp_sum(larger[0])
        with when(lane.equals(0) & (place < need)):
            rank = simt.load_shared(listed + i * 8)
            ptx("st.global.u32 [$0], $1;", simt.offset(slots, (wanted - need + place) * 4), name(word(SLOTS) - rank))
