"""Updates the tables of a hot set, and reads missing pages into it, in two launches.

**Places** (`hot_places`): a block has the tables of one row and KV head. Threads look up the
wanted pages and mark, in shared memory, the places of those that are in the hot set. Two
running sums, in the order of the clock hand, give each missing page its place. XLA needs 14
kernels for that.

**Load** (`hot_load`): the lanes of a warp look up which pages are missing. The warp reads these
from the host straight to their places, several small ones at once. If the grid has only
`Config.blocks`, warps take turns.

**Bytes:** 20 a place and 16 a page for the tables; R a missing page over the bus and R written.

**Bound:** a chain of dependent loads and four barriers; then the bus.

**Limits:** `unsupported`, `unsupported_load`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.host.host_rows import (
    CHUNK,
    Config,
    _of_part,
    blocks_of,
    limit_of_chunks,
    row_bytes,
)
from kvjax.kernels_pallas.simt import (
    Flag,
    Word,
    block_barrier,
    instr,
    loop,
    ptx,
    special,
    when,
    word,
)

MEASURED: str | None = "2026-11-24"  # the date in benchmarks/results/hot_pages.json
MOST = 32  # pages, and places, of a thread
AHEAD = 4  # places of a thread whose loads are in flight at once
LEAST_WARPS = 512  # of `hot_load`, so that enough reads are in flight to fill the bus
NONE = 0xFFFFFFFF
# States of a place within `hot_places`; the first two are stored as they are.
KEPT = 1
FILLED = 2
USED = 4
# From four words that were read to the words to write, by four.
Decode = Callable[[list[Word]], list[list[Word]]]


def smem_bytes(places: int, pages: int) -> int:
    return 4 * (places + pages + 64)


def threads_of(places: int) -> int:
    """Threads of a block: few enough that each has work, up to 1024."""
    return next((128 * w for w in (1, 2, 4) if places <= 4 * 128 * w), 1024)


def unsupported(page: Any, index: Any) -> str | None:
    """The limit that these shapes exceed, for `hot_places`; None if there is a kernel for them."""
    places = page.shape[2]
    pages = index.shape[2]
    most = MOST * threads_of(places)
    if not (0 < places <= most and 0 < pages <= most and math.prod(index.shape)):
        return f"the kernel hot_places takes 1 to {most} places and pages of a row; got {places} and {pages}"
    if (size := smem_bytes(places, pages)) > (smem := simt.target((page, index)).smem):
        return f"the kernel hot_places takes {smem} bytes of shared memory; {places} places need {size}"
    return None


def unsupported_load(x: Any, k: Any, index: Any) -> str | None:
    """The limit that these shapes and dtypes exceed, for `hot_load`; None if there is a kernel
    for them.
    """
    if k.dtype != x.dtype:
        return f"the kernel hot_load reads the dtype of the store, {x.dtype}; got {k.dtype}"
    return limit_of_pages("hot_load", x, index)


def limit_of_pages(name: str, x: Any, index: Any) -> str | None:
    """The limit that pages of x exceed for the kernel `name`; None if there is none."""
    limit = limit_of_chunks(name, row_bytes(x), x.shape[2] and math.prod(index.shape))
    part = row_bytes(x) // x.shape[3]
    return limit or (
        f"the kernel {name} takes parts of a multiple of {CHUNK} bytes; got {part}"
        if part % CHUNK
        else None
    )


@simt.lowered_once()
def hot_places(
    tables: Sequence[Array], index: Array, found: Array
) -> tuple[list[Array], Array]:
    """The tables after a step that needs the first `found` i32[B, K] of `index` i32[B, K, N],
    and the place of each.

    Tables are page and used i32[B, K, n], place i32[B, K, P], hand and loads i32[B, K]; see
    `kvjax.ops.hot_places`.
    """
    if limit := unsupported(tables[0], index):
        raise NotImplementedError(limit)
    *made, at = _places(*tables, index, found)
    return made, at


def _places(*args: Array) -> list[Array]:
    @simt.over_rows(_places)
    def run(*args: Array) -> list[Array]:
        *changed, found = args
        page, _, place, _, _, index = changed
        n = page.shape[2]
        N = index.shape[2]
        program = partial(_places_program, n=n, N=N, P=place.shape[2], threads=threads_of(n))
        launch = simt.kernel_in_place(
            program,
            name="kvjax_hot_places",
            blocks=math.prod(page.shape[:2]),
            warpgroups=threads_of(n) // 128,
            scratch=(n, N, 64),
        )
        return list(launch(changed, found))

    return run(*args)


def _places_program(*refs: Any, n: int, N: int, P: int, threads: int) -> None:
    addresses = [simt.global_address(m) for m in refs[:7]]
    row = special("ctaid.x")
    thread = special("tid.x")
    widths = (n, n, P, 1, 1, N, 1)
    page, used, place, hand, loads, index, found = (
        simt.offset_rows(a, row, 4 * width) for a, width in zip(addresses, widths, strict=True)
    )
    kept, given, small = (simt.shared_address(m) for m in refs[7:])
    at_hand = _load(hand)
    most = simt.load(found)

    # The state of a place, in shared memory: KEPT or FILLED by this step, or USED or not since
    # the hand passed. Device memory is read and written by adjacent threads; the order of the
    # hand applies to shared memory only.
    share = -(-n // threads)
    for e in range(0, share, AHEAD):
        places = [thread + j * threads for j in range(e, min(e + AHEAD, share))]
        was_used = [_load_below(i, n, simt.offset_rows(used, i, 4), 0) for i in places]
        for i, was in zip(places, was_used, strict=True):
            with when(i < n):
                simt.store_shared(kept + i * 4, was.differs(0).select(USED, 0))
    block_barrier()

    own = -(-N // threads)
    wanted: list[
        tuple[Word, Flag, Flag, Word]
    ] = []  # entry, whether it is a page, whether it is a hit, and its place
    for e in range(own):
        m = thread * own + e
        entry = _load_below(m, instr("min.u32", most, N), simt.offset_rows(index, m, 4), NONE)
        is_page = entry < P
        known = instr(
            "min.u32", _load(simt.offset_rows(place, is_page.select(entry, 0), 4)), n - 1
        )
        hit = is_page & _load(simt.offset_rows(page, known, 4)).equals(entry)
        with when(hit):
            simt.store_shared(kept + known * 4, KEPT)
        wanted.append((entry, is_page, hit, known))
    missing = [is_page.select(hit.select(0, 1), 0) for _, is_page, hit, _ in wanted]
    block_barrier()

    # Bits of the thread's places; idle ones + busy ones << 16.
    idle = word(0)
    busy = word(0)
    packed = word(0)
    for e in range(share):
        inside, at = _place_at(thread, e, share, at_hand, n)
        state = inside.select(simt.load_shared(kept + at * 4), KEPT)
        is_idle = state.equals(0).select(1, 0)
        is_busy = state.equals(USED).select(1, 0)
        idle = idle | is_idle << e
        busy = busy | is_busy << e
        packed = packed + is_idle + (is_busy << 16)
    (before, total), (rank, misses) = _sums(
        packed, simt.sum_of(missing), small=small, warps=threads // 32
    )

    for bits, first in ((idle, before & 0xFFFF), (busy, (total & 0xFFFF) + (before >> 16))):
        with when(first < misses):  # few threads have places that are replaced
            next_rank = first
            for e in range(share):
                _, at = _place_at(thread, e, share, at_hand, n)
                bit = (bits >> e) & 1
                with when(bit.differs(0) & (next_rank < misses)):
                    simt.store_shared(given + next_rank * 4, at)
                next_rank = next_rank + bit
    block_barrier()

    any_missing = misses.differs(0)
    (last,) = simt.branch(any_missing, partial(_words_at, given + (misses - 1) * 4), [at_hand])
    for e, ((entry, is_page, _, known), is_missing) in enumerate(
        zip(wanted, missing, strict=True)
    ):
        m = thread * own + e
        missed = is_missing.differs(0)
        (to,) = simt.branch(missed, partial(_words_at, given + rank * 4), [known])
        rank = rank + is_missing
        with when(missed):
            _store(simt.offset_rows(page, to, 4), entry)
            _store(simt.offset_rows(place, entry, 4), to)
            simt.store_shared(kept + to * 4, FILLED)
        past = (entry < 1 << 31).select(entry - P, 0)
        with when(m < N):
            _store(simt.offset_rows(index, m, 4), is_page.select(to, past + n))
    block_barrier()

    distance = (last < at_hand).select(last + n, last) - at_hand
    all_swept = misses > (total & 0xFFFF)

    @loop(thread, n, threads)
    def _keep(i: Word) -> None:
        after_hand = (i < at_hand).select(i + n, i) - at_hand
        swept = any_missing & (all_swept | (after_hand <= distance))
        now = simt.load_shared(kept + i * 4)
        _store(simt.offset_rows(used, i, 4), now.equals(USED).select(swept.select(0, 1), now))

    with when(thread.equals(0)):
        _store(hand, any_missing.select((last + 1 < n).select(last + 1, 0), at_hand))
        _store(loads, _load(loads) + misses)


def _place_at(thread: Word, e: int, share: int, at_hand: Word, n: int) -> tuple[Flag, Word]:
    """The e-th of a thread's `share` places, counted from the hand on, and whether there is
    one.
    """
    j = thread * share + e
    at = at_hand + instr("min.u32", j, n - 1)
    return j < n, (at < n).select(at, at - n)


def _sums(*words: Word, small: Word, warps: int) -> list[tuple[Word, Word]]:
    """The sum of each word over the threads of the block before this one, and over all."""
    thread = special("tid.x")
    lane = thread & 31
    warp = thread >> 5
    within = []
    for i, x in enumerate(words):
        of_warp = simt.warp_sum(x)
        within.append(of_warp - simt.sum_of_next_lanes(x) - x)
        with when(lane.equals(0)):
            simt.store_shared(small + (warp + 32 * i) * 4, of_warp)
    block_barrier()
    sums = []
    for i, inside in enumerate(within):
        other = simt.load_shared(small + (instr("min.u32", lane, warps - 1) + 32 * i) * 4)
        sums.append(
            (
                simt.warp_sum((lane < warp).select(other, 0)) + inside,
                simt.warp_sum((lane < warps).select(other, 0)),
            )
        )
    return sums


def _words_at(place: Word) -> list[Word]:
    return [simt.load_shared(place)]


def _load(address: Any) -> Word:
    """A word of device memory that the kernel may write."""
    return ptx("ld.global.u32 $0, [$1];", address, results=1)


def _load_below(i: Word, end: Word | int, address: Any, otherwise: int) -> Word:
    """A word of device memory that the kernel may write, if i < end."""
    code = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, $3; @p ld.global.u32 $0, [$4]; }"
    return ptx(code, i, end, otherwise, address, results=1)


def _store(address: Any, x: Word) -> None:
    ptx("st.global.u32 [$0], $1;", address, x)


def hot_load(
    x: Array,
    zones: Sequence[Array],
    page: Array,
    used: Array,
    at: Array,
    *,
    config: Config | None = None,
) -> tuple[Array, ...]:
    """`zones`, [B, K, n * Z, D] each, with the parts of those pages of x [B, K, P, parts, Z, D]
    whose place at i32[B, K, N] has 2 in `used`; see `kvjax.ops.hot_load`."""
    if limit := unsupported_load(x, zones[0], at):
        raise NotImplementedError(limit)
    return tuple(
        fill("kvjax_hot_load", as_stored, config or Config(ahead=4), *zones, x, page, used, at)
    )


def as_stored(loaded: list[Word]) -> list[list[Word]]:
    """The 16 bytes that were read, unchanged."""
    return [loaded]


def fill(name: str, decode: Decode, config: Config, *args: Array) -> list[Array]:
    """The zones after a launch of the kernel, whose threads write `decode` of each 16 bytes of
    the pages.
    """

    @simt.over_rows(partial(fill, name, decode, config))
    def run(*args: Array) -> list[Array]:
        *zones, x, page, used, at = args
        chunks = row_bytes(x) // CHUNK
        n = page.shape[2]
        N = at.shape[2]
        each = max(1, min(32, at.size // LEAST_WARPS))
        blocks, turns = blocks_of(at.size, each * 4 * config.warpgroups, config)
        program = partial(
            _load_program, total=at.size, P=x.shape[2], n=n, N=N, chunks=chunks, parts=len(zones), each=each,
            turns=turns, warps=blocks * 4 * config.warpgroups, wider=zones[0].dtype.itemsize // x.dtype.itemsize,
            decode=decode, config=config,
        )  # fmt: skip
        launch = simt.kernel_in_place(
            program,
            name=name,
            blocks=blocks,
            warpgroups=config.warpgroups,
        )
        return list(launch(zones, x, page, used, at))

    return run(*args)


def _load_program(
    *refs: Any, total: int, P: int, n: int, N: int, chunks: int, parts: int, each: int, turns: int, warps: int,
    wider: int, decode: Decode, config: Config,
) -> None:  # fmt: skip
    """A lane looks at one of a warp's `each` entries; then the warp moves the pages that are
    missing, several small ones at once. In a turn all `warps` take adjacent entries, of few
    heads, whose pages are close together. A value takes `wider` times as many bytes in a zone.
    """
    *zones, x, page, used, at = (simt.global_address(m) for m in refs)
    size = chunks * CHUNK
    piece = chunks * CHUNK // parts
    of_page = -(-chunks // 32)
    ahead = min(config.ahead, of_page)
    at_once = max(1, config.ahead // of_page)
    thread = special("tid.x")
    lane = thread & 31
    warp = special("ctaid.x") * (4 * config.warpgroups) + (thread >> 5)

    def take(turn: Word) -> None:
        entry = (turn * warps + warp) * each + lane
        is_entry = (lane < each) & (entry < total)
        entry = is_entry.select(entry, 0)
        of = simt.divide(entry, N)
        place = simt.load(simt.offset_rows(at, entry, 4))
        in_table = of * n + (place < n).select(place, 0)
        fresh = (
            is_entry & (place < n) & simt.load(simt.offset_rows(used, in_table, 4)).equals(2)
        )
        number = simt.load(simt.offset_rows(page, in_table, 4))
        lacking = simt.ballot(fresh & (number < P))

        def move(left: Word) -> tuple[Flag, list[Word]]:
            moved = []  # whether there is such a page, its address, and its row and place in the zones
            for _ in range(at_once):
                there = left.differs(0)
                one = there.select(instr("clz.b32", left) ^ 31, 0)
                row, to, source = (
                    simt.from_lane(shared, one) for shared in (of, in_table, number)
                )
                from_page = simt.offset_rows(simt.offset_rows(x, row, P * size), source, size)
                moved.append((there, from_page, to))
                left = left ^ there.select(word(1) << one, 0)
            for first in range(0, chunks, 32 * ahead):
                places = [
                    (lane + (first + 32 * j), *of_one) for of_one in moved for j in range(ahead)
                ]
                words = [
                    _chunk_if(there & (c < chunks), simt.offset(a, c * CHUNK))
                    for c, there, a, _ in places
                ]
                for (c, there, _, to), loaded in zip(places, words, strict=True):
                    part = simt.divide(c * CHUNK, piece)
                    zone = simt.offset_rows(_of_part(zones, part), to, piece * wider)
                    target = simt.offset(zone, (c * CHUNK - part * piece) * wider)
                    with when(there & (c < chunks)):
                        for i, four in enumerate(decode(loaded)):
                            ptx(
                                "st.global.v4.u32 [$0], {$1, $2, $3, $4};",
                                simt.offset(target, word(i * CHUNK)),
                                *four,
                            )
            return left.differs(0), [left]

        with when(lacking.differs(0)):
            simt.repeat([lacking], move)

    if turns == 1:
        take(word(0))
    else:
        loop(0, turns, 1)(take)


def _chunk_if(flag: Flag, address: Any) -> list[Word]:
    """Four words at an address if a flag is set; else zeros, and nothing is read."""
    code = (
        "{ .reg .pred p; setp.ne.u32 p, $4, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        "@p ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$5]; }"
    )
    words: list[Word] = ptx(code, flag.select(1, 0), address, results=4)
    return words
