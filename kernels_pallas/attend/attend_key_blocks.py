"""Attention of a prompt's queries to lists of key blocks, by wgmma: each block of 128 queries
of a head has its own.

Two warpgroups multiply 64 queries each and take turns at the tensor cores, as in
FlashAttention-3; a third one copies the listed blocks of keys and values by TMA, `stages`
ahead. All but the last one are whole. Lists are in order of position, so that programs of the
same keys read them at about the same time and find them in L2.

**Bound:** 4 * 128 * 128 D operations a listed block. On an H100 it ran at 652 TFLOP/s, cuDNN
over all blocks at 615 (4096 queries, 131072 keys). It is written in Pallas's own operations,
because wgmma keeps its operands in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels_pallas import simt

MEASURED: str | None = "2026-11-27"  # the date in benchmarks/results/attend_key_blocks.json
BLOCK = 128  # queries, and keys, of a block
HALF = BLOCK // 2  # queries of a warpgroup
TILE = 8  # slots: TMA copies whole tiles of 8 x 64 numbers
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    stages: int = 2  # blocks of keys and values in shared memory

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")


def smem_bytes(D: int, config: Config = Config()) -> int:
    """Bytes of shared memory of a program: queries, keys and values in 16 bits, sums and
    barriers.
    """
    return 2 * BLOCK * D * (1 + 2 * config.stages) + 1024


def unsupported(q: Any, k: Any, v: Any, config: Config = Config()) -> str | None:
    """The limit that these arguments exceed; None if the kernel takes them."""
    name = "attend_key_blocks"
    D = q.shape[-1]
    if simt.target((k,)).capability != "9.0":
        return f"{name} needs wgmma, which GPUs of compute capability 9.0 have; got {simt.target((k,)).capability}"
    if k.dtype not in (jnp.bfloat16, jnp.float16) or v.dtype != k.dtype:
        return f"{name} takes keys and values in bf16 or f16; got {k.dtype} and {v.dtype}"
    if D not in (64, 128) or v.shape[-1] != D:
        return f"{name} takes keys and values of 64 or 128 channels; got {D} and {v.shape[-1]}"
    if (needed := smem_bytes(D, config)) > (most := simt.target((k,)).smem):
        return (
            f"{name} needs {needed} bytes of shared memory for {config}, and a block has {most}"
        )
    T = q.shape[3]
    S = k.shape[2]
    if T % BLOCK or S < BLOCK or S % TILE:
        return f"{name} takes multiples of {BLOCK} queries, and of {TILE} slots from {BLOCK} on; got {T} and {S}"
    return None


def attend_key_blocks(
    q: Array, k: Array, v: Array, blocks: Array, counts: Array, stop: Array, *, scale: float,
    config: Config | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(out, lse) of `kvjax.ops.attend_key_blocks`."""
    B, K, G, T, D = q.shape
    config = config or Config()
    if (limit := unsupported(q, k, v, config)) is not None:
        raise NotImplementedError(limit)
    rows = B * K * G * (T // BLOCK)
    args = q.astype(k.dtype).reshape(-1, T, D), *(a.reshape(B * K, -1, D) for a in (k, v))
    lists = blocks.reshape(rows, -1).astype(jnp.int32), counts.reshape(rows).astype(jnp.int32)
    out, lse = _attend(float(scale), config, *args, *lists, stop.astype(jnp.int32))
    out = out.reshape(B, K, G * T, D).astype(jnp.float32)
    lse = lse.reshape(B, K, G * T)
    some = (stop > 0)[:, None, None]
    return jnp.where(some[..., None], out, 0.0), jnp.where(some, lse, -jnp.inf)


def _attend(scale: float, config: Config, *args: Array) -> tuple[Array, ...]:
    """`_launch`, with a grid of its own for a batched call."""

    @simt.over_rows(partial(_attend, scale, config))
    def run(*args: Array) -> tuple[Array, ...]:
        return _launch(*args, scale=scale, config=config)

    made: tuple[Array, ...] = run(*args)
    return made


def _launch(
    q: Array,
    k: Array,
    v: Array,
    blocks: Array,
    counts: Array,
    stop: Array,
    *,
    scale: float,
    config: Config,
) -> tuple[Array, Array]:
    """q [B*N, T, D], k, v [B*K, S, D], blocks i32[rows, M], counts i32[rows] of at least 1,
    stop i32[B]; all rows of a head adjacent. Returns the output in the dtype of q and its
    log-sum-exp f32[B*N, T]."""
    tiled: Any = {
        "transforms": (plgpu.TilingTransform((TILE, 64)), plgpu.SwizzleTransform(128))
    }
    D = q.shape[2]
    n = config.stages
    scratch: list[Any] = [
        plgpu.SMEM((2, HALF, D), q.dtype, **tiled),  # the queries, then the output
        plgpu.SMEM((n, BLOCK, D), k.dtype, **tiled),
        plgpu.SMEM((n, BLOCK, D), v.dtype, **tiled),
        plgpu.Barrier(num_barriers=2),  # queries
        plgpu.Barrier(num_barriers=n),  # keys, then values
        plgpu.Barrier(num_barriers=n),
        plgpu.Barrier(
            num_arrivals=2, num_barriers=n
        ),  # a stage of keys, then of values, is free
        plgpu.Barrier(num_arrivals=2, num_barriers=n),
        plgpu.Barrier(num_arrivals=2),  # whose turn it is
    ]
    return plgpu.kernel(
        partial(_program, scale=scale, stages=n),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ),
        scratch_types=scratch,
        grid=(blocks.shape[0],),
        grid_names=("row",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="kvjax_attend_key_blocks",
    )(q, k, v, blocks, counts, stop)


def _product(a: Any, b: Any, meanwhile: Callable[[], None]) -> Array:
    """a b^T of two tiles in shared memory; `meanwhile` runs after the product has begun."""

    def begin(ref: Any) -> Any:
        plgpu.wgmma(ref, a, b.transpose((1, 0)))
        meanwhile()
        return ref[...]

    return pl.run_scoped(begin, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def _add_product(sums: Array, a: Array, b: Any) -> Array:
    """sums + a b of an array in registers and a tile in shared memory."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(sums))


def _program(
    q: Any,
    k: Any,
    v: Any,
    blocks: Any,
    counts: Any,
    stop: Any,
    *refs: Any,
    scale: float,
    stages: int,
) -> None:
    out, lse, q_smem, k_smem, v_smem, q_here, k_here, v_here, k_free, v_free, turn = refs
    row = lax.axis_index("row")
    warpgroup = lax.axis_index("warpgroup")
    per_head = q.shape[1] // BLOCK
    head = lax.div(row, per_head)
    tile = lax.rem(row, per_head)
    kv_head = lax.div(head, q.shape[0] // k.shape[0])
    count = counts[row]
    S = k.shape[1]
    D = q.shape[2]
    last = blocks[row, count - 1] * BLOCK  # its first slot; it is read from where it fits
    end = stop[lax.div(kv_head, k.shape[0] // stop.shape[0])]

    @pl.when(warpgroup == 2)
    def _copy() -> None:
        plgpu.set_max_registers(40, action="decrease")

        copies = (k, k_smem, k_here, k_free), (v, v_smem, v_here, v_free)

        def copy(i: Any, wait: bool) -> None:
            stage = lax.rem(i, stages)
            at = kv_head, pl.ds(jnp.minimum(blocks[row, i] * BLOCK, S - BLOCK), BLOCK)
            for x, smem, here, free in copies:
                if wait:
                    plgpu.barrier_wait(free.at[stage])
                plgpu.copy_gmem_to_smem(x.at[at], smem.at[stage], here.at[stage])

        ahead = jnp.minimum(count, stages)
        pl.loop(0, ahead)(partial(copy, wait=False))
        pl.loop(stages, count)(partial(copy, wait=True))

        @pl.loop(count - ahead, count)
        def _end(i: Any) -> None:
            for *_, free in copies:
                plgpu.barrier_wait(free.at[lax.rem(i, stages)])

    @pl.when(warpgroup < 2)
    def _attend() -> None:
        plgpu.set_max_registers(232, action="increase")
        own = head, pl.ds(tile * BLOCK + warpgroup * HALF, HALF)
        mine = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q.at[own], mine, q_here.at[warpgroup])
        plgpu.barrier_wait(q_here.at[warpgroup])

        def take_turns() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def step(i: Any, carry: Any, masked: bool) -> Any:
            acc, top, total = carry
            stage = lax.rem(i, stages)
            plgpu.barrier_wait(k_here.at[stage])

            logits = _product(mine, k_smem.at[stage], meanwhile=take_turns)
            plgpu.barrier_arrive(k_free.at[stage])
            if masked:
                slot = plgpu.broadcasted_iota(
                    jnp.int32, (HALF, BLOCK), 1, layout=plgpu.Layout.WGMMA
                )
                slot += jnp.minimum(last, S - BLOCK)
                logits = jnp.where((slot >= last) & (slot < end), logits, -1e30)
            higher = jnp.maximum(top, logits.max(axis=1) * (scale * LOG2E))
            fade = jnp.exp2(top - higher)
            weights = jnp.exp2(
                logits * (scale * LOG2E) - lax.broadcast_in_dim(higher, logits.shape, [0])
            )
            acc *= lax.broadcast_in_dim(fade, acc.shape, [0])
            narrow = weights.astype(q.dtype)
            total = total * fade + weights.sum(axis=1)
            acc, total, higher, narrow = lax.optimization_barrier((acc, total, higher, narrow))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_here.at[stage])
            plgpu.barrier_wait(turn)
            acc = _add_product(acc, narrow, v_smem.at[stage])
            plgpu.barrier_arrive(v_free.at[stage])
            return acc, higher, total

        def filled(shape: tuple[int, ...], value: float) -> Any:
            layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        pl.when(warpgroup == 1)(take_turns)
        carry = filled((HALF, D), 0.0), filled((HALF,), -jnp.inf), filled((HALF,), 0.0)
        carry = lax.fori_loop(0, count - 1, partial(step, masked=False), carry)
        acc, top, total = step(count - 1, carry, masked=True)
        pl.when(warpgroup == 0)(take_turns)
        mine[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(q.dtype)
        lse[own] = top * (1 / LOG2E) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out.at[own])
        plgpu.wait_smem_to_gmem(0)
