"""The slots of the k largest scores of each row, in order of rank. The result is exact: ties go to the lower slot.

A cluster of blocks works on one row. Scores become unsigned keys of the same order (0: invalid). (1) Each thread reads
16 keys; registers hold a row of at most 131072. (2) A histogram of the top bits of the keys finds the bin of the k-th
key. While more than `candidates(k)` elements are left, the next bits are counted. (3) Each block sorts its share of the
candidates, sends it to the others, and finds the ranks of its own by bisection.

**Bytes:** 4 U read and 4 k written a row; longer rows are read three or more times.

**Bound:** latency, and the reads of 64 multiprocessors for longer rows.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import _tuned
from kvjax.kernels_pallas._common import Word, block_barrier, cluster_barrier, loop, ptx, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/top_k.json
THREADS = 1024
DIGITS = ((0, 21, 11), (0, 10, 11), (0, 0, 10), (1, 11, 11), (1, 0, 11))  # (of key 0 or slot 1, shift, bits)
BINS, GROUPS = 2048, 64  # groups of 32 bins
PASS = BINS + 5 * GROUPS  # words of the histogram of a pass, with what `find_bin` needs
SLOTS = (1 << 22) - 1  # a slot s ranks as SLOTS - s
MOST_K, MOST_UNITS = 4096, 1 << 21
QUEUE = 64  # elements of a warp, up to which its threads reserve their places one after the other
# Words of `small`, after totals of warps: of the length of this block's list, and of those of all blocks'.
LENGTH, LENGTHS = 32, 33


@dataclass(frozen=True)
class Config:
    blocks: int = 8  # of a row; clusters of 16 are not portable, but Hopper has them
    unroll: int = 4  # loads of four keys in flight

    def __post_init__(self) -> None:
        if self.blocks not in (1, 2, 4, 8, 16):
            raise ValueError(f"blocks must be 1, 2, 4, 8 or 16, a cluster's; got {self.blocks}")
        if self.unroll < 1:
            raise ValueError(f"unroll must be at least 1; got {self.unroll}")


def config_for(rows: int, units: int) -> Config:
    """As many blocks a row as run at once, one on a multiprocessor; whole clusters cannot use all of the 132.

    A short row has fewer, as to merge them takes longer than to read it.
    """
    most = 2 if units <= 8192 else 4 if units <= 16384 else 8
    return Config(blocks=next((b for b in (8, 4) if b <= most and rows * b <= 112), 2))


def candidates(k: int) -> int:
    """How many elements are sorted at most."""
    return max(2 << (k - 1).bit_length(), 4096)


def smem_bytes(k: int) -> int:
    return 4 * sum(_sizes(k))


def unsupported(shape: tuple[int, ...], dtype: Any, k: int) -> str | None:
    """The limit that scores of this shape and dtype exceed; None if there is a kernel for them."""
    if not 1 <= k <= MOST_K:
        return f"the kernel top_k takes k from 1 to {MOST_K}; got {k}"
    if not shape or not k <= shape[-1] <= MOST_UNITS:
        return f"the kernel top_k takes rows of k to {MOST_UNITS} scores; got scores{list(shape)}, k={k}"
    if 0 in shape:
        return f"the kernel top_k takes at least one row; got scores{list(shape)}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel top_k takes scores in f32, bf16 or f16; got {jnp.dtype(dtype)}"
    return None


def supported(shape: tuple[int, ...], dtype: Any, k: int) -> bool:
    return unsupported(shape, dtype, k) is None


@c.lowered_once("k", "config")
def top_k(scores: Array, valid: Array, k: int, *, config: Config | None = None) -> tuple[Array, Array]:
    """(slots i32[..., k], valid bool[..., k]) of the k largest of scores [..., U] where `valid`, most first."""
    if limit := unsupported(scores.shape, scores.dtype, k):
        raise NotImplementedError(limit)
    *lead, U = scores.shape
    keys = jnp.pad(ordered_keys(scores, jnp.broadcast_to(valid, scores.shape)).reshape(-1, U), ((0, 0), (0, -U % 4)))
    out = select(keys, k, config).reshape(*lead, k)
    return (out & jnp.uint32(SLOTS)).astype(jnp.int32), out > SLOTS


def ordered_keys(scores: Array, valid: Array) -> Array:
    """u32 keys in the order of the scores, as in the reference: NaN and -inf as the lowest finite; 0 if not valid."""
    low = jnp.finfo(scores.dtype).min
    finite = jnp.clip(jnp.nan_to_num(scores, nan=low), low).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(finite, jnp.uint32)
    key = jnp.where(bits >> 31 != 0, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(valid, key, jnp.uint32(0))


def select(keys: Array, k: int, config: Config | None = None) -> Array:
    """u32[rows, k] slots of the k largest of keys u32[rows, U], U a multiple of 4; with bit 31 where a key is not 0."""
    rows, U = keys.shape
    chosen = config or _tuned.choose("top_k", config_for(rows, U), (keys,), rows=rows, U=U, k=k)

    @jax.custom_batching.custom_vmap
    def run(keys: Array) -> Array:
        return c.kernel(
            functools.partial(_program, U=U, k=k, config=chosen),
            name="kvjax_top_k",
            out_type=jax.ShapeDtypeStruct((rows, k), jnp.uint32),
            scratch_types=scratch(k),
            grid=(rows,),
            grid_names=("row",),
            cluster=(chosen.blocks,),
            cluster_names=("part",),
            num_threads=THREADS // 128,
        )(keys)

    @run.def_vmap
    def batched(n: int, _: Any, keys: Array) -> tuple[Array, bool]:
        return select(keys.reshape(n * rows, U), k, config).reshape(n, rows, k), True

    return run(keys)


def _load(at: Word) -> Word:
    return ptx("ld.shared.u32 $0, [$1];", at, results=1)


def _pair(at: Word) -> list[Word]:
    return ptx("ld.shared.v2.u32 {$0, $1}, [$2];", at, results=2)


def _store(at: Word, x: Word) -> None:
    ptx("st.shared.u32 [$0], $1;", at, x)


def _store_pair(at: Word, x: list[Word]) -> None:
    ptx("st.shared.v2.u32 [$0], {$1, $2};", at, *x)


def _load_pair(at: Word, index: Word, count: Word) -> list[Word]:
    """The pair at `at` if index < count, else zeros."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0; mov.u32 $1, 0; @p ld.shared.v2.u32 {$0, $1}, [$4]; }",
        *(index, count, at),
        results=2,
    )


