"""Reads rows of an array in pinned host memory over the bus, inside the kernel that needs them.

A row is everything behind one index, such as the keys and values of a page. Threads load from
the `pinned_host` operand without the host's CPU. The bus has high latency, so a thread loads 16
bytes for `ahead` places before it stores any.

**Recall** (`recall`) fills the places of a step from three sources: pages that the step before
recalled and that are still on the device, pending tokens in the recent block, and otherwise the
host. A first kernel serves only heads whose query turned. A second one, of few blocks, reads
the rest while other kernels run.

**Bytes:** R a row read over the bus unless on the device, R written and 4 read on the device.

**Bound:** the bus.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.simt import Flag, Word, instr, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/host_rows.json
CHUNK = 16  # bytes that a thread moves at once


@dataclass(frozen=True)
class Config:
    ahead: int = 2  # chunks of a thread
    warpgroups: int = 2  # of a block
    blocks: int = 0  # that take turns; 0: one for each piece

    def __post_init__(self) -> None:
        if self.ahead < 1 or self.blocks < 0 or self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(
                f"ahead must be at least 1, blocks 0 or more, warpgroups 1, 2, 4 or 8; got {self}"
            )


# Enough chunks in flight to fill the bus, and few enough blocks to leave room.
BESIDE = Config(ahead=4, blocks=16)


def smem_bytes() -> int:
    return 0


def row_bytes(x: Any) -> int:
    return math.prod(x.shape[3:]) * x.dtype.itemsize


def limit_of_chunks(name: str, size: int, rows: int) -> str | None:
    """The limit that `rows` rows of `size` bytes exceed, for a kernel that moves chunks; None
    if there is none.
    """
    if size % CHUNK:
        return f"the kernel {name} takes rows of a multiple of {CHUNK} bytes; got {size}"
    if not size or not rows:
        return f"the kernel {name} takes at least one row, and one byte of each; got {rows} of {size}"
    # So that a signed counter does not overflow in the last turn.
    if rows * (size // CHUNK) >= 1 << 30:
        return f"the kernel {name} takes less than 16 GiB at a time; got {rows * size} bytes"
    return None


def unsupported(x: Any, index: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    limit = limit_of_chunks("host_rows", row_bytes(x), x.shape[2] and math.prod(index.shape))
    return limit or _limit_of_parts(x)


def _limit_of_parts(x: Any) -> str | None:
    part = row_bytes(x) // x.shape[3]
    return (
        f"the kernel host_rows takes parts of a multiple of {CHUNK} bytes; got {part}"
        if part % CHUNK
        else None
    )


def unsupported_recall(x: Any, device_rows: Any, zones: Sequence[Any]) -> str | None:
    """The limit that these shapes and dtypes exceed, for `recall`; None if there is a kernel
    for them.
    """
    if any(a.dtype != x.dtype for a in zones):
        found = ", ".join(str(a.dtype) for a in zones)
        return f"the kernel host_rows recalls keys and values in the dtype of the store, {x.dtype}; got {found}"
    if limit := limit_of_chunks(
        "host_rows", row_bytes(x), x.shape[2] and math.prod(device_rows.shape)
    ):
        return limit
    line = x.shape[-1] * x.dtype.itemsize
    return (
        f"the kernel host_rows recalls slots of a multiple of {CHUNK} bytes; got {line}"
        if line % CHUNK
        else None
    )


def host_rows(x: Array, index: Array, *, config: Config | None = None) -> tuple[Array, ...]:
    """The parts, [B, K, N * Z, D] each on the device, of rows `index` i32[B, K, N] of x [B, K,
    P, parts, Z, D]; zeros where `index` is out of range. `config` follows from the kind of
    device, as buses differ."""
    if limit := unsupported(x, index):
        raise NotImplementedError(limit)
    return tuple(_rows(config or tuned.select("host_rows", Config(), (x, index)), x, index))


def _rows(config: Config, x: Array, index: Array) -> list[Array]:
    @simt.over_rows(functools.partial(_rows, config))
    def run(x: Array, index: Array) -> list[Array]:
        B, K, N = index.shape
        parts, Z, D = x.shape[3:]
        chunks = row_bytes(x) // CHUNK
        sizes = {"rows": B * K, "P": x.shape[2], "N": N, "chunks": chunks, "parts": parts}
        outs = tuple(jax.ShapeDtypeStruct((B, K, N * Z, D), x.dtype) for _ in range(parts))
        program = functools.partial(_program, **sizes, config=config)
        return list(
            _kernel("kvjax_host_rows", program, outs, index.size * chunks, config)(x, index)
        )

    return run(x, index)


def recall(
    x: Array, index: Array, edge: Array, recalls: Array, device: tuple[Array, Sequence[Array]], recent: Sequence[Array],
    first_read: tuple[Array, Sequence[Array]] | None = None, *, config: Config | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The parts, [B, K, M * Z, D] each on the device, of x [B, K, P, parts, Z, D] that heads
    recall to M places.

    Heads where `recalls` bool[B, K] is true read at place n < N row `index` i32[B, K, N] of x,
    at place N row `edge` i32[B], and zeros after it. Rows from P on are the Z slots from r =
    row - P on of `recent`, parts [B, K, R, D], whose last slot repeats past the end; negative
    rows are zeros. `device` = (rows i32[B, K, M], parts [B, K, M * Z, D]) has rows that are on
    the device already and are read there; a negative number is no row.

    Nothing is written for other heads. With `first_read` = (which bool[B, K], parts) they get
    its parts where `which` is true, and otherwise those of `device`.
    """
    if limit := unsupported_recall(
        x, device[0], [*device[1], *recent, *(first_read or ((), ()))[1]]
    ):
        raise NotImplementedError(limit)
    mode = recalls.astype(jax.numpy.int32)
    if first_read is not None:
        mode = jax.numpy.where(first_read[0], 2, mode)
    zones = *device[1], *recent, *(() if first_read is None else first_read[1])
    args = x, index, edge.reshape(-1, 1), mode, device[0], *zones
    return tuple(_recall(config or Config(), *args))


