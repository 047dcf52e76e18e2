"""Scores of 1-bit keys for the query heads of several steps, in the kernel `select_1bit`.

Queries stay in shared memory as right operands, for all keys. So keys are decoded: 2 step code
+ zero - step, in bf16, where a code is the bit itself, which is a small bf16 (`attend.codes`).
All numbers are 2^-LIFT as large as what they stand for. All warps of a block score keys of one
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend.codes import LIFT, multiply, pair_of, prmt
from kvjax.kernels_pallas.score.score_1bit import (
    HEADS,
    UNIT,
    Scores,
    Thread,
    Visit,
    lane_channels,
)
from kvjax.kernels_pallas.simt import Word, instr, load_shared, loop, ptx, real, when, word

WARPS = 16  # of a block
STEPS = 4  # of 16 channels, whose keys are decoded at once
D = 128


@dataclass(frozen=True)
class WideScores(Scores):
    """As `Scores`, with D = 128 and scales in bf16. Queries are in memory as [B, T, K, G, D],
    with `order` = (K, T).
    """

    order: tuple[int, int] = (1, 1)
    by_warpgroup: bool = False

    @classmethod
    def of_steps(cls, x: Scores, order: tuple[int, int], by_warpgroup: bool) -> WideScores:
        return cls(
            x.rows,
            x.G,
            x.S,
            x.D,
            x.group,
            x.kind,
            x.scale,
            x.config,
            x.half,
            order,
            by_warpgroup,
        )

    @property
    def warps(self) -> int:
        return WARPS

    @property
    def at_once(self) -> int:
        return 1

    @property
    def jobs(self) -> int:
        jobs = -(-self.S // (UNIT * self.iterations))
        return jobs + -jobs % WARPS

    @property
    def step_bytes(self) -> int:
        """Bytes of 16 channels of all queries."""
        return self.columns * 256

    @property
    def smem_bytes(self) -> int:
        return D // 16 * self.step_bytes + WARPS * self.config.stages * (UNIT * D // 8 + 4 * D)

    def thread(self) -> Thread:
        t = simt.special("tid.x")
        block = simt.special("ctaid.x")
        warp = t >> 5
        lane = t & 31
        of_row = self.jobs // WARPS
        row = simt.divide(block, of_row)
        return Thread(
            warp,
            lane,
            lane >> 2,
            lane & 3,
            (lane & 3) * 2,
            word(0),
            row,
            (block - row * of_row) * WARPS + warp,
        )

    def program(
        self, q_m, bits_m, step_m, zero_m, out_m, ring_m, *, visit: Visit | None = None, state: Sequence[Word] = ()
    ) -> list[Word]:  # fmt: skip
        G = self.G
        S = self.S
        stages = self.config.stages
        units = self.S // UNIT
        warp, lane, quad, col, head, _, row, job = self.thread()
        first = job * self.iterations
        q, bits, step, zero, out = (
            simt.global_address(m) for m in (q_m, bits_m, step_m, zero_m, out_m)
        )
        bits = simt.offset_rows(bits, row, S * D // 8)
        step, zero = (simt.offset_rows(a, row, S // self.group * D * 2) for a in (step, zero))
        out = simt.offset_rows(out, row * G + head, S * (2 if self.half else 4))
        # Bytes of a unit.
        codes = UNIT * D // 8
        scales = 4 * D
        queries = simt.shared_address(ring_m)
        ring = queries + (D // 16 * self.step_bytes) + warp * (stages * (codes + scales))
        wide = self.by_warpgroup
        K, T = self.order

        def within(unit: Word) -> Word:
            return (unit < units).select(unit, units - 1)

        def stage(i: Word) -> Word:
            return ring + (i & (stages - 1)) * (codes + scales)

        # As in `Scores`: eight lanes fetch whole sectors, and chunks that lanes read at once
        # are in different banks.
        def place_of(chunk: Word) -> Word:
            return chunk ^ (chunk >> 3)

        def fetch(i: Word) -> None:
            unit = within(first + i)
            group = simt.divide(unit, self.group // UNIT)
            of_scales = simt.select_address(lane < 16, step, zero)
            for source, place in (
                (
                    simt.offset(simt.offset_rows(bits, unit, codes), lane * 16),
                    place_of(lane) * 16,
                ),
                (
                    simt.offset(simt.offset_rows(of_scales, group, 2 * D), (lane & 15) * 16),
                    lane * 16 + codes,
                ),
            ):
                ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                    stage(i) + place,
                    source,
                    16,
                )

        # key 4 r + i is row r of the i-th matrix
        matrix_row = place_of((lane & 7) * 4 + (lane >> 3)) * 16
        for i in range(stages):
            if i < self.iterations:
                fetch(word(i))
            ptx("cp.async.commit_group;")
        for c in range(self.columns):
            with when(warp.equals(c)):
                own = quad + HEADS * c
                own = (own < G).select(own, 0)
                mine = lane_channels(q, simt.swapped_row(row * G + own, K, T, G // T), col, D)
                for n in range(16):
                    low = n // 2 + n % 2 * 8  # and low + 16, 16 bits further in a word
                    pair = prmt(
                        mine[low // 2], mine[low // 2 + 8], 0x7632 if low % 2 else 0x5410
                    )
                    to = (
                        queries
                        + (n // 2 * self.step_bytes + n % 2 * (self.step_bytes // 2) + c * 128)
                        + lane * 4
                    )
                    simt.store_shared(to, pair)
        if wide:
            ptx("fence.proxy.async.shared::cta;")
        simt.block_barrier()
        # A lane prepares the scales of step lane / 4 of the products for the lanes of its
        # column: those of bit lane / 4 of the lower and the upper byte of a half word.
        power = word(127 + 133 + 1 - LIFT) - quad
        power = (power << 7) | (power << 23)
        odd = (quad & 1).equals(0).select(0x5410, 0x7632)

        def prepare(at: Word) -> None:
            words = []
            place = at + col * 64 + (quad >> 1) * 4
            for upper in (0, 16):
                own, none = (
                    instr(
                        "prmt.b32",
                        *(load_shared(place + (of + upper + far)) for far in (0, 32)),
                        odd,
                    )
                    for of in (0, 2 * D)
                )
                zero = multiply(none, pair_of(2.0**-LIFT))
                words += [
                    multiply(own, power),
                    instr("fma.rn.bf16x2", own, pair_of(-(2.0**-LIFT)), zero),
                ]
            simt.warp_barrier()
            simt.store_shared(at + lane * 16, *words)

        @loop(0, self.iterations, 1, state)
        def final(i: Word, *state: Word) -> Sequence[Word]:
            ptx(f"cp.async.wait_group {stages - 1};")
            simt.warp_barrier()
            at = stage(i)
            prepare(at + codes)
            load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
            keys = ptx(load, at + matrix_row, results=4, convergent=True)
            upper = [x >> 8 for x in keys]
            simt.warp_barrier()
            sums = [[word(0)] * (4 * self.columns) for _ in range(2)]
            for s in range(0, D // 16, STEPS):
                lefts: list[list[list[Word]]] = [[], []]
                for n in range(s, s + STEPS):
                    four = load_shared(at + col * 16 + (codes + n * 64), 4)
                    for tile, own in enumerate(lefts):
                        own.append(
                            [
                                instr(
                                    "fma.rn.bf16x2",
                                    half[k] & (0x10001 << n),
                                    *four[2 * e : 2 * e + 2],
                                )
                                for e, half in enumerate((keys, upper))
                                for k in (2 * tile, 2 * tile + 1)
                            ]
                        )
                offsets = [n * self.step_bytes for n in range(s, s + STEPS)]
                sums = simt.products(sums, lefts, queries, offsets, self.step_bytes // 2, wide)
            simt.warp_barrier()
            with when(i + stages < self.iterations):
                fetch(i + stages)
            ptx("cp.async.commit_group;")
            larger = real(self.scale * 2.0**LIFT)
            unit = first + i
            fours = [
                [
                    instr("mul.f32", sums[tile][4 * c + 2 * half + e], larger)
                    for tile in range(2)
                    for half in range(2)
                ]
                for c in range(self.columns)
                for e in range(2)
            ]
            self.store(out, within(unit), quad, head, fours)
            return visit(unit, fours, state) if visit else []

        return final
