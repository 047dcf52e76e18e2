"""The mix of values of 2 or 4 bits in the kernel `attend_quantized`: products of codes and the
weights of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.codes import (
    LIFT,
    Layout,
    centre_of,
    codes_at,
    load_words,
    pair_of,
)
from kvjax.kernels_pallas.simt import Word, instr, ptx, real, word


class Mixing:
    """The mix of values and the order of channels in it.

    `ldmatrix` gives a lane the half words `quad` of the blocks of 16 bytes of a token, two
    tokens at once. A product has 16 channels as its rows: a lane's codes at one place of their
    lower and upper bytes. These channels belong to one slice with its own scales, or to
    several: then there is a product for each, and a lane uses that of its slice. Weights times
    the scales of a slice are the right operand; weights times zeros are summed separately.
    """

    def __init__(self, layout: Layout, lane: Word):
        self.layout = layout
        self.lane = lane
        self.quad = lane >> 2
        self.bits = layout.bits[1]
        self.in_byte = 8 // self.bits
        self.block = 128 // self.bits  # channels of 16 bytes
        self.slices = layout.D // layout.value_channels
        self.of_block = max(1, self.block // layout.value_channels)  # slices
        self.products = [
            (m, j) for m in range(layout.D // self.block) for j in range(self.in_byte)
        ]

    def nothing(self) -> list[Word]:
        """The state of `softmax` with four more sums for each slice, of weights times zeros."""
        return [*softmax.empty(self.layout.D), *[word(0)] * (4 * self.slices)]

    def scales(self, at: Word) -> list[list[Word]]:
        """Scales of the values of tokens quad + 8 r of the unit, by r and slice."""
        size = self.layout.per_token[2]
        place = self.layout.places[2]
        at = at + self.quad * size
        return [
            load_words(at + (place + 8 * r * size), self.slices)
            for r in range(2 * self.layout.tiles)
        ]

    def add(
        self,
        mixed: list[list[Word]],
        at: Word,
        weights: list[list[Word]],
        scales: list[list[Word]],
    ) -> list[list[Word]]:
        """The mix and the other sums with the values of the unit at `at` added."""
        mixed, sums = mixed[: -self.slices], mixed[-self.slices :]
        # The rounding error of the right operand, times the centre of the codes, is added back
        # once (row 0).
        centre = centre_of(self.bits)
        off = self.quad.equals(0).select(pair_of(-centre), 0)
        rights: list[list[list[Word]]] = [[] for _ in sums]
        for n, tile in enumerate(weights):
            for s, right in enumerate(rights):
                own = [words[s] for words in scales[2 * n : 2 * n + 2]]
                steps = [x << 16 for x in own]
                middles = [
                    instr("fma.rn.f32", step, real(centre), x & 0xFFFF0000)
                    for step, x in zip(steps, own, strict=True)
                ]
                scaled = [instr("mul.f32", x, steps[e // 2]) for e, x in enumerate(tile)]
                right.append(softmax.right_operand(scaled, "bf16"))
                acc = simt.mma("bf16", sums[s], [off, word(0), off, word(0)], right[n])
                sums[s] = [
                    instr("fma.rn.f32", x, middles[e // 2], acc[e]) for e, x in enumerate(tile)
                ]
        return self._products(mixed, at + self.layout.places[1], rights) + sums

    def codes(self, at: Word) -> list[list[Word]]:
        """This lane's codes, by tile, then block and its tokens 0 .. 7 or 8 .. 15."""
        width = self.layout.per_token[1]
        blocks = self.layout.D // self.block
        # lanes 8 i .. give the addresses of the i-th matrix: tokens 8 (i & 1) .., block i >> 1
        i = self.lane >> 3
        at = at + ((i & 1) * 8 + (self.lane & 7)) * width + ((i >> 1) * 16 if blocks > 1 else 0)
        code = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
        return [
            [
                x
                for m in range(0, blocks, 2)
                for x in ptx(
                    code, at + (16 * tile * width + 16 * m), results=4, convergent=True
                )
            ]
            for tile in range(self.layout.tiles)
        ]

    def _products(
        self, mixed: list[list[Word]], at: Word, rights: list[list[list[Word]]]
    ) -> list[list[Word]]:
        words = self.codes(at)
        shifted = [[x >> 8 for x in tile] for tile in words]
        found = []
        for (m, j), before in zip(self.products, mixed, strict=True):
            first = self.first(m)
            by_slice = []
            for right in rights[first : first + self.of_block]:
                acc = before
                for x, y, operand in zip(words, shifted, right, strict=True):
                    near, far = (codes_at(x[i], y[i], j, self.bits) for i in (2 * m, 2 * m + 1))
                    acc = simt.mma("bf16", acc, [*near, *far], operand)
                by_slice.append(acc)
            found.append(self._of_lane(by_slice))
        return found

    def first(self, m: int) -> int:
        """The first slice of block m."""
        return self.block * m // self.layout.value_channels

    def _of_lane(self, by_slice: Sequence[list[Word]]) -> list[Word]:
        """The list of this lane's slice, from the lists of a block's slices."""
        found = by_slice[0]
        for i, other in enumerate(by_slice[1:], 1):
            mine = self.quad * (2 * self.in_byte) >= i * self.layout.value_channels
            found = [mine.select(x, y) for x, y in zip(other, found, strict=True)]
        return found

    def finish(self, state: Sequence[Word]) -> list[Word]:
        """The state of `softmax`: LIFT and the codes' places are divided out, and the other
        sums added to the mix.
        """
        tops, totals, mixed = softmax.parts(state)
        zeros = []
        for acc in mixed[-self.slices :]:
            two = [instr("add.f32", acc[e], acc[e + 2]) for e in range(2)]
            for gap in (4, 8, 16):
                two = [instr("add.f32", x, simt.bfly(x, gap)) for x in two]
            zeros.append([instr("mul.f32", x, real(2.0**-LIFT)) for x in two])
        found = []
        for (m, j), acc in zip(self.products, mixed[: -self.slices], strict=True):
            own = self._of_lane(zeros[self.first(m) :][: self.of_block])
            power = real(2.0 ** (133 - LIFT - self.bits * j))
            found += [instr("fma.rn.f32", x, power, own[e % 2]) for e, x in enumerate(acc)]
        return [*tops, *(instr("mul.f32", x, real(2.0**-LIFT)) for x in totals), *found]

    def channel(self, n: int, half: int) -> Word:
        m, j = self.products[n]
        return self.quad * (2 * self.in_byte) + (self.block * m + j + self.in_byte * half)
