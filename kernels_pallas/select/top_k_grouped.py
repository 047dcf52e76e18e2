"""The k highest-ranked units of a group of query heads: heads are reduced and units selected in
one kernel.

The reduced scores (`kvjax.numerics.selection.reduce_scores`) exist only in registers. For
softmaxes, the kernel reads all scores once to find the log-sum-exp of each head, merged over
warp, block and cluster. It then reads the scores again, reduces the G scores of a unit to one
key, and continues as `top_k`. Rows that registers cannot hold are written out as keys.

The key is the sum of softmaxes itself, because its leading bits separate more units than a
logarithm's. Sums below 2^-96 use their logarithm.

**Bytes:** 4 G U read a row of the group, twice with softmaxes, and 5 k written.

**Bound:** latency at 131072 units; the second read often hits the L2 cache.

**Limits:** at most 16 heads a group, scores in f32, and those of `top_k`. Evidence:
`benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.select import histogram, logsum, tiling, top_k, units
from kvjax.kernels_pallas.select.keys import (
    HEADS,
    MOST_HEADS,
    PART,
    SOFTMAX,
    keys_of_many,
    load_heads_f32,
    load_part,
    reduced_keys,
    shares,
)
from kvjax.kernels_pallas.select.logsum import NOTHING
from kvjax.kernels_pallas.select.sort import Out
from kvjax.kernels_pallas.select.threshold import Bins, first_bins
from kvjax.kernels_pallas.select.tiling import Config, config_for
from kvjax.kernels_pallas.simt import (
    Word,
    loop,
    ptx,
    when,
    word,
)

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/top_k_grouped.json
LoadLogs = Callable[[int, int | Word], list[Word]]  # of so many heads from a number on
# words: largest and sum by head and warp; after them by head of the block, and its log
STATS = 32 * MOST_HEADS * 2
Parts = Sequence[tuple[Any, Any]]


def smem_bytes(k: int, config: Config | None = None) -> int:
    return top_k.smem_bytes(k, config) + 4 * (STATS + 3 * MOST_HEADS)


def unsupported(parts: Parts, group_reduce: str, k: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    G = parts[0][0].shape[2]
    U = sum(scores.shape[3] for scores, _ in parts)
    if not 1 <= G <= MOST_HEADS:
        return (
            f"the kernel top_k_grouped takes 1 to {MOST_HEADS} query heads a kv head; got {G}"
        )
    if any(scores.dtype != jnp.float32 for scores, _ in parts):
        return f"the kernel top_k_grouped takes scores in f32; got {', '.join(str(s.dtype) for s, _ in parts)}"
    limit = top_k.unsupported((parts[0][0].shape[0], U), jnp.float32, k)
    return limit and limit.replace("top_k", "top_k_grouped", 1)


@simt.lowered_once("group_reduce", "k", "ranked", "config")
def top_k_grouped(
    parts: Parts, group_reduce: str, k: int, *, total: Array | None = None, ranked: bool = False,
    config: Config | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """(slots i32[B, K, H, k], valid bool[B, K, H, k]) of the k units of all parts that rank
    highest, highest first.

    A part is scores f32[B, K, G, U'] and its valid bool[B, 1 or K, 1, U']; H is G under
    "per_head", else 1. Two parts are read in place if the first has a multiple of 4 units; else
    the scores are concatenated first. Softmaxes are over these units, or those whose log of a
    sum of exponentials is `total` f32[B, K, G, 1]. If `ranked`, there are u32 keys of the same
    shape too, which order units of other calls with the same total as well.
    """
    if limit := unsupported(parts, group_reduce, k):
        raise NotImplementedError(limit)
    B, K, G, _ = parts[0][0].shape
    H = G if group_reduce == "per_head" else 1
    scores = [scores for scores, _ in parts]
    # A part may have one row for all KV heads.
    shared = jnp.broadcast_shapes(*(ok.shape[:-1] for _, ok in parts))
    flags = [jnp.broadcast_to(ok, (*shared, ok.shape[-1])) for _, ok in parts]
    valid = jnp.concatenate(flags, axis=-1)
    if len(parts) > 2 or (len(parts) == 2 and scores[0].shape[3] % 4):
        scores = [jnp.concatenate(scores, axis=-1)]
    ragged = ((0, 0),) * 3 + ((0, -valid.shape[3] % 4),)
    scores[-1], valid = jnp.pad(scores[-1], ragged), jnp.pad(valid, ragged)
    valid = valid.reshape(-1, valid.shape[-1])
    flat = [s.reshape(B * K * H, G // H, s.shape[3]) for s in scores]
    rows = B * K * H
    U = sum(part.shape[3] for part in scores)
    config = config or tuned.select(
        "top_k_grouped",
        config_for(rows, U, simt.target((*scores, valid))),
        (*scores, valid),
        rows=rows,
        U=U,
        k=k,
        G=G // H,
        softmax=int(group_reduce in SOFTMAX),
    )
    logs = (
        []
        if total is None
        else [jnp.where(jnp.isneginf(total), 0.0, -logsum.LOG2_E * total).reshape(rows, G // H)]
    )
    found = _select(group_reduce, k, ranked, len(flat), config, valid, *flat, *logs)
    return tuple(a.reshape(B, K, H, k) for a in found)


def _select(
    group_reduce: str,
    k: int,
    ranked: bool,
    parts: int,
    config: Config,
    valid: Array,
    *given: Array,
) -> tuple[Array, ...]:
    """The selection from scores in `parts`, after which the heads' logs come if they are known."""
    rows, heads, _ = given[0].shape
    sizes = tuple(s.shape[2] for s in given[:parts])
    U = sum(sizes)
    summed = group_reduce in SOFTMAX and heads > 1 and len(given) == parts
    bins = first_bins(
        group_reduce in SOFTMAX and (heads > 1 or len(given) > parts), group_reduce
    )
    keys_of = jax.ShapeDtypeStruct((rows, U), jnp.uint32)

    @simt.over_rows(functools.partial(_select, group_reduce, k, ranked, parts, config))
    def run(valid: Array, *given: Array) -> tuple[Array, ...]:
        row = functools.partial(
            _Row,
            sizes=sizes,
            heads=heads,
            shared_by=rows // valid.shape[0],
            group_reduce=group_reduce,
            config=config,
        )
        launch = top_k.launch_of(rows, config)
        args = [valid, *given]
        if config.parted:
            if summed:
                sums = simt.kernel(
                    functools.partial(_statistics, row=row),
                    name="kvjax_top_k_grouped_sums",
                    out_type=jax.ShapeDtypeStruct((rows, heads, config.blocks, 2), jnp.float32),
                    scratch=(STATS,),
                    **launch,
                )(*args)
                args.append(sums)
            keys, kept = simt.kernel(
                functools.partial(_count, row=row, summed=summed, bins=bins), name="kvjax_top_k_grouped_count",
                out_type=(keys_of, histogram.kept_of(rows, config)), scratch=(histogram.PASS, units.LOGS), **launch,
            )(*args)  # fmt: skip
            return top_k.select_kept("kvjax_top_k_grouped", keys, kept, k, config, ranked, bins)
        outs = [*top_k.selected(rows, k, ranked)]
        wanted = len(outs)
        if not tiling.in_one_step(U, config):
            outs.append(keys_of)  # keys, for the later passes
        return simt.kernel(
            functools.partial(
                _program, row=row, inputs=len(args), outs=wanted, summed=summed, k=k, bins=bins
            ),
            name="kvjax_top_k_grouped",
            out_type=tuple(outs),
            scratch=(*top_k.scratch(k, config), STATS + 3 * MOST_HEADS),
            **launch,
        )(*args)[:wanted]

    return run(valid, *given)


