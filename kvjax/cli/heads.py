"""`kvjax heads`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.cli.options import (
    AsJson,
    Dtype,
    ModelDir,
    check_file,
    check_seed,
    dtype_name,
    model_directory,
    optional,
    size,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, show_markdown, write, write_json

if TYPE_CHECKING:
    from kvjax.presets import Heads


def heads(
    model_dir: ModelDir = None,
    out: Annotated[
        Path | None, optional("JSON file for the heads. Without it they are only printed.")
    ] = None,
    echo: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of query heads that count as echo heads: those that attend most to earlier copies of a token.",
        ),
    ] = 0.01,
    induction: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of query heads that count as induction heads: those that attend most to the tokens after these "
            "copies.",
        ),
    ] = 0.14,
    length: Annotated[
        str,
        typer.Option(help="Tokens of the random sequence that is repeated, such as 256 or 1K."),
    ] = "256",
    repeats: Annotated[
        int, typer.Option(min=2, help="How often the model reads the sequence.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Finds the retrieval heads of a model, by RazorAttention's rule on repeated random tokens.

    Prints the retrieval heads of each layer, as KV heads. With --out, also prints values for
    --cache of the other commands: caches that keep all tokens in these heads only.
    """
    from kvjax.evaluate.heads import retrieval_heads

    # Parse.
    check_file("--out", out)
    check_seed(seed)
    kind = dtype_name(dtype)
    directory = model_directory(model_dir)
    tokens = size("--length", length)
    if tokens < 2:
        raise ValueError(f"--length must be at least 2, got {tokens}")
    total = tokens * repeats
    positions = without_weights(directory).config.max_positions
    if positions is not None and total > positions:
        raise ValueError(
            f"--length {length} times --repeats {repeats} are {total} tokens, and the model has {positions} "
            "positions; repeat fewer tokens"
        )

    # Run.
    progress = bars()
    with progress:
        with bar(progress, "loading weights"):
            checkpoint = load_checkpoint(directory, dtype=kind)
        with bar(progress, f"{total} random tokens") as advance_to:
            found = retrieval_heads(
                checkpoint,
                echo=echo,
                induction=induction,
                length=tokens,
                repeats=repeats,
                seed=seed,
                progress=advance_to,
            )

    # Print.
    if as_json:
        write_json(found.as_json())
    else:
        _print(found)
    if out is not None:
        found.save(out)
        if not as_json:
            write(f"\n--cache razorattention:heads={out}\n--cache duoattention:heads={out}\n")
        say(f"wrote {out}")


def _print(found: Heads) -> None:
    """Prints the retrieval heads of each layer as a table."""
    from kvjax.evaluate.report import markdown_table

    rows = [
        [str(layer), ", ".join(map(str, heads)) or "-"]
        for layer, heads in enumerate(found.layers)
    ]
    show_markdown(markdown_table(["layer", "KV heads"], rows) + "\n")
    write(f"\n{found.count} of {found.kv_heads * len(found.layers)} KV heads\n")
