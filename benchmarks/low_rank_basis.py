"""Time and loss of several ways to find ShadowKV's basis, which the first flush of a row does
once for each layer.

    python benchmarks/low_rank_basis.py [--rows 1,8] [--calls 3] [--out FILE]

The first 1024 keys of 8 heads are rows [1024, 1024]; the basis is their 160 largest singular
directions.

    gram        eigenvectors of the Gram matrix, as `LowRank` finds them svd         the
    singular value decomposition of the rows iterations  power iterations on 192 directions of
    the Gram matrix: no decomposition larger than 192

Keys are random with singular values that fall as 1 / (1 + i / 40). excess: by how much the
error of the keys is larger than the least error that any basis of this rank has. Times are by
the host's clock, without transfers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from layers import out_of, save, show


def gram(rows: Array, rank: int) -> Array:
    """f32[B, rank, C] of rows f32[B, S, C]."""
    _, vectors = jnp.linalg.eigh(products(rows))
    return jnp.swapaxes(vectors[:, :, -rank:], 1, 2)


def svd(rows: Array, rank: int) -> Array:
    return jnp.linalg.svd(rows, full_matrices=False)[2][:, :rank]


def iterations(rows: Array, rank: int, *, spare: int = 32, rounds: int = 8) -> Array:
    square = products(rows)
    start = jax.random.normal(
        jax.random.key(0), (square.shape[0], square.shape[1], rank + spare)
    )

    def step(_: int, found: Array) -> Array:
        return orthonormal(jnp.einsum("bij,bjr->bir", square, found, precision="highest"))

    found = lax.fori_loop(0, rounds, step, orthonormal(start))
    inner = jnp.einsum("bir,bij,bjs->brs", found, square, found, precision="highest")
    _, turn = jnp.linalg.eigh(inner)
    return jnp.einsum("bir,brs->bsi", found, turn[:, :, -rank:], precision="highest")


def products(rows: Array) -> Array:
    return jnp.einsum("bsi,bsj->bij", rows, rows, precision="highest")


def orthonormal(found: Array) -> Array:
    """Columns of f32[B, C, r] made orthonormal by Cholesky, twice for the rounding of the
    first.
    """
    for _ in range(2):
        inner = jnp.einsum("bir,bis->brs", found, found, precision="highest")
        lower = jnp.linalg.cholesky(inner)
        found = jnp.swapaxes(
            lax.linalg.triangular_solve(
                lower, jnp.swapaxes(found, 1, 2), left_side=True, lower=True
            ),
            1,
            2,
        )
    return found


WAYS: dict[str, Callable[[Array, int], Array]] = {
    "gram": gram,
    "svd": svd,
    "iterations": iterations,
}


def random_rows(batch: int, tokens: int, channels: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    falling = 1 / (1 + np.arange(channels) / 40)
    directions = np.linalg.qr(rng.normal(size=(channels, channels)))[0]
    return (rng.normal(size=(batch, tokens, channels)) * falling @ directions.T).astype(
        np.float32
    )


def error(rows: np.ndarray, basis: np.ndarray) -> float:
    rest = rows - np.einsum("bsr,brc->bsc", np.einsum("bsc,brc->bsr", rows, basis), basis)
    return float(np.linalg.norm(rest) / np.linalg.norm(rows))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8]
    )
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument(
        "--out",
        type=Path,
        help="default: results/low_rank_basis.json; with --quick nothing is written",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    given = parser.parse_args(args)
    tokens, channels, rank = (64, 48, 10) if given.quick else (1024, 1024, 160)
    what = (
        f"ms to find {rank} directions of [{tokens}, {channels}] f32 for each of some rows; "
        "excess over the least error"
    )
    for batch in given.rows:
        rows = random_rows(batch, tokens, channels)
        least = error(
            rows, np.linalg.svd(rows.astype(np.float64), full_matrices=False)[2][:, :rank]
        )
        for name, way in WAYS.items():
            run, given_rows = jax.jit(way, static_argnums=1), jnp.asarray(rows)
            basis, times = jax.block_until_ready(run(given_rows, rank)), []
            for _ in range(given.calls):
                start = time.perf_counter()
                jax.block_until_ready(run(given_rows, rank))
                times.append(1e3 * (time.perf_counter() - start))
            found = error(rows, np.asarray(basis, np.float64))
            row = {
                "way": name,
                "rows": batch,
                "ms": statistics.median(times),
                "error": found,
                "excess": found / least - 1,
            }
            show(row)
            save(out_of(given, "low_rank_basis.json"), what, [row], ("way", "rows", "backend"))


if __name__ == "__main__":
    main()
