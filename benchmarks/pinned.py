"""How much host memory caches can use, and how long it takes to get it, with XLA's pool growing
and preallocated.

    python benchmarks/pinned.py [--share 0.85] [--piece 2]

XLA's pool of pinned memory grows by regions that double, up to
`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`, to which the last one is cut. With
`XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE=true` it takes one region of that size when it is first
used, and so does the pool through which arrays of NumPy are copied: both together are more than
the machine has if the limit is more than half. Each way is measured in a process of its own,
which makes arrays of `--piece` GiB in host memory until they fill a share of the free memory.
`taken` is by how much the free memory fell.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from layers import out_of, save, show

from kvjax.memory import host_zeros

GIB = 1 << 30
PREALLOCATED = 0.42  # of the free memory, as it may be taken twice
CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Memory that a program can still have: of the machine, and of its container."""
    (line,) = (
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    free = int(line.split()[1]) * 1024
    try:
        limit, used = (
            (CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def fill(share: float, piece: float) -> dict[str, Any]:
    """Makes arrays in host memory until they fill `share` of the free memory."""
    free, held, seconds = free_bytes(), [], []
    make = jax.jit(partial(host_zeros, (int(piece * GIB) // 4,), "float32"))
    jax.block_until_ready(jax.device_put(0.0))  # the process itself takes memory
    before, size = free_bytes(), int(piece * GIB)
    while (len(held) + 1) * size <= share * free:
        start = time.perf_counter()
        try:
            held.append(jax.block_until_ready(make()))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            break
        seconds.append(time.perf_counter() - start)
    got = {"free": free, "held": len(held) * size, "taken": before - free_bytes()}
    times = {"seconds": sum(seconds), "first": seconds[0] if seconds else None}
    return {
        **got,
        "held_of_free": got["held"] / free,
        "held_of_taken": got["held"] / max(got["taken"], 1),
        **times,
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.85,
        help="of the free host memory, for the growing pool",
    )
    parser.add_argument("--piece", type=float, default=2.0, help="GiB of an array")
    parser.add_argument(
        "--out", type=Path, help="default: results/pinned.json; with --quick nothing is written"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small share, also without a GPU"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.child:
        print(json.dumps({**fill(given.share, given.piece), "backend": jax.default_backend()}))
        return
    free = free_bytes()
    if given.quick:
        given.share, given.piece = 64 * (1 << 20) / free, 0.015
    rows = []
    for name, share in (
        ("growing", given.share),
        ("preallocated", min(PREALLOCATED, given.share)),
    ):
        pool = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(max(round(share * free / GIB), 1))}
        if name == "preallocated":
            pool["XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"] = "true"
        run = [
            sys.executable,
            __file__,
            "--child",
            "--share",
            str(share),
            "--piece",
            str(given.piece),
        ]
        done = subprocess.run(run, env=os.environ | pool, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            rows.append(
                {"pool": name, "asked": share, "status": f"ended with {done.returncode}"}
            )
        else:
            rows.append(
                {
                    "pool": name,
                    "asked": share,
                    "status": "ok",
                    **json.loads(done.stdout.splitlines()[-1]),
                }
            )
        show(rows[-1])
        save(
            out_of(given, "pinned.json"),
            __doc__.splitlines()[0],
            [rows[-1]],
            ("pool", "asked", "backend"),
        )


if __name__ == "__main__":
    main()
