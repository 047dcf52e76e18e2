"""The slots that a group of query heads ranks highest by 1-bit keys, from query to slots in two
kernels.

**Scores** are computed by the code of `score_1bit` and stored in f16, which rounds them less
than their 16-bit operands do. For softmaxes, each warp also keeps every head's largest score
and the sum of 2^(score - largest). Pending keys are scored exactly by extra blocks at the end
of the same grid.

**The selection** (`units.select_units`) reads the scores once and counts keys into a histogram;
nothing is sorted. Both kernels read counts and limits from the cache and clip them, which saves
launches.

**Bytes:** D/8 + 4 D/g read, 2 G written and 2 G read a slot and KV head, and 4 `room` written.

**Bound:** memory for the scores, latency for the selection.

**Limits:** scores beyond 65504 count as infinite; otherwise those of `score_1bit`. Evidence:
`benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend.softmax import passes_of
from kvjax.kernels_pallas.score import score_1bit as score
from kvjax.kernels_pallas.score import score_wide
from kvjax.kernels_pallas.select import logsum, tiling, top_k, units
from kvjax.kernels_pallas.select.keys import MOST_HEADS, SOFTMAX
from kvjax.kernels_pallas.select.logsum import NOTHING
from kvjax.kernels_pallas.select.rule import How
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/select_1bit.json
EXACT = 32  # keys of a warp that scores pending keys
PASS = 4 * score.HEADS  # query heads of several steps that one pass takes, if D <= 128


@dataclass(frozen=True)
class Config(score.Config, tiling.Config):
    """Block sizes: `blocks` and `unroll` of the selection, `units` and `stages` of the scores."""

    wide: int = 0  # 1: `WideScores` of more than two columns of queries, 2: with products of a warpgroup

    def __post_init__(self) -> None:
        tiling.Config.__post_init__(self)
        score.Config.__post_init__(self)


def config_for(
    rows: int, per_row: int, slots: int, units: int, target: simt.Target | None = None
) -> Config:
    """The rule for `rows` rows of scores over `slots` slots, with `per_row` lists per row and
    `units` units in all.
    """
    rule = tiling.config_for(rows * per_row, units, target)
    # Registers hold 20 keys of a thread.
    fits = tiling.in_one_step(units, replace(rule, unroll=5))
    unroll = 5 if fits and not rule.parted else 4
    return Config(
        rule.blocks, unroll, rule.cluster, **asdict(score.config_for(rows, slots, target))
    )


def heads_at_once(D: int) -> int:
    """Query heads of several steps that one pass takes, as many as registers hold."""
    return PASS * score.PART // max(D, score.PART)


def smem_bytes(D: int, config: Config) -> int:
    """Shared memory of a block of the scores or of the selection, whichever is larger."""
    return max(score.smem_bytes(D, config), 4 * sum(units.SCRATCH))


def unsupported(
    q: Any, bits: Any, step: Any, pending: Any, group_reduce: str, room: int, steps: int = 1
) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    one = jax.ShapeDtypeStruct((*q.shape[:2], q.shape[2] // steps, q.shape[3]), q.dtype)
    if limit := score.unsupported(one, bits, step, MOST_HEADS):
        return limit.replace("score_1bit", "select_1bit", 1)
    most = heads_at_once(q.shape[3])
    if steps > 1 and q.shape[2] > most:
        return f"the kernel select_1bit takes {most} query heads of some steps in one pass; got {q.shape[2]}"
    if pending.dtype != jnp.float32:
        return (
            f"the kernel select_1bit takes scores of pending tokens in f32; got {pending.dtype}"
        )
    if limit := top_k.unsupported(
        (q.shape[0], bits.shape[2] + pending.shape[3]), jnp.float32, room
    ):
        return limit.replace("top_k", "select_1bit", 1)
    return None


@simt.lowered_once("group_reduce", "room", "scale", "pending_slots", "local", "steps", "config")
def select_1bit(
    q: Array, bits: Array, step: Array, zero: Array, span: Sequence[Array | int], pending: Sequence[Array | int],
    count: Array | int, group_reduce: str, room: int, *, scale: float, pending_slots: int | None = None, local: int = 0,
    steps: int = 1, config: Config | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(slots i32[B, K, H, room], found i32[B, K, H]) of the `count` units that rank highest:
    the first `found`.

    Units are the slots `span` = (start, stop) of 1-bit keys, for q [B, K, G, D] and keys as in
    `score_1bit`. After all S slots come those of `pending` = (scores f32[B, K, G, W], start,
    stop), without the `local` before its stop. With `pending_slots`, pending[0] are keys [B, K,
    R, D] in the dtype of the steps, of which the first `pending_slots` are scored by extra
    blocks. Count, starts and stops are i32[B], or a number for all, and are clipped. H is G
    under "per_head", else 1.

    With T `steps`, q is [B, K, T*G, D] and H is that of all steps; stops of pending units and
    the count may then be i32[B, T], and pending keys [B, K, T, R, D].
    """
    scores_or_keys, *pending_span = pending
    assert not isinstance(scores_or_keys, int)
    B, K, G, D = q.shape
    S = bits.shape[2]
    H = G if group_reduce == "per_head" else steps

    # The kernel reads pending units by fours: `W` slots, of which `pending_units` may be pending.
    pending_units = scores_or_keys.shape[3] if pending_slots is None else pending_slots
    W = pending_units + -pending_units % 4
    scores: Any = scores_or_keys
    if pending_slots is not None:
        scores = jax.ShapeDtypeStruct((B, K, G, W), jnp.float32)
    if limit := unsupported(q, bits, step, scores, group_reduce, room, steps):
        raise NotImplementedError(limit)
    if pending_slots is None:
        padding = ((0, 0), (0, 0), (0, 0), (0, W - pending_units))
        rows_of_pending = jnp.pad(scores_or_keys, padding).reshape(B * K * H, G // H, -1)
        rows_of_pending = rows_of_pending.astype(jnp.float16)
    elif scores_or_keys.dtype != step.dtype:
        raise NotImplementedError(
            f"the kernel select_1bit takes keys in the dtype of the steps, {step.dtype}; got {scores_or_keys.dtype}"
        )
    else:
        rows_of_pending = scores_or_keys.reshape(-1, *scores_or_keys.shape[-2:])

    # Block sizes: those of a measurement, or of the rule.
    target = simt.target((q, bits))
    rule = config_for(B * K, H, S, S + W, target)
    if steps > 1:
        rule = replace(rule, wide=2 if target.capability == "9.0" else 1)
    config = config or tuned.select(
        "select_1bit",
        rule,
        (q, bits),
        rows=B * K * steps,
        S=S,
        room=room,
        G=G // steps,
        H=H // steps,
        D=D,
        group=S // step.shape[2],
        softmax=int(group_reduce in SOFTMAX),
    )

    # Wide scores read queries in the order that a model has them in.
    q = q.astype(step.dtype)
    order = (1, 1)
    if is_wide(config, q):
        order = (K, steps)
    if order > (1, 1):
        q = jnp.swapaxes(q.reshape(B, K, steps, -1, D), 1, 2)
    how = _How(
        group_reduce=group_reduce,
        room=room,
        scale=scale,
        keys_to_score=None if pending_slots is None else W,
        pending_units=pending_units,
        local=local,
        steps=steps,
        order=order,
        config=config,
    )
    ends = (simt.by_step(x, K) for x in (*span, *pending_span, count))
    rows = (a.reshape(B * K, -1, a.shape[-1]) for a in (q, bits, step, zero))
    slots, found = _select(how, *ends, rows_of_pending, *rows)
    return slots.reshape(B, K, H, room), found.reshape(B, K, H)


@dataclass(frozen=True)
class _How:
    """The static part of a call."""

    group_reduce: str
    room: int  # slots that are written for each list
    scale: float
    keys_to_score: int | None  # pending units are keys, of which so many; None: they are scores
    pending_units: int  # the first of those may be pending
    local: int
    steps: int
    order: tuple[int, int]  # K and T, if queries are in memory as [B, T, K, G, D]
    config: Config


def is_wide(config: Config, q: Any) -> bool:
    """True if `WideScores` score q [..., G, D] in the dtype of the steps."""
    return (
        config.wide > 0
        and q.shape[-2] > 2 * score.HEADS
        and q.shape[-1] == score_wide.D
        and q.dtype == jnp.bfloat16
    )


def _select(how: _How, *arrays: Array) -> tuple[Array, Array]:
    """(slots i32[rows, room], count i32[rows]), with a row, called a list, for the heads of a
    step or for one head; several lists may share a row of keys.

    `arrays` are start and stop of the slots and of the pending units, and the count, whose
    numbers of rows divide those of the lists; then pending scores or keys, q, bits, step and
    zero.
    """
    *_, pending, q, bits, _, _ = arrays
    rows, S, _ = bits.shape
    G = q.shape[1]
    if how.keys_to_score is None:
        lists, heads, W = pending.shape
    else:
        heads = 1 if how.group_reduce == "per_head" else G // how.steps
        lists = rows * G // heads
        W = how.keys_to_score
    # Softmaxes of several heads need each head's sum.
    summed = how.group_reduce in SOFTMAX and heads > 1

    @simt.over_rows(functools.partial(_select, how))
    def run(
        start: Array, stop: Array, pending_start: Array, pending_stop: Array, count: Array,
        pending: Array, q: Array, bits: Array, step: Array, zero: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        # The kernel of the scores: those of all slots, then, if they are summed, the statistics of
        # each warp, then those of pending keys.
        scored = score.Scores.of(q, bits, step, how.scale, how.config, half=True)
        if is_wide(how.config, q):
            scored = score_wide.WideScores.of_steps(scored, how.order, how.config.wide == 2)
        span = (start, stop) if summed else ()
        program = functools.partial(
            _score, scored=scored, shared_by=[rows // end.size for end in span]
        )
        outs = [jax.ShapeDtypeStruct((rows, G, S), jnp.float16)]
        if summed:
            outs.append(jax.ShapeDtypeStruct((rows, G, scored.jobs, 2), jnp.float32))
        keys = []
        more_blocks = 0
        if how.keys_to_score:
            keys = [pending]
            outs.append(jax.ShapeDtypeStruct((rows, G, how.keys_to_score), jnp.float16))
            sizes = pending.shape[0], pending.shape[1]
            program = functools.partial(
                _score_both, program=program, scored=scored, how=how, sizes=sizes
            )
            exact_rows = rows * how.steps * passes_of(G // how.steps)
            jobs = exact_rows * -(-how.keys_to_score // EXACT)  # warps that score pending keys
            more_blocks = -(-jobs // scored.warps)
        score_kernel = scored.kernel(
            program,
            more_blocks=more_blocks,
            name="kvjax_select_1bit_score",
            out_type=tuple(outs),
        )
        made = list(score_kernel(*keys, q, bits, step, zero, *span))

        # The selection, from the scores of both parts; without pending units there is one.
        scores = made.pop(0).reshape(lists, heads, S)
        sums = made.pop(0).reshape(lists, heads, -1, 2) if summed else None
        if W == 0:
            inputs = units.Inputs((start, stop, count), [scores], sums)
            limits: tuple[int, ...] = (S,)
        else:
            pending_scores = made[0].reshape(lists, heads, W) if keys else pending
            ends = (start, stop, pending_start, pending_stop, count)
            inputs = units.Inputs(ends, [scores, pending_scores], sums)
            limits = (S, how.pending_units)
        rule = How(
            rows=lists,
            room=how.room,
            limits=limits,
            group_reduce=how.group_reduce,
            config=how.config,
            local=how.local,
        )
        return units.select_units("kvjax_select_1bit", inputs, rule)

    return run(*arrays)


# ---------------------------------------------------------------------------------------------------------- the scores


def _score_both(
    keys_m: Any, *refs: Any, program: Callable[..., None], scored: score.Scores, how: _How, sizes: tuple[int, int],
) -> None:  # fmt: skip
    """The kernel of the scores, with blocks after its own for pending keys of `sizes` = (rows,
    R), whose scores are its last output.
    """
    *others, out_m, ring_m = refs
    q_m = others[0]
    block = simt.special("ctaid.x")
    with when(block < scored.blocks):
        program(*others, ring_m)
    with when(block >= scored.blocks):
        _exact(block - scored.blocks, q_m, keys_m, out_m, scored=scored, how=how, sizes=sizes)


def _exact(
    block: Word, q_m: Any, keys_m: Any, out_m: Any, *, scored: score.Scores, how: _How, sizes: tuple[int, int],
) -> None:  # fmt: skip
    """Exact scores of pending keys, `EXACT` per warp, for the heads of a step, or for an equal
    part of them if there are more than 8: 16 keys are rows of a product, and the heads its
    columns.

    A sum over channels may take them in any order: lane col has 8 adjacent ones of each 32, for
    keys and queries alike.
    """
    keys_to_score = how.keys_to_score
    assert keys_to_score is not None
    passes = passes_of(scored.G // how.steps)
    rows = scored.rows * how.steps * passes
    G = scored.G // how.steps // passes
    D = scored.D
    rows_of_keys, R = sizes
    key_bytes = 2 * D

    # The work of this warp: `EXACT` keys from `first` on, for the heads of `row`.
    t = simt.special("tid.x")
    lane = t & 31
    quad = lane >> 2
    col = lane & 3
    jobs = -(-keys_to_score // EXACT)  # of a row
    job = block * scored.warps + (t >> 5)
    job = (job < rows * jobs).select(job, rows * jobs - 1)  # a spare warp repeats the last
    row = simt.divide(job, jobs)
    first = (job - row * jobs) * EXACT

    q_row = simt.swapped_row(row, *how.order, passes)
    key_row = simt.divide(row, rows // rows_of_keys)
    q = simt.offset_rows(simt.global_address(q_m), q_row, G * key_bytes)
    keys = simt.offset_rows(simt.global_address(keys_m), key_row, R * key_bytes)
    out = simt.offset_rows(simt.global_address(out_m), row, G * 2 * keys_to_score)

    def channels(a: Any, i: Word) -> list[list[Word]]:
        """This lane's channels of row i of queries or keys: four words of each 32 channels."""
        load = "ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{}];"
        at = simt.offset(a, i * key_bytes + col * 16)
        return [ptx(load.format(64 * n), at, results=4) for n in range(D // 32)]

    queries = channels(q, (quad < G).select(quad, 0))

    @loop(0, EXACT, 16)
    def _tile(i: Word) -> None:
        """The products of 16 keys: rows quad and quad + 8 are this lane's."""
        slots = [first + i + quad + 8 * half for half in range(2)]
        upper, lower = (channels(keys, (slot < R).select(slot, R - 1)) for slot in slots)
        sums = [word(0)] * 4
        for u, w, b in zip(upper, lower, queries, strict=True):
            for j in (0, 2):
                sums = simt.mma(
                    scored.kind, sums, [u[j], w[j], u[j + 1], w[j + 1]], b[j : j + 2]
                )
        # Two sums are of the upper key and two of the lower, for adjacent heads.
        for n, x in enumerate(sums):
            head = col * 2 + (n & 1)
            slot = slots[n >> 1]
            with when((head < G) & (slot < keys_to_score)):
                of_head = simt.offset_rows(out, head, 2 * keys_to_score)
                at = simt.offset(of_head, slot * 2)
                scaled = instr("mul.f32", x, real(scored.scale))
                ptx("st.global.u16 [$0], $1;", at, score.halves(scaled, scaled))


def _score(*refs: Any, scored: score.Scores, shared_by: Sequence[int]) -> None:
    """The kernel of the scores; with a span, it also writes the `logsum` state of its scores by
    warp and head.
    """
    if not shared_by:
        scored.program(*refs)
        return
    q_m, bits_m, step_m, zero_m, start_m, stop_m, out_m, sums_m, ring_m = refs
    thread = scored.thread()
    start, length = simt.span_of(
        (start_m, shared_by[0]), (stop_m, shared_by[1]), thread.row, scored.S
    )

    def visit(unit: Word, heads: list[list[Word]], state: Sequence[Word]) -> list[Word]:
        """Adds the scores of a unit to the state, those outside of the span as nothing."""
        slot = unit * score.UNIT - start  # in the span; unsigned, so past its end if before it
        partly = (slot >= length) | (slot + score.UNIT > length)

        def of_span() -> list[Word]:
            exists = [(slot + thread.quad * 4 + j) < length for j in range(4)]
            return [
                f.select(x, NOTHING[0])
                for four in heads
                for f, x in zip(exists, four, strict=True)
            ]

        counted = simt.branch(partly, of_span, [x for four in heads for x in four])
        return [
            x
            for n in range(len(heads))
            for x in logsum.add(state[2 * n : 2 * n + 2], counted[4 * n : 4 * n + 4])
        ]

    heads = 2 * scored.columns
    states = scored.program(
        q_m,
        bits_m,
        step_m,
        zero_m,
        out_m,
        ring_m,
        visit=visit,
        state=[word(x) for x in NOTHING] * heads,
    )
    # Lanes that have the same head merge their states, and one of them writes.
    for n in range(heads):
        two = states[2 * n : 2 * n + 2]
        for gap in (2, 4, 8, 16)[scored.at_once == 1 :]:  # to other units, then to other keys
            two = logsum.merge([two, [simt.bfly(x, gap) for x in two]])
        head = thread.head + (n // 2 * score.HEADS + n % 2)
        with when(thread.quad.equals(0) & thread.later.equals(0) & (head < scored.G)):
            at = simt.offset_rows(
                simt.global_address(sums_m), thread.row * scored.G + head, scored.jobs * 8
            )
            ptx("st.global.v2.u32 [$0], {$1, $2};", simt.offset(at, thread.job * 8), *two)
