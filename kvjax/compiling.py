"""Compilation: a folder of compiled programs, and the time that compiling took.

JAX keeps compiled programs in a folder if it is given one, so that a second process does not
compile them again. `use_compilation_cache` gives it one in the user's cache folder. The command
line calls it; a program of your own calls it where it wants it, since it sets options of JAX
that hold for the whole process. Nothing else in kvjax does. The variable
KVJAX_COMPILATION_CACHE names another folder, or turns the cache "off".
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "KVJAX_COMPILATION_CACHE"
OFF = ("", "0", "off", "no", "false")
LEAST_SECONDS = 0.2  # a program that compiles in less is not kept: to read it takes as long
MOST_BYTES = 4 << 30  # of a folder of programs
NEVER = 1e9  # seconds; no program is written
_config: Any = jax.config
_told: set[str] = set()
_logger = logging.getLogger("kvjax")


def use_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps compiled programs in a folder, so that the next process reads them; returns the
    folder, None if it is off.

    Call it before or after other work: it holds for all programs that JAX compiles from then
    on, as it sets `jax_compilation_cache_dir` and the least time of a program that is kept. A
    folder that JAX already uses (JAX_COMPILATION_CACHE_DIR, `jax_compilation_cache_dir`) stays
    as it is. A folder that cannot be read or written costs one line of the logger "kvjax" and
    the time to compile. A folder that has grown past 4 GiB loses the files that were read
    longest ago.

    Args:
      folder: by default the one that KVJAX_COMPILATION_CACHE names, else kvjax/programs in the
        user's cache folder.

    >>> use_compilation_cache("off") is None
    True
    """
    if _config.jax_compilation_cache_dir:
        return Path(_config.jax_compilation_cache_dir)
    named = os.environ.get(VARIABLE) if folder is None else str(folder)
    if named is not None and named.strip().lower() in OFF:
        return None
    root = (
        Path(named).expanduser() if named is not None else _user_folder() / "kvjax" / "programs"
    )
    # XLA compiles for the instructions of this processor, and JAX does not put them into the
    # key of an entry.
    path = root / _processor()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as error:
        tell_once(
            "folder",
            f"compiled programs are not kept, because {path} cannot be made or read "
            f"({error.strerror})",
        )
        return None
    problem = _unwritable(path)
    _config.update("jax_compilation_cache_dir", str(path))
    if problem:
        tell_once(
            "folder",
            f"compiled programs are read from {path} but not written there ({problem})",
        )
        _config.update("jax_persistent_cache_min_compile_time_secs", NEVER)
    elif _config.jax_persistent_cache_min_compile_time_secs == 1.0:  # as JAX has it
        _config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    if not problem:
        _prune(path)
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


def tell_once(what: str, line: str) -> None:
    """Writes a line to the logger "kvjax", unless one was written about the same `what`."""
    if what not in _told:
        _told.add(what)
        _logger.warning("%s", line)


def _prune(path: Path) -> None:
    """Removes the files that were read longest ago from a folder larger than `MOST_BYTES`."""
    found = []
    total = 0
    for file in path.iterdir():
        with suppress(OSError):  # another process may remove it
            about = file.stat()
            found.append((max(about.st_atime, about.st_mtime), about.st_size, file))
            total += about.st_size
    found.sort(key=lambda entry: entry[0])
    for _, size, file in found:
        if total <= MOST_BYTES:
            break
        with suppress(OSError):
            file.unlink()
        total -= size


# ------------------------------------------------------------------------------------------------------ programs


# Only one thread traces at a time. Tracing is work of Python, which threads cannot share, and each
# more thread that wants to run Python makes those that read weights wait 5 ms longer, whenever
# they come back from a copy.
_tracing = threading.Lock()


