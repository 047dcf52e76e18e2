"""A user's text, and a model's live queries on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import dtype_name, model_directory, sizes, without_weights
from kvjax.cli.terminal import bar

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvjax.evaluate.live import Live
    from kvjax.models import Checkpoint

Text = Annotated[
    Path | None,
    typer.Option(help="UTF-8 file with a long text, similar to those you will decode.", show_default=False),
]
Lengths = Annotated[str, typer.Option("--length", help="Context lengths in tokens, ascending.")]
Steps = Annotated[int, typer.Option(help="Consecutive decode steps to measure at each length.")]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A text that was tokenized and fits the model; the weights are not loaded yet."""

    directory: Path
    dtype: str
    text: Path
    checkpoint: Checkpoint  # without weights
    tokens: Sequence[int]
    lengths: Sequence[int]
    steps: int

    def about(self) -> dict[str, Any]:
        """The provenance of a measurement, for the head of its file."""
        from kvjax.evaluate import recall

        return recall.about(self.directory, self.text, self.dtype, self.lengths, self.steps)


def read(
    progress: Progress, model_dir: Path | None, text: Path | None, length: str, steps: int, dtype: str | None
) -> Reading:
    """Reads and tokenizes the text.

    Raises:
      ValueError: any error that can be found without the weights.
    """
    if text is None or not text.is_file():
        got = "got none" if text is None else f"{text} is not a file"
        raise ValueError(f"--text takes a UTF-8 file with a long text; {got}")
    lengths, kind, directory = sizes("--length", length), dtype_name(dtype), model_directory(model_dir)
    from kvjax.evaluate import live, recall

    with progress, bar(progress, "reading the text"):
        checkpoint = without_weights(directory)
        live.check_lengths(lengths, steps, checkpoint.config.max_positions)
        tokens = recall.read_tokens(checkpoint, text, lengths[-1])
    return Reading(
        directory=directory,
        dtype=kind,
        text=text,
        checkpoint=checkpoint,
        tokens=tokens,
        lengths=lengths,
        steps=steps,
    )


def capture(progress: Progress, reading: Reading) -> Live:
    """The model's queries, keys and values on the text."""
    from kvjax import models
    from kvjax.evaluate import live

    longest = reading.lengths[-1]
    with progress, bar(progress, "loading weights"):
        checkpoint = models.load(reading.directory, dtype=reading.dtype)
    with progress, bar(progress, f"live queries of {longest} tokens", total=longest) as advance_to:
        return live.capture(
            checkpoint, [reading.tokens], lengths=reading.lengths, steps=reading.steps, progress=advance_to
        )
