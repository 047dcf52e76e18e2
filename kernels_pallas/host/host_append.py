"""Writes chunks of rows into an array in pinned host memory over the bus, in one launch.

XLA writes one slice at a time, with a copy for each row of the batch. Here a thread loads 16
bytes of every part of a row, such as its keys and its values, and stores them in host memory,
so parts become adjacent without being stacked first. Writes are posted: only the end of the
kernel waits for the bus. The array is changed in place if it is donated or carried by a loop;
otherwise XLA copies all of it first.

**Bytes:** R a row read on the device and R written over the bus.

**Bound:** the bus.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.host.host_rows import CHUNK, Config, limit_of_chunks, row_bytes
from kvjax.kernels_pallas.simt import ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/host_append.json
DEFAULT = Config(ahead=1, warpgroups=1)


def smem_bytes() -> int:
    return 0


def unsupported(x: Any, new: Sequence[Any], at: Any, count: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    if any(part.dtype != x.dtype for part in new):
        got = ", ".join(str(part.dtype) for part in new)
        return f"the kernel host_append takes parts of the array's {x.dtype}; got {got}"
    return limit_of_chunks(
        "host_append", row_bytes(x) // len(new), x.shape[2] and math.prod(new[0].shape[:3])
    )


def host_append(
    x: Array, new: Sequence[Array], at: Array, count: Array, *, config: Config = DEFAULT
) -> Array:
    """x [B, K, P, parts, ...] with the first `count` i32[B] rows of each of the parts `new` [B,
    K, n, ...] at row `at` i32[B] and those after it. Rows at or past P are dropped."""
    if limit := unsupported(x, new, at, count):
        raise NotImplementedError(limit)
    return _append(config, x, at, count, *new)


def _append(config: Config, *args: Array) -> Array:
    @simt.over_rows(functools.partial(_append, config))
    def run(x: Array, at: Array, count: Array, *new: Array) -> Array:
        B, K, n = new[0].shape[:3]
        chunks = row_bytes(x) // len(new) // CHUNK
        (x,) = simt.kernel_in_place(
            functools.partial(_program, sizes=(B, K, x.shape[2], n, chunks), config=config),
            name="kvjax_host_append",
            blocks=-(-B * K * n * chunks // (128 * config.warpgroups * config.ahead)),
            warpgroups=config.warpgroups,
        )([x], at, count, *new)
        return x

    return run(*args)


def _program(
    x_m, at_m, count_m, *new_m, sizes: tuple[int, int, int, int, int], config: Config
) -> None:
    B, K, P, n, chunks = sizes
    size = chunks * CHUNK
    threads = 128 * config.warpgroups
    total = B * K * n * chunks
    x, starts, counts, *new = (simt.global_address(m) for m in (x_m, at_m, count_m, *new_m))
    first = simt.special("ctaid.x") * (threads * config.ahead) + simt.special("tid.x")
    for j in range(config.ahead):
        at = first + j * threads
        within = at < total
        at = within.select(at, total - 1)
        i = simt.divide(at, chunks)
        inside = (at - i * chunks) * CHUNK
        head = simt.divide(i, n)
        row = i - head * n
        b = simt.divide(head, K)
        start, count = (simt.load(simt.offset_rows(a, b, 4)) for a in (starts, counts))
        with when(within & (row < count) & (start < P) & (row < word(P) - start)):
            code = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
            words = [ptx(code, simt.offset_rows(part, at, CHUNK), results=4) for part in new]
            page = simt.offset_rows(
                simt.offset_rows(x, head, P * len(new) * size), start + row, len(new) * size
            )
            for part, loaded in enumerate(words):
                to = simt.offset(page, inside + part * size)
                ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", to, *loaded)
