"""What commands show: bars on stderr, answers on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@contextmanager
def bar(progress: Progress, what: str, *, total: int | None = None) -> Iterator[Any]:
    """A bar while the block runs; yields a function that sets how much is done and, if given, the words beside it."""
    task = progress.add_task(what, total=total)
    try:
        yield lambda done, now=None: progress.update(task, completed=done, description=now)
    finally:
        progress.remove_task(task)


def show(table: Table) -> None:
    """A table on stdout, as wide as the terminal; a pipe has no width to fit into."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def write(text: str) -> None:
    """To stdout at once; characters that its encoding lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
