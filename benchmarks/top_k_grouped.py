"""Device time of pooled top-k: of its kernel by block sizes, of XLA with the kernel top_k, and
of XLA alone.

    python benchmarks/top_k_grouped.py

on a GPU. In a model the scores come from a kernel that has just written them; here they are
where the call before left them, in L2 if they fit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from device_time import device_time
from jax import Array
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.select import top_k_grouped
from kvjax.kernels_pallas.select.top_k import Config, config_for
from kvjax.numerics.selection import GroupReduce, reduce_scores

SHAPES = (  # B, K, G, units of the history, pending units, k, group_reduce
    (1, 8, 4, 130816, 256, 2048, "mean_softmax"),
    (1, 8, 4, 131072, 256, 2048, "mean_softmax"),
    (1, 8, 4, 130816, 256, 2048, "mean_score"),
    (1, 8, 4, 32512, 256, 2048, "mean_softmax"),
    (1, 8, 4, 1 << 20, 256, 2048, "mean_softmax"),
    (8, 8, 4, 32512, 256, 2048, "mean_softmax"),
    (1, 8, 4, 8191, 1, 127, "mean_softmax"),
    (1, 8, 8, 130816, 256, 2048, "mean_softmax"),
)
CONFIGS = [
    Config(blocks, unroll)
    for blocks, unroll in ((8, 2), (8, 4), (8, 5), (4, 4), (2, 4), (1, 4), (16, 4))
]
Parts = list[tuple[Array, Array]]


def inputs(B: int, K: int, G: int, stored: int, pending: int) -> Parts:
    keys = jax.random.split(jax.random.key(0))
    scores = [
        2 * jax.random.normal(key, (B, K, G, n))
        for key, n in zip(keys, (stored, pending), strict=True)
    ]
    return [(s, jnp.ones((B, 1, 1, s.shape[-1]), bool)) for s in scores]


def measure(
    sweep: Sweep,
    B: int,
    K: int,
    G: int,
    stored: int,
    pending: int,
    k: int,
    group_reduce: GroupReduce,
) -> dict[str, Any]:
    parts = jax.jit(inputs, static_argnums=range(5))(B, K, G, stored, pending)
    ranks = jax.jit(lambda parts: reduce_scores(parts, group_reduce))(parts)

    def kernel(config: Config) -> Any:
        return lambda parts: top_k_grouped.top_k_grouped(parts, group_reduce, k, config=config)

    def partly(parts: Parts) -> Any:
        valid = jnp.concatenate([ok for _, ok in parts], axis=-1)
        return ops.top_k(reduce_scores(parts, group_reduce), valid, k, implementation="mosaic")

    def reference(parts: Parts) -> Any:
        return ops.top_k_grouped(parts, group_reduce, k, implementation="xla")

    def error(got: Any, want: Any) -> float:
        """The largest difference of the ranks of the selected units: within rounding the order
        may differ.
        """
        ours, theirs = (
            jnp.take_along_axis(ranks, slots, axis=-1) for slots in (got[0], want.slots)
        )
        return float(jnp.max(jnp.abs(ours - theirs)))

    moved = B * K * G * (stored + pending) * 4 + 4 * B * K * k
    configs = [config_for(B * K, stored + pending), *CONFIGS]
    row = sweep(
        "top_k_grouped",
        kernel,
        reference,
        (parts,),
        configs=configs,
        error=error,
        most=1e-4,
        moved=moved,
    )
    sizes = {
        "B": B,
        "K": K,
        "G": G,
        "U": stored + pending,
        "k": k,
        "group_reduce": group_reduce,
    }
    return {**sizes, "xla and top_k": device_time(partly, parts, calls=10)[0], **row}


if __name__ == "__main__":
    run(
        "top_k_grouped",
        "top_k_grouped of scores f32[B, K, G, U] in two parts; config: blocks x unroll; "
        "xla and top_k: pooled by XLA, selected by the kernel top_k",
        "normal random scores of deviation 2, all valid",
        measure,
        SHAPES,
    )
