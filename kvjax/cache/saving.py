"""Caches on disk: to continue a conversation after a restart, or a prefix that is read once and
continued many times.

A cache is saved by orbax-checkpoint together with a description of its kind (the format, and
every field of each layer's policy and spec) and a SHA-256 of each array. Restoring takes a
cache of the wanted kind (`like`, made by `kvjax.init`). It refuses a save of any other kind,
naming each difference, and one whose bytes have changed.

A directory holds numbered saves of one writer at a time. A save is written under a temporary
name and gets its own when it is complete, so an interrupted save leaves the last good one
readable. Links in the directory are not followed.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import os
import shutil
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.core import Tracer

from kvjax.cache.cache import (
    Cache,
    LayerCache,
    init_layer,
    layers_of,
    shardings,
    with_layers,
    with_states,
)
from kvjax.cache.growing import grow
from kvjax.cache.serialize import differences, plain, summarize
from kvjax.memory import of_first_process, on_host, shapes, typed
from kvjax.sharding.placement import in_order_of_place
from kvjax.spec import CacheSpec, require_int
from kvjax.validation import check_alive, short_repr

FORMAT = 2  # of states and of their description; increased when the meaning of a field changes
LOCK = ".kvjax-writer"  # a file in the directory, locked by the process that writes a save
SETTLE = 0.05  # seconds to wait for reads that were in progress when another one failed
OPENED = 20  # attempts to list a directory while a writer removes old saves
# in the name of a save that is being written, or was interrupted
UNFINISHED = ".orbax-checkpoint-tmp"
SAVED_FIELDS = {".pinned": ".stays"}  # fields of states by their names in saves of this format


class DamagedSaveError(ValueError):
    """A save whose files are not those that were written: cut short, changed or missing."""


class OtherCacheError(ValueError):
    """A save of another kind of cache than the one that it should fill."""


def save(directory: str | Path, cache: Cache | LayerCache, *, keep: int = 1) -> int:
    """Saves `cache` and returns the number of the save. The newest `keep` complete saves are
    kept.

    Under `jax.distributed` all processes call it, with a directory that all of them can access.

    Reads the arrays from the device and waits until everything is on disk. A save that fails
    leaves the earlier ones unchanged, and removes what it has written.

    Raises:
      ValueError: a `cache` that is not a cache, or one whose arrays were donated; a `directory`
        that is not a path, or that has links in place of saves.
      RuntimeError: another process is saving to the directory.
      OSError: the directory cannot be written, for example because the disk is full.
    """
    _check("save", cache)
    keep = require_int("save(keep=...)", keep, at_least=1)
    path = _path(directory)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give the name of a directory for saves")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"save cannot make the directory {path} ({_short(error)}); give one to write in"
        ) from error
    _refuse_links(path)
    leaves = dict(_named(_by_place(cache)))
    about = describe(cache) | {"sha256": {name: _digest(leaf) for name, leaf in leaves.items()}}
    about["sha256_of_this"] = digest_json(about)
    # every process writes its own arrays, and the first one does the rest
    first = jax.process_index() == 0
    with only_writer(path) if first else nullcontext(), _quiet():
        if first:
            _remove_unfinished(path)
        step = of_first_process(max(_numbered(path), default=-1) + 1)
        try:
            with _manager(path, keep=keep) as manager:
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        arrays=ocp.args.StandardSave(leaves), about=ocp.args.JsonSave(about)
                    ),
                )
                manager.wait_until_finished()
        except BaseException as error:
            if first:
                _remove_unfinished(path)
            if not isinstance(error, Exception):
                raise
            raise OSError(
                f"the save to {path} failed ({_short(error)}); earlier saves there are unchanged"
            ) from error
        if not _is_complete(path / str(step)):
            raise OSError(
                f"the save to {path} was not written; earlier saves there are unchanged"
            )
    return step


def restore(directory: str | Path, like: Cache | LayerCache, *, step: int | None = None) -> Any:
    """Restores the newest complete save, as a cache of the kind of `like`, on its devices and
    in its memory.

    `like` may be a cache of arrays, or one of shapes, as `jax.eval_shape` of `kvjax.init`
    returns it: arrays without a sharding go to the default device, or to host memory if
    `kvjax.init` would put them there. If `like` has a larger capacity than the save, the
    restored cache is grown to it.

    `step` selects the save of that number. Without it, a damaged newest save causes a warning,
    and the newest intact one before it is restored.

    Raises:
      FileNotFoundError: the directory has no complete save, or none of that number.
      DamagedSaveError: (a ValueError) no save is intact, or the requested one is not.
      ValueError: the save is of another format, policy, spec or shape; the message lists every
        difference. Or the placement of `like` cannot split such a cache.
    """
    _check("restore(like=...)", like)
    for layer in layers_of(like):
        # `kvjax.init` has checked it, but shapes may have got another one since.
        if layer.placement is not None:
            layer.placement.check(layer.policy, layer.spec)
    if step is not None:
        step = require_int("restore(step=...)", step, at_least=0)
    path = _path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; kvjax.save makes one")
    for _ in range(OPENED):
        steps = saved_steps(path)
        if not steps:
            raise FileNotFoundError(
                f"{path} holds no complete save of a cache; kvjax.save makes one"
            )
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"{path} has no save {step}; there are {', '.join(map(str, steps))}"
            )
        wanted = steps if step is None else [step]
        found, damaged = _newest_whole(path, like, wanted)
        if found is not None:
            return found
        if step is not None or max(saved_steps(path), default=-1) <= steps[-1]:
            break  # otherwise a writer has replaced them by a newer one
    before = [number for number in steps if number < wanted[-1]]
    cure = "save the cache again"
    if step is not None and before:
        cure = f"the one before is save {before[-1]}: restore(..., step={before[-1]})"
    raise DamagedSaveError(f"{damaged}; {cure}") from damaged


def _newest_whole(
    path: Path, like: Cache | LayerCache, steps: list[int]
) -> tuple[Any, DamagedSaveError | None]:
    """The newest intact save, or None; and the error of the newest damaged one, or None."""
    damaged: DamagedSaveError | None = None
    for number in reversed(steps):
        try:
            found = _restore(path, like, number)
        except DamagedSaveError as error:
            damaged = damaged or error
            continue
        if damaged is not None:
            warnings.warn(f"{damaged}; restored save {number} in its place", stacklevel=3)
        return found, damaged
    return None, damaged


def saved_steps(directory: str | Path) -> list[int]:
    """The numbers of the complete saves in a directory, in order."""
    path = _path(directory)
    return sorted(number for number in _numbered(path) if _is_complete(path / str(number)))


def _restore(path: Path, like: Cache | LayerCache, step: int) -> Any:
    _check_files(path, step)
    with _quiet(), _manager(path, keep=None) as manager:
        saved = _read_description(manager, path, step)
        digests = saved.pop("sha256")
        room = _with_capacity_of(saved, like)
        _check_kind(saved, room, like, f"save {step} in {path}")
        homes = _homes(room)
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=typed(home))
            for (name, leaf), home in zip(_named(room), homes, strict=True)
        }
        try:
            found = manager.restore(
                step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
            )["arrays"]
        except Exception as error:
            raise _damage(path, step, f"its arrays cannot be read ({_short(error)})") from error
    changed = [name for name in wanted if _digest(found[name]) != digests.get(name)]
    if changed:
        raise _damage(path, step, f"{', '.join(changed[:4])} changed since it was written")

    # A cache of the capacity that was saved, then one that has grown to that of `like`.
    leaves = [
        jax.device_put(found[name], home) for name, home in zip(wanted, homes, strict=True)
    ]
    cache = _by_place(jax.tree.unflatten(jax.tree.structure(room), leaves), back=True)
    if room is like:
        return cache
    grown = jax.tree.leaves(grow(cache, like.spec.capacity))
    moved = [jax.device_put(leaf, home) for leaf, home in zip(grown, _homes(like), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), moved)


def _damage(path: Path, step: int, what: str) -> DamagedSaveError:
    return DamagedSaveError(f"save {step} in {path} is damaged: {what}")


def _check_files(path: Path, step: int) -> None:
    """Raises DamagedSaveError for a save that has anything but files and folders, such as a link
    to a file elsewhere.
    """
    try:
        folder = path / str(step)
        modes = {entry: entry.lstat().st_mode for entry in (folder, *folder.rglob("*"))}
    except OSError as error:  # a writer removes it
        raise _damage(path, step, f"its files cannot be listed ({_short(error)})") from error
    strange = sorted(
        entry for entry, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    )
    if strange:
        raise _damage(
            path, step, f"{strange[0]} is a link or another kind of file, which is not read"
        )


def _read_description(manager: Any, path: Path, step: int) -> dict[str, Any]:
    """Returns the description of a save.

    Raises:
      DamagedSaveError: it is not as it was written.
      ValueError: another version of kvjax wrote it, in another format.
    """
    try:
        saved = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))[
            "about"
        ]
    except Exception as error:
        raise _damage(
            path, step, f"its description cannot be read ({_short(error)})"
        ) from error
    own = saved.pop("sha256_of_this", None) if isinstance(saved, dict) else None
    if (version := _other_format(saved, own)) is not None:
        age = "a newer" if version > FORMAT else "an older"
        raise ValueError(
            f"save {step} in {path} was written by {age} version of kvjax (its format is {version}, and this "
            f"version reads {FORMAT}); restore it with that version, or save the cache again"
        )
    if digest_json(saved) != own:
        raise _damage(path, step, "its description has changed since it was written")
    if wrong := _malformed(saved):
        raise _damage(path, step, f"its description {wrong}")
    description: dict[str, Any] = saved
    return description


def _check_kind(
    saved: dict[str, Any], room: Cache | LayerCache, like: Cache | LayerCache, what: str
) -> None:
    """Raises OtherCacheError if the save that is called `what` has another kind of cache than `like`;
    `room` is `like` with the capacity of the save.
    """
    if _of_model(saved) != isinstance(like, Cache):
        kinds = ("of one layer", "of a whole model")
        raise OtherCacheError(
            f"{what} has the cache {kinds[_of_model(saved)]}, and `like` is one "
            f"{kinds[isinstance(like, Cache)]}; make `like` with {'init' if _of_model(saved) else 'init_layer'}"
        )
    different = summarize(differences(saved, describe(room)))
    if different:
        raise OtherCacheError(
            f"{what} is of another kind of cache; make one of that kind, or save again: "
            + "; ".join(different)
        )


def _other_format(saved: Any, own: Any) -> int | None:
    """The format of a description that another version of kvjax wrote, or None. Other formats
    may have other fields.
    """
    version = saved.get("format") if isinstance(saved, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version == FORMAT:
        return None
    # one digit has changed
    return None if digest_json(saved | {"format": FORMAT}) == own else version


def _malformed(saved: dict[str, Any]) -> str | None:
    """Says what is wrong with the fields of a description; None if nothing is."""
    layers = saved.get("layers")
    if (
        not isinstance(layers, list)
        or not layers
        or not all(isinstance(layer, dict) for layer in layers)
    ):
        return "has no list of layers"
    for layer in layers:
        capacity = (
            layer["spec"].get("capacity") if isinstance(layer.get("spec"), dict) else None
        )
        if not isinstance(capacity, int) or isinstance(capacity, bool):
            return "has a layer without a capacity"
    for name in ("arrays", "sha256"):
        table = saved.get(name)
        if (
            not isinstance(table, dict)
            or not table
            or not all(isinstance(value, str) for value in table.values())
        ):
            return f"has no table of {name}"
    return None


def _by_place(cache: Any, back: bool = False) -> Any:
    """A cache whose arrays do not depend on how its tokens are split over devices, as in a
    save; `back` inverts it.
    """

    states = [
        in_order_of_place(x.policy, x.spec, x.placement, x.state, back=back)
        for x in layers_of(cache)
    ]
    return with_states(cache, states)


def _of_model(saved: dict[str, Any]) -> bool:
    """True if a description is that of a model's cache, whose arrays are in `layers`."""
    return any(name.startswith(".layers") for name in saved["arrays"])


