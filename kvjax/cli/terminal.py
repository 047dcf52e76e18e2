"""The output of commands: bars on stderr, answers on stdout."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table


def bars() -> Progress:
    """Bars on stderr that vanish when done; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


LOG_EVERY = 30.0  # seconds, at most, between two lines of a log while work goes on


@contextmanager
def bar(progress: Progress, what: str, *, total: int | None = None) -> Iterator[Any]:
    """A bar while the block runs; yields a function of how much is done, of how much, and which item comes next.

    `total` is of how much where that function is not told.

    Where there is no terminal, a line goes to stderr instead: one when the block has run for LOG_EVERY seconds, and so
    on, each with the latest that is known, whether or not anything was reported since.
    """
    latest, over = [what], threading.Event()
    task = progress.add_task(what, total=total)

    def advance_to(done: int, of: int | None = None, item: str | None = None) -> None:
        of = total if of is None else of
        progress.update(task, completed=done, total=of, description=f"{what}: {item}" if item else what)
        latest[0] = f"{what}: {done}" + (f" of {of}" if of is not None else "") + (f", {item}" if item else "")

    def log() -> None:
        begin = time.monotonic()
        while not over.wait(LOG_EVERY):
            say(f"{latest[0]} ({time.monotonic() - begin:.0f} s)")

    logger = threading.Thread(target=log, daemon=True) if progress.disable else None
    if logger is not None:
        logger.start()
    try:
        yield advance_to
    finally:
        over.set()
        progress.remove_task(task)


def show(table: Table) -> None:
    """A table on stdout, as wide as the terminal; a pipe has no width to fit into."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def show_markdown(text: str) -> None:
    """Markdown on stdout; on a terminal its tables stand in columns."""
    from kvjax.evaluate.report import plain

    write(f"{plain(text)}\n" if sys.stdout.isatty() else text)


def write_json(*documents: Mapping[str, Any]) -> None:
    """A line of JSON on stdout for each; a number that is not finite becomes null."""
    from kvjax.evaluate.provenance import json_text

    write("".join(map(json_text, documents)))


def write(text: str) -> None:
    """To stdout at once; characters that its encoding lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
