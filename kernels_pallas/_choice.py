"""The choice of `pick_1bit`: from scores and their statistics to slots, by a cluster of blocks a row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import top_k as t
from kvjax.kernels_pallas import top_k_pooled as pooled
from kvjax.kernels_pallas._common import Flag, Word, instr, ptx, real, when, word

HEADS = pooled.HEADS
LOG2_E = 1 / math.log(2)
PASSES = 6  # over the keys at most: 11 bits of 32, and of the slot's 22, after the first
SHIFT = 15  # of a key's bits, between the first bins
FIRST_KEY = {True: 0x3C7FFFFF, False: 0xBE000000}  # the keys of -2^8, for logarithms, and of 2^-3, for scores
SCRATCH = PASSES * t.BINS, 64, 2 * 32 + HEADS  # words of bins, of what `top_k` calls small, of sums by warp and of all


def spans_of(spans_m: Any, row: Word) -> list[Word]:
    """First slot and size of the span, the same of what waits, and how many are wanted, of a row of the batch."""
    at = c.offset_rows(c.global_address(spans_m), row, 5 * 4)
    return [ptx(f"ld.global.nc.u32 $0, [$1+{4 * i}];", at, results=1) for i in range(5)]


def _finite(x: Word) -> Flag:
    return (x & 0x7FFFFFFF) < 0x7F800000


def add(state: Sequence[Word], scores: Sequence[Word]) -> list[Word]:
    """Largest score (base 2), and the sum of 2^(score - largest), with some natural scores; of infinite ones the sum is
    that of 2^score, which is 0 or infinite too."""
    before, total = state
    top = functools.reduce(lambda a, b: instr("max.f32", a, b), scores)
    peak = instr("max.f32", before, instr("mul.f32", top, real(LOG2_E)))
    shift = _finite(peak).choose(peak ^ (1 << 31), 0)
    keep = instr("ex2.approx.ftz.f32", instr("add.f32", before, shift))
    powers = [instr("ex2.approx.ftz.f32", instr("fma.rn.f32", x, real(LOG2_E), shift)) for x in scores]
    added = functools.reduce(lambda a, b: instr("add.f32", a, b), powers)
    return [peak, instr("fma.rn.f32", total, keep, added)]


def merge(states: Sequence[Sequence[Word]]) -> list[Word]:
    """Largest score and sum of some."""
    peak = functools.reduce(lambda a, b: instr("max.f32", a, b), [top for top, _ in states])
    shift, total = _finite(peak).choose(peak, 0), word(0)
    for top, part in states:
        total = instr("fma.rn.f32", part, instr("ex2.approx.ftz.f32", instr("sub.f32", top, shift)), total)
    return [peak, total]


def choose(
    spans_m, *refs, sizes: tuple[int, ...], heads: int, sums: int, shared_by: int, pool: str, room: int,
    config: t.Config,
) -> None:  # fmt: skip
    """The kernel's body, over heads' scores of each of `sizes`, with `sums` statistics of each head, if any."""
    *arrays, hist_m, small_m, logs_m = refs
    sums_m, arrays = (arrays[0], arrays[1:]) if sums else (None, arrays)
    scores_m, (slots_m, found_m, *keys_m) = arrays[: len(sizes)], arrays[len(sizes) :]
    U, S = sum(sizes), sizes[0]
    row = c.special("clusterid.x")
    start, length, wait_start, wait_length, wanted = spans_of(spans_m, c.divide(row, shared_by))
    scores = [c.offset_rows(c.global_address(m), row, heads * n * 4) for m, n in zip(scores_m, sizes, strict=True)]
    slots, found = (c.offset_rows(c.global_address(m), row, n * 4) for m, n in ((slots_m, room), (found_m, 1)))
    keys = c.offset_rows(c.global_address(keys_m[0]), row, U * 4) if keys_m else None
    logs = None
    if sums_m is not None:
        parts = c.offset_rows(c.global_address(sums_m), row, heads * sums * 8)
        waiting = (scores[1], sizes[1], wait_start, wait_length) if len(sizes) == 2 else None
        logs = _logs(parts, sums, heads, waiting, c.shared_address(logs_m))

    def four_keys(at: Word) -> list[Word]:
        of_heads = pooled.load_heads(scores, sizes, heads, at)
        stored = at < S
        begin, size = stored.choose(start, wait_start + S), stored.choose(length, wait_length)
        flags = [((at + j) - begin < size).choose(1, 0) for j in range(4)]
        return [pooled.pooled_key(flags[j], [h[j] for h in of_heads], logs, pool) for j in range(4)]

    def first(i: Word) -> list[list[Word]]:
        fours = []
        stride, _, steps = t.steps(U, config)
        for u, at in enumerate(t.fours(i, U, config)):
            if steps > 1 or (u + 1) * stride <= U:
                fours.append(four_keys(at))
            else:  # in which a warp may have nothing, as most have of the fifth four in a row of 131072 and a little
                fours.append(c.choose_between(at < U, functools.partial(four_keys, at), [word(0)] * 4))
            if keys is not None:
                with when(at < U):
                    ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", c.offset(keys, at * 4), *fours[-1])
        return fours

    def again(i: Word) -> list[list[Word]]:
        return [t.load_four(keys, at, U) for at in t.fours(i, U, config)]

    shared = c.shared_address(hist_m), c.shared_address(small_m)
    _take(first, again, wanted, slots, found, *shared, base=FIRST_KEY[bool(sums)], U=U, room=room, config=config)


def _logs(parts: Any, n: int, heads: int, waiting: Any, shared: Word) -> list[Word]:
    """For each head minus log2 of the sum of exp(score) over the units; 0 where there is none. `parts` is where the
    warps' statistics of the heads are, `n` of each."""
    thread = c.special("tid.x")
    lane, warp = thread & 31, thread >> 5
    share = (t.THREADS // 32) // heads  # warps of a head
    part = c.divide(warp, heads)
    head = warp - part * heads
    index = (part < share).choose(part * 32 + lane, 1 << 30)
    stride = 32 * share
    nothing = [real(-math.inf), word(0)]
    mine = c.offset_rows(parts, head, n * 8)

    @c.loop(index, n, 4 * stride, nothing)
    def state(i: Word, *state: Word) -> list[Word]:
        load = (
            "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0xFF800000; mov.u32 $1, 0; "
            "@p ld.global.v2.u32 {$0, $1}, [$4]; }"
        )
        at = [i + j * stride for j in range(4)]
        return merge([state, *(ptx(load, a, n, c.offset(mine, a * 8), results=2) for a in at)])

    if waiting is not None:
        scores, size, start, length = waiting
        scores = c.offset_rows(scores, head, size * 4)

        @c.loop(index, size, stride, state)
        def state(i: Word, *state: Word) -> list[Word]:
            x = ptx("ld.global.u32 $0, [$1];", c.offset(scores, i * 4), results=1)
            return add(state, [((i - start) < length).choose(x, real(-math.inf))])

    def over_lanes(state: list[Word]) -> list[Word]:
        for gap in (1, 2, 4, 8, 16):
            state = merge([state, [c.bfly(x, gap) for x in state]])
        return state

    state = over_lanes(state)
    with when(lane.equals(0)):
        ptx("st.shared.v2.u32 [$0], {$1, $2};", shared + warp * 8, *state)
    c.block_barrier()
    logs = shared + 2 * 32 * 4
    with when(warp < heads):
        there = lane < share
        got = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", shared + (there.choose(lane, 0) * heads + warp) * 8, results=2)
        peak, total = over_lanes([there.choose(x, none) for x, none in zip(got, nothing, strict=True)])
        log = instr("add.f32", _finite(peak).choose(peak, 0), instr("lg2.approx.f32", total))
        with when(lane.equals(0)):
            empty = log.equals(real(-math.inf))
            ptx("st.shared.u32 [$0], $1;", logs + warp * 4, empty.choose(0, log ^ (1 << 31)))
    c.block_barrier()
    return [ptx("ld.shared.u32 $0, [$1];", logs + h * 4, results=1) for h in range(heads)]


def _take(
    first: t.Fetch, again: t.Fetch, wanted: Word, slots: Any, found: Any, hist: Word, small: Word,
    *, base: int, U: int, room: int, config: t.Config,
) -> None:  # fmt: skip
    """Writes to `slots` those of the `wanted` largest keys that are not 0, and to `found` how many these are.

    `first(i)` gives the keys of `t.fours(i, U, config)` the first time that they are looked at, `again(i)` after it.
    """
    thread, part, blocks = c.special("tid.x"), c.special("cluster_ctarank"), config.blocks
    Elements = list[tuple[Word, Word]]

    def elements(fetch: t.Fetch, i: Word) -> Elements:
        """Keys, and slots' ranks: the lower slot the higher."""
        places = zip(t.fours(i, U, config), fetch(i), strict=True)
        return [(key, word(t.SLOTS) - (at + j)) for at, four in places for j, key in enumerate(four)]

    held = elements(first, word(0)) if t.in_one_step(U, config) else None

    def each(fetch: t.Fetch, visit: Callable[..., Any], carry: Sequence[Word] = ()) -> list[Word]:
        if held is not None:
            return visit(held, *carry)
        return c.loop(0, t.steps(U, config)[2], 1, carry)(lambda i, *carry: visit(elements(fetch, i), *carry))

    @c.loop(thread, PASSES * t.BINS // 4, t.THREADS)
    def _clear(i: Word) -> None:
        ptx("st.shared.v4.u32 [$0], {$1, $1, $1, $1};", hist + i * 16, 0)

    with when(thread.equals(0)):
        for at in (t.DIGIT, t.NEED, t.COUNT):
            ptx("st.shared.u32 [$0], $1;", small + at * 4, 0)
    c.block_barrier()

    def count(n: int, fetch: t.Fetch, bin_of: Callable[[Word, Word], tuple[Flag, Word]], need: Word) -> list[Word]:
        """The bin of the `need`-th, which of it that is, and how many it has; zeros if there are not so many."""
        bins = hist + n * t.BINS * 4

        def visit(elements: Elements) -> None:
            for element in elements:
                there, digit = bin_of(*element)
                with when(there):
                    ptx("red.shared.add.u32 [$0], 1;", bins + digit * 4)

        each(fetch, visit)
        return t.find_bin(bins, need, small, thread, blocks)

    def octaves(key: Word, _: Word) -> tuple[Flag, Word]:
        place = ((key > base).choose(key, base) - base) >> SHIFT
        return key.differs(0), (place < t.BINS - 1).choose(place, t.BINS - 1)

    # Keys low .. low + size are those of the bin, the next bits to count begin at `shift`; of those that equal `low`,
    # slots count whose rank is at least `rank`. `need` of the bin's `many` are wanted.
    place, need, many = count(0, first, octaves, wanted)
    low, size, shift = (place << SHIFT) + base, word((1 << SHIFT) - 1), word(SHIFT - 11)
    for end, of_low, of_size in (
        (0, 1, base + (1 << SHIFT) - 2),
        (t.BINS - 1, base + ((t.BINS - 1) << SHIFT), (1 << 32) - 1 - base - ((t.BINS - 1) << SHIFT)),
    ):
        at_end = place.equals(end)
        low, size, shift = (at_end.choose(a, b) for a, b in ((of_low, low), (of_size, size), (21, shift)))
    fewer = need.equals(0)  # all there are, or none
    low = fewer.choose(wanted.equals(0).choose(0xFFFFFFFF, 1), low)
    state = [low, size, shift, word(0), need, many]

    def by_key(n: int, low: Word, size: Word, shift: Word, rank: Word, need: Word, _: Word) -> list[Word]:
        digit, need, many = count(n, again, lambda key, _: (key - low <= size, (key - low) >> shift), need)
        further = (shift > 11).choose(shift - 11, 0)
        return [low + (digit << shift), (word(1) << shift) - 1, further, rank, need, many]

    def by_slot(n: int, low: Word, size: Word, shift: Word, rank: Word, need: Word, _: Word) -> list[Word]:
        by = 11 if n == PASSES - 2 else 0

        def bin_of(key: Word, mine: Word) -> tuple[Flag, Word]:
            digit = (mine - rank) >> by
            return key.equals(low) & (digit < t.BINS), digit

        digit, need, many = count(n, again, bin_of, need)
        return [low, size, shift, rank + (digit << by), need, many]

    for n in range(1, PASSES):
        *_, need, many = state
        slot_pass = n >= PASSES - 2
        more = many > need if slot_pass else (many > need) & state[1].differs(0)
        state = c.choose_between(more, functools.partial(by_slot if slot_pass else by_key, n, *state), state)
    low, _, _, least, *_ = state

    def taken(key: Word, rank: Word) -> Flag:
        return (key > low) | (key.equals(low) & (rank >= least))

    def number(elements: Elements, n: Word) -> list[Word]:
        return [functools.reduce(lambda a, b: a + b, [taken(*x).choose(1, 0) for x in elements], n)]

    (mine,) = each(again, number, [word(0)])
    after = t.later(mine, small, thread)
    with when(thread.equals(0)):
        ptx("st.shared.u32 [$0], $1;", small + t.LENGTH * 4, after + mine)
    c.cluster_barrier()
    total = word(0)
    for block in range(blocks):
        theirs = ptx("ld.shared::cluster.u32 $0, [$1];", c.remote(small + t.LENGTH * 4, block), results=1)
        after, total = after + (part < block).choose(theirs, 0), total + theirs
    c.cluster_barrier()  # a block may end once its number has been read

    def write(elements: Elements, at: Word) -> list[Word]:
        for key, rank in elements:
            flag = taken(key, rank)
            with when(flag):
                ptx("st.global.u32 [$0], $1;", c.offset(slots, at * 4), word(t.SLOTS) - rank)
            at = at + flag.choose(1, 0)
        return [at]

    each(again, write, [after])
    with when(thread.equals(0) & part.equals(0)):
        ptx("st.global.u32 [$0], $1;", found, total)
    c.loop(total + part * t.THREADS + thread, room, t.THREADS * blocks)(
        lambda i: ptx("st.global.u32 [$0], $1;", c.offset(slots, i * 4), 0)
    )
