"""Rows of an array in pinned host memory, read over the bus by the kernel that wants them.

A row is all that lies behind one index, such as the keys and values of a page. A `pinned_host` operand reaches a kernel
as an address that its threads load from: no copy, no part of the host's CPU. The bus is slow to answer, so what counts
is bytes in flight: a thread loads 16 bytes, of `ahead` places, before it stores any, and neighbours in a warp load
neighbouring bytes. Of a row whose index is out of range nothing is read. A row that an earlier call read and that is
still on the device comes from there: a warp looks for it, 32 of the held ones at a time. What nothing waits for is
read by a few blocks that take turns: they fill the bus, and leave the multiprocessors to the kernels beside them.

**Bytes:** R a row read over the bus, unless it is held, R written and 4 read on the device. The bound of PCIe 5 x16 at
50 GB/s is 42 us for 2 MiB, 4096 rows of keys and values of D = 128 in bf16.

**Measured** on an H200, 2026-11-21, jax 0.11.2, device time, rows of 512 bytes in random order, 8 kv heads: 512 rows
each (2 MiB) 43.5 us, 48 GB/s; 2048 rows 166 us, 50.4 GB/s; pages of 32 tokens, 64 each, the same; batch 8 x 512 rows
330 us, 51 GB/s. By the host's clock, that has a launch in it, 72 us and 211 us, where the reference takes 167 us and
468 us. `benchmarks/results/host_rows.json` has more. In a step of FreeKV, 56 pages of 32 tokens for each of 8 kv heads,
7.3 MB, 147 us at that speed, took 100 us when a part of them was held (random model, 32768 tokens). 32 blocks took
104 to 112 us for these, beside matrix products of 118 us a layer. Eight layers of Llama-3.1-8B, 32768 tokens, no head
turned (2026-11-22), ms a token: 2.55 one after the other and 1.83 with 32 blocks beside; in a second run 2.84, 1.84
with 16 blocks, and 1.78 without this read.

**Tried and lost**: one, four, eight chunks ahead, one and four warpgroups: within 5 % of each other. The bus is full.
In that second run 8 blocks 1.90 ms, 64 1.92, 128 2.08.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas._common import Word, instr, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/host_rows.json
CHUNK = 16  # bytes that a thread moves at once


@dataclass(frozen=True)
class Config:
    ahead: int = 2  # chunks of a thread
    warpgroups: int = 2  # of a block

    def __post_init__(self) -> None:
        if self.ahead < 1 or self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"ahead must be at least 1, warpgroups 1, 2, 4 or 8; got {self}")


BESIDE = 16  # blocks that fill the bus, and leave room for others

Held = tuple[Array, Sequence[Array]]


def smem_bytes() -> int:
    return 0


def row_bytes(x: Any) -> int:
    return math.prod(x.shape[3:]) * x.dtype.itemsize


def limit_of_chunks(name: str, size: int, rows: int) -> str | None:
    """The limit that `rows` rows of `size` bytes exceed, for a kernel that moves chunks; None if there is none."""
    if size % CHUNK:
        return f"the kernel {name} takes rows of a multiple of {CHUNK} bytes; got {size}"
    if not size or not rows:
        return f"the kernel {name} takes at least one row, and one byte of each; got {rows} of {size}"
    if rows * (size // CHUNK) >= 1 << 31:
        return f"the kernel {name} takes less than 32 GiB at a time; got {rows * size} bytes"
    return None


def unsupported(x: Any, index: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    return limit_of_chunks("host_rows", row_bytes(x), x.shape[2] and math.prod(index.shape))


def supported(x: Any, index: Any) -> bool:
    return unsupported(x, index) is None


def host_rows(
    x: Array,
    index: Array,
    held: Held | None = None,
    *,
    there: tuple[Array, Array] | None = None,
    blocks: int | None = None,
    config: Config | None = None,
) -> Array:
    """[B, K, N, ...] on the device: rows `index` i32[B, K, N] of x [B, K, P, ...]; zeros where it is out of range.

    `held`, rows i32[B, K, M] and the parts of x[:, :, :, i], each [B, K, >= M * Z, D] where those of x are [Z, D], says
    what is on the device already: a row that is held is read there. `there`: rows i32[B, K, N], and an array [B, K, N,
    ...] in which they have their places already; they are read there first of all. `blocks` take turns; None: there is
    one for each piece.
    """
    if limit := unsupported(x, index):
        raise NotImplementedError(limit)
    parts = () if held is None or row_bytes(x) % (32 * CHUNK) else (held[0], *held[1])  # a warp looks for one row
    return _rows(x, index, parts, there or (), config or Config(), blocks)


def _rows(
    x: Array, index: Array, held: tuple[Array, ...], there: tuple[Array, ...], config: Config, blocks: int | None
) -> Array:
    @jax.custom_batching.custom_vmap
    def run(x: Array, index: Array, held: tuple[Array, ...], there: tuple[Array, ...]) -> Array:
        rows, chunks = math.prod(index.shape[:2]), row_bytes(x) // CHUNK
        places = (held[0].shape[2], *(math.prod(a.shape[2:]) * a.dtype.itemsize for a in held[1:])) if held else ()
        sizes = (rows, x.shape[2], index.shape[2], chunks)
        pieces = -(-index.size * chunks // (128 * config.warpgroups * config.ahead))
        grid = min(pieces, blocks or pieces)
        turns = None if grid == pieces else grid
        how: dict[str, Any] = {
            "sizes": sizes,
            "places": places,
            "placed": bool(there),
            "config": config,
            "blocks": turns,
        }
        return c.kernel(
            functools.partial(_program, **how),
            name="kvjax_host_rows",
            out_type=jax.ShapeDtypeStruct((*index.shape, *x.shape[3:]), x.dtype),
            grid=(grid,),
            grid_names=("block",),
            num_threads=config.warpgroups,
        )(x, index, *held, *there)

    @run.def_vmap
    def batched(n: int, batches: list[Any], *args: Any) -> tuple[Array, bool]:
        flat, tree = jax.tree.flatten(args)
        x, index, held, there = jax.tree.unflatten(tree, c.flatten_batch(n, jax.tree.leaves(batches), flat))
        out = _rows(x, index, held, there, config, blocks)
        return out.reshape(n, -1, *out.shape[1:]), True

    return run(x, index, held, there)


def _program(
    x_m: Any,
    index_m: Any,
    *refs: Any,
    sizes: tuple[int, int, int, int],
    places: tuple[int, ...],
    placed: bool,
    config: Config,
    blocks: int | None,
) -> None:
    """`places`: how many rows are held, and the bytes of a (b, k) of each part; empty if none are. `placed`: whether
    the last inputs are rows, and the array in which these have their places."""
    rows, P, N, chunks = sizes
    size, threads = chunks * CHUNK, 128 * config.warpgroups
    total = rows * N * chunks
    x, index, *parts, out = (c.global_address(m) for m in (x_m, index_m, *refs))
    parts, there = (parts[:-2], parts[-2:]) if placed else (parts, [])

    def place_of(row: Word, of: Word) -> Word:
        """Where `row` is held; all ones if it is not. The same in all lanes of a warp."""
        lane, M = c.special("laneid"), places[0]

        @loop(0, M, 32, [word(0xFFFFFFFF)])
        def place(i: Word, known: Word) -> Word:
            at = i + lane
            other = c.load_below(at, M, c.offset(c.offset_rows(parts[0], of, M * 4), at * 4), 0xFFFFFFFF)
            votes = c.ballot(other.equals(row) & (row < P))
            return votes.differs(0).choose(i + 31 - instr("clz.b32", votes), known)

        return place[0]

    def load(at: Word, i: Word, row: Word, has_place: Sequence[Word]) -> list[Word]:
        of = c.divide(i, N)
        source = c.offset_rows(c.offset_rows(x, of, P * size), row, size)
        inside = (at - i * chunks) * CHUNK
        source = c.offset(source, inside)
        if places:
            place, piece = place_of(row, of), size // (len(places) - 1)
            for n, (part, width) in enumerate(zip(parts[1:], places[1:], strict=True)):
                here = place.differs(0xFFFFFFFF) & (inside >= n * piece) & (inside < (n + 1) * piece)
                kept = c.offset(c.offset_rows(c.offset_rows(part, of, width), place, piece), inside - n * piece)
                source = c.choose_address(here, kept, source)
        for other in has_place:
            source = c.choose_address(other.equals(row), c.offset_rows(there[1], at, CHUNK), source)
        return ptx(
            "{ .reg .pred p; setp.lt.u32 p, $4, $5; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
            "@p ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$6]; }",
            *(row, P, source),
            results=4,
        )

    def move(first: Word) -> None:
        at_chunk = [first + j * threads for j in range(config.ahead)]
        near = [instr("min.u32", at, total - 1) for at in at_chunk]  # a spare thread loads the last
        wanted = [c.divide(at, chunks) for at in near]
        found, *others = ([c.load(c.offset_rows(a, i, 4)) for i in wanted] for a in (index, *there[:1]))
        has_place = list(zip(*others, strict=True)) or [()] * len(found)
        loaded = [load(*each) for each in zip(near, wanted, found, has_place, strict=True)]
        for at, words in zip(at_chunk, loaded, strict=True):
            with when(at < total):
                ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", c.offset_rows(out, at, CHUNK), *words)

    first = c.special("ctaid.x") * (threads * config.ahead) + c.special("tid.x")
    if blocks is None:
        move(first)
    else:
        loop(first, total, threads * config.ahead * blocks)(move)
