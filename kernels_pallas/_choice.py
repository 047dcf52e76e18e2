"""The choice shared by the `select_*` kernels: from scores and their statistics to slots, a cluster of blocks a row.

(1) The heads' sums are merged from the statistics of the warps. (2) Threads load scores, make keys of them and count
the keys into 2048 bins; registers hold up to 163840 with 8 blocks. (3) `top_k.find_bin` finds the bin of the last place
over the cluster. (4) Each block writes the slots above that bin in thread order. Elements of the bin itself go to a
list in every block; a warp places each by counting larger ones.

A longer row is read in steps. The first bounds the last place; warps list only elements above.

A bin with more than `ranked_at_once` elements is counted again, 11 bits at a time.

**Bytes:** 2 or 4 G read a unit, 4 written a place. **Bound:** latency. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import top_k as t
from kvjax.kernels_pallas import top_k_grouped as pooled
from kvjax.kernels_pallas._common import Flag, Operand, Word, instr, ptx, when, word
from kvjax.kernels_pallas.top_k_grouped import add, merge

HEADS = pooled.HEADS
KEY_PASSES = 4  # over the keys at most, the later by 11 bits; then two by 11 bits of the slot's 22
TURNS = 0, 1, 0, 1, 2, 0  # the histogram of each pass; those of slots may follow on any
LISTED = 1024  # elements of a bin that are ranked at once, at most
# Words of bins and lists, of sums by warp with what `top_k` calls small, and of heads by warp and of all.
SCRATCH = 3 * t.PASS + 2 * LISTED, 64, 2 * 32 + HEADS
WARPS = t.THREADS // 32
FOURS = 256  # of adjacent elements that a warp lists, in a row that registers do not have
LIST = 4 * FOURS + FOURS  # words: keys, and where each four begins


def load_heads(
    scores: Sequence[Any], sizes: Sequence[int], heads: int, at: Word, end: int, half: bool
) -> list[list[Word]]:
    """Each head's scores of units at .. at + 3, of one part or two: in f32, or in f16 in two words, if `half`; 0 past
    the end of the row. They lie before `end` for all threads, so that often nothing is left to ask."""
    if not half:
        return pooled.load_heads(scores, sizes, heads, at, end)
    fours = []
    for head in range(heads):
        rows = [c.offset_rows(s, word(head), n * 2) for s, n in zip(scores, sizes, strict=True)]
        address = c.offset(rows[0], at * 2)
        if end <= sizes[0]:
            fours.append(ptx("ld.global.v2.u32 {$0, $1}, [$2];", address, results=2))
            continue
        if len(sizes) == 2:
            address = c.choose_address(at < sizes[0], address, c.offset(rows[1], (at - sizes[0]) * 2))
        load = (
            "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0; mov.u32 $1, 0; @p ld.global.v2.u32 {$0, $1}, [$4]; }"
        )
        fours.append(ptx(load, at, sum(sizes), address, results=2))
    return fours


def numbers(two: Word) -> list[Word]:
    """The two f16 numbers of a word, in f32."""
    both = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    return ptx(both, two, results=2)


def padded(*sizes: int) -> tuple[int, ...]:
    """Sizes rounded up to multiples of four, the units that a thread loads at once."""
    return tuple(n + -n % 4 for n in sizes)


def launch(
    kernel: str, program: Callable[..., None], args: Sequence[jax.Array], *, rows: int, sizes: tuple[int, ...],
    room: int, config: t.Config, **how: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(what is chosen i32[rows, room], how many i32[rows]) by `choose`, or a program around it, over `args`."""
    outs = [jax.ShapeDtypeStruct((rows, room), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)]
    if not t.in_one_step(sum(sizes), config):
        outs.append(jax.ShapeDtypeStruct((rows, sum(sizes)), jnp.uint32))  # keys, where lists have no room
    chosen, found, *_ = c.kernel(
        functools.partial(program, sizes=sizes, room=room, config=config, **how),
        name=kernel,
        out_type=tuple(outs),
        scratch_types=[c.plgpu.SMEM((words,), jnp.uint32) for words in scratch(sum(sizes), config)],
        grid=(rows,),
        grid_names=("row",),
        cluster=(config.blocks,),
        cluster_names=("part",),
        num_threads=t.THREADS // 128,
    )(*args)
    return chosen, found


