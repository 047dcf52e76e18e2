"""Device time of attend_span by block sizes, and of its reference: `python
benchmarks/attend_span.py`, on a GPU.

A cache that fits in the L2 cache alternates with others, so that all come from device memory,
as in a model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_span
from kvjax.kernels_pallas.attend.attend_span import Config
from kvjax.numerics.partial import Logits, Span

SHAPES = (  # B, K, G, S, D, dtype, share of the slots that are attended to
    (1, 8, 4, 131072, 128, "bfloat16", 1.0),
    *((1, 8, 4, S, 128, "bfloat16", 1.0) for S in (8192, 32768, 1 << 20)),
    (8, 8, 4, 32768, 128, "bfloat16", 1.0),
    (1, 8, 4, 131072, 128, "bfloat16", 0.25),
    (1, 8, 8, 131072, 64, "float16", 1.0),
    (1, 8, 4, 65536, 256, "bfloat16", 1.0),
)
SIZES = (  # warpgroups, stages, keys; each in one wave of blocks and in two
    *((1, stages, 16) for stages in (1, 2, 3, 4, 6)),
    *((1, stages, 32) for stages in (1, 2, 3)),
    (1, 1, 64),
    *((2, stages, 16) for stages in (1, 2, 3)),
    (2, 1, 32),
    (3, 2, 16),
    (4, 1, 16),
)


def inputs(
    B: int, K: int, G: int, S: int, D: int, dtype: str, share: float, n: int
) -> tuple[Array, list[Span]]:
    keys = iter(jax.random.split(jax.random.key(0), 2 * n + 1))
    q = jax.random.normal(next(keys), (B, K, G, D), dtype)
    kept = [jax.random.normal(key, (B, K, S, D), dtype) for key in keys]
    ends = jnp.zeros(B, jnp.int32), jnp.full(B, int(S * share), jnp.int32)
    return q, [Span(k, v, *ends) for k, v in zip(kept[::2], kept[1::2], strict=True)]


def measure(
    sweep: Sweep, B: int, K: int, G: int, S: int, D: int, dtype: str, share: float
) -> dict[str, Any]:
    moved = 2 * B * K * int(S * share) * D * 2
    n, scale, rows = repeats(moved), D**-0.5, B * K

    def kernel(config: Config) -> Any:
        one = jax.jit(
            partial(attend_span.attend_span, scale=scale, config=config)
        )  # lowered once
        return lambda q, spans: [one(q, *span) for span in spans]

    def reference(q: Array, spans: list[Span]) -> list[Array]:
        return [
            ops.attend_span(q, span, logits=Logits(scale), implementation="xla")
            for span in spans
        ]

    def error(got: Any, want: Any) -> float:
        f32 = [[a.astype(jnp.float32) for a in arrays] for arrays in (got, want)]
        return float(
            max(jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in zip(*f32, strict=True))
        )

    args = jax.jit(inputs, static_argnums=range(8))(B, K, G, S, D, dtype, share, n)
    configs = [attend_span.config_for(rows, S, D)]
    for sizes in SIZES:
        at_once = attend_span.at_once(D, Config(1, *sizes))
        configs += [
            Config(max(waves * at_once // rows, 1), *sizes) for waves in (1, 2) if at_once
        ]
    row = sweep(
        "attend_span",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=1e-2,
        moved=moved,
        n=n,
    )
    return {"B": B, "K": K, "G": G, "S": S, "D": D, "dtype": dtype, "share": share, **row}


if __name__ == "__main__":
    run(
        "attend_span",
        "attend_span of q [B, K, G, D] over a share of S slots; config: blocks of a row x warpgroups x stages x keys",
        "normal random q, k and v",
        measure,
        SHAPES,
    )
