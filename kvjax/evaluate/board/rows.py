"""Rows of the board: one cache on one task at one length, with its score and its costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kvjax.evaluate.caches import make_rows
from kvjax.evaluate.costs import Costs, costs
from kvjax.evaluate.report import score
from kvjax.evaluate.store import Cell
from kvjax.policies import Full, PerLayer
from kvjax.spec import CacheSpec


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cache on one task: its score, and its costs for one row of the batch."""

    task: str  # without its length
    length: int | None  # tokens of prompt and answer; None for data that has its own
    metric: str
    cache: str  # "fier@64"
    budget: int | None
    dense_layers: int | None
    n: int
    mean: float
    low: float | None  # of the 95 % interval
    high: float | None
    tokens_read: float  # a step, mean over KV heads and layers
    bytes_read: float | None  # a step, over all layers; None where nobody knows the policies
    bytes_held: int | None  # of the cache in device memory
    bytes_on_host: int | None

    @property
    def method(self) -> str:
        """The cache without its budget."""
        return self.cache.partition("@")[0]

    @property
    def bytes_total(self) -> int | None:
        """Bytes of the cache, wherever they lie."""
        if self.bytes_held is None or self.bytes_on_host is None:
            return None
        return self.bytes_held + self.bytes_on_host


def rows_of(
    cells: Sequence[Cell], policies: Mapping[str, PerLayer], spec: CacheSpec, layers: int
) -> list[Row]:
    """The rows of cells that were run, with the policies of each cache by its name.

    `spec` is that of one row of the model; its capacity does not matter.
    """
    found = []
    for cell in cells:
        attended = cell.attended
        if attended is None:  # refused, or not run yet
            continue
        measured = score(cell)
        measured["budget"] = cell.budget
        measured["dense_layers"] = cell.head.get("dense_layers")
        task = {"title": cell.task, **cell.key["task"], "metric": cell.metric}
        sized = _Sized(policies.get(cell.cache), spec, layers)
        found.append(_row(cell.cache, task, measured, attended, sized))
    return found


def rows_of_summary(summary: Mapping[str, Any]) -> list[Row]:
    """The rows of a summary.json of `kvjax eval`, whose caches have names of `kvjax methods`.

    A summary has no numbers of single layers: dense layers read everything, the others alike. A
    cache whose setting is a file has no costs.
    """
    model = summary["model"]
    layers = model["layers"]
    spec = CacheSpec(
        batch=1,
        q_heads=model["q_heads"],
        kv_heads=model["kv_heads"],
        head_dim=model["head_dim"],
        capacity=1,
        dtype=summary["dtype"],
    )
    found = []
    for name, result in summary["results"].items():
        task = {"title": name, **result["task"], "metric": result["metric"]}
        everything = result["caches"].get("full", {}).get("tokens_read")
        for cache, measured in result["caches"].items():
            made = _named_policies(cache, measured)
            attended = _by_layer(made, measured["tokens_read"], everything, layers)
            found.append(_row(cache, task, measured, attended, _Sized(made, spec, layers)))
    return found


@dataclass(frozen=True)
class _Sized:
    """Policies and sizes, from which the costs of a cache follow."""

    policies: PerLayer | None
    spec: CacheSpec  # of one row
    layers: int

    def costs(self, attended: Sequence[float], length: int) -> Costs | None:
        """None where nobody knows the policies."""
        if self.policies is None:
            return None
        spec = replace(self.spec, capacity=length)
        return costs(self.policies, spec, attended, layers=self.layers, length=length)


def _row(
    cache: str,
    task: Mapping[str, Any],
    measured: Mapping[str, Any],
    attended: Sequence[float],
    sized: _Sized,
) -> Row:
    """The row of a score, as `report.score` tells it."""
    length = task.get("length")
    spent = sized.costs(attended, length or max(1, round(max(attended))))
    title = task["title"]
    if task.get("question", "decoded") != "decoded":
        title = f"{title}, question {task['question']}"
    return Row(
        task=title,
        length=length,
        metric=task["metric"],
        cache=cache,
        budget=measured["budget"],
        dense_layers=measured["dense_layers"],
        n=measured["n"],
        mean=measured["mean"],
        low=measured["low"],
        high=measured["high"],
        tokens_read=measured["tokens_read"],
        bytes_read=None if spent is None else spent.read,
        bytes_held=None if spent is None else spent.held,
        bytes_on_host=None if spent is None else spent.on_host,
    )


def _named_policies(cache: str, measured: Mapping[str, Any]) -> PerLayer | None:
    """The policies of a cache by its name in a table; None if a file of its settings is gone."""
    method, _, budget = cache.partition("@")
    try:
        (row,) = make_rows(
            [method],
            budgets=[int(budget)] if budget else None,
            dense_layers=measured["dense_layers"],
        )
    except (ValueError, OSError):
        return None
    return row.policies


def _by_layer(
    policies: PerLayer | None, tokens_read: float, everything: float | None, layers: int
) -> list[float]:
    """Tokens read by layer, of which only the mean is known."""
    first = () if policies is None else policies.first
    dense = len(list(takewhile(lambda policy: policy == Full(), first)))
    if everything is None or not 0 < dense < layers:
        return [tokens_read] * layers
    others = (tokens_read * layers - everything * dense) / (layers - dense)
    return [everything] * dense + [max(others, 0.0)] * (layers - dense)
