"""Loads the objects that text names: those of a file, "mine.py:NAME", of a module,
"package.module:NAME", or of an installed package that announces them in its metadata.

A file is a module of its own, run once until it, or a file beside it that it imports, changes.
While it runs it can import the files beside it, as a script can; `sys.path` is afterwards what it
was. Each file imports them anew, so those of two folders may have one name.

A package announces what it has by entry points:

    [project.entry-points."kvjax.presets"]
    mine = "package.module:mine"
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from kvjax.validation import cut, nearest, short_repr

FILE = re.compile(r"(?P<place>.+?\.py)(?::(?P<name>[^:]*))?(?::(?P<rest>.*))?", re.DOTALL)
MODULE = re.compile(
    r"(?P<place>[^\W\d][\w.]*):(?P<name>[^\W\d]\w*)(?::(?P<rest>.*))?", re.DOTALL
)


@dataclass(frozen=True)
class _Run:
    """A file that was run."""

    module: ModuleType
    beside: dict[str, ModuleType]  # what it imported from its folder, by name
    files: dict[Path, int | None]  # those of all these modules: when each was last changed


_runs: dict[Path, _Run] = {}  # by the path of the file


@dataclass(frozen=True)
class Reference:
    """The name of an object of a file or module, as it is written in text."""

    place: str  # "mine.py" or "package.module"
    name: str
    settings: str = ""  # what follows: "group=16"

    @property
    def text(self) -> str:
        """The reference without settings."""
        return f"{self.place}:{self.name}"

    @property
    def stem(self) -> str:
        """The place without its folder or package: "mine"."""
        return Path(self.place).stem if self.is_file else self.place.rpartition(".")[2]

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")


def reference(text: str) -> Reference | None:
    """The reference that a text is; None for other names.

    >>> reference("methods/mine.py:mine:group=16")
    Reference(place='methods/mine.py', name='mine', settings='group=16')
    >>> reference("package.module:mine").text
    'package.module:mine'
    >>> reference("fier:group=16")
    """
    found = FILE.fullmatch(text) or MODULE.fullmatch(text)
    if found is None:
        return None
    return Reference(found["place"], found["name"] or "", found["rest"] or "")


def load(wanted: Reference, *, where: str) -> Any:
    """The object that a reference names. `where` begins an error message.

    Raises:
      ValueError: no such file, module or name; or the file or module raised an error, which is
        the cause.
    """
    label = f"{where} {wanted.text}"
    module = _run_file(Path(wanted.place), label) if wanted.is_file else _module(wanted, label)
    names = [name for name in vars(module) if not name.startswith("_")]
    if not wanted.name:
        raise ValueError(f"{label} names a file alone; write {_choices(wanted.place, names)}")
    if not hasattr(module, wanted.name):
        near = nearest(wanted.name, names)
        cure = f"did you mean {near!r}?" if near else f"write {_choices(wanted.place, names)}"
        raise ValueError(f"{label}: {wanted.place} has no {wanted.name!r}; {cure}")
    return getattr(module, wanted.name)


def announced(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group, by name, of all installed packages."""
    return {point.name: point for point in entry_points(group=group)}


def load_announced(point: EntryPoint, *, where: str) -> Any:
    """The object of an entry point.

    Raises:
      ValueError: its module or name cannot be loaded.
    """
    try:
        return point.load()
    except Exception as error:
        raise ValueError(
            f"{where} {point.name}: the installed package's entry point {point.value} raised {_brief(error)}; mend "
            "or uninstall it"
        ) from error


