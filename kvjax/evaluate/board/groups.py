"""Rows by task and length, and what methods score at equal costs.

Methods are compared at equal bytes: the best score of a method's budgets that read, or hold, at
most a share of the bytes of full attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvjax.evaluate.board.rows import Row
from kvjax.evaluate.curves import Point
from kvjax.evaluate.tasks import GENERATED_RULER, make_tasks

PERCENT = (1, 2, 5, 8, 10, 12, 15, 20, 30, 50, 100, 110, 150)  # of the bytes of full attention


@dataclass(frozen=True)
class Group:
    """The rows of one task at one length, or of RULER's tasks together: one part of the page."""

    title: str
    length: int | None
    rows: tuple[Row, ...]

    @property
    def metric(self) -> str:
        return self.rows[0].metric

    @property
    def methods(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def full(self) -> Row | None:
        """Full attention, whose costs the others are compared with."""
        return next((row for row in self.rows if row.cache == "full"), None)

    @property
    def samples(self) -> str:
        """Examples of its rows: "100", or "20 to 100" if some rows have fewer."""
        counts = [row.n for row in self.rows]
        least = min(counts)
        most = max(counts)
        return str(least) if least == most else f"{least} to {most}"

    @property
    def heading(self) -> str:
        title = self.title[:1].upper() + self.title[1:]
        return title if self.length is None else f"{title}, {self.length} tokens"

    @property
    def name(self) -> str:
        """The title and length as the name of a file."""
        words = self.title if self.length is None else f"{self.title} {self.length}"
        return re.sub(r"\W+", "-", words).strip("-").lower()


def groups(rows: Sequence[Row]) -> list[Group]:
    """The rows by task and length; those of several tasks of RULER at one length become their
    means, of the caches that all of them have.
    """
    ruler = ruler_titles()
    found: dict[tuple[str, int | None], list[Row]] = {}
    together: dict[int | None, list[Row]] = {}
    for row in rows:
        if row.task in ruler:
            together.setdefault(row.length, []).append(row)
        else:
            found.setdefault((row.task, row.length), []).append(row)
    for length, of in together.items():
        found["RULER", length] = _means(of)
    return [Group(title, length, tuple(of)) for (title, length), of in found.items() if of]


def ruler_titles() -> set[str]:
    """Titles of RULER's synthetic tasks."""
    return {task.title for task in make_tasks([GENERATED_RULER])}  # type: ignore[attr-defined]


def _means(rows: Sequence[Row]) -> list[Row]:
    """The mean over tasks of each cache that has them all."""
    tasks = {row.task for row in rows}
    by_cache: dict[str, list[Row]] = {}
    for row in rows:
        by_cache.setdefault(row.cache, []).append(row)
    means = []
    for own in by_cache.values():
        if len(own) < len(tasks):
            continue
        read = [row.bytes_read for row in own if row.bytes_read is not None]
        means.append(
            replace(
                own[0],
                task="RULER",
                metric=f"mean share of answers, {len(tasks)} tasks",
                n=sum(row.n for row in own),
                mean=sum(row.mean for row in own) / len(own),
                low=None,
                high=None,
                tokens_read=sum(row.tokens_read for row in own) / len(own),
                bytes_read=sum(read) / len(read) if len(read) == len(own) else None,
            )
        )
    return means


Cost = Callable[[Row], float | None]


def of_reads(row: Row) -> float | None:
    """Bytes that a step reads."""
    return row.bytes_read


def of_memory(row: Row) -> float | None:
    """Bytes of the cache, in device and host memory."""
    return row.bytes_total


def best_within(group: Group, method: str, cost: Cost, most: float) -> Row | None:
    """The best row of a method that costs at most `most` bytes; None if all cost more."""
    within = [
        row
        for row in group.rows
        if row.method == method and (own := cost(row)) is not None and own <= 1.001 * most
    ]
    return max(within, key=lambda row: row.mean, default=None)


def equal_costs(group: Group, cost: Cost) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of a table: the best score of each method within a share of the
    bytes of full attention; empty without full attention.

    The largest share stands first, where every method has a score. A share that no cache gets by
    with has no column, nor has one that changes no score.
    """
    whole = None if group.full is None else cost(group.full)
    if whole is None:
        return [], []
    columns: dict[str, list[str]] = {}
    for percent in PERCENT:
        best = [
            best_within(group, method, cost, percent / 100 * whole) for method in group.methods
        ]
        cells = ["" if row is None else f"{row.mean:.2f}" for row in best]
        if any(cells) and cells not in columns.values():
            columns[f"{percent} %"] = cells
    largest_first = dict(reversed(columns.items()))
    lines = [
        [f"`{method}`", *(cells[number] for cells in largest_first.values())]
        for number, method in enumerate(group.methods)
    ]
    return ["cache", *largest_first], [line for line in lines if any(line[1:])]


def curves(group: Group, cost: Cost) -> dict[str, list[Point]]:
    """The points (share of the bytes of full attention, score) of each method, by cost."""
    whole = None if group.full is None else cost(group.full)
    found: dict[str, list[Point]] = {}
    if whole is None:
        return found
    for row in group.rows:
        if (own := cost(row)) is not None:
            found.setdefault(row.method, []).append((own / whole, row.mean))
    return {method: sorted(points) for method, points in found.items()}


def by_time(group: Group, steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """The points (microseconds of a step, score) of the methods that were timed at the length and
    a budget of the group; a method's only settings count as those that were timed.
    """
    found: dict[str, list[Point]] = {}
    for step in steps:
        if step["length"] != group.length:
            continue
        of_budget = [row for row in group.rows if row.budget in (None, step["budget"])]
        own = [row for row in of_budget if row.method == step["method"]]
        if not own:  # a preset is timed with other settings than those that were scored
            name = step["method"].partition(":")[0]
            own = [row for row in of_budget if row.method.partition(":")[0] == name]
        if len(own) == 1:
            found[own[0].method] = [(step["us"], own[0].mean)]
    return found


def times_of(speeds: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Microseconds of a step of the whole model, from a file of `benchmarks/real_speed.py`."""
    return [
        {
            "method": row["method"],
            "length": row["length"],
            "batch": row["batch"],
            "budget": row["budget"],
            "us": 1e3 * row["tpot_ms"],
            "device": speeds["device"],
        }
        for row in speeds["rows"]
        if row["status"] == "ok"
    ]