class _Row:
    """The scores of this block's row, and the keys of its units."""

    def __init__(
        self, valid_m: Any, *scores_m: Any, sizes: tuple[int, ...], heads: int, shared_by: int, group_reduce: str,
        config: Config,
    ):  # fmt: skip
        self.sizes = sizes
        self.heads = heads
        self.group_reduce = group_reduce
        self.config = config
        self.U = sum(sizes)
        self.row = simt.row()
        self.valid = simt.offset_rows(
            simt.global_address(valid_m), simt.divide(self.row, shared_by), self.U
        )
        self.scores = [
            simt.offset_rows(simt.global_address(m), self.row, heads * n * 4)
            for m, n in zip(scores_m[: len(sizes)], sizes, strict=True)
        ]
        # Gives the logs of some heads from a number on, if softmaxes are pooled.
        self.load_logs: LoadLogs | None = None
        for logs_m in scores_m[len(sizes) :]:
            logs = simt.offset_rows(simt.global_address(logs_m), self.row, heads * 4)
            self.set_logs(functools.partial(_logs_at, logs))

    def set_logs(self, load: LoadLogs) -> None:
        """Keeps the logs of all heads in registers, or of more than these hold how to load
        them.
        """
        self.load_logs = load
        if self.heads <= HEADS:
            logs = load(self.heads, 0)
            self.load_logs = lambda _, first: logs

    def flags(self, at: Word) -> list[Word]:
        """Whether the units at .. at + 3 are valid (0 or 1)."""
        flags = simt.load_below(at, self.U, simt.offset(self.valid, at))
        return [(flags >> (8 * j)) & 1 for j in range(4)]

    def load(self, first: int | Word, count: int, at: Word, end: int) -> list[list[Word]]:
        """The scores of some heads, of all if there are at most `HEADS`."""
        if self.heads <= HEADS:
            return load_heads_f32(self.scores, self.sizes, self.heads, at, end)
        return load_part(self.scores, self.sizes, first, count, at, end, half=False)

    def load_part(self, at: Word, end: int, first: int | Word, count: int) -> list[list[Word]]:
        """The scores of `count` heads from `first` on, by unit; their shares, if softmaxes are
        pooled.
        """
        units = _by_unit(self.load(first, count, at, end))
        if self.load_logs is None:
            return units
        logs = self.load_logs(count, first)
        return [shares(unit, logs) for unit in units]

    def keys(self, at: Word, end: int) -> list[Word]:
        """The keys of the units at .. at + 3."""
        flags = self.flags(at)
        pooled = self.load_logs is not None
        if self.heads > HEADS:
            load = functools.partial(self.load_part, at, end)
            return keys_of_many(flags, load, self.heads, self.group_reduce, pooled=pooled)
        units = _by_unit(self.load(0, self.heads, at, end))
        logs = None if self.load_logs is None else self.load_logs(self.heads, 0)
        return reduced_keys(flags, units, logs, self.group_reduce)

    def fetch(self, keys: Any = None) -> top_k.Fetch:
        """Gives the keys of a step, and writes them to `keys`."""

        def fetch(i: Word) -> list[list[Word]]:
            fours = []
            for at, end in zip(
                tiling.fours(i, self.U, self.config),
                tiling.ends(self.U, self.config),
                strict=True,
            ):
                fours.append(self.keys(at, end))
                if keys is not None:
                    tiling.store_four(keys, at, self.U, fours[-1])
            return fours

        return fetch


