"""The slots that a group of query heads ranks highest by 1-bit keys, from query to choice in two kernels.

**Scores** are those of `score_1bit`, from the same products. A warp copies what it reads into a ring in shared memory
of its own (`cp.async`, `stages` - 1 units ahead), so that bytes in flight cost no registers and no iteration waits for
its own loads; and as many warps share the keys as run at once. Where softmaxes are pooled, a warp also keeps each
head's largest score and the sum of 2^(score - largest) over the slots of the span, while it has them in registers.

**The choice** has a cluster of blocks a row, as `top_k_pooled`, but reads the scores once: the heads' sums come from
the warps' statistics, a few KB. Keys are counted into 2048 bins, first 256 to an octave from -2^8 to -1 (logarithms of
softmaxes; scores: 2^-3 to 2^5), where a bin of 131072 units then has some tens of units, and not, as with the leading
11 bits, a third of them all. Then the bin of the last place is counted again, in 11 bits of what is left of key and
slot at a time, until as many are in it as are wanted. Nothing is sorted: running counts over the cluster give the
places, which follow the threads, in every run alike.

**Bytes:** D/8 + 4 D/g read, 4 G written and 4 G read a slot and kv head, 4 `room` written. The bound on an H200 (4.3
TB/s) for 8 kv heads x 131072, D = 128, g = 32, G = 4 is 11.7 us and, if L2 has lost the scores, 3.9 us.

**Measured**: not yet. Counted for 8 x 131072, G = 4, bf16: a unit takes 287 instructions of a warp (`score_1bit` 212),
some 45 of them for the statistics, which is 10 us of issue slots; 92 registers and 20 warps a multiprocessor with 46
KB in flight, where `score_1bit` has 15 KB and waits at the end of each unit for the loads of its start. Of the first
counting, 2.3 lanes of a warp meet in a bin (by the leading 11 bits 18.5), and 77 units are in the last place's bin
(11578): normal random scores of deviation 2. No spills for 4 heads; 24 bytes for 8 heads, outside of loops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _choice as choice
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import score_1bit as score
from kvjax.kernels_pallas import top_k as t
from kvjax.kernels_pallas import top_k_pooled as pooled
from kvjax.kernels_pallas._common import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = None  # the date in benchmarks/results/pick_1bit.json
UNIT, HEADS = score.UNIT, score.HEADS
WARPS = 4  # of a block of the scores
RUN_AT_ONCE = 132 * 20  # warps of the scores on an H200


@dataclass(frozen=True)
class Config(t.Config):
    units: int = 8  # of a warp of the scores
    stages: int = 4  # units that a warp has room for in shared memory

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.units <= 16:
            raise ValueError(f"units must be 1 to 16, the rows of a product; got {self.units}")
        if self.stages not in (2, 4, 8):
            raise ValueError(f"stages must be 2, 4 or 8; got {self.stages}")


def config_for(rows: int, per_row: int, slots: int, units: int) -> Config:
    """Of `rows` rows of scores over `slots` slots, chosen from in `per_row` ways each, with `units` units in all.

    Warps of the scores take so many units each that all run at once, or in as few full turns as 16 units allow.
    """
    of_one_turn = rows * slots / (UNIT * RUN_AT_ONCE)
    each = max(math.ceil(of_one_turn / math.ceil(of_one_turn / 16)), 2)
    blocks = t.config_for(rows * per_row, units).blocks
    fits = t.in_one_step(units, t.Config(blocks, 5))  # registers hold 20 keys of a thread
    return Config(blocks, 5 if fits else 4, each)


def smem_bytes(D: int, config: Config) -> int:
    """Of a block of the scores, and of one of the choice; the larger."""
    return max(4 * _ring_words(D, config), 4 * sum(choice.SCRATCH))


def _ring_words(D: int, config: Config) -> int:
    """A stage has the codes of a unit, and its steps."""
    return WARPS * config.stages * (UNIT * D // 8 + 2 * D) // 4


def unsupported(q: Any, bits: Any, step: Any, waiting: Any, pool: str, room: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    if limit := score.unsupported(q, bits, step):
        return limit.replace("score_1bit", "pick_1bit", 1)
    if waiting.dtype != jnp.float32:
        return f"the kernel pick_1bit takes scores of waiting tokens in f32; got {waiting.dtype}"
    if limit := t.unsupported((q.shape[0], bits.shape[2] + waiting.shape[3]), jnp.float32, room):
        return limit.replace("top_k", "pick_1bit", 1)
    return None


def supported(q: Any, bits: Any, step: Any, waiting: Any, pool: str, room: int) -> bool:
    return unsupported(q, bits, step, waiting, pool, room) is None


def pick_1bit(
    q: Array, bits: Array, step: Array, zero: Array, span: Sequence[Array], waiting: Sequence[Array], count: Array,
    pool: str, room: int, *, scale: float, config: Config | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(slots i32[B, K, H, room], found i32[B, K, H]) of the `count` i32[B] units that rank highest: the first `found`.

    Units are the slots [start, stop) of 1-bit keys, `span` = (start i32[B], stop i32[B]), for q [B, K, G, D] and keys
    as in `score_1bit`; and after all S slots those of `waiting` = (scores f32[B, K, G, W], start, stop). H is G under
    "per_head", else 1.
    """
    if limit := unsupported(q, bits, step, waiting[0], pool, room):
        raise NotImplementedError(limit)
    (B, K, G, _), S, W = q.shape, bits.shape[2], waiting[0].shape[3]
    H = G if pool == "per_head" else 1
    scores = jnp.pad(waiting[0], ((0, 0),) * 3 + ((0, -W % 4),)).reshape(B * K * H, G // H, -1)
    ends = []
    for (start, stop), n in ((span, S), (waiting[1:], W)):
        start = jnp.clip(start, 0, n)
        ends += [start, jnp.maximum(jnp.minimum(stop, n) - start, 0)]
    spans = jnp.stack([*ends, jnp.clip(count, 0, room)], axis=-1)
    rows = (a.reshape(B * K, *a.shape[2:]) for a in (q.astype(step.dtype), bits, step, zero))
    chosen = config or config_for(B * K, H, S, S + scores.shape[2])
    slots, found = _pick(pool, room, scale, chosen, spans.astype(jnp.int32), scores, *rows)
    return slots.reshape(B, K, H, room), found.reshape(B, K, H)


def _pick(
    pool: str, room: int, scale: float, config: Config, spans: Array, waiting: Array,
    q: Array, bits: Array, step: Array, zero: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """(slots i32[rows, room], how many i32[rows]) of rows of `waiting`, each of one row of keys or of some."""
    (rows, S, width), (chosen_rows, heads, W), G = bits.shape, waiting.shape, q.shape[1]
    jobs = -(-S // (UNIT * config.units))  # warps of a row
    summed = pool in pooled.SOFTMAX and heads > 1
    U = S + W

    @jax.custom_batching.custom_vmap
    def run(spans: Array, waiting: Array, q: Array, bits: Array, step: Array, zero: Array) -> tuple[Array, Array]:
        shared_by = [n // spans.shape[0] for n in (rows, chosen_rows)]
        score_of = functools.partial(
            _score, shape=(rows, G, S, 8 * width), group=S // step.shape[1], shared_by=shared_by[0],
            kind="bf16" if step.dtype == jnp.bfloat16 else "f16", scale=scale, config=config,
        )  # fmt: skip
        outs = [jax.ShapeDtypeStruct((rows, G, S), jnp.float32)]
        if summed:
            outs.append(jax.ShapeDtypeStruct((rows, G, jobs, 2), jnp.float32))
        scores, *sums = c.kernel(
            score_of,
            name="kvjax_pick_1bit_score",
            out_type=tuple(outs),
            scratch_types=[c.plgpu.SMEM((_ring_words(8 * width, config),), jnp.uint32)],
            grid=(-(-rows * jobs // WARPS),),
            grid_names=("block",),
            num_threads=WARPS // 4,
        )(spans, q, bits, step, zero)
        parts = [scores.reshape(chosen_rows, heads, S), waiting][: 2 if W else 1]
        outs = [jax.ShapeDtypeStruct((chosen_rows, room), jnp.int32), jax.ShapeDtypeStruct((chosen_rows,), jnp.int32)]
        if not t.in_one_step(U, config):
            outs.append(jax.ShapeDtypeStruct((chosen_rows, U), jnp.uint32))  # keys, for the later passes
        choice_of = functools.partial(
            choice.choose, sizes=tuple(part.shape[2] for part in parts), heads=heads, sums=jobs if summed else 0,
            shared_by=shared_by[1], pool=pool, room=room, config=config,
        )  # fmt: skip
        slots, found, *_ = c.kernel(
            choice_of,
            name="kvjax_pick_1bit",
            out_type=tuple(outs),
            scratch_types=[c.plgpu.SMEM((words,), jnp.uint32) for words in choice.SCRATCH],
            grid=(chosen_rows,),
            grid_names=("row",),
            cluster=(config.blocks,),
            cluster_names=("part",),
            num_threads=t.THREADS // 128,
        )(spans, *sums, *parts)
        return slots, found

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        slots, found = _pick(pool, room, scale, config, *c.flatten_batch(n, batches, args))
        return (slots.reshape(n, chosen_rows, room), found.reshape(n, chosen_rows)), (True, True)

    return run(spans, waiting, q, bits, step, zero)


# ---------------------------------------------------------------------------------------------------------- the scores


def _score(
    spans_m, q_m, bits_m, step_m, zero_m, out_m, *refs, shape: tuple[int, int, int, int], group: int, shared_by: int,
    kind: str, scale: float, config: Config,
) -> None:  # fmt: skip
    *sums_m, ring_m = refs
    rows, G, S, D = shape
    H, units, stages = D // 8, S // UNIT, config.stages
    jobs = -(-units // config.units)
    thread = c.special("tid.x")
    lane, warp = thread & 31, thread >> 5
    quad, col = lane >> 2, lane & 3
    job = c.special("ctaid.x") * WARPS + warp
    job = (job < rows * jobs).choose(job, rows * jobs - 1)  # a spare warp repeats the last
    row = c.divide(job, jobs)
    first = (job - row * jobs) * config.units
    q, bits, step, zero, out = (c.global_address(m) for m in (q_m, bits_m, step_m, zero_m, out_m))
    q = c.offset_rows(q, row, G * D * 2)
    bits = c.offset_rows(bits, row, S * D // 8)
    step, zero = (c.offset_rows(a, row, S // group * D * 2) for a in (step, zero))
    out = c.offset_rows(out, row, G * S * 4)
    size = UNIT * D // 8 + 2 * D
    ring = c.shared_address(ring_m) + warp * (stages * size)

    def within(unit: Word) -> Word:
        return (unit < units).choose(unit, units - 1)

    def group_of(unit: Word) -> Word:
        return c.divide(unit, group // UNIT)

    def stage(i: Word) -> Word:
        return ring + (i & (stages - 1)) * size

    # Chunks of 16 bytes lie in a stage as they are read, each eight that lanes read at once side by side: codes, of
    # D = 128 key 4 r + i as the i-th eight's r-th, of D = 64 as they come; steps, of column col the v-th as 4 v + col.
    code = (lane & 7) * 4 + (lane >> 3) if D == 128 else lane
    channels = col * (H // 4) + quad

    def fetch(i: Word) -> None:
        """Starts to copy unit i of this warp."""
        unit, to = within(first + i), stage(i)
        copy = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        with when(lane < D // 4):
            ptx(copy, to + lane * 16, c.offset(bits, unit * (UNIT * D // 8) + code * 16), 16)
        with when(lane < D // 8):
            ptx(copy, to + lane * 16 + UNIT * D // 8, c.offset(step, group_of(unit) * (2 * D) + channels * 16), 16)

    for i in range(stages - 1):
        if i < config.units:
            fetch(word(i))
        ptx("cp.async.commit_group;")

    def quarter(address: Any, index: Word) -> list[Word]:
        return score.lane_channels(address, index, col, D)

    queries = score.paired([(quad < G).choose(w, 0) for w in quarter(q, (quad < G).choose(quad, 0))])
    eights = (0, 8) if config.units > 8 else (0,)
    zeros = [score.paired(quarter(zero, group_of(within(first + quad + h)))) for h in eights]
    base = score.zero_scores(kind, zeros, queries)
    start, length, *_ = choice.spans_of(spans_m, c.divide(row, shared_by))

    def codes(at: Word) -> list[Word]:
        """This lane's codes of keys 4 quad .. 4 quad + 3."""
        if D == 128:
            load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
            return ptx(load, at + lane * 16, results=4, convergent=True)
        # 16 channels a lane: the second byte's bits go to 16.., as if they were 16 apart.
        at, half = at + quad * 32 + (col >> 1) * 4, (col & 1).differs(0).choose(0x4342, 0x4140)
        words = [ptx(f"ld.shared.u32 $0, [$1+{8 * i}];", at, results=1) for i in range(4)]
        return [ptx("prmt.b32 $0, $1, 0, $2;", w, half, results=1) for w in words]

    def steps(at: Word) -> list[Word]:
        load = "ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4+{}];"
        at = at + col * 16 + UNIT * D // 8
        return [w for v in range(H // 4) for w in ptx(load.format(64 * v), at, results=4)]

    @loop(0, config.units, 1, [real(-math.inf), word(0)] * (2 if sums_m else 0))
    def state(i: Word, *state: Word) -> list[Word]:
        ptx(f"cp.async.wait_group {stages - 2};")
        c.warp_barrier()
        unit, at = first + i, stage(i)
        held = codes(at), steps(at)
        with when(i + (stages - 1) < config.units):
            fetch(i + (stages - 1))
        ptx("cp.async.commit_group;")
        acc = score.unit_scores(kind, i, col, *held, queries, base)
        four = [[instr("mul.f32", x, real(scale)) for a in acc for x in (a[e], a[e + 2])] for e in range(2)]
        for e in range(2):
            head = col * 2 + e
            with when((head < G) & (unit < units)):
                at = c.offset(c.offset_rows(out, head, S * 4), unit * (UNIT * 4) + quad * 16)
                ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", at, *four[e])
        if not sums_m:
            return []
        slot = unit * UNIT - start
        partly = (slot >= length) | (slot + UNIT > length)

        def of_span() -> list[Word]:
            there = [(slot + quad * 4 + j) < length for j in range(4)] * 2
            return [f.choose(x, real(-math.inf)) for f, x in zip(there, four[0] + four[1], strict=True)]

        counted = c.choose_between(partly, of_span, four[0] + four[1])
        return choice.add(state[:2], counted[:4]) + choice.add(state[2:], counted[4:])

    for e, two in enumerate((state[:2], state[2:]) if sums_m else ()):
        for gap in (4, 8, 16):
            two = choice.merge([two, [c.bfly(x, gap) for x in two]])
        head = col * 2 + e
        with when(quad.equals(0) & (head < G)):
            at = c.offset_rows(c.global_address(sums_m[0]), row * G + head, jobs * 8)
            ptx("st.global.v2.u32 [$0], {$1, $2};", c.offset(at, (job - row * jobs) * 8), *two)
