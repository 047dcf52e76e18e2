"""The k highest-ranked units of a group of query heads: heads are reduced and units selected in one kernel.

The reduced scores (`kvjax.selection.reduce_scores`) exist only in registers. For softmaxes, the kernel reads all scores
once to find the log-sum-exp of each head, merged over warp, block and cluster. It then reads the scores again, reduces
the G scores of a unit to one key, and goes on as `top_k`. Rows that registers cannot hold are written out as keys.

The key is the sum of softmaxes itself, because its leading bits separate more units than a logarithm's. Sums below
2^-96 use their logarithm.

**Bytes:** 4 G U read a row of the group, twice with softmaxes, and 4 k written.

**Bound:** latency at 131072 units; the second read often hits the L2 cache.

**Limits:** at most 8 heads a group, scores in f32, and those of `top_k`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import _tuned
from kvjax.kernels_pallas import top_k as t
from kvjax.kernels_pallas._common import Flag, Word, instr, loop, ptx, real, when, word
from kvjax.kernels_pallas._softmax import finite
from kvjax.kernels_pallas.top_k import Config, config_for

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/top_k_grouped.json
HEADS = 8
STATS = 32 * HEADS * 2  # words: largest and sum of a head and warp; after them a head's of the block, and its log
LOG2_E = 1 / math.log(2)
NOTHING = c.real_bits(-math.inf), 0  # the state of no scores
SOFTMAX = ("max_softmax", "sum_softmax", "mean_softmax")
LOWEST = float(jnp.finfo(jnp.float32).min)
LEAST_SUM, INFINITE = c.real_bits(2.0**-96), c.real_bits(math.inf)  # sums of softmaxes that are ranked as they are

Parts = Sequence[tuple[Any, Any]]


def smem_bytes(k: int) -> int:
    return t.smem_bytes(k) + 4 * (STATS + 3 * HEADS)


def unsupported(parts: Parts, group_reduce: str, k: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    G, U = parts[0][0].shape[2], sum(scores.shape[3] for scores, _ in parts)
    if not 1 <= G <= HEADS:
        return f"the kernel top_k_grouped takes 1 to {HEADS} query heads a kv head; got {G}"
    if any(scores.dtype != jnp.float32 for scores, _ in parts):
        return f"the kernel top_k_grouped takes scores in f32; got {', '.join(str(s.dtype) for s, _ in parts)}"
    limit = t.unsupported((parts[0][0].shape[0], U), jnp.float32, k)
    return limit and limit.replace("top_k", "top_k_grouped", 1)


def supported(parts: Parts, group_reduce: str, k: int) -> bool:
    return unsupported(parts, group_reduce, k) is None


@c.lowered_once("group_reduce", "k", "config")
def top_k_grouped(parts: Parts, group_reduce: str, k: int, *, config: Config | None = None) -> tuple[Array, Array]:
    """(slots i32[B, K, H, k], valid bool[B, K, H, k]) of the k units of all parts that rank highest, most first.

    A part is scores f32[B, K, G, U'] and its valid bool[B, 1 or K, 1, U']; H is G under "per_head", else 1. Two parts
    are read where they lie if the first has a multiple of 4 units; else the scores are put together first.
    """
    if limit := unsupported(parts, group_reduce, k):
        raise NotImplementedError(limit)
    B, K, G, _ = parts[0][0].shape
    H = G if group_reduce == "per_head" else 1
    scores = [scores for scores, _ in parts]
    shared = jnp.broadcast_shapes(*(ok.shape[:-1] for _, ok in parts))  # a part may have one row for all KV heads
    flags = [jnp.broadcast_to(ok, (*shared, ok.shape[-1])) for _, ok in parts]
    valid = jnp.concatenate([ok.astype(jnp.uint8) for ok in flags], axis=-1)
    if len(parts) > 2 or (len(parts) == 2 and scores[0].shape[3] % 4):
        scores = [jnp.concatenate(scores, axis=-1)]
    ragged = ((0, 0),) * 3 + ((0, -valid.shape[3] % 4),)
    scores[-1], valid = jnp.pad(scores[-1], ragged), jnp.pad(valid, ragged)
    valid = valid.reshape(-1, valid.shape[-1])
    flat = [s.reshape(B * K * H, G // H, s.shape[3]) for s in scores]
    rows, U = B * K * H, sum(part.shape[3] for part in scores)
    chosen = config or _tuned.choose(
        "top_k_grouped",
        config_for(rows, U),
        (*scores, valid),
        rows=rows,
        U=U,
        k=k,
        G=G // H,
        softmax=int(group_reduce in SOFTMAX),
    )
    out = _pick(group_reduce, k, chosen, valid, *flat).reshape(B, K, H, k)
    return (out & jnp.uint32(t.SLOTS)).astype(jnp.int32), out > t.SLOTS


def _pick(group_reduce: str, k: int, config: Config, valid: Array, *scores: Array) -> Array:
    rows, heads, _ = scores[0].shape
    sizes = tuple(s.shape[2] for s in scores)
    U = sum(sizes)
    outs = [jax.ShapeDtypeStruct((rows, k), jnp.uint32)]
    if not t.in_one_step(U, config):
        outs.append(jax.ShapeDtypeStruct((rows, U), jnp.uint32))  # keys, for the later passes

    @jax.custom_batching.custom_vmap
    def run(valid: Array, *scores: Array) -> Array:
        shared_by = rows // valid.shape[0]
        return c.kernel(
            functools.partial(
                _program, sizes=sizes, heads=heads, shared_by=shared_by, group_reduce=group_reduce, k=k, config=config
            ),
            name="kvjax_top_k_grouped",
            out_type=tuple(outs),
            scratch_types=[*t.scratch(k), c.plgpu.SMEM((STATS + 3 * HEADS,), jnp.uint32)],
            grid=(rows,),
            grid_names=("row",),
            cluster=(config.blocks,),
            cluster_names=("part",),
            num_threads=t.THREADS // 128,
        )(valid, *scores)[0]

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[Array, bool]:
        return _pick(group_reduce, k, config, *c.flatten_batch(n, batches, args)).reshape(n, rows, k), True

    return run(valid, *scores)


def _program(
    *refs: Any, sizes: tuple[int, ...], heads: int, shared_by: int, group_reduce: str, k: int, config: Config
) -> None:
    U = sum(sizes)
    row = c.special("clusterid.x")
    valid_m, *rest = refs
    scores_m, (out_m, *rest) = rest[: len(sizes)], rest[len(sizes) :]
    *keys_m, hist_m, mine_m, sort_m, small_m, stats_m = rest
    valid = c.offset_rows(c.global_address(valid_m), c.divide(row, shared_by), U)
    scores = [c.offset_rows(c.global_address(m), row, heads * n * 4) for m, n in zip(scores_m, sizes, strict=True)]
    out = c.offset_rows(c.global_address(out_m), row, k * 4)
    keys = c.offset_rows(c.global_address(keys_m[0]), row, U * 4) if keys_m else None

    def load(at: Word, end: int) -> tuple[list[Word], list[list[Word]]]:
        """Of units at .. at + 3, which are valid (0 or 1), and each head's scores, as `load_heads`."""
        flags = c.load_below(at, U, c.offset(valid, at))
        fours = load_heads(scores, sizes, heads, at, end)
        return [(flags >> (8 * j)) & 1 for j in range(4)], fours

    logs = _log_sums(load, U, heads, stats_m, config) if group_reduce in SOFTMAX and heads > 1 else None

    def first(i: Word) -> list[list[Word]]:
        fours = []
        for at, end in zip(t.fours(i, U, config), t.ends(U, config), strict=True):
            flags, heads_ = load(at, end)
            four = pooled_keys(flags, [[h[j] for h in heads_] for j in range(4)], logs, group_reduce)
            fours.append(four)
            if keys is not None:
                with when(at < U):
                    ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", c.offset(keys, at * 4), *four)
        return fours

    def again(i: Word) -> list[list[Word]]:
        return [t.load_four(keys, at, U) for at in t.fours(i, U, config)]

    t.pick(first, again, out, (hist_m, mine_m, sort_m, small_m), U=U, k=k, config=config)


def load_heads(scores: Sequence[Any], sizes: Sequence[int], heads: int, at: Word, end: int) -> list[list[Word]]:
    """Each head's scores of units at .. at + 3 of one part or two; all 0 past the end of the row. They lie before `end`
    for all threads, so that often nothing is left to ask."""
    U = sum(sizes)
    fours = []
    for head in range(heads):
        rows = [c.offset_rows(s, word(head), n * 4) for s, n in zip(scores, sizes, strict=True)]
        if end <= sizes[0]:
            load = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
            fours.append(ptx(load, c.offset(rows[0], at * 4), results=4))
            continue
        if len(sizes) == 1:
            fours.append(t.load_four(rows[0], at, U))
            continue
        in_first = at < sizes[0]
        within = (in_first.choose(at, 0), in_first.choose(0, at - sizes[0]))
        fours.append(
            ptx(
                "{ .reg .pred p, q; .reg .u64 a; setp.lt.u32 p, $4, $5; setp.lt.u32 q, $4, $6; "
                "selp.b64 a, $7, $8, q; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
                "@p ld.global.v4.u32 {$0, $1, $2, $3}, [a]; }",
                *(at, U, sizes[0], *(c.offset(r, w * 4) for r, w in zip(rows, within, strict=True))),
                results=4,
            )
        )
    return fours


