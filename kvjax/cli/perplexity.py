"""`kvjax perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.options import (
    AsJson,
    Budgets,
    CacheNames,
    DenseLayers,
    Dtype,
    ModelDir,
    Parallel,
    check_folder,
    dtype_name,
    model_directory,
    optional,
    sizes,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, show_markdown, write_json

DEFAULT_SHARE = 0.11
LENGTHS = (1024, 2048, 4096)


def perplexity(
    text: Annotated[
        Path,
        optional(
            "UTF-8 file of running text, such as a book; or a folder of .txt files, such as the test set of PG19."
        ),
    ],
    model_dir: ModelDir = None,
    cache: CacheNames = None,
    length: Annotated[
        str | None,
        optional(
            "Context length in tokens. Several: 1K,4K. Default: 1K,2K,4K, or what the model has positions for."
        ),
    ] = None,
    budget: Budgets = None,
    dense_layers: DenseLayers = 2,
    share: Annotated[
        float | None,
        optional(
            f"The budget as a share of the context, instead of --budget. Default: {DEFAULT_SHARE}."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Tokens scored in each passage, one decode step each.")
    ] = 256,
    passages: Annotated[
        int, typer.Option(help="Passages to score in the text, or in each text of a folder.")
    ] = 1,
    batch: Annotated[int, typer.Option(help="Passages decoded together.")] = 1,
    parallel: Parallel = 1,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        optional(
            "Folder for results/*.json, table.md and a plot. Existing results are not run again."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measures the perplexity of a long text by context length; every token is decoded through
    the cache.

    Prints a Markdown table. Columns: context in tokens; budget, the tokens that a cache may
    read per step and KV head in layers that are not dense; tokens read, how many it did read,
    mean over steps, KV heads and all layers; perplexity per token; and the change against the
    first cache with its standard error. The default caches are full, fier and quest.
    """
    names = list(dict.fromkeys(cache or ("full", "fier", "quest")))
    kind, directory = dtype_name(dtype), model_directory(model_dir)

    from kvjax.evaluate import passages as measure
    from kvjax.evaluate.caches import without_budget
    from kvjax.spec import require_int

    for option, count in (("--steps", steps), ("--passages", passages), ("--batch", batch)):
        require_int(option, count, at_least=1)
    budgets = None if budget is None else tuple(sizes("--budget", budget))
    if budget is None and share is None and without_budget(names):
        share = DEFAULT_SHARE
    check_folder("--out", out)
    words = _read(text)
    if length is None:
        lengths = _default_lengths(without_weights(directory).config.max_positions, steps)
    else:
        lengths = tuple(sizes("--length", length))
    setting = measure.Setting(
        lengths=lengths,
        steps=steps,
        passages=passages,
        batch=batch,
        budget=budgets,
        share=share,
    )
    results, progress = None if out is None else out / "results", bars()
    with progress:
        with bar(progress, "reading the text"):
            checkpoint = without_weights(directory)
            plans = measure.prepare(
                checkpoint,
                words,
                names,
                setting,
                dtype=kind,
                dense_layers=dense_layers,
                out=results,
            )
        if length is None and lengths != LENGTHS:
            fits = ",".join(map(str, lengths))
            say(f"the contexts that the model has positions for: --length {fits}")
        if any(plan.done < plan.total for plan in plans):
            with bar(progress, "loading weights"):
                checkpoint = load_checkpoint(directory, dtype=kind)
        with bar(progress, "decoding") as advance_to:
            cells = measure.run(
                checkpoint, plans, batch=batch, parallel=parallel, progress=advance_to
            )
    if out is not None:
        say(f"wrote {', '.join(map(str, measure.write(cells, out)))}")
    if as_json:
        write_json({"text": text.name, **measure.document(cells)})
    else:
        show_markdown(measure.markdown(cells) + "\n")


def _default_lengths(positions: int | None, steps: int) -> tuple[int, ...]:
    """The default lengths of context that a model has positions for, with the scored tokens; the
    longest that it has if all are longer."""
    if positions is None:
        return LENGTHS
    most = positions + 1 - steps
    found = tuple(length for length in LENGTHS if length <= most) or (max(most, 2),)
    return found


def _read(text: Path) -> str | dict[str, str]:
    """The text of a file, or the texts of a folder by file name."""
    from kvjax.evaluate.provenance import read_text

    if not text.is_dir():
        return read_text(text, what="--text takes a UTF-8 file of running text")
    found = {
        path.name: read_text(path, what="--text takes UTF-8 files")
        for path in sorted(text.glob("*.txt"))
    }
    if not found:
        raise ValueError(
            f"--text {text}: this folder has no .txt files; those of PG19 are in its subfolder test"
        )
    if empty := [name for name, words in found.items() if not words.strip()]:
        raise ValueError(f"--text {text / empty[0]} is empty; remove it, or give it some text")
    return found
