"""The last place: the key, and where keys are equal the slot, of the last unit that is
selected.

Keys are counted into 2048 bins, of which the first pass has narrow ones where scores usually
lie. A bin with more than `ranked_at_once` elements is counted again, 11 bits at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import histogram, tiling
from kvjax.kernels_pallas.select.elements import Fours, Held, Pair, elements_of
from kvjax.kernels_pallas.simt import (
    Flag,
    Operand,
    Word,
    instr,
    ptx,
    word,
)

# over the keys at most, the later ones by 11 bits; then two by 11 bits of the slot's 22
KEY_PASSES = 4
TURNS = 0, 1, 0, 1, 2, 0  # the histogram of each pass; passes over slots may follow any of them
LISTED = 1024  # elements of a bin that are ranked at once, at most


def ranked_at_once(blocks: int) -> int:
    """The size of a bin up to which ranking its elements is as fast as counting them again."""
    return min(LISTED, math.isqrt(50_000 * blocks))


# From key and rank to the bin, and perhaps two numbers (`count`).
Place = Callable[[Word, Word], list[Operand]]


class LastPlace(NamedTuple):
    """The bin of the last place: keys low .. low + size, of which `need` of `many` are wanted.

    Slots whose key equals `low` count if their rank is at least `least`. `wanted` is the total.
    The blocks before this one have `above` elements that are larger than the bin, and `beside`
    elements in it.
    """

    low: Word
    size: Word
    least: Word
    need: Word
    many: Word
    wanted: Word
    above: Word
    beside: Word


@dataclass(frozen=True)
class Bins:
    """The bins of the first pass: one for each 2^shift keys from `base` on. With a `gap` of two
    keys, all keys from one to the other are in one bin, with the first ones beyond."""

    base: int
    shift: int
    gap: tuple[int, int] | None = None

    @property
    def skipped(self) -> int:
        return self.gap[1] - self.gap[0] if self.gap else 0

    def place(self, key: Word, _: Word) -> list[Operand]:
        """The bin of a key. Keys of 0 count in a bin that nobody reads, as a branch around each
        would take longer.
        """
        moved = key
        if self.gap:
            above = instr("max.u32", key - self.skipped, self.gap[0])
            moved = (key < 1 << 31).select(instr("min.u32", key, self.gap[0]), above)
        place = (instr("max.u32", moved, self.base) - self.base) >> self.shift
        return [
            key.equals(0).select(histogram.BINS, instr("min.u32", place, histogram.BINS - 1))
        ]

    def extent(self, place: Word) -> tuple[Word, Word, Flag]:
        """The lowest key of a bin, how many keys follow it, and whether the bin is larger than
        usual.
        """
        size_of_bin = (1 << self.shift) - 1
        beyond = self.base + ((histogram.BINS - 1) << self.shift) + self.skipped
        widths = {
            0: (1, self.base + size_of_bin - 1),
            histogram.BINS - 1: (beyond, 0xFFFFFFFF - beyond),
        }
        low = (place << self.shift) + self.base
        size = word(size_of_bin)
        if self.gap:
            middle = (self.gap[0] - self.base) >> self.shift
            widths[middle] = self.gap[0], self.skipped + size_of_bin
            low = low + (place > middle).select(self.skipped, 0)
        for which, (first, more) in widths.items():
            low, size = (
                place.equals(which).select(x, y) for x, y in ((first, low), (more, size))
            )
        return (
            low,
            size,
            functools.reduce(lambda a, b: a | b, [place.equals(which) for which in widths]),
        )


# 32 bins per octave from 2^-61 to 2^3 for sums of softmaxes, 256 per octave from -2^8 to -1 for
# logarithms of softmaxes, and for scores 128 per octave from -2^5 to -2^-3 and from 2^-3 to
# 2^5.
FIRST_BINS = {
    "sum": Bins(0xA1000000, 18),
    "log": Bins(0x3C7FFFFF, 15),
    "score": Bins(0x3E000000, 16, (0x42000000, 0xBE000000)),
}


def first_bins(pooled: bool, group_reduce: str) -> Bins:
    """Those of the keys of scores, or of what `group_reduce` makes of the softmaxes of several
    heads.
    """
    return FIRST_BINS[
        "score" if not pooled else "log" if group_reduce == "max_softmax" else "sum"
    ]


def _by_bits(low: Word, size: Word, by: Operand) -> Place:
    """The bin of each key of low .. low + size, by its bits from `by` on."""
    return lambda key, _: [(key - low) >> by, key - low, size]


def _bin_within(low: Word, size: Word, place: Word, by: Operand) -> tuple[Word, Word]:
    """A bin of `_by_bits`, as its lowest key and how many follow it. The last bin ends at low +
    size, as the keys after it were counted as larger."""
    first = place << by
    return low + first, instr("min.u32", (word(1) << by) - 1, size - first)


def count(bins: Word, pairs: Iterable[Pair], place: Place) -> None:
    """Counts elements in bins. `place` gives a bin, and perhaps two numbers: the element counts
    if the first is not the larger one."""
    for element in pairs:
        digit, *limits = place(*element)
        red = "red.shared.add.u32 [$0], 1;"
        if limits:
            red = "{ .reg .pred p; setp.le.u32 p, $1, $2; @p " + red + " }"
        ptx(red, bins + digit * 4, *limits)


def lower_bound(
    sample: Fours, wanted: Word, hist: Word, bins: Bins, U: int, config: tiling.Config
) -> Word:
    """A key, often the lowest one of a bin, such that at least `wanted` elements of the sample
    are not below it.
    """
    at = hist + histogram.PASS * 4
    count(at, elements_of(word(0), sample, U, config).pairs, bins.place)
    got = histogram.find_bin(at, wanted, config.blocks, of_earlier=False)
    low, size, is_wide = bins.extent(got.bin)

    def within() -> list[Word]:
        """The bound within a bin that has most of the range: the bin is counted again."""
        low_now = low
        size_now = size
        need = got.need
        for turn, by in ((2, 21), (1, 10)):
            at = hist + turn * histogram.PASS * 4
            histogram.clear(at)
            simt.block_barrier()
            count(
                at,
                elements_of(word(0), sample, U, config).pairs,
                _by_bits(low_now, size_now, by),
            )
            finer = histogram.find_bin(at, need, config.blocks, of_earlier=False)
            low_now, size_now = _bin_within(low_now, size_now, finer.bin, by)
            need = finer.need
        return [low_now]

    (bound,) = simt.branch(is_wide, within, [low])
    return (got.wanted < wanted).select(1, bound)


def last_place(row: Held, wanted: Word, hist: Word, bins: Bins, blocks: int) -> LastPlace:
    def find(n: int, place: Place, wanted: Word) -> histogram.Found:
        """Histograms take turns: all blocks had read the one that is cleared before the last
        pass.
        """
        at = hist + TURNS[n] * histogram.PASS * 4
        if n:
            histogram.clear(at)
            simt.block_barrier()
        row.each(lambda elements: count(at, elements.pairs, place))
        return histogram.find_bin(at, wanted, blocks)

    place, need, many, wanted, above, beside = find(0, bins.place, wanted)
    low, size, is_wide = bins.extent(place)
    further = is_wide.select(21, bins.shift - 11)  # the first of the next bits to count
    state = [low, size, further, word(0), need, many, above, beside]

    def by_key(
        n: int, low: Word, size: Word, shift: Word, _: Word, need: Word, *of_blocks: Word
    ) -> list[Word]:
        got = find(n, _by_bits(low, size, shift), need)
        further = (shift > 11).select(shift - 11, 0)
        low, size = _bin_within(low, size, got.bin, shift)
        return [
            low,
            size,
            further,
            word(0),
            got.need,
            got.many,
            of_blocks[1] + got.above,
            got.beside,
        ]

    def by_slot(
        low: Word, size: Word, shift: Word, least: Word, need: Word, *of_blocks: Word
    ) -> list[Word]:
        above = of_blocks[1]
        for n, by in ((KEY_PASSES, 11), (KEY_PASSES + 1, 0)):

            def place(
                key: Word, rank: Word, by: int = by, least: Word = least
            ) -> list[Operand]:
                digit = (rank - least) >> by
                return [
                    digit,
                    key.equals(low).select(digit, histogram.BINS),
                    histogram.BINS - 1,
                ]

            got = find(n, place, need)
            least = least + (got.bin << by)
            need = got.need
            above = above + got.above
        return [low, size, shift, least, need, got.many, above, got.beside]

    def is_long(state: list[Word]) -> Flag:
        return state[5] > ranked_at_once(blocks)

    def narrowed() -> list[Word]:
        found = state
        for n in range(1, KEY_PASSES):
            found = simt.branch(
                is_long(found) & found[1].differs(0),
                functools.partial(by_key, n, *found),
                found,
            )
        return simt.branch(is_long(found), functools.partial(by_slot, *found), found)

    # One branch past all of it, as far branches take long.
    state = simt.branch(is_long(state), narrowed, state)
    low, size, _, least, need, many, above, beside = state
    return LastPlace(low, size, least, need, many, wanted, above, beside)
