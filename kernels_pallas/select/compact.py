"""Writes the slots of the selected units, once the last place is known.

A block writes the slots above the bin of the last place in thread order. Elements of that bin
go to a list, which every block of a cluster holds. A warp places each of them by counting the
larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import histogram, tiling
from kvjax.kernels_pallas.select.elements import Elements, Held, InRegisters, Pair
from kvjax.kernels_pallas.select.keys import SLOTS
from kvjax.kernels_pallas.select.sort import LENGTH
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
    lane = thread & 31
    warp = thread >> 5
    later = simt.sum_of_next_lanes(x)
    of_warp = simt.warp_sum(x)
    with when(lane.equals(0)):
        simt.store_shared(small + warp * 4, of_warp)
    block_barrier()
    return (
        simt.warp_sum((lane < warp).select(simt.load_shared(small + lane * 4), 0))
        + of_warp
        - later
        - x
    )


class Here(NamedTuple):
    """This thread's numbers, and what its block has in shared memory."""

    thread: Word
    lane: Word
    warp: Word
    hist: Word  # `histogram.PASS` words for each of three histograms, and the list of pairs after them
    small: Word

    @classmethod
    def of(cls, hist_m: Any, small_m: Any) -> Here:
        thread = simt.special("tid.x")
        return cls(
            thread,
            thread & 31,
            thread >> 5,
            simt.shared_address(hist_m),
            simt.shared_address(small_m),
        )

    @property
    def length(self) -> Word:
        """The address of the list's length."""
        return self.small + LENGTH * 4

    @property
    def listed(self) -> Word:
        return self.hist + 3 * histogram.PASS * 4

    def clear(self) -> None:
        """Clears the first histogram and the list, before a barrier."""
        histogram.clear(self.hist)
        with when(self.thread.equals(0)):
            simt.store_shared(self.length, 0)


class Out(NamedTuple):
    """Where a row's slots go."""

    slots: Any
    found: Any
    room: int
    name: Callable[[Word], Word]

    def store(self, place: Word, unit: Word) -> None:
        ptx("st.global.u32 [$0], $1;", simt.offset(self.slots, place * 4), self.name(unit))

    def finish(self, wanted: Word, of: int) -> None:
        """Writes how many were found, and zeros to the places after them, by `of` blocks."""
        thread = simt.special("tid.x")
        part = simt.part()
        with when(thread.equals(0) & part.equals(0)):
            ptx("st.global.u32 [$0], $1;", self.found, wanted)
        simt.loop(wanted + part * tiling.THREADS + thread, self.room, tiling.THREADS * of)(
            lambda i: ptx("st.global.u32 [$0], $1;", simt.offset(self.slots, i * 4), 0)
        )


# From place, rank and key: adds an element to the list.
Share = Callable[[Word, Word, Word], None]


def write_slots(row: Held, cut: LastPlace, here: Here, out: Out, config: tiling.Config) -> None:
    """Selects all keys above the bin, and the `need` largest in it."""

    def share(at: Word, rank: Word, key: Word) -> None:
        for block in range(config.blocks):
            simt.store_remote(simt.remote(here.listed + at * 8, block), rank, key)

    write_certain(row, cut, here, out, share, simt.cluster_arrive)
    out.finish(cut.wanted, config.blocks)
    simt.cluster_wait()
    write_listed(
        cut.need, cut.wanted.equals(0).select(0, cut.many), cut.wanted, here, out, config.blocks
    )


def write_certain(
    row: Held,
    cut: LastPlace,
    here: Here,
    out: Out,
    share: Share,
    shared: Callable[[], None] = lambda: None,
) -> None:
    """Writes the slots of all keys above the bin; if slots were counted, also of keys equal to
    `low` that rank above the last bin of slots. Keys in the bin go to the list, which `shared`
    ends."""
    wanted = cut.wanted
    is_held = isinstance(row, InRegisters)
    by_rank = cut.least.differs(0)
    none = wanted.equals(0)
    low = none.select(0xFFFFFFFF, cut.low)
    high = none.select(0xFFFFFFFF, cut.low + cut.size)

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
            higher = "setp.eq.u32 p, $3, $5; setp.g{}.and.u32 p, $4, $6, p;"
            rank = (elements, low, cut.least)
            return [
                taken | bits(higher.format("t"), *rank),
                taken | bits(higher.format("e"), *rank),
            ]

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
            at = cut.beside + ptx(
                "atom.shared.add.u32 $0, [$1], $2;", here.length, number(level), results=1
            )

            def add(i: Word, e: Word) -> None:
                key, rank = pairs[0]
                for j, other in enumerate(pairs[1:], 1):
                    key, rank = (
                        e.equals(j).select(x, y)
                        for x, y in zip(other, (key, rank), strict=True)
                    )
                share(at + i, rank, key)

            numbered(level, add)
        return [taken if is_held else before + number(taken)]

    (mine_taken,) = row.each(collect, [word(0)])
    shared()

    def write(elements: Elements, at: Word) -> list[Word]:
        taken = mine_taken if is_held else marks(list(elements.pairs))[0]
        numbered(taken, lambda i, e: out.store(at + i, elements.slot(e)))
        return [at + number(taken)]

    row.each(
        write,
        [cut.above + sum_before(number(mine_taken) if is_held else mine_taken, here.small)],
    )


def write_listed(
    need: Word, many: Word, wanted: Word, here: Here, out: Out, blocks: int
) -> None:
    """Writes the slots of the `need` largest of the `many` pairs of the list, one warp a pair,
    to the last places.
    """

    @simt.loop(simt.part() * 32 + here.warp, many, 32 * blocks)
    def _from_list(i: Word) -> None:
        """Counts the larger elements of the list for element i."""

        @simt.loop(here.lane, many, 32, [word(0)])
        def larger(j: Word, n: Word) -> Word:
            compare = (
                "{ .reg .u64 x, y; .reg .pred p; ld.shared.u64 x, [$1]; ld.shared.u64 y, [$2]; "
                "setp.gt.u64 p, x, y; selp.u32 $0, 1, 0, p; }"
            )
            return n + ptx(compare, here.listed + j * 8, here.listed + i * 8, results=1)

        place = simt.warp_sum(larger[0])
        with when(here.lane.equals(0) & (place < need)):
            rank = simt.load_shared(here.listed + i * 8)
            out.store(wanted - need + place, word(SLOTS) - rank)
