"""`kvjax perplexity`."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import Dtype, ModelDir, dtype_name, make_policy, model_directory, sizes, without_weights
from kvjax.cli.terminal import bar, bars, say, write

if TYPE_CHECKING:
    from kvjax.attention import PerLayer

DEFAULT_SHARE = 0.11


def perplexity(
    text: Annotated[Path, typer.Option(help="UTF-8 file of running text, as a book.", show_default=False)],
    model_dir: ModelDir = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="A method of `kvjax methods`, or with settings: quest:page=32. Repeat it for several; the first is "
            "what the others are compared with. Default full, fier and quest.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens of context; several as 1K,4K.")] = "1K,2K,4K",
    budget: Annotated[
        int | None, typer.Option(help="Tokens attended a step and KV head, at every length.", show_default=False)
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help=f"Budget as a share of the context. Default {DEFAULT_SHARE}.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Tokens scored in each passage, one decode step each.")] = 256,
    passages: Annotated[int, typer.Option(help="Places in the text.")] = 1,
    batch: Annotated[int, typer.Option(help="Passages decoded together.")] = 1,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file of the results; what it holds already is not run again.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot there, as SVG or PNG.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Perplexity of a long text by context length, every token decoded through the cache.

    Prints a Markdown table; in parentheses the change against the first cache and its standard error.
    """
    names = list(dict.fromkeys(cache or ("full", "fier", "quest")))
    if budget is None and share is None:
        share = DEFAULT_SHARE
    lengths = tuple(sizes("--length", length))
    caches: dict[str, Any] = {}
    for name in names:
        policy, own_budget = make_policy(name)
        caches[name] = policy if own_budget is None else partial(_with_budget, name)
    kind, directory = dtype_name(dtype), model_directory(model_dir)

    from kvjax import models
    from kvjax.evaluate import perplexity as measure
    from kvjax.evaluate.tasks.files import read_text

    words = read_text(text, download="--text takes a UTF-8 file of running text")
    setting = measure.Setting(lengths=lengths, steps=steps, passages=passages, batch=batch, budget=budget, share=share)
    progress, total = bars(), len(names) * len(set(lengths))
    with progress:
        with bar(progress, "reading the text"):
            plan = measure.prepare(without_weights(directory), words, caches, setting, dtype=kind)
        with bar(progress, "loading weights"):
            checkpoint = models.load(directory, dtype=kind)
        with bar(progress, "decoding", total=total) as advance_to:
            done = itertools.count(1)

            def report(cell: measure.Cell) -> None:
                say(f"{cell.cache}, {cell.length} tokens: perplexity {cell.perplexity:.3f} ± {cell.stderr:.3f}")
                advance_to(next(done))

            cells = measure.run(checkpoint, plan, out=out, report=report)
    if plot is not None:
        measure.figure(cells).savefig(plot)
    write((json.dumps(measure.summarise(cells)) if as_json else measure.markdown(cells)) + "\n")


def _with_budget(cache: str, budget: int) -> PerLayer:
    return make_policy(cache, budget)[0]