def scratch(U: int, config: t.Config) -> tuple[int, ...]:
    """The words of shared memory that a row of U units needs."""
    return SCRATCH if t.in_one_step(U, config) else (*SCRATCH, WARPS * (LIST + 1))


def ranked_at_once(blocks: int) -> int:
    """The size of a bin up to which ranking its elements is as fast as counting them again."""
    return min(LISTED, math.isqrt(50_000 * blocks))


class Ahead:
    """A thread's loads of scores in flight, as words of each head of each group of four."""

    def __init__(self) -> None:
        self.fours: list[list[list[Word]]] = []

    @property
    def words(self) -> list[Word]:
        return [x for four in self.fours for head in four for x in head]

    def become(self, words: Sequence[Word]) -> None:
        """The same, with these words: in a loop, those that it carries."""
        left = iter(words)
        self.fours = [[[next(left) for _ in head] for head in four] for four in self.fours]


def choose(
    *refs, sizes: tuple[int, ...], heads: int, sums: int, shared_by: Sequence[int], last: int, group_reduce: str,
    room: int, config: t.Config, most: Sequence[int] | None = None, unit: int = 1, half: bool = True,
    name: Callable[[Word, Word], Word] = lambda row, chosen: chosen,
) -> None:  # fmt: skip
    """The kernel's body, over heads' scores of each of `sizes`, with `sums` statistics of each head, if any. It begins
    with start and stop of each part's span, of which the second part's `last` do not count, nor what is not among the
    `most` first of each part, and how many units are wanted. Spans are of tokens, of which a unit has `unit`; it is in
    one if any of these is. Scores are in f16, or in f32 if not `half`. `name` is what is written of a unit."""
    U, S = sum(sizes), sizes[0]
    scratches = len(scratch(U, config))
    ends, arrays = list(zip(refs, shared_by, strict=False)), refs[len(shared_by) : -scratches]
    hist_m, small_m, logs_m, *lists_m = refs[-scratches:]
    sums_m, arrays = (arrays[0], arrays[1:]) if sums else (None, arrays)
    scores_m, (slots_m, found_m, *keys_m) = arrays[: len(sizes)], arrays[len(sizes) :]
    stride, unroll, steps = t.steps(U, config)
    whole = min(max(S // stride - (unroll - 1) * steps, 0), steps)  # steps that lie in the first part for all threads
    row = c.special("clusterid.x")
    most = most or sizes
    start, length = units_of(c.span_of(ends[0], ends[1], row, most[0] * unit), unit)
    wait_start, wait_length = word(0), word(0)
    if len(sizes) == 2:
        wait_start, wait_length = units_of(c.span_of(ends[2], ends[3], row, most[1] * unit, last), unit)
    wanted = c.clipped(c.number_of(ends[-1], row), room)
    size = 2 if half else 4
    scores = [c.offset_rows(c.global_address(m), row, heads * n * size) for m, n in zip(scores_m, sizes, strict=True)]
    slots, found = (c.offset_rows(c.global_address(m), row, n * 4) for m, n in ((slots_m, room), (found_m, 1)))
    hist, small = c.shared_address(hist_m), c.shared_address(small_m)
    lists, keys = None, None
    t.clear(hist)
    with when(c.special("tid.x").equals(0)):
        ptx("st.shared.u32 [$0], $1;", small + t.LENGTH * 4, 0)
    if steps > 1:
        lists, keys = c.shared_address(lists_m[0]), c.offset_rows(c.global_address(keys_m[0]), row, U * 4)
        t.clear(hist + t.PASS * 4)
    ahead = Ahead()
    depth = 3 if heads <= 4 and half else 0  # fours that registers hold; of more heads not one ahead
    load = functools.partial(load_heads, scores, sizes, heads, half=half)

    def load_ahead() -> None:
        if steps == 1 or depth:
            ahead.fours.append(load(t.fours(word(0), U, config)[0], S if whole else t.ends(U, config)[0]))

    logs = None
    if sums_m is not None:
        parts = c.offset_rows(c.global_address(sums_m), row, heads * sums * 8)
        pending = (scores[1], sizes[1], wait_start, wait_length) if len(sizes) == 2 else None
        logs = _logs(parts, sums, heads, pending, c.shared_address(logs_m), load_ahead, half)
    else:
        c.block_barrier()

    def four_keys(at: Word, end: int, loaded: list[list[Word]] | None = None) -> list[Word]:
        of_heads = loaded or load(at, end)
        if half:
            of_heads = [[x for two in words for x in numbers(two)] for words in of_heads]
        begin, size = start, length
        if end > S:
            stored = at < S
            begin, size = stored.choose(start, wait_start + S), stored.choose(length, wait_length)
        flags = [((at + j) - begin < size).choose(1, 0) for j in range(4)]
        return pooled.pooled_keys(flags, [[h[j] for h in of_heads] for j in range(4)], logs, group_reduce)

    def fours(i: Word, is_whole: bool = False, goes_on: bool = False) -> Iterator[list[Word]]:
        """Keys of the fours of step i. `goes_on`: the next one's first fours lie in the first part, and are loaded."""
        ends = [S] * unroll if is_whole else t.ends(U, config)
        places = list(zip(t.fours(i, U, config), ends, strict=True))
        then = [(at, S) for at in t.fours(i + 1, U, config)[: depth - 1]] if goes_on else []
        for u, (at, end) in enumerate(places):
            to_load = (place for place in [*places, *then][u + len(ahead.fours) : u + depth] if place[1] <= U)
            ahead.fours.extend(load(*place) for place in to_load)
            if ahead.fours or end <= U:
                yield four_keys(at, end, ahead.fours.pop(0) if ahead.fours else None)
            else:  # in which a warp may have nothing, as most have of the fifth four in a row of 131072 and a little
                yield c.choose_between(at < U, functools.partial(four_keys, at, end), [word(0)] * 4)

    def other_steps(visit: Callable[..., list[Word]], carry: list[Word]) -> list[Word]:
        """carry = visit(i, keys, *carry) of the steps after the first."""
        if goes_on:
            ahead.fours.extend(load(at, S) for at in t.fours(word(1), U, config)[: depth - 1])
        if whole > 1:
            n = len(ahead.words)

            def of_whole(i: Word, *words: Word) -> list[Word]:
                ahead.become(words[:n])
                carry = visit(i, fours(i, is_whole=True, goes_on=goes_on), *words[n:])
                return [*ahead.words, *carry]

            words = c.loop(1, whole, 1, [*ahead.words, *carry])(of_whole)
            ahead.become(words[:n])
            carry = words[n:]
        done = max(whole, 1)
        if done < steps:
            carry = visit(word(done), fours(word(done)), *carry)
        if done + 1 < steps:
            carry = c.loop(done + 1, steps, 1, carry)(lambda i, *carry: visit(i, fours(i), *carry))
        return carry

    goes_on = 0 < whole < steps and 1 < depth <= unroll
    bins = FIRST_BINS["score" if not sums else "log" if group_reduce == "max_softmax" else "sum"]
    first = fours(word(0), bool(whole))
    _take(
        first, other_steps, fours, wanted, slots, found, hist, small, lists, keys, name=functools.partial(name, row),
        bins=bins, U=U, room=room, config=config,
    )  # fmt: skip


def units_of(span: Sequence[Word], unit: int) -> list[Word]:
    """The first unit that has a token of a span, its first and how many, and how many units have one."""
    first, length = span
    if unit == 1:
        return [first, length]
    start = c.divide(first, unit)
    return [start, length.equals(0).choose(0, c.divide(first + length + (unit - 1), unit) - start)]


def _logs(
    parts: Any, n: int, heads: int, pending: Any, shared: Word, loads: Callable[[], Any], half: bool
) -> list[Word]:
    """For each head minus log2 of the sum of exp(score) over the units; 0 where there is none. `parts` is where the
    warps' statistics of the heads are, `n` of each; `pending` has scores in f16, or in f32 if not `half`. `loads` is
    what else to load meanwhile."""
    thread = c.special("tid.x")
    lane, warp = thread & 31, thread >> 5
    share = (t.THREADS // 32) // heads  # warps of a head
    part = c.divide(warp, heads)
    head = warp - part * heads
    index = (part < share).choose(part * 32 + lane, 1 << 30)
    stride = 32 * share
    parts = c.offset_rows(parts, head, n * 8)
    scores, size, start, length = pending or (None, 0, 0, 0)
    scores = c.offset_rows(scores, head, size * (2 if half else 4)) if size else None

    def statistics(first: Word, number: int) -> list[list[Word]]:
        load = (
            "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0xFF800000; mov.u32 $1, 0; "
            "@p ld.global.v2.u32 {$0, $1}, [$4]; }"
        )
        return [ptx(load, a, n, c.offset(parts, a * 8), results=2) for a in (first + j * stride for j in range(number))]

    def arrived(first: Word, number: int) -> list[Word]:
        at = [first + j * stride for j in range(number)]
        if not half:
            return [c.load_below(a - start, length, c.offset(scores, a * 4), pooled.NOTHING[0]) for a in at]
        load = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0xFC00; @p ld.global.u16 $0, [$3]; }"
        return [numbers(ptx(load, a - start, length, c.offset(scores, a * 2), results=1))[0] for a in at]

    # All that is loaded at first is on its way before any of it is waited for.
    turn = min(-(-n // stride), 8), min(-(-size // stride), 4)
    begun = statistics(index, turn[0])
    loads()
    late = arrived(index, turn[1])
    state = merge(begun)
    state = add(state, late) if size else state
    if n > turn[0] * stride:
        more = c.loop(index + turn[0] * stride, n, 8 * stride, state)
        state = more(lambda i, *state: merge([state, *statistics(i, 8)]))
    if size > turn[1] * stride:
        more = c.loop(index + turn[1] * stride, size, stride, state)
        state = more(lambda i, *state: add(state, arrived(i, 1)))
    state = pooled.merge_lanes(state)
    with when(lane.equals(0)):
        ptx("st.shared.v2.u32 [$0], {$1, $2};", shared + warp * 8, *state)
    c.block_barrier()
    logs = shared + 2 * 32 * 4
    with when(warp < heads):
        there = lane < share
        got = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", shared + (there.choose(lane, 0) * heads + warp) * 8, results=2)
        log = pooled.minus_log(
            pooled.merge_lanes([there.choose(x, y) for x, y in zip(got, pooled.NOTHING, strict=True)])
        )
        with when(lane.equals(0)):
            ptx("st.shared.u32 [$0], $1;", logs + warp * 4, log)
    c.block_barrier()
    return [ptx("ld.shared.u32 $0, [$1];", logs + h * 4, results=1) for h in range(heads)]


Pair = tuple[Word, Word]  # of an element the key, and the slot's rank: the lower slot the higher
Fours = Iterable[list[Word]]  # keys
Place = Callable[[Word, Word], list[Operand]]  # of a key and rank, the bin, and perhaps two numbers (`_count`)


class Elements(NamedTuple):
    """Some that a thread has."""

    pairs: Iterable[Pair]
    slot: Callable[[Word], Word]  # of the e-th


class Last(NamedTuple):
    """Of the last place. Keys low .. low + size are those of its bin, of which `need` of `many` are wanted; of those
    that equal `low`, slots count whose rank is at least `least`. `wanted` are there in all; of these the blocks before
    this one have `above` that are larger than the bin, and `beside` that are in it."""

    low: Word
    size: Word
    least: Word
    need: Word
    many: Word
    wanted: Word
    above: Word
    beside: Word


class _Here(NamedTuple):
    """What numbers a thread has, and its block; where the list's length and the list are."""

    thread: Word
    part: Word
    lane: Word
    warp: Word
    length: Word
    listed: Word


@dataclass(frozen=True)
class Bins:
    """The first: one for each 2^shift keys from `base` on. If there are two keys of a `gap`, those from one to the
    other are all in one bin, with the first beyond."""

    base: int
    shift: int
    gap: tuple[int, int] | None = None

    @property
    def skipped(self) -> int:
        return self.gap[1] - self.gap[0] if self.gap else 0

    def place(self, key: Word, _: Word) -> list[Operand]:
        """Those that are 0 count where nothing is read: a branch around each takes longer."""
        moved = key
        if self.gap:
            above = instr("max.u32", key - self.skipped, self.gap[0])
            moved = (key < 1 << 31).choose(instr("min.u32", key, self.gap[0]), above)
        place = (instr("max.u32", moved, self.base) - self.base) >> self.shift
        return [key.equals(0).choose(t.BINS, instr("min.u32", place, t.BINS - 1))]

    def extent(self, place: Word) -> tuple[Word, Word, Flag]:
        """Of a bin the lowest key, how many follow it, and whether these are more than usual."""
        most = (1 << self.shift) - 1
        last = self.base + ((t.BINS - 1) << self.shift) + self.skipped
        wide = {0: (1, self.base + most - 1), t.BINS - 1: (last, 0xFFFFFFFF - last)}
        low, size = (place << self.shift) + self.base, word(most)
        if self.gap:
            middle = (self.gap[0] - self.base) >> self.shift
            wide[middle] = self.gap[0], self.skipped + most
            low = low + (place > middle).choose(self.skipped, 0)
        for which, (first, more) in wide.items():
            low, size = (place.equals(which).choose(x, y) for x, y in ((first, low), (more, size)))
        return low, size, functools.reduce(lambda a, b: a | b, [place.equals(which) for which in wide])


# 32 to an octave from 2^-61 to 2^3 for sums of softmaxes, 256 to an octave from -2^8 to -1 for logarithms of softmaxes,
# and for scores 128 to an octave from -2^5 to -2^-3 and from 2^-3 to 2^5.
FIRST_BINS = {
    "sum": Bins(0xA1000000, 18),
    "log": Bins(0x3C7FFFFF, 15),
    "score": Bins(0x3E000000, 16, (0x42000000, 0xBE000000)),
}


def _take(
    first: Fours, others: Callable[..., list[Word]], again: Callable[[Word], Fours], wanted: Word, slots: Any,
    found: Any, hist: Word, small: Word, lists: Word | None, kept: Any, *, name: Callable[[Word], Word],
    bins: Bins, U: int, room: int, config: t.Config,
) -> None:  # fmt: skip
    """Writes to `slots` the names of the `wanted` largest keys that are not 0, and to `found` how many these are.

    `first` are the keys of the first step, `others` visits those of the others, `again(i)` gives those of any step once
    more. If registers do not have the row, candidates go to `lists`, and keys of which there are too many to `kept`.
    """
    thread, part = c.special("tid.x"), c.special("cluster_ctarank")
    here = _Here(thread, part, thread & 31, thread >> 5, small + t.LENGTH * 4, hist + 3 * t.PASS * 4)
    row: _Held | _Listed
    if lists is None:
        row = _Held(_elements(word(0), first, U, config))
    else:
        at_first = _Once(first)
        bound = wanted.equals(0).choose(0xFFFFFFFF, _bound(at_first, wanted, hist, bins, U, config))
        row = _Listed(at_first, others, again, _Lists(lists, bound), kept, U, config)
    last = _last_place(row, wanted, hist, bins, config.blocks)
    _write(row, last, here, slots, found, small, name, room, config)


def _elements(i: Word, fours: Fours, U: int, config: t.Config) -> Elements:
    """Those of step i, of which `fours` are the keys."""
    starts, (stride, _, steps) = t.fours(i, U, config), t.steps(U, config)
    pairs = (
        (key, word(t.SLOTS) - (at + j)) for at, four in zip(starts, fours, strict=True) for j, key in enumerate(four)
    )
    return Elements(pairs, lambda e: starts[0] + (e >> 2) * (stride * steps) + (e & 3))


def _by_bits(low: Word, size: Word, by: Operand) -> Place:
    """Of keys low .. low + size, from bit `by` on."""
    return lambda key, _: [(key - low) >> by, key - low, size]


def _count(bins: Word, elements: Elements, place: Place) -> None:
    """`place` gives a bin, and perhaps two numbers, of which the first is not the larger if the element counts."""
    for element in elements.pairs:
        digit, *limits = place(*element)
        red = "red.shared.add.u32 [$0], 1;"
        if limits:
            red = "{ .reg .pred p; setp.le.u32 p, $1, $2; @p " + red + " }"
        ptx(red, bins + digit * 4, *limits)


def _bound(sample: Fours, wanted: Word, hist: Word, bins: Bins, U: int, config: t.Config) -> Word:
    """A key, or the lowest one of a bin, than which at least as many of a sample are not lower as are wanted."""
    at = hist + t.PASS * 4
    _count(at, _elements(word(0), sample, U, config), bins.place)
    got = t.find_bin(at, wanted, config.blocks, of_earlier=False)
    low, size, is_wide = bins.extent(got.bin)

    def within() -> list[Word]:
        """In a bin that has most of the range, which is counted again."""
        low_now, size_now, need = low, size, got.need
        for turn, by in ((2, 21), (1, 10)):
            at = hist + turn * t.PASS * 4
            t.clear(at)
            c.block_barrier()
            _count(at, _elements(word(0), sample, U, config), _by_bits(low_now, size_now, by))
            finer = t.find_bin(at, need, config.blocks, of_earlier=False)
            low_now, size_now, need = low_now + (finer.bin << by), word((1 << by) - 1), finer.need
        return [low_now]

    (bound,) = c.choose_between(is_wide, within, [low])
    return (got.wanted < wanted).choose(1, bound)


def _last_place(row: _Held | _Listed, wanted: Word, hist: Word, bins: Bins, blocks: int) -> Last:
    def count(n: int, place: Place, wanted: Word) -> t.Found:
        """Histograms take turns: of one that is cleared all blocks had what they needed before the last pass."""
        at = hist + TURNS[n] * t.PASS * 4
        if n:
            t.clear(at)
            c.block_barrier()
        row.each(lambda elements: _count(at, elements, place))
        return t.find_bin(at, wanted, blocks)

    place, need, many, wanted, above, beside = count(0, bins.place, wanted)
    low, size, is_wide = bins.extent(place)
    further = is_wide.choose(21, bins.shift - 11)  # where the next bits to count begin
    state = [low, size, further, word(0), need, many, above, beside]

    def by_key(n: int, low: Word, size: Word, shift: Word, _: Word, need: Word, *of_blocks: Word) -> list[Word]:
        got = count(n, _by_bits(low, size, shift), need)
        further = (shift > 11).choose(shift - 11, 0)
        low, size = low + (got.bin << shift), (word(1) << shift) - 1
        return [low, size, further, word(0), got.need, got.many, of_blocks[1] + got.above, got.beside]

    def by_slot(low: Word, size: Word, shift: Word, least: Word, need: Word, *of_blocks: Word) -> list[Word]:
        above = of_blocks[1]
        for n, by in ((KEY_PASSES, 11), (KEY_PASSES + 1, 0)):

            def place(key: Word, rank: Word, by: int = by, least: Word = least) -> list[Operand]:
                digit = (rank - least) >> by
                return [digit, key.equals(low).choose(digit, t.BINS), t.BINS - 1]

            got = count(n, place, need)
            least, need, above = least + (got.bin << by), got.need, above + got.above
        return [low, size, shift, least, need, got.many, above, got.beside]

    def is_long(state: list[Word]) -> Flag:
        return state[5] > ranked_at_once(blocks)

    def narrowed() -> list[Word]:
        found = state
        for n in range(1, KEY_PASSES):
            found = c.choose_between(is_long(found) & found[1].differs(0), functools.partial(by_key, n, *found), found)
        return c.choose_between(is_long(found), functools.partial(by_slot, *found), found)

    state = c.choose_between(is_long(state), narrowed, state)  # one branch past all of it: far ones take long
    low, size, _, least, need, many, above, beside = state
    return Last(low, size, least, need, many, wanted, above, beside)


def _write(
    row: _Held | _Listed, last: Last, here: _Here, slots: Any, found: Any, small: Word, name: Callable[[Word], Word],
    room: int, config: t.Config,
) -> None:  # fmt: skip
    """Taken are keys beyond the bin's; if slots were counted, also those that equal `low` of a higher rank than the one
    that is left. What the bin has comes into the list that each block gets, [many] of rank and key."""
    blocks, (thread, part, lane, warp, length, listed) = config.blocks, here
    wanted, need, is_held = last.wanted, last.need, isinstance(row, _Held)
    by_rank, none = last.least.differs(0), wanted.equals(0)
    low, high = none.choose(0xFFFFFFFF, last.low), none.choose(0xFFFFFFFF, last.low + last.size)
    many = none.choose(0, last.many)

    def bits(conditions: str, elements: Iterable[Pair], *limits: Word) -> Word:
        found = word(0)
        for e, element in enumerate(elements):
            mark = f"{{ .reg .pred p; {conditions} mov.b32 $0, $1; @p or.b32 $0, $0, $2; }}"
            found = ptx(mark, found, 1 << e, *element, *limits, results=1)
        return found

    def marks(elements: list[Pair]) -> list[Word]:
        """Bits of the elements taken, and of those that the list has."""
        taken = bits("setp.gt.u32 p, $3, $5;", elements, high)
        level = bits("setp.ge.u32 p, $3, $5;", elements, low)

        def of_rank() -> list[Word]:
            higher, rank = "setp.eq.u32 p, $3, $5; setp.g{}.and.u32 p, $4, $6, p;", (elements, low, last.least)
            return [taken | bits(higher.format("t"), *rank), taken | bits(higher.format("e"), *rank)]

        taken, level = c.choose_between(by_rank, of_rank, [taken, level])
        return [taken, none.choose(0, level & (taken ^ 0xFFFFFFFF))]

    def number(flags: Word) -> Word:
        return instr("popc.b32", flags)

    def numbered(flags: Word, visit: Callable[[Word, Word], None]) -> None:
        """visit(i, e) of the i-th bit that is 1, which is bit e."""

        @c.loop(0, number(flags), 1, [flags])
        def _each(i: Word, flags: Word) -> Word:
            visit(i, word(31) - instr("clz.b32", flags & (word(0) - flags)))
            return flags & (flags - 1)

    def collect(elements: Elements, before: Word) -> list[Word]:
        pairs = list(elements.pairs)
        taken, level = marks(pairs)
        with when(level.differs(0)):
            at = last.beside + ptx("atom.shared.add.u32 $0, [$1], $2;", length, number(level), results=1)

            def share(i: Word, e: Word) -> None:
                key, rank = pairs[0]
                for j, other in enumerate(pairs[1:], 1):
                    key, rank = (e.equals(j).choose(x, y) for x, y in zip(other, (key, rank), strict=True))
                for block in range(blocks):
                    to = c.remote(listed + (at + i) * 8, block)
                    ptx("st.shared::cluster.v2.u32 [$0], {$1, $2};", to, rank, key)

            numbered(level, share)
        return [taken if is_held else before + number(taken)]

    (mine_taken,) = row.each(collect, [word(0)])
    c.cluster_arrive()

    def write(elements: Elements, at: Word) -> list[Word]:
        taken = mine_taken if is_held else marks(list(elements.pairs))[0]

        def store(i: Word, e: Word) -> None:
            ptx("st.global.u32 [$0], $1;", c.offset(slots, (at + i) * 4), name(elements.slot(e)))

        numbered(taken, store)
        return [at + number(taken)]

    row.each(write, [last.above + t.earlier(number(mine_taken) if is_held else mine_taken, small)])
    with when(thread.equals(0) & part.equals(0)):
        ptx("st.global.u32 [$0], $1;", found, wanted)
    c.loop(wanted + part * t.THREADS + thread, room, t.THREADS * blocks)(
        lambda i: ptx("st.global.u32 [$0], $1;", c.offset(slots, i * 4), 0)
    )
    c.cluster_wait()

    @c.loop(part * 32 + warp, many, 32 * blocks)
    def _from_list(i: Word) -> None:
        """Counts the larger elements of the list for element i, one warp an element."""

        @c.loop(lane, many, 32, [word(0)])
        def larger(j: Word, n: Word) -> Word:
            compare = (
                "{ .reg .u64 x, y; .reg .pred p; ld.shared.u64 x, [$1]; ld.shared.u64 y, [$2]; "
                "setp.gt.u64 p, x, y; selp.u32 $0, 1, 0, p; }"
            )
            return n + ptx(compare, listed + j * 8, listed + i * 8, results=1)

        place = c.warp_sum(larger[0])
        with when(lane.equals(0) & (place < need)):
            rank = ptx("ld.shared.u32 $0, [$1];", listed + i * 8, results=1)
            ptx("st.global.u32 [$0], $1;", c.offset(slots, (wanted - need + place) * 4), name(word(t.SLOTS) - rank))


class _Held:
    """A row whose keys stay in registers."""

    def __init__(self, elements: Elements):
        self.elements = elements._replace(pairs=_Once(elements.pairs))

    def each(self, visit: Callable[..., Any], carry: Sequence[Word] = ()) -> list[Word]:
        """carry = visit(elements, *carry)."""
        return visit(self.elements, *carry) or []


class _Listed:
    """A row whose candidates are in lists, or, if a list overflows, whose keys are in device memory at `kept`."""

    def __init__(
        self, first: Fours, others: Callable[..., list[Word]], again: Callable[[Word], Fours], lists: _Lists,
        kept: Any, U: int, config: t.Config,
    ):  # fmt: skip
        self.lists, self.kept, self.U, self.config, self.steps = lists, kept, U, config, t.steps(U, config)[2]

        def list_step(i: Word, fours: Fours, number: Word) -> list[Word]:
            for at, four in zip(t.fours(i, U, config), fours, strict=True):
                number = lists.add(at, four, number)
            return [number]

        (number,) = others(list_step, list_step(word(0), first, word(0)))
        self.number, self.too_many = lists.ends(number)
        with when(self.too_many):

            @c.loop(0, self.steps, 1)
            def _keep(i: Word) -> None:
                for at, four in zip(t.fours(i, U, config), again(i), strict=True):
                    with when(at < U):
                        ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", c.offset(kept, at * 4), *four)

    def each(self, visit: Callable[..., Any], carry: Sequence[Word] = ()) -> list[Word]:
        """carry = visit(elements, *carry), of some at a time."""

        def of_list(first: Word, *carry: Word) -> Any:
            return visit(self.lists.elements(first, self.number), *carry)

        def of_row(i: Word, *carry: Word) -> Any:
            fours = (t.load_four(self.kept, at, self.U) for at in t.fours(i, self.U, self.config))
            return visit(_elements(i, fours, self.U, self.config), *carry)

        carry = c.loop(0, self.number, 32, carry)(of_list)
        return c.choose_between(self.too_many, lambda: c.loop(0, self.steps, 1, carry)(of_row), carry)


class _Once:
    """The items of an iterator, made on first use and kept."""

    def __init__(self, made: Iterable[Any]):
        self.made = iter(made)
        self.held: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from self.held
        for x in self.made:
            self.held.append(x)
            yield x


class _Lists:
    """Lists that the warps have in shared memory, of fours of a row's elements of which a key is not below a bound."""

    def __init__(self, lists: Word, bound: Word):
        thread = c.special("tid.x")
        self.lane, self.warp, self.bound = thread & 31, thread >> 5, bound
        self.keys = lists + self.warp * (4 * LIST)
        self.starts, self.numbers = self.keys + 16 * FOURS, lists + WARPS * (4 * LIST)

    def add(self, at: Word, four: Sequence[Word], number: Word) -> Word:
        """How many there are with the fours at .. at + 3 of this warp's lanes, where `number` were before."""
        counts = functools.reduce(lambda a, b: instr("max.u32", a, b), four) >= self.bound
        lanes = c.ballot(counts)
        place = number + instr("popc.b32", lanes & ((word(1) << self.lane) - 1))
        with when(counts & (place < FOURS)):
            ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", self.keys + place * 16, *four)
            ptx("st.shared.u32 [$0], $1;", self.starts + place * 4, at)
        return number + instr("popc.b32", lanes)

    def ends(self, number: Word) -> tuple[Word, Flag]:
        """How many this warp has; and whether one of the block has more than there is room for: then none has any."""
        with when(self.lane.equals(0)):
            ptx("st.shared.u32 [$0], $1;", self.numbers + self.warp * 4, number)
        c.block_barrier()
        of_warps = ptx("ld.shared.u32 $0, [$1];", self.numbers + self.lane * 4, results=1)
        too_many = c.ballot(of_warps > FOURS).differs(0)
        return too_many.choose(0, number), too_many

    def elements(self, first: Word, number: Word) -> Elements:
        """Of this lane's four of the fours from `first` on."""
        i = first + self.lane
        there = i < number
        i = there.choose(i, 0)
        four = ptx("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", self.keys + i * 16, results=4)
        at = ptx("ld.shared.u32 $0, [$1];", self.starts + i * 4, results=1)
        pairs = [(there.choose(key, 0), word(t.SLOTS) - (at + j)) for j, key in enumerate(four)]
        return Elements(pairs, lambda e: at + e)
