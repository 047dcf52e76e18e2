"""Reads missing pages of a history of 8-bit floats (e4m3) on the host into a hot set:
`hot_load` with a conversion.

**Idea:** a thread converts the 16 values that it read to the dtype of the hot set before it
writes them. XLA needs three passes over all tokens that a step selects, missing or not: to
gather codes, to decode and to write them.

**Bytes:** R a missing page over the bus, and 2 R written for a hot set in bf16.

**Bound:** the bus.

**Limits:** `unsupported`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.host.host_rows import Config
from kvjax.kernels_pallas.host.hot_pages import fill, limit_of_pages
from kvjax.kernels_pallas.simt import Word, instr, ptx

MEASURED: str | None = "2026-11-24"  # the date in benchmarks/results/hot_float8.json
DTYPES = ("bfloat16", "float16", "float32")


def unsupported(x: Any, k: Any, index: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    if x.dtype != jnp.uint8 or str(k.dtype) not in DTYPES:
        return f"the kernel hot_load_float8 reads bytes for keys in {', '.join(DTYPES)}; got {x.dtype} for {k.dtype}"
    return limit_of_pages("hot_load_float8", x, index)


def hot_load_float8(
    x: Array,
    zones: Sequence[Array],
    page: Array,
    used: Array,
    at: Array,
    *,
    config: Config | None = None,
) -> tuple[Array, ...]:
    """`zones`, [B, K, n * Z, D] each, with the values of the parts of those pages of x u8[B, K,
    P, parts, Z, D] whose place at i32[B, K, N] has 2 in `used`; see
    `kvjax.ops.hot_load_float8`."""
    if limit := unsupported(x, zones[0], at):
        raise NotImplementedError(limit)
    decode = partial(
        _decode, kind=str(zones[0].dtype), converts=simt.target((x, *zones)).float8
    )
    return tuple(
        fill(
            "kvjax_hot_load_float8",
            decode,
            config or Config(ahead=4),
            *zones,
            x,
            page,
            used,
            at,
        )
    )


def _decode(loaded: list[Word], kind: str, converts: bool) -> list[list[Word]]:
    words = [x for four in loaded for x in _values(four, kind, converts)]
    return [words[i : i + 4] for i in range(0, len(words), 4)]


def _shifted(two: Word) -> Word:
    """The values of the upper bytes of both halves, in f16, for GPUs without the instruction.

    The bits of e4m3 as the highest of an f16 are its value over 2^8, subnormal numbers too, as
    their exponents count from 7 and from 15. All ones, which are NaN, would be 480.
    """
    magnitude = (two & 0x7F007F00) >> 1
    value = instr("mul.f16x2", (two & 0x80008000) | magnitude, 0x5C005C00)
    nan = (magnitude + 0x00800080) & 0x40004000
    return value | ((nan - (nan >> 6)) << 1)


def _values(four: Word, kind: str, converts: bool) -> list[Word]:
    """The values of a word's four bytes: in two words of two, or in four of one."""
    if converts:
        to_halves = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
        )
        halves: list[Word] = ptx(to_halves, four, results=2)
    else:
        halves = [_shifted(instr("prmt.b32", four, 0, how)) for how in (0x1404, 0x3424)]
    if kind == "float16":
        return halves
    values = [x for two in halves for x in simt.from_halves(two)]
    if kind == "float32":
        return values
    return [instr("cvt.rn.bf16x2.f32", high, low) for low, high in (values[:2], values[2:])]
