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
    """The score of a method at a budget, or of one that has no budget: with its defaults, or else its only settings."""
    texts = {name.partition("@")[0] for name in scores if method_of(name) == method}
    if not texts:
        return None
    text = method if method in texts else texts.pop()
    if text != method and texts:
        raise ValueError(f"{method} has scores with several settings: {text}, {', '.join(texts)}; name one of them")
    return scores.get(f"{text}@{budget}", scores.get(text))
