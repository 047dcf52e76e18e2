"""`kvjax measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import live
from kvjax.cli.options import AsJson, Dtype, ModelDir, check_folder
from kvjax.cli.terminal import bar, bars, say, show_markdown, write_json

MEASUREMENTS = ("recall", "group_reduce")


def measure(
    model_dir: ModelDir = None,
    text: live.Text = None,
    what: Annotated[
        str, typer.Option(help=f"Measurements, separated by commas: {', '.join(MEASUREMENTS)}.")
    ] = "recall",
    length: live.Lengths = "1K,2K,4K",
    steps: live.Steps = 32,
    budget: Annotated[int, typer.Option(help="Tokens that a step reads for each KV head.")] = 256,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for measure_WHAT.json, .md and .svg.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measures how well selectors select, on the model's own queries and keys.

    recall compares every selector with exact top-k by context length. group_reduce compares the rules by which a GQA
    group shares a selection. Columns of the tables:

    recall is the share of the exact top tokens that were read, "-" if there was nothing to select; head_recall is the
    same for each query head's own top tokens; mass is the share of softmax mass on the tokens read; error is the
    relative error of the output; attended is the number of tokens read per step and KV head, and bytes the bytes read
    per step and layer.
    """
    kinds = what.split(",")
    if unknown := [kind for kind in kinds if kind not in MEASUREMENTS]:
        raise ValueError(f"--what takes {', '.join(MEASUREMENTS)}, with commas between them; got {unknown[0]!r}")
    check_folder("--out", out)
    from kvjax.evaluate import plots, recall

    if out is not None:
        plots.new_figure(1, 1)  # raises early if matplotlib is missing
    policies_of = {"recall": recall.selectors, "group_reduce": recall.group_reduces}
    cases = {kind: policies_of[kind](budget) for kind in kinds}  # raises early if the budget is wrong
    progress = bars()
    reading = live.read(progress, model_dir, text, length, steps, dtype)
    seen = live.capture(progress, reading)
    for name, policies in cases.items():
        with progress, bar(progress, name) as advance_to:
            found = recall.compare(seen, policies, progress=advance_to)
        table = recall.markdown([{"": cache, **one.row()} for cache, one in found.items()])
        head = {**reading.about(), "budget": budget}
        results = {cache: one.summary() for cache, one in found.items()}
        if as_json:
            write_json({**head, "measure": name, "results": results})
        else:
            show_markdown(f"{name}, budget {budget}\n\n{table}\n")
        if out is not None:
            figure = plots.recall_by_length(found) if name == "recall" else plots.dots(found, plots.CHOICE)
            say(f"wrote {', '.join(map(str, recall.write(out, name, head, results, table, figure)))}")