def _logs_at(logs: Any, count: int, first: int | Word) -> list[Word]:
    """Those of `count` heads from `first` on, in device memory."""
    own = simt.offset(logs, word(first) * 4)
    return [simt.load(own, 4 * head) for head in range(count)]


def _by_unit(of_heads: list[list[Word]]) -> list[list[Word]]:
    return [[h[j] for h in of_heads] for j in range(4)]


def _program(
    *refs: Any,
    row: Callable[..., _Row],
    inputs: int,
    outs: int,
    summed: bool,
    k: int,
    bins: Bins,
) -> None:
    of = row(*refs[:inputs])
    first = len(refs) - len(top_k.scratch(k, of.config)) - 1
    out = Out.of(k, *refs[inputs:][:outs])
    keys_m = refs[inputs + outs : first]
    *scratch_m, stats_m = refs[first:]
    keys = (
        simt.offset_rows(simt.global_address(keys_m[0]), of.row, of.U * 4) if keys_m else None
    )
    if summed:
        of.set_logs(_log_sums(of, stats_m))
    again = top_k.fetcher(keys, of.U, of.config)
    top_k.select_row(
        of.fetch(keys), again, out, scratch_m, U=of.U, k=k, config=of.config, bins=bins
    )


def _statistics(*refs: Any, row: Callable[..., _Row]) -> None:
    """The first launch without clusters: the `logsum` state of each head over a block's units."""
    *inputs, sums_m, stats_m = refs
    of = row(*inputs)
    stats = simt.shared_address(stats_m)
    warp = simt.special("tid.x") >> 5
    states = _sums_of_block(of, stats)
    with when((warp < of.heads) & (simt.special("tid.x") & 31).equals(0)):
        at = (of.row * of.heads + warp) * of.config.blocks + simt.part()
        ptx(
            "st.global.v2.u32 [$0], {$1, $2};",
            simt.offset_rows(simt.global_address(sums_m), at, 8),
            *states,
        )


