"""`kvjax warm`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.generate import TEXT_BLOCK
from kvjax.cli.options import (
    Budget,
    CacheName,
    Dtype,
    ModelDir,
    check_holds,
    dtype_name,
    make_policy,
    model_directory,
    size,
    without_weights,
)
from kvjax.cli.programs import keep_programs
from kvjax.cli.terminal import say

if TYPE_CHECKING:
    from kvjax import Cache, CacheSpec
    from kvjax.models import Checkpoint, Decoder
    from kvjax.policies import PerLayer


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

    from kvjax.models.decoder import decoder_of_shapes
    from kvjax.spec import round_capacity

    # Parse.
    policy, _ = make_policy(cache, budget)
    dtype = dtype_name(dtype)
    tokens = size("--capacity", capacity)
    checkpoint = without_weights(model_directory(model_dir))
    positions = checkpoint.config.max_positions
    if positions is not None and tokens > positions:
        raise ValueError(
            f"--capacity {capacity} is more than the model's {positions} positions; give at most {positions}"
        )
    check_holds(cache, policy, checkpoint, dtype)
    folder = keep_programs()
    if folder is None:
        raise ValueError(
            "the cache of compiled programs is off, so that nothing could be kept; turn it on"
        )

    # Run.
    begin = time.perf_counter()
    before = _bytes(folder)
    model = decoder_of_shapes(checkpoint.config, dtype)
    rounded = round_capacity(tokens, rows=batch, positions=positions)
    spec = model.spec(batch=batch, capacity=rounded)
    programs = _programs(checkpoint, model, policy, spec, draws=temperature)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda compile_it: compile_it(), programs))

    # Print.
    seconds = time.perf_counter() - begin
    added = (_bytes(folder) - before) / 2**20
    say(
        f"{len(programs)} programs for {batch} row{'s' * (batch > 1)} of {rounded} tokens in {seconds:.1f} s on "
        f"{jax.devices()[0].device_kind}; {added:.1f} MiB more in {folder}"
    )


def _programs(
    checkpoint: Checkpoint, model: Decoder, policy: PerLayer, spec: CacheSpec, *, draws: bool
) -> list[Callable[[], Any]]:
    """Functions that each compile a program of long or short answers, greedy ones and, with
    `draws`, drawn ones.
    """
    import kvjax
    from kvjax.generation.sampling import Sampling, sampling
    from kvjax.generation.streaming import abstract_cache, compile_ahead

    def empty() -> Cache:
        return kvjax.init(policy, spec, layers=checkpoint.config.layers)

    cache = abstract_cache(empty) or empty()
    greedy = Sampling()
    found: list[Callable[[], Any]] = []
    for sampled in [greedy, sampling(1.0)] if draws else [greedy]:
        for short in (False, True):
            programs = compile_ahead(
                model,
                cache,
                None,
                sampling=sampled,
                stop_tokens=checkpoint.stop_tokens,
                processors=checkpoint.processors,
                measure=True,
                short=short,
                # Prompts are read in the same way for all answers.
                prompts=sampled is greedy and not short,
                block=TEXT_BLOCK,
            )
            # One program for short answers is the loop of long ones again.
            if not short or len(programs) > 1:
                found += programs
    return found


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
