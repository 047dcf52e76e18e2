"""Shared by the benchmarks of whole steps: layers of a Llama-3.1-8B, a clock, and results that
add up over runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from device_time import bytes_per_us, kernels
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from measured import write_rows

from kvjax import CacheSpec, ops
from kvjax.evaluate.provenance import provenance
from kvjax.policies import Compressed, Full, Policy, Retrieval


class Took(NamedTuple):
    us: float  # of a call: on a GPU in its kernels, by the profiler; else by the host's clock
    kernels: float | None  # that a call starts; None by the host's clock
    parts: dict[
        str, float
    ]  # us of a call in the kernels of a name, the most first; empty by the host's clock


def clock(
    run: Callable[..., tuple[Any, Any]], state: Any, *args: Any, calls: int
) -> tuple[Took, Any]:
    """Median time of out, state = run(state, *args), which is compiled and donates its state;
    and the last out.
    """
    out: Any = None

    def call() -> Any:
        nonlocal out, state
        out, state = run(state, *args)
        return out

    if jax.default_backend() == "gpu":
        found = kernels(call, calls)
        count = sum(map(len, (each for _, each in found))) / calls
        parts = {name: statistics.median(each) * len(each) / calls for name, each in found}
        return Took(
            sum(parts.values()), count, dict(sorted(parts.items(), key=lambda part: -part[1]))
        ), out
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e6 * (time.perf_counter() - start))
    return Took(statistics.median(times[1:]), None, {}), out


def keep_counts(old: Any, new: Any) -> Any:
    """`new` with the counts of `old`, so that a step can be repeated on the state that it
    returns. The counts pass through the program, so this adds no kernel; the step itself works
    with the new ones."""

    def select(path: tuple[Any, ...], a: Any, b: Any) -> Any:
        key: DictKey | GetAttrKey | SequenceKey = path[-1]
        return a if isinstance(key, GetAttrKey) and key.name == "count" else b

    return jax.tree.map_with_path(select, old, new)


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Sets the kernels of programs traced inside: "default"; "kernels", also those that are not
    in use by default as they have no measurement yet; "xla", only the references."""
    with ExitStack() as stack:
        if name == "kernels":
            stack.enter_context(mock.patch.object(ops.op, "_unmeasured", return_value=None))
        elif name == "xla":
            stack.enter_context(ops.use("xla"))
        elif name != "default":
            raise ValueError(f"implementation must be default, kernels or xla; got {name!r}")
        yield


def floor_us(policy: Policy, spec: CacheSpec, length: int, steps: int = 1) -> float:
    """The fewest bytes that a step of a layer reads after `length` tokens, over the memory's
    bandwidth.

    Several steps at once read index or cache once, and each step the tokens that it selects,
    which no other selects.
    """
    pair = 2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize
    if isinstance(policy, Full):
        read = float(pair * length)
    elif isinstance(policy, Compressed):
        read = policy.store.bytes_per_token(spec) * length
    elif isinstance(policy, Retrieval):
        read = (
            policy.selector.bytes_read(spec, length)
            + policy.store.bytes_per_token(spec) * policy.budget * steps
        )
    else:
        raise TypeError(f"the bytes that {policy} reads are not known here")
    return spec.batch * read / bytes_per_us()


# The sizes of a layer of Llama-3.1-8B, and of a layer with `--quick`.
LAYER: dict[str, Any] = {
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": jnp.dtype(jnp.bfloat16),
}
LAYERS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LAYER,
    "qwen3.5-27b": LAYER | {"q_heads": 24, "kv_heads": 4, "head_dim": 256},
    "qwen3-next": LAYER | {"q_heads": 16, "kv_heads": 2, "head_dim": 256},
}
SMALL_LAYER: dict[str, Any] = {
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": jnp.dtype(jnp.float32),
}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options(doc: str | None, results: str, calls: int) -> argparse.ArgumentParser:
    """A parser with `--calls`, `--out` and `--quick` for a benchmark that writes the file
    `results`.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=calls)
    parser.add_argument(
        "--out", type=Path, help=f"default: results/{results}; with --quick nothing is written"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, by the host's clock")
    return parser


def parse(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program if there is no GPU to measure and `--quick` was not given."""
    given = parser.parse_args(args)
    if not given.quick and jax.default_backend() != "gpu":
        parser.error("this measures a GPU; --quick runs small sizes without one")
    return given


def out_of(given: Any, name: str) -> Path | None:
    """The file of `--out`, or else that of the results; None for `--quick`, whose rows are not
    kept.
    """
    return given.out or (None if given.quick else Path(__file__).parent / "results" / name)


def save(out: Path | None, what: str, rows: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Writes rows to `out`, if any, each with its provenance; rows in the file with the same
    `key` are replaced.
    """
    if out is None:
        return
    made = provenance()
    rows = [{**row, **made} for row in rows]
    new = {tuple(row[name] for name in key) for row in rows}
    if out.is_file():
        kept = [
            row
            for row in json.loads(out.read_text())["rows"]
            if tuple(row[name] for name in key) not in new
        ]
        rows = kept + rows
    write_rows(out, {"what": what}, rows)


def show(row: dict[str, Any]) -> None:
    shown = (x for x in row.values() if not isinstance(x, dict))
    print(" | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in shown), flush=True)
