"""`kvjax warm`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli.options import (
    Budget,
    CacheName,
    Dtype,
    ModelDir,
    dtype_name,
    make_policy,
    model_directory,
    size,
    without_weights,
)
from kvjax.cli.programs import keep_programs
from kvjax.cli.terminal import say


def warm(
    model_dir: ModelDir = None,
    cache: CacheName = "full",
    budget: Budget = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the cache.")] = 1,
    capacity: Annotated[
        str, typer.Option(help="Tokens that a row can hold, such as 8K.")
    ] = "4608",
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature",
            help="The programs of draws, too; else those of greedy answers alone.",
        ),
    ] = False,
    dtype: Dtype = None,
) -> None:
    """Compiles the programs of a batch size and a capacity, and keeps them on disk.

    Reads no weights. `kvjax generate` and `Checkpoint.generate` with the same model, method,
    batch and capacity then start without compiling. They round a capacity up to
    `kvjax.spec.round_capacity`, and so does this command.
    """
    import jax
    from flax import nnx

    import kvjax
    from kvjax.generation.sampling import Sampling, sampling
    from kvjax.generation.streaming import abstract_cache, compile_ahead
    from kvjax.models import Decoder
    from kvjax.spec import round_capacity

    policy, _ = make_policy(cache, budget)
    directory, kind = model_directory(model_dir), dtype_name(dtype)
    checkpoint, tokens = without_weights(directory), size("--capacity", capacity)
    positions = checkpoint.config.max_positions
    if positions is not None and tokens > positions:
        raise ValueError(
            f"--capacity {capacity} is more than the model's {positions} positions; give at most {positions}"
        )
    folder = keep_programs()
    if folder is None:
        raise ValueError(
            "the cache of compiled programs is off, so that nothing could be kept; turn it on"
        )
    model = nnx.eval_shape(lambda: Decoder(checkpoint.config, dtype=kind))
    rounded = round_capacity(tokens, rows=batch, positions=positions)
    spec = model.spec(batch=batch, capacity=rounded)
    empty: Any = partial(kvjax.init, policy, spec, layers=checkpoint.config.layers)
    empty = abstract_cache(empty) or empty()
    begin, before = time.perf_counter(), _bytes(folder)
    draws, jobs = [Sampling(), *([sampling(1.0)] if temperature else [])], list[Any]()
    for draw, short in [(draw, short) for draw in draws for short in (False, True)]:
        settings: dict[str, Any] = {
            "sampling": draw,
            "stop_tokens": checkpoint.stop_tokens,
            "measure": True,
        }
        settings |= {
            "processors": checkpoint.processors,
            "short": short,
            "prompts": not short and draw is draws[0],
        }
        found = compile_ahead(model, empty, None, **settings)
        jobs += [] if short and len(found) == 1 else found  # else the same loop again
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: job(), jobs))
    seconds, added = time.perf_counter() - begin, _bytes(folder) - before
    say(
        f"{len(jobs)} programs for {batch} row{'s' * (batch > 1)} of {rounded} tokens in {seconds:.1f} s on "
        f"{jax.devices()[0].device_kind}; {added / 2**20:.1f} MiB more in {folder}"
    )


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
