"""Where the time of a decode step over several GPUs goes: kernels by kind, exchanges, and time
without a kernel, of each GPU.

    XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true \\
    python benchmarks/step_trace.py [--method fier] [--placements none,ctx=4+share] \\
        [--size 1048576x1] [--layers 16] [--steps 8] [--label NAME] [--out FILE]

The model, the caches and the names of placements are those of devices.py. A row is of one GPU
of a placement: microseconds of a step by kind of kernel, from a profile of `--steps` steps.
Times of kinds are sums of kernels, so they may overlap; `idle` is when the GPU runs none. That of
an exchange includes the wait for the GPU that comes last. Two more numbers are of all GPUs
and without the profiler, which slows the host: `tpot_ms`, the fastest of four blocks of 32
steps, and `call_of_one_ms`, of a call of the loop that emits one token.

By default XLA runs no CUDA graphs while it profiles, so a GPU needs the flag. `--quick` tries all
of it at tiny sizes on any devices, where a profile has no kernels of a GPU, and writes nothing.
Rows are added to results/step_trace.json, and replace those of the same sizes and label, such as
the name of a form of the program that is compared.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import devices
import jax
import throughput
from layers import out_of, save, show

IN_GRAPHS = "--xla_enable_command_buffers_during_profiling=true"
KINDS = {  # the first that matches the name of a kernel
    "exchanges": re.compile("nccl|all_reduce|all-reduce|all_gather|all-gather"),
    "scores": re.compile("kvjax_.*score"),
    "selection": re.compile("kvjax_(select|top_k|most_voted|collide|rerank)"),
    "attention": re.compile("kvjax_attend"),
    "products": re.compile("gemm|cublas|nvjet|cutlass"),
}
REST = "rest"
BLOCK = 32
WHAT = (
    "where a decode step goes, microseconds of a step by kind of kernel on each GPU, from a profile; idle: no "
    "kernel runs; exchanges include the wait for the last GPU. tpot_ms: milliseconds of a step by the host's "
    "clock without a profiler, the fastest of four blocks of 32; call_of_one_ms: of a call that emits one token"
)
KEY = ("label", "method", "placement", "layers", "length", "batch", "budget", "gpu", "device")


class Event(NamedTuple):
    """A kernel or a copy on a GPU, in nanoseconds."""

    start: float
    end: float
    name: str


def kind_of(name: str) -> str:
    for kind, pattern in KINDS.items():
        if pattern.search(name):
            return kind
    return REST


def events_by_gpu(folder: str) -> dict[str, list[Event]]:
    """What each GPU ran in a profile, in order of its start."""
    (file,) = Path(folder).rglob("*.xplane.pb")
    found = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        lines = [line for line in plane.lines if "Stream" in line.name]
        if "GPU" in plane.name and lines:
            every = (event for line in lines for event in line.events)
            found[plane.name] = sorted(
                Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
                for event in every
            )
    return found


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Microseconds of a step by kind, and how many kernels it starts.

    >>> one = Event(0, 2000, "gemm_fusion_dot"), Event(3000, 4000, "ncclDevKernel_AllGather")
    >>> found = summary(one, 1)
    >>> found["products_us"], found["exchanges_us"], found["idle_us"], found["kernels"]
    (2.0, 1.0, 1.0, 2.0)
    """
    spent: Counter[str] = Counter()
    idle = 0.0
    free = events[0].start
    for event in events:
        spent[kind_of(event.name)] += event.end - event.start
        idle += max(event.start - free, 0.0)
        free = max(free, event.end)
    kinds = {f"{kind}_us": round(spent[kind] / 1e3 / steps, 1) for kind in (*KINDS, REST)}
    return {
        **kinds,
        "idle_us": round(idle / 1e3 / steps, 1),
        "span_us": round((free - events[0].start) / 1e3 / steps, 1),
        "kernels": round(len(events) / steps, 1),
    }


def clock(run: Any) -> dict[str, float]:
    """Times of the loop by the host's clock, without a profiler."""
    blocks = []
    for _ in range(4):
        start = time.perf_counter()
        run.advance(BLOCK)
        blocks.append(1e3 * (time.perf_counter() - start) / BLOCK)
    run.advance(1)
    start = time.perf_counter()
    for _ in range(BLOCK):
        run.advance(1)
    one = 1e3 * (time.perf_counter() - start) / BLOCK
    return {"tpot_ms": round(min(blocks), 4), "call_of_one_ms": round(one, 4)}


def parser_of_run(description: str | None) -> argparse.ArgumentParser:
    """A parser of what runs: a method, on placements, at a size."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=list(devices.METHODS), default="fier")
    parser.add_argument("--placements", type=lambda text: text.split(","), default=["none"])
    parser.add_argument("--size", default="1048576x1", help="tokens of a row x rows")
    parser.add_argument("--layers", type=int, default=16, help="of the shape of an 8B")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is written")
    return parser


def shape_of_run(given: argparse.Namespace) -> tuple[Any, str, int, int]:
    """The model's config, the dtype, tokens of a row and rows that are asked for."""
    config = replace(throughput.SHAPES["llama-3.1-8b"], layers=given.layers, windows=())
    length, batch = map(int, given.size.split("x"))
    if not given.quick:
        return config, "bfloat16", length, batch
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
    given.budget = 320
    return replace(config, layers=3, windows=(), **small), "float32", 600, batch


def rows_of(
    given: argparse.Namespace, shape: tuple[Any, str, int, int], name: str
) -> list[dict[str, Any]]:
    """A row for each GPU of a placement."""
    config, dtype, length, batch = shape
    place = devices.placement_of(name, jax.devices())
    model = throughput.random_model(config, dtype, placement=place)
    policies = devices.METHODS[given.method](given.budget)
    run, _ = devices.begun(
        model, policies, place, length=length, batch=batch, new=7 * BLOCK + given.steps
    )
    run.advance(BLOCK)
    times = clock(run)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run.advance(given.steps)
        found = events_by_gpu(folder)
    asked = {
        "label": given.label,
        "method": given.method,
        "placement": name,
        "layers": config.layers,
        "length": length,
        "batch": batch,
        "budget": given.budget,
    }
    if not found:
        print("the profile has no kernels of a GPU:", asked, times)
    return [
        {**asked, "gpu": number, **times, **summary(events, given.steps)}
        for number, (_, events) in enumerate(sorted(found.items()))
    ]


def main(args: Sequence[str] | None = None) -> None:
    parser = parser_of_run(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps of the profile")
    parser.add_argument("--label", default="", help="what is compared, if anything is")
    given = parser.parse_args(args)
    if jax.default_backend() == "gpu" and IN_GRAPHS not in os.environ.get("XLA_FLAGS", ""):
        parser.error(
            f"a profile without CUDA graphs is another program; set XLA_FLAGS={IN_GRAPHS}"
        )
    shape = shape_of_run(given)
    for name in given.placements:
        rows = rows_of(given, shape, name)
        for row in rows:
            show(row)
        save(out_of(given, "step_trace.json"), WHAT, rows, KEY)


if __name__ == "__main__":
    main()
