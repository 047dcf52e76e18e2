"""`kvjax compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import (
    AsJson,
    Budgets,
    CacheNames,
    DenseLayers,
    Dtype,
    ModelDir,
    PromptFile,
    Speculate,
    dtype_name,
    model_directory,
    optional,
    sizes,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.prompts import read_prompt
from kvjax.cli.terminal import bar, bars, say, show, write_json

if TYPE_CHECKING:
    from kvjax.evaluate.answers import Answer

DEFAULT = ("full", "fier", "quest", "snapkv", "logquant")


def compare(
    model_dir: ModelDir = None,
    prompt: Annotated[str | None, optional("The prompt as text.")] = None,
    prompt_file: PromptFile = None,
    example: Annotated[
        bool,
        typer.Option("--example", help="Use the built-in prompt of kvjax generate --example."),
    ] = False,
    cache: CacheNames = None,
    budget: Budgets = None,
    dense_layers: DenseLayers = 2,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 32,
    dtype: Dtype = None,
    speculate: Speculate = None,
    measure_drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Also count the tokens of a draft of 8 that agree with the first answer.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Shows the answers of several methods to one prompt side by side, with tokens read, bytes
    and speed.

    Decoding is greedy. "same" counts the leading tokens that equal the first method's. Times
    exclude compilation. The default budget is 256, the default methods are full, fier, quest,
    snapkv and logquant.
    """
    kind, directory = dtype_name(dtype), model_directory(model_dir)
    text = read_prompt(prompt, prompt_file, example=example)
    from kvjax.evaluate.answers import prepare, side_by_side

    asked: Any = {
        "budget": None if budget is None else sizes("--budget", budget),
        "dense_layers": dense_layers,
        "max_new_tokens": max_new_tokens,
    }
    drafting: Any = {"speculate": speculate, "measure_drafts": measure_drafts}
    caches, progress = cache or list(DEFAULT), bars()
    with progress, bar(progress, "reading the prompt"):
        prepare(
            without_weights(directory), text, caches, **asked
        )  # raises errors before the weights are loaded
    with progress, bar(progress, "comparing") as advance_to:
        checkpoint = load_checkpoint(directory, dtype=kind)
        found = side_by_side(checkpoint, text, caches, **asked, **drafting, progress=advance_to)
    if as_json:
        write_json(*(answer.as_json() for answer in found))
        return
    show(_table(found))
    if dense_layers:
        say(
            f"tokens read is the mean over layers; the first {dense_layers} of them read everything (--dense-layers)"
        )
    for answer in found:
        if answer.refused:
            say(f"{answer.cache}: {answer.refused}")
    if all(answer.refused for answer in found):
        raise ValueError("no cache could be run; the reasons are above")


def _table(found: list[Answer]) -> Any:
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("cache", no_wrap=True)
    table.add_column("answer", ratio=1)
    titles = ["same", "tokens read", "MiB", "prompt, s", "tokens/s"]
    drafted = any(answer.tokens_per_step is not None for answer in found)
    measured = any(answer.accepted is not None for answer in found)
    titles += ["tokens a step"] * drafted + ["accepted of 8"] * measured
    for title in titles:
        table.add_column(title, justify="right")
    for answer in found:
        if answer.refused:
            table.add_row(answer.cache, "refused", *[""] * len(titles))
            continue
        host = f" + {answer.host_bytes / 2**20:.1f} host" if answer.host_bytes else ""
        steps, accepted = answer.tokens_per_step, answer.accepted
        more = ["1.00" if steps is None else f"{steps:.2f}"] * drafted
        more += ["-" if accepted is None else f"{accepted:.2f}"] * measured
        table.add_row(
            answer.cache,
            " ".join(answer.text.split()),
            f"{answer.same}/{len(answer.token_ids)}",
            f"{answer.attended:.0f}",
            f"{answer.device_bytes / 2**20:.1f}{host}",
            f"{answer.prefill_seconds:.2f}",
            f"{answer.decode_tokens_per_second:.1f}",
            *more,
        )
    return table