def _recall(config: Config, *args: Array) -> list[Array]:
    @simt.over_rows(functools.partial(_recall, config))
    def run(*args: Array) -> list[Array]:
        x, index, _, _, device_rows, *zones = args
        parts = zones[: x.shape[3]]
        recent = zones[x.shape[3]]
        _, K, M = device_rows.shape
        chunks = row_bytes(x) // CHUNK
        keeps = len(zones) > 2 * len(parts)
        program = functools.partial(
            _recall_program, rows=math.prod(device_rows.shape[:2]), K=K, P=x.shape[2], N=index.shape[2], M=M,
            chunks=chunks, parts=len(parts), R=recent.shape[2], line=x.shape[-1] * x.dtype.itemsize, keeps=keeps,
            config=config,
        )  # fmt: skip
        outs = tuple(jax.ShapeDtypeStruct(a.shape, x.dtype) for a in parts)
        name, sparse = (
            ("kvjax_host_rows_rest", ())
            if keeps
            else ("kvjax_host_rows_first", range(len(parts)))
        )
        return list(
            _kernel(name, program, outs, device_rows.size * chunks, config, tuple(sparse))(
                *args
            )
        )

    return run(*args)


def _kernel(
    name: str, program: Callable[..., None], out_type: Any, chunks: int, config: Config, sparse: tuple[int, ...] = (),
) -> Any:  # fmt: skip
    """A kernel of blocks that take turns, or of enough blocks for all chunks."""
    return simt.kernel(
        program,
        name=name,
        out_type=out_type,
        blocks=blocks_of(chunks, _at_once(config), config)[0],
        warpgroups=config.warpgroups,
        sparse=sparse,
    )


def _at_once(config: Config) -> int:
    """Chunks of a turn of a block."""
    return 128 * config.warpgroups * config.ahead


