"""Selection of a row's units by a cluster of blocks, for the kernels that score and select: from scores to slots.

(1) The heads' log-sum-exp is merged from statistics of the scoring warps. (2) Threads load scores, turn them into keys
and count the keys; registers hold up to 163840 with 8 blocks. (3) `threshold` finds the last place. (4) `compact`
writes the slots. A longer row is read in steps: the first bounds the last place, and warps list the elements above.

**Bytes:** 2 or 4 G read a unit, 4 written a place. **Bound:** latency. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import compact, elements, histogram, logsum, tiling
from kvjax.kernels_pallas.select.compact import write_slots
from kvjax.kernels_pallas.select.elements import LIST, WARPS, Fours, InLists, InRegisters, Lists, elements_of
from kvjax.kernels_pallas.select.keys import HEADS, load_heads, reduced_keys
from kvjax.kernels_pallas.select.logsum import NOTHING
from kvjax.kernels_pallas.select.sort import LENGTH
from kvjax.kernels_pallas.select.threshold import FIRST_BINS, LISTED, Bins, last_place, lower_bound
from kvjax.kernels_pallas.simt import (
    Word,
    ptx,
    when,
    word,
)

HEADS = HEADS
# Words of bins and lists, of sums by warp with the array that `top_k` calls small, and of heads by warp and of all.
SCRATCH = 3 * histogram.PASS + 2 * LISTED, 64, 2 * 32 + HEADS


def padded(*sizes: int) -> tuple[int, ...]:
    """Sizes rounded up to multiples of four, the units that a thread loads at once."""
    return tuple(n + -n % 4 for n in sizes)


def launch(
    kernel: str, program: Callable[..., None], args: Sequence[jax.Array], *, rows: int, sizes: tuple[int, ...],
    room: int, config: tiling.Config, **how: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(units i32[rows, room], count i32[rows]) selected by `select_units`, or a program around it, from `args`."""
    outs = [jax.ShapeDtypeStruct((rows, room), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)]
    if not tiling.in_one_step(sum(sizes), config):
        outs.append(jax.ShapeDtypeStruct((rows, sum(sizes)), jnp.uint32))  # keys, where lists have no room
    units, found, *_ = simt.kernel(
        functools.partial(program, sizes=sizes, room=room, config=config, **how),
        name=kernel,
        out_type=tuple(outs),
        scratch=scratch(sum(sizes), config),
        sparse=(2,)[: len(outs) - 2],
        blocks=rows,
        cluster=config.blocks,
        warpgroups=tiling.THREADS // 128,
    )(*args)
    return units, found


def scratch(U: int, config: tiling.Config) -> tuple[int, ...]:
    """The words of shared memory that a row of U units needs."""
    return SCRATCH if tiling.in_one_step(U, config) else (*SCRATCH, WARPS * (LIST + 1))


class Loads:
    """A thread's loads of scores in flight, as words of each head of each group of four."""

    def __init__(self) -> None:
        self.fours: list[list[list[Word]]] = []

    @property
    def words(self) -> list[Word]:
        return [x for four in self.fours for head in four for x in head]

    def become(self, words: Sequence[Word]) -> None:
        """Replaces the words, in a loop by those that it carries."""
        left = iter(words)
        self.fours = [[[next(left) for _ in head] for head in four] for four in self.fours]


