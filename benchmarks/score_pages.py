"""Device time of score_pages by block sizes, and of its reference: `python
benchmarks/score_pages.py`, on a GPU.

Each call scores several sets of pages, which together have twice the size of the L2 cache, so
that they come from device memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.score import score_pages
from kvjax.kernels_pallas.score.score_pages import Config
from kvjax.numerics.partial import Logits

SHAPES = (  # B, K, G, P, D, dtype
    *((1, 8, 4, P, 128, "bfloat16") for P in (8192, 4096, 2048, 65536)),
    (8, 8, 4, 2048, 128, "bfloat16"),
    (1, 8, 8, 8192, 64, "float16"),
)
CONFIGS = [Config(tiles, warpgroups) for tiles in (1, 2, 4, 8) for warpgroups in (1, 2)]


def inputs(
    B: int, K: int, G: int, P: int, D: int, dtype: str, n: int
) -> tuple[Array, list[Array], list[Array]]:
    keys = jax.random.split(jax.random.key(0), 2 * n + 1)
    corners = [jax.random.normal(key, (B, K, P, D), dtype) for key in keys[1:]]
    pairs = list(zip(corners[::2], corners[1::2], strict=True))
    q = jax.random.normal(keys[0], (B, K, G, D), dtype)
    return q, [jnp.minimum(*pair) for pair in pairs], [jnp.maximum(*pair) for pair in pairs]


def measure(sweep: Sweep, B: int, K: int, G: int, P: int, D: int, dtype: str) -> dict[str, Any]:
    moved = B * K * P * (4 * D + 4 * G)
    n, scale = repeats(moved), D**-0.5

    def kernel(config: Config) -> Any:
        one = jax.jit(
            partial(score_pages.score_pages, scale=scale, config=config)
        )  # lowered once
        return lambda q, *corners: [
            one(q, low, high) for low, high in zip(*corners, strict=True)
        ]

    def reference(q: Array, *corners: list[Array]) -> list[Array]:
        two = zip(*corners, strict=True)
        return [
            ops.score_pages(q, low, high, logits=Logits(scale), implementation="xla")
            for low, high in two
        ]

    def error(got: list[Array], want: list[Array]) -> float:
        return float(
            max(
                jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
                for a, b in zip(got, want, strict=True)
            )
        )

    args = jax.jit(inputs, static_argnums=range(7))(B, K, G, P, D, dtype, n)
    configs = [Config(), *CONFIGS]
    row = sweep(
        "score_pages",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=1e-5,
        moved=moved,
        n=n,
    )
    return {"B": B, "K": K, "G": G, "P": P, "D": D, "dtype": dtype, **row}


if __name__ == "__main__":
    run(
        "score_pages",
        "score_pages of q [B, K, G, D] with the corners [B, K, P, D] of P pages; config: tiles x warpgroups",
        "normal random q and corners",
        measure,
        SHAPES,
    )
