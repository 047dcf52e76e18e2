"""Device time of collide by block sizes, and of its reference: `python benchmarks/collide.py`,
on a GPU.

Each call votes on several stores in turn, which together have twice the size of the L2 cache,
so that patterns come from device memory, as in a model. Each store has its own queries and
counts, as XLA would rank equal ones only once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.vote import collide
from kvjax.kernels_pallas.vote.collide import Config

SHAPES = (  # B, K, G, S, D, T
    (1, 8, 1, 131072, 128, 6),
    (1, 8, 4, 131072, 128, 6),
    *((1, 8, G, 1 << 20, 128, 6) for G in (1, 4)),
    *((1, 8, G, 32768, 128, 6) for G in (1, 4)),
    *((8, 8, G, 32768, 128, 6) for G in (1, 4)),
    (1, 8, 8, 131072, 128, 6),
    (1, 8, 4, 131072, 64, 6),
)
CONFIGS = [
    Config(parts, warpgroups, keys, stages, apart)
    for parts, warpgroups, keys, stages, apart in (
        (16, 4, 4, 4, 0),
        (16, 4, 4, 4, 1),
        (16, 4, 4, 2, 0),
        (16, 4, 2, 8, 0),
        (16, 8, 4, 2, 0),
        (33, 4, 4, 2, 1),
    )
]


Store = tuple[Array, Array, Array]  # queries, patterns, counts


def inputs(B: int, K: int, G: int, S: int, D: int, T: int, n: int) -> tuple[list[Store], Array]:
    def store(key: Array) -> Store:
        keys, N = jax.random.split(key), D // 8
        q = jax.random.normal(keys[0], (B, K, G, D), jnp.bfloat16).astype(
            jnp.float32
        )  # so that sums of 8 are exact
        return (
            q,
            jax.random.bits(keys[1], (B, K, S, N), "uint8"),
            jnp.full((B, K, N, 256), S // 256),
        )

    limits = jnp.broadcast_to(S // 5 * jnp.linspace(0.05, 1, T), (B, T)).astype(jnp.int32)
    return [store(key) for key in jax.random.split(jax.random.key(0), n)], limits


def measure(sweep: Sweep, B: int, K: int, G: int, S: int, D: int, T: int) -> dict[str, Any]:
    moved = B * K * (S * (D // 8 + G) + D // 8 * 1024)
    n = repeats(moved)

    def kernel(config: Config) -> Any:
        one = jax.jit(partial(collide.collide, config=config))  # lowered once
        return lambda stores, limits: [one(*store, limits) for store in stores]

    def reference(stores: list[Store], limits: Array) -> list[Array]:
        return [ops.collide(*store, limits, implementation="xla") for store in stores]

    def error(got: list[Array], want: list[Array]) -> float:
        return float(
            max(jnp.mean((a != b).astype(jnp.float32)) for a, b in zip(got, want, strict=True))
        )

    args = jax.jit(inputs, static_argnums=range(7))(B, K, G, S, D, T, n)
    configs = [collide.config_for(B * K, S, G, D), *CONFIGS]
    row = sweep(
        "collide",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=1e-3,
        moved=moved,
        n=n,
    )
    return {"B": B, "K": K, "G": G, "S": S, "D": D, "T": T, **row}


if __name__ == "__main__":
    run(
        "collide",
        "collide of q f32[B, K, G, D] with S keys, T limits; error: share of the votes that are not the reference's; "
        "config: parts x warpgroups x keys x stages x apart",
        "queries normal random in bf16, patterns uniform, limits up to S/5",
        measure,
        SHAPES,
        swept=4,
    )