def blocks_of(jobs: int, at_once: int, config: Config) -> tuple[int, int]:
    """Blocks of a grid for `jobs` jobs, `at_once` in a turn of a block; and the turns of each
    block.
    """
    pieces = -(-jobs // at_once)
    blocks = min(config.blocks or pieces, pieces)
    return blocks, -(-pieces // blocks)


def _program(
    *refs: Any, rows: int, P: int, N: int, chunks: int, parts: int, config: Config
) -> None:
    size = chunks * CHUNK
    piece = chunks * CHUNK // parts
    total = rows * N * chunks
    x, index, *outs = (simt.global_address(m) for m in refs)

    def source(at: Word) -> tuple[Flag, Any]:
        i = simt.divide(at, chunks)
        row = simt.load(simt.offset_rows(index, i, 4))
        from_row = simt.offset_rows(simt.offset_rows(x, simt.divide(i, N), P * size), row, size)
        return row < P, simt.offset(from_row, (at - i * chunks) * CHUNK)

    def target(at: Word) -> Any:
        i = simt.divide(at, chunks)
        inside = (at - i * chunks) * CHUNK
        part = simt.divide(inside, piece)
        return simt.offset(
            simt.offset_rows(_of_part(outs, part), i, piece), inside - part * piece
        )

    _move(total, source, target, config)


def _recall_program(
    *refs: Any, rows: int, K: int, P: int, N: int, M: int, chunks: int, parts: int, R: int, line: int, keeps: bool,
    config: Config,
) -> None:  # fmt: skip
    x, index, edge, mode, device_rows, *zones = (simt.global_address(m) for m in refs)
    device, recent, *first_read, outs = (
        zones[i : i + parts] for i in range(0, len(zones), parts)
    )
    size = chunks * CHUNK
    piece = chunks * CHUNK // parts
    width = M * piece

    def place_of(row: Word, of: Word) -> Word:
        """The place of `row` on the device; all ones if it is not there. All lanes of a warp
        get the same.
        """
        lane = simt.special("laneid")

        @loop(0, M, 32, [word(0xFFFFFFFF)])
        def place(i: Word, known: Word) -> Word:
            at = i + lane
            other = simt.load_below(
                at, M, simt.offset(simt.offset_rows(device_rows, of, M * 4), at * 4), 0xFFFFFFFF
            )
            votes = simt.ballot(other.equals(row) & (row < P))
            return votes.differs(0).select(i + 31 - instr("clz.b32", votes), known)

        return place[0]

    def whose(at: Word) -> tuple[Word, Word, Word, Word]:
        """The (b, k), place and part that a chunk belongs to, and its byte there."""
        i = simt.divide(at, chunks)
        of = simt.divide(i, M)
        inside = (at - i * chunks) * CHUNK
        part = simt.divide(inside, piece)
        return of, i - of * M, part, inside - part * piece

    def source(at: Word) -> tuple[Flag, Any]:
        of, n, part, byte = whose(at)
        row = simt.load_below(
            n, N, simt.offset_rows(simt.offset_rows(index, of, N * 4), n, 4), 0xFFFFFFFF
        )
        row = n.equals(N).select(simt.load(simt.offset_rows(edge, simt.divide(of, K), 4)), row)
        how = simt.load(simt.offset_rows(mode, of, 4))
        is_recalled = how.equals(1)
        from_host = simt.offset_rows(
            simt.offset_rows(x, of, P * size), (row < P).select(row, 0), size
        )
        found = simt.offset(from_host, part * piece + byte)
        # a warp looks for one row
        place = place_of(row, of) if size % (32 * CHUNK) == 0 else word(0xFFFFFFFF)
        at_place = _of_part(device, part)
        if keeps:
            at_place = simt.select_address(
                how.equals(2), _of_part(first_read[0], part), at_place
            )
        place = is_recalled.select(place, n)
        at_place = simt.offset_rows(simt.offset_rows(at_place, of, width), place, piece)
        found = simt.select_address(
            place.differs(0xFFFFFFFF), simt.offset(at_place, byte), found
        )
        in_slot = simt.divide(byte, line)
        slot = instr("min.u32", row - P + in_slot, R - 1)
        newest = simt.offset_rows(
            simt.offset_rows(_of_part(recent, part), of, R * line), slot, line
        )
        is_there = row < 1 << 31
        waits = is_recalled & is_there & (row >= P)
        found = simt.select_address(waits, simt.offset(newest, byte - in_slot * line), found)
        return is_recalled.select(is_there.select(1, 0), 1).differs(0), found

    def is_wanted(at: Word) -> Flag:
        return simt.load(simt.offset_rows(mode, whose(at)[0], 4)).equals(1)

    def target(at: Word) -> Any:
        of, n, part, byte = whose(at)
        return simt.offset(
            simt.offset_rows(simt.offset_rows(_of_part(outs, part), of, width), n, piece), byte
        )

    _move(rows * M * chunks, source, target, config, None if keeps else is_wanted)


def _of_part(addresses: Sequence[Any], part: Word) -> Any:
    selected = addresses[0]
    for n, address in enumerate(addresses[1:], 1):
        selected = simt.select_address(part.equals(n), address, selected)
    return selected


def _move(
    total: int, source: Callable[[Word], tuple[Flag, Any]], target: Callable[[Word], Any], config: Config,
    is_wanted: Callable[[Word], Flag] | None = None,
) -> None:  # fmt: skip
    """Moves chunks 0 to total - 1 to their targets, or only those that are wanted, all or none
    of a warp; writes zeros where the source has nothing."""
    threads = 128 * config.warpgroups

    def move(first: Word) -> None:
        at_chunk = [first + j * threads for j in range(config.ahead)]
        if is_wanted is None:
            move_all(at_chunk, [at < total for at in at_chunk])
            return
        wanted = [(at < total) & is_wanted(instr("min.u32", at, total - 1)) for at in at_chunk]
        with when(functools.reduce(lambda a, b: a | b, wanted)):
            move_all(at_chunk, wanted)

    def move_all(at_chunk: list[Word], wanted: list[Flag]) -> None:
        # A spare thread loads the last.
        sources = [source(instr("min.u32", at, total - 1)) for at in at_chunk]
        load = (
            "{ .reg .pred p; setp.ne.u32 p, $4, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
            "@p ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$5]; }"
        )
        loaded = [
            ptx(load, exists.select(1, 0), address, results=4) for exists, address in sources
        ]
        for at, flag, words in zip(at_chunk, wanted, loaded, strict=True):
            with when(flag):
                ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", target(at), *words)

    first = simt.special("ctaid.x") * (threads * config.ahead) + simt.special("tid.x")
    blocks, turns = blocks_of(total, _at_once(config), config)
    if turns == 1:
        move(first)
    else:
        loop(first, total, _at_once(config) * blocks)(move)
