"""What a benchmark of one kernel does: compare, time every configuration and the reference, print a table, write."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from device_time import BYTES_PER_US, device_time, write

L2_BYTES = 60e6
most_configs: int | None = None  # that `sweep` tries


def repeats(moved: float) -> int:
    """How often a call must move so many bytes, each time others, to find nothing of the call before in L2."""
    return int(2 * L2_BYTES // moved) + 1


def sweep(
    name: str,
    kernel: Callable[[Any], Callable[..., Any]],
    reference: Callable[..., Any],
    args: Sequence[Any],
    *,
    configs: Iterable[Any],
    error: Callable[[Any, Any], float],
    most: float,
    moved: float,
    n: int = 1,
) -> dict[str, Any]:
    """Microseconds of one of the `n` operations that kernel(config)(*args) does, for each config, the default's first.

    Each config's output must be within `most` of the reference's by `error`. "kernel" is the kernel alone, "mosaic"
    with those of XLA around it.
    """
    want = jax.jit(reference)(*args)
    first, times, row = None, {}, {}
    for config in list(dict.fromkeys(configs))[:most_configs]:
        f = kernel(config)
        off = error(jax.jit(f)(*args), want)
        if not off <= most:
            raise SystemExit(f"{name} with {config}: error {off}, at most {most} is allowed")
        total, kernels = device_time(f, *args, calls=10)
        label = "x".join(str(x) for x in dataclasses.astuple(config))
        times[label] = sum(us for kernel_name, us in kernels.items() if f"kvjax_{name}" in kernel_name) / n
        if not times[label]:
            raise SystemExit(f"no kernel of {name} ran; these did: {', '.join(kernels)}")
        if first is None:
            first, row = config, {"error": f"{off:.1e}", "config": label, "kernel": times[label], "mosaic": total / n}
    best = min(times, key=lambda label: times[label])
    row |= {"best_config": best, "best": times[best]}
    row |= {"xla": device_time(reference, *args, calls=3)[0] / n, "floor": moved / BYTES_PER_US}
    return row | {"all": {label: round(us, 2) for label, us in times.items()}}


def run(
    name: str,
    what: str,
    distribution: str,
    measure: Callable[..., dict[str, Any]],
    shapes: Iterable[Any],
    swept: int = 1,
) -> None:
    """Prints a line a shape, of measure(*shape), and writes all to results/{name}.json. Every block size is tried for
    the first `swept` shapes."""
    global most_configs
    parser = argparse.ArgumentParser(description=f"Device time of {name}, on a GPU.")
    parser.add_argument(
        "--all", action="store_true", help="every block size for every shape, not for the first ones alone"
    )
    given, rows = parser.parse_args(), []
    for shape in shapes:
        most_configs = None if given.all or len(rows) < swept else 1
        rows.append(measure(*shape))
        if len(rows) == 1:
            print(" | ".join(rows[0]))
        print(" | ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in rows[-1].values()), flush=True)
        write(f"{name}.json", what, distribution, rows)
