"""`kvjax compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

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
    TemplateSettings,
    check_new_tokens,
    check_template_use,
    dtype_name,
    model_directory,
    optional,
    sizes,
    template_settings,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.prompts import EXAMPLE_TOKENS, read_prompt
from kvjax.cli.terminal import bar, bars, say, show, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvjax.evaluate.answers import Answer

NEW_TOKENS = 32
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
    max_new_tokens: Annotated[
        int | None,
        optional(
            f"Maximum number of new tokens. Default: {NEW_TOKENS}, or {EXAMPLE_TOKENS} with --example."
        ),
    ] = None,
    dtype: Dtype = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    template: TemplateSettings = None,
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
    from kvjax.evaluate.answers import answer_rows, prepare
    from kvjax.generation import drafts

    # Parse: what is wrong is said here, before the weights are read.
    dtype = dtype_name(dtype)
    directory = model_directory(model_dir)
    text = read_prompt(prompt, prompt_file, example=example)
    asked = [{"role": "user", "content": text}] if chat else text
    settings = template_settings(template)
    check_template_use(settings, chat=chat)
    check_new_tokens(max_new_tokens)
    new = max_new_tokens or (EXAMPLE_TOKENS if example else NEW_TOKENS)
    draft = None if speculate is None else drafts.parse(speculate)
    budgets = None if budget is None else sizes("--budget", budget)
    progress = bars()
    with progress, bar(progress, "reading the prompt"):
        unloaded = without_weights(directory)
        unloaded.chat_template.check_used(settings, where="--template")
        rows, tokens = prepare(
            unloaded,
            asked,
            cache or list(DEFAULT),
            budget=budgets,
            dense_layers=dense_layers,
            max_new_tokens=new,
            template=settings,
        )

    # Run.
    with progress, bar(progress, "comparing") as advance_to:
        found = answer_rows(
            load_checkpoint(directory, dtype=dtype),
            rows,
            tokens,
            max_new_tokens=new,
            stop_tokens=unloaded.chat_stop_tokens if chat else unloaded.stop_tokens,
            draft=draft,
            measure_drafts=measure_drafts,
            progress=advance_to,
        )

    # Print.
    if as_json:
        write_json(*(answer.as_json() for answer in found))
    else:
        _print(found, dense_layers)


def _print(found: Sequence[Answer], dense_layers: int) -> None:
    """Prints the answers as a table, and why methods have none.

    Raises:
      ValueError: none has an answer.
    """
    show(_table(found))
    if dense_layers:
        say(
            f"tokens read is the mean over layers with attention; the first {dense_layers} of them read everything, "
            "unless a cache sets its own dense_layers (--dense-layers)"
        )
    for answer in found:
        if answer.refused:
            say(f"{answer.cache}: {answer.refused}")
    if all(answer.refused for answer in found):
        raise ValueError("no cache could be run; the reasons are above")


def _table(found: Sequence[Answer]) -> Table:
    """The answers, with columns for drafts where some were made or measured."""
    from rich.table import Table

    drafted = any(answer.tokens_per_step is not None for answer in found)
    measured = any(answer.accepted is not None for answer in found)
    titles = ["same", "tokens read", "MiB", "prompt, s", "tokens/s"]
    if drafted:
        titles.append("tokens a step")
    if measured:
        titles.append("accepted of 8")
    table = Table(show_lines=True)
    table.add_column("cache", no_wrap=True)
    table.add_column("answer", ratio=1)
    for title in titles:
        table.add_column(title, justify="right")
    for answer in found:
        if answer.refused:
            table.add_row(answer.cache, "refused", *[""] * len(titles))
            continue
        cells = _cells(answer)
        if drafted:
            steps = answer.tokens_per_step
            cells.append("1.00" if steps is None else f"{steps:.2f}")
        if measured:
            cells.append("-" if answer.accepted is None else f"{answer.accepted:.2f}")
        table.add_row(answer.cache, " ".join(answer.text.split()), *cells)
    return table


def _cells(answer: Answer) -> list[str]:
    """The numbers of an answer, under the titles that every table has."""
    memory = f"{answer.device_bytes / 2**20:.1f}"
    if answer.host_bytes:
        memory += f" + {answer.host_bytes / 2**20:.1f} host"
    return [
        f"{answer.same}/{len(answer.token_ids)}",
        f"{answer.attended:.0f}",
        memory,
        f"{answer.prefill_seconds:.2f}",
        f"{answer.decode_tokens_per_second:.1f}",
    ]