def _with_capacity_of(saved: dict[str, Any], like: Any) -> Any:
    """`like`, or its shapes with the capacity of the save if that is smaller."""
    capacities = {layer["spec"]["capacity"] for layer in saved["layers"]}
    if len(capacities) != 1 or not 0 < (capacity := capacities.pop()) < like.spec.capacity:
        return like

    def smaller(layer: LayerCache) -> Any:
        spec = dataclasses.replace(layer.spec, capacity=capacity)
        whole = isinstance(like, Cache) and layer.placement is None
        return init_layer(
            layer.policy.of_size(spec) if whole else layer.policy, spec, layer.placement
        )

    return jax.eval_shape(lambda: with_layers(like, list(map(smaller, layers_of(like)))))


def describe(cache: Cache | LayerCache) -> dict[str, Any]:
    """The description of a cache, as JSON: format, the policy and spec of each layer, shape and
    dtype of each array.
    """
    layers = layers_of(cache)
    return {
        "format": FORMAT,
        "layers": [
            {"policy": plain(layer.policy), "spec": _sizes(layer.spec)} for layer in layers
        ],
        "arrays": {
            name: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
            for name, leaf in _named(cache)
        },
    }


def _sizes(spec: CacheSpec) -> dict[str, Any]:
    """The fields of a spec that say what its own layer keeps; which other layers keep a state
    follows from their policies.
    """
    fields: dict[str, Any] = plain(spec)
    del fields["recurrent"]
    return fields


