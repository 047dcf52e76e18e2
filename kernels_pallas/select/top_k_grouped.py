"""The k highest-ranked units of a group of query heads: heads are reduced and units selected in one kernel.

The reduced scores (`kvjax.numerics.selection.reduce_scores`) exist only in registers. For softmaxes, the kernel reads
all scores once to find the log-sum-exp of each head, merged over warp, block and cluster. It then reads the scores
again, reduces the G scores of a unit to one key, and continues as `top_k`. Rows that registers cannot hold are written
out as keys.

The key is the sum of softmaxes itself, because its leading bits separate more units than a logarithm's. Sums below
2^-96 use their logarithm.

**Bytes:** 4 G U read a row of the group, twice with softmaxes, and 4 k written.

**Bound:** latency at 131072 units; the second read often hits the L2 cache.

**Limits:** at most 8 heads a group, scores in f32, and those of `top_k`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.select import logsum, tiling, top_k
from kvjax.kernels_pallas.select.keys import HEADS, SLOTS, SOFTMAX, load_heads_f32, reduced_keys
from kvjax.kernels_pallas.select.logsum import NOTHING
from kvjax.kernels_pallas.select.tiling import Config, config_for
from kvjax.kernels_pallas.simt import (
    Word,
    loop,
    ptx,
    when,
    word,
)

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/top_k_grouped.json
STATS = 32 * HEADS * 2  # words: largest and sum by head and warp; after them by head of the block, and its log
Parts = Sequence[tuple[Any, Any]]


def smem_bytes(k: int) -> int:
    return top_k.smem_bytes(k) + 4 * (STATS + 3 * HEADS)


def unsupported(parts: Parts, group_reduce: str, k: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    G, U = parts[0][0].shape[2], sum(scores.shape[3] for scores, _ in parts)
    if not 1 <= G <= HEADS:
        return f"the kernel top_k_grouped takes 1 to {HEADS} query heads a kv head; got {G}"
    if any(scores.dtype != jnp.float32 for scores, _ in parts):
        return f"the kernel top_k_grouped takes scores in f32; got {', '.join(str(s.dtype) for s, _ in parts)}"
    limit = top_k.unsupported((parts[0][0].shape[0], U), jnp.float32, k)
    return limit and limit.replace("top_k", "top_k_grouped", 1)


def supported(parts: Parts, group_reduce: str, k: int) -> bool:
    return unsupported(parts, group_reduce, k) is None


@simt.lowered_once("group_reduce", "k", "config")
def top_k_grouped(parts: Parts, group_reduce: str, k: int, *, config: Config | None = None) -> tuple[Array, Array]:
    """(slots i32[B, K, H, k], valid bool[B, K, H, k]) of the k units of all parts that rank highest, highest first.

    A part is scores f32[B, K, G, U'] and its valid bool[B, 1 or K, 1, U']; H is G under "per_head", else 1. Two parts
    are read in place if the first has a multiple of 4 units; else the scores are concatenated first.
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
    config = config or tuned.select(
        "top_k_grouped",
        config_for(rows, U),
        (*scores, valid),
        rows=rows,
        U=U,
        k=k,
        G=G // H,
        softmax=int(group_reduce in SOFTMAX),
    )
    out = _select(group_reduce, k, config, valid, *flat).reshape(B, K, H, k)
    return (out & jnp.uint32(SLOTS)).astype(jnp.int32), out > SLOTS


def _select(group_reduce: str, k: int, config: Config, valid: Array, *scores: Array) -> Array:
    rows, heads, _ = scores[0].shape
    sizes = tuple(s.shape[2] for s in scores)
    U = sum(sizes)
    outs = [jax.ShapeDtypeStruct((rows, k), jnp.uint32)]
    if not tiling.in_one_step(U, config):
        outs.append(jax.ShapeDtypeStruct((rows, U), jnp.uint32))  # keys, for the later passes

    @jax.custom_batching.custom_vmap
    def run(valid: Array, *scores: Array) -> Array:
        shared_by = rows // valid.shape[0]
        return simt.kernel(
            functools.partial(
                _program, sizes=sizes, heads=heads, shared_by=shared_by, group_reduce=group_reduce, k=k, config=config
            ),
            name="kvjax_top_k_grouped",
            out_type=tuple(outs),
            scratch=(*top_k.scratch(k), STATS + 3 * HEADS),
            blocks=rows,
            cluster=config.blocks,
            warpgroups=tiling.THREADS // 128,
        )(valid, *scores)[0]

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[Array, bool]:
        return _select(group_reduce, k, config, *simt.flatten_batch(n, batches, args)).reshape(n, rows, k), True

    return run(valid, *scores)


