"""Device time of `route` and of its reference, in the shapes of Qwen3-30B-A3B and gpt-oss-20b:
`python benchmarks/route.py`, on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.project import route

SHAPES = (2048, 128, 8), (2880, 32, 4)  # channels, experts, experts of a token
N = 16  # calls with weights of their own


def measure(sweep: Sweep, channels: int, experts: int, k: int) -> dict[str, Any]:
    keys, how = jax.random.split(jax.random.key(0), 2 * N + 1), {"k": k, "eps": 1e-6, "offset": False}
    rows = [jax.random.normal(key, (channels,), jnp.bfloat16) for key in keys[:N]]
    kernels = [jax.random.normal(key, (experts, channels), jnp.bfloat16) for key in keys[N:-1]]
    scale = jax.random.normal(keys[-1], (channels,), jnp.bfloat16)

    def kernel(_: Any) -> Any:
        one = jax.jit(partial(route.route, bias=None, **how))
        return lambda rows, kernels, scale: [one(x, scale, w) for x, w in zip(rows, kernels, strict=True)]

    def reference(rows: list[Array], kernels: list[Array], scale: Array) -> Any:
        one = partial(ops.route, bias=None, **how, normalised=True, implementation="xla")
        return [one(x, scale, w) for x, w in zip(rows, kernels, strict=True)]

    def error(got: Any, want: Any) -> float:
        """The largest difference of shares, or the number of experts that differ."""
        pairs = [(a, b) for one, other in zip(got, want, strict=True) for a, b in zip(one[1:], other[1:], strict=True)]
        return float(max(jnp.max(jnp.abs(a - b)) for a, b in pairs))

    args, moved = (rows, kernels, scale), 2.0 * channels * experts
    row = sweep("route", kernel, reference, args, configs=[None], error=error, most=1e-3, moved=moved, n=N)
    return {"channels": channels, "experts": experts, "k": k, **row}


if __name__ == "__main__":
    run(
        "route",
        "route of a row of `channels` to k of `experts`",
        "normal random numbers",
        measure,
        SHAPES,
        quick=(64, 8, 2),
    )