def _named(cache: Any) -> list[tuple[str, Any]]:
    """The arrays by their path, in which fields that were renamed have the name that saves of
    this format have them under.
    """

    def name(path: Any) -> str:
        text: str = jax.tree_util.keystr(path)
        for now, saved in SAVED_FIELDS.items():
            text = text.replace(now, saved)
        return text

    return [(name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(cache)]


def _homes(cache: Cache | LayerCache) -> list[Any]:
    """The sharding of each array, or for an array without one the sharding that `kvjax.init`
    would give it.
    """
    layers = layers_of(cache)
    found = []
    for layer in layers:
        given = [leaf.sharding for leaf in jax.tree.leaves(layer)]
        if layer.placement is not None:
            given = jax.tree.leaves(shardings(layer))
        elif None in given:
            new = jax.tree.leaves(shapes(partial(init_layer, layer.policy, layer.spec)))
            given = [theirs or ours.sharding for theirs, ours in zip(given, new, strict=True)]
        found += given
    if isinstance(cache, Cache) and (rows := cache.rotated_for) is not None:
        split: Any = (
            shardings(cache).rotated_for if cache.placement is not None else rows.sharding
        )
        found.append(split or shapes(partial(jax.numpy.zeros, rows.shape, rows.dtype)).sharding)
    return found


def _manager(path: Path, keep: int | None) -> ocp.CheckpointManager:
    """A checkpoint manager that keeps `keep` saves; with None, one that only reads."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, read_only=keep is None
    )
    opened = partial(
        ocp.CheckpointManager, path, options=options, item_names=("arrays", "about")
    )
    for _ in range(OPENED - 1):
        # A writer may remove an old save while orbax lists them.
        with suppress(FileNotFoundError, NotADirectoryError):
            return opened()
        time.sleep(SETTLE)
    return opened()


def _check(where: str, cache: Any) -> None:
    if not isinstance(cache, Cache | LayerCache):
        raise ValueError(
            f"{where} takes a cache, got {short_repr(cache)}; kvjax.init makes one"
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(cache)):
        raise ValueError(f"{where} got a traced cache; call it outside of jit")
    if where == "save":
        check_alive(where, cache)


def _path(directory: str | Path) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(
            f"the directory of saves must be a path, got {short_repr(directory)}; give a string or a Path"
        )
    if not str(directory):
        raise ValueError(
            "the directory of saves has an empty name; give one, or '.' for the current one"
        )
    return Path(directory).expanduser().absolute()


def _numbered(path: Path) -> list[int]:
    return [
        int(entry.name)
        for entry in path.iterdir()
        if entry.name.isascii() and entry.name.isdecimal()
    ]


def _is_complete(step: Path) -> bool:
    """True if a numbered folder is a complete save: orbax gives it its name when everything is
    in it.
    """
    return (step / "about").is_dir() and (step / "arrays").is_dir()


def _digest(leaf: Any) -> str:
    array = np.ascontiguousarray(on_host(leaf))
    head = f"{array.dtype.name}{list(leaf.shape)}".encode()
    return hashlib.sha256(head + b"\0" + array.reshape(-1).view(np.uint8).data).hexdigest()


def digest_json(value: Any) -> str:
    """The SHA-256 of a value as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _short(error: Exception) -> str:
    """The error of a library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@contextmanager
def only_writer(path: Path, *, doing: str = "another process is saving") -> Iterator[None]:
    """Refuses a second writer to a directory, and says what the first one is `doing`. If a
    process is killed, its lock is released.
    """
    lock = filelock.FileLock(path / LOCK, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise RuntimeError(
            f"{doing} to {path}; wait until it is done, or save to another directory"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _refuse_links(path: Path) -> None:
    """Raises ValueError for a link where a save or the lock is, through which files elsewhere
    would be written.
    """
    for entry in path.iterdir():
        ours = entry.name == LOCK or UNFINISHED in entry.name or entry.name.isdecimal()
        if ours and entry.is_symlink():
            raise ValueError(
                f"{entry} is a link, and kvjax writes through none; remove it, or give another directory"
            )


def _remove_unfinished(path: Path) -> None:
    """Removes what interrupted saves left; writes that are still in progress may add to it for
    a moment.
    """
    for _ in range(OPENED):
        left = list(path.glob(f"*{UNFINISHED}*"))
        if not left:
            return
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(SETTLE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the log and the tracebacks of orbax: our error says in one line what went wrong.

    If one of orbax's reads fails, the others end after the event loop that waited for them is
    closed, or are dropped before their end; each prints a traceback that cannot be caught
    otherwise.
    """
    logger = logging.getLogger("absl")
    hook = sys.unraisablehook
    level = logger.level

    def drop_orbax_errors(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        if "Event loop is closed" not in str(unraisable.exc_value) and (
            code is None or "orbax" not in code.co_filename
        ):
            hook(unraisable)

    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = drop_orbax_errors
    try:
        yield
    except DamagedSaveError as error:
        traceback.clear_frames(
            error.__cause__.__traceback__ if error.__cause__ is not None else None
        )
        time.sleep(SETTLE)
        gc.collect()
        raise
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook
