"""`kvjax bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import (
    AsJson,
    Budgets,
    CacheNames,
    Dtype,
    ModelDir,
    check_folder,
    dtype_name,
    implementations,
    in_short,
    model_directory,
    sizes,
    without_weights,
)
from kvjax.cli.terminal import bar, bars, say, show, write_json

if TYPE_CHECKING:
    from kvjax.evaluate.caches import Row
    from kvjax.models import Decoder, DecoderConfig
    from kvjax.policies import PerLayer


def bench(
    model_dir: ModelDir = None,
    random: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="Random weights of this shape: llama-3.1-8b, llama-3.2-1b, mistral-7b, qwen2.5-7b, "
            "qwen3-8b, or the path of a config.json.",
            show_default=False,
        ),
    ] = None,
    cache: CacheNames = None,
    budget: Budgets = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of first layers that attend to everything, for every cache. Default: each method's own.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        str, typer.Option(help="Context length in tokens; may exceed the model's positions. Several: 8K,32K,128K.")
    ] = "2K",
    batch: Annotated[
        str, typer.Option(help="Batch size. Several: 1,8. `largest` finds the largest batch that fits.")
    ] = "1",
    steps: Annotated[int, typer.Option(help="Decode steps to time.")] = 128,
    block: Annotated[int, typer.Option(help="Decode steps that are timed together.")] = 32,
    chunk: Annotated[
        int | None,
        typer.Option(help="Prefill chunk size in tokens. Default: the library's.", show_default=False),
    ] = None,
    synthetic_cache: Annotated[
        bool,
        typer.Option(
            "--synthetic-cache",
            help="Fill the cache with random keys and values instead of prefilling a prompt. Faster; no TTFT.",
        ),
    ] = False,
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and random weights.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results/*.json, throughput.json and throughput.svg; existing results are not run again.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measures time and memory of decoding through caches: TTFT, TPOT, tokens per second, bytes.

    Prompts are random tokens of exactly the given length, prefilled by the model; decoding runs the library's own loop
    on the device. Compilation is not counted. Columns: TTFT, seconds to the first token; TPOT, milliseconds per output
    token, the median over blocks of steps, with the fastest and the slowest block; tokens per second over all rows; the
    cache's bytes on the device and on the host; and the device's peak memory.
    """
    from kvjax.evaluate import throughput
    from kvjax.evaluate.caches import make_rows
    from kvjax.spec import require_int

    for option, count in (("--steps", steps), ("--block", block)):
        require_int(option, count, at_least=1)
    require_int("--seed", seed, at_least=0)
    if chunk is not None:
        require_int("--chunk", chunk, at_least=2)
    workload = throughput.Workload(steps=steps, block=block, chunk=chunk, synthetic=synthetic_cache, seed=seed)
    lengths = sizes("--length", length)
    batches = None if batch == "largest" else sizes("--batch", batch)
    budgets = None if budget is None else sizes("--budget", budget)
    asked = make_rows(cache or ["full", "fier"], budgets=budgets, dense_layers=dense_layers)
    check_folder("--out", out)
    if random is not None and model_dir is not None:
        raise ValueError(f"give a checkpoint or --random, not both; got {model_dir} and --random {random}")
    kind = dtype_name(dtype)
    directory = None if random is not None else model_directory(model_dir)
    if directory is not None:
        name, config = directory.name, without_weights(directory).config
    else:
        assert random is not None
        name, config = _shape(random)
    new = workload.new_tokens
    caches = _caches(asked, config, kind, (batches or [1])[0], max(lengths) + new)
    if config.max_positions is not None and max(lengths) + new > config.max_positions:
        say(
            f"--length {max(lengths)} and {new} new tokens are more than the model's {config.max_positions} positions: "
            "the times are valid, but the model cannot read a text of that length"
        )

    progress = bars()
    with progress, bar(progress, "loading weights" if directory is not None else "drawing weights"):
        model, about = _model(directory, name, config, kind, seed)
    for label, policies in caches.items():
        spec = model.spec(batch=(batches or [1])[0], capacity=max(lengths) + new)
        say(f"{label}: {in_short(implementations(policies, spec))}")

    with progress, bar(progress, "cells") as advance_to:

        def report(done: int, total: int, what: str) -> None:
            advance_to(done, total, what)
            say(what)

        rows = throughput.sweep(
            model,
            caches,
            lengths=lengths,
            batches=batches,
            about=about,
            workload=workload,
            out=None if out is None else out / "results",
            progress=report,
        )
    if as_json:
        write_json(*rows)
    else:
        _print(rows)
    if out is not None:
        _write(rows, out)


