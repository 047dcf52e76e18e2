"""The elements of a row that a thread works on: all of them in registers, or candidates in
lists.

A row that registers cannot hold is read once. Warps list the elements that reach a lower bound
of the last place in shared memory. If a list overflows, all keys are written to device memory
and read from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import tiling
from kvjax.kernels_pallas.select.keys import SLOTS
from kvjax.kernels_pallas.simt import (
    Flag,
    Word,
    instr,
    when,
    word,
)

WARPS = tiling.THREADS // 32
FOURS = 256  # groups of four adjacent elements that a warp lists, in a row that registers do not hold
LIST = 4 * FOURS + FOURS  # words: keys, and where each four begins
Pair = tuple[Word, Word]  # an element's key, and its slot's rank: lower slots rank higher
Fours = Iterable[list[Word]]  # keys


class Elements(NamedTuple):
    """Some of a thread's elements."""

    pairs: Iterable[Pair]
    slot: Callable[[Word], Word]  # of the e-th


def elements_of(i: Word, fours: Fours, U: int, config: tiling.Config) -> Elements:
    """The elements of step i, whose keys are `fours`."""
    starts = tiling.fours(i, U, config)
    stride, _, steps = tiling.steps(U, config)
    pairs = (
        (key, word(SLOTS) - (at + j))
        for at, four in zip(starts, fours, strict=True)
        for j, key in enumerate(four)
    )
    return Elements(pairs, lambda e: starts[0] + (e >> 2) * (stride * steps) + (e & 3))


class InRegisters:
    """A row whose keys stay in registers."""

    def __init__(self, elements: Elements):
        self.elements = elements._replace(pairs=_Once(elements.pairs))

    def each(self, visit: Callable[..., Any], carry: Sequence[Word] = ()) -> list[Word]:
        """carry = visit(elements, *carry) for all elements at once."""
        return visit(self.elements, *carry) or []


class InDevice:
    """A row whose keys are in device memory."""

    def __init__(self, keys: Any, U: int, config: tiling.Config):
        self.keys = keys
        self.U = U
        self.config = config

    def each(self, visit: Callable[..., Any], carry: Sequence[Word] = ()) -> list[Word]:
        """carry = visit(elements, *carry) for some elements at a time."""

        def of_row(i: Word, *carry: Word) -> Any:
            fours = (
                tiling.load_four(self.keys, at, self.U)
                for at in tiling.fours(i, self.U, self.config)
            )
            return visit(elements_of(i, fours, self.U, self.config), *carry)

        return simt.loop(0, tiling.steps(self.U, self.config)[2], 1, carry)(of_row)


class InLists:
    """A row whose candidates are in lists, or, if a list overflows, whose keys are in device
    memory at `kept`.
    """

    def __init__(
        self, first: Fours, others: Callable[..., list[Word]], again: Callable[[Word], Fours], lists: Lists,
        kept: Any, U: int, config: tiling.Config,
    ):  # fmt: skip
        self.lists = lists
        self.kept = InDevice(kept, U, config)

        def list_step(i: Word, fours: Fours, number: Word) -> list[Word]:
            for at, four in zip(tiling.fours(i, U, config), fours, strict=True):
                number = lists.add(at, four, number)
            return [number]

        (number,) = others(list_step, list_step(word(0), first, word(0)))
        self.number, self.too_many = lists.ends(number)
        with when(self.too_many):

            @simt.loop(0, tiling.steps(U, config)[2], 1)
            def _keep(i: Word) -> None:
                for at, four in zip(tiling.fours(i, U, config), again(i), strict=True):
                    tiling.store_four(kept, at, U, four)

    def each(self, visit: Callable[..., Any], carry: Sequence[Word] = ()) -> list[Word]:
        """carry = visit(elements, *carry) for some elements at a time."""

        def of_list(first: Word, *carry: Word) -> Any:
            return visit(self.lists.elements(first, self.number), *carry)

        carry = simt.loop(0, self.number, 32, carry)(of_list)
        return simt.branch(self.too_many, lambda: self.kept.each(visit, carry), carry)


Held = InRegisters | InDevice | InLists


class _Once:
    """The items of an iterator, made on first use and kept."""

    def __init__(self, made: Iterable[Any]):
        self.made = iter(made)
        self.items: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        for x in self.made:
            self.items.append(x)
            yield x


class Lists:
    """The warps' lists in shared memory, of fours of a row's elements that have a key not below
    a bound.
    """

    def __init__(self, lists: Word, bound: Word):
        thread = simt.special("tid.x")
        self.lane = thread & 31
        self.warp = thread >> 5
        self.bound = bound
        self.keys = lists + self.warp * (4 * LIST)
        self.starts = self.keys + 16 * FOURS
        self.numbers = lists + WARPS * (4 * LIST)

    def add(self, at: Word, four: Sequence[Word], number: Word) -> Word:
        """Lists the four at .. at + 3 of each lane of the warp that reaches the bound; `number`
        were listed before.

        Returns the new length of the list.
        """
        counts = functools.reduce(lambda a, b: instr("max.u32", a, b), four) >= self.bound
        lanes = simt.ballot(counts)
        place = number + instr("popc.b32", lanes & ((word(1) << self.lane) - 1))
        with when(counts & (place < FOURS)):
            simt.store_shared(self.keys + place * 16, *four)
            simt.store_shared(self.starts + place * 4, at)
        return number + instr("popc.b32", lanes)

    def ends(self, number: Word) -> tuple[Word, Flag]:
        """The length of this warp's list; and whether a list of the block overflowed: then all
        are empty.
        """
        with when(self.lane.equals(0)):
            simt.store_shared(self.numbers + self.warp * 4, number)
        simt.block_barrier()
        of_warps = simt.load_shared(self.numbers + self.lane * 4)
        too_many = simt.ballot(of_warps > FOURS).differs(0)
        return too_many.select(0, number), too_many

    def elements(self, first: Word, number: Word) -> Elements:
        """This lane's four among the fours from `first` on."""
        i = first + self.lane
        exists = i < number
        i = exists.select(i, 0)
        four = simt.load_shared(self.keys + i * 16, 4)
        at = simt.load_shared(self.starts + i * 4)
        pairs = [(exists.select(key, 0), word(SLOTS) - (at + j)) for j, key in enumerate(four)]
        return Elements(pairs, lambda e: at + e)
