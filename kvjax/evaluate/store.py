"""A result: what one cache made of one task, in a file that says everything that made it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kvjax.evaluate.provenance import digest_json, replace_file
from kvjax.presets import REGISTRY

# Called with how much is done, of how much, and what is being done now.
Progress = Callable[[int, int, str], None]


@dataclass
class Cell:
    """What one cache made of one task."""

    task: str
    metric: str
    cache: str  # the name that the caller gave the cache
    key: dict[str, Any]  # everything that decides the answers, as JSON
    head: dict[str, Any]  # what else a reader wants to know: provenance, sizes
    total: int  # examples of the task
    path: Path | None  # where it is kept
    batches: list[dict[str, Any]] = field(default_factory=list)  # each: examples, attended_by_layer, steps, seconds

    @property
    def digest(self) -> str:
        return digest_json(self.key)

    @property
    def method(self) -> str:
        """The cache without its budget: "fier" of "fier@64"."""
        return self.cache.partition("@")[0]

    @property
    def budget(self) -> int | None:
        return self.head["budget"]

    @property
    def examples(self) -> list[dict[str, Any]]:
        """Those that have an answer: id, fields, prompt_tokens, answers, answer, new_tokens, score."""
        return [example for batch in self.batches for example in batch["examples"]]

    @property
    def scores(self) -> np.ndarray:
        return np.array([example["score"] for example in self.examples], np.float64)

    @property
    def attended(self) -> list[float] | None:
        """Tokens attended a step and kv head, by layer, mean over steps; None before the first."""
        steps = [batch["steps"] for batch in self.batches]
        if not sum(steps):
            return None
        return np.average([batch["attended_by_layer"] for batch in self.batches], axis=0, weights=steps).tolist()

    def summary(self) -> dict[str, Any]:
        """n, mean score with its interval of 95 %, tokens attended a step (mean over layers, and the last), seconds."""
        low, high = interval(self.scores)
        attended = self.attended
        return {
            "n": len(self.scores),
            "mean": float(np.mean(self.scores)) if len(self.scores) else None,
            "low": low,
            "high": high,
            "attended": None if attended is None else float(np.mean(attended)),
            "attended_last_layer": None if attended is None else attended[-1],
            "seconds": sum(batch["seconds"] for batch in self.batches),
        }

    def save(self) -> None:
        """Replaces the file as a whole: a run killed at any moment leaves the old one or the new."""
        if self.path is None:
            return
        shown = {"task": self.task, "metric": self.metric, "cache": self.cache, "summary": self.summary()}
        text = json.dumps(
            {**shown, **self.head, "key": self.key, "total": self.total, "batches": self.batches}, indent=1
        )
        replace_file(self.path, text + "\n")


def read_cell(path: Path) -> Cell:
    """A cell from its file.

    Raises:
      ValueError: it is no such file.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        own = {name: raw.pop(name) for name in ("task", "metric", "cache", "key", "total", "batches")}
        raw.pop("summary")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no result of kvjax ({error!r}); move it away or delete it") from None
    return Cell(path=path, head=raw, **own)


def read_cells(folder: Path) -> list[Cell]:
    """The cells of every run under a folder, in the order of tables: by task, length, method and budget.

    Of a cell that several runs have begun, the one with the most answers.

    Raises:
      ValueError: there is none; they are of several models or dtypes; or runs that differ made the same cell.
    """
    found: dict[tuple[str, str], Cell] = {}
    for path in sorted(folder.rglob("results/*.json")):
        cell = read_cell(path)
        other = found.setdefault((cell.task, cell.cache), cell)
        if other.digest != cell.digest:
            raise ValueError(
                f"{other.path} and {path} are of one task and cache, but not made by the same; move one away"
            )
        if len(cell.examples) > len(other.examples):
            found[cell.task, cell.cache] = cell
    if not found:
        raise ValueError(f"{folder} has no results; give the --out of a run, or a folder of several")
    for name in ("model", "dtype"):
        first: dict[str, Cell] = {}
        for cell in found.values():
            first.setdefault(cell.key[name], cell)
        if len(first) > 1:
            one, two, *_ = (cell.path for cell in first.values())
            raise ValueError(f"{one} and {two} are not of the same {name}; report on them one at a time")
    return sorted(found.values(), key=_order)


def _order(cell: Cell) -> tuple[str, int, int, str, int]:
    task, known = cell.key["task"], list(REGISTRY)
    preset = cell.method.partition(":")[0]
    place = known.index(preset) if preset in known else len(known)
    return task.get("title", cell.task), task.get("length") or 0, place, cell.method, cell.budget or 0


def interval(scores: np.ndarray) -> tuple[float | None, float | None]:
    """The interval of 95 % of a mean: Wilson's for scores of 0 and 1, else by bootstrap (2000 draws, a fixed seed).

    >>> low, high = interval(np.array([1.0] * 9 + [0.0]))
    >>> round(low, 3), round(high, 3)
    (0.596, 0.982)
    """
    n = len(scores)
    if n == 0:
        return None, None
    if np.isin(scores, (0.0, 1.0)).all():
        found = stats.binomtest(int(scores.sum()), n).proportion_ci(method="wilson")
    elif n == 1:
        return float(scores[0]), float(scores[0])
    else:
        drawn = {"n_resamples": 2000, "method": "percentile", "rng": np.random.default_rng(0)}
        found = stats.bootstrap((scores,), np.mean, **drawn).confidence_interval
    return float(found.low), float(found.high)
