"""Compilation: a cache of compiled programs on disk, and the time that compiling took.

JAX keeps compiled programs in a folder if it is told one. `kvjax` on the command line and `kvjax.models.load` tell it
one in the user's cache folder; a program of your own calls `use_compilation_cache`. The variable
KVJAX_COMPILATION_CACHE names another folder, or turns the cache "off".
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

VARIABLE = "KVJAX_COMPILATION_CACHE"
OFF = ("", "0", "off", "no", "false")
LEAST_SECONDS = 0.2  # a program that compiles in less is not kept: to read it would take as long
NEVER = 1e9  # seconds; no program is written
_FAILED = ("Error reading persistent compilation cache", "Error writing persistent compilation cache")
_told: set[str] = set()
_logger = logging.getLogger("kvjax")


def use_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps compiled programs in a folder, so that the next process reads them; returns the folder, None if it is off.

    Call it before or after other work: it holds for all programs that JAX compiles from then on. A folder that JAX
    already uses (JAX_COMPILATION_CACHE_DIR, `jax_compilation_cache_dir`) stays. A folder that cannot be read or
    written, and a damaged entry in it, cost one line of the logger "kvjax" and the time to compile.

    Args:
      folder: by default the one that KVJAX_COMPILATION_CACHE names, else kvjax/programs in the user's cache folder.

    >>> use_compilation_cache("off") is None
    True
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    named = os.environ.get(VARIABLE) if folder is None else str(folder)
    if named is not None and named.strip().lower() in OFF:
        return None
    root = Path(named).expanduser() if named is not None else _user_folder() / "kvjax" / "programs"
    # XLA compiles for the instructions of this processor, and JAX does not put them into the key of an entry.
    path = root / _processor()
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as error:
        _tell(f"compiled programs are not kept, because {path} cannot be made or read ({error.strerror})")
        return None
    if problem := _unwritable(path):
        _tell(f"compiled programs are read from {path} but not written there ({problem})")
    if not getattr(warnings.showwarning, "of_kvjax", False):
        warnings.showwarning = _shown_by(warnings.showwarning)
    config.update("jax_compilation_cache_dir", str(path))
    if problem:
        config.update("jax_persistent_cache_min_compile_time_secs", NEVER)
    elif config.jax_persistent_cache_min_compile_time_secs == 1.0:  # as JAX has it
        config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()  # JAX asks for the folder once, at its first program
    return path


def _user_folder() -> Path:
    """Where programs keep what they can make again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _processor() -> str:
    """A name for the instructions of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        found = platform.processor()
    return f"{platform.machine() or 'cpu'}-{hashlib.sha256(found.encode()).hexdigest()[:8]}"


def _unwritable(path: Path) -> str | None:
    """Why no file of a megabyte can be written in a folder; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def _shown_by(show: Any) -> Any:
    """`warnings.showwarning` that says once that an entry of the cache failed, and removes a damaged one."""

    def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if not text.startswith(_FAILED):
            show(message, *args, **kwargs)
            return
        folder = _folder()
        if text.startswith(_FAILED[0]) and folder and text.count("'") >= 2:
            for entry in folder.glob(f"{text.split(chr(39))[1]}-*"):  # JAX would never write over it
                entry.unlink(missing_ok=True)
        what = " ".join(text.partition(": ")[2].split())[:120]
        doing = "could not be read" if text.startswith(_FAILED[0]) else "could not be written"
        _tell(f"a program {doing} in {folder} and was compiled ({what})", once=doing)

    showwarning.of_kvjax = True  # type: ignore[attr-defined]
    return showwarning


def _tell(line: str, *, once: str | None = None) -> None:
    if (once or line) not in _told:
        _told.add(once or line)
        _logger.warning("%s", line)


# ---------------------------------------------------------------------------------------------------------------- time

TIMES = "kvjax_seconds.json"  # beside the programs on disk
MOST_TIMES = 400
READING = 1 / 4  # the share of the seconds of compiling that reading takes, until it was noted


def expected_seconds(programs: str, kind: str) -> float | None:
    """Seconds that `programs` will take, by what `note_seconds` noted for them, or else for others of their kind, with
    this version of JAX on this kind of device; None if it noted nothing."""
    known = _times()
    return known.get(_named(programs), known.get(_named(kind)))


def note_seconds(programs: str, kind: str, seconds: float) -> None:
    """Notes beside the programs on disk how long these took: to compile, or to read if they were noted before."""
    known, folder = _times(), _folder()
    if folder is None:
        return
    if _named(programs) in known:
        known[_named(programs)] = seconds
    else:
        known |= {_named(kind): seconds, _named(programs): seconds * READING}
    new = folder / f"{TIMES}.{os.getpid()}"
    with suppress(OSError):
        try:
            new.write_text(json.dumps(dict(list(known.items())[-MOST_TIMES:])))
            new.replace(folder / TIMES)
        finally:
            new.unlink(missing_ok=True)


def _folder() -> Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(folder) if folder else None


def _times() -> dict[str, float]:
    folder = _folder()
    try:
        found = {} if folder is None else json.loads((folder / TIMES).read_text())
        return {str(name): float(seconds) for name, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or not ours
        return {}


def _named(what: str) -> str:
    return hashlib.sha256(f"{jax.__version__} {jax.devices()[0].device_kind} {what}".encode()).hexdigest()[:16]


class Clock:
    """The seconds that this thread spent on compiling: tracing, lowering, XLA, and reading the cache on disk."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.parts: dict[str, float] = {}  # seconds by the name of JAX's event; tracing has what it traces inside

    @property
    def seconds(self) -> float:
        """Wall time so far; what JAX reports inside of another report counts once."""
        total, end = 0.0, float("-inf")
        for first, last in sorted(self._spans):
            total += max(0.0, last - max(first, end))
            end = max(end, last)
        return total


_running = threading.local()
_listening: list[bool] = []


@contextmanager
def compile_clock() -> Iterator[Clock]:
    """Measures what compiling costs the block, in this thread."""
    if not _listening:
        _listening.append(True)
        jax.monitoring.register_event_duration_secs_listener(_listen)
    clocks = _running.__dict__.setdefault("clocks", [])
    clocks.append(Clock())
    try:
        yield clocks[-1]
    finally:
        clocks.pop()


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        now = time.monotonic()
        for clock in getattr(_running, "clocks", ()):
            clock._spans.append((now - duration_secs, now))
            clock.parts[event] = clock.parts.get(event, 0.0) + duration_secs