def _count(*refs: Any, row: Callable[..., _Row], summed: bool, bins: Bins) -> None:
    """The next launch: keeps the keys of a row, and how many of a block's have each first
    digit.
    """
    *inputs, keys_m, kept_m, hist_m, logs_m = refs
    sums_m = inputs.pop() if summed else None
    of = row(*inputs)
    if summed:
        n = of.config.blocks
        parts = simt.offset_rows(simt.global_address(sums_m), of.row, of.heads * n * 8)
        logs = units.log_sums(
            parts, n, of.heads, None, simt.shared_address(logs_m), lambda: None, half=False
        )
        of.set_logs(functools.partial(units.load_logs, logs))
    keys = simt.offset_rows(simt.global_address(keys_m), of.row, of.U * 4)
    top_k.count_first(of.fetch(keys), kept_m, hist_m, U=of.U, config=of.config, bins=bins)


def _sums_of_block(of: _Row, stats: Word) -> list[Word]:
    """The `logsum` state of head h over the valid units of this block, in warp h."""
    thread = simt.special("tid.x")
    lane = thread & 31
    warp = thread >> 5
    stride = tiling.THREADS * 4 * of.config.blocks
    nothing = [word(x) for x in NOTHING]
    sums: list[Word] = []
    at_once = HEADS if of.heads <= HEADS else PART
    for first in range(0, of.heads, at_once):
        count = min(at_once, of.heads - first)
        states = nothing * count

        @loop(simt.part() * (tiling.THREADS * 4) + thread * 4, of.U, stride, states)
        def of_part(
            at: Word, *carry: Word, first: int = first, count: int = count
        ) -> list[Word]:
            exists = [flag.differs(0) for flag in of.flags(at)]
            new = []
            for head, four in enumerate(of.load(first, count, at, of.U + stride)):
                four = [
                    flag.select(x, NOTHING[0]) for flag, x in zip(exists, four, strict=True)
                ]
                new += logsum.add(carry[2 * head : 2 * head + 2], four)
            return new

        sums += of_part

    for head in range(of.heads):
        state = logsum.merge_lanes(sums[2 * head : 2 * head + 2])
        with when(lane.equals(0)):
            simt.store_shared(stats + (warp * MOST_HEADS + head) * 8, *state)
    simt.block_barrier()
    of_head = [word(x) for x in NOTHING]

    def merged() -> list[Word]:
        return logsum.merge_lanes(simt.load_shared(stats + (lane * MOST_HEADS + warp) * 8, 2))

    return simt.branch(warp < of.heads, merged, of_head)


def _log_sums(of: _Row, stats_m: Any) -> LoadLogs:
    """Computes for each head minus log2 of the sum of exp(score) over the valid units, 0 if
    there is none.
    """
    stats = simt.shared_address(stats_m)
    blocks = of.config.blocks
    thread = simt.special("tid.x")
    of_block = stats + 4 * STATS
    logs = stats + 4 * (STATS + 2 * MOST_HEADS)
    lane = thread & 31
    warp = thread >> 5
    states = _sums_of_block(of, stats)
    with when((warp < of.heads) & lane.equals(0)):
        simt.store_shared(of_block + warp * 8, *states)
    simt.cluster_barrier()
    with when(warp < of.heads):  # and of all blocks
        exists = lane < blocks
        state = simt.load_remote(simt.remote(of_block + warp * 8, exists.select(lane, 0)), 2)
        log = logsum.minus_log(
            logsum.merge_lanes(
                [exists.select(x, y) for x, y in zip(state, NOTHING, strict=True)]
            )
        )
        with when(lane.equals(0)):
            simt.store_shared(logs + warp * 4, log)
    simt.block_barrier()
    return functools.partial(units.load_logs, logs)
