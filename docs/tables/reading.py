"""Reads files of benchmarks/results, which are named without `.json`.

A file that a timing script or `kvjax perplexity` wrote has `rows`. A file of `kvjax eval` or of
a measurement on live queries has `results`, by task or by case. Scores are of caches, named as
on the command line: method, settings, `@` and budget.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvjax.presets import REGISTRY

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


# Settings that depend on the model.
FOR_THE_MODEL = {"heads", "layers", "rope_theta", "rank", "dense_layers", "prompt", "budget"}


def of_its_paper(cache: str) -> bool:
    """True if a cache's settings are those of its paper, the budget and what depends on the
    model aside.
    """
    name, _, given = cache.partition("@")[0].partition(":")
    if name not in REGISTRY or REGISTRY[name].paper == "-":
        return True
    defaults = {f"{setting}={default}" for setting, default in REGISTRY[name].settings.items()}
    own, paper = (
        set(text.split(",")) - defaults - {""} for text in (given, REGISTRY[name].paper_setting)
    )
    return all(one.partition("=")[0] in FOR_THE_MODEL for one in own ^ paper)


def score_of(scores: dict[str, Any], method: str, budget: int) -> dict[str, Any] | None:
    """The score of a method at a budget, or of one that has no budget: with its defaults, or
    else at its paper's settings, or else with the only other ones."""
    found = {name.partition("@")[0]: score for name, score in scores.items() if method_of(name) == method
             and name.partition("@")[2] in ("", str(budget))}  # fmt: skip
    of_paper = [text for text in found if of_its_paper(text)]
    if len(found) > 1 and method not in found and len(of_paper) != 1:
        raise ValueError(
            f"{method} has scores with several settings: {', '.join(found)}; name one of them"
        )
    return found.get(
        method, found.get(of_paper[0]) if of_paper else next(iter(found.values()), None)
    )
