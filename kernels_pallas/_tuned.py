"""Block sizes that a benchmark found faster than a kernel's own rule: `tuned.json` beside this module.

By kernel, a list of {"shape": {name: number or word}, "config": {field: number}, "us": .., "default_us": .., "device",
"date", "versions"}. An entry serves shapes whose `SIZES` are each within a factor of `NEAR` of its own, the rest equal;
of several, the nearest. What has no entry is left to the kernel's rule. `python benchmarks/KERNEL.py --tune`, on a GPU
and in a checkout, measures and writes them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvjax.kernels_pallas._common import traced_anew

FILE = Path(__file__).with_name("tuned.json")
NEAR = 1.5
SIZES = frozenset(("rows", "S", "U", "P", "M", "k", "room"))  # rows, and tokens, units, pages, picks of one

C = TypeVar("C")


class Asked(NamedTuple):
    """What a kernel asked for, and its answer."""

    kernel: str
    shape: dict[str, Any]
    rule: Any
    config: Any


_asked: ContextVar[list[Asked] | None] = ContextVar("_asked", default=None)


def choose(kernel: str, rule: C, limit: Callable[[C], str | None] = lambda _: None, /, **shape: Any) -> C:
    """The config of the entry for `shape`; `rule`, the kernel's own, without one, or if `limit` says why not."""
    chosen = rule
    if entry := tuned(kernel, **shape):
        try:
            chosen = type(rule)(**entry)
            why_not = limit(chosen)
        except (TypeError, ValueError) as error:
            why_not = str(error)
        if why_not:
            _say_once(f"{kernel}: {entry}: {why_not}")
            chosen = rule
    if (found := _asked.get()) is not None:
        found.append(Asked(kernel, shape, rule, chosen))
    return chosen


def tuned(kernel: str, /, **shape: Any) -> dict[str, int] | None:
    """The config of the nearest entry that serves `shape`."""
    found = ((distance(entry["shape"], shape), i) for i, entry in enumerate(entries(FILE).get(kernel, ())))
    away, i = min(found, default=(math.inf, 0))
    return None if away == math.inf else entries(FILE)[kernel][i]["config"]


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Of two shapes, in powers of two; infinite where one's entry does not serve the other."""
    if a.keys() != b.keys() or any(a[name] != b[name] for name in a.keys() - SIZES):
        return math.inf
    pairs = [sorted((a[name], b[name])) for name in a.keys() & SIZES]
    return math.inf if any(most > NEAR * least for least, most in pairs) else sum(math.log2(m / n) for n, m in pairs)


@contextmanager
def asked() -> Iterator[list[Asked]]:
    """Collects what kernels that are traced in the block ask for: so a benchmark knows the names of a shape."""
    found: list[Asked] = []
    token = _asked.set(found)
    try:
        with traced_anew():  # what was traced before would not ask
            yield found
    finally:
        _asked.reset(token)


@cache
def entries(file: Path) -> dict[str, list[dict[str, Any]]]:
    """What a file has, by kernel. What cannot be read is left out, and said once."""
    try:
        kernels = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        _say_once(str(error))
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, given in kernels.items() if isinstance(kernels, dict) else [("the file", kernels)]:
        for entry in given if isinstance(given, list) else [given]:
            if _well_formed(entry):
                found.setdefault(kernel, []).append(entry)
            else:
                _say_once(f"{kernel}: {entry} is no shape and config of numbers")
    return found


def _well_formed(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    shape, config = entry.get("shape"), entry.get("config")
    if not isinstance(shape, dict) or not isinstance(config, dict):
        return False
    sizes = [x for name, x in shape.items() if name in SIZES]
    return all(type(x) is int and x > 0 for x in sizes) and all(type(x) is int for x in config.values())


@cache
def _say_once(what: str) -> None:
    logging.getLogger("kvjax").warning("tuned block sizes (%s) are ignored: %s", FILE.name, what)