def pooled_keys(flags: list[Word], units: list[list[Word]], logs: list[Word] | None, group_reduce: str) -> list[Word]:
    """The keys of units with these scores of the heads, 0 where the flag is; `logs` as `_log_sums` gives them, where
    softmaxes are pooled.

    Sums of softmaxes are ranked as they are; those that are next to nothing, or not finite, by their logarithms, which
    come below the rest or are no number.
    """
    if logs is None:
        keys = [_key(functools.reduce(_add, unit)) for unit in units]
    else:
        units = [
            [instr("fma.rn.f32", x, real(LOG2_E), log) for x, log in zip(unit, logs, strict=True)] for unit in units
        ]
        if group_reduce == "max_softmax":
            keys = [_key(functools.reduce(_larger, unit)) for unit in units]
        else:
            sums = [functools.reduce(_add, [_power(x) for x in unit]) for unit in units]
            usual = [(x - LEAST_SUM) < (INFINITE - LEAST_SUM) for x in sums]
            keys = [x | (1 << 31) for x in sums]

            def logarithms() -> list[Word]:
                of_logs = [_key(_log_of_sum(unit)) for unit in units]
                return [flag.choose(x, y) for flag, x, y in zip(usual, keys, of_logs, strict=True)]

            all_usual = functools.reduce(lambda a, b: a & b, usual)
            keys = c.choose_between(all_usual.choose(0, 1).differs(0), logarithms, keys)
    return [flag.differs(0).choose(key, 0) for flag, key in zip(flags, keys, strict=True)]


def _add(a: Word, b: Word) -> Word:
    return instr("add.f32", a, b)


def _larger(a: Word, b: Word) -> Word:
    return instr("max.f32", a, b)


def _power(x: Word) -> Word:
    return instr("ex2.approx.ftz.f32", x)


def _log_of_sum(shares: list[Word]) -> Word:
    top = functools.reduce(_larger, shares)
    shift = finite(top)
    total = functools.reduce(_add, [_power(instr("sub.f32", x, shift)) for x in shares])
    return _add(shift, instr("lg2.approx.f32", total))


def _key(x: Word) -> Word:
    """Of the same order, as `top_k.ordered_keys`."""
    x = instr("max.f32", x, real(LOWEST))  # also of NaN
    x = _add(x, real(0.0))
    return (x >> 31).differs(0).choose(x ^ 0xFFFFFFFF, x | (1 << 31))


