"""Attention over codes for more queries than a product has columns, in the kernel
`attend_quantized`.

Four warps are a team. Each scores a unit of keys of its own, with all queries. The weights meet
in shared memory, and each warp mixes its own channels of the values of all four units. So every
code is decoded once, and registers hold a quarter of the mix. Teams of a block merge in the
end. Scales would have to be multiplied to the queries and weights of each column, and their
rounding corrected by more products; so codes are decoded to bf16 here.

An integer below 256 is a small bf16 (`codes`), so an `and` and an `fma` decode two codes. They
are 2^-LIFT as large as what they stand for, which scores and mix make up for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.codes import (
    LIFT,
    Layout,
    load_words,
    multiply,
    pair_of,
    pairs_of,
    prmt,
)
from kvjax.kernels_pallas.simt import (
    Flag,
    Word,
    instr,
    load_shared,
    loop,
    ptx,
    real,
    when,
    word,
)

WARPS = 4  # of a team
MOST_COLUMNS = 4  # whose mix and scores of a unit registers hold
# steps of 16 channels whose keys are decoded at once: places in a byte of codes, at most
AT_ONCE = 2
HEADS = softmax.HEADS


def smem_bytes(layout: Layout, stages: int, columns: int, teams: int) -> int:
    return columns * 2 * HEADS * layout.D + teams * sum(_room(layout, stages, columns))


def _room(layout: Layout, stages: int, columns: int) -> tuple[int, int, int]:
    """Bytes of a team's stages, which have its result afterwards, of its weights and of its
    statistics.
    """
    result = columns * softmax.part_bytes(layout.D)
    return (
        max(WARPS * stages * layout.stage, result + -result % 16),
        WARPS * layout.tiles * columns * 256,
        (WARPS + 1) * columns * HEADS * 4,
    )


def turned(chunk: Word, of_token: int) -> Word:
    """The place of a chunk of 16 bytes of codes with `of_token` bytes a token: eight tokens'
    chunks of a block, which `ldmatrix` reads at once, are then in different banks."""
    return chunk ^ ((chunk >> 3) & (of_token // 16 - 1))


class Together:
    """A team and some columns of queries; query(c, n) is the address of the n-th of column c.

    A state has, for each column, the sums of weights of queries 2 col and 2 col + 1, each
    lane's of its own keys; then the mix of the warp's own channels. Largest scores, which are
    those of all warps, are in shared memory.
    """

    def __init__(
        self, layout: Layout, columns: int, heads: int, query: Callable[[int, Word], Any], shared: Word, stages: int,
        teams: int, wide: bool,
    ):  # fmt: skip
        self.layout = layout
        self.columns = range(columns)
        self.heads = heads
        self.query = query
        self.wide = wide
        t = simt.special("tid.x")
        self.lane = t & 31
        self.warp = (t >> 5) & (WARPS - 1)
        self.team = t >> 7
        self.teams = teams
        self.quad = self.lane >> 2
        self.col = self.lane & 3
        self.t = t
        rings, weights, stats = _room(layout, stages, columns)
        self.ring_bytes = stages * layout.stage
        self.stages = stages
        self.queries = shared
        self.team_bytes = rings + weights + stats
        self.rings = shared + columns * 2 * HEADS * layout.D + self.team * self.team_bytes
        self.weights = self.rings + rings
        self.stats = self.weights + weights + self.col * 8  # of this lane's queries
        self.tops = self.stats + WARPS * columns * 32
        self.step = columns * 256  # bytes of 16 rows of a right operand
        bits = layout.bits[1]
        D = layout.D
        # Codes of a byte, channels of 16 bytes.
        self.in_byte = 8 // bits
        self.block = 128 // bits
        # of a warp: 16 channels each, as its codes' places in the block
        self.products = D // 64
        first = self.warp * self.products
        self.own_block = simt.divide(first, self.in_byte)
        self.place = first & (self.in_byte - 1)
        self.size = 2 + self.products * 4  # of the state of a column

    def nothing(self) -> list[Word]:
        return [word(0)] * (self.size * len(self.columns))

    def share(self, sign: float) -> None:
        """Writes the queries to shared memory as right operands, times `sign`, and that no key
        has been scored.
        """
        for c in self.columns:
            with when((self.t >> 5).equals(c)):
                mine = self._own(c, 0, 1)
                for n, (a, b) in enumerate(pairs_of(self.layout)):
                    pair = prmt(mine[a // 2], mine[b // 2], 0x7632 if a % 2 else 0x5410)
                    to = (
                        self.queries
                        + (n // 2 * self.step + n % 2 * (self.step // 2) + c * 128)
                        + self.lane * 4
                    )
                    simt.store_shared(to, multiply(pair, pair_of(sign)))
        with when(self.warp.equals(0) & self.quad.equals(0)):
            for c in self.columns:
                simt.store_shared(self.tops + c * 32, *[real(-math.inf)] * 2)
        self._publish()
        simt.block_barrier()

    def _own(self, c: int, part: int, parts: int) -> list[Word]:
        """This lane's channels of its query of column c, or one of `parts` of them, two a word."""
        D = self.layout.D
        mine = (self.quad < self.heads).select(self.quad, 0)
        at = simt.offset(self.query(c, mine), self.col * (D // 2) + part * D // 2 // parts)
        return load_words(at, D // 8 // parts)

    def _meet(self) -> None:
        simt.barrier_of(self.team + 1, 32 * WARPS)

    def _publish(self) -> None:
        if self.wide:
            ptx("fence.proxy.async.shared::cta;")

    # ------------------------------------------------------------------------------------------------------- products

    def _multiply(
        self,
        sums: list[list[Word]],
        lefts: Sequence[Sequence[Sequence[Word]]],
        rights: Word,
        steps: Sequence[int],
    ) -> list[list[Word]]:
        """sums[b], four words a column, + over steps s of lefts[b][s] @ the right operand at
        rights + steps[s].
        """
        return simt.products(sums, lefts, rights, steps, self.step // 2, self.wide)

    # --------------------------------------------------------------------------------------------------------- states

    def _tops(self) -> list[Word]:
        return [x for c in self.columns for x in load_shared(self.tops + c * 32, 2)]

    def _totals(self, state: Sequence[Word]) -> list[Word]:
        return [state[c * self.size + e] for c in self.columns for e in range(2)]

    def _mix(self, state: Sequence[Word]) -> list[list[Word]]:
        """By product, the sums of all columns."""
        return [
            [state[c * self.size + 2 + 4 * b + e] for c in self.columns for e in range(4)]
            for b in range(self.products)
        ]

    def _joined(self, totals: Sequence[Word], mix: Sequence[Sequence[Word]]) -> list[Word]:
        return [
            x
            for c in self.columns
            for x in (
                *totals[2 * c : 2 * c + 2],
                *(x for own in mix for x in own[4 * c : 4 * c + 4]),
            )
        ]

    def weigh(
        self, state: Sequence[Word], logs: list[list[list[Word]]], factor: float, slack: float
    ) -> list[Word]:
        """Writes the weights of this warp's keys, and gives the state in which they count. The
        block meets before, so that all warps have read what was written for the keys before,
        and must meet again.

        Logarithms, which `factor` multiplies, are those of [column][16 keys]. Largest scores
        stay until a score is larger by more than `slack`, so that few steps multiply the mix.
        """
        best = [
            functools.reduce(
                lambda a, b: instr("max.f32", a, b), [x for tile in logs[c] for x in tile[e::2]]
            )
            for c in self.columns
            for e in range(2)
        ]
        tops = self._tops()
        # Infinite if there was no key, NaN if there is none now.
        over = [
            instr("fma.rn.f32", x, real(factor), instr("neg.f32", top))
            for x, top in zip(best, tops, strict=True)
        ]
        furthest = functools.reduce(lambda a, b: instr("max.f32", a, b), over)
        greater = "{ .reg .pred p; setp.gt.f32 p, $1, $2; selp.u32 $0, 1, 0, p; }"
        any_far = simt.any_of_warps(
            ptx(greater, furthest, real(slack), results=1), self.team + 1, 32 * WARPS
        )

        def moved() -> list[Word]:
            for c in self.columns:
                two = []
                for x in best[2 * c : 2 * c + 2]:
                    for gap in (4, 8, 16):
                        x = instr("max.f32", x, simt.bfly(x, gap))
                    two.append(x if factor == 1 else instr("mul.f32", x, real(factor)))
                with when(self.quad.equals(0)):
                    simt.store_shared(
                        self.stats + self.warp * (len(self.columns) * 32) + c * 32, *two
                    )
            self._meet()
            new = list(tops)
            for c in self.columns:
                for w in range(WARPS):
                    for e, x in enumerate(
                        load_shared(self.stats + (w * len(self.columns) + c) * 32, 2)
                    ):
                        new[2 * c + e] = instr("max.f32", new[2 * c + e], x)
            keep = [
                instr("ex2.approx.ftz.f32", instr("sub.f32", x, softmax.finite(y)))
                for x, y in zip(tops, new, strict=True)
            ]
            with when(self.warp.equals(0) & self.quad.equals(0)):
                for c in self.columns:
                    simt.store_shared(self.tops + c * 32, *new[2 * c : 2 * c + 2])
            places = enumerate(state)
            return [
                *new,
                *(
                    instr("mul.f32", x, keep[i // self.size * 2 + i % self.size % 2])
                    for i, x in places
                ),
            ]

        moved_or_not = simt.branch(any_far, moved, [*tops, *state])
        tops, state = moved_or_not[: len(tops)], moved_or_not[len(tops) :]
        totals = self._totals(state)
        shifts = [instr("neg.f32", softmax.finite(top)) for top in tops]
        to = self.weights + self.warp * (self.layout.tiles * self.step) + self.lane * 4
        for c, tiles in enumerate(logs):
            for n, tile in enumerate(tiles):
                own = []
                for i, x in enumerate(tile):
                    e = 2 * c + i % 2
                    x = instr(
                        "ex2.approx.ftz.f32", instr("fma.rn.f32", x, real(factor), shifts[e])
                    )
                    totals[e] = instr("add.f32", totals[e], x)
                    own.append(x)
                for half, x in enumerate(softmax.right_operand(own, "bf16")):
                    simt.store_shared(
                        to + (n * self.step + half * (self.step // 2) + c * 128), x
                    )
        self._publish()
        return self._joined(totals, self._mix(state))

    # ---------------------------------------------------------------------------------------------------------- codes

    def attend(
        self, fetch: Callable[[Word, Word], None], begin: Word, end: Word, ends: Sequence[Word], factor: float,
        slack: float,
    ) -> list[Word]:  # fmt: skip
        """The state of the tokens between the ends in units begin .. end - 1. fetch(unit, to)
        starts to copy a unit.
        """
        layout = self.layout
        start, stop = ends
        unit = self.layout.unit
        own = self.rings + self.warp * self.ring_bytes
        stage = layout.stage
        last = end - 1

        def begin_of(first: Word, place: Word) -> None:
            n = first + self.warp
            fetch((n < end).select(n, last), own + place)

        begin = begin + self.team * WARPS
        stride = self.teams * WARPS
        for i in range(self.stages - 1):
            with when(begin + i * stride < end):
                begin_of(begin + i * stride, word(i * stage))
            ptx("cp.async.commit_group;")
        ring_end = word((self.stages - 1) * stage)

        @loop(begin, end, stride, [word(0), ring_end, *self.nothing()])
        def carry(first: Word, place: Word, before: Word, *state: Word) -> list[Word]:
            n = first + self.warp
            at = own + place
            ptx(f"cp.async.wait_group {self.stages - 2};")
            simt.warp_barrier()
            edge = (n >= end) | (n * unit < start) | (n * unit + unit > stop)

            def outside(token: Word) -> Flag:
                token = n * unit + token
                return (n >= end) | (token < start) | (token >= stop)

            self._prepare(at, edge, outside)
            simt.warp_barrier()
            logs = self._scores(at)
            # Rows of the last 16 keys that are past the unit.
            for r in range(unit // 8, 2 * layout.tiles):
                past = self.quad + 8 * r >= unit
                for tiles in logs:
                    for e in (2 * (r % 2), 2 * (r % 2) + 1):
                        tiles[r // 2][e] = past.select(real(-math.inf), tiles[r // 2][e])

            def counted() -> list[Word]:
                rows = [outside(self.quad + 8 * r) for r in range(2 * layout.tiles)]
                return [
                    rows[2 * i + e // 2].select(real(-math.inf), x)
                    for tiles in logs
                    for i, tile in enumerate(tiles)
                    for e, x in enumerate(tile)
                ]

            words = iter(
                simt.branch(
                    edge, counted, [x for tiles in logs for tile in tiles for x in tile]
                )
            )
            logs = [[[next(words) for _ in tile] for tile in tiles] for tiles in logs]
            weighed = self.weigh(state, logs, factor, slack)
            ahead = first + (self.stages - 1) * stride
            with when(ahead < end):
                begin_of(ahead, before)
            ptx("cp.async.commit_group;")
            self._meet()
            return [
                place.equals(ring_end).select(0, place + stage),
                place,
                *self._mixed(weighed, place),
            ]

        ptx("cp.async.wait_group 0;")
        found = carry[2:]
        mix = [[instr("mul.f32", x, real(2.0**LIFT)) for x in own] for own in self._mix(found)]
        return self._joined(self._totals(found), mix)

    def _prepare(self, at: Word, edge: Flag, outside: Callable[[Word], Flag]) -> None:
        """Turns the scales of this warp's unit, in place, into pairs of those of two codes that
        are decoded at once: keys by channel, those of a lane's channels in a step of the
        products; values, two tokens. Scales of tokens outside may be anything, and become 0."""
        layout = self.layout
        D = self.layout.D
        if layout.by_channel:
            key_bits, _ = layout.bits
            half = 16 // layout.bits[0]
            in_byte = half // 2
            step = self.lane >> 2  # lane = 4 step + col
            place = step & (in_byte - 1)
            low = simt.divide(step, in_byte) * (2 * half) + place
            channels = at + layout.places[3] + self.col * 16

            def two_of(channel: Word) -> list[Word]:
                return [
                    load_shared(channels + (x >> 2) * 64 + (x & 3) * 4)
                    for x in (channel, channel + half)
                ]

            within = step < D // 16
            pairs = [two_of(within.select(low + u * (half // 2), 0)) for u in range(2)]
            simt.warp_barrier()
            power = self._power(place * key_bits)
            words = [
                x
                for two in pairs
                for x in (multiply(prmt(two[0], two[1], 0x5410), power), _zero(*two))
            ]
            with when(within):
                simt.store_shared(at + layout.places[3] + self.lane * 16, *words)
        size = layout.per_token[2]
        tiles = layout.tiles
        for done in range(0, 8 * tiles, 32):
            pair = self.lane + done
            with when(pair < 8 * tiles):
                to = at + pair * (2 * size) + layout.places[2]
                whole = [load_shared(to + i) for i in range(0, 2 * size, 4)]

                def counted(whole: list[Word] = whole, pair: Word = pair) -> list[Word]:
                    past = [outside(pair * 2 + t) for t in range(2)]
                    return [past[i // (size // 4)].select(0, x) for i, x in enumerate(whole)]

                whole = simt.branch(edge, counted, whole)
                for i in range(size // 4):
                    two = whole[i], whole[size // 4 + i]
                    simt.store_shared(to + 8 * i, prmt(*two, 0x5410), _zero(*two))

    @staticmethod
    def _power(place: Word) -> Word:
        """2^(133 - LIFT - place) as two bf16."""
        power = word(127 + 133 - LIFT) - place
        return (power << 7) | (power << 23)

    def _scores(self, at: Word) -> list[list[list[Word]]]:
        """The scores of this warp's unit, times 2^-LIFT, by column and 16 keys."""
        layout = self.layout
        bits = self.layout.bits[0]
        width = self.layout.per_token[0]
        in_byte = 8 // bits
        pairs = pairs_of(layout)
        tiles = layout.tiles
        places = layout.places
        lane = at + (self.quad * width + self.col * (width // 4))
        codes = [lane + 8 * r * width for r in range(2 * tiles)]
        if not layout.by_channel:
            size = layout.per_token[3]
            scales = at + (
                self.quad * size
                + simt.divide(self.col * (layout.D // 4), layout.key_group[1]) * 4
            )
            own = []
            for r in range(2 * tiles):
                x = load_shared(scales + (places[3] + 8 * r * size))
                by = [
                    multiply(prmt(x, x, 0x5410), pair_of(2.0 ** (133 - LIFT - bits * j)))
                    for j in range(in_byte)
                ]
                own.append([(y, _zero(x, x)) for y in by])
        sums = [[word(0)] * (4 * len(self.columns)) for _ in range(tiles)]
        column = at + places[3] + self.col * 16
        for first in range(0, len(pairs) // 2, AT_ONCE):
            w, place = divmod(first, in_byte)
            if place == 0:
                lower = [load_shared(x + 4 * w) for x in codes]
                halves = lower, [x >> 8 for x in lower]
            numbers = range(first, first + AT_ONCE)
            shared = (
                [load_shared(column + s * 64, 4) for s in numbers] if layout.by_channel else []
            )
            for tile in range(tiles):
                lefts = [
                    [
                        _decode(
                            half[r],
                            ((1 << bits) - 1) << (bits * (place + i)),
                            (shared[i][2 * e], shared[i][2 * e + 1])
                            if layout.by_channel
                            else own[r][place + i],
                        )
                        for e, half in enumerate(halves)
                        for r in (2 * tile, 2 * tile + 1)
                    ]
                    for i in range(AT_ONCE)
                ]
                (sums[tile],) = self._multiply(
                    [sums[tile]], [lefts], self.queries, [s * self.step for s in numbers]
                )
        return [[own[4 * c : 4 * c + 4] for own in sums] for c in self.columns]

    def _mixed(self, state: Sequence[Word], place: Word) -> list[Word]:
        """The state with the values of all warps' units, in the stage at `place` of their
        rings.
        """
        layout = self.layout
        bits = self.layout.bits[1]
        _, width, size, _ = self.layout.per_token
        tiles = layout.tiles
        mix = self._mix(state)
        # Lanes 8 i .. give addresses of the i-th matrix.
        i = self.lane >> 3
        lane = self.lane & 7
        row = (i >> 1) * 16 + (i & 1) * 8 + lane  # of two tiles
        codes = [
            self.rings
            + place
            + turned(x * (width // 16) + self.own_block, width) * 16
            + layout.places[1]
            for x in (row, row & 15)
        ]
        slice_ = simt.divide(
            self.quad * (2 * self.in_byte) + self.own_block * self.block, layout.value_channels
        )
        scales = self.rings + place + slice_ * 8 + self.col * (2 * size) + layout.places[2]
        mask = word(((1 << bits) - 1) * 0x10001) << (self.place * bits)
        first = self._power(self.place * bits)
        powers = [
            first,
            *(multiply(first, pair_of(2.0 ** (-bits * b))) for b in range(1, self.products)),
        ]
        load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
        for w in range(WARPS):
            lefts: list[list[list[Word]]] = [[] for _ in range(self.products)]
            for tile in range(tiles):
                of_warp = w * self.ring_bytes
                if tile % 2 == 0:
                    own = codes[tile + 1 == tiles] + (of_warp + 16 * tile * width)
                    loaded = ptx(load, own, results=4, convergent=True)
                x = loaded[2 * (tile % 2) : 2 * (tile % 2) + 2]
                pairs = [
                    load_shared(scales + (of_warp + (16 * tile + 8 * h) * size), 2)
                    for h in range(2)
                ]
                for b in range(self.products):
                    affine = [(multiply(step, powers[b]), zero) for step, zero in pairs]
                    here = mask << (bits * b) if b else mask
                    lefts[b].append(
                        [
                            _decode(x[h] >> 8 if e else x[h], here, affine[h])
                            for h in range(2)
                            for e in range(2)
                        ]
                    )
            offsets = [(w * tiles + tile) * self.step for tile in range(tiles)]
            mix = self._multiply(mix, lefts, self.weights, offsets)
        return self._joined(self._totals(state), mix)

    # ----------------------------------------------------------------------------------------------------- exact keys

    def add_exact(
        self, state: Sequence[Word], zone: Sequence[Any], size: int, spans: softmax.Spans, step_of: Callable[..., Word],
        first: Word, step: int, scale: float,
    ) -> list[Word]:  # fmt: skip
        """The state with some of the exact keys and values [size, D] of `zone`, 16 a warp at a
        time: those in the span of each query's step, step_of(column, e). Blocks take turns,
        `first` of `step`."""
        first = (word(self.teams - 1) - self.team) * step + first
        step = step * self.teams
        D = self.layout.D
        by_block = 16 * WARPS

        begin = simt.divide(spans.start, by_block)
        end = simt.divide(spans.stop + (by_block - 1), by_block)

        @loop(begin + first, end, step, state)
        def carry(n: Word, *state: Word) -> list[Word]:
            def at(address: Any, token: Word, byte: Word) -> Any:
                token = (token < size).select(token, size - 1)
                return simt.offset(address, token * (2 * D) + byte)

            own = n * by_block + self.warp * 16
            scores = [[word(0)] * 4 for _ in self.columns]
            for half in range(2):  # of the channels, so that registers hold them
                byte = self.col * (D // 2) + half * (D // 4)
                near, far = (
                    load_words(at(zone[0], own + self.quad + 8 * r, byte), D // 16)
                    for r in range(2)
                )
                for c in self.columns:
                    queries = self._own(c, half, 2)
                    for i in range(0, D // 16, 2):
                        left = [near[i], far[i], near[i + 1], far[i + 1]]
                        scores[c] = simt.mma("bf16", scores[c], left, queries[i : i + 2])
            logs = []
            for c in self.columns:
                ends = [spans.of(step_of(c, e)) for e in range(2)]

                def exists(r: int, e: int, ends: Any = ends) -> Flag:
                    token = own + (self.quad + 8 * r)
                    return (token >= ends[e][0]) & (token < ends[e][1])

                logs.append(
                    softmax.masked(
                        softmax.logarithms([scores[c]], softmax.Scale(scale)), exists
                    )
                )
            weighed = self.weigh(state, logs, 1.0, 0.0)
            self._meet()
            channel = self.quad * (2 * self.in_byte) + self.own_block * self.block + self.place
            flat = [x for own in self._mix(weighed) for x in own]

            @loop(0, WARPS, 1, flat)
            def mixed(w: Word, *flat: Word) -> list[Word]:
                ptx('.pragma "nounroll";')  # or its loads fill the registers
                tokens = [
                    n * by_block + w * 16 + self.col * 2 + (8 * (i >> 1) + (i & 1))
                    for i in range(4)
                ]
                lefts: list[list[list[Word]]] = []
                for b in range(self.products):
                    bytes_ = [(channel + (b + self.in_byte * e)) * 2 for e in range(2)]
                    halves = [
                        [
                            ptx("ld.global.nc.u16 $0, [$1];", at(zone[1], x, byte), results=1)
                            for x in tokens
                        ]
                        for byte in bytes_
                    ]
                    two = [
                        halves[e][2 * h] | (halves[e][2 * h + 1] << 16)
                        for h in range(2)
                        for e in range(2)
                    ]
                    lefts.append([two])
                each = len(flat) // self.products
                mix = [list(flat[each * b : each * (b + 1)]) for b in range(self.products)]
                rights = self.weights + w * (self.layout.tiles * self.step)
                return [x for own in self._multiply(mix, lefts, rights, [0]) for x in own]

            each = len(flat) // self.products
            mix = [mixed[each * b : each * (b + 1)] for b in range(self.products)]
            return self._joined(self._totals(weighed), mix)

        return carry

    # --------------------------------------------------------------------------------------------------------- result

    def write(self, state: Sequence[Word], out: Any, lse: Any, stride: int) -> None:
        """Writes the means of values and the logs of sums of each column, `stride` queries
        apart.
        """
        D = self.layout.D
        parts = [self.rings + c * softmax.part_bytes(self.layout.D) for c in self.columns]
        self._meet()  # all warps have read what was there
        channel = self.quad * (2 * self.in_byte) + self.own_block * self.block + self.place
        mix = self._mix(state)
        tops = self._tops()
        sums = self._totals(state)
        for c, part in enumerate(parts):
            totals = []
            for e in range(2):
                x = sums[2 * c + e]
                for gap in (4, 8, 16):
                    x = instr("add.f32", x, simt.bfly(x, gap))
                totals.append(x)
                head = self.col * 2 + e
                with when(head < self.heads):
                    for b in range(self.products):
                        for half in range(2):
                            at = head * (D + 4) + channel + (b + self.in_byte * half)
                            simt.store_shared(part + at * 4, mix[b][4 * c + 2 * half + e])
            with when(self.quad.equals(0)):
                simt.store_shared(self.stats + self.warp * (len(parts) * 32) + c * 32, *totals)
        self._meet()
        with when((self.t & (32 * WARPS - 1)) < 4):
            for c, part in enumerate(parts):
                found = [
                    load_shared(self.stats + (w * len(parts) + c) * 32, 2) for w in range(WARPS)
                ]
                for e in range(2):
                    total = functools.reduce(
                        lambda a, b: instr("add.f32", a, b), [two[e] for two in found]
                    )
                    softmax.store_stats(part, self.col * 2 + e, D, tops[2 * c + e], total)
        simt.block_barrier()
        for c, part in enumerate(parts):
            if c:
                out, lse = (
                    simt.offset(a, word(stride * n)) for a, n in ((out, 4 * D), (lse, 4))
                )
            of_teams = [
                part + self.team_bytes * i - self.team * self.team_bytes
                for i in range(self.teams)
            ]
            write = functools.partial(softmax.write_merged, of_teams, D, out, lse)
            loop(self.t, self.heads * D // 4, 32 * WARPS * self.teams)(write)


def _zero(x: Word, y: Word) -> Word:
    """Zeros, times 2^-LIFT, from two u32 with scale and zero each."""
    return multiply(prmt(x, y, 0x7632), pair_of(2.0**-LIFT))


def _decode(x: Word, mask: Any, affine: tuple[Word, Word]) -> Word:
    """Values of the codes under the mask, which has the bits of one half if it is a number."""
    return instr(
        "fma.rn.bf16x2", x & (mask * 0x10001 if isinstance(mask, int) else mask), *affine
    )
