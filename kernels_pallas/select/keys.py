"""Scores as unsigned keys of the same order, in which 0 marks invalid units; group reduction of
the heads' scores.

Sums of softmaxes are keys directly, because their leading bits separate more units than those
of a logarithm. Sums below 2^-96 use their logarithm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend.softmax import finite
from kvjax.kernels_pallas.select import logsum, tiling
from kvjax.kernels_pallas.simt import (
    Word,
    instr,
    ptx,
    real,
    word,
)

SLOTS = (1 << 22) - 1  # a slot s ranks as SLOTS - s
MAX_K, MAX_UNITS = 4096, 1 << 21


HEADS = 8
SOFTMAX = ("max_softmax", "sum_softmax", "mean_softmax")
LOWEST = float(jnp.finfo(jnp.float32).min)
LEAST_SUM, INFINITE = (
    simt.real_bits(2.0**-96),
    simt.real_bits(math.inf),
)  # sums of softmaxes that are ranked as they are


def load_heads_f32(
    scores: Sequence[Any], sizes: Sequence[int], heads: int, at: Word, end: int
) -> list[list[Word]]:
    """Each head's scores of units at .. at + 3 of one part or two; all 0 past the end of the
    row. These units are before `end` for all threads, which often makes the checks unnecessary.
    """
    U = sum(sizes)
    fours = []
    for head in range(heads):
        rows = [
            simt.offset_rows(s, word(head), n * 4) for s, n in zip(scores, sizes, strict=True)
        ]
        if end <= sizes[0]:
            load = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
            fours.append(ptx(load, simt.offset(rows[0], at * 4), results=4))
            continue
        if len(sizes) == 1:
            fours.append(tiling.load_four(rows[0], at, U))
            continue
        in_first = at < sizes[0]
        within = (in_first.select(at, 0), in_first.select(0, at - sizes[0]))
        fours.append(
            ptx(
                "{ .reg .pred p, q; .reg .u64 a; setp.lt.u32 p, $4, $5; setp.lt.u32 q, $4, $6; "
                "selp.b64 a, $7, $8, q; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
                "@p ld.global.v4.u32 {$0, $1, $2, $3}, [a]; }",
                *(
                    at,
                    U,
                    sizes[0],
                    *(simt.offset(r, w * 4) for r, w in zip(rows, within, strict=True)),
                ),
                results=4,
            )
        )
    return fours


def reduced_keys(
    flags: list[Word], units: list[list[Word]], logs: list[Word] | None, group_reduce: str
) -> list[Word]:
    """The keys of units with these scores of the heads, 0 where the flag is; `logs` are those
    of `_log_sums`, if softmaxes are pooled.

    Sums of softmaxes are ranked directly; sums that are almost 0, or not finite, by their
    logarithms, which rank below the others or are NaN.
    """
    if logs is None:
        keys = [_key(functools.reduce(logsum.sum_of_two, unit)) for unit in units]
    else:
        units = [
            [
                instr("fma.rn.f32", x, real(logsum.LOG2_E), log)
                for x, log in zip(unit, logs, strict=True)
            ]
            for unit in units
        ]
        if group_reduce == "max_softmax":
            keys = [_key(functools.reduce(logsum.larger, unit)) for unit in units]
        else:
            sums = [
                functools.reduce(logsum.sum_of_two, [logsum.power(x) for x in unit])
                for unit in units
            ]
            usual = [(x - LEAST_SUM) < (INFINITE - LEAST_SUM) for x in sums]
            keys = [x | (1 << 31) for x in sums]

            def logarithms() -> list[Word]:
                of_logs = [_key(_log_of_sum(unit)) for unit in units]
                return [
                    flag.select(x, y) for flag, x, y in zip(usual, keys, of_logs, strict=True)
                ]

            all_usual = functools.reduce(lambda a, b: a & b, usual)
            keys = simt.branch(all_usual.select(0, 1).differs(0), logarithms, keys)
    return [flag.differs(0).select(key, 0) for flag, key in zip(flags, keys, strict=True)]


def _log_of_sum(shares: list[Word]) -> Word:
    top = functools.reduce(logsum.larger, shares)
    shift = finite(top)
    total = functools.reduce(
        logsum.sum_of_two, [logsum.power(instr("sub.f32", x, shift)) for x in shares]
    )
    return logsum.sum_of_two(shift, instr("lg2.approx.f32", total))


def ordered_key(x: Word, flag: Word) -> Word:
    """The key of an f32 in the order of `lax.top_k`, in which -0 is below 0, or 0 without the
    flag. NaN and -inf rank as the lowest finite number."""
    return flag.differs(0).select(_of_bits(instr("max.f32", x, real(LOWEST))), 0)


def _key(x: Word) -> Word:
    """Keys in the order of the numbers, in which -0 is 0."""
    return _of_bits(logsum.sum_of_two(instr("max.f32", x, real(LOWEST)), real(0.0)))


def _of_bits(x: Word) -> Word:
    """The bits of negative numbers reversed, those of others after them."""
    return x ^ ((x >> 31) * 0x7FFFFFFF + (1 << 31))


def load_heads(
    scores: Sequence[Any], sizes: Sequence[int], heads: int, at: Word, end: int, half: bool
) -> list[list[Word]]:
    """Each head's scores of units at .. at + 3, of one part or two: in f32, or in f16 in two
    words, if `half`; 0 past the end of the row. These units are before `end` for all threads,
    which often makes the checks unnecessary."""
    if not half:
        return load_heads_f32(scores, sizes, heads, at, end)
    fours = []
    for head in range(heads):
        rows = [
            simt.offset_rows(s, word(head), n * 2) for s, n in zip(scores, sizes, strict=True)
        ]
        address = simt.offset(rows[0], at * 2)
        if end <= sizes[0]:
            fours.append(ptx("ld.global.v2.u32 {$0, $1}, [$2];", address, results=2))
            continue
        if len(sizes) == 2:
            address = simt.select_address(
                at < sizes[0], address, simt.offset(rows[1], (at - sizes[0]) * 2)
            )
        load = (
            "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0; mov.u32 $1, 0; "
            "@p ld.global.v2.u32 {$0, $1}, [$4]; }"
        )
        fours.append(ptx(load, at, sum(sizes), address, results=2))
    return fours
