"""Exact attention over a contiguous span of each row's slots: decode steps over a dense cache.

A row, which is a KV head, is split over blocks. All warps of a row take its tiles of `keys`
slots in turns, from its own start to its own stop. Each warp has its own ring of `stages` tiles
in shared memory and refills a stage as soon as it is scored. Scores, weights and mix are those
of `attend_slots`. A second, small kernel merges blocks.

Queries of several steps are up to `columns_at_once` columns of `HEADS` for a tile, from shared
memory; only tiles at the ends of their spans are masked.

**Bytes:** 2 D e (stop - start) read a row, where e is the size of an element, and 4 g (D + 1)
written and read a block.

**Bound:** memory.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.softmax import HEADS, KINDS, MOST_STEPS, step_count
from kvjax.kernels_pallas.simt import Flag, Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_span.json
TAKES = ("soft caps", "sinks")


def columns_at_once(D: int) -> int:
    """Columns of `HEADS` queries whose mix the registers of a thread hold."""
    return 4 if D <= 128 else 2


@dataclass(frozen=True)
class Config:
    blocks: int  # of a row
    warpgroups: int = 1  # of a block
    stages: int = 3  # tiles that a warp has room for in shared memory
    keys: int = 32  # of a tile

    def __post_init__(self) -> None:
        if (
            self.blocks < 1
            or self.warpgroups not in (1, 2, 3, 4)
            or self.stages < 1
            or self.keys not in (16, 32, 64)
        ):
            raise ValueError(
                f"blocks and stages must be at least 1, warpgroups 1 to 4, keys 16, 32 or 64; got {self}"
            )


def at_once(D: int, config: Config, target: simt.Target | None = None, columns: int = 1) -> int:
    """Blocks that run at once: as many per multiprocessor as fit in shared memory, and 16 warps
    of 128 registers.
    """
    target = target or simt.target()
    if smem_bytes(D, config, columns) > target.smem:
        return 0
    fit = (target.smem + 1024) // (smem_bytes(D, config, columns) + 1024)
    return target.multiprocessors * min(fit, (4 if columns == 1 else 2) // config.warpgroups)


def config_for(
    rows: int, S: int, D: int, target: simt.Target | None = None, columns: int = 1
) -> Config:
    """192 KB in flight per multiprocessor, or what its shared memory holds, and as many blocks
    per row as take the least time, where a wave costs the turns of its warps and two more."""
    target = target or simt.target()
    sizes = ((3, 16 if D > 128 else 32), (2, 32), (3, 16), (2, 16), (1, 16))
    stages, keys = next(
        (s, n)
        for s, n in sizes
        if smem_bytes(D, Config(1, stages=s, keys=n), columns) <= target.smem
    )
    wave = at_once(D, Config(1, stages=stages, keys=keys), target, columns)

    def turns(blocks: int) -> int:
        return -(-rows * blocks // wave) * (-(-S // (blocks * 4 * keys)) + 2)

    return Config(
        min(range(1, target.multiprocessors + 1), key=turns), stages=stages, keys=keys
    )


def _room(D: int, config: Config, columns: int) -> int:
    """Bytes of shared memory of a warp, for its tiles of keys and values and afterwards for its
    part of the result.
    """
    return max(
        config.stages * config.keys * softmax.row_bytes(D) * 2, columns * softmax.part_bytes(D)
    )


def smem_bytes(D: int, config: Config, columns: int = 1) -> int:
    return 4 * config.warpgroups * _room(D, config, columns) + softmax.query_bytes(D, columns)


def unsupported(
    q: Any, k: Any, v: Any, start: Any, stop: Any, config: Config | None = None
) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    G //= step_count(stop)
    if D not in softmax.SIZES:
        return f"the kernel attend_span takes head sizes {', '.join(map(str, softmax.SIZES))}; got D={D}"
    if not 1 <= G <= 2 * HEADS:
        return f"the kernel attend_span takes 1 to {2 * HEADS} queries a kv head; got {G}"
    if step_count(stop) > MOST_STEPS:
        return f"the kernel attend_span takes 1 to {MOST_STEPS} steps at once; got {step_count(stop)}"
    if str(q.dtype) not in KINDS:
        return f"the kernel attend_span takes queries in f32, bf16 or f16; got {q.dtype}"
    if k.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel attend_span takes keys and values in bf16 or f16; got {k.dtype}"
    if (v.dtype, v.shape) != (k.dtype, k.shape):
        return f"the kernel attend_span takes values like keys, {k.dtype}{list(k.shape)}; got {v.dtype}{list(v.shape)}"
    if k.shape[2] * D * 2 >= 1 << 32:
        return f"the kernel attend_span takes rows of less than 4 GiB of keys; got k{list(k.shape)}"
    if 0 in q.shape or 0 in k.shape:
        return f"the kernel attend_span takes at least one row and slot; got q{list(q.shape)}, k{list(k.shape)}"
    columns = _columns(q.shape[-2], D, step_count(stop))[1]
    if config and (needed := smem_bytes(D, config, columns)) > (smem := simt.target((k,)).smem):
        return f"{config} needs {needed} bytes of shared memory for D={D}; a block has {smem}"
    return None


def _columns(heads: int, D: int, steps: int) -> tuple[int, int]:
    """Rows of the grid for a KV head, and columns of queries in each."""
    return (
        (softmax.passes_of(heads), 1)
        if steps == 1
        else softmax.columns_of(heads, columns_at_once(D))
    )


@simt.lowered_once("scale", "cap", "part", "config")
def attend_span(
    q: Array, k: Array, v: Array, start: Array, stop: Array, sinks: Array | None = None, *, scale: float,
    cap: float | None = None, part: bool = False, config: Config | None = None,
) -> Any:  # fmt: skip
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the slots [start, stop)
    i32[B] of k, v [B, K, S, D], merged with logits `sinks` f32[K, G] without a value; 0 where
    there are no slots. `config` follows from the shape. With `part`, (out f32[B, K, G, D], lse
    f32[B, K, G]) without sinks. `cap` is a soft cap of the logits.

    With stop i32[B, T] and start [B, T] or [B, 1], q is [B, K, T*G, D] and each step has a
    span.
    """
    if limit := unsupported(q, k, v, start, stop, config):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    rows = B * K
    S = k.shape[2]
    steps = step_count(stop)
    groups, columns = _columns(G, D, steps)
    passes = groups * columns
    config = config or tuned.select(
        "attend_span",
        config_for(rows * groups, S, D, simt.target((q, k, v)), columns),
        (q, k, v),
        lambda x: unsupported(q, k, v, start, stop, x),
        rows=rows * groups,
        S=S,
        G=-(-G // groups),
        D=D,
    )
    heads = -(-G // passes)
    queries = q.astype(k.dtype).reshape(rows, G, D)
    if passes * heads > G:
        queries = jnp.pad(queries, ((0, 0), (0, passes * heads - G), (0, 0)))
    ends = (a.astype(jnp.int32) for a in (start, stop))
    kept = (a.reshape(rows, S, D) for a in (k, v))
    run = functools.partial(
        _attend,
        softmax.Scale(scale, cap),
        q.dtype,
        part or sinks is not None,
        G // steps,
        columns,
        config,
    )
    made = run(queries.reshape(rows * passes, heads, D), *ends, *kept)
    found = [
        a.reshape(rows, -1, *a.shape[2:])[:, :G].reshape(B, K, G, *a.shape[2:]) for a in made
    ]
    if part:
        return tuple(found)
    return found[0] if sinks is None else softmax.with_sinks(found[0], found[1], sinks, q.dtype)


def _attend(
    scale: softmax.Scale, dtype: Any, lse: bool, of_step: int, columns: int, config: Config, *args: Array
) -> tuple[Array, ...]:  # fmt: skip
    """[rows, G, D] in `dtype`; or with `lse` in f32, and the logs of the sums f32[rows, G].
    `args` are queries, start and stop, perhaps of several steps, keys and values, whose numbers
    of rows divide these rows."""

    @simt.over_rows(functools.partial(_attend, scale, dtype, lse, of_step, columns, config))
    def run(*args: Array) -> tuple[Array, ...]:
        rows, G, D = args[0].shape
        kept = args[3]
        means, logs = simt.kernel(
            functools.partial(
                _program,
                sizes=(G, D, kept.shape[1]),
                shared_by=(
                    rows // columns // args[1].shape[0],
                    rows // columns // kept.shape[0],
                ),
                steps=(step_count(args[1]), step_count(args[2]), of_step),
                columns=columns,
                kind="bf16" if kept.dtype == jnp.bfloat16 else "f16",
                scale=scale,
                config=config,
            ),
            name="kvjax_attend_span",
            out_type=(
                jax.ShapeDtypeStruct((rows, config.blocks, G, D), jnp.float32),
                jax.ShapeDtypeStruct((rows, config.blocks, G), jnp.float32),
            ),
            scratch=(smem_bytes(D, config, columns) // 4,),
            blocks=rows // columns * config.blocks,
            warpgroups=config.warpgroups,
        )(*args)
        kind = jnp.float32 if lse else dtype
        return tuple(softmax.merge_blocks(means, logs, kind, name="attend_span", lse=lse))

    return run(*args)


def _program(
    q_m: Any, start_m: Any, stop_m: Any, k_m: Any, v_m: Any, out_m: Any, lse_m: Any, room_m: Any, *,
    sizes: tuple[int, int, int], shared_by: tuple[int, int], steps: tuple[int, int, int], columns: int, kind: str,
    scale: softmax.Scale, config: Config,
) -> None:  # fmt: skip
    heads, D, S = sizes
    starting, T, of_step = steps
    blocks = config.blocks
    keys = config.keys
    warps = 4 * config.warpgroups
    t = simt.special("tid.x")
    block = simt.special("ctaid.x")
    lane = t & 31
    warp = t >> 5
    rows = softmax.Rows(D, kind, lane)
    row = simt.divide(block, blocks)
    kept_row = simt.divide(row, shared_by[1])
    of_queries, of_part = (
        (row, block)
        if columns == 1
        else (row * columns, block + row * ((columns - 1) * blocks))
    )
    q, k, v, out, lse = (
        simt.offset_rows(simt.global_address(m), n, stride)
        for m, n, stride in (
            (q_m, of_queries, heads * D * 2),
            (k_m, kept_row, S * D * 2),
            (v_m, kept_row, S * D * 2),
            (out_m, of_part, heads * D * 4),
            (lse_m, of_part, heads * 4),
        )
    )
    if T == 1:
        start, stop = simt.ends_of((start_m, shared_by[0]), (stop_m, shared_by[0]), row, S)
    else:
        spans = softmax.Spans(
            ((start_m, starting), (stop_m, T)), simt.divide(row, shared_by[0]), lane, S
        )
        start = spans.start
        stop = spans.stop
    room_bytes = _room(D, config, columns)
    room = simt.shared_address(room_m) + warp * room_bytes
    tile = keys * rows.width  # bytes; in a stage the keys are before the values

    # Slots that one instruction copies, and this lane's.
    per = rows.per
    first = rows.first
    # Places repeat after 8 slots.
    places = [rows.place(word(0), first + i, rows.chunk) for i in range(0, 8, per)]
    k, v = (simt.offset(a, first * rows.of_token + rows.chunk * 16) for a in (k, v))

    def fetch(source: Any, to: Word, slot: Word) -> None:
        """Starts to copy the tile that begins at `slot`, as far as it is in the span; zeros
        after it.
        """
        with when(slot < stop):
            source = simt.offset(source, slot * rows.of_token)
            mine = slot + first
            for i in range(0, keys, per):
                at = to + places[i % 8 // per]
                byte = i * rows.of_token
                copy = f"cp.async.cg.shared.global [$0+{i // 8 * 8 * rows.width}], [$1+{byte}], 16, $2;"
                rows.copy(copy, at, source, mine + i < stop)
        ptx("cp.async.commit_group;")

    def wait() -> None:
        """Waits for the oldest tile of keys or values that was not waited for yet."""
        ptx(f"cp.async.wait_group {2 * config.stages - 1};")
        simt.warp_barrier()

    step = blocks * warps * keys
    begin = start + ((block - row * blocks) * warps + warp) * keys
    for i in range(config.stages):
        fetch(k, room + i * 2 * tile, begin + i * step)
        fetch(v, room + i * 2 * tile + tile, begin + i * step)
    if columns == 1:
        queries = rows.queries(q, heads)
    else:
        shared = simt.shared_address(room_m) + (lane * 8 + warps * room_bytes)
        for c in range(columns):
            with when(warp.equals(c % warps)):
                words = rows.queries(simt.offset(q, word(c * heads * D * 2)), heads)
                for j in range(D // 16):
                    simt.store_shared(
                        shared + (c * D * 16 + j * 256), *words[2 * j : 2 * j + 2]
                    )
        simt.block_barrier()
    end_of_ring = room + (config.stages - 1) * 2 * tile

    def query(c: int, j: int) -> Sequence[Word]:
        if columns == 1:
            return queries[2 * j : 2 * j + 2]
        words: list[Word] = simt.load_shared(shared + (c * D * 16 + j * 256), 2)
        return words

    def ends(c: int) -> list[list[Word]]:
        """Start and stop of this lane's two queries of column c."""
        first = ((row - kept_row * shared_by[1]) * columns + c) * heads + rows.col * 2
        return [spans.of(simt.divide(first + e, of_step)) for e in range(2)]

    def weigh(state: Sequence[Word], scores: list[list[Word]], slot: Word, c: int) -> Any:
        mine = slot + rows.quad
        if T == 1:
            return softmax.weigh(
                state, scores, lambda n, _: mine + 8 * n < stop, scale=scale, kind=kind
            )

        def seen() -> list[Word]:
            own = ends(c)

            def exists(n: int, e: int) -> Flag:
                return (mine + 8 * n >= own[e][0]) & (mine + 8 * n < own[e][1])

            return softmax.flat(softmax.masked(logs, exists))

        logs = softmax.logarithms(scores, scale)
        words = simt.branch(
            (slot < spans.latest) | (slot + keys > spans.earliest), seen, softmax.flat(logs)
        )
        kept, weights = softmax.exponentials(
            state, [words[i : i + 4] for i in range(0, len(words), 4)]
        )
        return kept, [softmax.right_operand(x, kind) for x in weights]

    @loop(begin, stop, step, [room, *softmax.empty(D) * columns])
    def carry(slot: Word, at: Word, *state: Word) -> list[Word]:
        ahead = slot + config.stages * step
        wait()
        scores = rows.scores_of(at, query, keys // 16, columns)
        simt.warp_barrier()
        fetch(k, at, ahead)
        states = [
            state[i : i + len(state) // columns]
            for i in range(0, len(state), len(state) // columns)
        ]
        weighed = [weigh(one, scores[c], slot, c) for c, one in enumerate(states)]
        wait()
        mixed = rows.mix_of(
            [before for before, _ in weighed], at + tile, [weights for _, weights in weighed]
        )
        simt.warp_barrier()
        fetch(v, at + tile, ahead)
        return [at.equals(end_of_ring).select(room, at + 2 * tile), *softmax.flat(mixed)]

    ptx("cp.async.wait_group 0;")
    simt.warp_barrier()
    size = (len(carry) - 1) // columns
    part = softmax.part_bytes(D)
    for c in range(columns):
        rows.store(
            room + c * part if c else room, carry[1 + c * size : 1 + (c + 1) * size], heads
        )
    simt.block_barrier()
    for c in range(columns):
        parts = [
            simt.shared_address(room_m) + (w * room_bytes + c * part) for w in range(warps)
        ]
        if c:
            out, lse = (
                simt.offset(a, word(blocks * heads * n)) for a, n in ((out, 4 * D), (lse, 4))
            )
        loop(t, heads * D // 4, 32 * warps)(
            functools.partial(softmax.write_merged, parts, D, out, lse)
        )