def _program(
    *refs: Any, sizes: tuple[int, ...], heads: int, shared_by: int, group_reduce: str, k: int, config: Config
) -> None:
    U = sum(sizes)
    row = simt.special("clusterid.x")
    valid_m, *rest = refs
    scores_m, (out_m, *rest) = rest[: len(sizes)], rest[len(sizes) :]
    *keys_m, hist_m, mine_m, sort_m, small_m, stats_m = rest
    valid = simt.offset_rows(simt.global_address(valid_m), simt.divide(row, shared_by), U)
    scores = [
        simt.offset_rows(simt.global_address(m), row, heads * n * 4) for m, n in zip(scores_m, sizes, strict=True)
    ]
    out = simt.offset_rows(simt.global_address(out_m), row, k * 4)
    keys = simt.offset_rows(simt.global_address(keys_m[0]), row, U * 4) if keys_m else None

    def load(at: Word, end: int) -> tuple[list[Word], list[list[Word]]]:
        """Whether the units at .. at + 3 are valid (0 or 1), and each head's scores, as `load_heads`."""
        flags = simt.load_below(at, U, simt.offset(valid, at))
        fours = load_heads_f32(scores, sizes, heads, at, end)
        return [(flags >> (8 * j)) & 1 for j in range(4)], fours

    logs = _log_sums(load, U, heads, stats_m, config) if group_reduce in SOFTMAX and heads > 1 else None

    def first(i: Word) -> list[list[Word]]:
        fours = []
        for at, end in zip(tiling.fours(i, U, config), tiling.ends(U, config), strict=True):
            flags, heads_ = load(at, end)
            four = reduced_keys(flags, [[h[j] for h in heads_] for j in range(4)], logs, group_reduce)
            fours.append(four)
            if keys is not None:
                with when(at < U):
                    ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", simt.offset(keys, at * 4), *four)
        return fours

    def again(i: Word) -> list[list[Word]]:
        return [tiling.load_four(keys, at, U) for at in tiling.fours(i, U, config)]

    top_k.select_row(first, again, out, (hist_m, mine_m, sort_m, small_m), U=U, k=k, config=config)


def _log_sums(load: Any, U: int, heads: int, stats_m: Any, config: Config) -> list[Word]:
    """For each head minus log2 of the sum of exp(score) over the valid units; 0 if there is none."""
    stats = simt.shared_address(stats_m)
    of_block, logs = stats + 4 * STATS, stats + 4 * (STATS + 2 * HEADS)
    thread, part = simt.special("tid.x"), simt.special("cluster_ctarank")
    lane, warp = thread & 31, thread >> 5
    stride = tiling.THREADS * 4 * config.blocks
    nothing = [word(x) for x in NOTHING]

    @loop(part * (tiling.THREADS * 4) + thread * 4, U, stride, nothing * heads)
    def sums(at: Word, *carry: Word) -> list[Word]:
        flags, fours = load(at, U + stride)
        flags = [flag.differs(0) for flag in flags]
        new = []
        for head, four in enumerate(fours):
            four = [flag.select(x, NOTHING[0]) for flag, x in zip(flags, four, strict=True)]
            new += logsum.add(carry[2 * head : 2 * head + 2], four)
        return new

    for head in range(heads):
        state = logsum.merge_lanes(sums[2 * head : 2 * head + 2])
        with when(lane.equals(0)):
            simt.store_shared(stats + (warp * HEADS + head) * 8, *state)
    simt.block_barrier()
    with when(warp < heads):  # warp h merges head h of all warps
        state = simt.load_shared(stats + (lane * HEADS + warp) * 8, 2)
        state = logsum.merge_lanes(state)
        with when(lane.equals(0)):
            simt.store_shared(of_block + warp * 8, *state)
    simt.cluster_barrier()
    with when(warp < heads):  # and of all blocks
        exists = lane < config.blocks
        at = simt.remote(of_block + warp * 8, exists.select(lane, 0))
        state = ptx("ld.shared::cluster.v2.u32 {$0, $1}, [$2];", at, results=2)
        log = logsum.minus_log(logsum.merge_lanes([exists.select(x, y) for x, y in zip(state, NOTHING, strict=True)]))
        with when(lane.equals(0)):
            simt.store_shared(logs + warp * 4, log)
    simt.block_barrier()
    return [simt.load_shared(logs + head * 4) for head in range(heads)]
