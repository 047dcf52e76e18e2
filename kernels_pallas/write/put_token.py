"""Writes the tokens of a decode step into their cache zones, keys, values and counts, in one
launch.

XLA needs one scatter for the keys and one for the values of each zone, and another kernel for
the counts. Here a block works on one row of the batch. It reads the counts of the row and finds
the first zone with room. Its threads move 16 bytes of the key and 16 of the value each, then
one thread writes the new counts. The arrays are changed in place if they are donated or carried
by a loop; otherwise XLA copies them first. Several tokens fill one zone after the other.

**Bytes:** 4 e K D a row of the batch and token, where e is the size of an element.

**Bound:** one launch and two dependent loads.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/put_token.json
CHUNK = 16  # bytes
THREADS = 128  # of a block that stores one token of a row
STEP_THREADS = 512  # of a block that stores several

Zone = tuple[Array, Array, Array]  # keys and values [B, K, S, D], count i32[B]


def smem_bytes() -> int:
    return 0


def unsupported(zones: Sequence[Any], k: Any, v: Any, active: Any, overflow: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    kept = [a for zone in zones for a in zone[:2]]
    if any(a.dtype != kept[0].dtype for a in kept):
        return f"the kernel put_token takes zones of one dtype; got {', '.join(str(a.dtype) for a in kept)}"
    if (size := k.shape[3] * kept[0].dtype.itemsize) % CHUNK:
        return f"the kernel put_token takes heads of a multiple of {CHUNK} bytes; got {size}"
    if v.shape != k.shape:
        return (
            f"the kernel put_token takes values like keys, {list(k.shape)}; got {list(v.shape)}"
        )
    if 0 in k.shape or any(0 in a.shape for a in kept):
        return f"the kernel put_token takes at least one row and slot; got k{list(k.shape)}"
    return None


@simt.lowered_once()
def put_token(
    zones: Sequence[Zone], k: Array, v: Array, active: Array, overflow: Array
) -> tuple[list[Zone], Array]:
    """Zones (keys, values, count) with the token k, v [B, K, 1, D] of each row that is `active`
    bool[B], in the first zone that has room; and `overflow` bool[B], also true where none had.
    """
    if limit := unsupported(zones, k, v, active, overflow):
        raise NotImplementedError(limit)
    return _run(zones, overflow, active, k, v)


@simt.lowered_once()
def put_tokens(
    zones: Sequence[Zone], k: Array, v: Array, count: Array, overflow: Array
) -> tuple[list[Zone], Array]:
    """Zones with the first `count` i32[B] of the tokens k, v [B, K, T, D], which fill one zone
    after the other; and `overflow` bool[B], also true where some had no room."""
    if limit := unsupported(zones, k, v, count, overflow):
        raise NotImplementedError(limit)
    return _run(zones, overflow, count.astype(jnp.int32), k, v)


def _run(
    zones: Sequence[Zone], overflow: Array, due: Array, k: Array, v: Array
) -> tuple[list[Zone], Array]:
    # One array, which XLA writes as it rotates the key; with v as a separate array it needs one
    # more kernel.
    tokens = jnp.stack([a.astype(zones[0][0].dtype) for a in (k, v)], axis=1)
    *made, flags = _put(len(zones), *(a for zone in zones for a in zone), overflow, due, tokens)
    return list(zip(made[::3], made[1::3], made[2::3], strict=True)), flags


def _put(zones: int, *args: Array) -> tuple[Array, ...]:
    @simt.over_rows(functools.partial(_put, zones))
    def run(*args: Array) -> tuple[Array, ...]:
        changed = args[: 3 * zones + 1]
        given = args[3 * zones + 1 :]
        B, K, _, D = changed[0].shape
        slots = tuple(a.shape[2] for a in changed[:-1:3])
        width = D * changed[0].dtype.itemsize
        program = functools.partial(_program, slots=slots, heads=K, width=width)
        if given[0].dtype != bool:
            program = functools.partial(
                _program_of_some, slots=slots, heads=K, tokens=given[1].shape[3], width=width
            )
        return simt.kernel_in_place(
            program,
            name="kvjax_put_token" if given[0].dtype == bool else "kvjax_put_tokens",
            blocks=B,
            warpgroups=(THREADS if given[0].dtype == bool else STEP_THREADS) // 128,
        )(changed, *given)

    return run(*args)


def _program(*refs: Any, slots: tuple[int, ...], heads: int, width: int) -> None:
    *kept, overflow, active, given = (simt.global_address(m) for m in refs)
    chunks = width // CHUNK
    row = simt.special("ctaid.x")
    t = simt.special("tid.x")
    zones = list(
        zip(
            kept[::3],
            kept[1::3],
            (simt.offset_rows(a, row, 4) for a in kept[2::3]),
            slots,
            strict=True,
        )
    )

    # Not `nc`: these are written at the end, by one thread, after the others have read them.
    counts = [ptx("ld.global.u32 $0, [$1];", count, results=1) for *_, count, _ in zones]
    dropped, due = (
        ptx("ld.global.u8 $0, [$1];", simt.offset(a, row), results=1)
        for a in (overflow, active)
    )
    left = due.differs(0)
    taken = []
    for count, (*_, capacity) in zip(counts, zones, strict=True):
        taken.append(left & (count < capacity))
        left = left & (count >= capacity)

    @loop(t, heads * chunks, THREADS)
    def _move(i: Word) -> None:
        head = simt.divide(i, chunks)
        code = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        at = i * CHUNK
        token = [
            ptx(
                code,
                simt.offset(simt.offset_rows(given, row * 2 + n, heads * width), at),
                results=4,
            )
            for n in range(2)
        ]
        for (*pair, _, size), count, exists in zip(zones, counts, taken, strict=True):
            with when(exists):
                for to, words in zip(pair, token, strict=True):
                    to = simt.offset_rows(
                        simt.offset_rows(to, row * heads + head, size * width), count, width
                    )
                    to = simt.offset(to, at - head * width)
                    ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", to, *words)

    simt.block_barrier()
    with when(t.equals(0)):
        for (*_, count, _), old, exists in zip(zones, counts, taken, strict=True):
            ptx("st.global.u32 [$0], $1;", count, old + exists.select(1, 0))
        ptx("st.global.u8 [$0], $1;", simt.offset(overflow, row), dropped | left.select(1, 0))


def _program_of_some(
    *refs: Any, slots: tuple[int, ...], heads: int, tokens: int, width: int
) -> None:
    *kept, overflow, due, given = (simt.global_address(m) for m in refs)
    chunks = width // CHUNK
    row = simt.special("ctaid.x")
    t = simt.special("tid.x")
    zones = list(
        zip(
            kept[::3],
            kept[1::3],
            (simt.offset_rows(a, row, 4) for a in kept[2::3]),
            slots,
            strict=True,
        )
    )

    # Not `nc`: these are written at the end, by one thread, after the others have read them.
    counts = [ptx("ld.global.u32 $0, [$1];", count, results=1) for *_, count, _ in zones]
    dropped = ptx("ld.global.u8 $0, [$1];", simt.offset(overflow, row), results=1)
    left = simt.clipped(simt.load(simt.offset_rows(due, row, 4)), tokens)
    first = word(0)
    firsts = []
    taken = []
    for count, (*_, capacity) in zip(counts, zones, strict=True):
        free = (count < capacity).select(word(capacity) - count, 0)
        firsts.append(first)
        taken.append((left < free).select(left, free))
        first = first + taken[-1]
        left = left - taken[-1]

    @loop(t, heads * tokens * chunks, STEP_THREADS)
    def _move(i: Word) -> None:
        number = simt.divide(i, chunks)
        head = simt.divide(number, tokens)
        token = number - head * tokens
        at = (i - number * chunks) * CHUNK
        whole = [simt.offset_rows(given, row * 2 + n, heads * tokens * width) for n in range(2)]
        code = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        words = [
            ptx(code, simt.offset(simt.offset_rows(a, number, width), at), results=4)
            for a in whole
        ]
        for (*pair, _, size), count, start, many in zip(
            zones, counts, firsts, taken, strict=True
        ):
            # Unsigned: tokens before the first are far past the last.
            with when(token - start < many):
                for to, loaded in zip(pair, words, strict=True):
                    to = simt.offset_rows(
                        simt.offset_rows(to, row * heads + head, size * width), count, width
                    )
                    to = simt.offset(simt.offset_rows(to, token - start, width), at)
                    ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", to, *loaded)

    simt.block_barrier()
    with when(t.equals(0)):
        for (*_, count, _), old, many in zip(zones, counts, taken, strict=True):
            ptx("st.global.u32 [$0], $1;", count, old + many)
        ptx(
            "st.global.u8 [$0], $1;",
            simt.offset(overflow, row),
            dropped | left.differs(0).select(1, 0),
        )
