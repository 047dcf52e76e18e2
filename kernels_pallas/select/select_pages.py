"""The pages that a group of query heads ranks highest by the bounding boxes of their keys, in
two kernels.

**Scores** are computed by the code of `score_pages` and kept in f32, since pages are few. For
softmaxes, a warp that scored 16 pages also keeps each head's largest score and the sum of
2^(score - largest). Pending tokens, which have no box yet, are scored exactly by extra blocks
of the same grid; a page's score is its largest.

**The selection** is `units.select_units`. Both kernels read counts in tokens from the cache,
which saves four XLA launches.

**Bytes:** 2 D e read, 4 G written and 4 G read a page and KV head, where e is the size of a
corner's element, and 4 `room` written.

**Bound:** memory for the scores, latency for the selection.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend.softmax import passes_of
from kvjax.kernels_pallas.score import score_pages as score
from kvjax.kernels_pallas.select import logsum, tiling, top_k, units
from kvjax.kernels_pallas.select.keys import MOST_HEADS, SOFTMAX
from kvjax.kernels_pallas.select.logsum import NOTHING
from kvjax.kernels_pallas.select.rule import How
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/select_pages.json
TILE = 16  # keys: the rows of a product


@dataclass(frozen=True)
class Config(score.Config, tiling.Config):
    """Block sizes: `blocks` and `unroll` of the selection, `tiles` and `warpgroups` of the
    scores.
    """

    def __post_init__(self) -> None:
        tiling.Config.__post_init__(self)
        score.Config.__post_init__(self)


def config_for(
    rows: int, per_row: int, units: int, heads: int = 1, target: simt.Target | None = None
) -> Config:
    """The rule for `rows` rows of scores of `heads` query heads, with `per_row` lists per row
    and `units` pages.
    """
    several = {"columns": 2, "warpgroups": 2} if heads > score.HEADS else {}
    rule = tiling.config_for(rows * per_row, units, target)
    return Config(rule.blocks, rule.unroll, rule.cluster, **several)


def smem_bytes() -> int:
    return 4 * sum(units.SCRATCH)


def unsupported(
    q: Any, low: Any, high: Any, pending: Any, group_reduce: str, room: int, unit: int, pending_slots: int,
    steps: int = 1,
) -> str | None:  # fmt: skip
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    one = jax.ShapeDtypeStruct((*q.shape[:2], q.shape[2] // steps, q.shape[3]), q.dtype)
    if limit := score.unsupported(one, low, high, MOST_HEADS):
        return limit.replace("score_pages", "select_pages", 1)
    if unit % TILE:
        return f"the kernel select_pages takes pages of a multiple of {TILE} tokens; got {unit}"
    if pending.dtype != low.dtype:
        return f"the kernel select_pages takes keys in the dtype of the corners, {low.dtype}; got {pending.dtype}"
    if pending_slots < 1 or pending_slots % unit:
        return (
            f"the kernel select_pages takes at least one page of pending tokens, in pages of {unit}; "
            f"got {pending_slots}"
        )
    sizes = units.padded(low.shape[2], pending_slots // unit)
    if limit := top_k.unsupported((q.shape[0], sum(sizes)), jnp.float32, room):
        return limit.replace("top_k", "select_pages", 1)
    return None


@simt.lowered_once(
    "group_reduce", "room", "unit", "scale", "pending_slots", "local", "steps", "config"
)
def select_pages(
    q: Array, low: Array, high: Array, span: Sequence[Array | int], pending: Sequence[Array | int],
    count: Array | int, group_reduce: str, room: int, *, unit: int, scale: float, pending_slots: int, local: int = 0,
    steps: int = 1, config: Config | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(pages i32[B, K, H, room], found i32[B, K, H]) of the `count` pages that rank highest:
    the first `found`.

    Pages of `unit` tokens count if they have a token in `span` = (start, stop); corners [B, K,
    P, D] score them for q [B, K, G, D]. From page P on come those of the first `pending_slots`
    of `pending` = (keys [B, K, R, D], start, stop), without the `local` before its stop, scored
    by their best token. Count, starts and stops are i32[B], or a number for all, and are
    clipped. H is G under "per_head", else 1. The page of lowest rank comes last, the others in
    any order.

    With T `steps`, q is [B, K, T*G, D] and H is that of all steps. Stops and count may then be
    i32[B, T], and pending keys [B, K, T, R, D].
    """
    keys = pending[0]
    assert not isinstance(keys, int)
    if limit := unsupported(q, low, high, keys, group_reduce, room, unit, pending_slots, steps):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    P = low.shape[2]
    H = G if group_reduce == "per_head" else steps
    config = config or tuned.select(
        "select_pages",
        config_for(
            B * K, H, sum(units.padded(P, pending_slots // unit)), G, simt.target((q, low))
        ),
        (q, low),
        rows=B * K * steps,
        P=P,
        W=pending_slots // unit,
        room=room,
        G=G // steps,
        H=H // steps,
        D=D,
        softmax=int(group_reduce in SOFTMAX),
    )
    ends = (simt.by_step(x, K) for x in (*span, *pending[1:], count))
    q = q.astype(low.dtype)
    order = (1, 1)
    if steps > 1:  # as a model has them
        q = jnp.swapaxes(q.reshape(B, K, steps, -1, D), 1, 2)
        order = (K, steps)
    rows = (a.reshape(B * K, -1, D) for a in (q, low, high))
    how = _How(group_reduce, room, unit, scale, pending_slots, local, steps, order, config)
    pages, found = _select(how, *ends, keys.reshape(-1, *keys.shape[-2:]), *rows)
    return pages.reshape(B, K, H, room), found.reshape(B, K, H)


@dataclass(frozen=True)
class _How:
    """The static part of a call."""

    group_reduce: str
    room: int  # pages that are written for each list
    unit: int  # tokens of a page
    scale: float
    pending_slots: int
    local: int
    steps: int
    order: tuple[int, int]  # K and T, if queries are in memory as [B, T, K, G, D]
    config: Config


def _select(how: _How, *args: Array) -> tuple[Array, Array]:
    """(pages i32[rows, room], count i32[rows]), with a row for the heads of a step or for one
    head. `args` are the spans' ends and the count, whose numbers of rows divide these, then
    pending keys, q, and both corners."""
    *_, keys, q, low, _ = args
    rows, G, D = q.shape
    P = low.shape[1]
    config = how.config
    steps = how.steps
    heads = 1 if how.group_reduce == "per_head" else G // steps
    list_rows = rows * G // heads
    limits = (P, how.pending_slots // how.unit)  # stored and pending pages
    summed = how.group_reduce in SOFTMAX and heads > 1
    sizes = units.padded(*limits)

    # Warps score tiles of stored pages, and others a pending page each.
    tiles = -(-P // score.TILE)
    warps = 4 * config.warpgroups
    pending_rows = rows * steps * passes_of(G // steps)
    jobs = rows * score.parts(G, config) * -(-tiles // config.tiles), pending_rows * sizes[1]
    blocks = [-(-n // warps) for n in jobs]

    @simt.over_rows(functools.partial(_select, how))
    def run(*args: Array) -> tuple[Array, Array]:
        ends = args[:5]
        arrays = args[5:]
        outs = [jax.ShapeDtypeStruct((rows, G, n), jnp.float32) for n in sizes]
        if summed:
            outs.append(jax.ShapeDtypeStruct((rows, G, tiles, 2), jnp.float32))
        of_pending, stored, *sums = simt.kernel(
            functools.partial(
                _score, shape=(rows, G, P, D), keys=(keys.shape[0], keys.shape[1]),
                kind="bf16" if low.dtype == jnp.bfloat16 else "f16",
                shared_by=[n // end.size for n, end in zip([rows] * 2 + [pending_rows] * 2, ends[:4], strict=True)],
                blocks=blocks[0], how=how,
            ),
            name="kvjax_select_pages_score",
            out_type=(outs[1], outs[0], *outs[2:]),
            blocks=sum(blocks),
            warpgroups=config.warpgroups,
        )(*ends[:4], *arrays)  # fmt: skip
        parts = [a.reshape(list_rows, heads, -1) for a in (stored, of_pending)]
        statistics = sums[0].reshape(list_rows, heads, -1, 2) if summed else None
        rule = How(
            rows=list_rows,
            room=how.room,
            limits=limits,
            group_reduce=how.group_reduce,
            config=config,
            local=how.local,
            unit=how.unit,
            beyond=P,
        )
        inputs = units.Inputs(ends, parts, statistics)
        return units.select_units("kvjax_select_pages", inputs, rule)

    return run(*args)


def _score(
    start_m, stop_m, pending_start_m, pending_stop_m, keys_m, q_m, low_m, high_m, pending_m, out_m, *sums_m,
    shape: tuple[int, int, int, int], keys: tuple[int, int], kind: str, shared_by: Sequence[int], blocks: int,
    how: _How,
) -> None:  # fmt: skip
    """Scores of pages in the first `blocks`, with statistics by tile; scores of pending tokens
    in the others, for the heads of one step at a time, or for an equal part of them if there
    are more than 8."""
    rows, G, P, D = shape
    block = simt.special("ctaid.x")
    passes = passes_of(G // how.steps)
    pending_rows = rows * how.steps * passes
    of_step = G // how.steps // passes
    tiles = -(-P // score.TILE)
    lane = simt.special("tid.x") & 31
    quad = lane >> 2
    col = lane & 3
    start_at, stop_at, pending_start_at, pending_stop_at = zip(
        (start_m, stop_m, pending_start_m, pending_stop_m), shared_by, strict=True
    )

    def visit(
        row: Word, tile: Word, pages: list[Word], pair: Word, scores: list[list[Word]]
    ) -> None:
        start, length = units.units_of(
            simt.span_of(start_at, stop_at, row, P * how.unit), how.unit
        )
        exists = [(page - start) < length for page in pages]
        for e, two in enumerate(scores):
            own = [f.select(x, NOTHING[0]) for f, x in zip(exists, two, strict=True)]
            state = logsum.of_lanes(own, gaps=(4, 8, 16))
            head = pair + e
            with when(quad.equals(0) & (head < G) & (tile < tiles)):
                at = simt.offset_rows(simt.global_address(sums_m[0]), row * G + head, tiles * 8)
                ptx("st.global.v2.u32 [$0], {$1, $2};", simt.offset(at, tile * 8), *state)

    with when(block < blocks):
        score.program(
            q_m, low_m, high_m, out_m, shape=shape, kind=kind, scale=how.scale, config=how.config,
            width=units.padded(P)[0], visit=visit if sums_m else None, order=how.order,
        )  # fmt: skip
    with when(block >= blocks):
        (pages,) = units.padded(how.pending_slots // how.unit)
        job = (block - blocks) * (4 * how.config.warpgroups) + (simt.special("tid.x") >> 5)
        # A spare warp repeats the last.
        job = (job < pending_rows * pages).select(job, pending_rows * pages - 1)
        row = simt.divide(job, pages)
        page = job - row * pages
        start, length = simt.span_of(
            pending_start_at, pending_stop_at, row, how.pending_slots, how.local
        )
        stored, R = keys
        q = simt.offset_rows(
            simt.global_address(q_m), simt.swapped_row(row, *how.order, passes), of_step * D * 2
        )
        recent = simt.offset_rows(
            simt.global_address(keys_m), simt.divide(row, pending_rows // stored), R * D * 2
        )
        queries = score.channels(q, (quad < of_step).select(quad, 0), D)

        @loop(0, how.unit, TILE, [real(-float("inf"))] * 2)
        def best(i: Word, *best: Word) -> list[Word]:
            slots = [page * how.unit + i + quad + 8 * half for half in range(2)]
            both = [score.channels(recent, (slot < R).select(slot, R - 1), D) for slot in slots]
            acc = [word(0)] * 4
            for j in range(0, D // 8, 2):
                acc = simt.mma(
                    kind,
                    acc,
                    [both[0][j], both[1][j], both[0][j + 1], both[1][j + 1]],
                    queries[j : j + 2],
                )
            found = list(best)
            for n, x in enumerate(acc):
                exists = (slots[n >> 1] - start) < length
                found[n & 1] = instr(
                    "max.f32",
                    found[n & 1],
                    exists.select(instr("mul.f32", x, real(how.scale)), NOTHING[0]),
                )
            return found

        for e, x in enumerate(best):
            for gap in (4, 8, 16):
                x = instr("max.f32", x, simt.bfly(x, gap))
            head = col * 2 + e
            with when(quad.equals(0) & (head < of_step)):
                place = row * of_step + head
                at = simt.offset(
                    simt.offset_rows(simt.global_address(pending_m), place, pages * 4), page * 4
                )
                ptx("st.global.u32 [$0], $1;", at, x)
