"""`kvjax chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
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
    TemplateSettings,
    TopP,
    at_home,
    check_folder,
    check_holds,
    check_new_tokens,
    check_seed,
    dtype_name,
    make_policy,
    model_directory,
    optional,
    template_settings,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, write
from kvjax.validation import check_utf8

if TYPE_CHECKING:
    from kvjax.models import Checkpoint
    from kvjax.models.chat import Chat

LEAVE = ("/exit", "/quit")
SAVE = "/save"


def chat(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Directory of a chat model.")
    ],
    cache: CacheName = "full",
    budget: Budget = None,
    system: Annotated[
        str | None, typer.Option(help="The message that opens the conversation.")
    ] = None,
    template: TemplateSettings = None,
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
    input, ends it. /save DIR saves the conversation so far, for --resume DIR; /save alone saves
    to the folder of --resume.
    """
    from kvjax.generation import drafts
    from kvjax.generation.sampling import requested_sampling

    # Parse: what is wrong is said here, before the weights are read.
    policy, _ = make_policy(cache, budget)
    settings = template_settings(template)
    requested_sampling(temperature, top_p=top_p)
    check_seed(seed)
    check_utf8("--system", system)
    check_new_tokens(max_new_tokens)
    draft = None if speculate is None else drafts.parse(speculate)
    dtype = dtype_name(dtype)
    directory = model_directory(model_dir)
    unloaded = without_weights(directory)
    goes_on = _goes_on(resume, unloaded)
    if goes_on and system is not None:
        raise ValueError(
            f"--system opens a conversation, and {resume} holds one that has begun; leave it out, "
            "or give another folder"
        )
    check_holds(cache, policy, unloaded, dtype, draft)
    _check_template(unloaded, settings)

    # Run.
    on_terminal = sys.stdin.isatty()
    if not on_terminal:  # a reader of a pipe sees at once that it runs
        say(f"loading {directory.name}; each line of stdin is a message")
    progress = bars()
    with progress, bar(progress, "loading weights"):
        checkpoint = load_checkpoint(directory, dtype=dtype)
    talk = checkpoint.chat(
        system=system,
        cache=policy,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        speculate=draft,
        template=settings,
    )
    if goes_on and resume is not None:
        _restore(talk, resume, cache)
        say(f"going on after {len(talk.messages)} messages in {resume}")
    try:
        _talk(talk, resume, on_terminal)
    finally:
        if resume is not None and talk.messages:
            talk.save(resume)


def _goes_on(folder: Path | None, checkpoint: Checkpoint) -> bool:
    """True if a folder holds a conversation with this model.

    Raises:
      ValueError: it can hold none; or the conversation is damaged, or with another model.
    """
    from kvjax.models.chat import CHAT, read_saved

    check_folder("--resume", folder)
    if folder is None or not (folder / CHAT).is_file():
        return False
    if read_saved(folder)["model"] != repr(checkpoint.config):
        raise ValueError(
            f"the conversation in {folder} was saved with another model; give that one, or another folder"
        )
    return True


def _restore(talk: Chat, folder: Path, cache: str) -> None:
    """Goes on from the conversation in a folder."""
    from kvjax.cache.saving import OtherCacheError

    again = f"remove {folder / 'cache'}, and the conversation is read again"
    try:
        talk.restore(folder)
    except OtherCacheError as error:
        raise ValueError(
            f"the conversation in {folder} was saved with another --cache than {cache}, another --budget or "
            f"another --dtype; give those, or {again}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{error}; {again}") from error


def _check_template(checkpoint: Checkpoint, settings: Mapping[str, Any] | None) -> None:
    """Raises ValueError for a model without a chat template, or a setting that it does not use."""
    checkpoint.chat_template.check_used(settings, where="--template")
    checkpoint.render_chat("hello", template=settings)


def _talk(talk: Chat, folder: Path | None, on_terminal: bool) -> None:
    """Answers the lines of stdin until they end."""
    for line in _lines(on_terminal):
        message = line.strip()
        if message in LEAVE:
            return
        if message.partition(" ")[0] == SAVE:
            _save(talk, message.removeprefix(SAVE).strip(), folder)
        elif message:
            _answer(talk, message)


def _lines(on_terminal: bool) -> Iterator[str]:
    """The lines of stdin, each after a prompt sign on a terminal."""
    while True:
        if on_terminal:
            write("> ")
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"stdin is not UTF-8: byte 0x{error.object[error.start]:02x}; convert it first, "
                "for example with `iconv -t utf-8`"
            ) from None
        if not line:
            return
        yield line


def _answer(talk: Chat, message: str) -> None:
    try:
        for piece in talk.stream(message):
            write(piece)
    except ValueError as error:  # a turn that does not fit leaves the conversation as it was
        say(f"error: {error}")
    write("\n")


def _save(talk: Chat, given: str, folder: Path | None) -> None:
    """Saves a conversation to the folder that is given, or else to that of --resume."""
    target = Path(given) if given else folder
    if target is None:
        say(f"error: {SAVE} needs a folder: {SAVE} DIR")
        return
    try:
        target = at_home(SAVE, target)
        check_folder(SAVE, target)
        talk.save(target)
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return
    say(f"saved {len(talk.messages)} messages; kvjax chat --resume {target} goes on from them")
