"""Scores of 1-bit keys: q.k~ of every key, for all G heads of a group at once.

score = sum_d q_d zero_d + sum_d (q_d step_d) code_d, codes +1 and -1. Zero and step are those of a group of tokens,
so the first sum is one number a head and group, and in the second the queries are multiplied by the step, once for
the 32 keys of a unit: 16-bit operands, products summed in f32. Both run on `mma` (m16n8k16), 8 heads as its columns.
Its rows are 16 keys for the second sum, their codes made in registers by a shift, an and and a xor for two of them; a
lane holds the channels i and i + D/8 of its D/4 as a pair, since their bits are D/8 apart in the packed row. For the
first sum the rows are the zeros of 16 units. A warp does `units` units, and loads `ahead` of them ahead.

**Bytes:** (D/8 + 4 D/g) read and 4 G written a key and kv head: at D = 128, g = 32, G = 4, 48 bytes. The bound on an
H200 (4.3 TB/s) is 11.7 us for 8 kv heads x 131072 and 94 us for 8 x 1M.

**Measured** on an H200, 2026-11-21, jax 0.11.2, device time of the kernel alone, normal random keys and queries, G =
4, D = 128, bf16, g = 32, 8 kv heads: 131072 keys 20.9 us (the reference 1.05 ms); 1M keys 140 us; 32768 keys 6.8 us;
batch 8 x 32768 38.5 us. Casting queries adds 1.2 us. `benchmarks/results/score_1bit.json` has more. Queries times
step are rounded to 16 bits: against the reference, ||error|| / ||scores|| is 2.4e-3 for bf16 and 3e-4 for f16. 90
registers, no spills; counted, not measured: making codes takes two integer operations for two of them, which alone
are about 8 us.

**Tried and lost** (131072 keys): 2 units loaded ahead 22.3 us, 3 units 24.9 us (112 and 130 registers: more bytes in
flight do not pay for fewer warps); none 24 to 25 us; 16 units a warp 22.6 us, 4 units 22.6 us; blocks of two
warpgroups 21.0 us, but 11.0 us for 32768 keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas._common import Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/score_1bit.json
UNIT = 32  # keys: the rows of two products
HEADS = 8  # columns of a product
ONES = {"bf16": 0xBF80BF80, "f16": 0xBC00BC00}  # -1 twice; a code of 1 flips the sign


@dataclass(frozen=True)
class Config:
    units: int = 8  # of a warp
    warpgroups: int = 1  # of a block
    ahead: int = 1  # units that a warp loads before it needs them

    def __post_init__(self) -> None:
        if not 1 <= self.units <= 16:
            raise ValueError(f"units must be 1 to 16, the rows of a product; got {self.units}")
        if not 1 <= self.ahead <= 3:
            raise ValueError(f"ahead must be 1 to 3, as registers hold; got {self.ahead}")


def smem_bytes() -> int:
    return 0


def unsupported(q: Any, bits: Any, step: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    S, groups = bits.shape[2], step.shape[2]
    if D not in (64, 128):
        return f"the kernel score_1bit takes head sizes 64 and 128; got D={D}"
    if not 1 <= G <= HEADS:
        return f"the kernel score_1bit takes 1 to {HEADS} query heads a kv head; got G={G}"
    if not groups or S % groups or (S // groups) % UNIT:
        return f"the kernel score_1bit takes groups of a multiple of {UNIT} tokens; got {S} tokens in {groups} groups"
    if step.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel score_1bit takes scales in bf16 or f16; got {step.dtype}"
    if 0 in q.shape:
        return f"the kernel score_1bit takes at least one row; got q{list(q.shape)}"
    return None


def supported(q: Any, bits: Any, step: Any) -> bool:
    return unsupported(q, bits, step) is None


def score_1bit(q: Array, bits: Array, step: Array, zero: Array, *, scale: float, config: Config | None = None) -> Array:
    """f32[B, K, G, S]: scale * q.k~ of q [B, K, G, D], keys of bits u8[B, K, S, D/8], step and zero [B, K, S/g, D]."""
    if limit := unsupported(q, bits, step):
        raise NotImplementedError(limit)
    B, K, G, _ = q.shape
    rows = (a.reshape(B * K, *a.shape[2:]) for a in (q.astype(step.dtype), bits, step, zero))
    return _scores(scale, config or Config(), *rows).reshape(B, K, G, -1)


def _scores(scale: float, config: Config, q: Array, bits: Array, step: Array, zero: Array) -> Array:
    (rows, S, width), G = bits.shape, q.shape[1]
    shape, group = (rows, G, S, 8 * width), S // step.shape[1]
    warps = rows * -(-S // (UNIT * config.units))

    @jax.custom_batching.custom_vmap
    def run(q: Array, bits: Array, step: Array, zero: Array) -> Array:
        kind = "bf16" if step.dtype == jnp.bfloat16 else "f16"
        return c.kernel(
            functools.partial(_program, shape=shape, group=group, kind=kind, scale=scale, config=config),
            name="kvjax_score_1bit",
            out_type=jax.ShapeDtypeStruct((rows, G, S), jnp.float32),
            grid=(-(-warps // (4 * config.warpgroups)),),
            grid_names=("block",),
            num_threads=config.warpgroups,
        )(q, bits, step, zero)

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[Array, bool]:
        flat = c.flatten_batch(n, batches, args)
        return _scores(scale, config, *flat).reshape(n, rows, G, S), True

    return run(q, bits, step, zero)


def _program(
    q_m, bits_m, step_m, zero_m, out_m, *,
    shape: tuple[int, int, int, int], group: int, kind: str, scale: float, config: Config,
) -> None:  # fmt: skip
    rows, G, S, D = shape
    H = D // 8  # pairs of channels (i, i + H) that a lane has of a row
    units, batch = S // UNIT, config.units
    batches = -(-units // batch)
    t = c.special("tid.x")
    lane = t & 31
    quad, col = lane >> 2, lane & 3
    job = c.special("ctaid.x") * (4 * config.warpgroups) + (t >> 5)
    job = (job < rows * batches).choose(job, rows * batches - 1)  # a spare warp repeats the last
    row = c.divide(job, batches)
    first = (job - row * batches) * batch
    q, bits, step, zero, out = (c.global_address(m) for m in (q_m, bits_m, step_m, zero_m, out_m))
    q = c.offset_rows(q, row, G * D * 2)
    bits = c.offset_rows(bits, row, S * D // 8)
    step, zero = (c.offset_rows(a, row, S // group * D * 2) for a in (step, zero))
    out = c.offset_rows(out, row, G * S * 4)

    def quarter(address: Any, index: Word) -> list[Word]:
        return lane_channels(address, index, col, D)

    def within(unit: Word) -> Word:
        return (unit < units).choose(unit, units - 1)

    def group_of(unit: Word) -> Word:
        return c.divide(unit, group // UNIT)

    load_codes = "ld.global.nc.u32 $0, [$1+{}];"
    if D == 64:  # 16 channels a lane: the second byte's bits go to 16.., as if they were 16 apart
        load_codes = "{{ .reg .u16 h; ld.global.nc.u16 h, [$1+{}]; cvt.u32.u16 $0, h; prmt.b32 $0, $0, 0, 0x4140; }}"

    def fetch(unit: Word) -> list[Word]:
        """This lane's codes of keys 4 quad .. 4 quad + 3 of a unit, and its steps."""
        at = c.offset(bits, unit * (UNIT * D // 8) + quad * (4 * D // 8) + col * (D // 32))
        codes = [ptx(load_codes.format(i * D // 8), at, results=1) for i in range(4)]
        return codes + quarter(step, group_of(unit))

    ahead = [w for i in range(config.ahead) for w in fetch(within(first + i))]
    queries = paired([(quad < G).choose(w, 0) for w in quarter(q, (quad < G).choose(quad, 0))])
    zeros = [paired(quarter(zero, group_of(within(first + quad + h)))) for h in ((0, 8) if batch > 8 else (0,))]
    base = zero_scores(kind, zeros, queries)

    @loop(0, batch, 1, ahead)
    def _unit(i: Word, *held: Word) -> list[Word]:
        unit, size = first + i, 4 + H
        ahead = [*held[size:], *fetch(within(unit + config.ahead))]
        acc = unit_scores(kind, i, col, held[:4], held[4:size], queries, base)
        for e in range(2):
            head = col * 2 + e
            with when((head < G) & (unit < units)):
                at = c.offset(c.offset_rows(out, head, S * 4), unit * (UNIT * 4) + quad * 16)
                four = [c.instr("mul.f32", x, c.real(scale)) for a in acc for x in (a[e], a[e + 2])]
                ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", at, *four)
        return ahead


def lane_channels(address: Any, index: Word, col: Word, D: int) -> list[Word]:
    """This lane's D/4 channels of row `index` of [..., D] 16-bit numbers, as they lie."""
    at = c.offset(address, index * (D * 2) + col * (D // 2))
    loads = [f"ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{4 * v}];" for v in range(0, D // 8, 4)]
    return [w for load in loads for w in ptx(load, at, results=4)]


def paired(words: Sequence[Word]) -> list[Word]:
    """The same channels as pairs (i, i + D/8)."""
    H = len(words)
    halves = [(words[i // 2], words[i // 2 + H // 2], 0x7632 if i % 2 else 0x5410) for i in range(H)]
    return [ptx("prmt.b32 $0, $1, $2, $3;", *half, results=1) for half in halves]


def zero_scores(kind: str, zeros: list[list[Word]], queries: list[Word]) -> list[Word]:
    """q . zero, of unit `quad` and of unit `quad` + 8, for heads 2 col and 2 col + 1."""
    base = [word(0)] * 4
    for j in range(0, len(queries), 2):
        low, high = zeros[0], zeros[-1]
        base = c.mma(kind, base, [low[j], high[j], low[j + 1], high[j + 1]], queries[j : j + 2])
    return base


def unit_scores(
    kind: str, i: Word, col: Word, codes: Sequence[Word], steps: Sequence[Word], queries: list[Word], base: list[Word]
) -> list[list[Word]]:
    """q . k~ of keys 4 quad .. 4 quad + 3 of a warp's unit i, as sums of `mma` of 16 keys: key 2 tile + half of heads
    2 col + e at [tile][2 half + e]. `codes` are those of these keys, `steps` this lane's channels of the unit's step.
    """
    scaled = [ptx(f"mul.{kind}x2 $0, $1, $2;", *two, results=1) for two in zip(queries, paired(steps), strict=True)]
    holder = ((i & 7) << 2) + col
    start = []
    for e in range(2):
        mine = (i < 8).choose(base[e], base[2 + e])
        start.append(c.from_lane(mine, holder))
    acc = [[*start, *start], [*start, *start]]
    for j in range(0, len(queries), 2):
        for tile in range(2):
            two = codes[2 * tile : 2 * tile + 2]
            a = [((w << (15 - p)) & 0x80008000) ^ ONES[kind] for p in (j, j + 1) for w in two]
            acc[tile] = c.mma(kind, acc[tile], a, scaled[j : j + 2])
    return acc
