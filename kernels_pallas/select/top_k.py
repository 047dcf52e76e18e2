"""The slots of the k largest scores of each row, in order of rank. The result is exact: ties go
to the lower slot.

Several blocks work on one row: a cluster, or a launch for each step. Scores become unsigned
keys of the same order (0: invalid). (1) Each thread reads 16 scores; registers hold a row of at
most 131072. (2) A histogram of the top bits of the keys finds the bin of the k-th key. While
too many elements are left, the next bits are counted. (3) Each block sorts its candidates,
sends them to the others, and finds the ranks of its own by bisection. Slots without a valid
score follow unsorted.

**Bytes:** 5 U read and 5 k written a row; longer rows are read three or more times.

**Bound:** latency, and the reads of 64 multiprocessors for longer rows.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.select import histogram, threshold, tiling
from kvjax.kernels_pallas.select.compact import sum_before
from kvjax.kernels_pallas.select.histogram import kept_of
from kvjax.kernels_pallas.select.keys import MAX_K, MAX_UNITS, SLOTS, ordered_key
from kvjax.kernels_pallas.select.sort import (
    LENGTH,
    LENGTHS,
    Out,
    larger,
    networks,
    sort_pairs,
    write_by_rank,
)
from kvjax.kernels_pallas.select.threshold import Bins
from kvjax.kernels_pallas.select.tiling import Config, config_for
from kvjax.kernels_pallas.simt import (
    Word,
    block_barrier,
    instr,
    loop,
    ptx,
    when,
    word,
)

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/top_k.json
# Passes as (0 for the key or 1 for the slot, shift, bits).
DIGITS = (
    (0, 21, 11),
    (0, 10, 11),
    (0, 0, 10),
    (1, 11, 11),
    (1, 0, 11),
)
SMALL = 80  # words for sums of warps, lengths of lists, and where they begin
LONGEST = 2 * tiling.MAX_PARTS * 2
TOO_MANY = 0xFFFFFFFF  # in place of the length of a list
FIRST = 1 << DIGITS[0][1]  # not above the key of any valid score, and above those of others
SORTED = 512  # elements of a block that sorting takes as long as another pass
AT_ONCE = 4  # lists that a thread searches at once
# elements of a warp up to which its threads reserve their places one after the other
QUEUE = 64


def candidates(k: int, least: int = 4096) -> int:
    """How many elements are sorted at most."""
    return max(2 << (k - 1).bit_length(), least)


def smem_bytes(k: int, config: Config | None = None) -> int:
    return 4 * sum(scratch(k, config or Config()))


def unsupported(shape: tuple[int, ...], dtype: Any, k: int) -> str | None:
    """The limit that scores of this shape and dtype exceed; None if there is a kernel for them."""
    if not 1 <= k <= MAX_K:
        return f"the kernel top_k takes k from 1 to {MAX_K}; got {k}"
    if not shape or not k <= shape[-1] <= MAX_UNITS:
        return f"the kernel top_k takes rows of k to {MAX_UNITS} scores; got scores{list(shape)}, k={k}"
    if 0 in shape:
        return f"the kernel top_k takes at least one row; got scores{list(shape)}"
    if jnp.dtype(dtype) not in (
        jnp.dtype(jnp.float32),
        jnp.dtype(jnp.bfloat16),
        jnp.dtype(jnp.float16),
    ):
        return f"the kernel top_k takes scores in f32, bf16 or f16; got {jnp.dtype(dtype)}"
    return None


@simt.lowered_once("k", "config")
def top_k(
    scores: Array, valid: Array, k: int, *, config: Config | None = None
) -> tuple[Array, Array]:
    """(slots i32[..., k], valid bool[..., k]) of the k largest of scores [..., U] where
    `valid`, largest first.
    """
    if limit := unsupported(scores.shape, scores.dtype, k):
        raise NotImplementedError(limit)
    *lead, U = scores.shape
    if scores.dtype != jnp.float32:
        low = jnp.finfo(scores.dtype).min
        scores = jnp.where(scores >= low, scores, low).astype(jnp.float32)
    own = (1,) * (scores.ndim - valid.ndim) + valid.shape
    # Rows that differ in later axes share a mask.
    n = max((i + 1 for i in range(len(lead)) if own[i] > 1), default=0)
    valid = jnp.broadcast_to(valid.reshape(own[:n] + own[-1:]), (*lead[:n], U))
    scores, valid = (jnp.pad(a.reshape(-1, U), ((0, 0), (0, -U % 4))) for a in (scores, valid))
    config = config or tuned.select(
        "top_k",
        config_for(len(scores), U, simt.target((scores,))),
        (scores,),
        rows=len(scores),
        U=U,
        k=k,
    )
    slots, found = _select(k, config, scores, valid)
    return slots.reshape(*lead, k), found.reshape(*lead, k)


def _select(k: int, config: Config, scores: Array, valid: Array) -> tuple[Array, ...]:
    """`selected` of scores f32[rows, U] where valid bool[rows / n, U], U a multiple of 4."""
    rows, U = scores.shape

    @simt.over_rows(functools.partial(_select, k, config))
    def run(scores: Array, valid: Array) -> tuple[Array, ...]:
        how: dict[str, Any] = {"U": U, "config": config, "shared_by": rows // len(valid)}
        if config.parted:
            keys, kept = simt.kernel(
                functools.partial(_count, **how), name="kvjax_top_k_count",
                out_type=(jax.ShapeDtypeStruct((rows, U), jnp.uint32), kept_of(rows, config)),
                scratch=(histogram.PASS,), **launch_of(rows, config),
            )(scores, valid)  # fmt: skip
            return select_kept("kvjax_top_k", keys, kept, k, config)
        return simt.kernel(
            functools.partial(_program, **how, k=k), name="kvjax_top_k", out_type=selected(rows, k),
            scratch=scratch(k, config), **launch_of(rows, config),
        )(scores, valid)  # fmt: skip

    return run(scores, valid)


def selected(rows: int, k: int, ranked: bool = False) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Slots, whether a place has one, and their keys if `ranked`."""
    return tuple(
        jax.ShapeDtypeStruct((rows, k), t)
        for t in (jnp.int32, jnp.bool_, jnp.uint32)[: 3 if ranked else 2]
    )


