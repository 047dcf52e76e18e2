"""Reads files of benchmarks/results, which are named without `.json`.

A file that a timing script or `kvjax perplexity` wrote has `rows`. A file of `kvjax eval` or of a measurement on live
queries has `results`, by task or by case. Scores are of caches, named as on the command line: method, settings, `@` and
budget.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def load_file(name: str) -> Any:
    """The JSON of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def load_rows(name: str) -> list[dict[str, Any]]:
    return load_file(name)["rows"]


def load_results(name: str) -> Any:
    return load_file(name)["results"]


def load_scores(name: str) -> dict[str, dict[str, Any]]:
    """Task -> cache -> score."""
    found = load_results(name)
    return {task: result["caches"] for task, result in found.items()}


def load_measured(name: str) -> dict[str, dict[str, Any]]:
    """Case -> means of a measurement on live queries."""
    found = load_results(name)
    return {case: one.get("mean", one) for case, one in found.items()}


def method_of(cache: str) -> str:
    """quest of quest:page=32@256."""
    return cache.partition("@")[0].partition(":")[0]


def score_of(scores: dict[str, Any], method: str, budget: int) -> dict[str, Any] | None:
    """The score of a method at a budget, or of one that has no budget, whatever its settings."""
    found = {name.partition("@")[2]: score for name, score in scores.items() if method_of(name) == method}
    return found.get(str(budget), found.get(""))
