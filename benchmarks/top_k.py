"""Device time of top_k, kernel and reference, beside the floor: `python benchmarks/top_k.py`, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from device_time import BYTES_PER_US, device_time, write

from kvjax import ops

SHAPES = (
    *((8, U, k) for U, k in ((4096, 512), (8192, 1024), (32768, 1024), (32768, 2048))),
    *((8, 131072, k) for k in (256, 1024, 2048, 4096)),
    *((8, 1 << 20, k) for k in (1024, 2048, 4096)),
    *((rows, 131072, 2048) for rows in (1, 16, 32)),
    (64, 32768, 2048),
)
INPUTS = ("normal", "softmax", "equal", "rising", "half valid")


def scores_of(kind: str, rows: int, U: int) -> tuple[jax.Array, jax.Array]:
    normal = jax.random.normal(jax.random.key(0), (rows, U))
    valid = jnp.ones((rows, U), bool)
    if kind == "softmax":
        return jax.nn.log_softmax(2 * normal, axis=-1), valid
    if kind == "equal":
        return jnp.zeros((rows, U)), valid
    if kind == "rising":
        return jnp.sort(normal, axis=-1), valid
    return normal, (jnp.arange(U)[None] < U // 2) & valid if kind == "half valid" else valid


def main() -> None:
    rows = []
    for n, U, k in SHAPES:
        for kind in INPUTS if (n, U, k) in ((8, 131072, 2048), (8, 1 << 20, 2048)) else INPUTS[:1]:
            args = jax.jit(scores_of, static_argnums=(0, 1, 2))(kind, n, U)
            row = {"rows": n, "U": U, "k": k, "scores": kind}
            _, kernels = device_time(lambda s, v, k=k: ops.top_k(s, v, k, implementation="mosaic"), *args)
            row["kernel"] = next(time for name, time in kernels.items() if "kvjax_top_k" in name)
            row["mosaic"] = sum(kernels.values())  # with the kernels that make keys of scores, and split the result
            row["xla"] = device_time(lambda s, v, k=k: ops.top_k(s, v, k, implementation="xla"), *args, calls=5)[0]
            row["floor"] = n * (4 * U + 4 * k) / BYTES_PER_US
            rows.append(row)
            if len(rows) == 1:
                print(" | ".join(row))
            print(" | ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)
    write("top_k.json", "top_k of scores f32[rows, U]", "normal random scores, or as `scores` says", rows)


if __name__ == "__main__":
    main()
