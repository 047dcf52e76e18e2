"""Device time of score_1bit by block sizes, and of its reference: `python
benchmarks/score_1bit.py`, on a GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.score import score_1bit
from kvjax.kernels_pallas.score.score_1bit import Config, config_for
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit, quantize_1bit

SHAPES = (  # B, K, G, S, D, group, dtype of the scales
    *((1, 8, 4, S, 128, 32, "bfloat16") for S in (131072, 8192, 32768, 1 << 20)),
    *((B, 8, 4, 32768, 128, 32, "bfloat16") for B in (2, 8)),
    (1, 8, 4, 131072, 128, 64, "bfloat16"),
    (1, 8, 4, 131072, 128, 32, "float16"),
    (1, 8, 1, 131072, 128, 32, "bfloat16"),
    (1, 8, 8, 131072, 128, 32, "bfloat16"),
    (1, 8, 4, 131072, 64, 32, "bfloat16"),
    (1, 8, 8, 131072, 64, 32, "bfloat16"),
)
CONFIGS = [Config(units, stages) for units in (16, 8, 12, 14, 4) for stages in (4, 8, 2)]


def index(B: int, K: int, S: int, D: int, group: int, dtype: str) -> OneBit:
    keys, size = (jax.random.key(i) for i in range(2))
    k = jax.random.normal(keys, (B, K, S, D), jnp.bfloat16) * (
        1 + 3 * jax.random.uniform(size, (D,), jnp.bfloat16)
    )
    return quantize_1bit(k, group, jnp.dtype(dtype))


def measure(
    sweep: Sweep, B: int, K: int, G: int, S: int, D: int, group: int, dtype: str
) -> dict[str, Any]:
    args = (
        jax.random.normal(jax.random.key(2), (B, K, G, D)),
        jax.jit(index, static_argnums=range(6))(B, K, S, D, group, dtype),
    )

    def kernel(config: Config) -> Any:
        return lambda q, ix: score_1bit.score_1bit(q, *ix, scale=D**-0.5, config=config)

    def reference(q: Array, ix: OneBit) -> Array:
        return ops.score_1bit(q, ix, logits=Logits(D**-0.5), implementation="xla")

    def error(got: Array, want: Array) -> float:
        return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))

    moved = B * K * S * (D / 8 + 4 * D / group + 4 * G)
    configs = [config_for(B * K, S), *CONFIGS]
    row = sweep(
        "score_1bit",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=1e-2,
        moved=moved,
    )
    return {"B": B, "K": K, "G": G, "S": S, "D": D, "group": group, "scales": dtype, **row}


if __name__ == "__main__":
    run(
        "score_1bit",
        "score_1bit of q f32[B, K, G, D] with keys of S tokens; error: ||mosaic - xla|| / ||xla||; "
        "config: units x stages",
        "normal random keys, channels 1 to 4 times as large, and queries",
        measure,
        SHAPES,
    )
