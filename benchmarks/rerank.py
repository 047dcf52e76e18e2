"""Device time of rerank by block size, and of its reference: `python benchmarks/rerank.py`, on
a GPU.

Each call scores several lists of different keys in turn, which together read twice the size of
the L2 cache, so that most codes come from device memory, as in a model. (Lists share a store,
of 100 MB at 8 x 131072; at 32768 it is 25 MB, and fits in L2.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.score import rerank
from kvjax.kernels_pallas.score.rerank import Config
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import SUBSPACE, Directions, lloyd_max
from kvjax.numerics.selection import PackedSelection

SHAPES = (  # B, K, G, S, D, M
    (1, 8, 1, 131072, 128, 6554),
    (1, 8, 4, 131072, 128, 6554),
    (1, 8, 1, 131072, 128, 13108),
    (1, 8, 1, 32768, 128, 3277),
    (1, 8, 1, 1 << 20, 128, 52429),
    (8, 8, 1, 32768, 128, 3277),
    (1, 8, 1, 131072, 64, 6554),
)


def inputs(
    B: int, K: int, G: int, S: int, D: int, M: int, n: int
) -> tuple[Array, Directions, list[Array]]:
    keys, N = jax.random.split(jax.random.key(0), 5), D // 8
    q = jax.random.normal(keys[0], (B, K, G, D))
    signs, sizes = (
        jax.random.bits(key, (B, K, S, x), "uint8")
        for key, x in zip(keys[1:3], (N, 3 * N), strict=True)
    )
    weights = jax.random.uniform(keys[3], (B, K, S, N), "bfloat16", 0.5, 2.0)
    # One slot from each of M equal parts of the store, in order, as when the votes of many keys
    # are cut off.
    slots = jax.random.randint(keys[4], (n, B, K, G, M), 0, S // M) + jnp.arange(M) * (S // M)
    return (
        q,
        Directions(signs, sizes, jax.lax.bitcast_convert_type(weights, jnp.uint16)),
        list(slots),
    )


def measure(sweep: Sweep, B: int, K: int, G: int, S: int, D: int, M: int) -> dict[str, Any]:
    moved = B * K * G * M * (3 * D // 4 + 8)
    n, scale = repeats(moved), D**-0.5

    def kernel(config: Config) -> Any:
        one = jax.jit(
            partial(
                rerank.rerank,
                centres=tuple(lloyd_max(SUBSPACE)[1].tolist()),
                scale=scale,
                config=config,
            )
        )  # lowered once
        return lambda q, keys, slots: [one(q, *keys, s) for s in slots]

    def reference(q: Array, keys: Directions, slots: list[Array]) -> list[Array]:
        found = jnp.full(slots[0].shape[:3], M, jnp.int32)
        return [
            ops.rerank(
                q, keys, PackedSelection(s, found), logits=Logits(scale), implementation="xla"
            )
            for s in slots
        ]

    def error(got: list[Array], want: list[Array]) -> float:
        return float(
            max(
                jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
                for a, b in zip(got, want, strict=True)
            )
        )

    args = jax.jit(inputs, static_argnums=range(7))(B, K, G, S, D, M, n)
    configs = map(Config, (2, 1, 4, 8))
    row = sweep(
        "rerank",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=1e-5,
        moved=moved,
        n=n,
    )
    return {"B": B, "K": K, "G": G, "S": S, "D": D, "M": M, **row}


if __name__ == "__main__":
    run(
        "rerank",
        "rerank of q f32[B, K, G, D] with M of S keys for each of G heads; error: ||mosaic - xla|| / ||xla||; "
        "config: warpgroups",
        "normal random q, uniform random codes and weights; slots unique, spread, rising",
        measure,
        SHAPES,
        swept=3,
    )
