"""TTFT, TPOT and tokens a second of a published model on real text, by method, length and
batch.

    python benchmarks/real_speed.py MODEL --text book.txt [--sizes 16384x8,32768x1] \\
        [--methods "cudnn full fier"]

The prompts are excerpts of a book, so queries turn as they do in use: FreeKV's corrections and
the choice of every selector are real. Up to `--different` prompts are read once by the model
and stored into each cache; a larger batch repeats them. Then `kvjax.generation.Stream`, the
loop of `Checkpoint.generate`, decodes greedily by blocks of steps, and TPOT is the median over
blocks. The time to the first token is that of a prompt of one row that each cache reads for
itself, the median of three; it comes after all sizes. `cudnn` is full attention by one cuDNN
call a layer. `bytes_per_second` is the rate of a long plain read on the same device, for
floors. What the file has is not measured again; each row is written as soon as it is done.
Programs of all methods are compiled beside one another before the clock runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measured
import named
import numpy as np
from end_to_end import FullByCudnn
from jax import Array
from layers import show
from measured import write_rows
from throughput import time_steps

from kvjax import PerLayer, models
from kvjax.cache.cache import Cache, LayerCache, init
from kvjax.evaluate import prompt
from kvjax.evaluate.caches import DENSE_LAYERS, make_rows, without_budget
from kvjax.generation import Stream, prefill
from kvjax.generation.prefilling import prompt_programs
from kvjax.memory import nbytes
from kvjax.models import Checkpoint
from kvjax.spec import default_dtype, padded_capacity

SIZES = "16384x8,16384x1,32768x1,32768x8,4096x1,4096x8,16384x32,4096x32,32768x32"
METHODS = "cudnn full fier quest pariskv freekv logquant kivi snapkv"
READ = 1 << 30  # bytes of one plain read
KEY = ("method", "length", "batch", "budget")


def read_rate() -> float:
    """Bytes a second of a long plain read: the best of three."""
    data = jnp.ones((READ // 4,), jnp.float32)
    largest = jax.jit(jnp.max).lower(data).compile()

    def seconds(reads: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready([largest(data) for _ in range(reads)])
        return time.perf_counter() - begin

    seconds(1)
    return 16 * READ / min(seconds(16) for _ in range(3))


def caches(
    names: Sequence[str], budget: int, dense_layers: int, cudnn: str
) -> dict[str, PerLayer]:
    """Policies by name, with `dense_layers` where their text sets none."""
    found = {"cudnn": PerLayer((), FullByCudnn(cudnn))} if "cudnn" in names else {}
    presets = [name for name in names if name != "cudnn"]
    budgets = [budget] if presets and without_budget(presets) else None
    rows = make_rows(presets, budgets=budgets, dense_layers=dense_layers) if presets else []
    return found | {
        row.name.partition("@")[0]: row.policies for row in rows if row.policies is not None
    }


def excerpts(checkpoint: Checkpoint, text: Path, length: int, count: int) -> np.ndarray:
    """i32[count, length]: pieces of a book that follow one another."""
    return np.array(measured.read_tokens(checkpoint, text, length * count), np.int32).reshape(
        count, length
    )


def repeated(read: Cache, times: int) -> Iterator[LayerCache]:
    """The layers of prompts, with each row `times` times: one layer at a time, as all of them
    would not fit.
    """

    def tile(a: Array) -> Array:
        return jnp.tile(a, (times, *[1] * (a.ndim - 1)))

    for layer in read.layers:
        state = layer.state if times == 1 else jax.tree.map(tile, layer.state)
        yield replace(
            layer, state=state, spec=replace(layer.spec, batch=times * layer.spec.batch)
        )


def empty(checkpoint: Checkpoint, policies: PerLayer, batch: int, capacity: int) -> Cache:
    model = checkpoint.model
    return init(
        policies, model.spec(batch=batch, capacity=capacity), layers=model.config.layers
    )


def first_token(
    checkpoint: Checkpoint, policies: PerLayer, tokens: np.ndarray, capacity: int
) -> float:
    """Seconds from a prompt i32[1, T] to the logits after it, with those to compile if it is
    the first call.
    """
    cache = jax.block_until_ready(empty(checkpoint, policies, 1, capacity))
    begin = time.perf_counter()
    jax.block_until_ready(prefill(checkpoint.model, cache, tokens, first_chunk=True))
    return time.perf_counter() - begin


@contextmanager
def out_of_memory_told(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        row["status"] = "out of memory"
    gc.collect()


def capacity_for(length: int, given: argparse.Namespace) -> int:
    return padded_capacity(prompt.columns(length) + given.block + given.steps)


def decode(
    checkpoint: Checkpoint,
    policies: dict[str, PerLayer],
    length: int,
    batch: int,
    given: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """TPOT of every method at one length and batch; `keep` takes each row."""
    tokens = excerpts(checkpoint, given.text, length, min(batch, given.different))
    logits, read = jax.block_until_ready(prompt.read(checkpoint, tokens.tolist()))
    times, capacity = batch // len(tokens), capacity_for(length, given)
    logits = jnp.tile(logits, (times, 1))

    def begin(cache: Cache) -> Stream:
        return Stream(checkpoint.model, cache, logits, given.block + given.steps)

    rows: dict[str, dict[str, Any]] = {
        name: {
            "method": name,
            "length": length,
            "batch": batch,
            "different": len(tokens),
            "budget": given.budget,
            "status": "ok",
        }
        for name in policies
    }

    with ThreadPoolExecutor(
        os.cpu_count()
    ) as pool:  # threads compile and run nothing; see benchmarks/NOTES.md
        programs = []
        for name in policies:
            with out_of_memory_told({}):
                lowered = (
                    begin(empty(checkpoint, policies[name], batch, capacity))
                    .programs(given.block)[0]
                    .lower()
                )
                programs.append(pool.submit(lowered.compile))
        for program in programs:
            with out_of_memory_told({}):  # alone it may fit; else it says so below
                program.result()
    for name, row in rows.items():
        with out_of_memory_told(row):
            run = begin(
                prompt.store(checkpoint, repeated(read, times), policies[name], capacity)
            )
            run.advance(given.block)
            row |= time_steps(run, given.block)
            size = nbytes(run.cache)
            row |= {
                "cache_bytes_device": size.device,
                "cache_bytes_host": size.host,
                "ttft_seconds": None,
            }
            del run
        show(
            {
                key: row.get(key)
                for key in (
                    "method",
                    "length",
                    "batch",
                    "status",
                    "tpot_ms",
                    "tokens_per_second",
                )
            }
        )
        keep(row)


def read_first(
    checkpoint: Checkpoint,
    policies: dict[str, PerLayer],
    length: int,
    given: argparse.Namespace,
    keep: Callable[[str, float], None],
) -> None:
    """TTFT of every method at one length, one row; `keep` takes a method and its seconds, the
    median of three.
    """
    tokens = excerpts(checkpoint, given.text, length, 1)
    capacity = capacity_for(length, given)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = []
        for made in policies.values():
            cache = empty(checkpoint, made, 1, capacity)
            lowered = [one.lower() for one in prompt_programs(checkpoint.model, cache, length)]
            programs += [pool.submit(one.compile) for one in lowered]
        for program in programs:
            program.result()
    for name, made in policies.items():
        first_token(checkpoint, made, tokens, capacity)
        seconds = float(
            np.median([first_token(checkpoint, made, tokens, capacity) for _ in range(3)])
        )
        show({"method": name, "length": length, "ttft_seconds": seconds})
        keep(name, seconds)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument(
        "--sizes",
        default=SIZES,
        help="tokens x rows, with commas between, in the order to measure",
    )
    parser.add_argument(
        "--methods",
        type=named.caches("cudnn"),
        default=METHODS,
        help="names with spaces between; settings may follow a name",
    )
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument(
        "--dense-layers",
        type=int,
        default=DENSE_LAYERS,
        help="first layers that attend to everything",
    )
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument(
        "--block", type=int, default=32, help="steps between two readings of the clock"
    )
    parser.add_argument(
        "--different",
        type=int,
        default=8,
        help="prompts that differ; larger batches repeat them",
    )
    parser.add_argument("--dtype", default=default_dtype())
    first = "leave out the time to the first token, whose programs take longest to compile"
    parser.add_argument("--no-first-token", action="store_true", help=first)
    parser.add_argument(
        "--cudnn", default="cudnn", help="xla: the same attention without cuDNN, on a CPU"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "real_speed.json"
    )
    given = parser.parse_args(args)
    if (
        jax.config.jax_compilation_cache_dir is None
    ):  # what the threads compile is found there again
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    directory = given.model_dir or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    policies = caches(given.methods, given.budget, given.dense_layers, given.cudnn)
    sizes = [tuple(int(part) for part in size.split("x")) for size in given.sizes.split(",")]
    for _, batch in sizes:
        if batch % min(batch, given.different):
            parser.error(f"--different {given.different} does not divide a batch of {batch}")
    lengths = sorted({length for length, _ in sizes})
    about = measured.about(directory, given.text, given.dtype, lengths, given.steps)
    about["weight_bytes"] = nbytes(checkpoint.model).device
    about |= {"dense_layers": given.dense_layers, "block": given.block}
    same = (
        "model",
        "text",
        "dtype",
        "device",
        "versions",
        "source",
        "dense_layers",
        "steps",
        "block",
    )
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    if given.out.is_file():
        held = json.loads(given.out.read_text())
        if differs := [name for name in same if held.get(name) != about[name]]:
            parser.error(
                f"--out {given.out} has rows of another {', '.join(differs)}; name another file"
            )
        rows = {tuple(row[name] for name in KEY): row for row in held["rows"]}
        about["lengths"] = sorted({*held["lengths"], *lengths})
    about["bytes_per_second"] = read_rate()

    def keep(row: dict[str, Any]) -> None:
        rows[tuple(row[name] for name in KEY)] = row
        write_rows(given.out, about, rows.values())

    for length, batch in sizes:
        left = {
            name: made
            for name, made in policies.items()
            if (name, length, batch, given.budget) not in rows
        }
        row = {"method": "all", "length": length, "batch": batch, "status": "ok"}
        with out_of_memory_told(row):
            if left:
                decode(checkpoint, left, length, batch, given, keep)
        if row["status"] != "ok":
            show(row)

    def keep_first(length: int, name: str, seconds: float) -> None:
        keep(rows[name, length, 1, given.budget] | {"ttft_seconds": seconds})

    for length in (
        () if given.no_first_token else [length for length, batch in sizes if batch == 1]
    ):
        held = {name: rows.get((name, length, 1, given.budget), {}) for name in policies}
        left = {
            name: made
            for name, made in policies.items()
            if held[name].get("ttft_seconds", 0) is None
        }
        if left:
            read_first(checkpoint, left, length, given, partial(keep_first, length))


if __name__ == "__main__":
    main()
