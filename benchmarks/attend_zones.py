"""Device time of attend_zones by block sizes, and of its references: `python
benchmarks/attend_zones.py`, on a GPU.

"apart" is the reference around the kernel attend_slots, which a step runs where this kernel is
not used. Each call attends with several selections, recent blocks and sinks in turn, which
together read twice the size of the L2 cache, so that rows come from device memory, as in a
model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from attend_slots import configs_of
from device_time import device_time
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_zones
from kvjax.numerics.partial import Logits, Span
from kvjax.numerics.selection import PackedSelection

SHAPES = (  # B, K, G, H, S, R, local, sink, D, M, dtype
    (1, 8, 4, 1, 131072, 256, 1, 0, 128, 2047, "bfloat16"),  # FIER's, of a budget of 2048
    (8, 8, 4, 1, 32768, 256, 1, 0, 128, 2047, "bfloat16"),
    (1, 8, 4, 1, 131056, 31, 16, 0, 128, 2032, "bfloat16"),  # Quest's
    (1, 8, 4, 1, 130816, 383, 128, 4, 128, 1916, "bfloat16"),  # ParisKV's
    (1, 8, 4, 1, 131072, 511, 256, 4, 128, 252, "bfloat16"),
    (1, 8, 8, 1, 131072, 256, 1, 0, 64, 2047, "float16"),
)


def inputs(
    B: int,
    K: int,
    G: int,
    H: int,
    S: int,
    R: int,
    local: int,
    sink: int,
    D: int,
    M: int,
    dtype: str,
    n: int,
) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def pair(*shape: int) -> list[Array]:
        return [jax.random.normal(next(keys), (*shape, D), dtype) for _ in range(2)]

    q = jax.random.normal(next(keys), (B, K, G, D), dtype)
    k, v = pair(B, K, S)
    # One slot from each of M equal parts of store and pending tokens, in random order: unique,
    # and spread.
    apart = (S + R - local) // M
    slots = jax.random.randint(next(keys), (n, B, K, H, M), 0, apart) + jnp.arange(M) * apart
    slots = jax.random.permutation(next(keys), slots, axis=-1, independent=True)
    recents = [
        Span(k, v, jnp.full(B, R - local), jnp.full(B, R))
        for k, v in zip(*pair(n, B, K, R), strict=True)
    ]
    sinks: list[Span | None] = [None] * n
    if sink:
        sinks = [
            Span(k, v, jnp.zeros(B, int), jnp.full(B, sink))
            for k, v in zip(*pair(n, B, K, sink), strict=True)
        ]
    return q, k, v, list(zip(slots, recents, sinks, strict=True))


def measure(
    sweep: Sweep,
    B: int,
    K: int,
    G: int,
    H: int,
    S: int,
    R: int,
    local: int,
    sink: int,
    D: int,
    M: int,
    dtype: str,
) -> dict[str, Any]:
    read = M + local + sink
    moved = B * K * H * read * (4 * D + 4) + B * K * G * D * 2
    n, scale, found = repeats(moved), D**-0.5, jnp.full((B, K, H), M, jnp.int32)

    def kernel(config: Any) -> Any:
        one = jax.jit(
            partial(attend_zones.attend_zones, local=local, scale=scale, config=config)
        )  # lowered once
        return lambda q, k, v, zones: [
            one(q, k, v, slots, found, *spans) for slots, *spans in zones
        ]

    def reference(attend: Any, q: Array, k: Array, v: Array, zones: Any) -> list[Array]:
        one = jax.jit(partial(attend, local=local, logits=Logits(scale)))
        return [one(q, k, v, PackedSelection(slots, found), *spans) for slots, *spans in zones]

    def error(got: Any, want: Any) -> float:
        pairs = ((a.astype(float), b.astype(float)) for a, b in zip(got, want, strict=True))
        return float(max(jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs))

    args = jax.jit(inputs, static_argnums=range(12))(
        B, K, G, H, S, R, local, sink, D, M, dtype, n
    )
    configs = [attend_zones.config_for(B * K * H, read, D), *configs_of(D)]
    xla = partial(reference, partial(ops.attend_zones, implementation="xla"))
    apart = partial(reference, ops.attend_zones.reference)  # its parts by their kernels
    row = sweep(
        "attend_zones",
        kernel,
        xla,
        args,
        configs=configs,
        error=error,
        most=1e-2,
        moved=moved,
        n=n,
    )
    sizes = {
        "B": B,
        "K": K,
        "G": G,
        "H": H,
        "S": S,
        "R": R,
        "local": local,
        "sink": sink,
        "D": D,
        "M": M,
    }
    return {**sizes, "dtype": dtype, "apart": device_time(apart, *args, calls=10)[0] / n, **row}


if __name__ == "__main__":
    run(
        "attend_zones",
        "attend_zones of q [B, K, G, D] over M of S + R - local slots for each of H, the last of R and a sink; config: "
        "blocks x warpgroups x cluster x tile x copies",
        "normal random q, k, v; slots unique, spread, in random order; all are read",
        measure,
        SHAPES,
        swept=2,
    )
