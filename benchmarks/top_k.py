"""Device time of top_k by block sizes, and of its reference: `python benchmarks/top_k.py`, on a
GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.select import top_k
from kvjax.kernels_pallas.select.top_k import Config, config_for

INPUTS = ("normal", "softmax", "equal", "rising", "half valid")
SHAPES = (  # rows, U, k, scores
    *((8, U, 2048, kind) for U in (131072, 1 << 20) for kind in INPUTS),
    *(
        (8, U, k, "normal")
        for U, k in ((4096, 512), (8192, 1024), (32768, 1024), (32768, 2048))
    ),
    *((8, U, k, "normal") for U in (131072, 1 << 20) for k in (256, 1024, 4096)),
    *((rows, 131072, 2048, "normal") for rows in (1, 16, 32, 64)),
    (64, 32768, 2048, "normal"),
)
CONFIGS = [Config(blocks, unroll) for blocks in (8, 4, 2, 16) for unroll in (4, 2)]


def inputs(rows: int, U: int, kind: str) -> tuple[Array, Array]:
    normal = jax.random.normal(jax.random.key(0), (rows, U))
    valid = jnp.ones((rows, U), bool)
    if kind == "softmax":
        return jax.nn.log_softmax(2 * normal, axis=-1), valid
    if kind == "equal":
        return jnp.zeros((rows, U)), valid
    if kind == "rising":
        return jnp.sort(normal, axis=-1), valid
    return normal, (jnp.arange(U)[None] < U // 2) & valid if kind == "half valid" else valid


def measure(sweep: Sweep, rows: int, U: int, k: int, kind: str) -> dict[str, Any]:
    def kernel(config: Config) -> Any:
        return lambda scores, valid: top_k.top_k(scores, valid, k, config=config)

    def reference(scores: Array, valid: Array) -> Any:
        return ops.top_k(scores, valid, k, implementation="xla")

    def error(got: Any, want: Any) -> float:
        return float(jnp.mean(got[0] != want[0]) + jnp.mean(got[1] != want[1]))

    args = jax.jit(inputs, static_argnums=range(3))(rows, U, kind)
    configs, moved = [config_for(rows, U), *CONFIGS], rows * (4 * U + 4 * k)
    row = sweep(
        "top_k", kernel, reference, args, configs=configs, error=error, most=0.0, moved=moved
    )
    return {"rows": rows, "U": U, "k": k, "scores": kind, **row}


if __name__ == "__main__":
    run(
        "top_k",
        "top_k of scores f32[rows, U]; error: share of the slots that are not the reference's; config: blocks x unroll",
        "normal random scores, or as `scores` says",
        measure,
        SHAPES,
        quick=(2, 300, 20, "normal"),
    )
