"""Attention over a part of the keys, as a warp keeps it in registers, and how warps and blocks merge theirs.

A lane has, of the heads 2 col and 2 col + 1: the largest score (base 2), its share of the sum of 2^(score - largest),
and the mix of values weighted alike, [D, heads] in the places of the sums of `mma`; quad = lane / 4, col = lane % 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas._common import Flag, Word, instr, ptx, real, when, word

HEADS = 8  # columns of a product


def empty(D: int) -> list[Word]:
    """Largest scores, sums and mix of nothing."""
    return [real(-math.inf)] * 2 + [word(0)] * (2 + D // 4)


def parts(state: Sequence[Word]) -> tuple[list[Word], list[Word], list[list[Word]]]:
    mixed = [list(state[j : j + 4]) for j in range(4, len(state), 4)]
    return list(state[:2]), list(state[2:4]), mixed


def weigh(
    state: Sequence[Word], scores: list[list[Word]], there: Callable[[int], Flag], *, scale: float, kind: str
) -> tuple[list[Word], list[list[Word]]]:
    """The state before the values of some keys are mixed in, and their weights as right operands of `mma`.

    `scores` are the sums of `mma` of 16 keys each, without `scale`; `there(n)` says whether key 8 n + quad counts.
    """
    logs = [[instr("mul.f32", x, real(scale / math.log(2))) for x in tile] for tile in scores]
    kept, weights = exponentials(state, masked(logs, there))
    return kept, [right_operand(tile, kind) for tile in weights]


def masked(logs: list[list[Word]], there: Callable[[int], Flag]) -> list[list[Word]]:
    return [[there(2 * n + e // 2).choose(x, real(-math.inf)) for e, x in enumerate(t)] for n, t in enumerate(logs)]


def exponentials(
    state: Sequence[Word], logs: list[list[Word]], *, factor: float = 1.0, lift: float = 0.0, slack: float | None = None
) -> tuple[list[Word], list[list[Word]]]:
    """The state before the values of some keys are mixed in, and their weights times 2^lift.

    Logarithms, which `factor` > 0 multiplies, and weights are in the places of the sums of `mma` of 16 keys each. The
    state's sums have the lift too. With `slack` its largest score stays, and so its sums need no multiplication, until
    a score is larger by more than that; weights are up to 2^(lift + slack) then.
    """
    olds, tops = list(state[:2]), []
    for e in range(2):
        top = functools.reduce(lambda a, b: instr("max.f32", a, b), [x for tile in logs for x in tile[e::2]])
        for gap in (4, 8, 16):
            top = instr("max.f32", top, c.bfly(top, gap))
        tops.append(instr("max.f32", olds[e], top if factor == 1 else instr("mul.f32", top, real(factor))))

    def moved() -> list[Word]:
        keep = [instr("ex2.approx.ftz.f32", instr("sub.f32", x, finite(y))) for x, y in zip(olds, tops, strict=True)]
        return [*tops, *(instr("mul.f32", x, keep[i % 2]) for i, x in enumerate(state[2:]))]

    if slack is None:
        state = moved()
    else:
        vote = "{ .reg .pred p; setp.gt.f32 p, $1, $2; vote.sync.ballot.b32 $0, p, -1; }"
        limits = [instr("add.f32", x, real(slack)) for x in olds]
        far = [ptx(vote, x, y, results=1, convergent=True) for x, y in zip(tops, limits, strict=True)]
        state = c.choose_between((far[0] | far[1]).differs(0), moved, state)
    tops, totals, mixed = parts(state)
    weights = [list(tile) for tile in logs]
    for e in range(2):
        shift = instr("sub.f32", real(lift), finite(tops[e]))
        for tile in weights:
            for i in (e, e + 2):
                tile[i] = instr("ex2.approx.ftz.f32", instr("fma.rn.f32", tile[i], real(factor), shift))
                totals[e] = instr("add.f32", totals[e], tile[i])
    return [*tops, *totals, *flat(mixed)], weights


def right_operand(tile: list[Word], kind: str) -> list[Word]:
    """The sums of a `mma` of 16 keys as its right operand, whose rows the keys are."""
    halves = [instr(f"cvt.rn.{kind}x2.f32", tile[n + 1], tile[n]) for n in (0, 2)]
    return [instr("movmatrix.sync.aligned.m8n8.trans.b16", x, convergent=True) for x in halves]


def flat(mixed: list[list[Word]]) -> list[Word]:
    return [x for acc in mixed for x in acc]


def finite(top: Word) -> Word:
    """A largest score, or 0 for that of nothing: it keeps 2^(-inf - 0) = 0, where 2^(-inf - -inf) is NaN."""
    return top.equals(real(-math.inf)).choose(0, top)


# In shared memory a part has, a head after the other, D words of the mix and 4 of padding (the lanes of a store then go
# to different banks), and after all heads their largest scores and sums.


def part_bytes(D: int) -> int:
    return HEADS * (D + 4 + 2) * 4


def _stats(at: Word, head: Word, D: int) -> Word:
    return at + (head * 2 + HEADS * (D + 4)) * 4


def store(at: Word, state: Sequence[Word], heads: int, D: int, channel: Callable[[int, int], Word]) -> None:
    """Writes a warp's part. channel(j, half) is that of this lane's words `half` of the j-th 16 of the mix."""
    tops, totals, mixed = parts(state)
    lane = c.special("tid.x") & 31
    for gap in (4, 8, 16):
        totals = [instr("add.f32", x, c.bfly(x, gap)) for x in totals]
    for e in range(2):
        head = (lane & 3) * 2 + e
        with when(head < heads):
            for j, acc in enumerate(mixed):
                for half in range(2):
                    ptx("st.shared.u32 [$0], $1;", at + (head * (D + 4) + channel(j, half)) * 4, acc[2 * half + e])
            with when(lane < 4):
                ptx("st.shared.v2.u32 [$0], {$1, $2};", _stats(at, head, D), tops[e], totals[e])


class Merged:
    """Words 4 i .. 4 i + 3 of the mix [heads, D] of some parts."""

    def __init__(self, sources: Sequence[Word], i: Word, D: int, space: str):
        self._find(i, D)
        code = f"ld.{space}.v2.u32 {{$0, $1}}, [$2];"
        stats = [ptx(code, _stats(at, self.head, D), results=2) for at in sources]
        code, place = f"ld.{space}.v4.u32 {{$0, $1, $2, $3}}, [$4];", (self.head * (D + 4) + self.word) * 4
        mixes = [ptx(code, at + place, results=4) for at in sources]
        self._merge(stats, mixes)

    @classmethod
    def of_means(cls, means: Any, logs: Any, n: int, heads: int, i: Word, D: int) -> Merged:
        """Of parts whose means f32[n, heads, D] and natural logs of sums f32[n, heads] are in device memory."""
        self = cls.__new__(cls)
        self._find(i, D)
        logs = [
            ptx("ld.global.nc.u32 $0, [$1];", c.offset(logs, (self.head + b * heads) * 4), results=1) for b in range(n)
        ]
        stats = [[instr("mul.f32", x, real(1 / math.log(2))), real(1.0)] for x in logs]
        code = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        self._merge(stats, [ptx(code, c.offset(means, (i + b * (heads * D // 4)) * 16), results=4) for b in range(n)])
        return self

    def _find(self, i: Word, D: int) -> None:
        self.D, self.head = D, c.divide(i, D // 4)
        self.word = (i - self.head * (D // 4)) * 4

    def _merge(self, stats: Sequence[Sequence[Word]], mixes: Sequence[Sequence[Word]]) -> None:
        self.top = functools.reduce(lambda a, b: instr("max.f32", a, b), [top for top, _ in stats])
        self.total, self.four = word(0), [word(0)] * 4
        for (top, total), mix in zip(stats, mixes, strict=True):
            by = instr("ex2.approx.ftz.f32", instr("sub.f32", top, finite(self.top)))
            self.total = instr("fma.rn.f32", total, by, self.total)
            self.four = [instr("fma.rn.f32", x, by, acc) for x, acc in zip(mix, self.four, strict=True)]

    def store(self, at: Word) -> None:
        """Writes it as a part's."""
        ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", at + (self.head * (self.D + 4) + self.word) * 4, *self.four)
        with when(self.word.equals(0)):
            ptx("st.shared.v2.u32 [$0], {$1, $2};", _stats(at, self.head, self.D), self.top, self.total)

    def write(self, out: Any, lse: Any) -> None:
        """Writes the mean of values f32[heads, D] and the natural log of the sum f32[heads] to device memory."""
        self.write_mean(out, "f32")
        with when(self.word.equals(0)):
            log = instr("add.f32", self.top, instr("lg2.approx.f32", self.total))
            ptx("st.global.u32 [$0], $1;", c.offset(lse, self.head * 4), instr("mul.f32", log, real(math.log(2))))

    def write_mean(self, out: Any, kind: str) -> None:
        """Writes the mean of values [heads, D] to device memory, as "f32", "bf16" or "f16"."""
        by = instr("max.f32", self.total, real(1e-37))
        mean = [instr("div.rn.f32", x, by) for x in self.four]
        at = self.head * self.D + self.word
        if kind == "f32":
            ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", c.offset(out, at * 4), *mean)
        else:
            two = [instr(f"cvt.rn.{kind}x2.f32", mean[j + 1], mean[j]) for j in (0, 2)]
            ptx("st.global.v2.u32 [$0], {$1, $2};", c.offset(out, at * 2), *two)
