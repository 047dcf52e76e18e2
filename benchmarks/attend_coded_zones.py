"""Device time of attend_coded_zones by block sizes, and of its reference: `python
benchmarks/attend_coded_zones.py`, on a GPU.

The calls are those of `attend_zones.py`, over codes of the same history; "exact" is the time of
`attend_zones` there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from attend_slots import CONFIGS
from attend_zones import inputs
from device_time import device_time
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_coded_zones
from kvjax.kernels_pallas.attend.attend_slots import config_for
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import sizes_of, turned
from kvjax.numerics.selection import PackedSelection
from kvjax.stores import TurboQuant

SHAPES = (  # B, K, G, H, S, R, local, sink, D, M, bits of keys, of values
    (1, 8, 4, 1, 131072, 256, 1, 0, 128, 2047, 4, 4),  # FIER's, of a budget of 2048
    (8, 8, 4, 1, 32768, 256, 1, 0, 128, 2047, 4, 4),
    (1, 8, 4, 1, 130816, 383, 128, 4, 128, 1916, 8, 4),
    (1, 8, 8, 1, 131072, 256, 1, 0, 64, 2047, 4, 4),
    (8, 8, 4, 1, 32768, 256, 1, 0, 128, 2047, 2, 2),
)


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
    *bits: int,
) -> dict[str, Any]:
    seed, scale, found = 3, D**-0.5, jnp.full((B, K, H), M, jnp.int32)
    moved = B * K * (M * (sum(bits) * D // 8 + 8) + (local + sink) * 4 * D + G * D * 2)
    n = repeats(moved)
    q, k, v, zones = jax.jit(inputs, static_argnums=range(12))(
        B, K, G, H, S, R, local, sink, D, M, "bfloat16", n
    )
    codes = jax.jit(TurboQuant(bits=bits[0], value_bits=bits[1], seed=seed).codes)(k, v)
    offset = jnp.ones((B, K, D))

    def kernel(config: Any) -> Any:
        how: dict[str, Any] = {
            "local": local,
            "scale": scale,
            "turned": turned(D, seed),
            "config": config,
        }
        one = jax.jit(
            partial(
                attend_coded_zones.attend_coded_zones,
                centres=tuple(map(sizes_of, codes)),
                **how,
            )
        )
        return lambda q, codes, offset, zones: [
            one(q, *codes, offset, slots, found, *spans) for slots, *spans in zones
        ]

    def reference(q: Array, codes: Any, offset: Array, zones: Any) -> list[Array]:
        one = jax.jit(
            partial(
                ops.attend_coded_zones,
                local=local,
                seed=seed,
                logits=Logits(scale),
                implementation="xla",
            )
        )
        return [
            one(q, *codes, offset, PackedSelection(slots, found), *spans)
            for slots, *spans in zones
        ]

    def exact(q: Array, k: Array, v: Array, zones: Any) -> list[Array]:
        one = jax.jit(partial(ops.attend_zones, local=local, logits=Logits(scale)))
        return [one(q, k, v, PackedSelection(slots, found), *spans) for slots, *spans in zones]

    def error(got: Any, want: Any) -> float:
        pairs = ((a.astype(float), b.astype(float)) for a, b in zip(got, want, strict=True))
        return float(max(jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs))

    whole = device_time(exact, q, k, v, zones, calls=10)[0] / n
    args = q, codes, offset, zones
    configs = [config_for(B * K * H, M + local + sink, D), *CONFIGS]
    row = sweep(
        "attend_coded_zones",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=2e-2,
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
    return {**sizes, "key_bits": bits[0], "value_bits": bits[1], "exact": whole, **row}


if __name__ == "__main__":
    run(
        "attend_coded_zones",
        "attend_coded_zones of q [B, K, G, D] over M of S + R - local slots for each of H, the last of R and a sink; "
        "config: blocks x warpgroups; exact: attend_zones over keys and values in bfloat16",
        "normal random q, k, v; slots unique, spread, in random order; all are read",
        measure,
        SHAPES,
        swept=2,
    )
