"""Device time of put_token and of its reference: `python benchmarks/put_token.py`, on a GPU.

Each call puts a token into the zones of 16 layers, which are donated to it and returned, as in
a decode step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from device_time import bytes_per_us
from jax import Array
from layers import clock
from sweep import Sweep, run

from kvjax import ops
from kvjax.numerics.blocks import Block

SHAPES = (  # B, K, zones, D
    (1, 8, (256,), 128),  # FIER's recent block
    (1, 8, (4, 383), 128),  # ParisKV's sink and recent block
    (8, 8, (256,), 128),
    (64, 8, (256,), 128),
    (1, 8, (31,), 64),
)
LAYERS = 16


def measure(_: Sweep, B: int, K: int, zones: tuple[int, ...], D: int) -> dict[str, Any]:
    def blocks() -> list[list[Block]]:
        """The zones of each layer: a full sink, if there is one, and a recent block with room
        for all calls.
        """
        counts = [*zones[:-1], 0]
        return [
            [
                Block(*(jnp.zeros((B, K, n, D), "bfloat16") for _ in "kv"), jnp.full(B, count))
                for n, count in both
            ]
            for both in [list(zip(zones, counts, strict=True))] * LAYERS
        ]

    def by(implementation: ops.Implementation) -> tuple[float, list[list[Block]], float]:
        def step(
            layers: list[list[Block]], k: Array, v: Array, active: Array
        ) -> tuple[Array, list[list[Block]]]:
            lost, after = jnp.zeros(B, bool), []
            for each in layers:
                each, lost = ops.put_token(
                    each, k, v, active, lost, implementation=implementation
                )
                after.append(each)
            return lost, after

        took, _ = clock(
            jax.jit(step, donate_argnums=0), blocks(), *token, jnp.ones(B, bool), calls=10
        )
        return (
            took.us / LAYERS,
            jax.jit(step)(blocks(), *token, jnp.ones(B, bool))[1],
            (took.kernels or 0) / LAYERS,
        )

    token = [jax.random.normal(jax.random.key(i), (B, K, 1, D), "bfloat16") for i in range(2)]
    (kernel, got, launches), (xla, want, others) = by("mosaic"), by("xla")
    if not all(
        bool(jnp.all(a == b))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ):
        raise SystemExit("put_token: the kernel and the reference differ")
    sizes = {
        "B": B,
        "K": K,
        "zones": list(zones),
        "D": D,
        "kernel": kernel,
        "kernels": launches,
    }
    return {**sizes, "xla": xla, "xla kernels": others, "floor": B * K * D * 8 / bytes_per_us()}


if __name__ == "__main__":
    run(
        "put_token",
        "put_token of k, v [B, K, 1, D] into zones of so many slots, counts and flags included; kernels: launches",
        "normal random k, v; the first zone of two is full, the last has room",
        measure,
        SHAPES,
    )
