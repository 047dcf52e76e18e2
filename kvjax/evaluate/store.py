"""One resumable store for every measurement: a cell holds the results of one cache on one task,
in its own file.

A file's name ends in a digest of the cell's key, which holds what decides the result: the
model's weights, the policy, the task and the version of kvjax. So a killed run continues where
it stopped, and a run in which one of these changed starts over. Source digest, versions and
device are provenance, outside of the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kvjax.evaluate.provenance import digest_json, replace_file
from kvjax.presets import REGISTRY
from kvjax.received import read_object

FORMAT = 2  # of the files, and of how prompts and answers are processed

# Called with the amount done, the total amount, and the name of the work.
Progress = Callable[[int, int, str], None]


@dataclass
class Cell:
    """The results of one cache on one task."""

    task: str
    metric: str
    cache: str  # the name that the caller gave the cache
    key: dict[str, Any]  # everything that decides the results, as JSON
    head: dict[str, Any]  # other information for a reader: model, budget, provenance
    total: int  # examples of the task
    path: Path | None = None  # where it is kept
    # Each: examples, attended_by_layer, steps, seconds.
    batches: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""  # why this cache cannot be run; such a cell has no results
    replaces: bool = False  # the next results replace the file, whatever it holds

    @property
    def digest(self) -> str:
        return digest_json(self.key)

    @property
    def method(self) -> str:
        """The cache without its budget: "fier" of "fier@64"."""
        return self.cache.partition("@")[0]

    @property
    def budget(self) -> int | None:
        return self.head.get("budget")

    @property
    def examples(self) -> list[dict[str, Any]]:
        """The results, one for each example that was run: its id, and what its task records."""
        return [example for batch in self.batches for example in batch["examples"]]

    @property
    def scores(self) -> np.ndarray:
        return np.array([example["score"] for example in self.examples], np.float64)

    @property
    def attended(self) -> list[float] | None:
        """Tokens read per step and KV head, by layer, mean over steps; None before the first
        step.
        """
        steps = [batch["steps"] for batch in self.batches]
        if not sum(steps):
            return None
        return np.average(
            [batch["attended_by_layer"] for batch in self.batches], axis=0, weights=steps
        ).tolist()

    @property
    def tokens_read(self) -> float | None:
        """Tokens read per step and KV head, mean over steps and all layers: a fair comparison
        keeps it equal.
        """
        attended = self.attended
        return None if attended is None else float(np.mean(attended))

    @property
    def seconds(self) -> float:
        return sum(batch["seconds"] for batch in self.batches)

    def made_by(self, provenance: dict[str, Any]) -> None:
        """Records the provenance of the next results, unless earlier ones have the same but for
        the date.
        """
        made = self.head.setdefault("made", [])
        if all({**one, "date": ""} != {**provenance, "date": ""} for one in made):
            made.append(provenance)

    def open(self, folder: Path, ids: Collection[str], *, resume: bool = True) -> None:
        """Finds the file of this cell in a folder, and loads its results.

        Raises:
          ValueError: the file is damaged, was changed by hand, or has results of examples that
            the task lacks.
        """
        name = re.sub(r"[^\w.@=-]+", "-", f"{self.task} {self.cache} ", flags=re.ASCII)[
            :160
        ].removesuffix("-")
        # the digest alone makes the name unique
        self.path = Path(folder) / f"{name}-{self.digest[:16]}.json"
        self.replaces = not resume
        if not resume or not self.path.exists():
            return
        found = read_cell(self.path)
        if found.digest != self.digest:
            raise ValueError(
                f"{self.path} was changed by hand: its key is not that of its name; delete it"
            )
        unknown = [example["id"] for example in found.examples if example["id"] not in ids]
        if unknown:
            raise _damaged(self.path, f"its task has no example {unknown[0]!r}")
        self.batches, self.head["made"] = found.batches, found.head.get("made", [])

    def add(self, batch: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Adds the results of a batch, also to the file. Batches that another run wrote there
        meanwhile are taken over, but for those with an example that has a result here."""
        self.made_by(provenance)
        self.batches.append(batch)
        if self.path is not None and self.path.exists() and not self.replaces:
            held = read_cell(self.path)
            known = {example["id"] for example in self.examples}
            self.batches += [
                one
                for one in held.batches
                if known.isdisjoint(e["id"] for e in one["examples"])
            ]
            for made in held.head.get("made", []):
                self.made_by(made)
        self.save()

    def save(self) -> None:
        """Replaces the file as a whole: a run killed at any moment leaves the old one or the
        new.
        """
        if self.path is None:
            return
        about = {
            "task": self.task,
            "metric": self.metric,
            "cache": self.cache,
            "tokens_read": self.tokens_read,
        }
        kept = {
            **about,
            **self.head,
            "key": self.key,
            "total": self.total,
            "batches": self.batches,
        }
        replace_file(self.path, json.dumps(kept, indent=1) + "\n")
        self.replaces = False


