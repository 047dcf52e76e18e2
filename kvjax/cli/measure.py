"""`kvjax measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.options import Dtype, ModelDir, dtype_name, model_directory, sizes, without_weights
from kvjax.cli.terminal import bar, bars, say, write

WHATS = ("recall", "group_reduce")


def measure(
    model_dir: ModelDir = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with a long text that the model never saw.", show_default=False),
    ] = None,
    what: Annotated[str, typer.Option(help=f"Measurements, separated by commas: {', '.join(WHATS)}.")] = "recall",
    length: Annotated[str, typer.Option(help="Tokens of context, in rising order.")] = "1K,2K,4K",
    steps: Annotated[int, typer.Option(help="Adjacent queries of the model at each length.")] = 32,
    budget: Annotated[int, typer.Option(help="Tokens that a step reads for each KV head.")] = 256,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for measure_WHAT.json, .md and .svg.", show_default=False)
    ] = None,
) -> None:
    """Measures how well selectors select, on the model's own queries and keys.

    recall compares every selector with exact top-k by context length. group_reduce compares the rules by which a GQA
    group shares a choice. Tables go to stdout. Their columns:

    recall is the share of the exact top tokens that were read, "-" where nothing was to be chosen; head_recall is the
    same for each query head's own top tokens; mass is the share of softmax mass that the tokens read hold; error is the
    relative error of the output; attended counts tokens and bytes counts bytes read a step.
    """
    kinds, lengths = what.split(","), sizes("--length", length)
    if unknown := set(kinds) - set(WHATS):
        raise ValueError(f"--what {', '.join(unknown)} must be of {', '.join(WHATS)}")
    if text is None or not text.is_file():
        raise ValueError("--text: " + ("give a file with a long text" if text is None else f"{text} is not a file"))
    directory, kind = model_directory(model_dir), dtype_name(dtype)

    from kvjax import models
    from kvjax.evaluate import live, plots, recall

    if out is not None:
        plots.new_figure(1, 1)  # says now that matplotlib is missing
    progress = bars()
    with progress, bar(progress, "reading the text"):
        tokens = recall.read_tokens(without_weights(directory), text, lengths[-1])
    with progress, bar(progress, "loading weights"):
        checkpoint = models.load(directory, dtype=kind)
    with progress, bar(progress, f"live queries of {lengths[-1]} tokens", total=lengths[-1]) as advance_to:
        seen = live.capture(checkpoint, [tokens], lengths=lengths, steps=steps, progress=advance_to)
    cases = {"recall": recall.selectors, "group_reduce": recall.group_reduces}
    for name in kinds:
        with progress, bar(progress, name) as advance_to:
            found = recall.compare(seen, cases[name](budget), progress=advance_to)
        table = recall.markdown([{"": cache, **one.row()} for cache, one in found.items()])
        write(f"{name}, budget {budget}\n\n{table}\n")
        if out is not None:
            figure = plots.recall_by_length(found) if name == "recall" else plots.dots(found, plots.CHOICE)
            head = {**recall.about(directory, text, kind, lengths, steps), "budget": budget}
            results = {cache: one.summary() for cache, one in found.items()}
            say(f"wrote {', '.join(map(str, recall.write(out, name, head, results, table, figure)))}")
