"""Selection of a row's units, for the kernels that score and select: from scores to slots.

**By a cluster** of blocks, in one launch: (1) The heads' log-sum-exp is merged from statistics
of the scoring warps. (2) Threads load scores, turn them into keys and count the keys; registers
hold up to 163840 with 8 blocks. (3) `threshold` finds the last place. (4) `compact` writes the
slots. A longer row is read in steps: the first bounds the last place, and warps list the
elements above.

**By blocks that are no cluster**, in three launches (`parted`): the first does (1) and (2) and
keeps keys and counts in device memory.

**Bytes:** 2 or 4 G read a unit, 4 written a place. **Bound:** latency. Evidence:
`benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import elements, histogram, logsum, parted, tiling
from kvjax.kernels_pallas.select.compact import Here, write_slots
from kvjax.kernels_pallas.select.elements import (
    LIST,
    WARPS,
    InLists,
    InRegisters,
    Lists,
    elements_of,
)
from kvjax.kernels_pallas.select.keys import (
    HEADS,
    MOST_HEADS,
    keys_of_many,
    load_heads,
    load_part,
    reduced_keys,
    shares,
)
from kvjax.kernels_pallas.select.logsum import NOTHING
from kvjax.kernels_pallas.select.rule import How
from kvjax.kernels_pallas.select.threshold import (
    Bins,
    count,
    first_bins,
    last_place,
    lower_bound,
)
from kvjax.kernels_pallas.simt import Word, ptx, when, word

LOGS = 2 * 32 + MOST_HEADS  # words: statistics of heads by warp, and the logs of all
SCRATCH = *parted.SCRATCH, LOGS


def padded(*sizes: int) -> tuple[int, ...]:
    """Sizes rounded up to multiples of four, the units that a thread loads at once."""
    return tuple(n + -n % 4 for n in sizes)


def scratch(U: int, config: tiling.Config) -> tuple[int, ...]:
    """The words of shared memory that a row of U units needs."""
    return SCRATCH if tiling.in_one_step(U, config) else (*SCRATCH, WARPS * (LIST + 1))


class Inputs(NamedTuple):
    """The arrays that a selection reads, inside of a kernel as refs."""

    # start and stop i32 of each part's span, and the number of units wanted
    ends: Sequence[Any]
    parts: Sequence[Any]  # scores [rows, heads, units], in f16 or f32
    # statistics f32[rows, heads, n, 2] of the scoring warps, if softmaxes are reduced
    sums: Any = None
    # i32[rows, limits[0]]: the slots of the first part's units; None: their numbers
    names: Any = None


def select_units(kernel: str, inputs: Inputs, how: How) -> tuple[jax.Array, jax.Array]:
    """(units i32[rows, room], count i32[rows]): those of the highest keys, the one of lowest
    rank last.
    """
    rows = how.rows
    room = how.room
    config = how.config
    U = sum(part.shape[2] for part in inputs.parts)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs)
    args, tree = jax.tree.flatten(inputs)
    row = functools.partial(_Row, shapes=shapes, how=how)

    def program_of(body: Callable[..., None]) -> Callable[..., None]:
        return lambda *refs: body(
            row(jax.tree.unflatten(tree, refs[: len(args)])), *refs[len(args) :]
        )

    if config.parted:
        kinds = jax.ShapeDtypeStruct((rows, U), jnp.uint32), histogram.kept_of(rows, config)
        keys, kept = simt.kernel(
            program_of(_count_units), name=f"{kernel}_count", out_type=kinds, scratch=(histogram.PASS, LOGS),
            blocks=rows * config.blocks, parts=config.blocks, warpgroups=tiling.THREADS // 128,
        )(*args)  # fmt: skip
        bins = row(None).bins
        first = shapes.parts[0].shape[2]
        return parted.select_keys(
            kernel, keys, kept, inputs.ends[-1], inputs.names, how, bins, first
        )
    outs = [
        jax.ShapeDtypeStruct((rows, room), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]
    if not tiling.in_one_step(U, config):
        # The keys, where lists have no room.
        outs.append(jax.ShapeDtypeStruct((rows, U), jnp.uint32))
    units, found, *_ = simt.kernel(
        program_of(_select_units), name=kernel, out_type=tuple(outs), scratch=scratch(U, config),
        sparse=(2,)[: len(outs) - 2], blocks=rows, cluster=config.blocks, warpgroups=tiling.THREADS // 128,
    )(*args)  # fmt: skip
    return units, found


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


class _Row:
    """The scores of this block's row, and the keys of its units."""

    def __init__(self, refs: Inputs | None, *, shapes: Inputs, how: How):
        self.refs = refs  # None outside of a kernel
        self.how = how
        self.sizes = tuple(part.shape[2] for part in shapes.parts)  # units of each part
        self.heads = shapes.parts[0].shape[1]
        self.half = shapes.parts[0].dtype == jnp.float16
        # Statistics of a head, of which its log-sum-exp is made; 0 where none is needed.
        self.sums = 0 if shapes.sums is None else shapes.sums.shape[2]
        self.U = sum(self.sizes)
        self.S = self.sizes[0]  # units of the first part
        # Fours that registers hold; with more heads, none are loaded ahead.
        self.depth = 3 if self.heads <= 4 and self.half else 0
        self.bins: Bins = first_bins(bool(self.sums), how.group_reduce)
        if refs is None:
            return
        self.row = simt.row()
        ends = [
            (ref, how.rows // a.size) for ref, a in zip(refs.ends, shapes.ends, strict=True)
        ]
        spans = []
        for i, limit in enumerate(how.limits):
            start, stop = ends[2 * i : 2 * i + 2]
            span = simt.span_of(start, stop, self.row, limit * how.unit, how.local if i else 0)
            spans.append(units_of(span, how.unit))
        # The second part, of pending units, may be missing.
        self.start, self.length = spans[0]
        no_pending = [word(0), word(0)]
        self.pending_start, self.pending_length = [*spans, no_pending][1]
        self.wanted = simt.clipped(simt.number_of(ends[-1], self.row), how.room)
        size = 2 if self.half else 4
        self.scores = [
            simt.offset_rows(simt.global_address(m), self.row, self.heads * n * size)
            for m, n in zip(refs.parts, self.sizes, strict=True)
        ]
        self.logs: list[Word] | None = None

    def load(self, at: Word, end: int) -> list[list[Word]]:
        """The scores of all heads; of more than registers hold none, which `keys` loads."""
        if self.heads > HEADS:
            return []
        return load_heads(self.scores, self.sizes, self.heads, at, end, self.half)

    def load_part(self, at: Word, end: int, first: int | Word, count: int) -> list[list[Word]]:
        """The scores of `count` heads from `first` on, by unit; their shares, if softmaxes are
        pooled.
        """
        of_heads = load_part(self.scores, self.sizes, first, count, at, end, self.half)
        units = self.by_unit(of_heads)
        if not self.sums:
            return units
        logs = load_logs(self.logs_at, count, first)
        return [shares(unit, logs) for unit in units]

    def by_unit(self, of_heads: list[list[Word]]) -> list[list[Word]]:
        """Scores in f32 of four units, from what is loaded of heads."""
        if self.half:
            of_heads = [
                [x for two in words for x in simt.from_halves(two)] for words in of_heads
            ]
        return [[h[j] for h in of_heads] for j in range(4)]

    def merge_logs(self, shared: Word, load_ahead: Callable[[], None]) -> None:
        """Merges the heads' statistics, which `keys` needs; a barrier in any case."""
        if not self.sums:
            simt.block_barrier()
            return
        assert self.refs is not None
        parts = simt.offset_rows(
            simt.global_address(self.refs.sums), self.row, self.heads * self.sums * 8
        )
        two = len(self.sizes) == 2
        pending = (
            (self.scores[1], self.sizes[1], self.pending_start, self.pending_length)
            if two
            else None
        )
        self.logs_at = log_sums(
            parts, self.sums, self.heads, pending, shared, load_ahead, self.half
        )
        if self.heads <= HEADS:
            self.logs = load_logs(self.logs_at, self.heads)

    def keys(self, at: Word, end: int, loaded: list[list[Word]] | None = None) -> list[Word]:
        """The keys of the units at .. at + 3."""
        units = self.by_unit(loaded or self.load(at, end)) if self.heads <= HEADS else []
        begin = self.start
        size = self.length
        if end > self.S:
            stored = at < self.S
            begin = stored.select(begin, self.pending_start + self.S)
            size = stored.select(size, self.pending_length)
        flags = [((at + j) - begin < size).select(1, 0) for j in range(4)]
        group_reduce = self.how.group_reduce
        if units:
            return reduced_keys(flags, units, self.logs, group_reduce)
        load = functools.partial(self.load_part, at, end)
        return keys_of_many(flags, load, self.heads, group_reduce, pooled=bool(self.sums))


def _count_units(row: _Row, keys_m: Any, kept_m: Any, hist_m: Any, logs_m: Any) -> None:
    """The first launch without clusters: keeps the keys of a row, and how many of a block's
    fall into each bin.
    """
    U = row.U
    config = row.how.config
    keys = simt.offset_rows(simt.global_address(keys_m), row.row, U * 4)
    kept = simt.offset_rows(
        simt.global_address(kept_m), row.row, config.blocks * histogram.KEPT * 4
    )
    hist = simt.shared_address(hist_m)
    ends = tiling.ends(U, config)
    number = tiling.steps(U, config)[2]
    histogram.clear(hist)
    first: list[list[list[Word]]] = []

    def load_ahead() -> None:
        if number == 1:
            places = list(zip(tiling.fours(word(0), U, config), ends, strict=True))
            first.extend(row.load(*place) for place in places[: max(row.depth, 1)])

    row.merge_logs(simt.shared_address(logs_m), load_ahead)

    @simt.loop(0, number, 1)
    def _step(i: Word) -> None:
        places = list(zip(tiling.fours(i, U, config), ends, strict=True))
        loaded = list(first)
        for u, (at, end) in enumerate(places):
            ahead = places[len(loaded) : max(u + max(row.depth, 1), len(loaded))]
            loaded.extend(row.load(*place) for place in ahead)
            four = row.keys(at, end, loaded[u])
            tiling.store_four(keys, at, U, four)
            count(hist, [(key, word(0)) for key in four], row.bins.place)

    histogram.keep(hist, kept)


def _select_units(row: _Row, slots_m: Any, found_m: Any, *refs: Any) -> None:
    """The kernel of a cluster."""
    how = row.how
    U = row.U
    S = row.S
    config = row.how.config
    is_held = tiling.in_one_step(U, config)
    keys_m, (hist_m, small_m, logs_m, *lists_m) = (
        (None, refs) if is_held else (refs[0], refs[1:])
    )
    stride, unroll, steps = tiling.steps(U, config)
    # Steps that are in the first part for all threads.
    whole = min(max(S // stride - (unroll - 1) * steps, 0), steps)
    here = Here.of(hist_m, small_m)
    here.clear()
    if not is_held:
        histogram.clear(here.hist + histogram.PASS * 4)
    ahead = Loads()
    depth = row.depth
    goes_on = 0 < whole < steps and 1 < depth <= unroll

    def load_ahead() -> None:
        if is_held or depth:
            ahead.fours.append(
                row.load(
                    tiling.fours(word(0), U, config)[0],
                    S if whole else tiling.ends(U, config)[0],
                )
            )

    row.merge_logs(simt.shared_address(logs_m), load_ahead)

    def fours(i: Word, is_whole: bool = False, goes_on: bool = False) -> Iterator[list[Word]]:
        """Keys of the fours of step i. `goes_on`: the next step's first fours are in the first
        part, and are loaded.
        """
        ends = [S] * unroll if is_whole else tiling.ends(U, config)
        places = list(zip(tiling.fours(i, U, config), ends, strict=True))
        then = (
            [(at, S) for at in tiling.fours(i + 1, U, config)[: depth - 1]] if goes_on else []
        )
        for u, (at, end) in enumerate(places):
            to_load = (
                place
                for place in [*places, *then][u + len(ahead.fours) : u + depth]
                if place[1] <= U
            )
            ahead.fours.extend(row.load(*place) for place in to_load)
            if ahead.fours or end <= U:
                yield row.keys(at, end, ahead.fours.pop(0) if ahead.fours else None)
            else:  # a warp may have none, as most warps have no fifth four in a row of slightly more than 131072
                yield simt.branch(at < U, functools.partial(row.keys, at, end), [word(0)] * 4)

    def other_steps(visit: Callable[..., list[Word]], carry: list[Word]) -> list[Word]:
        """carry = visit(i, keys, *carry) for the steps after the first."""
        if goes_on:
            ahead.fours.extend(
                row.load(at, S) for at in tiling.fours(word(1), U, config)[: depth - 1]
            )
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
            carry = simt.loop(done + 1, steps, 1, carry)(
                lambda i, *carry: visit(i, fours(i), *carry)
            )
        return carry

    first = fours(word(0), bool(whole))
    held: InRegisters | InLists
    if is_held:
        held = InRegisters(elements_of(word(0), first, U, config))
    else:  # candidates go to lists; if there are too many for these, keys go to device memory
        once = elements._Once(first)
        lists = simt.shared_address(lists_m[0])
        kept = simt.offset_rows(simt.global_address(keys_m), row.row, U * 4)
        bound = lower_bound(once, row.wanted, here.hist, row.bins, U, config)
        bound = row.wanted.equals(0).select(0xFFFFFFFF, bound)
        held = InLists(once, other_steps, fours, Lists(lists, bound), kept, U, config)
    cut = last_place(held, row.wanted, here.hist, row.bins, config.blocks)
    names = None if row.refs is None else row.refs.names
    write_slots(held, cut, here, parted.out_of(slots_m, found_m, names, S, how), config)


def units_of(span: Sequence[Word], unit: int) -> list[Word]:
    """The first unit that has a token of `span` (first token, count), and the number of units
    that have one.
    """
    first, length = span
    if unit == 1:
        return [first, length]
    start = simt.divide(first, unit)
    return [
        start,
        length.equals(0).select(0, simt.divide(first + length + (unit - 1), unit) - start),
    ]


def log_sums(
    parts: Any,
    n: int,
    heads: int,
    pending: Any,
    shared: Word,
    loads: Callable[[], Any],
    half: bool,
) -> Word:
    """The address in shared memory of minus log2 of the sum of exp(score) over the units, for
    each head; 0 if there is none.
    `parts` is the address of the warps' statistics, `n` per head; `pending` has scores in f16,
    or in f32 if not `half`. `loads` starts other loads meanwhile."""
    thread = simt.special("tid.x")
    lane = thread & 31
    warp = thread >> 5
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
            ptx(load, a, n, simt.offset(parts, a * 8), results=2)
            for a in (first + j * stride for j in range(number))
        ]

    def pending_scores(first: Word, number: int) -> list[Word]:
        at = [first + j * stride for j in range(number)]
        if not half:
            return [
                simt.load_below(a - start, length, simt.offset(scores, a * 4), NOTHING[0])
                for a in at
            ]
        load = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0xFC00; @p ld.global.u16 $0, [$3]; }"
        return [
            simt.from_halves(
                ptx(load, a - start, length, simt.offset(scores, a * 2), results=1)
            )[0]
            for a in at
        ]

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
        log = logsum.minus_log(
            logsum.merge_lanes([exists.select(x, y) for x, y in zip(got, NOTHING, strict=True)])
        )
        with when(lane.equals(0)):
            simt.store_shared(logs + warp * 4, log)
    simt.block_barrier()
    return logs


def load_logs(at: Word, heads: int, first: int | Word = 0) -> list[Word]:
    """The logs of `heads` heads from `first` on, which `log_sums` left in shared memory."""
    return [simt.load_shared(at + (first + h) * 4) for h in range(heads)]
