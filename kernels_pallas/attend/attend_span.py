"""Exact attention over a contiguous span of each row's slots: a decode step over a dense cache.

A row, which is a KV head, is split over blocks. All warps of a row take its tiles of `keys` slots in turns, from the
row's own start to its own stop, so a cache that is a quarter full takes a quarter of the time. Each warp copies tiles
into its own ring of `stages` in shared memory and refills a stage as soon as it is scored. Scores, weights and mix are
those of `attend_slots`. A second, small kernel merges the blocks of a row and writes the mean in the dtype of the
queries.

**Bytes:** 2 D e (stop - start) read a row, where e is the size of an element, and 4 g (D + 1) written and read a block.

**Bound:** memory.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.softmax import HEADS, KINDS
from kvjax.kernels_pallas.simt import Flag, Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_span.json
TAKES = ("soft caps", "sinks")


@dataclass(frozen=True)
class Config:
    blocks: int  # of a row
    warpgroups: int = 1  # of a block
    stages: int = 3  # tiles that a warp has room for in shared memory
    keys: int = 32  # of a tile

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.warpgroups not in (1, 2, 3, 4) or self.stages < 1 or self.keys not in (16, 32, 64):
            raise ValueError(f"blocks and stages must be at least 1, warpgroups 1 to 4, keys 16, 32 or 64; got {self}")


def at_once(D: int, config: Config, target: simt.Target | None = None) -> int:
    """Blocks that run at once: as many per multiprocessor as fit in shared memory, and 16 warps of 128 registers."""
    target = target or simt.target()
    if smem_bytes(D, config) > target.smem:
        return 0
    fit = (target.smem + 1024) // (smem_bytes(D, config) + 1024)
    return target.multiprocessors * min(fit, 4 // config.warpgroups)


def config_for(rows: int, S: int, D: int, target: simt.Target | None = None) -> Config:
    """192 KB in flight per multiprocessor, or what its shared memory holds, and as many blocks per row as take the
    least time, where a wave costs the turns of its warps and two more."""
    target = target or simt.target()
    sizes = ((3, 16 if D > 128 else 32), (2, 32), (3, 16), (2, 16), (1, 16))
    stages, keys = next((s, n) for s, n in sizes if smem_bytes(D, Config(1, stages=s, keys=n)) <= target.smem)
    wave = at_once(D, Config(1, stages=stages, keys=keys), target)

    def turns(blocks: int) -> int:
        return -(-rows * blocks // wave) * (-(-S // (blocks * 4 * keys)) + 2)

    return Config(min(range(1, target.multiprocessors + 1), key=turns), stages=stages, keys=keys)


def _room(D: int, config: Config) -> int:
    """Bytes of shared memory of a warp, for its tiles of keys and values and afterwards for its part of the result."""
    return max(config.stages * config.keys * softmax.row_bytes(D) * 2, softmax.part_bytes(D))


def smem_bytes(D: int, config: Config) -> int:
    return 4 * config.warpgroups * _room(D, config)


def unsupported(q: Any, k: Any, v: Any, start: Any, stop: Any, config: Config | None = None) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    G //= _steps(stop)
    if D not in softmax.SIZES:
        return f"the kernel attend_span takes head sizes {', '.join(map(str, softmax.SIZES))}; got D={D}"
    if not 1 <= G <= 2 * HEADS:
        return f"the kernel attend_span takes 1 to {2 * HEADS} queries a kv head; got {G}"
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
    if config and smem_bytes(D, config) > (smem := simt.target((k,)).smem):
        return f"{config} needs {smem_bytes(D, config)} bytes of shared memory for D={D}; a block has {smem}"
    return None


def _steps(stop: Any) -> int:
    return stop.shape[1] if len(stop.shape) == 2 else 1


@simt.lowered_once("scale", "part", "config")
def attend_span(
    q: Array, k: Array, v: Array, start: Array, stop: Array, sinks: Array | None = None, *, scale: float,
    part: bool = False, config: Config | None = None,
) -> Any:  # fmt: skip
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the slots [start, stop) i32[B] of k, v [B, K, S, D],
    merged with logits `sinks` f32[K, G] without a value; 0 where there are no slots. `config` follows from the shape.
    With `part`, (out f32[B, K, G, D], lse f32[B, K, G]) without sinks.

    With start and stop i32[B, T], q is [B, K, T*G, D] and each step has a span. Each `HEADS` queries are a row of their
    own; the blocks of these rows run at once and so read most tiles from the L2 cache.
    """
    if limit := unsupported(q, k, v, start, stop, config):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    rows, S, steps = B * K, k.shape[2], _steps(stop)
    passes = -(-G // HEADS) if steps > 1 else softmax.passes_of(G)
    config = config or tuned.select(
        "attend_span",
        config_for(rows * passes, S, D, simt.target((q, k, v))),
        (q, k, v),
        lambda x: unsupported(q, k, v, start, stop, x),
        rows=rows * passes,
        S=S,
        G=-(-G // passes),
        D=D,
    )
    queries, kept = q.astype(k.dtype).reshape(rows, G, D), [a.reshape(rows, S, D) for a in (k, v)]
    ends = [jnp.clip(a.astype(jnp.int32), 0, S) if steps > 1 else a.astype(jnp.int32) for a in (start, stop)]
    run = functools.partial(_attend, scale, q.dtype, part or sinks is not None, config)

    def whole(*parts: Array) -> Any:
        found = [a.reshape(rows, -1, *a.shape[2:])[:, :G].reshape(B, K, G, *a.shape[2:]) for a in parts]
        if part:
            return tuple(found)
        return found[0] if sinks is None else softmax.with_sinks(found[0], found[1], sinks, q.dtype)

    if steps == 1:
        queries = queries.reshape(rows * passes, G // passes, D)
        return whole(*run(queries, *ends, *kept))
    heads = -(-G // passes)
    pad = (0, passes * heads - G)
    queries = jnp.pad(queries, ((0, 0), pad, (0, 0))).reshape(rows * passes, heads, D)
    limits = [jnp.pad(jnp.repeat(a, G // steps, axis=1), ((0, 0), pad)).reshape(B, passes, heads) for a in ends]
    each = jnp.stack([jnp.repeat(a[:, None], K, axis=1).reshape(-1, heads) for a in limits], axis=1)
    start, stop = jnp.min(ends[0], axis=1), jnp.max(ends[1], axis=1)
    return whole(*run(queries, start, stop, *kept, each))


def _attend(scale: float, dtype: Any, lse: bool, config: Config, *args: Array) -> tuple[Array, ...]:
    """[rows, G, D] in `dtype`; or with `lse` in f32, and the logs of the sums f32[rows, G]. `args` are queries, start
    and stop, keys and values, whose numbers of rows divide these rows; and perhaps start and stop of each query,
    i32[rows, 2, G]."""

    @jax.custom_batching.custom_vmap
    def run(*args: Array) -> tuple[Array, ...]:
        (rows, G, D), kept = args[0].shape, args[3]
        means, logs = simt.kernel(
            functools.partial(
                _program,
                sizes=(G, D, kept.shape[1]),
                shared_by=(rows // args[1].shape[0], rows // kept.shape[0]),
                kind="bf16" if kept.dtype == jnp.bfloat16 else "f16",
                scale=scale,
                config=config,
            ),
            name="kvjax_attend_span",
            out_type=(
                jax.ShapeDtypeStruct((rows, config.blocks, G, D), jnp.float32),
                jax.ShapeDtypeStruct((rows, config.blocks, G), jnp.float32),
            ),
            scratch=(smem_bytes(D, config) // 4,),
            blocks=rows * config.blocks,
            warpgroups=config.warpgroups,
        )(*args)
        kind = jnp.float32 if lse else dtype
        return tuple(softmax.merge_blocks(means, logs, kind, name="attend_span", lse=lse))

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        found = _attend(scale, dtype, lse, config, *simt.flatten_batch(n, batches, args))
        return tuple(a.reshape(n, -1, *a.shape[1:]) for a in found), (True,) * len(found)

    return run(*args)


def _program(
    q_m: Any, start_m: Any, stop_m: Any, k_m: Any, v_m: Any, *refs: Any,
    sizes: tuple[int, int, int], shared_by: tuple[int, int], kind: str, scale: float, config: Config,
) -> None:  # fmt: skip
    *each_m, out_m, lse_m, room_m = refs
    (heads, D, S), (blocks, keys) = sizes, (config.blocks, config.keys)
    warps, t, block = 4 * config.warpgroups, simt.special("tid.x"), simt.special("ctaid.x")
    lane, warp = t & 31, t >> 5
    rows = softmax.Rows(D, kind, lane)
    row = simt.divide(block, blocks)
    kept_row = simt.divide(row, shared_by[1])
    q, k, v, out, lse = (
        simt.offset_rows(simt.global_address(m), n, stride)
        for m, n, stride in (
            (q_m, row, heads * D * 2),
            (k_m, kept_row, S * D * 2),
            (v_m, kept_row, S * D * 2),
            (out_m, block, heads * D * 4),
            (lse_m, block, heads * 4),
        )
    )
    start, stop = simt.ends_of((start_m, shared_by[0]), (stop_m, shared_by[0]), row, S)
    own = []  # start and stop of this lane's two queries
    for m in each_m:
        at = simt.offset_rows(simt.global_address(m), row, 2 * heads * 4)
        for e in range(2):
            head = rows.col * 2 + e
            own.append([simt.load_below(head, heads, simt.offset(at, (head + n * heads) * 4)) for n in range(2)])
    room = simt.shared_address(room_m) + warp * _room(D, config)
    tile = keys * rows.width  # bytes; in a stage the keys are before the values

    per, first = rows.per, rows.first  # slots that one instruction copies, and this lane's
    places = [rows.place(word(0), first + i, rows.chunk) for i in range(0, 8, per)]  # which repeat after 8 slots
    k, v = (simt.offset(a, first * rows.of_token + rows.chunk * 16) for a in (k, v))

    def fetch(source: Any, to: Word, slot: Word) -> None:
        """Starts to copy the tile that begins at `slot`, as far as it is in the span; zeros after it."""
        with when(slot < stop):
            source, mine = simt.offset(source, slot * rows.of_token), slot + first
            for i in range(0, keys, per):
                at, byte = to + places[i % 8 // per], i * rows.of_token
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
    queries, end_of_ring = rows.queries(q, heads), room + (config.stages - 1) * 2 * tile

    @loop(begin, stop, step, [room, *softmax.empty(D)])
    def carry(slot: Word, at: Word, *state: Word) -> list[Word]:
        ahead = slot + config.stages * step
        wait()
        scores = rows.scores(at, queries, keys // 16)
        simt.warp_barrier()
        fetch(k, at, ahead)
        mine = slot + rows.quad

        def exists(n: int, e: int) -> Flag:
            there = mine + 8 * n < stop
            return there & (mine + 8 * n >= own[e][0]) & (mine + 8 * n < own[e][1]) if own else there

        before, weights = softmax.weigh(state, scores, exists, scale=scale, kind=kind)
        wait()
        mixed = rows.mix(before, at + tile, weights)
        simt.warp_barrier()
        fetch(v, at + tile, ahead)
        return [at.equals(end_of_ring).select(room, at + 2 * tile), *mixed]

    ptx("cp.async.wait_group 0;")
    simt.warp_barrier()
    rows.store(room, carry[1:], heads)
    simt.block_barrier()
    parts = [simt.shared_address(room_m) + w * _room(D, config) for w in range(warps)]
    loop(t, heads * D // 4, 32 * warps)(lambda i: softmax.Merged(parts, i, D, "shared").write(out, lse))