def read_cell(path: Path) -> Cell:
    """A cell from its file.

    Raises:
      ValueError: the file is not a cell, or is damaged.
    """
    try:
        raw = read_object(path, cure="move it away or delete it")
        own = {
            name: raw.pop(name)
            for name in ("task", "metric", "cache", "key", "total", "batches")
        }
        raw.pop("tokens_read", None)
        cell = Cell(path=path, head=raw, **own)
        ids = [example["id"] for example in cell.examples]
        for batch in cell.batches:
            if not {"attended_by_layer", "steps", "seconds"} <= batch.keys():
                raise ValueError("a batch lacks its steps")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, repr(error)) from None
    doubled = [i for i in set(ids) if ids.count(i) > 1]
    if doubled:
        raise _damaged(path, f"example {doubled[0]!r} has several results")
    return cell


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is no result of kvjax ({why}); move it away or delete it")


def read_cells(folder: Path) -> list[Cell]:
    """The cells of every run under a folder, in the order of tables: by task, length, method
    and budget.

    If several runs have results of a cell, the run with the most results counts.

    Raises:
      ValueError: there is none; they are of several models or dtypes; or two cells of one task
        and cache have different keys.
    """
    found: dict[tuple[str, str], Cell] = {}
    for path in sorted(folder.rglob("results/*.json")):
        cell = read_cell(path)
        other = found.setdefault((cell.task, cell.cache), cell)
        if other.digest != cell.digest:
            raise ValueError(
                f"{other.path} and {path} have the same task and cache, but different keys; move one away"
            )
        if len(cell.examples) > len(other.examples):
            found[cell.task, cell.cache] = cell
    if not found:
        raise ValueError(
            f"{folder} has no results; give the --out of a run, or a folder of several"
        )
    for name in ("model", "dtype"):
        first: dict[str, Cell] = {}
        for cell in found.values():
            first.setdefault(cell.key[name], cell)
        if len(first) > 1:
            one, two, *_ = (cell.path for cell in first.values())
            raise ValueError(
                f"{one} and {two} are not of the same {name}; report on them one at a time"
            )
    return sorted(found.values(), key=_order)


def _order(cell: Cell) -> tuple[str, int, int, str, int]:
    task = cell.key["task"]
    known = list(REGISTRY)
    preset = cell.method.partition(":")[0]
    place = known.index(preset) if preset in known else len(known)
    return (
        task.get("title", cell.task),
        task.get("length") or 0,
        place,
        cell.method,
        cell.budget or 0,
    )


def interval(scores: np.ndarray) -> tuple[float | None, float | None]:
    """The 95 % interval of a mean: Wilson's for scores of 0 and 1, else by bootstrap (2000
    draws, a fixed seed).

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
        drawn: dict[str, Any] = {
            "n_resamples": 2000,
            "method": "percentile",
            "rng": np.random.default_rng(0),
        }
        found = stats.bootstrap((scores,), np.mean, **drawn).confidence_interval
    return float(found.low), float(found.high)
