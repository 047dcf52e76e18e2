"""Kept rows on disk: a folder of caches for each save, and a list of the tokens that they hold.

    DIRECTORY/prefixes.json     the list; names the folder of the newest save
    DIRECTORY/rows-3/0, 1, ...  a row each, as `kvjax.save` writes it

The list replaces the one before in one step, so a save that is interrupted or fails changes
nothing. It has a digest of itself, since a row under other tokens would give wrong answers, and
one of the model: so would keys and values of other weights, settings or code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.saving import DamagedSaveError, digest_json, only_writer, restore
from kvjax.cache.saving import save as save_cache
from kvjax.memory import on_host
from kvjax.received import read_object
from kvjax.serve.beginnings import KeptRow, on_device
from kvjax.serve.identity import digest_of

LIST = "prefixes.json"
FORMAT = 3


def save(directory: str | Path, rows: Iterable[KeptRow], model: Any) -> int:
    """Saves rows, from the one that was not used for longest, and returns how many.

    Raises:
      RuntimeError: another save to the directory is not done.
      OSError: the directory cannot be written, for example because the disk is full. The save
        before stays, and what was written of this one is removed.
    """
    path = Path(directory).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    with only_writer(path, doing="prefixes are being saved"):
        return _save(path, rows, model)


def _save(path: Path, rows: Iterable[KeptRow], model: Any) -> int:
    folder = f"rows-{max((_number(old.name) for old in _folders(path)), default=-1) + 1}"
    new = path / f"{LIST}.new"
    entries = list[dict[str, Any]]()
    try:
        for row in rows:
            cache = on_device(row)
            save_cache(path / folder / str(len(entries)), cache)
            entries.append({"tokens": row.tokens.tolist(), "capacity": cache.spec.capacity})
        about = {
            "format": FORMAT,
            "model": digest_of(model),
            "folder": folder,
            "rows": entries,
        }
        about["sha256_of_this"] = digest_json(about)
        new.write_text(json.dumps(about), encoding="utf-8")
        os.replace(new, path / LIST)
    except BaseException:
        new.unlink(missing_ok=True)
        shutil.rmtree(path / folder, ignore_errors=True)
        raise
    for old in _folders(path):
        if old.name != folder:
            shutil.rmtree(old, ignore_errors=True)
    return len(entries)


def saved(
    directory: str | Path, model: Any
) -> Iterator[tuple[np.ndarray, int, Callable[[Any], Any]]]:
    """Yields the tokens and the capacity of each row that was saved, and a function that reads
    it like a given cache, or raises RuntimeError if a later save has removed it.
    """
    path = Path(directory).expanduser().absolute()
    if not (path / LIST).exists():
        raise FileNotFoundError(
            f"{path} holds no saved prefixes; Engine.save_prefixes writes them"
        )
    about = read_object(path / LIST, cure="save the prefixes again")
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} was written by another version of kvjax (its format is {about.get('format')}, and this one reads "
            f"{FORMAT}); save the prefixes again"
        )
    if about.pop("sha256_of_this", None) != digest_json(about):
        raise DamagedSaveError(f"{path / LIST} has changed; save the prefixes again")
    if about.get("model") != digest_of(model):
        raise ValueError(
            f"{path} has prefixes of a model with other weights, settings or code; give the directory that this model "
            "saved"
        )
    folder = about.get("folder")
    rows = about.get("rows")
    if _number(folder) < 0 or not isinstance(folder, str) or not isinstance(rows, list):
        raise DamagedSaveError(
            f"{path / LIST} names no folder of rows; save the prefixes again"
        )
    for i, row in enumerate(rows):
        tokens, capacity = _entry(path, row)
        yield tokens, capacity, partial(_read, path / folder / str(i), len(tokens))


def _read(path: Path, tokens: int, like: Any) -> Cache:
    """The row in a folder, which the list says holds so many tokens."""
    try:
        row = restore(path, like)
    except (FileNotFoundError, DamagedSaveError) as error:
        # A save removes the rows of the one before it, perhaps while they are read here.
        directory = path.parent.parent
        newest = read_object(directory / LIST, cure="save the prefixes again").get("folder")
        if newest == path.parent.name:
            raise
        raise RuntimeError(
            f"prefixes were saved to {directory} again while they were read; restore them again"
        ) from error
    (length,) = on_host(row.length).tolist()
    if length != tokens:
        raise DamagedSaveError(
            f"{path} has a row of {length} tokens, and its list says {tokens}; save the prefixes again"
        )
    return row


def _entry(path: Path, row: Any) -> tuple[np.ndarray, int]:
    """The tokens and the capacity of a row in the list."""
    tokens = row.get("tokens") if isinstance(row, dict) else None
    capacity = row.get("capacity") if isinstance(row, dict) else None
    whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not whole or not tokens or type(capacity) is not int or len(tokens) > capacity:
        raise DamagedSaveError(
            f"{path / LIST} has a row without tokens or capacity; save the prefixes again"
        )
    return np.array(tokens, np.int32), capacity


def _folders(path: Path) -> list[Path]:
    return [entry for entry in path.glob("rows-*") if _number(entry.name) >= 0]


def _number(name: Any) -> int:
    """The number in the name of a folder of rows; -1 for anything else."""
    found = re.fullmatch(r"rows-([0-9]{1,9})", name) if isinstance(name, str) else None
    return -1 if found is None else int(found[1])
