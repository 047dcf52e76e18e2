"""Device time of select_4bit by block sizes, and of its reference: `python
benchmarks/select_4bit.py`, on a GPU.

Each call selects from several lists of candidates, which together read twice the size of the L2
cache, as in `benchmarks/rerank.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rerank import inputs
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.select import select_4bit
from kvjax.kernels_pallas.select.select_4bit import Config, config_for
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import SUBSPACE, Directions, lloyd_max, turned
from kvjax.numerics.selection import Candidates, PackedSelection

SHAPES = (  # B, K, G, S, D, M, pending keys, k
    (1, 8, 1, 131072, 128, 13108, 256, 1916),
    (1, 8, 1, 32768, 128, 6000, 256, 1916),
    (1, 8, 1, 8192, 128, 2500, 256, 1916),
    (1, 8, 1, 1 << 20, 128, 104858, 256, 1916),
    (8, 8, 1, 32768, 128, 6000, 256, 1916),
    (1, 8, 4, 131072, 128, 13108, 256, 1916),
    (1, 8, 1, 131072, 64, 13108, 256, 1916),
)


def measure(
    sweep: Sweep, B: int, K: int, G: int, S: int, D: int, M: int, W: int, k: int
) -> dict[str, Any]:
    moved = B * K * (G * (M * (3 * D // 4 + 8) + 8 * k) + 2 * D * W)
    n = repeats(moved)

    @jax.jit
    def make() -> tuple[Array, Directions, list[PackedSelection], Array]:
        q, keys, slots = inputs(B, K, G, S, D, M, n)
        found, late = (
            jnp.full((B, K, G), M, jnp.int32),
            jax.random.normal(jax.random.key(6), (B, K, W, D)),
        )
        return q, keys, [PackedSelection(s, found) for s in slots], late.astype("bfloat16")

    args = make()

    def kernel(config: Config) -> Any:
        centres = tuple(lloyd_max(SUBSPACE)[1].tolist())
        run = partial(
            select_4bit.select_4bit, centres=centres, turned=turned(D, 0), config=config
        )
        one = jax.jit(partial(run, room=k, scale=D**-0.5, pending_slots=W))  # lowered once

        def choose(
            q: Array, keys: Directions, lists: list[PackedSelection], late: Array
        ) -> list[PackedSelection]:
            return [PackedSelection(*one(q, *keys, some, (late, 0, W), k)) for some in lists]

        return choose

    def reference(
        q: Array, keys: Directions, lists: list[PackedSelection], late: Array
    ) -> list[PackedSelection]:
        among = Candidates(
            span=(0, jnp.asarray(S)), pending=(late, 0, W), k=k, k_max=k, pending_slots=W
        )
        run = partial(ops.select_4bit, seed=0, logits=Logits(D**-0.5), implementation="xla")
        return [run(q, keys, some, among) for some in lists]

    def error(got: list[PackedSelection], want: list[PackedSelection]) -> float:
        """The largest share of a list's selection that is not the reference's: near ties in
        f16.
        """
        rows = [
            jnp.sort(p.slots.reshape(-1, k), axis=-1)
            for both in zip(got, want, strict=True)
            for p in both
        ]
        same = [jax.vmap(jnp.isin)(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return float(max(1 - jnp.mean(s) for s in same))

    default = config_for(B * K * G, M, W)
    configs = [default, *(replace(default, blocks=b, unroll=4) for b in (2, 4, 8))]
    configs += [replace(default, warpgroups=n) for n in (1, 2, 4, 8)]
    row = sweep(
        "select_4bit",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=5e-3,
        moved=moved,
        n=n,
    )
    return {"B": B, "K": K, "G": G, "S": S, "D": D, "M": M, "W": W, "k": k, **row}


if __name__ == "__main__":
    run(
        "select_4bit",
        "select_4bit of q f32[B, K, G, D], k selected of M of S keys for each of G heads and W pending keys; error: "
        "share of a list's selection that is not the reference's; config: blocks x unroll x warpgroups",
        "normal random q and pending keys, uniform random codes and weights; slots unique, spread, rising",
        measure,
        SHAPES,
        swept=3,
    )