class Program(NamedTuple):
    """A jitted function with arguments, or with their shapes, which is to be compiled."""

    function: Any  # of `jax.jit`
    args: tuple[Any, ...]
    static: dict[str, Any]  # static arguments, by keyword

    def results(self) -> Any:
        """Shapes of what it returns. JAX keeps the trace, which `lower` finds again."""
        with _tracing:
            return self.function.eval_shape(*self.args, **self.static)

    def lower(self) -> jax.stages.Lowered:
        return self.function.lower(*self.args, **self.static)

    def compile(self) -> None:
        """Compiles it. A later call of the function with such arguments finds it compiled.

        Threads that do so compile side by side, and trace one after the other.
        """
        with _tracing:
            lowered = self.lower()
        lowered.compile()


# Variables of the environment that may change a program.
_SETTINGS = ("XLA_", "JAX_", "KVJAX_", "CUDA_", "NVIDIA_", "LIBTPU_")


def _surroundings() -> str:
    """The code, the device and the settings, which a program depends on beside its function and
    arguments.
    """
    device = jax.devices()[0]
    settings = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS)
    )
    where = len(jax.devices()), device.device_kind, device.client.platform_version, sys.version
    return f"{_sources()} {where} {settings} {sorted(jax.config.values.items(), key=lambda item: item[0])}"


@functools.cache
def _sources() -> str:
    """The code of this package, and the versions of those that it traces."""
    found = hashlib.sha256(
        str([importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")]).encode()
    )
    for folder, folders, files in os.walk(Path(__file__).parent, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in ("data", "__pycache__"))
        for name in sorted(files):
            found.update(name.encode() + Path(folder, name).read_bytes())
    return found.hexdigest()


def _digest(*what: Any) -> str:
    """A hash of what has a `repr`, and of this code, device and settings."""
    return hashlib.sha256(f"{_surroundings()} {what}".encode()).hexdigest()


def _write(file: Path, data: bytes) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        new.write_bytes(data)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def cached_on_disk(make: Callable[..., Any], *args: Any) -> Any:
    """`make(*args)`, which is JSON, or what an earlier process with this code, device and
    settings got from it.
    """
    if (folder := _folder()) is None:
        return make(*args)
    file = folder / f"{make.__qualname__}-{_digest(args)}-note"
    with suppress(OSError, ValueError):
        return json.loads(file.read_bytes())
    made = make(*args)
    with suppress(OSError):
        _write(file, json.dumps(made).encode())
    return made


# ---------------------------------------------------------------------------------------------------------------- time


def _folder() -> Path | None:
    return (
        Path(_config.jax_compilation_cache_dir) if _config.jax_compilation_cache_dir else None
    )


class Clock:
    """The seconds that this thread spent on compiling: tracing, lowering, XLA, and reading the
    cache on disk.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        # Seconds by the name of JAX's event. Tracing contains what is traced inside of it.
        self.parts: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Wall time so far; what JAX reports inside of another report counts once."""
        total = 0.0
        end = float("-inf")
        for first, last in sorted(self._spans):
            total += max(0.0, last - max(first, end))
            end = max(end, last)
        return total


_RETRIEVED = "/jax/compilation_cache/cache_retrieval_time_sec"
_running = threading.local()  # the clocks of this thread
_lock = threading.Lock()
_blocks = 0  # blocks of all threads in which a clock runs


@contextmanager
def compile_clock() -> Iterator[Clock]:
    """Measures what compiling costs the block, in this thread.

    JAX reports compiling to a listener, which is there only as long as a block runs.
    """
    global _blocks
    with _lock:
        if _blocks == 0:
            jax.monitoring.register_event_duration_secs_listener(_listen)
        _blocks += 1
    clocks = _running.__dict__.setdefault("clocks", [])
    clocks.append(Clock())
    try:
        yield clocks[-1]
    finally:
        clocks.pop()
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                with suppress(AssertionError, ValueError):  # a user may have cleared them
                    jax.monitoring.unregister_event_duration_listener(_listen)


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event.startswith(("/jax/core/compile/", _RETRIEVED)):
        now = time.monotonic()
        for clock in getattr(_running, "clocks", ()):
            clock._spans.append((now - duration_secs, now))
            clock.parts[event] = clock.parts.get(event, 0.0) + duration_secs
