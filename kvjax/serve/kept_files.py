"""Kept rows on disk: a folder of caches for each save, and a list of the tokens that they hold.

    DIRECTORY/prefixes.json     the list; names the folder of the newest save
    DIRECTORY/rows-3/0, 1, ...  a row each, as `kvjax.save` writes it

The list replaces the one before in one step, so a save that is interrupted changes nothing. It
has a digest of the model's weights: keys and values of other weights would give wrong answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache.saving import DamagedSaveError, restore
from kvjax.cache.saving import save as save_cache
from kvjax.memory import on_host
from kvjax.received import read_object
from kvjax.serve.beginnings import KeptRow, at_home

LIST = "prefixes.json"
FORMAT = 1
SAMPLE = 64  # numbers of each array of weights that the digest has


def save(directory: str | Path, rows: Sequence[KeptRow], model: Any) -> int:
    """Saves rows, from the one that was not used for longest, and returns how many."""
    path = Path(directory).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    folder = f"rows-{max((_number(old.name) for old in _folders(path)), default=-1) + 1}"
    entries = list[dict[str, Any]]()
    for i, row in enumerate(rows):
        cache = at_home(row)
        save_cache(path / folder / str(i), cache)
        entries.append({"tokens": row.tokens.tolist(), "capacity": cache.spec.capacity})
    about = {"format": FORMAT, "model": digest_of(model), "folder": folder, "rows": entries}
    new = path / f"{LIST}.new"
    new.write_text(json.dumps(about), encoding="utf-8")
    os.replace(new, path / LIST)
    for old in _folders(path):
        if old.name != folder:
            shutil.rmtree(old, ignore_errors=True)
    return len(entries)


def saved(
    directory: str | Path, model: Any
) -> Iterator[tuple[np.ndarray, int, Callable[[Any], Any]]]:
    """Yields the tokens and the capacity of each row that was saved, and a function that reads
    it like a given cache.
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
    if about.get("model") != digest_of(model):
        raise ValueError(
            f"{path} has prefixes of a model with other weights; give the directory that this model saved"
        )
    folder, rows = about.get("folder"), about.get("rows")
    if _number(folder) < 0 or not isinstance(folder, str) or not isinstance(rows, list):
        raise DamagedSaveError(
            f"{path / LIST} names no folder of rows; save the prefixes again"
        )
    for i, row in enumerate(rows):
        tokens, capacity = _entry(path, row)
        yield tokens, capacity, _reader(path / folder / str(i))


def digest_of(model: Any) -> str:
    """A digest of a model's weights, of the shape and some numbers of each array."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(model):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            continue
        digest.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        flat = leaf.reshape(-1)
        digest.update(on_host(flat[:: max(flat.size // SAMPLE, 1)]).tobytes())
    return digest.hexdigest()


def _reader(path: Path) -> Callable[[Any], Any]:
    return lambda like: restore(path, like)


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
