"""Block sizes that a benchmark found faster than a kernel's own rule, from `tuned.json` in this
folder.

The file has entries by kind of device, then by kernel. An entry is {"shape": {name: number or
word}, "config": {field: number}, "us": .., "default_us": .., "date", "versions"}. It serves
shapes in which each of `SIZES` is within a factor of `NEAR` and all else is equal; the nearest
entry wins. A shape without an entry, or a device without entries, gets the kernel's rule. The
device is the one that the program is lowered for, if that is known (`device_kind`). `python
benchmarks/KERNEL.py --tune`, on a GPU and in a checkout, measures and writes entries.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from kvjax.kernels_pallas.simt import bypass_cache, device_kind

FILE = Path(__file__).with_name("tuned.json")
NEAR = 1.5
# Rows; tokens, units, pages or places of a row.
SIZES = frozenset(("rows", "S", "U", "P", "M", "k", "room"))

C = TypeVar("C")


class Asked(NamedTuple):
    """A kernel's request for block sizes, and the answer."""

    kernel: str
    shape: dict[str, Any]
    rule: Any
    config: Any
    device: str | None


_asked: ContextVar[list[Asked] | None] = ContextVar("_asked", default=None)


def select(
    kernel: str,
    rule: C,
    operands: Sequence[jax.Array],
    limit: Callable[[C], str | None] = lambda _: None,
    /,
    **shape: Any,
) -> C:
    """The config of the entry for `shape` on the device of the operands; else `rule`, the
    kernel's own.

    An entry that `limit` refuses with a reason is left out.
    """
    config = rule
    device = device_kind(operands)
    if entry := config_of(device, kernel, **shape):
        try:
            config = type(rule)(**entry)
            why_not = limit(config)
        except (TypeError, ValueError) as error:
            why_not = str(error)
        if why_not:
            _say_once(f"{kernel}: {entry}: {why_not}")
            config = rule
    if (found := _asked.get()) is not None:
        found.append(Asked(kernel, shape, rule, config, device))
    return config


def config_of(device: str | None, kernel: str, /, **shape: Any) -> dict[str, int] | None:
    """The config of the device's nearest entry that serves `shape`."""
    given = entries(FILE).get(device or "", {}).get(kernel, ())
    found = ((distance(entry["shape"], shape), i) for i, entry in enumerate(given))
    away, i = min(found, default=(math.inf, 0))
    return None if away == math.inf else given[i]["config"]


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The distance of two shapes in powers of two; infinite if the entry of one does not serve
    the other.
    """
    if a.keys() != b.keys() or any(a[name] != b[name] for name in a.keys() - SIZES):
        return math.inf
    pairs = [sorted((a[name], b[name])) for name in a.keys() & SIZES]
    return (
        math.inf
        if any(most > NEAR * least for least, most in pairs)
        else sum(math.log2(m / n) for n, m in pairs)
    )


@contextmanager
def asked() -> Iterator[list[Asked]]:
    """Collects the requests of kernels that are traced in the block. Benchmarks learn the names
    of a shape from it.
    """
    found: list[Asked] = []
    token = _asked.set(found)
    try:
        with bypass_cache():  # functions that were traced before would make no request
            yield found
    finally:
        _asked.reset(token)


@cache
def entries(file: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The entries of a file, by kind of device and kernel. Those that cannot be read are left
    out and logged once.
    """
    try:
        devices = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        _say_once(str(error))
        return {}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for device, kernels in (
        devices.items() if isinstance(devices, dict) else [("the file", devices)]
    ):
        for kernel, given in (
            kernels.items() if isinstance(kernels, dict) else [(device, kernels)]
        ):
            for entry in given if isinstance(given, list) else [given]:
                if _well_formed(entry):
                    found.setdefault(device, {}).setdefault(kernel, []).append(entry)
                else:
                    _say_once(f"{kernel}: {entry} is no shape and config of numbers")
    return found


def _well_formed(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    shape = entry.get("shape")
    config = entry.get("config")
    if not isinstance(shape, dict) or not isinstance(config, dict):
        return False
    sizes = [x for name, x in shape.items() if name in SIZES]
    return all(type(x) is int and x > 0 for x in sizes) and all(
        type(x) is int for x in config.values()
    )


@cache
def _say_once(what: str) -> None:
    logging.getLogger("kvjax").warning(
        "tuned block sizes (%s) are ignored: %s", FILE.name, what
    )
