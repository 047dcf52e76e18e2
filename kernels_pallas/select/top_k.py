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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.select import histogram, tiling
from kvjax.kernels_pallas.select.keys import MAX_K, MAX_UNITS, SLOTS, ordered_keys
from kvjax.kernels_pallas.select.sort import LENGTH, LENGTHS, sort_pairs, write_by_rank
from kvjax.kernels_pallas.select.tiling import Config, config_for
from kvjax.kernels_pallas.simt import (
    Word,
    block_barrier,
    loop,
    ptx,
    when,
    word,
)

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/top_k.json
DIGITS = ((0, 21, 11), (0, 10, 11), (0, 0, 10), (1, 11, 11), (1, 0, 11))  # (of key 0 or slot 1, shift, bits)
QUEUE = 64  # elements of a warp up to which its threads reserve their places one after the other


def candidates(k: int) -> int:
    """How many elements are sorted at most."""
    return max(2 << (k - 1).bit_length(), 4096)


def smem_bytes(k: int) -> int:
    return 4 * sum(_sizes(k))


def unsupported(shape: tuple[int, ...], dtype: Any, k: int) -> str | None:
    """The limit that scores of this shape and dtype exceed; None if there is a kernel for them."""
    if not 1 <= k <= MAX_K:
        return f"the kernel top_k takes k from 1 to {MAX_K}; got {k}"
    if not shape or not k <= shape[-1] <= MAX_UNITS:
        return f"the kernel top_k takes rows of k to {MAX_UNITS} scores; got scores{list(shape)}, k={k}"
    if 0 in shape:
        return f"the kernel top_k takes at least one row; got scores{list(shape)}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel top_k takes scores in f32, bf16 or f16; got {jnp.dtype(dtype)}"
    return None


def supported(shape: tuple[int, ...], dtype: Any, k: int) -> bool:
    return unsupported(shape, dtype, k) is None


@simt.lowered_once("k", "config")
def top_k(scores: Array, valid: Array, k: int, *, config: Config | None = None) -> tuple[Array, Array]:
    """(slots i32[..., k], valid bool[..., k]) of the k largest of scores [..., U] where `valid`, largest first."""
    if limit := unsupported(scores.shape, scores.dtype, k):
        raise NotImplementedError(limit)
    *lead, U = scores.shape
    keys = jnp.pad(ordered_keys(scores, jnp.broadcast_to(valid, scores.shape)).reshape(-1, U), ((0, 0), (0, -U % 4)))
    out = select_keys(keys, k, config).reshape(*lead, k)
    return (out & jnp.uint32(SLOTS)).astype(jnp.int32), out > SLOTS


def select_keys(keys: Array, k: int, config: Config | None = None) -> Array:
    """u32[rows, k] slots of the k largest of keys u32[rows, U], U a multiple of 4; bit 31 is set if a key is not 0."""
    rows, U = keys.shape
    config = config or tuned.select("top_k", config_for(rows, U), (keys,), rows=rows, U=U, k=k)

    @jax.custom_batching.custom_vmap
    def run(keys: Array) -> Array:
        return simt.kernel(
            functools.partial(_program, U=U, k=k, config=config),
            name="kvjax_top_k",
            out_type=jax.ShapeDtypeStruct((rows, k), jnp.uint32),
            scratch=scratch(k),
            blocks=rows,
            cluster=config.blocks,
            warpgroups=tiling.THREADS // 128,
        )(keys)

    @run.def_vmap
    def batched(n: int, _: Any, keys: Array) -> tuple[Array, bool]:
        return select_keys(keys.reshape(n * rows, U), k, config).reshape(n, rows, k), True

    return run(keys)


def _sizes(k: int) -> tuple[int, int, int, int]:
    """Words for histograms, later for all blocks' lists; for this block's list; for its sorting; and for lengths."""
    room = 2 * candidates(k)
    return max(len(DIGITS) * histogram.PASS, room), room, room, 64


def scratch(k: int) -> tuple[int, ...]:
    """The words of shared memory that the selection needs."""
    return _sizes(k)


def _program(keys_m, out_m, *scratch_m, U: int, k: int, config: Config) -> None:
    row = simt.special("clusterid.x")
    keys = simt.offset_rows(simt.global_address(keys_m), row, U * 4)

    def fetch(i: Word) -> list[list[Word]]:
        return [tiling.load_four(keys, at, U) for at in tiling.fours(i, U, config)]

    select_row(
        fetch, fetch, simt.offset_rows(simt.global_address(out_m), row, k * 4), scratch_m, U=U, k=k, config=config
    )


