"""Scores of 1-bit keys: the product of each query head of a group with every dequantised key.

score = sum_d q_d zero_d + sum_d (q_d step_d) code_d, both by `mma`. A group of tokens shares
zero and step, so the first sum is one number a group, and queries meet the step once for 32
keys. Heads of 256 channels are two parts of 128.

Codes are the pattern of the second sum: `mma_sparse` multiplies two of every four rows of its
right operand, - q step and + q step of two channels, and their two bits say which. They index
a left operand of ones. With G <= 4, one product serves two units.

**Bytes:** D/8 + 4 D/g read and 4 G written a key and KV head.

**Bound:** memory.

**Limits:** queries times step are rounded to 16 bits; `unsupported` lists the shapes. Evidence:
`benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/score_1bit.json
UNIT = 32  # keys: the rows of two products
HEADS = 8  # columns of a product
PART = 128  # channels of a head whose codes are a word of each lane
WARPS = 4  # of a block
WARPS_AT_ONCE = 16  # of a multiprocessor

Visit = Callable[[Word, list[list[Word]], Sequence[Word]], list[Word]]


@dataclass(frozen=True)
class Config:
    units: int = 8  # of a warp
    stages: int = 4  # units that a warp has room for in shared memory

    def __post_init__(self) -> None:
        if not 1 <= self.units <= 16:
            raise ValueError(f"units must be 1 to 16, the rows of a product; got {self.units}")
        if self.stages not in (2, 4, 8):
            raise ValueError(f"stages must be 2, 4 or 8; got {self.stages}")


def config_for(rows: int, slots: int, target: simt.Target | None = None) -> Config:
    """Enough units per warp that all warps run at once, or in as few full turns as 16 units per
    warp allow.
    """
    warps = (target or simt.target()).multiprocessors * WARPS_AT_ONCE
    of_one_turn = rows * slots / (UNIT * warps)
    return Config(max(math.ceil(of_one_turn / math.ceil(of_one_turn / 16)), 2))


def smem_bytes(D: int, config: Config) -> int:
    """Shared memory of a block; a stage has the codes of a unit, and its steps."""
    return WARPS * config.stages * (UNIT * D // 8 + 2 * D)


def unsupported(q: Any, bits: Any, step: Any, heads: int = 2 * HEADS) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them, of up
    to `heads` queries.
    """
    *_, G, D = q.shape
    S = bits.shape[2]
    groups = step.shape[2]
    if D not in (64, 128, 256):
        return f"the kernel score_1bit takes head sizes 64, 128 and 256; got D={D}"
    if not 1 <= G <= heads:
        return f"the kernel score_1bit takes 1 to {heads} query heads a kv head; got G={G}"
    if not groups or S % groups or (S // groups) % UNIT:
        return f"the kernel score_1bit takes groups of a multiple of {UNIT} tokens; got {S} tokens in {groups} groups"
    if step.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel score_1bit takes scales in bf16 or f16; got {step.dtype}"
    if 0 in q.shape:
        return f"the kernel score_1bit takes at least one row; got q{list(q.shape)}"
    return None


@simt.lowered_once("scale", "config")
def score_1bit(
    q: Array,
    bits: Array,
    step: Array,
    zero: Array,
    *,
    scale: float,
    config: Config | None = None,
) -> Array:
    """f32[B, K, G, S]: scale * q.k~ of q [B, K, G, D], keys of bits u8[B, K, S, D/8], step and
    zero [B, K, S/g, D], which are `scale` and `zero` of a `kvjax.numerics.quant.OneBit`.
    """
    if limit := unsupported(q, bits, step):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    S = bits.shape[2]
    group = S // step.shape[2]
    config = config or tuned.select(
        "score_1bit",
        config_for(B * K, S, simt.target((q, bits))),
        (q, bits),
        rows=B * K,
        S=S,
        G=G,
        D=D,
        group=group,
    )
    rows = (a.reshape(B * K, *a.shape[2:]) for a in (q.astype(step.dtype), bits, step, zero))
    return _scores(scale, config, *rows).reshape(B, K, G, -1)


def _scores(
    scale: float, config: Config, q: Array, bits: Array, step: Array, zero: Array
) -> Array:
    rows, S, _ = bits.shape
    G = q.shape[1]

    @simt.over_rows(partial(_scores, scale, config))
    def run(q: Array, bits: Array, step: Array, zero: Array) -> Array:
        scores = Scores.of(q, bits, step, scale, config)
        out = jax.ShapeDtypeStruct((rows, G, S), jnp.float32)
        return scores.kernel(scores.program, name="kvjax_score_1bit", out_type=out)(
            q, bits, step, zero
        )

    return run(q, bits, step, zero)


class Thread(NamedTuple):
    """The place of a thread, and its work."""

    warp: Word  # of the block
    lane: Word
    quad: Word  # it has keys 4 quad .. 4 quad + 3 of a unit
    col: Word
    head: Word  # and of this head and the next
    later: Word  # units from an iteration's first to its own
    row: Word
    job: Word  # number of this warp among the row's warps


@dataclass(frozen=True)
class Scores:
    """The kernel's code, for flat arrays of these sizes."""

    rows: int
    G: int
    S: int
    D: int
    group: int
    kind: str  # of the scales, "bf16" or "f16"
    scale: float
    config: Config
    half: bool  # whether scores are written in f16, not f32

    @classmethod
    def of(
        cls,
        q: Array,
        bits: Array,
        step: Array,
        scale: float,
        config: Config,
        half: bool = False,
    ) -> Scores:
        rows, S, width = bits.shape
        kind = "bf16" if step.dtype == jnp.bfloat16 else "f16"
        return cls(
            rows, q.shape[1], S, 8 * width, S // step.shape[1], kind, scale, config, half
        )

    @property
    def columns(self) -> int:
        """Products that a unit's codes take, of `HEADS` heads each."""
        return -(-self.G // HEADS)

    @property
    def width(self) -> int:
        """Channels of a part of a head."""
        return min(self.D, PART)

    @property
    def parts(self) -> int:
        """Parts of a head."""
        return self.D // self.width

    @property
    def at_once(self) -> int:
        """Units of an iteration."""
        return 2 if 2 * self.G <= HEADS else 1

    @property
    def iterations(self) -> int:
        return -(-self.config.units // self.at_once)

    @property
    def jobs(self) -> int:
        """Warps of a row."""
        return -(-self.S // (UNIT * self.iterations * self.at_once))

    @property
    def warps(self) -> int:
        """The warps of a block."""
        return WARPS

    @property
    def blocks(self) -> int:
        return -(-self.rows * self.jobs // self.warps)

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.D, self.config)

    def kernel(
        self, program: Callable[..., Any], *, more_blocks: int = 0, **how: Any
    ) -> Callable[..., Any]:
        def body(*refs: Any) -> None:
            program(*refs)

        return simt.kernel(
            body,
            scratch=(self.smem_bytes // 4,),
            blocks=self.blocks + more_blocks,
            warpgroups=self.warps // 4,
            **how,
        )

    def thread(self) -> Thread:
        t = simt.special("tid.x")
        warp = t >> 5
        lane = t & 31
        quad = lane >> 2
        col = lane & 3
        job = simt.special("ctaid.x") * WARPS + warp
        final = self.rows * self.jobs - 1
        job = (job < final).select(job, final)  # a spare warp repeats the last
        row = simt.divide(job, self.jobs)
        head, later = ((col & 1) * 2, col >> 1) if self.at_once == 2 else (col * 2, word(0))
        return Thread(warp, lane, quad, col, head, later, row, job - row * self.jobs)

    def program(
        self, q_m, bits_m, step_m, zero_m, out_m, ring_m, *, visit: Visit | None = None, state: Sequence[Word] = ()
    ) -> list[Word]:  # fmt: skip
        """The kernel's body. state = visit(unit, four scores of each of the thread's heads,
        state), if given; the unit may not exist, and scores are in f32. A thread has two heads
        of each 8."""
        G = self.G
        S = self.S
        D = self.D
        kind = self.kind
        at_once = self.at_once
        columns = self.columns
        warp, lane, quad, col, head, later, row, job = self.thread()
        units = S // UNIT
        stages = self.config.stages // at_once
        parts = self.parts
        first = job * (self.iterations * at_once)
        q, bits, step, zero, out = (
            simt.global_address(m) for m in (q_m, bits_m, step_m, zero_m, out_m)
        )
        q = simt.offset_rows(q, row, G * D * 2)
        bits = simt.offset_rows(bits, row, S * D // 8)
        step, zero = (simt.offset_rows(a, row, S // self.group * D * 2) for a in (step, zero))
        size = 2 if self.half else 4  # bytes of a score
        out = simt.offset_rows(out, row * G + head, S * size)
        # Bytes of a unit.
        codes = UNIT * D // 8
        steps = 2 * D
        ring = simt.shared_address(ring_m) + warp * (self.config.stages * (codes + steps))

        def within(unit: Word) -> Word:
            return (unit < units).select(unit, units - 1)

        def group_of(unit: Word) -> Word:
            return simt.divide(unit, self.group // UNIT)

        def stage(i: Word) -> Word:
            return ring + (i & (stages - 1)) * (at_once * (codes + steps))

        # Chunks of 16 bytes are copied in order, so that eight lanes fetch whole sectors, to
        # places where the eight chunks that lanes read at once are in different banks.
        def place_of(chunk: Word) -> Word:
            return chunk ^ (chunk >> 3)

        def place_of_codes(chunk: Word) -> Word:
            """Chunks of a part follow each other; in memory those of a key do."""
            if parts == 1:
                return chunk if D == 64 else place_of(chunk)
            return (chunk & 1) * UNIT + place_of(chunk >> 1)

        def place_of_steps(chunk: Word, of: Word) -> Word:
            """Chunks of the steps of unit `of` of an iteration."""
            return chunk if at_once == 1 else chunk ^ of

        def fetch(i: Word) -> None:
            """Starts to copy the units of iteration i."""
            for size, to in ((codes, 0), (steps, at_once * codes)):
                chunks = size // 16
                for start in range(0, at_once * chunks, 32):
                    n = lane + start
                    of = simt.divide(n, chunks)
                    unit = within(first + i * at_once + of)
                    chunk = n & (chunks - 1)
                    at = (
                        simt.offset_rows(step, group_of(unit), size)
                        if to
                        else simt.offset_rows(bits, unit, size)
                    )
                    place = place_of_steps(chunk, of) if to else place_of_codes(chunk)
                    ptx(
                        "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p cp.async.cg.shared.global [$0], [$1], 16, $4; }",
                        *(
                            stage(i) + (of * chunks + place) * 16 + to,
                            simt.offset(at, chunk * 16),
                            n,
                            at_once * chunks,
                            16,
                        ),
                    )

        # key 4 r + i is row r of the i-th matrix
        matrix_row = place_of((lane & 7) * 4 + (lane >> 3)) * 16

        def load_codes(at: Word) -> list[Word]:
            """This lane's codes of keys 4 quad .. 4 quad + 3."""
            if D >= PART:
                load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
                return ptx(load, at + matrix_row, results=4, convergent=True)
            # Lanes of columns 0 and 1 have both words of two keys, and those of 2 and 3 of the others.
            at = at + quad * 32 + (col >> 1) * 16 + (col & 1) * 4
            return [ptx(f"ld.shared.u32 $0, [$1+{8 * i}];", at, results=1) for i in range(2)]

        # All rows of a matrix are the same 8 channels, those of the unit of its columns.
        of_row = (lane & 4) >> 2 if at_once == 2 else word(0)
        own_steps = place_of_steps(lane >> 3, of_row) * 16 + of_row * steps + at_once * codes

        def load_steps(at: Word) -> list[Word]:
            """The steps of channels 8 i + 2 col and the next, for all i of a part."""
            load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{}];"
            return [
                w
                for v in range(self.width // 32)
                for w in ptx(load.format(64 * v), at + own_steps, results=4, convergent=True)
            ]

        # head of the column; a head past the last is not written
        column = quad & 3 if at_once == 2 else quad
        own = [column + HEADS * c if c else column for c in range(columns)]
        own = [(head < G).select(head, 0) for head in own]
        signed = [self.signed_pairs(q, head, col) for head in own]
        queries = [self.channels(q, head, col) for head in own]
        eights = (0, 8) if self.iterations * at_once > 8 else (0,)
        zeros = [self.channels(zero, group_of(within(first + quad + h)), col) for h in eights]
        for i in range(stages):
            if i < self.iterations:
                fetch(word(i))
            ptx("cp.async.commit_group;")

        bases = [
            [instr("mul.f32", x, real(self.scale)) for x in zero_scores(kind, zeros, words)]
            for words in queries
        ]

        @loop(0, self.iterations, 1, state)
        def final(i: Word, *state: Word) -> Sequence[Word]:
            ptx(f"cp.async.wait_group {stages - 1};")
            simt.warp_barrier()
            at = stage(i)
            steps_of = [load_steps(at + p * (2 * PART) if p else at) for p in range(parts)]
            codes_of = [
                [load_codes(at + (u * codes + p * (UNIT * 16))) for u in range(at_once)]
                for p in range(parts)
            ]
            simt.warp_barrier()
            with when(i + stages < self.iterations):
                fetch(i + stages)
            ptx("cp.async.commit_group;")

            def sums_of(p: int) -> list[list[Word]]:
                """Sums over the channels of part p, for each column of queries."""
                size = 2 * len(steps_of[p])
                mine = [words[p * size : (p + 1) * size] for words in signed]
                sums = unit_sums(kind, codes_of[p], mine, steps_of[p])
                return [
                    [later.equals(0).select(*two) for two in zip(first, second, strict=True)]
                    for first, second in zip(sums[0], sums[-1], strict=True)
                ]

            made = functools.reduce(added, map(sums_of, range(parts)))
            own = i * at_once + later
            fours = []
            for base, mine in zip(bases, made, strict=True):
                for e in range(2):
                    start = (
                        (own < 8).select(base[e], base[2 + e]) if len(eights) == 2 else base[e]
                    )
                    start = simt.from_lane(start, ((own & 7) << 2) + col)
                    fours.append(
                        [
                            instr("fma.rn.f32", x, real(self.scale), start)
                            for x in mine[4 * e : 4 * e + 4]
                        ]
                    )
            unit = first + own
            self.store(out, within(unit), quad, head, fours)
            return visit(unit, fours, state) if visit else []

        return final

    def channels(self, address: Any, index: Word, col: Word) -> list[Word]:
        """This lane's channels of row `index` of [..., D] 16-bit numbers, part by part."""
        return [
            w
            for part in range(self.parts)
            for w in lane_channels(address, index, col, self.D, part)
        ]

    def signed_pairs(self, address: Any, index: Word, col: Word) -> list[Word]:
        """Returns a word of - and + for each channel of `load_steps`, of row `index`."""
        at = simt.offset(simt.offset_rows(address, index, self.D * 2), col * 4)
        twos = [
            ptx(f"ld.global.nc.u32 $0, [$1+{16 * i}];", at, results=1)
            for i in range(self.D // 8)
        ]
        return [twice(two, half) ^ 0x8000 for two in twos for half in range(2)]

    def store(
        self, out: Any, unit: Word, quad: Word, head: Word, fours: Sequence[Sequence[Word]]
    ) -> None:
        """Writes four scores of each of a thread's heads to `out`, the address of the first of
        its heads.
        """
        size = 2 if self.half else 4
        S = self.S
        at = simt.offset(simt.offset_rows(out, unit, UNIT * size), quad * (4 * size))
        for n, four in enumerate(fours):
            words = [halves(*four[:2]), halves(*four[2:])] if self.half else four
            named = ", ".join(f"${3 + i}" for i in range(size))
            further = n // 2 * HEADS + n % 2
            if n % 2 == 0 and n:  # an offset as an immediate has 32 bits
                at = simt.offset_rows(at, word(HEADS), S * size)
            ptx(
                "{ .reg .pred p; setp.lt.u32 p, $1, $2; "
                f"@p st.global.v{size}.b32 [$0+{n % 2 * S * size}], {{{named}}}; }}",
                *(at, head, max(self.G - further, 0), *words),
            )


def halves(low: Word, high: Word) -> Word:
    """Two f32 numbers in f16."""
    return instr("cvt.rn.f16x2.f32", high, low)


def added(one: list[list[Word]], other: list[list[Word]]) -> list[list[Word]]:
    """The sums over the channels of two parts of a head."""
    return [
        [instr("add.f32", *two) for two in zip(a, b, strict=True)]
        for a, b in zip(one, other, strict=True)
    ]


def lane_channels(address: Any, index: Word, col: Word, D: int, part: int = 0) -> list[Word]:
    """This lane's quarter of a part of row `index` of [..., D] 16-bit numbers, in memory order.
    A head of at most `PART` channels is one part.
    """
    width = min(D, PART)
    at = simt.offset(simt.offset_rows(address, index, D * 2), col * (width // 2))
    loads = [
        f"ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{part * 2 * PART + 4 * v}];"
        for v in range(0, width // 8, 4)
    ]
    return [w for load in loads for w in ptx(load, at, results=4)]


def twice(two: Word, half: int) -> Word:
    """The lower or the upper half of a word, as both halves."""
    return ptx(f"prmt.b32 $0, $1, $1, {'0x3232' if half else '0x1010'};", two, results=1)


def times_half(kind: str, a: Word, two: Word, half: int) -> Word:
    """Both halves of a word times the lower or the upper half of another.

    A multiplication takes a half by itself, if it is chosen by moves.
    """
    # - 0: before 9.0, bf16 has no products without a sum
    chosen = "high, high" if half else "low, low"
    return ptx(
        "{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, $2; "
        f"mov.b32 both, {{{chosen}}}; fma.rn.{kind}x2 $0, $1, both, $3; }}",
        *(a, two, 0x80008000),
        results=1,
    )


def zero_scores(kind: str, zeros: list[list[Word]], queries: list[Word]) -> list[Word]:
    """q . zero of unit `quad` and of unit `quad` + 8, for the heads of columns 2 col and 2 col
    + 1.
    """
    base = [word(0)] * 4
    for j in range(0, len(queries), 2):
        low = zeros[0]
        high = zeros[-1]
        base = simt.mma(
            kind, base, [low[j], high[j], low[j + 1], high[j + 1]], queries[j : j + 2]
        )
    return base


def patterns(upper: Word, lower: Word) -> list[Word]:
    """The codes of rows `quad` and `quad` + 8 of a product, as indices of `mma_sparse`: four times
    16 bits of these keys' words. Two bits are the nibble 1 b 0 a: of four rows of the right operand
    row a counts, and row 2 + b.
    """
    words = [
        ptx(f"prmt.b32 $0, $1, $2, {half};", upper, lower, results=1)
        for half in ("0x5410", "0x7632")
    ]
    return [
        ((w >> odd if odd else w) & 0x55555555) | 0x88888888 for w in words for odd in range(2)
    ]


def unit_sums(
    kind: str,
    units: Sequence[Sequence[Word]],
    queries: Sequence[Sequence[Word]],
    steps: Sequence[Word],
) -> list[list[list[Word]]]:
    """For each unit and column of queries, the sums over channels of q step code, for keys 4 quad
    .. 4 quad + 3: of column 2 col, then of the next. `mma` has key 2 tile + half of column 2 col +
    e as the (2 half + e)-th of 16 keys.

    A unit's codes are words of these keys, or with 64 channels two words, of which each pair of
    lanes has those of its tile. A word is 32 channels; bit 2 col + e of its i-th byte belongs to
    `queries` and `steps` of byte i.
    """
    tiles = [
        [patterns(*codes[2 * t : 2 * t + 2]) for t in range(len(codes) // 2)] for codes in units
    ]
    acc = [[[[word(0)] * 4 for _ in range(2)] for _ in queries] for _ in units]
    for n in range(4):
        half = n // 2
        odd = n % 2
        for pair in range(len(steps) // 8):  # of words, of which two lanes have the codes
            places = [8 * pair + 4 * w + 2 * half + byte for w in range(2) for byte in range(2)]
            for column, words in enumerate(queries):
                right = [times_half(kind, words[2 * i + odd], steps[i], odd) for i in places]
                for own, sums in zip(tiles, acc, strict=True):
                    for t in range(2):
                        pattern, of = (own[t][n], pair) if len(own) == 2 else (own[0][n], t)
                        sums[column][t] = simt.mma_sparse(
                            kind, sums[column][t], right, pattern, of
                        )
    return [
        [
            [
                mine[tile][2 * half + e]
                for e in range(2)
                for tile in range(2)
                for half in range(2)
            ]
            for mine in sums
        ]
        for sums in acc
    ]
