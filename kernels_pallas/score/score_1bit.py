"""Scores of 1-bit keys: the product of each query head of a group with every dequantised key.

score = sum_d q_d zero_d + sum_d (q_d step_d) code_d. A group of tokens shares zero and step, so
the first sum is one number a group, and queries meet the step once for 32 keys. Both sums run
on `mma`.

Heads of 256 channels are two parts of 128.

A bit alone in a 16-bit half is a power of two as a float, so one `and` makes two operands;
queries are divided by these powers beforehand. With G <= 4, one product serves two units. Each
warp copies units into its own ring in shared memory.

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
# Bits that, alone in a half word, serve as numbers; `power` has these numbers. Queries are divided by them, and by
# 2^SMALLER, so that factors are powers 64 .. -63 in bf16, where |q| and |q step| may be 2^63, and 0 .. -3 in f16.
WINDOW = {"bf16": range(7, 15), "f16": range(8, 12)}
SMALLER = {"bf16": 62, "f16": 16}
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
    S, groups = bits.shape[2], step.shape[2]
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
    zero [B, K, S/g, D].
    """
    if limit := unsupported(q, bits, step):
        raise NotImplementedError(limit)
    (B, K, G, D), S = q.shape, bits.shape[2]
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
        scores, out = (
            Scores.of(q, bits, step, scale, config),
            jax.ShapeDtypeStruct((rows, G, S), jnp.float32),
        )
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


