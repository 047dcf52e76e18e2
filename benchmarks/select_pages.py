"""Device time from a query to its pages by their boxes: of select_pages' two kernels by block
sizes, of score_pages with top_k_grouped, and of the references.

    python benchmarks/select_pages.py

on a GPU. "scores" and "choice" are the kernels of the default. Each call selects from several
sets of pages, at most `MOST`, which together have twice the size of the L2 cache, so that they
come from device memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import score_pages
from device_time import device_time, is_simulated
from jax import Array
from sweep import Sweep, repeats, run

from kvjax import ops
from kvjax.kernels_pallas.select import select_pages
from kvjax.kernels_pallas.select.select_pages import Config, config_for
from kvjax.numerics.partial import Logits, attention_logits
from kvjax.numerics.selection import (
    GroupReduce,
    PackedSelection,
    Selection,
    reduce_scores,
    unpack,
)
from kvjax.ops import Implementation

SHAPES = (  # B, K, G, pages, tokens of a page, pending pages, k, D, group_reduce
    *((1, 8, 4, P, 16, 16, 126, 128, "mean_softmax") for P in (8192, 2048, 512, 65536)),
    (8, 8, 4, 2048, 16, 16, 126, 128, "mean_softmax"),
    (8, 8, 4, 8192, 16, 16, 126, 128, "mean_softmax"),
    (1, 8, 4, 4096, 32, 1, 56, 128, "mean_softmax"),
    (1, 8, 4, 1024, 32, 1, 56, 128, "mean_softmax"),
    (1, 8, 4, 8192, 16, 16, 126, 128, "mean_score"),
    (1, 8, 8, 8192, 16, 16, 126, 64, "mean_softmax"),
)
MOST = 16  # sets of pages; for 8192 tokens and fewer, L2 holds all of them
Waiting = tuple[Array, Array, Array]


def inputs(B: int, K: int, G: int, P: int, unit: int, pending: int, D: int, n: int) -> Any:
    q, low, high = score_pages.inputs(B, K, G, P, D, "bfloat16", n)
    keys = jax.random.normal(jax.random.key(9), (B, K, pending * unit, D), "bfloat16")
    none, full = jnp.zeros(B, jnp.int32), jnp.full(B, P * unit, jnp.int32)
    return (
        q.astype(jnp.float32),
        low,
        high,
        (none, full),
        (keys, none, jnp.full(B, pending * unit, jnp.int32)),
    )


def measure(
    sweep: Sweep,
    B: int,
    K: int,
    G: int,
    P: int,
    unit: int,
    pending: int,
    k: int,
    D: int,
    group_reduce: GroupReduce,
) -> dict[str, Any]:
    by_kernels: Implementation
    moved, scale, pending_slots = B * K * (P * (4 * D + 8 * G) + 4 * k), D**-0.5, pending * unit
    n, by_kernels = (1, "xla") if is_simulated() else (min(repeats(moved), MOST), "mosaic")
    args = jax.jit(inputs, static_argnums=range(8))(B, K, G, P, unit, pending, D, n)

    def kernel(config: Config | None) -> Any:
        @jax.jit
        def one(q: Array, low: Array, high: Array, span: Any, late: Waiting) -> Selection:
            how: dict[str, Any] = {
                "unit": unit,
                "scale": scale,
                "pending_slots": pending_slots,
                "config": config,
            }
            found = select_pages.select_pages(
                q, low, high, span, late, k, group_reduce, k, **how
            )
            return unpack(PackedSelection(*found))

        return lambda q, *corners_and: each(one, q, *corners_and)

    def each(one: Any, q: Array, low: list[Array], high: list[Array], *rest: Any) -> list[Any]:
        return [one(q, *corners, *rest) for corners in zip(low, high, strict=True)]

    def scored(
        implementation: Implementation, q: Array, low: Array, high: Array, late: Waiting
    ) -> list[Any]:
        """Scores of pages and of pending pages, all valid."""
        exact = attention_logits(q, late[0], Logits(scale)).reshape(B, K, G, pending, unit)
        stored = ops.score_pages(
            q, low, high, logits=Logits(scale), implementation=implementation
        )
        return [
            (s, jnp.ones((B, 1, 1, s.shape[-1]), bool))
            for s in (stored, jnp.max(exact, axis=-1))
        ]

    def by(implementation: Implementation) -> Any:
        """score_pages and top_k_grouped, and XLA's kernels around them."""

        @jax.jit
        def one(q: Array, low: Array, high: Array, span: Any, late: Waiting) -> Selection:
            parts = scored(implementation, q, low, high, late)
            return ops.top_k_grouped(parts, group_reduce, k, implementation=implementation)

        return lambda q, *corners_and: each(one, q, *corners_and)

    @jax.jit
    def ranks(q: Array, low: Array, high: Array, span: Any, late: Waiting) -> Array:
        return reduce_scores(scored(by_kernels, q, low, high, late), group_reduce)

    ranked = each(ranks, *args)

    def error(got: list[Selection], _: list[Selection]) -> float:
        """The largest difference of the ranks of the selected pages from the highest, in order:
        pages whose ranks differ by rounding may be swapped."""
        worst = 0.0
        for rank, one in zip(ranked, got, strict=True):
            ours = jnp.sort(jnp.take_along_axis(rank, one.slots, axis=-1), axis=-1)
            highest = jnp.sort(jax.lax.top_k(rank, k)[0], axis=-1)
            worst = max(
                worst,
                float(jnp.max(jnp.abs(ours - highest)))
                if bool(jnp.all(one.valid))
                else float("inf"),
            )
        return worst

    default = config_for(B * K, 1, P + pending)
    configs = [default, *(replace(default, blocks=blocks) for blocks in (2, 4, 8))]
    configs += [replace(default, tiles=2), replace(default, warpgroups=2)]
    row = sweep(
        "select_pages",
        kernel,
        by(by_kernels),
        args,
        configs=configs,
        error=error,
        most=1e-3,
        moved=moved,
        n=n,
    )
    row["xla"] = device_time(by("xla"), *args, calls=3)[0] / n
    total, apart = device_time(by(by_kernels), *args, calls=10)
    every = device_time(kernel(None), *args, calls=10)[1]
    kernels = ("kvjax_select_pages_score", "kvjax_select_pages")
    scores, both = (
        sum(us for name, us in every.items() if which in name) / n for which in kernels
    )
    sizes = {
        "B": B,
        "K": K,
        "G": G,
        "P": P,
        "unit": unit,
        "W": pending,
        "k": k,
        "D": D,
        "group_reduce": group_reduce,
    }
    two = sum(us for name, us in apart.items() if "kvjax" in name) / n
    times = {
        "scores": scores,
        "choice": both - scores,
        "score_pages and top_k_grouped": two,
        "with xla": total / n,
    }
    return {**sizes, **times, **row}


if __name__ == "__main__":
    run(
        "select_pages",
        "select_pages of q f32[B, K, G, D], the corners of P pages of `unit` tokens, and keys of W pending pages; "
        "config: blocks x unroll x tiles x warpgroups; score_pages and top_k_grouped: their kernels, and with those of "
        "XLA around them",
        "normal random corners, keys and queries; all valid",
        measure,
        SHAPES,
        quick=(1, 1, 2, 21, 16, 2, 7, 64, "mean_softmax"),
    )