def _module(wanted: Reference, label: str) -> ModuleType:
    try:
        return importlib.import_module(wanted.place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{wanted.place}.".startswith(f"{missing}."):  # a module that this one imports
            raise ValueError(
                f"{label}: importing {wanted.place} raised {_brief(error)}"
            ) from error
        file = Path(f"{wanted.place.replace('.', '/')}.py")
        cure = "install it, or write FILE.py:NAME"
        if file.is_file():
            cure = f"for a file write {file}:{wanted.name}"
        raise ValueError(f"{label}: there is no module {missing!r}; {cure}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{label}: importing {wanted.place} raised {_brief(error)}") from error


def _run_file(path: Path, label: str) -> ModuleType:
    """The module of a file: the same one until it or a file that it imports changes."""
    try:
        path = path.expanduser().resolve()
        known = path.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        known = False
    if not known:
        raise ValueError(
            cut(f"{label}: there is no file {path}; give the path of a Python file")
        )
    run = _runs.get(path)
    if run is not None and run.files == _times(run.files):
        return run.module
    times = _times([path])
    # A name that no other module has: dataclasses look their module up by it.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{times[path]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _imported_anew(path.parent) as beside, _importable(path.parent):
            # Compiled here: bytecode on disk would be taken for a file that changed within a second.
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # a script may end in sys.exit()
        sys.modules.pop(name, None)
        raise ValueError(f"{label}: {path.name} raised {_brief(error, path)}") from error
    times |= _times(file for one in beside.values() if (file := _file_of(one)) is not None)
    _runs[path] = _Run(module, beside, times)
    return module


def files_of(kind: type) -> list[Path]:
    """The files that a class is made of, if one that was run here defines or imports it: that
    file, and those beside it that it imports.
    """
    for run in _runs.values():
        imported = any(vars(one).get(kind.__name__) is kind for one in run.beside.values())
        if imported or kind.__module__ == run.module.__name__:
            return sorted(run.files)
    return []


def _times(files: Iterable[Path]) -> dict[Path, int | None]:
    """When each file was last changed; None if it is gone."""
    return {file: file.stat().st_mtime_ns if file.is_file() else None for file in files}


def _file_of(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name) if isinstance(name, str) else None


@contextmanager
def _imported_anew(folder: Path) -> Iterator[dict[str, ModuleType]]:
    """In the block, modules that files imported from their folders are imported anew. Yields
    those that it imports from `folder`, by name, which are known after it. Modules of other files
    that it has no own for can be imported again after the block, and all of them if it fails.
    """
    taken: dict[str, ModuleType] = {}
    for run in _runs.values():
        for name, module in run.beside.items():
            if sys.modules.get(name) is module:
                taken[name] = sys.modules.pop(name)
    before = set(sys.modules)
    found: dict[str, ModuleType] = {}
    try:
        yield found
    except BaseException:
        for name in _beside(folder, before):
            del sys.modules[name]
        sys.modules.update(taken)
        raise
    found |= _beside(folder, before)
    packages = {name.partition(".")[0] for name in found}
    for name, module in taken.items():
        if name.partition(".")[0] not in packages:
            sys.modules.setdefault(name, module)


def _beside(folder: Path, before: set[str]) -> dict[str, ModuleType]:
    """Modules and packages of `folder`, by name, but those of names and packages in `before`."""
    found = {}
    for name in sys.modules.keys() - before:
        module = sys.modules[name]
        place = folder / name.replace(".", "/")
        # Installed packages may be below the folder, and known ones go on to import their own. A
        # package without __init__.py has no file.
        is_file = _file_of(module) == place.with_suffix(".py")
        is_package = str(place) in list(getattr(module, "__path__", ()))
        if (is_file or is_package) and name.partition(".")[0] not in before:
            found[name] = module
    return found


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """While the block runs, modules of `folder` can be imported, after those of all other places."""
    place = str(folder)
    if place in sys.path:
        yield
        return
    sys.path.append(place)
    try:
        yield
    finally:
        if place in sys.path:
            sys.path.remove(place)


def _brief(error: BaseException, path: Path | None = None) -> str:
    """An error in a few words, and the line of `path` that raised it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError):
        lines = [] if error.lineno is None else [error.lineno]
    at = f" on line {lines[-1]}" if lines else ""
    says = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}{at}" + (f": {says}" if says else "")


def _choices(place: str, names: list[str]) -> str:
    return f"{place}:NAME" + (
        f", such as {place}:{names[-1]}" if names else f"; {short_repr(place)} has no names"
    )
