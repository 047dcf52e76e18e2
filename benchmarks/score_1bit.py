"""Device time of score_1bit, kernel and reference, beside the floor: `python benchmarks/score_1bit.py`, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from device_time import BYTES_PER_US, device_time, write

from kvjax import ops
from kvjax.quant import OneBit, quantize_1bit

SHAPES = (  # B, K, G, S, D, group, dtype of the scales
    *((1, 8, 4, S, 128, 32, "bfloat16") for S in (8192, 32768, 131072, 1 << 20)),
    *((B, 8, 4, 32768, 128, 32, "bfloat16") for B in (2, 8)),
    (1, 8, 4, 131072, 128, 64, "bfloat16"),
    (1, 8, 4, 131072, 128, 32, "float16"),
    (1, 8, 1, 131072, 128, 32, "bfloat16"),
    (1, 8, 8, 131072, 128, 32, "bfloat16"),
    (1, 8, 4, 131072, 64, 32, "bfloat16"),
    (1, 8, 8, 131072, 64, 32, "bfloat16"),
)


def index(B: int, K: int, S: int, D: int, group: int, dtype: str) -> OneBit:
    keys, size = (jax.random.key(i) for i in range(2))
    k = jax.random.normal(keys, (B, K, S, D), jnp.bfloat16) * (1 + 3 * jax.random.uniform(size, (D,), jnp.bfloat16))
    return quantize_1bit(k, group, jnp.dtype(dtype))


def main() -> None:
    rows = []
    for B, K, G, S, D, group, dtype in SHAPES:
        ix = jax.jit(index, static_argnums=range(6))(B, K, S, D, group, dtype)
        q = jax.random.normal(jax.random.key(2), (B, K, G, D))
        scale = D**-0.5
        row = {"B": B, "K": K, "G": G, "S": S, "D": D, "group": group, "scales": dtype}
        run = {
            name: lambda q, ix, name=name, scale=scale: ops.score_1bit(q, ix, scale=scale, implementation=name)
            for name in ("mosaic", "xla")
        }
        got, want = (jax.jit(f)(q, ix) for f in run.values())
        row["error"] = f"{float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)):.1e}"
        _, kernels = device_time(run["mosaic"], q, ix)
        row["kernel"] = next(time for name, time in kernels.items() if "kvjax_score_1bit" in name)
        row["mosaic"] = sum(kernels.values())  # with the kernel that prepares the queries
        row["xla"] = device_time(run["xla"], q, ix, calls=3)[0]
        row["floor"] = B * K * S * (D / 8 + 4 * D / group + 4 * G) / BYTES_PER_US
        rows.append(row)
        if len(rows) == 1:
            print(" | ".join(row))
        print(" | ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)
    what = "score_1bit of q f32[B, K, G, D] with keys of S tokens; error: ||mosaic - xla|| / ||xla||"
    write("score_1bit.json", what, "normal random keys, channels 1 to 4 times as large, and queries", rows)


if __name__ == "__main__":
    main()
