"""Scores as unsigned keys of the same order, in which 0 marks invalid units; group reduction of
the heads' scores.

Sums of softmaxes are keys directly, because their leading bits separate more units than those
of a logarithm. Sums below 2^-96 use their logarithm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
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
MAX_K = 4096
MAX_UNITS = 1 << 21


HEADS = 8  # whose scores a thread holds at once
MOST_HEADS = 16  # of a group
PART = 4  # heads of a larger group whose scores a thread holds at once
SOFTMAX = ("max_softmax", "sum_softmax", "mean_softmax")
LOWEST = float(jnp.finfo(jnp.float32).min)
# Sums of softmaxes that are ranked as they are.
LEAST_SUM = simt.real_bits(2.0**-96)
INFINITE = simt.real_bits(math.inf)


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
        units = [shares(unit, logs) for unit in units]
        if group_reduce == "max_softmax":
            keys = [_key(functools.reduce(logsum.larger, unit)) for unit in units]
        else:
            sums = [
                functools.reduce(logsum.sum_of_two, [logsum.power(x) for x in unit])
                for unit in units
            ]
            keys = _keys_of_sums(sums, lambda: map(_log_of_sum, units))
    return [flag.differs(0).select(key, 0) for flag, key in zip(flags, keys, strict=True)]


def _keys_of_sums(sums: list[Word], logarithms: Callable[[], Iterable[Word]]) -> list[Word]:
    """The keys of sums of softmaxes, or of their logarithms where these rank better."""
    usual = [(x - LEAST_SUM) < (INFINITE - LEAST_SUM) for x in sums]
    keys = [x | (1 << 31) for x in sums]

    def of_logarithms() -> list[Word]:
        of_logs = [_key(x) for x in logarithms()]
        return [flag.select(x, y) for flag, x, y in zip(usual, keys, of_logs, strict=True)]

    all_usual = functools.reduce(lambda a, b: a & b, usual)
    return simt.branch(all_usual.select(0, 1).differs(0), of_logarithms, keys)


def keys_of_many(
    flags: list[Word],
    load: Callable[[int | Word, int], list[list[Word]]],
    heads: int,
    group_reduce: str,
    *,
    pooled: bool,
) -> list[Word]:
    """`reduced_keys` of a group of more than `HEADS` heads, whose scores registers do not hold.

    load(first, count) loads those of some heads, by unit; `shares`, if softmaxes are `pooled`.
    """

    def over_heads(
        of_part: Callable[[list[Word]], Word], join: Callable[[Word, Word], Word]
    ) -> list[Word]:
        """A word of each unit: of_part(its scores of a part of the heads), joined."""
        found: list[Word] = []
        for first in range(0, heads, PART):
            each = [of_part(unit) for unit in load(first, min(PART, heads - first))]
            found = [join(*two) for two in zip(found, each, strict=True)] if found else each
        return found

    def by_head(empty: Word, add: Callable[[int, Word, Word], Word]) -> list[Word]:
        """A word of each unit: word = add(unit's number, word, score) for each head. As a loop,
        or else ptxas keeps the scores that were loaded before, and has no registers for them.
        """

        def of_head(head: Word, *words: Word) -> list[Word]:
            units = load(head, 1)
            return [
                add(j, x, score)
                for j, (x, (score,)) in enumerate(zip(words, units, strict=True))
            ]

        return simt.loop(0, heads, 1, [empty] * len(flags))(of_head)

    def logarithms() -> list[Word]:
        tops = by_head(real(-math.inf), lambda _, top, x: logsum.larger(top, x))
        shifts = [finite(top) for top in tops]

        def add(j: int, total: Word, x: Word) -> Word:
            return logsum.sum_of_two(total, logsum.power(instr("sub.f32", x, shifts[j])))

        return [
            logsum.sum_of_two(shift, instr("lg2.approx.f32", total))
            for shift, total in zip(shifts, by_head(word(0), add), strict=True)
        ]

    highest = functools.partial(functools.reduce, logsum.larger)
    total = functools.partial(functools.reduce, logsum.sum_of_two)
    if not pooled:
        keys = [_key(x) for x in over_heads(total, logsum.sum_of_two)]
    elif group_reduce == "max_softmax":
        keys = [_key(x) for x in over_heads(highest, logsum.larger)]
    else:
        sums = over_heads(
            lambda unit: total([logsum.power(x) for x in unit]), logsum.sum_of_two
        )
        keys = _keys_of_sums(sums, logarithms)
    return [flag.differs(0).select(key, 0) for flag, key in zip(flags, keys, strict=True)]


def shares(unit: list[Word], logs: list[Word]) -> list[Word]:
    """Logarithms, base 2, of a unit's softmaxes of some heads."""
    return [
        instr("fma.rn.f32", x, real(logsum.LOG2_E), log)
        for x, log in zip(unit, logs, strict=True)
    ]


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


def load_part(
    scores: Sequence[Any],
    sizes: Sequence[int],
    first: int | Word,
    count: int,
    at: Word,
    end: int,
    half: bool,
) -> list[list[Word]]:
    """`load_heads` of `count` heads of a larger group, from head `first` on. One address serves
    them all: registers would not hold one of each head.
    """
    size = 2 if half else 4  # bytes of a score
    words = size  # of four scores
    named = ", ".join(f"${i}" for i in range(words))
    address = simt.offset(scores[0], at * size)
    of_head = word(sizes[0] * size)  # bytes
    if end > sizes[0] and len(sizes) == 2:
        in_first = at < sizes[0]
        second = simt.offset(scores[1], (at - sizes[0]) * size)
        address = simt.select_address(in_first, address, second)
        of_head = in_first.select(of_head, sizes[1] * size)
    if isinstance(first, Word):
        address = simt.offset(address, of_head * first)
        first = 0
    heads = range(first, first + count)
    if end <= sizes[0]:
        load = f"ld.global.v{words}.u32 {{{{{named}}}}}, [${words}+{{}}];"
        return [
            ptx(load.format(head * sizes[0] * size), address, results=words) for head in heads
        ]
    zeros = " ".join(f"mov.u32 ${i}, 0;" for i in range(words))
    load = (
        f"{{ .reg .pred p; setp.lt.u32 p, ${words}, ${words + 1}; {zeros} "
        f"@p ld.global.v{words}.u32 {{{named}}}, [${words + 2}]; }}"
    )
    places = [simt.offset(address, of_head * head) for head in heads]
    return [ptx(load, at, sum(sizes), place, results=words) for place in places]