def _log_sums(load: Any, U: int, heads: int, stats_m: Any, config: Config) -> list[Word]:
    """For each head minus log2 of the sum of exp(score) over the valid units; 0 where there is none."""
    stats = c.shared_address(stats_m)
    of_block, logs = stats + 4 * STATS, stats + 4 * (STATS + 2 * HEADS)
    thread, part = c.special("tid.x"), c.special("cluster_ctarank")
    lane, warp = thread & 31, thread >> 5
    stride = t.THREADS * 4 * config.blocks
    nothing = [word(x) for x in NOTHING]

    @loop(part * (t.THREADS * 4) + thread * 4, U, stride, nothing * heads)
    def sums(at: Word, *carry: Word) -> list[Word]:
        flags, fours = load(at, U + stride)
        flags = [flag.differs(0) for flag in flags]
        new = []
        for head, four in enumerate(fours):
            four = [flag.choose(x, NOTHING[0]) for flag, x in zip(flags, four, strict=True)]
            new += add(carry[2 * head : 2 * head + 2], four)
        return new

    for head in range(heads):
        state = merge_lanes(sums[2 * head : 2 * head + 2])
        with when(lane.equals(0)):
            ptx("st.shared.v2.u32 [$0], {$1, $2};", stats + (warp * HEADS + head) * 8, *state)
    c.block_barrier()
    with when(warp < heads):  # warp h merges head h of all warps
        state = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", stats + (lane * HEADS + warp) * 8, results=2)
        state = merge_lanes(state)
        with when(lane.equals(0)):
            ptx("st.shared.v2.u32 [$0], {$1, $2};", of_block + warp * 8, *state)
    c.cluster_barrier()
    with when(warp < heads):  # and of all blocks
        there = lane < config.blocks
        at = c.remote(of_block + warp * 8, there.choose(lane, 0))
        state = ptx("ld.shared::cluster.v2.u32 {$0, $1}, [$2];", at, results=2)
        log = minus_log(merge_lanes([there.choose(x, y) for x, y in zip(state, NOTHING, strict=True)]))
        with when(lane.equals(0)):
            ptx("st.shared.u32 [$0], $1;", logs + warp * 4, log)
    c.block_barrier()
    return [ptx("ld.shared.u32 $0, [$1];", logs + head * 4, results=1) for head in range(heads)]


# A state is the largest of some scores (base 2), and the sum of 2^(score - largest).


def _finite(x: Word) -> Flag:
    return (x & 0x7FFFFFFF) < 0x7F800000


def add(state: Sequence[Word], scores: Sequence[Word]) -> list[Word]:
    """A state with some natural scores. Of infinite ones the sum is that of 2^score, which is 0 or infinite too."""
    before, total = state
    top = functools.reduce(_larger, scores)
    peak = _larger(before, instr("mul.f32", top, real(LOG2_E)))
    shift = _finite(peak).choose(peak ^ (1 << 31), 0)
    keep = _power(_add(before, shift))
    added = functools.reduce(_add, [_power(instr("fma.rn.f32", x, real(LOG2_E), shift)) for x in scores])
    return [peak, instr("fma.rn.f32", total, keep, added)]


def merge(states: Sequence[Sequence[Word]]) -> list[Word]:
    """One state of some."""
    peak = functools.reduce(_larger, [top for top, _ in states])
    shift, total = _finite(peak).choose(peak, 0), word(0)
    for top, part in states:
        total = instr("fma.rn.f32", part, _power(instr("sub.f32", top, shift)), total)
    return [peak, total]


def merge_lanes(state: Sequence[Word]) -> list[Word]:
    """One state of those of a warp's lanes, in each of them."""
    top, total = state
    order = top ^ (top >> 31).differs(0).choose(0xFFFFFFFF, 1 << 31)
    peak = instr("redux.sync.max.u32", order, -1, convergent=True)
    peak = peak ^ (peak >> 31).differs(0).choose(1 << 31, 0xFFFFFFFF)
    shift = _finite(peak).choose(peak, 0)
    total = instr("mul.f32", total, _power(instr("sub.f32", top, shift)))
    for gap in (1, 2, 4, 8, 16):
        total = _add(total, c.bfly(total, gap))
    return [peak, total]


def minus_log(state: Sequence[Word]) -> Word:
    """Minus log2 of the sum of 2^score; 0 of no scores."""
    peak, total = state
    log = _add(_finite(peak).choose(peak, 0), instr("lg2.approx.f32", total))
    return log.equals(real(-math.inf)).choose(0, log ^ (1 << 31))