def launch_of(rows: int, config: Config) -> dict[str, int]:
    """The grid of a kernel with the config's blocks for each row."""
    how = {"blocks": rows, "cluster": config.blocks, "warpgroups": tiling.THREADS // 128}
    return (
        how | {"blocks": rows * config.blocks, "cluster": 1, "parts": config.blocks}
        if config.parted
        else how
    )


def scratch(k: int, config: Config) -> tuple[int, ...]:
    """The words of shared memory that the selection needs: for histograms, later for all
    blocks' lists; for this block's list; for its sorting, unless that would be more than every
    GPU has; and for lengths."""
    room = 2 * candidates(k)
    if config.cluster:
        return max((len(DIGITS) + 1) * histogram.PASS, room), room, room, SMALL
    return histogram.PASS, *((room, room) if k <= MAX_K // 2 else (room,)), SMALL


def _program(
    scores_m,
    valid_m,
    slots_m,
    found_m,
    *scratch_m,
    U: int,
    k: int,
    config: Config,
    shared_by: int,
) -> None:
    fetch = _scores(scores_m, valid_m, U, config, shared_by)
    select_row(fetch, fetch, Out.of(k, slots_m, found_m), scratch_m, U=U, k=k, config=config)


Fetch = Callable[[Word], list[list[Word]]]
Element = tuple[Word, Word]  # key and rank of the slot


def fetcher(keys: Any, U: int, config: Config) -> Fetch:
    return lambda i: [tiling.load_four(keys, at, U) for at in tiling.fours(i, U, config)]


def _scores(
    scores_m: Any, valid_m: Any, U: int, config: Config, shared_by: int, keys: Any = None
) -> Fetch:
    """Gives the keys of a row's scores, and writes them to `keys`."""
    scores = simt.offset_rows(simt.global_address(scores_m), simt.row(), U * 4)
    valid = simt.offset_rows(
        simt.global_address(valid_m), simt.divide(simt.row(), shared_by), U
    )

    def fetch(i: Word) -> list[list[Word]]:
        fours = []
        for at in tiling.fours(i, U, config):
            flags = simt.load_below(at, U, simt.offset(valid, at))
            four = [
                ordered_key(x, (flags >> 8 * j) & 1)
                for j, x in enumerate(tiling.load_four(scores, at, U))
            ]
            if keys is not None:
                tiling.store_four(keys, at, U, four)
            fours.append(four)
        return fours

    return fetch


class _Elements:
    """The elements of a row that a thread has; registers keep those of a row that is read in
    one step.
    """

    def __init__(self, first: Fetch, again: Fetch, U: int, config: Config):
        self.fetches = iter((first,))
        self.again = again
        self.U = U
        self.config = config
        self.steps = tiling.steps(U, config)[2]
        self.held = self._of(first, word(0)) if self.steps == 1 else None

    def _of(self, fetch: Fetch, i: Word) -> list[Element]:
        """Past the end of the row keys are 0, and their slots come after all others."""
        places = zip(tiling.fours(i, self.U, self.config), fetch(i), strict=True)
        return [
            (key, word(SLOTS) - (at + j)) for at, four in places for j, key in enumerate(four)
        ]

    def each(self, visit: Callable[[list[Element]], None]) -> None:
        fetch = next(self.fetches, self.again)
        if self.held is not None:
            visit(self.held)
        else:
            loop(0, self.steps, 1)(lambda i: visit(self._of(fetch, i)))


def select_row(
    first: Fetch, again: Fetch, out: Out, scratch_m: Sequence[Any], *, U: int, k: int, config: Config,
    bins: Bins | None = None,
) -> None:  # fmt: skip
    """Writes to `out` the slots of the k largest keys of a row.

    `first(i)` gives the keys of `fours(i, U, config)` at their first use, `again(i)` after it.
    `bins` are counted before digits, where they leave fewer keys to sort.
    """
    blocks = config.blocks
    capacity = candidates(k)
    t = simt.special("tid.x")
    hist, own, *spare, small = (simt.shared_address(m) for m in scratch_m)
    elements = _Elements(first, again, U, config)
    first_pass = hist + len(DIGITS) * histogram.PASS * 4 if config.cluster and bins else hist
    histogram.clear(first_pass)
    with when(t.equals(0)):
        simt.store_shared(small + LENGTH * 4, word(0))
    block_barrier()

    # (high, its mask, low, its mask): the prefix of key and slot known so far; how many of its
    # elements are still needed, and how many it has.
    def found(n: int, state: list[Word]) -> list[Word]:
        """The state after digit n; if too many elements are left, after all later digits too,
        behind one branch.
        """
        state = _digit_pass(
            n, state, elements.each, hist, config, clear=bins is not None or n > 0
        )
        if n + 1 == len(DIGITS):
            return state
        more = ((word(k) - state[4] + state[5]) > most) & state[0].differs(0)
        return simt.branch(more, functools.partial(found, n + 1, state), state)

    start = [word(x) for x in (0, 0, 0, 0, k, 0)]
    most = min(capacity, candidates(k, SORTED * blocks))
    if bins is None:
        high, _, low, _, need, _ = found(0, start)
        valid = word(k) - need
        few = high.equals(0)
        high = few.select(FIRST, high)
    else:
        elements.each(lambda pairs: threshold.count(first_pass, pairs, bins.place))
        of = histogram.find_bin(first_pass, word(k), blocks, of_earlier=False)
        valid = of.wanted
        few = of.wanted < k
        many = (of.wanted - of.need + of.many) > most
        high, low = simt.branch(
            many, lambda: found(0, start)[0:3:2], [bins.extent(of.bin)[0], word(0)]
        )
    with when(few & simt.part().equals(0)):
        _fill((elements.held or elements._of(again, word(0)))[:4], valid, small, out)
    length = _collect(elements, high, low, own, small)
    with when(t < blocks):
        simt.store_remote(simt.remote(small + (simt.part() + LENGTHS) * 4, t), length)
    simt.cluster_arrive()
    sort_pairs(networks(capacity), own, next(iter(spare), None), length, t)
    block_barrier()
    simt.cluster_wait()  # now all blocks have read the histograms too, which the lists overwrite
    write_by_rank(own, hist, small, out, length, t, blocks)


def _fill(four: list[Element], at: Word, sums: Word, out: Out) -> None:
    """Writes the lowest slots without a valid score from place `at` on; `four` are elements 4 t
    .. 4 t + 3 of a row.

    There are fewer than k valid ones, so the slots that are needed are below k.
    """
    flags = [key.equals(0).select(1, 0) for key, _ in four]
    at = at + sum_before(simt.sum_of(flags), sums)
    for flag, (key, rank) in zip(flags, four, strict=True):
        out.write(flag.differs(0).select(at, out.k), [rank, key])
        at = at + flag


def _collect(elements: _Elements, high: Word, low: Word, own: Word, small: Word) -> Word:
    """Adds the elements that are not below the prefix, with zeros after it, to the list;
    returns its length.
    """
    t = simt.special("tid.x")

    def collect(elements: list[Element]) -> None:
        taken = "{ .reg .u64 x, y; .reg .pred p; mov.b64 x, {$1, $2}; mov.b64 y, {$3, $4}; setp.ge.u64 p, x, y; "
        flags = [
            ptx(taken + "selp.u32 $0, 1, 0, p; }", rank, key, low, high, results=1)
            for key, rank in elements
        ]
        n = simt.sum_of(flags)
        of_warp = simt.warp_sum(n)
        many = of_warp > QUEUE

        def reserve(wanted: Word) -> Word:
            code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; mov.u32 $0, 0; @p atom.shared.add.u32 $0, [$2], $1; }"
            return ptx(code, wanted, small + LENGTH * 4, results=1)

        def in_turn() -> list[Word]:
            first = simt.from_lane(reserve((t & 31).equals(0).select(of_warp, 0)), 0)
            return [first + of_warp - simt.sum_of_next_lanes(n) - n]

        (place,) = simt.branch(many, in_turn, [reserve(many.select(0, n))])
        at = own + place * 8
        for flag, (key, rank) in zip(flags, elements, strict=True):
            store = (
                "{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.shared.v2.u32 [$1], {$2, $3}; }"
            )
            ptx(store, flag, at, rank, key)
            at = at + (flag << 3)

    elements.each(collect)
    block_barrier()
    return simt.load_shared(small + LENGTH * 4)


def _digit(key: Word, rank: Word, n: int) -> Word:
    of_slot, shift, bits = DIGITS[n]
    return ((rank if of_slot else key) >> shift) & ((1 << bits) - 1)


def _digit_pass(
    n: int,
    state: list[Word],
    each: Callable[..., None],
    hist: Word,
    config: Config,
    clear: bool,
) -> list[Word]:
    """Adds digit n of the k-th element to the prefix."""
    of_slot, shift, bits = DIGITS[n]
    high, high_mask, low, low_mask, need, _ = state
    bins = hist + n * histogram.PASS * 4 if config.cluster else hist
    if clear:
        if not config.cluster:
            block_barrier()
        histogram.clear(bins)
        block_barrier()

    def count(elements: list[Element]) -> None:
        for key, rank in elements:
            match = (key & high_mask).equals(high)
            if of_slot:
                match = match & (rank & low_mask).equals(low)
            with when(match):
                ptx("red.shared.add.u32 [$0], 1;", bins + _digit(key, rank, n) * 4)

    each(count)
    digit, need, elements_held, *_ = histogram.find_bin(
        bins, need, config.blocks, of_earlier=False
    )
    mask = ((1 << bits) - 1) << shift
    if of_slot:
        return [high, high_mask, low | (digit << shift), low_mask | mask, need, elements_held]
    return [high | (digit << shift), high_mask | mask, low, low_mask, need, elements_held]


# ----------------------------------------------------------------- blocks that are no cluster: a launch for each step


def _count(
    scores_m: Any,
    valid_m: Any,
    keys_m: Any,
    kept_m: Any,
    hist_m: Any,
    *,
    U: int,
    config: Config,
    shared_by: int,
) -> None:
    """The first launch: writes the keys, and how many of each block have each first digit."""
    keys = simt.offset_rows(simt.global_address(keys_m), simt.row(), U * 4)
    count_first(
        _scores(scores_m, valid_m, U, config, shared_by, keys),
        kept_m,
        hist_m,
        U=U,
        config=config,
    )


def count_first(
    fetch: Fetch, kept_m: Any, hist_m: Any, *, U: int, config: Config, bins: Bins | None = None
) -> None:
    hist = simt.shared_address(hist_m)
    histogram.clear(hist)
    block_barrier()

    place: threshold.Place = (
        (lambda key, rank: [_digit(key, rank, 0)]) if bins is None else bins.place
    )
    _Elements(fetch, fetch, U, config).each(lambda pairs: threshold.count(hist, pairs, place))
    kept = simt.offset_rows(
        simt.global_address(kept_m), simt.row(), config.blocks * histogram.KEPT * 4
    )
    histogram.keep(hist, kept)


def select_kept(
    kernel: str,
    keys: Array,
    kept: Array,
    k: int,
    config: Config,
    ranked: bool = False,
    bins: Bins | None = None,
) -> tuple[Array, ...]:
    """`selected` of keys u32[rows, U] whose first digits were counted.

    Each block sorts its candidates; then each finds the ranks of its own among all. If there
    are too many, one block selects alone, from all keys of the row."""
    rows = keys.shape[0]
    how: dict[str, Any] = {"U": keys.shape[1], "k": k, "config": config, "bins": bins}
    lists, lengths = simt.kernel(
        functools.partial(_list, **how),
        name=f"{kernel}_list",
        out_type=(
            jax.ShapeDtypeStruct((rows, config.blocks, 2 * candidates(k)), jnp.uint32),
            jax.ShapeDtypeStruct((rows, config.blocks), jnp.uint32),
        ),
        scratch=scratch(k, config),
        sparse=(0,),
        **launch_of(rows, config),
    )(keys, kept)
    return simt.kernel(
        functools.partial(_rank, **how, outs=3 if ranked else 2),
        name=kernel,
        out_type=selected(rows, k, ranked),
        scratch=scratch(k, config),
        **launch_of(rows, config),
    )(lists, lengths, keys)


def _list(
    keys_m: Any, kept_m: Any, lists_m: Any, lengths_m: Any, *scratch_m: Any, U: int, k: int, config: Config,
    bins: Bins | None,
) -> None:  # fmt: skip
    t = simt.special("tid.x")
    row = simt.row()
    part = simt.part()
    blocks = config.blocks
    hist, own, *spare, small = (simt.shared_address(m) for m in scratch_m)
    keys, kept = (
        simt.offset_rows(simt.global_address(m), row, n * 4)
        for m, n in ((keys_m, U), (kept_m, blocks * histogram.KEPT))
    )
    to = simt.offset_rows(simt.global_address(lists_m), row * blocks + part, 8 * candidates(k))
    to_length = simt.offset_rows(simt.global_address(lengths_m), row * blocks + part, 4)
    fetch = fetcher(keys, U, config)
    elements = _Elements(fetch, fetch, U, config)
    histogram.clear(hist)
    with when(t.equals(0)):
        simt.store_shared(small + LENGTH * 4, word(0))
    place, need, many, wanted, *_ = histogram.find_kept(
        hist, kept, word(k), blocks, of_earlier=False
    )
    if bins is None:
        none = place.equals(0)
        low = none.select(FIRST, place << DIGITS[0][1])
        listed = word(k) - need + none.select(0, many)
    else:
        low = bins.extent(place)[0]
        listed = wanted - need + many
    fits = listed <= candidates(k)
    with when(t.equals(0) & (listed > candidates(k))):
        ptx("st.global.u32 [$0], $1;", to_length, TOO_MANY)
    with when(fits):
        length = _collect(elements, low, word(0), own, small)
        sort_pairs(networks(candidates(k)), own, next(iter(spare), None), length, t)
        block_barrier()
        with when(t.equals(0)):
            ptx("st.global.u32 [$0], $1;", to_length, length)

        @loop(t, length, tiling.THREADS)
        def _store(i: Word) -> None:
            ptx(
                "st.global.v2.u32 [$0], {$1, $2};",
                simt.offset(to, i * 8),
                *simt.load_shared(own + i * 8, 2),
            )


def _rank(
    lists_m: Any, lengths_m: Any, keys_m: Any, *others_m: Any, outs: int, U: int, k: int, config: Config,
    bins: Bins | None,
) -> None:  # fmt: skip
    t = simt.special("tid.x")
    row = simt.row()
    part = simt.part()
    blocks = config.blocks
    sums, own, *_, small = (simt.shared_address(m) for m in others_m[outs:])
    keys, lists, of_row = (
        simt.offset_rows(simt.global_address(m), row, n * 4)
        for m, n in ((keys_m, U), (lists_m, blocks * 2 * candidates(k)), (lengths_m, blocks))
    )
    out = Out.of(k, *others_m[:outs])
    scratch_m = others_m[outs:]
    first_length = simt.load(of_row)
    with when(first_length.differs(TOO_MANY)):
        # Shared memory has the lists one after the other; `small` where each begins, how long
        # it is, and the longest.
        with when(t < 32):
            length = simt.load_below(t, blocks, simt.offset(of_row, t * 4))
            before = simt.warp_sum(length) - simt.sum_of_next_lanes(length) - length
            longest = instr("redux.sync.max.u32", length, -1, convergent=True)
            simt.store_shared(small + t * 8, before, length)
            with when(t.equals(0)):
                simt.store_shared(small + LONGEST * 4, longest)
        block_barrier()
        total = simt.sum_of(simt.load_shared(small + (blocks - 1) * 8, 2))
        with when((total < k) & part.equals(0)):
            four = tiling.load_four(keys, t * 4, U)
            _fill(
                [(key, word(SLOTS) - (t * 4 + j)) for j, key in enumerate(four)],
                total,
                sums,
                out,
            )
        each = tiling.THREADS // 32 // blocks  # warps that copy a list

        @loop(simt.divide(t >> 5, each), blocks, tiling.THREADS // 32)
        def _copy(b: Word) -> None:
            before, length = simt.load_shared(small + b * 8, 2)
            source = simt.offset_rows(lists, b, 8 * candidates(k))

            @loop(t - b * (32 * each), length, 32 * each)
            def _pair(i: Word) -> None:
                pair = ptx(
                    "ld.global.nc.v2.u32 {$0, $1}, [$2];", simt.offset(source, i * 8), results=2
                )
                simt.store_shared(own + (before + i) * 8, *pair)

        block_barrier()
        before, length = simt.load_shared(small + part * 8, 2)
        longest = simt.load_shared(small + LONGEST * 4)

        @loop(t, length, tiling.THREADS)
        def _write(i: Word) -> None:
            pair = simt.load_shared(own + (before + i) * 8, 2)
            at = i
            for b in range(1, blocks, AT_ONCE):
                of = []
                for j in range(b, min(b + AT_ONCE, blocks)):
                    other = part + j
                    of.append(
                        simt.load_shared(
                            small + (other - (other < blocks).select(0, blocks)) * 8, 2
                        )
                    )
                at = simt.sum_of(
                    [
                        at,
                        *larger(
                            pair, own, [n for _, n in of], [first for first, _ in of], longest
                        ),
                    ]
                )
            out.write(at, pair)

    with when(first_length.equals(TOO_MANY) & part.equals(0)):
        alone = tiling.Config(1, config.unroll, cluster=0)
        fetch = fetcher(keys, U, alone)
        select_row(fetch, fetch, out, scratch_m, U=U, k=k, config=alone, bins=bins)
