"""Device time from a query to its slots by 1-bit keys: of select_1bit's two kernels by block
sizes, of score_1bit with top_k_grouped, and of the references.

    python benchmarks/select_1bit.py

on a GPU. "scores" and "choice" are the kernels of the default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from device_time import device_time
from jax import Array
from score_1bit import index
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.select import select_1bit
from kvjax.kernels_pallas.select.select_1bit import Config, config_for
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit
from kvjax.numerics.selection import GroupReduce, PackedSelection, Selection, unpack
from kvjax.ops import Implementation

SHAPES = (  # B, K, G, S, pending units, k, D, group_reduce
    (1, 8, 4, 130816, 256, 2048, 128, "mean_softmax"),
    (1, 8, 4, 131072, 256, 2047, 128, "mean_softmax"),
    (1, 8, 4, 32512, 256, 2048, 128, "mean_softmax"),
    (1, 8, 4, 1 << 20, 256, 2048, 128, "mean_softmax"),
    (8, 8, 4, 32512, 256, 2048, 128, "mean_softmax"),
    (8, 8, 4, 130816, 256, 2048, 128, "mean_softmax"),
    (1, 8, 4, 7936, 256, 2048, 128, "mean_softmax"),
    (1, 8, 4, 130816, 256, 2048, 128, "mean_score"),
    (1, 8, 8, 130816, 256, 2048, 128, "mean_softmax"),
    (1, 8, 4, 130816, 256, 2048, 64, "mean_softmax"),
    (
        1,
        4,
        7,
        786432,
        256,
        2048,
        128,
        "mean_softmax",
    ),  # few rows: 16 blocks of each may run at once
)
Args = tuple[Array, OneBit, tuple[Array, Array], tuple[Array, Array, Array], Array]


def inputs(B: int, K: int, G: int, S: int, pending: int, k: int, D: int) -> Args:
    q, scores = (
        jax.random.normal(jax.random.key(i), (B, K, G, n)) for i, n in ((2, D), (3, pending))
    )
    none, full = jnp.zeros(B, jnp.int32), jnp.full(B, S, jnp.int32)
    ends = none, jnp.full(B, pending, jnp.int32)
    return (
        q,
        index(B, K, S, D, 32, "bfloat16"),
        (none, full),
        (scores, *ends),
        jnp.full(B, k, jnp.int32),
    )


def measure(
    sweep: Sweep,
    B: int,
    K: int,
    G: int,
    S: int,
    pending: int,
    k: int,
    D: int,
    group_reduce: GroupReduce,
) -> dict[str, Any]:
    args = jax.jit(inputs, static_argnums=range(7))(B, K, G, S, pending, k, D)

    def kernel(config: Config | None) -> Any:
        def run(q: Array, ix: OneBit, *rest: Any) -> Selection:
            packed = select_1bit.select_1bit(
                q, *ix, *rest, group_reduce, k, scale=D**-0.5, config=config
            )
            return unpack(PackedSelection(*packed))

        return run

    def by(implementation: Implementation) -> Any:
        """score_1bit and top_k_grouped, all units valid."""

        def run(q: Array, ix: OneBit, span: Any, arrived: Any, count: Array) -> Selection:
            scores = (
                ops.score_1bit(q, ix, logits=Logits(D**-0.5), implementation=implementation),
                arrived[0],
            )
            parts = [(s, jnp.ones((B, 1, 1, s.shape[-1]), bool)) for s in scores]
            return ops.top_k_grouped(parts, group_reduce, k, implementation=implementation)

        return run

    @jax.jit
    def ranks(q: Array, ix: OneBit, span: Any, arrived: Any, count: Array) -> Array:
        """Ranks of scores in f16, as the kernel keeps them, with softmax sums of the unrounded
        scores.
        """
        stored = ops.score_1bit(q, ix, logits=Logits(D**-0.5), implementation="mosaic")
        # Rounds to f16; XLA would drop a pair of conversions. Scores below 6e-5 become 0: much
        # less than `most`.
        late, kept = (jax.lax.reduce_precision(x, 5, 10) for x in (arrived[0], stored))
        half = jnp.concatenate([kept, late], axis=-1)
        if group_reduce == "mean_score":
            return jnp.mean(half, axis=2, keepdims=True)
        total = jax.nn.logsumexp(
            jnp.concatenate([stored, late], axis=-1), axis=-1, keepdims=True
        )
        return jax.nn.logsumexp(half - total, axis=2, keepdims=True)

    ranked = ranks(*args)
    highest = jnp.sort(jax.lax.top_k(ranked, k)[0], axis=-1)

    def error(got: Selection, _: Selection) -> float:
        """The largest difference of the ranks of the selected units from the highest, in order:
        units whose ranks differ by rounding may be swapped."""
        ours = jnp.sort(jnp.take_along_axis(ranked, got.slots, axis=-1), axis=-1)
        return (
            float(jnp.max(jnp.abs(ours - highest)))
            if bool(jnp.all(got.valid))
            else float("inf")
        )

    moved = B * K * (S * (D / 8 + 4 * D / 32 + 2 * 2 * G) + 4 * k)
    default = config_for(B * K, 1, S, S + pending)
    configs = [default]
    configs += [replace(default, units=units) for units in (8, 12, 14, 16)]
    configs += [replace(default, stages=stages) for stages in (2, 8)]
    configs += [replace(default, blocks=blocks, unroll=4) for blocks in (2, 4, 8)]
    configs.append(replace(default, blocks=16))
    row = sweep(
        "select_1bit",
        kernel,
        by("mosaic"),
        args,
        configs=configs,
        error=error,
        most=1e-3,
        moved=moved,
    )
    row["xla"] = device_time(by("xla"), *args, calls=3)[0]
    total, apart = device_time(by("mosaic"), *args, calls=10)
    each = device_time(kernel(None), *args, calls=10)[1]
    kernels = ("kvjax_select_1bit_score", "kvjax_select_1bit")
    scores, both = (sum(us for name, us in each.items() if which in name) for which in kernels)
    sizes = {
        "B": B,
        "K": K,
        "G": G,
        "S": S,
        "W": pending,
        "k": k,
        "D": D,
        "group_reduce": group_reduce,
        "scores": scores,
    }
    two = sum(us for name, us in apart.items() if "kvjax" in name)
    return {
        **sizes,
        "choice": both - scores,
        "score_1bit and top_k_grouped": two,
        "with xla": total,
        **row,
    }


if __name__ == "__main__":
    run(
        "select_1bit",
        "select_1bit of q f32[B, K, G, D], 1-bit keys of S tokens in groups of 32 and W pending scores; config: blocks "
        "x unroll x units x stages; score_1bit and top_k_grouped: their kernels, and with those of XLA around them",
        "normal random keys, channels 1 to 4 times as large, and queries; all valid",
        measure,
        SHAPES,
    )
