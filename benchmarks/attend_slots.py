"""Device time of attend_slots by block sizes, and of its reference: `python
benchmarks/attend_slots.py`, on a GPU.

Each call attends with several selections in turn, which together read twice the size of the L2
cache, so that rows come from device memory, as in a model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_slots
from kvjax.kernels_pallas.attend.attend_slots import Config
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Selection

SHAPES = (  # B, K, G, H, S, D, M, dtype
    (1, 8, 4, 1, 131072, 128, 2048, "bfloat16"),
    *((1, 8, 4, 1, 131072, 128, M, "bfloat16") for M in (512, 1024, 4096)),
    (1, 8, 4, 1, 1 << 20, 128, 2048, "bfloat16"),
    (8, 8, 4, 1, 32768, 128, 2048, "bfloat16"),
    (1, 8, 8, 1, 131072, 64, 2048, "float16"),
    (1, 8, 4, 4, 131072, 128, 512, "bfloat16"),
)
CONFIGS = [Config(blocks, warpgroups) for blocks in (2, 4, 8) for warpgroups in (1, 2)]
WIDE = [  # of heads of more than 128, which take more shared memory
    *(Config(blocks, 2, tile=16, copies=copies) for blocks in (4, 8) for copies in (4, 32)),
    *(Config(blocks, 1, copies=4) for blocks in (4, 8)),
    *(Config(8, 1, tile=16, copies=copies) for copies in (4, 8, 16)),
    Config(4, 2, tile=16, copies=8),
    *(Config(blocks, 1, cluster=0, tile=16, copies=4) for blocks in (8, 12, 16, 32)),
    *(Config(blocks, 2, cluster=0, tile=16, copies=4) for blocks in (8, 16)),
]


def configs_of(D: int) -> list[Config]:
    return CONFIGS if D <= 128 else WIDE


def inputs(
    B: int, K: int, G: int, H: int, S: int, D: int, M: int, dtype: str, n: int
) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, K, G, D), dtype)
    k, v = (jax.random.normal(key, (B, K, S, D), dtype) for key in keys[1:3])
    # One slot from each of M equal parts of the store, in random order: unique, and spread.
    slots = jax.random.randint(keys[3], (n, B, K, H, M), 0, S // M) + jnp.arange(M) * (S // M)
    return q, k, v, list(jax.random.permutation(keys[3], slots, axis=-1, independent=True))


def measure(
    sweep: Sweep, B: int, K: int, G: int, H: int, S: int, D: int, M: int, dtype: str
) -> dict[str, Any]:
    moved = B * K * H * M * (4 * D + 4) + B * K * G * (D + 1) * 4
    n, scale, valid = repeats(moved), D**-0.5, jnp.ones((B, K, H, M), bool)

    def kernel(config: Config) -> Any:
        one = jax.jit(
            partial(attend_slots.attend_slots, scale=scale, config=config)
        )  # lowered once
        return lambda q, k, v, slots: [one(q, k, v, s, valid) for s in slots]

    def reference(q: Array, k: Array, v: Array, slots: list[Array]) -> list[Any]:
        return [
            ops.attend_slots(
                q, k, v, Selection(s, valid), logits=Logits(scale), implementation="xla"
            )
            for s in slots
        ]

    def error(got: Any, want: Any) -> float:
        each = [
            max(
                jnp.linalg.norm(out - w.out) / jnp.linalg.norm(w.out),
                jnp.max(jnp.abs(lse - w.lse)),
            )
            for (out, lse), w in zip(got, want, strict=True)
        ]
        return float(max(each))

    args = jax.jit(inputs, static_argnums=range(9))(B, K, G, H, S, D, M, dtype, n)
    configs = [attend_slots.config_for(B * K * H, M, D), *configs_of(D)]
    row = sweep(
        "attend_slots",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=1e-2,
        moved=moved,
        n=n,
    )
    return {"B": B, "K": K, "G": G, "H": H, "S": S, "D": D, "M": M, "dtype": dtype, **row}


if __name__ == "__main__":
    run(
        "attend_slots",
        "attend_slots of q [B, K, G, D] over M of S slots for each of H; config: blocks x warpgroups x "
        "cluster x tile x copies",
        "normal random q, k, v; slots unique, spread, in random order, all valid",
        measure,
        SHAPES,
    )
