"""`kvjax chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import (
    Budget,
    CacheName,
    Dtype,
    Seed,
    Speculate,
    Temperature,
    TopP,
    check_folder,
    dtype_name,
    make_policy,
    model_directory,
    optional,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, write

if TYPE_CHECKING:
    from kvjax.models.chat import Chat

LEAVE = ("/exit", "/quit")


def chat(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Directory of a chat model.")
    ],
    cache: CacheName = "full",
    budget: Budget = None,
    system: Annotated[
        str | None, typer.Option(help="The message that opens the conversation.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, optional("Maximum number of tokens of an answer.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    resume: Annotated[
        Path | None,
        optional(
            "Folder of the conversation: goes on from what it holds, and saves there at the end.",
            metavar="DIR",
        ),
    ] = None,
    speculate: Speculate = None,
) -> None:
    """Talks with a chat model; its cache is kept between turns.

    Each line of stdin is a message, and the answer streams to stdout. /exit, or the end of the
    input, ends it.
    """

    from kvjax.models.chat import CHAT

    policy, _ = make_policy(cache, budget)
    kind, directory = dtype_name(dtype), model_directory(model_dir)
    check_folder("--resume", resume)
    asks = sys.stdin.isatty()
    if not asks:  # a reader of a pipe sees at once that it runs
        say(f"loading {directory.name}; each line of stdin is a message")
    progress = bars()
    with progress, bar(progress, "loading weights"):
        checkpoint = load_checkpoint(directory, dtype=kind)
    sampled: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    talk = checkpoint.chat(
        system=system,
        cache=policy,
        max_new_tokens=max_new_tokens,
        speculate=speculate,
        **sampled,
    )
    if resume is not None and (resume / CHAT).is_file():
        talk.restore(resume)
        say(f"going on after {len(talk.messages)} messages in {resume}")
    try:
        _talk(talk, asks)
    finally:
        if resume is not None and talk.messages:
            talk.save(resume)


def _talk(talk: Chat, asks: bool) -> None:
    """Answers the lines of stdin until they end."""
    while True:
        if asks:
            write("> ")
        line = sys.stdin.readline()
        message = line.strip()
        if not line or message in LEAVE:
            return
        if not message:
            continue
        try:
            for piece in talk.stream(message):
                write(piece)
        except (
            ValueError
        ) as error:  # a turn that does not fit leaves the conversation as it was
            say(f"error: {error}")
        write("\n")
