"""Times of hot_places, hot_load and hot_load_float8 by rows, size of the hot set and hit rate,
and of the references.

    python benchmarks/hot_pages.py [--cases 1x8192,16x4096] [--hits 1,0.9] [--blocks 0,32] \\
        [--out FOLDER]

Every step needs `N` tokens of each row and KV head, a share `hits` of them in the hot set. All
kernels are compared with their references before they are timed. "kernel" is device time, and
"xla" that of the references' kernels. Rows with "float8", in a file of their own, read a
history of 8-bit floats.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels, simulated, write

from kvjax import ops
from kvjax.kernels_pallas.host import hot_float8, hot_pages
from kvjax.kernels_pallas.host.host_rows import Config
from kvjax.memory import to_host
from kvjax.stores.hot import empty_hot

K, D, N, CALLS = 8, 128, 1984, 10
PAGES = 32768
TIMES = "microseconds of device time, medians of 10 calls; floor: bytes over the bus at 50 GB/s"


def full_tables(B: int, n: int, pages: int) -> ops.HotTables:
    """Tables in which pages 0 to n - 1 are in the places of the same numbers, none used."""
    empty = empty_hot((B, K), n, pages, 1, D, jnp.bfloat16).tables
    own = jnp.arange(n, dtype=jnp.int32)
    place = empty.place.at[:, :, :n].set(own)
    return empty._replace(page=jnp.broadcast_to(own, (B, K, n)), place=place)


def device_us(call: Any, name: str) -> float:
    found = kernels(call, CALLS)
    return float(
        sum(np.median(each) * len(each) / CALLS for which, each in found if name in which)
    )


def measure(
    B: int,
    n: int,
    hits: float,
    blocks: Sequence[int],
    wanted: int = N,
    pages: int = PAGES,
    *,
    float8: bool = False,
) -> dict[str, Any]:
    rng, there = np.random.default_rng(0), round(hits * wanted)
    index = np.stack(
        [
            np.r_[rng.permutation(n)[:there], n + rng.permutation(pages - n)[: wanted - there]]
            for _ in range(B * K)
        ]
    )
    index = jnp.asarray(rng.permuted(index, axis=1).reshape(B, K, wanted), jnp.int32)
    found, tables = jnp.full((B, K), wanted, jnp.int32), full_tables(B, n, pages)
    places = jax.jit(
        lambda tables, index, found: hot_pages.hot_places(tuple(tables), index, found)
    )
    by_hand = jax.jit(partial(ops.hot_places, implementation="xla"))
    want, at = by_hand(tables, index, found)
    for a, b in zip(
        jax.tree.leaves(places(tables, index, found)), jax.tree.leaves((want, at)), strict=True
    ):
        np.testing.assert_array_equal(a, b)

    piece = jax.random.normal(jax.random.key(0), (1, K, 256, 2, 1, D), jnp.bfloat16)
    kernel, op = hot_pages.hot_load, ops.hot_load
    if float8:
        piece = jax.lax.bitcast_convert_type(piece.astype(jnp.float8_e4m3fn), jnp.uint8)
        kernel, op = hot_float8.hot_load_float8, ops.hot_load_float8
    x = to_host(jnp.tile(piece, (B, 1, pages // 256, 1, 1, 1)))
    zones = tuple(jnp.zeros((B, K, n, D), jnp.bfloat16) for _ in range(2))
    load_by_hand = jax.jit(partial(op, implementation="xla"))
    args = x, zones, want.page, want.used, at
    by_blocks = {}
    for number in blocks:
        load = jax.jit(partial(kernel, config=Config(ahead=4, blocks=number)))
        for a, b in zip(load(*args), load_by_hand(*args), strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16)
            )
        by_blocks[number] = device_us(lambda load=load: load(*args), "kvjax_hot_load")
    return {
        "float8": float8,
        "B": B,
        "n": n,
        "hits": hits,
        "hot_places": device_us(lambda: places(tables, index, found), "kvjax_hot_places"),
        "hot_places_xla": device_us(lambda: by_hand(tables, index, found), ""),
        "hot_load": by_blocks[0],
        "hot_load_xla": device_us(lambda: load_by_hand(*args), ""),
        "floor_load": B * K * (wanted - there) * 2 * D * x.dtype.itemsize / 50e3,
        "hot_load by blocks": by_blocks,
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    texts: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument(
        "--cases", type=texts, default=["1x4096", "1x8192", "16x4096"], help="rows x places"
    )
    parser.add_argument(
        "--hits", type=texts, default=["1", "0.9", "0.5", "0"], help="shares of the tokens"
    )
    blocks = "blocks that take turns in a load; 0: one for each piece"
    parser.add_argument(
        "--blocks", type=texts, default=["0", "32", "64", "128", "256"], help=blocks
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder of the two files",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small case in the simulator; nothing is written"
    )
    given = parser.parse_args(args)
    if "0" not in given.blocks:
        parser.error(
            f"--blocks {','.join(given.blocks)}: include 0, with which the others are compared"
        )
    if given.quick:
        with simulated():
            for float8 in (False, True):
                print(measure(1, 40, 0.5, (0, 2), wanted=16, pages=256, float8=float8))
        return
    rows: list[dict[str, Any]] = []
    for float8, case, hits in itertools.product((False, True), given.cases, given.hits):
        B, n = map(int, case.split("x"))
        rows.append(
            measure(B, n, float(hits), [int(number) for number in given.blocks], float8=float8)
        )
        print(
            " | ".join(
                f"{x:.4g}" if isinstance(x, float) else str(x) for x in rows[-1].values()
            ),
            flush=True,
        )
        what = f"hot_places and hot_load: N = {N} tokens for each of {K} heads, n places, D = {D}, bf16"
        about = "random pages, hits and misses in random order; normal random values"
        of_file = [row for row in rows if row["float8"] == float8]
        write(
            given.out.resolve() / f"{'hot_float8' if float8 else 'hot_pages'}.json",
            what,
            about,
            of_file,
            TIMES,
        )


if __name__ == "__main__":
    main()