class Pair(NamedTuple):
    """Channels i and i + D/8 of a lane."""

    turn: int  # the word of codes, rotated by so many bits to the left,
    bit: int  # has their codes as this bit of its lower half and of its upper one
    i: int
    swapped: bool  # or of the upper and the lower


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
    def pairs(self) -> list[Pair]:
        """In the order of the products."""
        H, window = self.width // 8, WINDOW[self.kind]
        places = [(turn, bit) for turn in range(0, H, len(window)) for bit in window]
        return [
            Pair(turn, bit, (bit - turn) % H, (bit - turn) % 32 >= 16) for turn, bit in places
        ]

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
        warp, lane = t >> 5, t & 31
        quad, col = lane >> 2, lane & 3
        job, final = simt.special("ctaid.x") * WARPS + warp, self.rows * self.jobs - 1
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
        G, S, D, kind, at_once, columns = (
            self.G,
            self.S,
            self.D,
            self.kind,
            self.at_once,
            self.columns,
        )
        warp, lane, quad, col, head, later, row, job = self.thread()
        H, units, stages = self.width // 8, S // UNIT, self.config.stages // at_once
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
        codes, steps = UNIT * D // 8, 2 * D  # bytes of a unit
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

        def place_of_steps(chunk: Word) -> Word:
            if parts == 1:
                return chunk if D == 64 else place_of(chunk)
            return (chunk & 16) + place_of(chunk & 15)

        def fetch(i: Word) -> None:
            """Starts to copy the units of iteration i."""
            for size, to in ((codes, 0), (steps, at_once * codes)):
                chunks = size // 16
                for start in range(0, at_once * chunks, 32):
                    n = lane + start
                    of = simt.divide(n, chunks)
                    unit, chunk = within(first + i * at_once + of), n & (chunks - 1)
                    at = (
                        simt.offset_rows(step, group_of(unit), size)
                        if to
                        else simt.offset_rows(bits, unit, size)
                    )
                    place = of * chunks + (place_of_steps if to else place_of_codes)(chunk)
                    ptx(
                        "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p cp.async.cg.shared.global [$0], [$1], 16, $4; }",
                        *(
                            stage(i) + place * 16 + to,
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
            # 16 channels per lane: each of their two bytes twice, for a half of the word.
            at, bytes_ = (
                at + quad * 32 + (col >> 1) * 4,
                (col & 1).differs(0).select(0x3322, 0x1100),
            )
            words = [ptx(f"ld.shared.u32 $0, [$1+{8 * i}];", at, results=1) for i in range(4)]
            return [ptx("prmt.b32 $0, $1, 0, $2;", w, bytes_, results=1) for w in words]

        own_steps = col * (4 * H) + (quad >> 2) * steps * (at_once - 1) + at_once * codes
        # its even and odd chunks change places
        turned = (col >> 1) * 16 if D >= PART else word(0)
        turns = own_steps + turned, own_steps - turned

        def load_steps(at: Word) -> list[Word]:
            load = "ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4+{}];"
            return [
                w
                for v in range(H // 4)
                for w in ptx(load.format(16 * v), at + turns[v & 1], results=4)
            ]

        # head of the column; a head past the last is not written
        column = quad & 3 if at_once == 2 else quad
        own = [column + HEADS * c if c else column for c in range(columns)]
        queries = [self.channels(q, (head < G).select(head, 0), col) for head in own]
        eights = (0, 8) if self.iterations * at_once > 8 else (0,)
        zeros = [self.channels(zero, group_of(within(first + quad + h)), col) for h in eights]
        for i in range(stages):
            if i < self.iterations:
                fetch(word(i))
            ptx("cp.async.commit_group;")

        pairs, smaller = self.pairs, SMALLER[kind]
        queries = [self.paired(words, pairs) for words in queries]
        zeros = [self.paired(z, pairs) for z in zeros]
        bases = [
            [instr("mul.f32", x, real(self.scale)) for x in zero_scores(kind, zeros, words)]
            for words in queries
        ]
        factors = [word(twice(kind, -smaller - power(kind, p.bit))) for p in pairs] * parts
        queries = [
            [times(kind, *two) for two in zip(words, factors, strict=True)] for words in queries
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

            def sums_of(p: int) -> list[tuple[list[Word], list[Word]]]:
                """Sums over the channels of part p, for each column of queries."""
                step = paired(steps_of[p], pairs)
                mine = [words[p * len(pairs) : (p + 1) * len(pairs)] for words in queries]
                if columns > 1:
                    return wide_sums(kind, pairs, codes_of[p][0], mine, step)
                scaled = [times(kind, *two) for two in zip(mine[0], step, strict=True)]
                sums = [unit_sums(kind, pairs, words, scaled) for words in codes_of[p]]
                chosen = [
                    later.equals(0).select(*two) for two in zip(sums[0], sums[-1], strict=True)
                ]
                return [(chosen, ones_sums(kind, scaled))]

            made = functools.reduce(added, map(sums_of, range(parts)))
            own = i * at_once + later
            fours = []
            for base, (mine, ones) in zip(bases, made, strict=True):
                for e, all_ones in enumerate(ones):
                    start = (
                        (own < 8).select(base[e], base[2 + e]) if len(eights) == 2 else base[e]
                    )
                    start = simt.from_lane(start, ((own & 7) << 2) + col)
                    start = instr(
                        "fma.rn.f32", all_ones, real(-self.scale * 2.0**smaller), start
                    )
                    larger = real(self.scale * 2.0 ** (smaller + 1))
                    fours.append(
                        [instr("fma.rn.f32", x, larger, start) for x in mine[4 * e : 4 * e + 4]]
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

    def paired(self, words: Sequence[Word], pairs: Sequence[Pair]) -> list[Word]:
        """`paired` of the channels of each part."""
        size = len(words) // self.parts
        parts = [words[p * size : (p + 1) * size] for p in range(self.parts)]
        return [w for part in parts for w in paired(part, pairs)]

    def store(
        self, out: Any, unit: Word, quad: Word, head: Word, fours: Sequence[Sequence[Word]]
    ) -> None:
        """Writes four scores of each of a thread's heads to `out`, the address of the first of
        its heads.
        """
        size, S = 2 if self.half else 4, self.S
        at = simt.offset(simt.offset_rows(out, unit, UNIT * size), quad * (4 * size))
        for n, four in enumerate(fours):
            words = [halves(*four[:2]), halves(*four[2:])] if self.half else four
            named, further = ", ".join(f"${3 + i}" for i in range(size)), n // 2 * HEADS + n % 2
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


def added(
    one: list[tuple[list[Word], list[Word]]], other: list[tuple[list[Word], list[Word]]]
) -> list[tuple[list[Word], list[Word]]]:
    """The sums over the channels of two parts of a head."""

    def both(a: list[Word], b: list[Word]) -> list[Word]:
        return [instr("add.f32", *two) for two in zip(a, b, strict=True)]

    return [(both(a[0], b[0]), both(a[1], b[1])) for a, b in zip(one, other, strict=True)]


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


def paired(words: Sequence[Word], pairs: Sequence[Pair]) -> list[Word]:
    """The same channels as pairs."""
    found = []
    for _, _, i, swapped in pairs:
        two = words[i // 2], words[i // 2 + len(words) // 2]
        halves = "prmt.b32 $0, $1, $2, 0x7632;" if i % 2 else "prmt.b32 $0, $1, $2, 0x5410;"
        found.append(ptx(halves, *two[:: -1 if swapped else 1], results=1))
    return found


def times(kind: str, a: Word, b: Word) -> Word:
    return instr(
        f"fma.rn.{kind}x2", a, b, 0x80008000
    )  # - 0: before 9.0, bf16 has no products without a sum


def power(kind: str, bit: int) -> int:
    """The power of 2 of a half word in which only this bit is set."""
    return 2 ** (bit - 7) - 127 if kind == "bf16" else bit - 24


def twice(kind: str, exponent: int) -> int:
    """2^exponent in both halves."""
    return ((exponent + 127) << 7 if kind == "bf16" else (exponent + 15) << 10) * 0x00010001


def zero_scores(kind: str, zeros: list[list[Word]], queries: list[Word]) -> list[Word]:
    """q . zero of unit `quad` and of unit `quad` + 8, for the heads of columns 2 col and 2 col
    + 1.
    """
    base = [word(0)] * 4
    for j in range(0, len(queries), 2):
        low, high = zeros[0], zeros[-1]
        base = simt.mma(
            kind, base, [low[j], high[j], low[j + 1], high[j + 1]], queries[j : j + 2]
        )
    return base


def unit_sums(
    kind: str, pairs: Sequence[Pair], codes: Sequence[Word], scaled: Sequence[Word]
) -> list[Word]:
    """Sums over channels of bit times `scaled`, for keys 4 quad .. 4 quad + 3 with the codes
    `codes`: for column 2 col, then for the next. `mma` has key 2 tile + half of column 2 col +
    e as the (2 half + e)-th of 16 keys."""
    acc = [[word(0)] * 4] * 2
    for j in range(0, len(pairs), 2):
        for tile in range(2):
            two = codes[2 * tile : 2 * tile + 2]
            a = [
                rotated(w, p.turn) & (0x00010001 << p.bit)
                for p in pairs[j : j + 2]
                for w in two
            ]
            acc[tile] = simt.mma(kind, acc[tile], a, scaled[j : j + 2])
    return [acc[tile][2 * half + e] for e in range(2) for tile in range(2) for half in range(2)]


def wide_sums(
    kind: str,
    pairs: Sequence[Pair],
    codes: Sequence[Word],
    queries: Sequence[Sequence[Word]],
    step: Sequence[Word],
) -> list[tuple[list[Word], list[Word]]]:
    """`unit_sums` and `ones_sums` for several columns of queries, with the operands of codes
    made once.
    """
    acc = [[[word(0)] * 4 for _ in range(3)] for _ in queries]  # two tiles of keys, and ones
    window = WINDOW[kind]
    for j in range(0, len(pairs), 2):
        left = [
            [
                rotated(w, p.turn) & (0x00010001 << p.bit)
                for p in pairs[j : j + 2]
                for w in codes[2 * t : 2 * t + 2]
            ]
            for t in range(2)
        ]
        ones = [word(0x00010001 << window[i % len(window)]) for i in (j, j, j + 1, j + 1)]
        for words, sums in zip(queries, acc, strict=True):
            scaled = [times(kind, words[i], step[i]) for i in (j, j + 1)]
            for t in range(2):
                sums[t] = simt.mma(kind, sums[t], left[t], scaled)
            sums[2] = simt.mma(kind, sums[2], ones, scaled)
    return [
        (
            [
                sums[tile][2 * half + e]
                for e in range(2)
                for tile in range(2)
                for half in range(2)
            ],
            sums[2][:2],
        )
        for sums in acc
    ]


def ones_sums(kind: str, scaled: Sequence[Word]) -> list[Word]:
    """The same for a key whose bits are all 1, for columns 2 col and 2 col + 1."""
    acc = [[word(0)] * 4] * 2
    window = WINDOW[kind]
    for j in range(
        0, len(scaled), 2
    ):  # four constants serve two products: rows 0 .. 7 of one, 8 .. 15 of the other
        bits = [window[j // 4 * 4 % len(window) + k] for k in (0, 2, 1, 3)]
        acc[j // 2 % 2] = simt.mma(
            kind, acc[j // 2 % 2], [word(0x00010001 << b) for b in bits], scaled[j : j + 2]
        )
    return [instr("add.f32", acc[0][e], acc[1][2 + e]) for e in range(2)]


def rotated(w: Word, by: int) -> Word:
    """w rotated to the left."""
    return (w << by) | (w >> (32 - by)) if by else w