def fours(i: Word, U: int, config: Config) -> list[Word]:
    """The first of each four of adjacent elements that this thread has of step i of a row of U. A step has some of all
    of the row, as a sample."""
    stride, unroll, number = steps(U, config)
    first = i * stride + c.special("cluster_ctarank") * (THREADS * 4) + c.special("tid.x") * 4
    return [first + u * (number * stride) for u in range(unroll)]


def steps(U: int, config: Config) -> tuple[int, int, int]:
    """Elements between the fours of a thread in a step and the next, fours of a step, steps."""
    stride = THREADS * 4 * config.blocks
    number = -(-U // (stride * config.unroll))
    return stride, -(-U // (stride * number)), number


def ends(U: int, config: Config) -> list[int]:
    """Before which each of `fours` lies, for all threads and steps."""
    stride, unroll, number = steps(U, config)
    return [(u + 1) * number * stride for u in range(unroll)]


def in_one_step(U: int, config: Config) -> bool:
    """Whether the threads of a row hold all of it in registers, and read it once."""
    return steps(U, config)[2] == 1


def load_four(row: Any, at: Word, U: int) -> list[Word]:
    """Words at .. at + 3 of a row in device memory; zeros past its end."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, $4, $5; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        "@p ld.global.v4.u32 {$0, $1, $2, $3}, [$6]; }",
        *(at, U, c.offset(row, at * 4)),
        results=4,
    )


def _sizes(k: int) -> tuple[int, int, int, int]:
    """Words: of histograms, and after them of all blocks' lists; of this block's list; of its sorting; of lengths."""
    room = 2 * candidates(k)
    return max(len(DIGITS) * PASS, room), room, room, 64


def scratch(k: int) -> list[Any]:
    """What `pick` needs of shared memory."""
    return [c.plgpu.SMEM((n,), jnp.uint32) for n in _sizes(k)]


def _program(keys_m, out_m, *scratch_m, U: int, k: int, config: Config) -> None:
    row = c.special("clusterid.x")
    keys = c.offset_rows(c.global_address(keys_m), row, U * 4)

    def fetch(i: Word) -> list[list[Word]]:
        return [load_four(keys, at, U) for at in fours(i, U, config)]

    pick(fetch, fetch, c.offset_rows(c.global_address(out_m), row, k * 4), scratch_m, U=U, k=k, config=config)


Fetch = Callable[[Word], list[list[Word]]]


def pick(first: Fetch, again: Fetch, out: Any, scratch_m: Sequence[Any], *, U: int, k: int, config: Config) -> None:
    """Writes to `out` the slots of the k largest keys of a row, with bit 31 where a key is not 0.

    `first(i)` gives the keys of `fours(i, U, config)` the first time that they are looked at, `again(i)` after it.
    """
    blocks, capacity = config.blocks, candidates(k)
    t = c.special("tid.x")
    hist, mine, sort, small = (c.shared_address(m) for m in scratch_m)

    def elements(fetch: Fetch, i: Word) -> list[tuple[Word, Word]]:
        """Keys and slots' ranks; past the end of the row keys are 0, and their slots come after all others."""
        places = zip(fours(i, U, config), fetch(i), strict=True)
        return [(key, word(SLOTS) - (at + j)) for at, four in places for j, key in enumerate(four)]

    held = elements(first, word(0)) if in_one_step(U, config) else None
    fetches = iter((first,))

    def each(visit: Callable[[list[tuple[Word, Word]]], None]) -> None:
        fetch = next(fetches, again)
        if held is not None:
            visit(held)
        else:
            loop(0, steps(U, config)[2], 1)(lambda i: visit(elements(fetch, i)))

    clear(hist)
    with when(t.equals(0)):
        _store(small + LENGTH * 4, word(0))
    block_barrier()

    # (high, its mask, low, its mask): the prefix of key and slot known so far; how many of its elements are still
    # needed, and how many it has.
    def found(n: int, state: list[Word]) -> list[Word]:
        """The state after digit n; after all that follow as well, behind one branch, if too many elements are left."""
        state = _digit_pass(n, state, each, hist, blocks)
        if n + 1 == len(DIGITS):
            return state
        more = (word(k) - state[4] + state[5]) > capacity
        return c.choose_between(more, functools.partial(found, n + 1, state), state)

    high, _, low, *_ = found(0, [word(x) for x in (0, 0, 0, 0, k, 0)])

    def collect(elements: list[tuple[Word, Word]]) -> None:
        """Those from the prefix on, with zeros after it, up."""
        taken = "{ .reg .u64 x, y; .reg .pred p; mov.b64 x, {$1, $2}; mov.b64 y, {$3, $4}; setp.ge.u64 p, x, y; "
        flags = [ptx(taken + "selp.u32 $0, 1, 0, p; }", rank, key, low, high, results=1) for key, rank in elements]
        n = c.sum_of(flags)
        of_warp = c.warp_sum(n)
        many = of_warp > QUEUE

        def reserve(wanted: Word) -> Word:
            code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; mov.u32 $0, 0; @p atom.shared.add.u32 $0, [$2], $1; }"
            return ptx(code, wanted, small + LENGTH * 4, results=1)

        def in_turn() -> list[Word]:
            first = c.from_lane(reserve((t & 31).equals(0).choose(of_warp, 0)), 0)
            return [first + of_warp - c.warp_later(n) - n]

        (place,) = c.choose_between(many, in_turn, [reserve(many.choose(0, n))])
        at = mine + place * 8
        for flag, (key, rank) in zip(flags, elements, strict=True):
            store = "{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.shared.v2.u32 [$1], {$2, $3}; }"
            ptx(store, flag, at, rank, key)
            at = at + (flag << 3)

    each(collect)
    block_barrier()
    length = _load(small + LENGTH * 4)
    with when(t < blocks):
        to = c.remote(small + (c.special("cluster_ctarank") + LENGTHS) * 4, t)
        ptx("st.shared::cluster.u32 [$0], $1;", to, length)
    c.cluster_arrive()
    _sort([n for n in (32, 256, 512, 1024, 2048) if n < capacity] + [capacity], mine, sort, length, t)
    block_barrier()
    c.cluster_wait()  # so all blocks have read the histograms too, where the lists come
    _rank(mine, hist, small, out, length, t, k, blocks)


def clear(bins: Word) -> None:
    """`PASS` words, to be counted in after a barrier."""
    loop(c.special("tid.x"), PASS // 4, THREADS)(
        lambda i: ptx("st.shared.v4.u32 [$0], {$1, $1, $1, $1};", bins + i * 16, 0)
    )


def _digit_pass(n: int, state: list[Word], each: Callable[..., None], hist: Word, blocks: int) -> list[Word]:
    """Adds digit n of the k-th element to the prefix."""
    of_slot, shift, bits = DIGITS[n]
    high, high_mask, low, low_mask, need, _ = state
    bins = hist + n * PASS * 4
    if n:
        clear(bins)
        block_barrier()

    def count(elements: list[tuple[Word, Word]]) -> None:
        for key, rank in elements:
            match = (key & high_mask).equals(high)
            if of_slot:
                match = match & (rank & low_mask).equals(low)
            with when(match):
                digit = ((rank if of_slot else key) >> shift) & ((1 << bits) - 1)
                ptx("red.shared.add.u32 [$0], 1;", bins + digit * 4)

    each(count)
    digit, need, held, *_ = find_bin(bins, need, blocks, of_earlier=False)
    mask = ((1 << bits) - 1) << shift
    if of_slot:
        return [high, high_mask, low | (digit << shift), low_mask | mask, need, held]
    return [high | (digit << shift), high_mask | mask, low, low_mask, need, held]


class Found(NamedTuple):
    """The bin in which the last of the `wanted` largest elements lies, and numbers of elements."""

    bin: Word
    need: Word  # of the bin, among the wanted
    many: Word  # in the bin
    wanted: Word  # all, if there are fewer than were asked for
    above: Word  # in higher bins, of the blocks before this one
    beside: Word  # in the bin, of the blocks before this one


def find_bin(bins: Word, wanted: Word, blocks: int, of_earlier: bool = True) -> Found:
    """Of the histograms that the blocks have at `bins`, `PASS` words that were zeros before the elements were counted;
    without numbers of earlier blocks, which are zeros then, if these are not wanted.

    A block reads of another the sums of 32 bins each, then the 32 bins in which the one lies: of each one word a lane.
    """
    thread, part = c.special("tid.x"), c.special("cluster_ctarank")
    lane, warp = thread & 31, thread >> 5
    own, sums, sums_before, counts, counts_before = (bins + 4 * (BINS + i * GROUPS) for i in range(5))
    block_barrier()
    here = c.sum_of(_pair(bins + thread * 8))
    low = c.warp_sum((lane < 16).choose(here, 0))
    high = c.warp_sum(here) - low
    with when(lane.equals(0)):
        _store_pair(own + warp * 8, [low, high])
    cluster_barrier()

    def add(at: Word, block: Word, to: Word, to_before: Word) -> None:
        theirs = ptx("ld.shared::cluster.u32 $0, [$1];", c.remote(at, block), results=1)
        ptx("red.shared.add.u32 [$0], $1;", to, theirs)
        if of_earlier:
            with when(block < part):
                ptx("red.shared.add.u32 [$0], $1;", to_before, theirs)

    def place(counts: list[Word], wanted: Word) -> list[Word]:
        """Of counts that the lanes have, which has the last of the wanted, how many come after it, and itself."""
        above = c.warp_later(c.sum_of(counts))
        found = [word(0)] * 3
        for j in reversed(range(len(counts))):
            there = (above < wanted) & (wanted <= above + counts[j])
            of_this = lane * len(counts) + j, above, counts[j]
            found = [there.choose(x, y) for x, y in zip(of_this, found, strict=True)]
            above = above + counts[j]
        return [c.warp_sum(x) for x in found]

    with when(warp < 2 * blocks):
        group = ((warp & 1) * 32 + lane) * 4
        add(own + group, warp >> 1, sums + group, sums_before + group)
    block_barrier()
    groups = _pair(sums + lane * 8)
    total = c.warp_sum(groups[0] + groups[1])
    wanted = (wanted < total).choose(wanted, total)
    group, above, _ = place(groups, wanted)
    with when(warp < blocks):
        add(bins + (group * 32 + lane) * 4, warp, counts + lane * 4, counts_before + lane * 4)
    block_barrier()
    of_group, more, many = place([_load(counts + lane * 4)], wanted - above)
    found = group * 32 + of_group, wanted - above - more, many, wanted
    if not of_earlier:
        return Found(*found, word(0), word(0))
    before = [(lane * 2 + j > group).choose(x, 0) for j, x in enumerate(_pair(sums_before + lane * 8))]
    beside = _load(counts_before + lane * 4)
    before.append((lane > of_group).choose(beside, 0))
    return Found(*found, c.warp_sum(c.sum_of(before)), c.warp_sum(lane.equals(of_group).choose(beside, 0)))


def earlier(x: Word, small: Word) -> Word:
    """The sum of x over the threads of the block that come before this one."""
    thread = c.special("tid.x")
    lane, warp = thread & 31, thread >> 5
    later = c.warp_later(x)
    of_warp = c.warp_sum(x)
    with when(lane.equals(0)):
        _store(small + warp * 4, of_warp)
    block_barrier()
    return c.warp_sum((lane < warp).choose(_load(small + lane * 4), 0)) + of_warp - later - x


def _sort(sizes: list[int], mine: Word, spare: Word, length: Word, t: Word) -> None:
    """Sorts `mine` by the smallest of the networks that has room. A branch past one takes long: few are passed."""
    if len(sizes) == 1:
        of_thread = max(2 if sizes[0] > 32 else 1, sizes[0] // THREADS)  # fewer waits for others than with one
        with when(t < sizes[0] // of_thread):
            _bitonic(sizes[0], of_thread, mine, spare, length, t)
        return
    half = len(sizes) // 2
    with when(length <= sizes[half - 1]):
        _sort(sizes[:half], mine, spare, length, t)
    with when(length > sizes[half - 1]):
        _sort(sizes[half:], mine, spare, length, t)


def _bitonic(size_all: int, m: int, mine: Word, spare: Word, length: Word, t: Word) -> None:
    """Sorts the first `length` pairs of `mine`, largest first, by the first threads, each of m of `size_all`."""
    base = (t >> 5) * (32 * m) + (t & 31)
    at = [base + 32 * j for j in range(m)]
    x = [_load_pair(mine + e * 8, e, length) for e in at]
    buffers = [spare, mine]

    def sync() -> None:
        ptx(f"bar.sync 1, {size_all // m};", convergent=True)

    def keep(mine: list[Word], other: list[Word], larger: Word) -> list[Word]:
        return ptx(
            "{ .reg .u64 x, y; .reg .pred p, q; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; setp.gt.u64 p, x, y; "
            "setp.ne.u32 q, $6, 0; xor.pred p, p, q; selp.b32 $0, $4, $2, p; selp.b32 $1, $5, $3, p; }",
            *(*mine, *other, larger),
            results=2,
        )

    size = 2
    while size <= size_all:
        gap = size // 2
        while gap:
            if gap >= 32 * m:
                for e, v in zip(at, x, strict=True):
                    _store_pair(buffers[0] + e * 8, v)
                sync()
                other = [_pair(buffers[0] + (e ^ gap) * 8) for e in at]
                buffers.reverse()
            elif gap >= 32:
                other = [x[j ^ (gap // 32)] for j in range(m)]
            else:
                other = [[c.bfly(w, gap) for w in v] for v in x]
            larger = [(e & gap).equals(0).choose(1, 0) ^ (e & size).equals(0).choose(0, 1) for e in at]
            x = [keep(*three) for three in zip(x, other, larger, strict=True)]
            gap //= 2
        size *= 2
    sync()
    for e, v in zip(at, x, strict=True):
        _store_pair(mine + e * 8, v)


def _rank(mine: Word, lists: Word, small: Word, out: Any, length: Word, t: Word, k: int, blocks: int) -> None:
    """Gives the sorted list `mine` to the other blocks, and writes its slots where they rank.

    Of the others' lists a block has that of the next block first, and so on, in `lists`.
    """
    part, share = c.special("cluster_ctarank"), THREADS // blocks  # threads that write to a block
    lengths = [_load(small + (((part + b) & (blocks - 1)) + LENGTHS) * 4) for b in range(1, blocks)]
    firsts, most = [word(0)], word(0)
    for n in lengths:
        firsts.append(firsts[-1] + n)
        most = (most > n).choose(most, n)
    block = c.divide(t, share)
    after = (part - block) & (blocks - 1)  # how many blocks this one comes after it
    between = [(after > b).choose(lengths[-b], 0) for b in range(1, blocks - 1)]
    to = c.remote(lists + c.sum_of([word(0), *between]) * 8, block)

    @loop(after.equals(0).choose(length, t & (share - 1)), length, share)
    def _give(i: Word) -> None:
        ptx("st.shared::cluster.v2.u32 [$0], {$1, $2};", to + i * 8, *_pair(mine + i * 8))

    cluster_barrier()
    bits = word(32) - ptx("clz.b32 $0, $1;", most, results=1)

    @loop(t, length, THREADS)
    def _write(i: Word) -> None:
        rank, key = _load_pair(mine + i * 8, i, length)

        def bisect(j: Word, *counts: Word) -> list[Word]:
            step = word(1) << (bits - 1 - j)
            return [
                ptx(
                    "{ .reg .u64 x, y; .reg .pred p, q; setp.le.u32 p, $2, $3; mov.b64 x, {$4, $5}; mov.u64 y, 0; "
                    "@p ld.shared.u64 y, [$6]; setp.gt.u64 q, y, x; selp.u32 $0, $2, $1, q; }",
                    *(count, count + step, n, rank, key, lists + (first + count + step - 1) * 8),
                    results=1,
                )
                for n, first, count in zip(lengths, firsts[:-1], counts, strict=True)
            ]

        larger = loop(0, bits, 1, [word(0)] * len(lengths))(bisect) if lengths else []
        at = c.sum_of([i, *larger])
        with when(at < k):
            slot = (word(SLOTS) - rank) | key.differs(0).choose(1 << 31, 0)
            ptx("st.global.u32 [$0], $1;", c.offset(out, at * 4), slot)