Fetch = Callable[[Word], list[list[Word]]]


def select_row(
    first: Fetch, again: Fetch, out: Any, scratch_m: Sequence[Any], *, U: int, k: int, config: Config
) -> None:
    """Writes to `out` the slots of the k largest keys of a row, with bit 31 set if a key is not 0.

    `first(i)` gives the keys of `fours(i, U, config)` at their first use, `again(i)` after it.
    """
    blocks, capacity = config.blocks, candidates(k)
    t = simt.special("tid.x")
    hist, own, spare, small = (simt.shared_address(m) for m in scratch_m)

    def elements(fetch: Fetch, i: Word) -> list[tuple[Word, Word]]:
        """Keys and slots' ranks; past the end of the row keys are 0, and their slots come after all others."""
        places = zip(tiling.fours(i, U, config), fetch(i), strict=True)
        return [(key, word(SLOTS) - (at + j)) for at, four in places for j, key in enumerate(four)]

    elements_held = elements(first, word(0)) if tiling.in_one_step(U, config) else None
    fetches = iter((first,))

    def each(visit: Callable[[list[tuple[Word, Word]]], None]) -> None:
        fetch = next(fetches, again)
        if elements_held is not None:
            visit(elements_held)
        else:
            loop(0, tiling.steps(U, config)[2], 1)(lambda i: visit(elements(fetch, i)))

    histogram.clear(hist)
    with when(t.equals(0)):
        simt.store_shared(small + LENGTH * 4, word(0))
    block_barrier()

    # (high, its mask, low, its mask): the prefix of key and slot known so far; how many of its elements are still
    # needed, and how many it has.
    def found(n: int, state: list[Word]) -> list[Word]:
        """The state after digit n; if too many elements are left, after all later digits too, behind one branch."""
        state = _digit_pass(n, state, each, hist, blocks)
        if n + 1 == len(DIGITS):
            return state
        more = (word(k) - state[4] + state[5]) > capacity
        return simt.branch(more, functools.partial(found, n + 1, state), state)

    high, _, low, *_ = found(0, [word(x) for x in (0, 0, 0, 0, k, 0)])

    def collect(elements: list[tuple[Word, Word]]) -> None:
        """Adds the elements that are not below the prefix, with zeros after it, to the list."""
        taken = "{ .reg .u64 x, y; .reg .pred p; mov.b64 x, {$1, $2}; mov.b64 y, {$3, $4}; setp.ge.u64 p, x, y; "
        flags = [ptx(taken + "selp.u32 $0, 1, 0, p; }", rank, key, low, high, results=1) for key, rank in elements]
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
            store = "{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.shared.v2.u32 [$1], {$2, $3}; }"
            ptx(store, flag, at, rank, key)
            at = at + (flag << 3)

    each(collect)
    block_barrier()
    length = simt.load_shared(small + LENGTH * 4)
    with when(t < blocks):
        to = simt.remote(small + (simt.special("cluster_ctarank") + LENGTHS) * 4, t)
        ptx("st.shared::cluster.u32 [$0], $1;", to, length)
    simt.cluster_arrive()
    sort_pairs([n for n in (32, 256, 512, 1024, 2048) if n < capacity] + [capacity], own, spare, length, t)
    block_barrier()
    simt.cluster_wait()  # now all blocks have read the histograms too, which the lists overwrite
    write_by_rank(own, hist, small, out, length, t, k, blocks)


def _digit_pass(n: int, state: list[Word], each: Callable[..., None], hist: Word, blocks: int) -> list[Word]:
    """Adds digit n of the k-th element to the prefix."""
    of_slot, shift, bits = DIGITS[n]
    high, high_mask, low, low_mask, need, _ = state
    bins = hist + n * histogram.PASS * 4
    if n:
        histogram.clear(bins)
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
    digit, need, elements_held, *_ = histogram.find_bin(bins, need, blocks, of_earlier=False)
    mask = ((1 << bits) - 1) << shift
    if of_slot:
        return [high, high_mask, low | (digit << shift), low_mask | mask, need, elements_held]
    return [high | (digit << shift), high_mask | mask, low, low_mask, need, elements_held]
