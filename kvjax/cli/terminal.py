"""The output of commands: progress bars on stderr, answers on stdout."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table


def bars() -> Progress:
    """Progress bars on stderr that disappear when done; none if stderr is not a terminal."""
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


LOG_EVERY = 30.0  # seconds between two log lines while work goes on, at most


@contextmanager
def bar(progress: Progress, what: str, *, total: int | None = None) -> Iterator[Any]:
    """Shows a progress bar while the block runs; yields `advance_to(done, of, item)`, which
    moves it.

    `of` is the total, by default `total`; `item` names the next piece of work. If stderr is not
    a terminal, a line with the latest progress goes there every LOG_EVERY seconds instead,
    whether or not it changed.
    """
    latest = [what]
    over = threading.Event()
    task = progress.add_task(what, total=total)

    def advance_to(done: int, of: int | None = None, item: str | None = None) -> None:
        of = total if of is None else of
        progress.update(
            task, completed=done, total=of, description=f"{what}: {item}" if item else what
        )
        latest[0] = (
            f"{what}: {done}"
            + (f" of {of}" if of is not None else "")
            + (f", {item}" if item else "")
        )

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


class Timeline:
    """The steps of a command, in seconds since its process began."""

    def __init__(self) -> None:
        now = time.perf_counter()
        try:
            # Field 22 of the process, the ticks from the start of the system to its own: man proc_pid_stat.
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            after_boot = float(fields[19]) / os.sysconf("SC_CLK_TCK")
            self._start = now - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot
        except (OSError, AttributeError, ValueError, IndexError):
            self._start = now  # another system, where it begins here
        self._rows = [(self._start, now, "start, imports")]

    @contextmanager
    def row(self, what: str) -> Iterator[list[str]]:
        """Times the block; more words for its line can be put into the list that it yields."""
        words = [what]
        begin = time.perf_counter()
        yield words
        self.add(begin, time.perf_counter(), ", ".join(words))

    def add(self, begin: float, end: float, what: str) -> None:
        """A row for the time between two values of `time.perf_counter`."""
        self._rows.append((begin, end, what))

    def __str__(self) -> str:
        rows = sorted(self._rows, key=lambda row: row[:2])
        return "\n".join(
            f"{a - self._start:8.2f} to {b - self._start:7.2f} s  {what}" for a, b, what in rows
        )


def collect_garbage() -> None:
    """Turns on the collector of cycles, which a command needs no longer be without when its
    imports are done.

    Imports and traces make many objects that stay, and the collector would look at them again
    and again.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def show(table: Table) -> None:
    """Prints a table to stdout, as wide as the terminal, or 160 columns wide to a pipe."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def show_markdown(text: str) -> None:
    """Prints Markdown to stdout; on a terminal, its tables become aligned columns."""
    from kvjax.evaluate.report import plain

    write(f"{plain(text)}\n" if sys.stdout.isatty() else text)


def write_json(*documents: Mapping[str, Any]) -> None:
    """Prints each document to stdout as a line of JSON; numbers that are not finite become
    null.
    """
    from kvjax.evaluate.provenance import json_text

    write("".join(map(json_text, documents)))


def write(text: str) -> None:
    """Writes to stdout and flushes it; characters that its encoding lacks become question
    marks.
    """
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
