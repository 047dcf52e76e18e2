"""Times of host_rows and host_append by block sizes, and of their references.

    python benchmarks/host_rows.py [host_rows | host_append | footprint] [--out FOLDER]

Each call does its operation `REPEATS` times, on different rows. "kernel" is device time. The
host's CPU does a part of a gather in host memory, which a profile of the GPU does not show: so
"clock" and "xla" are of the host's clock, and include the launch of the programs. "footprint"
reads the same number of rows from larger and larger stores, in random and in rising order and
with fewer blocks, each time from another of `STORES` stores, and writes
host_rows_footprint.json.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import kernels, simulated, write
from sweep import label_of

from kvjax import ops
from kvjax.kernels_pallas.host import host_append, host_rows
from kvjax.kernels_pallas.host.host_rows import Config
from kvjax.memory import host_zeros, to_device, to_host

BUS_BYTES_PER_US = 50e3  # of PCIe 5 x16, as seen for copies from pinned memory
REPEATS = 8
D = 128
READS = (  # B, K, pages, pages read of a row, tokens of a page
    (1, 8, 131072, 512, 1),
    (1, 8, 131072, 2048, 1),
    (8, 8, 16384, 512, 1),
    (1, 8, 4096, 64, 32),
    (2, 8, 1024, 56, 32),
)
WRITES = (  # B, K, pages, pages written of a row, tokens of a page
    (1, 8, 131072, 32, 1),
    (8, 8, 16384, 32, 1),
    (1, 8, 4096, 8, 32),
)
READ_CONFIGS = [
    Config(4, 2, 32),
    Config(),
    *(Config(ahead, n) for ahead in (1, 2, 4, 8) for n in (1, 4)),
]
WRITE_CONFIGS = [
    host_append.DEFAULT,
    *(Config(ahead, warpgroups) for ahead in (1, 2) for warpgroups in (1, 4)),
]
TIMES = "microseconds; kernel: device time, median of 10 calls; clock, xla: host's clock; floor: bytes / 50 GB/s"

Call = Callable[[], Any]


def reading(B: int, K: int, P: int, n: int, page: int) -> Callable[[Any], Call]:
    row = (2, page, D)
    piece = jax.random.normal(jax.random.key(0), (B, K, min(P, 256), *row), jnp.bfloat16)
    x = to_host(jnp.tile(piece, (1, 1, P // piece.shape[2], 1, 1, 1)))
    places = jax.random.randint(jax.random.key(1), (REPEATS, B, K, n), 0, P // n) + jnp.arange(
        n
    ) * (P // n)
    indices = list(jax.random.permutation(jax.random.key(2), places, axis=-1, independent=True))

    def make(read: Callable[..., Any]) -> Call:
        run = jax.jit(lambda x, indices: [read(x, i) for i in indices])
        return lambda: run(x, indices)

    return make


def writing(B: int, K: int, P: int, n: int, page: int) -> Callable[[Any], Call]:
    new = [
        jax.random.normal(jax.random.key(i), (B, K, n, page, D), jnp.bfloat16) for i in range(2)
    ]
    count = jnp.full(B, n)

    def make(append: Callable[..., Any]) -> Call:
        @partial(jax.jit, donate_argnums=0)
        def run(x: Any, new: Any) -> Any:
            for i in range(REPEATS):
                x = append(x, new, jnp.arange(B) + i * n, count)
            return x

        state = [host_zeros((B, K, P, 2, page, D), jnp.bfloat16)]

        def call() -> Any:
            state[0] = run(state[0], new)
            return state[0]

        return call

    return make


def clock(call: Call, calls: int) -> float:
    """Microseconds of an operation, the median of calls."""
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e6 / REPEATS


def arrays(outs: Any) -> list[Any]:
    """The arrays to compare: all rows read, or the part of the store that was written to."""
    outs = jax.tree.leaves(outs)
    # a view of host memory could not be donated
    copies = (to_device(a)[:, :, : 2 * REPEATS * 32] for a in outs)
    return [np.asarray(a).view(np.uint16) for a in copies]


def measure(
    op: Any,
    make: Callable[[Any], Call],
    configs: Iterable[Config],
    reference: Callable[..., Any],
    moved: int,
) -> dict[str, Any]:
    name = op.__name__.rpartition(".")[2]
    by_hand = make(partial(reference, implementation="xla"))
    want, times, clocks = arrays(by_hand()), {}, {}
    for config in dict.fromkeys(configs):
        label = label_of(config)
        call = make(partial(getattr(op, name), config=config))
        if not all(np.array_equal(a, b) for a, b in zip(arrays(call()), want, strict=True)):
            raise SystemExit(f"{name} with {config} differs from its reference")
        found = [
            (statistics.median(us) * len(us) / 10)
            for which, us in kernels(call, 10)
            if f"kvjax_{name}" in which
        ]
        times[label], clocks[label] = sum(found) / REPEATS, clock(call, 10)
    first, best = next(iter(times)), min(times, key=lambda label: times[label])
    row = {
        "config": first,
        "kernel": times[first],
        "clock": clocks[first],
        "best_config": best,
        "best": times[best],
    }
    row |= {
        "GB/s": moved / times[best] / 1e3,
        "xla": clock(by_hand, 5),
        "floor": moved / BUS_BYTES_PER_US,
    }
    return row | {"all": {label: round(us, 2) for label, us in times.items()}}


STORES = 8


def footprint(
    folder: Path | None, sizes: Sequence[int] = (65536, 262144, 786432), n: int = 2048
) -> None:
    """Time of a read by the size of the store: 2048 rows for each of 4 heads, as in Qwen2.5-7B."""
    K, rows = 4, []
    for P in sizes:
        piece = jax.random.normal(jax.random.key(0), (1, K, 256, 2, 1, D), jnp.bfloat16)
        stores = [to_host(jnp.tile(piece, (1, 1, P // 256, 1, 1, 1))) for _ in range(STORES)]
        places = jax.random.randint(
            jax.random.key(1), (STORES, 1, K, n), 0, P // n
        ) + jnp.arange(n) * (P // n)
        orders = {
            "rising": list(places),
            "random": list(
                jax.random.permutation(jax.random.key(2), places, axis=-1, independent=True)
            ),
        }
        for order, indices in orders.items():
            for config in (Config(), *(Config(4, 2, blocks) for blocks in (132, 64, 32, 16))):
                read = partial(host_rows.host_rows, config=config)
                run = jax.jit(
                    lambda stores, indices, read=read: [
                        read(*two) for two in zip(stores, indices, strict=True)
                    ]
                )
                found = [
                    us
                    for name, us in kernels(lambda run=run, s=stores, i=indices: run(s, i), 10)
                    if "host_rows" in name
                ]
                us = sum(statistics.median(each) * len(each) / 10 for each in found) / STORES
                row = {
                    "P": P,
                    "order": order,
                    "ahead": config.ahead,
                    "blocks": config.blocks,
                    "kernel": us,
                }
                rows.append({**row, "GB/s": K * n * 4 * D / us / 1e3})
                print(rows[-1], flush=True)
        del stores
    what = f"host_rows of {n} rows for each of {K} heads, D = {D}, bf16, from {STORES} stores of P rows in turn"
    if folder is not None:
        about = "normal random values; rows are unique, evenly spread"
        write(folder / "host_rows_footprint.json", what, about, rows, TIMES)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", help="host_rows, host_append or footprint; default the first two"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder of the files",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small shape in the simulator; nothing is written",
    )
    given = parser.parse_args(args)
    what = given.what or ["host_rows", "host_append"]
    if unknown := set(what) - {"host_rows", "host_append", "footprint"}:
        parser.error(
            f"there are host_rows, host_append and footprint; got {', '.join(unknown)}"
        )
    with simulated() if given.quick else contextlib.nullcontext():
        if "footprint" in what:
            footprint(None, (512,), 16) if given.quick else footprint(given.out.resolve())
        measure_all(
            [name for name in what if name != "footprint"],
            None if given.quick else given.out.resolve(),
        )


def measure_all(asked: Sequence[str], folder: Path | None) -> None:
    """Measures the operations that are named; without a folder, one small shape of each, and
    writes nothing.
    """
    small = [(1, 1, 600, 2, 1)]
    for op, prepare, shapes, configs, reference in (
        (host_rows, reading, READS, READ_CONFIGS, ops.host_rows),
        (host_append, writing, WRITES, WRITE_CONFIGS, ops.host_append),
    ):
        name, rows = op.__name__.rpartition(".")[2], []
        if name not in asked:
            continue
        for B, K, P, n, page in shapes if folder else small:
            tried = list(configs) if folder else list(configs)[:1]
            row = measure(
                op, prepare(B, K, P, n, page), tried, reference, B * K * n * 4 * page * D
            )
            rows.append({"B": B, "K": K, "P": P, "n": n, "page": page, **row})
            if len(rows) == 1:
                print(f"\n{name}\n" + " | ".join(rows[0]))
            print(
                " | ".join(
                    f"{x:.1f}" if isinstance(x, float) else str(x) for x in rows[-1].values()
                ),
                flush=True,
            )
            what = f"{name}: n pages of P, keys and values of `page` tokens, D = {D}, bf16; config: ahead x warpgroups"
            what += " x blocks, 0 for one a piece"
            about = "normal random keys and values; pages that are read are unique, spread, in random order"
            if folder is not None:
                write(folder / f"{name}.json", what, about, rows, TIMES)


if __name__ == "__main__":
    main()
