"""Device time of `project` by block sizes, and of XLA's norm, product and sum: `python benchmarks/project.py`.

Shapes are those of the products of one token in Llama-3.1-8B, Qwen3-30B-A3B and gpt-oss-20b. Each call makes several
products, whose kernels together have twice the size of the L2 cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from device_time import is_simulated
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.project import project
from kvjax.kernels_pallas.project.project import Config

SHAPES = (  # channels, widths, normed and without a residual, or the other way round
    (2048, (4096, 512, 512), True),
    (4096, (2048,), False),
    (2880, (4096, 512, 512), True),
    (4096, (2880,), False),
    (4096, (4096, 1024, 1024), True),
    (4096, (4096,), False),
    (4096, (14336, 14336), True),
    (14336, (4096,), False),
)
BLOCKS = (32, 2, 8), (32, 4, 8), (32, 4, 4), (32, 8, 8), (64, 2, 8), (64, 4, 8), (16, 2, 8), (16, 4, 8)
CONFIGS = [Config(*sizes) for sizes in BLOCKS]


def inputs(channels: int, widths: tuple[int, ...], n: int) -> tuple[Array, Array, Array, list[list[Array]]]:
    keys = iter(jax.random.split(jax.random.key(0), 3 + n * len(widths)))

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    row, scale, residual = normal(channels), normal(channels), normal(sum(widths))
    return row, scale, residual, [[normal(channels, width) for width in widths] for _ in range(n)]


def measure(sweep: Sweep, channels: int, widths: tuple[int, ...], normed: bool) -> dict[str, Any]:
    moved = 2 * channels * sum(widths)
    n, how = 1 if is_simulated() else repeats(moved), {"eps": 1e-6, "offset": False}

    def rest(scale: Array, residual: Array) -> tuple[Any, ...]:
        return ((), scale, None) if normed else ((), None, residual)

    def kernel(config: Config | None) -> Any:
        one = jax.jit(partial(project.project, **how, config=config))  # lowered once
        return lambda row, scale, residual, sets: [one(row, kernels, *rest(scale, residual)) for kernels in sets]

    def reference(row: Array, scale: Array, residual: Array, sets: list[list[Array]]) -> list[Array]:
        # Each on a row of its own, or XLA would norm it once for all.
        rows = jax.lax.optimization_barrier([row] * len(sets))
        one = partial(ops.project, **how, implementation="xla")
        return [one(row, kernels, *rest(scale, residual)) for row, kernels in zip(rows, sets, strict=True)]

    def error(got: list[Array], want: list[Array]) -> float:
        pairs = zip(*(map(partial(jnp.asarray, dtype=jnp.float32), x) for x in (got, want)), strict=True)
        return float(max(jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs))

    args = jax.jit(inputs, static_argnums=range(3))(channels, widths, n)
    rule = project.config_for(sum(widths), simt.target())
    configs = dict.fromkeys([rule, *(c for c in CONFIGS if not project.unsupported(args[0], args[3][0], c))])
    row = sweep("project", kernel, reference, args, configs=configs, error=error, most=1e-2, moved=moved, n=n)
    return {"channels": channels, "widths": list(widths), "normed": normed, **row}


if __name__ == "__main__":
    run(
        "project",
        "project of a row of `channels` with kernels of `widths` columns; config: columns x warpgroups x unroll",
        "normal random numbers",
        measure,
        SHAPES,
        swept=4,
        quick=(256, (64, 32), True),
    )