def _write(rows: Sequence[dict[str, Any]], out: Path) -> None:
    from kvjax.evaluate import throughput
    from kvjax.evaluate.provenance import json_text, replace_file

    replace_file(out / "throughput.json", json_text({"rows": rows}, indent=1))
    say(f"wrote {out / 'throughput.json'}")
    if any(row["status"] == "ok" for row in rows):
        try:
            throughput.figure(rows).savefig(out / "throughput.svg")
            say(f"wrote {out / 'throughput.svg'}")
        except ImportError as error:
            say(str(error))


def _caches(rows: Sequence[Row], config: DecoderConfig, kind: str, batch: int, capacity: int) -> dict[str, PerLayer]:
    """Policies by row name, such as "fier@1024"; rows that cannot be run are reported on stderr."""
    from kvjax import CacheSpec
    from kvjax.evaluate.caches import check_rows

    heads = {"q_heads": config.q_heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    rows = check_rows(rows, CacheSpec(batch=batch, capacity=capacity, dtype=kind, **heads), config.layers)
    for row in rows:
        if row.refused:
            say(f"not run: {row.name}: {row.refused}")
    return {row.name: row.policies for row in rows if row.policies is not None}


def _shape(given: str) -> tuple[str, DecoderConfig]:
    from kvjax.evaluate.throughput import SHAPES
    from kvjax.models.config import Fields
    from kvjax.models.weights import find_family

    if given in SHAPES:
        return f"{given}, random weights", SHAPES[given]
    path = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
    if not path.is_file():
        raise ValueError(f"--random {given}: neither the path of a config.json nor one of {', '.join(SHAPES)}")
    fields = Fields.read(path)
    return f"{path.resolve().parent.name}, random weights", find_family(fields).configure(fields)


def _model(
    directory: Path | None, name: str, config: DecoderConfig, kind: str, seed: int
) -> tuple[Decoder, dict[str, Any]]:
    """The model, and its description for the results."""
    from kvjax import models
    from kvjax.evaluate.provenance import digest_json, model_digest
    from kvjax.evaluate.throughput import random_model

    about: dict[str, Any] = {"model": name, "dtype": kind}
    if directory is not None:
        return models.load(directory, dtype=kind).model, {**about, "digest": model_digest(directory)}
    return random_model(config, kind, seed=seed), {**about, "digest": digest_json(repr(config))}


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    from kvjax.evaluate import throughput

    first = rows[0]
    prompt = "random keys and values in the cache" if first["synthetic"] else "random prompts"
    peak = {row["peak_of"] for row in rows if row["status"] == "ok"}
    sources = {"device": "as the device reports it", "programs": "of the compiled programs, weights included"}
    table = Table(
        title=f"{first['model']}, {first['dtype']}, {first['device']}",
        caption=f"{prompt}; TPOT: median over blocks of {first['block']} of {first['steps']} steps (fastest to "
        f"slowest); peak: {' or '.join(sources[name] for name in sorted(peak)) or '-'}",
    )
    for title in throughput.TITLES:
        table.add_column(title, justify="left" if title == "cache" else "right")
    for row in rows:
        table.add_row(*throughput.columns(row))
    show(table)
