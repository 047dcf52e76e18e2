"""Attention over codes for more queries than a product has columns, in the kernel `attend_quantized`.

Columns of `HEADS` queries share the operands that codes become. Scales would have to be multiplied to the queries and
weights of each column, and their rounding corrected by more products; so codes are decoded to bf16 here. Queries are in
shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.codes import (
    Layout,
    affine_of,
    decode,
    exact_operand,
    load_words,
    multiply,
    pair_of,
    pairs_of,
    prmt,
)
from kvjax.kernels_pallas.attend.mixing import Mixing
from kvjax.kernels_pallas.simt import Flag, Word, load_shared, loop, real, when, word

REGISTERS = 212  # of a thread, for the states, a unit's scores and its codes


def columns_at_once(layout: Layout) -> int:
    """Columns whose states registers hold beside a unit."""
    of_codes = 2 * layout.tiles * layout.D * layout.bits[0] // 128
    return max(n for n in (1, 2, 3, 4) if n * (4 + layout.D // 4 + 4 * layout.tiles) + of_codes <= REGISTERS)


class Columns:
    """The states of columns of queries, of `softmax`, one after the other, with the mix in the order of `mixing`.

    Queries [columns, heads, D] are at the address `q` in device memory, and as right operands at `shared`.
    """

    def __init__(self, mixing: Mixing, columns: int, heads: int, q: Any, shared: Word):
        self.mixing, self.layout, self.heads, self.columns = mixing, mixing.layout, heads, range(columns)
        self.quad, self.col, self.q, self.shared = mixing.quad, mixing.lane & 3, q, shared + mixing.lane * 8

    def nothing(self) -> list[Word]:
        return softmax.empty(self.layout.D) * len(self.columns)

    def states(self, state: Sequence[Word]) -> list[Sequence[Word]]:
        size = len(state) // len(self.columns)
        return [state[c * size : (c + 1) * size] for c in self.columns]

    def _own(self, c: int, part: int = 0, parts: int = 1) -> list[Word]:
        """This lane's channels of its query of column c, or one of `parts` of them, two a word."""
        D = self.layout.D
        mine = (self.quad < self.heads).select(self.quad, 0) + c * self.heads
        return load_words(
            simt.offset(self.q, mine * (D * 2) + self.col * (D // 2) + part * D // 2 // parts), D // 8 // parts
        )

    def share(self, warp: Word, warps: int, sign: float) -> None:
        """Writes the queries to shared memory, times `sign`; then the block must meet."""
        for c in self.columns:
            with when(warp.equals(c % warps)):
                mine = self._own(c)
                pairs = [
                    prmt(mine[a // 2], mine[b // 2], 0x7632 if a % 2 else 0x5410) for a, b in pairs_of(self.layout)
                ]
                for n in range(0, len(pairs), 2):
                    two = [multiply(x, pair_of(sign)) for x in pairs[n : n + 2]]
                    simt.store_shared(self._query(c, n), *two)

    def _query(self, c: int, n: int) -> Word:
        return self.shared + (c * self.layout.D * 16 + n * 128)

    def add(
        self, state: Sequence[Word], n: Word, at: Word, ends: Sequence[Word], factor: float, slack: float
    ) -> list[Word]:
        """The state with the tokens of unit n, at `at`, between the ends."""
        layout, (start, stop), unit = self.layout, ends, self.layout.unit
        edge = (n * unit < start) | (n * unit + unit > stop)

        def inside(token: Word) -> Flag:
            return (n * unit + token >= start) & (n * unit + token < stop)

        def counted(logs: list[list[Word]]) -> list[Word]:
            return softmax.flat(softmax.masked(logs, lambda r, _: inside(self.quad + 8 * r)))

        scores = self._scores(at)
        rights, before = [], []
        for own, logs in zip(self.states(state), scores, strict=True):
            for r in range(unit // 8, 2 * layout.tiles):  # rows of the last 16 keys that are past the unit
                for e in (2 * (r % 2), 2 * (r % 2) + 1):
                    logs[r // 2][e] = (self.quad + 8 * r < unit).select(logs[r // 2][e], real(-math.inf))

            words = simt.branch(edge, partial(counted, logs), softmax.flat(logs))
            logs = [words[i : i + 4] for i in range(0, len(words), 4)]
            kept, weights = softmax.exponentials(own, logs, factor=factor, slack=slack)
            before.append(kept)
            rights.append([softmax.right_operand(tile, "bf16") for tile in weights])
        return softmax.flat(self._mixed(before, rights, at, edge, inside))

    def _scores(self, at: Word) -> list[list[list[Word]]]:
        """Sums of `mma` of 16 keys each, for each column."""
        layout, bits, width = self.layout, self.layout.bits[0], self.layout.per_token[0]
        in_byte, pairs, tiles, places = 8 // bits, pairs_of(layout), layout.tiles, layout.places
        lane = at + (self.quad * width + self.col * (width // 4))
        codes = [lane + 8 * r * width for r in range(2 * tiles)]
        if not layout.by_channel:
            size = layout.per_token[3]
            lane = at + (self.quad * size + simt.divide(self.col * (layout.D // 4), layout.key_group[1]) * 4)
            own = [affine_of(load_shared(lane + (places[3] + 8 * r * size)), bits) for r in range(2 * tiles)]
        found = [[[word(0)] * 4 for _ in range(tiles)] for _ in self.columns]
        for n in range(0, len(pairs), 2):
            w, j = divmod(n // 2, in_byte)
            if j == 0:
                rows = [load_shared(x + 4 * w) for x in codes]
            rights = [load_shared(self._query(c, n), 2) for c in self.columns]
            if layout.by_channel:
                column = at + places[3] + self.col * 16
                both = [[load_shared(column + (x // 4 * 64 + x % 4 * 4)) for x in pair] for pair in pairs[n : n + 2]]
                shared = [affine_of(two[0], bits, two[1]) for two in both]
            for tile in range(tiles):
                left = [
                    decode(rows[r], j + e * in_byte, bits, *(shared[e] if layout.by_channel else own[r]))
                    for e in range(2)
                    for r in (2 * tile, 2 * tile + 1)
                ]
                for sums, right in zip(found, rights, strict=True):
                    sums[tile] = simt.mma("bf16", sums[tile], left, right)
        return found

    def _mixed(
        self, states: list[list[Word]], rights: list[list[list[Word]]], at: Word, edge: Flag,
        inside: Callable[[Word], Flag],
    ) -> list[list[Word]]:  # fmt: skip
        """The states with the values of the unit at `at` times the right operands; scales that are not inside count as
        0, since they may be anything."""
        layout, mixing, bits = self.layout, self.mixing, self.layout.bits[1]
        size, blocks = layout.per_token[2], layout.D // mixing.block
        scales = at + (simt.divide(self.quad * (2 * mixing.in_byte), layout.value_channels) * 4 + layout.places[2])
        mixed, codes = [softmax.parts(state)[2] for state in states], mixing.codes(at + layout.places[1])

        def counted(tokens: list[Word], whole: list[Word]) -> list[Word]:
            return [inside(tokens[i % 4]).select(x, 0) for i, x in enumerate(whole)]

        for tile in range(layout.tiles):
            tokens = [self.col * 2 + (16 * tile + 8 * (i >> 1) + (i & 1)) for i in range(4)]
            whole = [load_shared(scales + (x * size + mixing.first(m) * 4)) for m in range(blocks) for x in tokens]

            words = simt.branch(edge, partial(counted, tokens, whole), whole)
            affine = [affine_of(words[i], bits, words[i + 1]) for i in range(0, len(words), 2)]
            for p, (m, j) in enumerate(mixing.products):
                left = [
                    decode(codes[tile][2 * m + h], i, bits, *affine[2 * m + h])
                    for h in range(2)
                    for i in (j, j + mixing.in_byte)
                ]
                for own, right in zip(mixed, rights, strict=True):
                    own[p] = simt.mma("bf16", own[p], left, right[tile])
        return [[*state[:4], *softmax.flat(own)] for state, own in zip(states, mixed, strict=True)]

    def add_exact(
        self, state: Sequence[Word], zone: Sequence[Any], size: int, spans: softmax.Spans, step_of: Callable[..., Word],
        first: Word, step: int, *, scale: float,
    ) -> list[Word]:  # fmt: skip
        """The state with some of the exact keys and values [size, D] of `zone`, 16 at a time: those in the span of each
        query's step, step_of(column, e)."""
        layout, mixing = self.layout, self.mixing
        D, in_byte = layout.D, mixing.in_byte

        @loop(simt.divide(spans.start, 16) + first, simt.divide(spans.stop + 15, 16), step, state)
        def carry(n: Word, *state: Word) -> list[Word]:
            def words(address: Any, token: Word, byte: Word, number: int) -> list[Word]:
                token = n * 16 + token
                token = (token < size).select(token, size - 1)
                return load_words(simt.offset(address, token * (2 * D) + byte), number)

            def exists(ends: list[list[Word]], r: int, e: int) -> Flag:
                token = n * 16 + (self.quad + 8 * r)
                return (token >= ends[e][0]) & (token < ends[e][1])

            scores = [[word(0)] * 4 for _ in self.columns]
            for half in range(2):  # of the channels, so that registers hold them
                at = self.col * (D // 2) + half * (D // 4)
                near, far = (words(zone[0], self.quad + 8 * r, at, D // 16) for r in range(2))
                for c in self.columns:
                    queries = self._own(c, half, 2)
                    for i in range(0, D // 16, 2):
                        left = [near[i], far[i], near[i + 1], far[i + 1]]
                        scores[c] = simt.mma("bf16", scores[c], left, queries[i : i + 2])
            mixed, before, rights = [], [], []
            for c, own in zip(self.columns, self.states(state), strict=True):
                ends = [spans.of(step_of(c, e)) for e in range(2)]
                kept, (right,) = softmax.weigh(own, [scores[c]], partial(exists, ends), scale=scale, kind="bf16")
                mixed.append(softmax.parts(kept)[2])
                before.append(kept[:4])
                rights.append(right)
            tokens = [self.col * 2 + (i & 1) + 8 * (i >> 1) for i in range(4)]
            at, values = self.quad * (4 * in_byte), {}
            for p, (m, j) in enumerate(mixing.products):
                if m not in values:
                    values = {m: [[words(zone[1], x, at + 2 * mixing.block * m, in_byte)] for x in tokens]}
                left = exact_operand(values[m], 0, j, in_byte)
                for c, right in enumerate(rights):
                    mixed[c][p] = simt.mma("bf16", mixed[c][p], left, right)
            return softmax.flat([[*one, *softmax.flat(tiles)] for one, tiles in zip(before, mixed, strict=True)])

        return carry
