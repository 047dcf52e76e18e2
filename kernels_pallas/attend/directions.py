"""Codes of rotated directions as operands of `mma`, for the kernel `attend_coded_zones`.

A product sums over channels in any order, so each lane takes the channels of its own loads: of
a key, the word `col` of each plane; of a value, the bits `quad` of two tokens. Bits at one
place of the half bytes of three planes are indices that `prmt` looks up, four at once, in a
table of 8 sizes. Scales multiply scores and weights, in f32.

The rotation is of signs, then of sums and differences along each bit of a channel's number. For
queries, `mma` sums along the bits that lanes have. For the mix, lanes exchange registers of
their bits for others, which leaves it in the order of `softmax.Rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.codes import load_words, own_queries, pair_of, prmt
from kvjax.kernels_pallas.simt import Word, instr, ptx, real, word

ARRAYS = 7  # signs, sizes and weights of keys and of values, and the offset of keys
EACH = 0x11111111  # bit 0 of each half byte


@dataclass(frozen=True)
class Coded:
    """A zone of codes, as `kvjax.numerics.rotate.Directions` of keys and values."""

    S: int
    D: int
    bits: tuple[int, int]  # of keys and values
    # The sizes that an index stands for; none with 8 bits.
    centres: tuple[tuple[float, ...], tuple[float, ...]]
    turned: int  # a bit for each channel whose sign the rotation flips


class Zone:
    """The codes of a row, and its queries."""

    def __init__(
        self,
        of: Coded,
        refs: Sequence[Any],
        row: Word,
        q: Any,
        heads: int,
        kind: str,
        lane: Word,
    ):
        self.of = of
        self.quad = lane >> 2
        self.col = lane & 3
        self.strides = [(of.D // 8, of.D // 8 * (bits - 1), 2) for bits in of.bits]
        sizes = [of.S * n for two in self.strides for n in two] + [4 * of.D]
        at = [
            simt.offset_rows(simt.global_address(m), row, n)
            for m, n in zip(refs, sizes, strict=True)
        ]
        self.keys = at[:3]
        self.values = at[3:6]
        self.levels = [
            Levels(bits, centres) for bits, centres in zip(of.bits, of.centres, strict=True)
        ]
        self.in_byte = of.D // 32  # bytes of a plane that a lane has of a key
        own = own_queries(q, heads, of.D, self.quad, self.col)
        self.shift = self._shift(own, at[6], kind)
        self.queries = self._rotated(own, kind)

    def _shift(self, own: Sequence[Word], offset: Any, kind: str) -> list[Word]:
        """The product of the offset and of the queries 2 col and 2 col + 1."""
        total = real(0.0)
        D = self.of.D
        offsets = load_words(simt.offset(offset, self.col * D), D // 4)
        for i, two in enumerate(own):
            halves = simt.from_halves(two) if kind == "f16" else [two << 16, two & 0xFFFF0000]
            for x, y in zip(halves, offsets[2 * i :], strict=False):
                total = instr("fma.rn.f32", x, y, total)
        for gap in (1, 2):
            total = instr("add.f32", total, simt.bfly(total, gap))
        return [simt.from_lane(total, (self.col * 2 + e) * 4) for e in range(2)]

    def _rotated(self, own: Sequence[Word], kind: str) -> list[list[Word]]:
        """Right operands of the rotated queries, by place in half bytes and half of a lane's
        channels.

        In each, a lane has its channels c, c + 4, c + 8 and c + 12.
        """
        n = self.of.D // 4
        quad = self.quad
        col = self.col
        turned = [self.of.turned >> n * i & ((1 << n) - 1) for i in range(4)]
        flips = word(turned[0])
        for i in range(1, 4):
            flips = col.equals(i).select(turned[i], flips)

        def bit(i: int, to: int) -> Word:
            return (flips << (to - i) if i <= to else flips >> (i - to)) & (1 << to)

        def pair(c: int) -> Word:
            both = prmt(own[c // 2], own[c // 2 + 2], 0x7632 if c % 2 else 0x5410)
            return both ^ bit(c, 15) ^ bit(c + 4, 31)

        x = (quad >> 1) & col
        odd = (x ^ (x >> 1)) & 1
        same = (
            word(0x3F803F80 if kind == "bf16" else 0x3C003C00)
            ^ (odd << 15)
            ^ ((odd ^ (quad & 1)) << 31)
        )
        left = [same, same, same, same ^ 0x80008000]
        firsts = [k + 16 * half for k in range(4) for half in range(n // 16)]
        tiles = [simt.mma(kind, [word(0)] * 4, left, [pair(c), pair(c + 8)]) for c in firsts]
        tiles = _sums(tiles)
        by = real(self.of.D**-0.5)
        return [
            softmax.right_operand([instr("mul.f32", x, by) for x in tile], "bf16")
            for tile in tiles
        ]

    def add(
        self, state: Sequence[Word], slots: Word, tiles: int, *, scale: softmax.Scale
    ) -> list[Word]:
        """The state with the keys and values of 16 `tiles` slots, one a lane; those past the
        zone do not count.
        """
        exists = slots < self.of.S
        own = exists.select(slots, 0)
        both = self._weight(self.keys[2], slots) | (self._weight(self.values[2], slots) << 16)
        rows = [self.quad + 8 * r for r in range(2 * tiles)]
        scales = [simt.from_halves(simt.from_lane(both, row)) for row in rows]
        of_keys = [
            self._planes(0, simt.from_lane(own, row), self.col, self.in_byte) for row in rows
        ]
        tokens = [self.col * 2 + (8 * r + i) for r in range(2 * tiles) for i in range(2)]
        of_values = [
            self._planes(1, simt.from_lane(own, token), self.quad, self.in_byte // 2)
            for token in tokens
        ]

        by = [instr("mul.f32", key, real(self.levels[0].step)) for key, _ in scales]
        scores = []
        for n in range(tiles):
            near, far = (
                self.levels[0].words(planes, self.in_byte // 2)
                for planes in of_keys[2 * n : 2 * n + 2]
            )
            acc = [word(0)] * 4
            for i, right in enumerate(self.queries):
                acc = simt.mma(
                    "bf16",
                    acc,
                    [near[2 * i], far[2 * i], near[2 * i + 1], far[2 * i + 1]],
                    right,
                )
            scores.append(
                [
                    instr("fma.rn.f32", x, by[2 * n + e // 2], self.shift[e % 2])
                    for e, x in enumerate(acc)
                ]
            )
        seen = simt.ballot(exists) >> self.quad
        logs = softmax.masked(
            softmax.logarithms(scores, scale), lambda j, _: ((seen >> (8 * j)) & 1).differs(0)
        )
        kept, weights = softmax.exponentials(state, logs)
        *_, mixed = softmax.parts(kept)
        for n, tile in enumerate(weights):
            scaled = [
                instr("mul.f32", x, scales[2 * n + e // 2][1]) for e, x in enumerate(tile)
            ]
            right = softmax.right_operand(scaled, "bf16")
            near, far = (
                self._of_two(of_values[i], of_values[i + 1]) for i in (4 * n, 4 * n + 2)
            )
            for i, acc in enumerate(mixed):
                mixed[i] = simt.mma(
                    "bf16", acc, [*near[2 * i : 2 * i + 2], *far[2 * i : 2 * i + 2]], right
                )
        return [*kept[:4], *softmax.flat(mixed)]

    def _weight(self, at: Any, slots: Word) -> Word:
        code = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, 0; @p ld.global.nc.u16 $0, [$3]; }"
        return ptx(code, slots, self.of.S, simt.offset(at, slots * 2), results=1)

    def _planes(self, which: int, slot: Word, place: Word, size: int) -> list[Word]:
        """`size` bytes of each plane of a token, from place * size on: signs, then sizes."""
        signs, sizes, _ = (self.keys, self.values)[which]
        first, others, _ = self.strides[which]
        load = f"ld.global.nc.u{8 * size} $0, [$1{{}}];"
        at = simt.offset(sizes, slot * others + place * size)
        return [
            ptx(load.format(""), simt.offset(signs, slot * first + place * size), results=1),
            *(
                ptx(load.format(f"+{first * i}"), at, results=1)
                for i in range(self.of.bits[which] - 1)
            ),
        ]

    def _of_two(self, a: Sequence[Word], b: Sequence[Word]) -> list[Word]:
        """Words of two tokens' channels: 4 i + k, then with the highest bit of a lane's
        channels set, by k, then i.
        """
        low = 0x0F0F if self.of.D == 128 else 0x0F

        def one(x: Word, y: Word) -> Word:
            even = (x & low) | ((y & low) << 4)
            odd = ((x >> 4) & low) | (y & (low << 4))
            return even | (odd << (16 if self.of.D == 128 else 8))

        return self.levels[1].words(
            [one(x, y) for x, y in zip(a, b, strict=True)], self.in_byte // 2
        )

    def finish(self, state: Sequence[Word]) -> list[Word]:
        """The state with its mix as it was before the rotation, in the order of `softmax.Rows`."""
        tops, totals, mixed = softmax.parts(state)
        D = self.of.D
        n = D // 8  # channels of a lane, adjacent
        places = [k + 4 * i for k in range(4) for i in range(n // 8)]
        found: dict[int, list[Word]] = {}
        for place, acc in zip(places, mixed, strict=True):
            found[place], found[place + n // 2] = list(acc[:2]), list(acc[2:])
        rows = _sums([found[i] for i in range(n)])
        # Bit b of a lane's channels becomes a bit of lanes, whose own becomes that.
        for b in range(3):
            mine = (self.quad & (1 << b)).differs(0)
            for i in range(n):
                if i & (1 << b):
                    continue
                near = rows[i]
                far = rows[i | 1 << b]
                came = [
                    simt.bfly(mine.select(x, y), 4 << b) for x, y in zip(near, far, strict=True)
                ]
                near = [mine.select(z, x) for x, z in zip(near, came, strict=True)]
                far = [mine.select(y, z) for y, z in zip(far, came, strict=True)]
                rows[i], rows[i | 1 << b] = _sum_and_difference(near, far)
        by = real(self.levels[1].step * D**-0.5)
        out = [word(0)] * (D // 4)
        for i, two in enumerate(rows):
            first = (i & 7) * n + (i >> 3) * 8  # the channels first + quad
            flip = (word(self.of.turned >> first & 0xFF) >> self.quad) << 31
            for e, x in enumerate(two):
                out[first // 16 * 4 + first // 8 % 2 * 2 + e] = instr("mul.f32", x, by) ^ flip
        return [*tops, *totals, *out]


def _sum_and_difference(a: Sequence[Word], b: Sequence[Word]) -> tuple[list[Word], list[Word]]:
    sums, differences = (
        [instr(f"{op}.f32", x, y) for x, y in zip(a, b, strict=True)] for op in ("add", "sub")
    )
    return sums, differences


def _sums(rows: Sequence[list[Word]]) -> list[list[Word]]:
    """Sums and differences of the rows along each bit of their number."""
    rows = list(rows)
    gap = 1
    while gap < len(rows):
        for i in range(len(rows)):
            if not i & gap:
                rows[i], rows[i + gap] = _sum_and_difference(rows[i], rows[i + gap])
        gap *= 2
    return rows


class Levels:
    """Sizes that codes of some bits stand for, in bf16; `step` multiplies them."""

    def __init__(self, bits: int, centres: tuple[float, ...]):
        self.bits = bits
        self.step, table = exactly(centres) if centres else (1.0, ())
        sizes = [*table, *[0] * (8 - len(table))]
        self.lower, self.upper = (
            [
                sum((x >> shift & 0xFF) << 8 * i for i, x in enumerate(sizes[j : j + 4]))
                for j in (0, 4)
            ]
            for shift in (0, 8)
        )

    def words(self, planes: Sequence[Word], halves: int) -> list[Word]:
        """Pairs of bf16 that planes stand for, 8 half bytes, or with `halves` of 1 four: two
        pairs of each half, by the place in half bytes, then by half."""
        found = []
        for k in range(4):
            signs, *three = ([planes[0]], *(planes[i : i + 3] for i in range(1, self.bits, 3)))
            indices = [_at(k, several) for several in (signs, *three)]
            for half in range(halves):
                found += self._four(*(x >> 16 if half else x for x in indices))
        return found

    def _four(self, sign: Word, *indices: Word) -> list[Word]:
        negative = _look_up((0x80, 0), sign)
        if self.bits < 8:
            (index,) = indices
            low = _look_up(self.lower, index)
            high = _look_up(self.upper, index) | negative
            return [prmt(low, high, how) for how in (0x5140, 0x7362)]
        tables = (0x03020100, 0x07060504), (0x18100800, 0x38302820), (0x4000, 0)
        code = [_look_up(table, index) for table, index in zip(tables, indices, strict=True)]
        whole = code[0] | code[1] | code[2]
        found = []
        for how, place in ((0x5140, 0x1404), (0x7362, 0x3424)):
            lifted = prmt(whole, word(0x43434343), how)  # 128 and the code, in bf16
            size = instr("fma.rn.bf16x2", lifted, pair_of(1.0), pair_of(-127.5))
            found.append(size | prmt(negative, word(0), place))
        return found


def _look_up(table: Sequence[int], index: Word) -> Word:
    """The bytes of a table of 8 that the lower four half bytes of `index` name."""
    return instr("prmt.b32", *table, index)


def _at(k: int, planes: Sequence[Word]) -> Word:
    """Bits k of the half bytes of up to three planes, as the bits of half bytes from 0 on."""
    moved = [
        (x >> (k - j) if k >= j else x << (j - k)) & (EACH << j & 0xFFFFFFFF)
        for j, x in enumerate(planes)
    ]
    total = moved[0]
    for x in moved[1:]:
        total = total | x
    return total


@lru_cache
def exactly(centres: tuple[float, ...]) -> tuple[float, tuple[int, ...]]:
    """A factor, and the bits of bf16 that it multiplies to the centres: the factor with the
    least error, of 4096.
    """

    def rounded(x: float) -> float:
        mantissa, exponent = math.frexp(x)
        return math.ldexp(round(256 * mantissa), exponent - 8)

    def error(factor: float) -> float:
        return max(abs(rounded(x * factor) / (x * factor) - 1) for x in centres)

    best = min((1 + i / 4096 for i in range(4096)), key=error)
    return 1 / best, tuple(simt.real_bits(rounded(x * best)) >> 16 for x in centres)