def select_units(
    *refs, sizes: tuple[int, ...], heads: int, sums: int, shared_by: Sequence[int], local: int, group_reduce: str,
    room: int, config: tiling.Config, limits: Sequence[int] | None = None, unit: int = 1, half: bool = True,
    name: Callable[[Word, Word], Word] = lambda row, unit: unit,
) -> None:  # fmt: skip
    """The kernel's body, over scores of `heads` heads in parts of `sizes` units, with `sums` statistics per head.

    `refs` begin with start and stop of each part's span, and the number of units wanted. Units past the first `limits`
    of a part do not count, nor the last `local` tokens of the second span. Spans are in tokens; a unit has `unit` of
    them, and counts if any of them does. Scores are in f16, or in f32 if not `half`. `name` gives the word to write for
    a unit."""
    U, S = sum(sizes), sizes[0]
    scratches = len(scratch(U, config))
    ends, arrays = list(zip(refs, shared_by, strict=False)), refs[len(shared_by) : -scratches]
    hist_m, small_m, logs_m, *lists_m = refs[-scratches:]
    sums_m, arrays = (arrays[0], arrays[1:]) if sums else (None, arrays)
    scores_m, (slots_m, found_m, *keys_m) = arrays[: len(sizes)], arrays[len(sizes) :]
    stride, unroll, steps = tiling.steps(U, config)
    whole = min(max(S // stride - (unroll - 1) * steps, 0), steps)  # steps that are in the first part for all threads
    row = simt.special("clusterid.x")
    limits = limits or sizes
    start, length = units_of(simt.span_of(ends[0], ends[1], row, limits[0] * unit), unit)
    wait_start, wait_length = word(0), word(0)
    if len(sizes) == 2:
        wait_start, wait_length = units_of(simt.span_of(ends[2], ends[3], row, limits[1] * unit, local), unit)
    wanted = simt.clipped(simt.number_of(ends[-1], row), room)
    size = 2 if half else 4
    scores = [
        simt.offset_rows(simt.global_address(m), row, heads * n * size) for m, n in zip(scores_m, sizes, strict=True)
    ]
    slots, found = (simt.offset_rows(simt.global_address(m), row, n * 4) for m, n in ((slots_m, room), (found_m, 1)))
    hist, small = simt.shared_address(hist_m), simt.shared_address(small_m)
    lists, keys = None, None
    histogram.clear(hist)
    with when(simt.special("tid.x").equals(0)):
        simt.store_shared(small + LENGTH * 4, 0)
    if steps > 1:
        lists, keys = simt.shared_address(lists_m[0]), simt.offset_rows(simt.global_address(keys_m[0]), row, U * 4)
        histogram.clear(hist + histogram.PASS * 4)
    ahead = Loads()
    depth = 3 if heads <= 4 and half else 0  # fours that registers hold; with more heads, none ahead
    load = functools.partial(load_heads, scores, sizes, heads, half=half)

    def load_ahead() -> None:
        if steps == 1 or depth:
            ahead.fours.append(load(tiling.fours(word(0), U, config)[0], S if whole else tiling.ends(U, config)[0]))

    logs = None
    if sums_m is not None:
        parts = simt.offset_rows(simt.global_address(sums_m), row, heads * sums * 8)
        pending = (scores[1], sizes[1], wait_start, wait_length) if len(sizes) == 2 else None
        logs = _logs(parts, sums, heads, pending, simt.shared_address(logs_m), load_ahead, half)
    else:
        simt.block_barrier()

    def four_keys(at: Word, end: int, loaded: list[list[Word]] | None = None) -> list[Word]:
        of_heads = loaded or load(at, end)
        if half:
            of_heads = [[x for two in words for x in simt.from_halves(two)] for words in of_heads]
        begin, size = start, length
        if end > S:
            stored = at < S
            begin, size = stored.select(start, wait_start + S), stored.select(length, wait_length)
        flags = [((at + j) - begin < size).select(1, 0) for j in range(4)]
        return reduced_keys(flags, [[h[j] for h in of_heads] for j in range(4)], logs, group_reduce)

    def fours(i: Word, is_whole: bool = False, goes_on: bool = False) -> Iterator[list[Word]]:
        """Keys of the fours of step i. `goes_on`: the next step's first fours are in the first part, and are loaded."""
        ends = [S] * unroll if is_whole else tiling.ends(U, config)
        places = list(zip(tiling.fours(i, U, config), ends, strict=True))
        then = [(at, S) for at in tiling.fours(i + 1, U, config)[: depth - 1]] if goes_on else []
        for u, (at, end) in enumerate(places):
            to_load = (place for place in [*places, *then][u + len(ahead.fours) : u + depth] if place[1] <= U)
            ahead.fours.extend(load(*place) for place in to_load)
            if ahead.fours or end <= U:
                yield four_keys(at, end, ahead.fours.pop(0) if ahead.fours else None)
            else:  # a warp may have none, as most warps have no fifth four in a row of slightly more than 131072
                yield simt.branch(at < U, functools.partial(four_keys, at, end), [word(0)] * 4)

    def other_steps(visit: Callable[..., list[Word]], carry: list[Word]) -> list[Word]:
        """carry = visit(i, keys, *carry) for the steps after the first."""
        if goes_on:
            ahead.fours.extend(load(at, S) for at in tiling.fours(word(1), U, config)[: depth - 1])
        if whole > 1:
            n = len(ahead.words)

            def of_whole(i: Word, *words: Word) -> list[Word]:
                ahead.become(words[:n])
                carry = visit(i, fours(i, is_whole=True, goes_on=goes_on), *words[n:])
                return [*ahead.words, *carry]

            words = simt.loop(1, whole, 1, [*ahead.words, *carry])(of_whole)
            ahead.become(words[:n])
            carry = words[n:]
        done = max(whole, 1)
        if done < steps:
            carry = visit(word(done), fours(word(done)), *carry)
        if done + 1 < steps:
            carry = simt.loop(done + 1, steps, 1, carry)(lambda i, *carry: visit(i, fours(i), *carry))
        return carry

    goes_on = 0 < whole < steps and 1 < depth <= unroll
    bins = FIRST_BINS["score" if not sums else "log" if group_reduce == "max_softmax" else "sum"]
    first = fours(word(0), bool(whole))
    _select(
        first, other_steps, fours, wanted, slots, found, hist, small, lists, keys, name=functools.partial(name, row),
        bins=bins, U=U, room=room, config=config,
    )  # fmt: skip


def units_of(span: Sequence[Word], unit: int) -> list[Word]:
    """The first unit that has a token of `span` (first token, count), and the number of units that have one."""
    first, length = span
    if unit == 1:
        return [first, length]
    start = simt.divide(first, unit)
    return [start, length.equals(0).select(0, simt.divide(first + length + (unit - 1), unit) - start)]


def _logs(
    parts: Any, n: int, heads: int, pending: Any, shared: Word, loads: Callable[[], Any], half: bool
) -> list[Word]:
    """For each head minus log2 of the sum of exp(score) over the units; 0 if there is none. `parts` is the address of
    the warps' statistics, `n` per head; `pending` has scores in f16, or in f32 if not `half`. `loads` starts other
    loads meanwhile."""
    thread = simt.special("tid.x")
    lane, warp = thread & 31, thread >> 5
    share = (tiling.THREADS // 32) // heads  # warps of a head
    part = simt.divide(warp, heads)
    head = warp - part * heads
    index = (part < share).select(part * 32 + lane, 1 << 30)
    stride = 32 * share
    parts = simt.offset_rows(parts, head, n * 8)
    scores, size, start, length = pending or (None, 0, 0, 0)
    scores = simt.offset_rows(scores, head, size * (2 if half else 4)) if size else None

    def statistics(first: Word, number: int) -> list[list[Word]]:
        load = (
            "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0xFF800000; mov.u32 $1, 0; "
            "@p ld.global.v2.u32 {$0, $1}, [$4]; }"
        )
        return [
            ptx(load, a, n, simt.offset(parts, a * 8), results=2) for a in (first + j * stride for j in range(number))
        ]

    def pending_scores(first: Word, number: int) -> list[Word]:
        at = [first + j * stride for j in range(number)]
        if not half:
            return [simt.load_below(a - start, length, simt.offset(scores, a * 4), NOTHING[0]) for a in at]
        load = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0xFC00; @p ld.global.u16 $0, [$3]; }"
        return [simt.from_halves(ptx(load, a - start, length, simt.offset(scores, a * 2), results=1))[0] for a in at]

    # All first loads are in flight before any of them is waited for.
    turn = min(-(-n // stride), 8), min(-(-size // stride), 4)
    of_first_turn = statistics(index, turn[0])
    loads()
    of_pending = pending_scores(index, turn[1])
    state = logsum.merge(of_first_turn)
    state = logsum.add(state, of_pending) if size else state
    if n > turn[0] * stride:
        more = simt.loop(index + turn[0] * stride, n, 8 * stride, state)
        state = more(lambda i, *state: logsum.merge([state, *statistics(i, 8)]))
    if size > turn[1] * stride:
        more = simt.loop(index + turn[1] * stride, size, stride, state)
        state = more(lambda i, *state: logsum.add(state, pending_scores(i, 1)))
    state = logsum.merge_lanes(state)
    with when(lane.equals(0)):
        simt.store_shared(shared + warp * 8, *state)
    simt.block_barrier()
    logs = shared + 2 * 32 * 4
    with when(warp < heads):
        exists = lane < share
        got = simt.load_shared(shared + (exists.select(lane, 0) * heads + warp) * 8, 2)
        log = logsum.minus_log(logsum.merge_lanes([exists.select(x, y) for x, y in zip(got, NOTHING, strict=True)]))
        with when(lane.equals(0)):
            simt.store_shared(logs + warp * 4, log)
    simt.block_barrier()
    return [simt.load_shared(logs + h * 4) for h in range(heads)]


def _select(
    first: Fours, others: Callable[..., list[Word]], again: Callable[[Word], Fours], wanted: Word, slots: Any,
    found: Any, hist: Word, small: Word, lists: Word | None, kept: Any, *, name: Callable[[Word], Word],
    bins: Bins, U: int, room: int, config: tiling.Config,
) -> None:  # fmt: skip
    """Writes to `slots` the names of the `wanted` largest keys that are not 0, and to `found` their number.

    `first` are the keys of the first step, `others` visits those of the others, `again(i)` gives those of any step once
    more. If registers do not hold the row, candidates go to `lists`; if there are too many for these, keys go to
    `kept`.
    """
    thread, part = simt.special("tid.x"), simt.special("cluster_ctarank")
    here = compact._Thread(thread, part, thread & 31, thread >> 5, small + LENGTH * 4, hist + 3 * histogram.PASS * 4)
    row: InRegisters | InLists
    if lists is None:
        row = InRegisters(elements_of(word(0), first, U, config))
    else:
        at_first = elements._Once(first)
        bound = wanted.equals(0).select(0xFFFFFFFF, lower_bound(at_first, wanted, hist, bins, U, config))
        row = InLists(at_first, others, again, Lists(lists, bound), kept, U, config)
    local = last_place(row, wanted, hist, bins, config.blocks)
    write_slots(row, local, here, slots, found, small, name, room, config)
