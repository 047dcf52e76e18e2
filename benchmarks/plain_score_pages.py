"""score_pages in plain Pallas Mosaic GPU against kvjax's kernel: `python
benchmarks/plain_score_pages.py`, on a GPU.

The plain kernel does not use `kernels_pallas.simt`: a pipeline copies tiles of 64 pages by TMA,
and `wgmma` multiplies them with the heads as columns. It needs whole tiles and at most 8 heads.
The queries' positive and negative parts are made by XLA, in a kernel of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from score_pages import SHAPES, inputs
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.score import score_pages

TILE = 64  # pages: the rows of a product
HEADS = 8  # columns of a product
MULTIPROCESSORS = 132
SWIZZLE = 128


@dataclass(frozen=True)
class Config:
    stages: int = 4  # tiles in flight
    waves: int = 1  # blocks for each multiprocessor


CONFIGS = [
    Config(stages, waves)
    for stages in (2, 3, 4, 6)
    for waves in (1, 2, 3)
    if stages * waves <= 6
]


def plain_score_pages(
    q: Array, low: Array, high: Array, *, scale: float, config: Config | None = None
) -> Array:
    """f32[B, K, G, P]: scale * sum_i max(q_i low_i, q_i high_i) of q [B, K, G, D] and corners
    [B, K, P, D].
    """
    (B, K, G, D), P, dtype = q.shape, low.shape[2], low.dtype
    if P % TILE or G > HEADS:
        raise NotImplementedError(
            f"plain_score_pages takes tiles of {TILE} pages and {HEADS} heads; got P={P}, G={G}"
        )
    config, rows, elements = config or Config(), B * K, SWIZZLE // dtype.itemsize
    parts = min(P // TILE, -(-MULTIPROCESSORS * config.waves // rows))
    tiles = -(-(P // TILE) // parts)  # of a block; the last block may have fewer
    transforms = plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(SWIZZLE)

    def body(
        sides_gmem: Any,
        low_gmem: Any,
        high_gmem: Any,
        out_gmem: Any,
        sides: Any,
        out: Any,
        barrier: Any,
    ) -> None:
        row, first = lax.axis_index("row"), lax.axis_index("part") * tiles
        plgpu.copy_gmem_to_smem(sides_gmem.at[row], sides, barrier)
        plgpu.barrier_wait(barrier)

        def tile(indices: Any, high_tile: Any, low_tile: Any) -> None:
            def products(acc: Any) -> Array:
                plgpu.wgmma(acc, high_tile, plgpu.transpose_ref(sides.at[0], (1, 0)))
                plgpu.wgmma(acc, low_tile, plgpu.transpose_ref(sides.at[1], (1, 0)))
                return acc[...]

            scores = pl.run_scoped(products, plgpu.ACC((TILE, HEADS), jnp.float32))
            slot = lax.rem(indices[0], jnp.int32(2))
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            by_head = plgpu.layout_cast(scores * scale, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.transpose_ref(out.at[slot], (1, 0))[...] = by_head
            plgpu.commit_smem()
            pages = pl.ds((first + indices[0]) * TILE, TILE)
            plgpu.copy_smem_to_gmem(out.at[slot, pl.ds(0, G)], out_gmem.at[row, :, pages])

        spec = plgpu.BlockSpec((TILE, D), lambda i: (first + i, 0), transforms=transforms)
        grid = (jnp.minimum(tiles, P // TILE - first),)
        pipeline = plgpu.emit_pipeline(
            tile,
            grid=grid if P // TILE % tiles else (tiles,),
            in_specs=[spec] * 2,
            max_concurrent_steps=config.stages,
        )
        pipeline(high_gmem.at[row], low_gmem.at[row])
        plgpu.wait_smem_to_gmem(0)

    q = jnp.pad(q.astype(dtype).reshape(rows, G, D), ((0, 0), (0, HEADS - G), (0, 0)))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, G, P), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, HEADS, D), dtype, transforms=transforms),
            plgpu.SMEM((2, HEADS, TILE), jnp.float32),
            plgpu.Barrier(),
        ],
        grid=(rows, -(-(P // TILE) // tiles)),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="kvjax_plain_score_pages",
    )
    sides = jnp.stack([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=1)
    corners = (a.reshape(rows, P, D) for a in (low, high))
    return kernel(sides, *corners).reshape(B, K, G, P)


def measure(sweep: Sweep, B: int, K: int, G: int, P: int, D: int, dtype: str) -> dict[str, Any]:
    """A row of the plain kernel; "ours" and "ours_mosaic" are kvjax's, alone and with XLA's
    kernels around it.
    """
    moved = B * K * P * (4 * D + 4 * G)
    n, scale = repeats(moved), D**-0.5

    def calls(f: Any) -> Any:
        one = jax.jit(partial(f, scale=scale))  # lowered once
        return lambda q, *corners: [
            one(q, low, high) for low, high in zip(*corners, strict=True)
        ]

    def error(got: list[Array], want: list[Array]) -> float:
        return float(
            max(
                jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
                for a, b in zip(got, want, strict=True)
            )
        )

    args = jax.jit(inputs, static_argnums=range(7))(B, K, G, P, D, dtype, n)
    checks = {
        "reference": calls(partial(ops.score_pages, implementation="xla")),
        "error": error,
        "most": 1e-5,
    }
    ours = sweep(
        "score_pages",
        lambda _: calls(score_pages.score_pages),
        args=args,
        configs=[None],
        moved=moved,
        n=n,
        **checks,
    )
    plain = sweep(
        "plain_score_pages",
        lambda config: calls(partial(plain_score_pages, config=config)),
        args=args,
        configs=[Config(), *CONFIGS],
        moved=moved,
        n=n,
        **checks,
    )
    shape = {"B": B, "K": K, "G": G, "P": P, "D": D, "dtype": dtype}
    return shape | plain | {"ours": ours["kernel"], "ours_mosaic": ours["mosaic"]}


if __name__ == "__main__":
    run(
        "plain_score_pages",
        "score_pages in plain Pallas Mosaic GPU, config: stages x waves; ours: the kernel of kernels_pallas",
        "normal random q and corners",
        measure,
        SHAPES,
    )
