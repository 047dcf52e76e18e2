"""Log-sum-exp statistics of scores, in base 2: of a thread, merged over the lanes of a warp.

A state is the largest of some scores and the sum of 2^(score - largest).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import (
    Flag,
    Word,
    instr,
    real,
    word,
)

LOG2_E = 1 / math.log(2)
NOTHING = simt.real_bits(-math.inf), 0  # the state of no scores


def sum_of_two(a: Word, b: Word) -> Word:
    return instr("add.f32", a, b)


def larger(a: Word, b: Word) -> Word:
    return instr("max.f32", a, b)


def power(x: Word) -> Word:
    return instr("ex2.approx.ftz.f32", x)


# A state is the largest of some scores (base 2), and the sum of 2^(score - largest).


def _is_finite(x: Word) -> Flag:
    return (x & 0x7FFFFFFF) < 0x7F800000


def add(state: Sequence[Word], scores: Sequence[Word]) -> list[Word]:
    """A state with some natural scores. An infinite score adds 2^score, which is 0 or infinite
    too.
    """
    before, total = state
    top = functools.reduce(larger, scores)
    peak = larger(before, instr("mul.f32", top, real(LOG2_E)))
    shift = _is_finite(peak).select(peak ^ (1 << 31), 0)
    keep = power(sum_of_two(before, shift))
    added = functools.reduce(
        sum_of_two, [power(instr("fma.rn.f32", x, real(LOG2_E), shift)) for x in scores]
    )
    return [peak, instr("fma.rn.f32", total, keep, added)]


def of_lanes(scores: Sequence[Word], gaps: Sequence[int]) -> list[Word]:
    """The state of natural scores of all lanes whose numbers differ in the bits `gaps`; each of
    them gets it.
    """
    top = functools.reduce(larger, scores)
    for gap in gaps:
        top = larger(top, simt.bfly(top, gap))
    peak = instr("mul.f32", top, real(LOG2_E))
    shift = _is_finite(peak).select(peak ^ (1 << 31), 0)
    total = functools.reduce(
        sum_of_two, [power(instr("fma.rn.f32", x, real(LOG2_E), shift)) for x in scores]
    )
    for gap in gaps:
        total = sum_of_two(total, simt.bfly(total, gap))
    return [peak, total]


def merge(states: Sequence[Sequence[Word]]) -> list[Word]:
    """Merges states into one."""
    peak = functools.reduce(larger, [top for top, _ in states])
    shift = _is_finite(peak).select(peak, 0)
    total = word(0)
    for top, part in states:
        total = instr("fma.rn.f32", part, power(instr("sub.f32", top, shift)), total)
    return [peak, total]


def merge_lanes(state: Sequence[Word]) -> list[Word]:
    """Merges the states of a warp's lanes; each lane gets the result."""
    top, total = state
    order = top ^ (top >> 31).differs(0).select(0xFFFFFFFF, 1 << 31)
    peak = instr("redux.sync.max.u32", order, -1, convergent=True)
    peak = peak ^ (peak >> 31).differs(0).select(1 << 31, 0xFFFFFFFF)
    shift = _is_finite(peak).select(peak, 0)
    total = instr("mul.f32", total, power(instr("sub.f32", top, shift)))
    for gap in (1, 2, 4, 8, 16):
        total = sum_of_two(total, simt.bfly(total, gap))
    return [peak, total]


def minus_log(state: Sequence[Word]) -> Word:
    """Minus log2 of the sum of 2^score; 0 for no scores."""
    peak, total = state
    log = sum_of_two(_is_finite(peak).select(peak, 0), instr("lg2.approx.f32", total))
    return log.equals(real(-math.inf)).select(0, log ^ (1 << 31))
