"""Compilation: a cache of compiled programs on disk, and the time that compiling took.

JAX keeps compiled programs in a folder if it is told one. `kvjax` on the command line and
`kvjax.models.load` tell it one in the user's cache folder; a program of your own calls
`use_compilation_cache`. The variable KVJAX_COMPILATION_CACHE names another folder, or turns the
cache "off".

JAX finds a program in its folder by its lowered text, and to trace and lower takes Python
longer than the rest. Inside of `whole_programs`, a small file for each program of a `Jitted`
function names JAX's entry. Its key has this library's code: after an upgrade, a process that
finds the text unchanged writes such files again, and the next traces nothing.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "KVJAX_COMPILATION_CACHE"
OFF = ("", "0", "off", "no", "false")
LEAST_SECONDS = (
    0.2  # a program that compiles in less is not kept: to read it would take as long
)
NEVER = 1e9  # seconds; no program is written
_FAILED = (
    "Error reading persistent compilation cache",
    "Error writing persistent compilation cache",
)
_entries: Any = sys.modules[
    compilation_cache.reset_cache.__module__
]  # reads and writes those in JAX's folder
_config: Any = jax.config
_told: set[str] = set()
_logger = logging.getLogger("kvjax")


def use_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps compiled programs in a folder, so that the next process reads them; returns the
    folder, None if it is off.

    Call it before or after other work: it holds for all programs that JAX compiles from then
    on. A folder that JAX already uses (JAX_COMPILATION_CACHE_DIR, `jax_compilation_cache_dir`)
    stays. A folder that cannot be read or written, and a damaged entry in it, cost one line of
    the logger "kvjax" and the time to compile.

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
        path.mkdir(parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as error:
        _tell(
            f"compiled programs are not kept, because {path} cannot be made or read ({error.strerror})"
        )
        return None
    if problem := _unwritable(path):
        _tell(f"compiled programs are read from {path} but not written there ({problem})")
    if not getattr(warnings.showwarning, "of_kvjax", False):
        warnings.showwarning = _shown_by(warnings.showwarning)
    _config.update("jax_compilation_cache_dir", str(path))
    if problem:
        _config.update("jax_persistent_cache_min_compile_time_secs", NEVER)
    elif _config.jax_persistent_cache_min_compile_time_secs == 1.0:  # as JAX has it
        _config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
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
    """`warnings.showwarning` that says once that an entry of the cache failed, and removes a
    damaged one.
    """

    def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if not text.startswith(_FAILED):
            show(message, *args, **kwargs)
            return
        folder = _folder()
        if text.startswith(_FAILED[0]) and folder and text.count("'") >= 2:
            for entry in folder.glob(
                f"{text.split(chr(39))[1]}-*"
            ):  # JAX would never write over it
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


# ------------------------------------------------------------------------------------------------------ whole programs

_SETTINGS = (
    "XLA_",
    "JAX_",
    "KVJAX_",
    "CUDA_",
    "NVIDIA_",
    "LIBTPU_",
)  # variables that may change a program


class Jitted:
    """A function under `jax.jit`, which may run programs of `whole_programs`. Static arguments
    are keywords.
    """

    __wrapped__: Any  # the function

    def __init__(self, function: Callable[..., Any], **how: Any) -> None:
        self._jitted = jax.jit(function, **how)
        self.lower = self._jitted.lower
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **static: Any) -> Any:
        return self.bound(*args, **static)(*args)

    def bound(self, *args: Any, **static: Any) -> Callable[..., Any]:
        """The function of arguments such as these, for many calls."""
        found = _whole.get(_signature(self, args, static)) if _whole else None
        return functools.partial(self._jitted, **static) if found is None else found


class Program(NamedTuple):
    """A function with arguments, or with their shapes, which is to be compiled."""

    function: Any  # `Jitted`, or of `jax.jit`
    args: tuple[Any, ...]
    static: dict[str, Any]

    def lower(self) -> jax.stages.Lowered:
        return self.function.lower(*self.args, **self.static)

    def compile(self) -> None:
        """Compiles it; inside of `whole_programs` it is read from disk, or else written there."""
        folder = None if _whole is None or not isinstance(self.function, Jitted) else _folder()
        if folder is None or _whole is None:
            self.lower().compile()
            return
        begin, tree = time.monotonic(), jax.tree.structure((self.args, {}))
        kinds = [
            (a.shape, str(a.dtype), str(getattr(a, "sharding", None)))
            for a in jax.tree.leaves(self.args)
        ]
        name = self.function.__qualname__
        file = (
            folder / f"{name}-{_digest(name, sorted(self.static.items()), tree, kinds)}-whole"
        )
        made = _read_whole(file)
        if made is None:
            lowered, _running.key = self.lower(), None
            with compile_clock() as clock:
                made = lowered.compile()
            if (
                _running.key is not None
                and _config.jax_persistent_cache_min_compile_time_secs < NEVER
            ):
                _write_whole(file, made, _running.key, fresh=_RETRIEVED not in clock.parts)
        else:
            _listen("/jax/core/compile/backend_compile_duration", time.monotonic() - begin)
        _whole[_signature(self.function, self.args, self.static)] = made


_whole: dict[Hashable, jax.stages.Compiled] | None = None


@contextmanager
def whole_programs() -> Iterator[None]:
    """Inside, `Program.compile` reads and writes executables in JAX's folder, and `Jitted`
    functions run them.

    For a process that gives one answer: meanwhile, no setting of JAX or kvjax that changes
    programs may change.
    """
    global _whole
    ask: Any = vars(_entries).get("get_cache_key")
    before, _whole = _whole, {}

    def noting(*args: Any, **kwargs: Any) -> str:
        _running.key = ask(*args, **kwargs)
        return _running.key

    _entries.get_cache_key = noting
    try:
        yield
    finally:
        _whole, _entries.get_cache_key = before, ask


def _signature(function: Jitted, args: tuple[Any, ...], static: dict[str, Any]) -> Hashable:
    leaves, tree = jax.tree.flatten(args)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    return (
        id(function),
        tuple(sorted(static.items())),
        tree,
        tuple((a.shape, a.dtype) for a in leaves),
    )


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


def _read_whole(file: Path) -> jax.stages.Compiled | None:
    """The executable that a file names, if both are there."""
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(file.read_bytes()))
    except FileNotFoundError:  # the file, or JAX's entry
        return None
    except Exception as error:  # whatever a damaged file leads to
        with suppress(OSError):
            file.unlink()
        what = " ".join(str(error).split())[:120] or type(error).__name__
        _tell(
            f"a program could not be read in {file.parent} and was compiled ({what})",
            once="could not be read",
        )
        return None


class _Entry(tuple[Any, ...]):
    """JAX's entry: its key, backend and devices. Its pickle is read as the executable."""

    def __reduce__(self) -> Any:
        return _executable, tuple(self)


def _executable(key: str, backend: Any, devices: Any) -> Any:
    found, _ = _entries.get_executable_and_time(key, None, backend, devices)
    if found is None:
        raise FileNotFoundError(key)
    return found


def _write_whole(file: Path, made: Any, key: str, *, fresh: bool) -> None:
    """Writes an executable as JAX's entry of a key, if a file can be written: JAX has told why
    not.

    JAX makes no entry of what compiles fast, so it is made here. It must be `fresh`, compiled
    by this process: XLA for CPUs serialises an executable that it has read without its
    functions.
    """
    with suppress(Exception):
        made, whole = copy.copy(made), copy.copy(made._executable._unloaded_executable)
        if fresh and not file.with_name(f"{key}-cache").exists():
            _entries.put_executable_and_time(key, key, whole.xla_executable, whole.backend, 0)
        whole.xla_executable = _Entry((key, whole.backend, whole.device_list))
        made._executable = types.SimpleNamespace(_unloaded_executable=whole)
        _write(file, pickle.dumps(serialize_executable.serialize(made)))


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


def remembered(make: Callable[..., Any], *args: Any) -> Any:
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
        self.parts: dict[
            str, float
        ] = {}  # seconds by the name of JAX's event; tracing has what it traces inside

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
_RETRIEVED = "/jax/compilation_cache/cache_retrieval_time_sec"


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
    if event.startswith(("/jax/core/compile/", _RETRIEVED)):
        now = time.monotonic()
        for clock in getattr(_running, "clocks", ()):
            clock._spans.append((now - duration_secs, now))
            clock.parts[event] = clock.parts.get(event, 0.0) + duration_secs
