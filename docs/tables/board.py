"""The tables and pictures of docs/board.md: scores at equal bytes read, at equal memory and by
time.

Rows of the published model are made from the files of its evaluations; those of other models
are the files `board_*.json` that `kvjax eval --board` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from docs.tables.guides import accepted_means
from docs.tables.reading import RESULTS, load_file, load_rows
from docs.tables.writing import markdown
from kvjax.evaluate.board import (
    Group,
    groups,
    of_memory,
    of_reads,
    read_rows,
    rows_of_summary,
    times_of,
)
from kvjax.evaluate.board.groups import Cost, equal_costs
from kvjax.evaluate.board.pictures import picture, picture_by_time
from kvjax.evaluate.drafting import DRAFT
from kvjax.policies import Full
from kvjax.presets import parse

NEEDLES = "1 of 8 needles at 16384, question decoded"
LENGTH = 16384
DENSE_LAYERS = 2  # of every row of the evaluations


# ------------------------------------------------------------------------------------------------------------ rows


@cache
def _needles() -> Group:
    """Needles of the published model."""
    found = load_file("eval_qwen")
    (group,) = groups(
        rows_of_summary({**found, "results": {NEEDLES: found["results"][NEEDLES]}})
    )
    return group


@cache
def _drafts() -> Group:
    """Tokens of a draft of 8 that are accepted, mean over texts, with the costs of each draft.

    Drafts by full attention itself are all right.
    """
    accepted, texts = accepted_means()
    caches = {"full": _score(LENGTH, float(DRAFT), texts)}
    for (method, length), mean in accepted.items():
        if length == LENGTH:
            caches[method.replace(":budget=", "@")] = _drafting(method, mean, texts)
    return _group(f"drafts of {DRAFT}", f"tokens accepted of {DRAFT}", LENGTH, caches)


def _drafting(method: str, accepted: float, texts: int) -> dict[str, Any]:
    """The score of a draft, which reads its budget in all layers but the preset's dense ones; one
    of codes reads all of them."""
    policies = parse(method)
    budget = int(method.partition("budget=")[2] or 0)
    if not budget:
        return _score(LENGTH, accepted, texts, dense_layers=0)
    layers = load_file("eval_qwen")["model"]["layers"]
    dense = sum(policy == Full() for policy in policies.first)
    read = (dense * LENGTH + (layers - dense) * budget) / layers
    return _score(read, accepted, texts, budget=budget, dense_layers=dense)


def _score(
    tokens_read: float,
    scored: float,
    n: int,
    *,
    budget: int | None = None,
    dense_layers: int | None = None,
) -> dict[str, Any]:
    """A score as a summary of `kvjax eval` has it."""
    return {
        "tokens_read": tokens_read,
        "mean": scored,
        "n": n,
        "low": None,
        "high": None,
        "budget": budget,
        "dense_layers": dense_layers,
    }


def _group(
    title: str, metric: str, length: int, caches: Mapping[str, Mapping[str, Any]]
) -> Group:
    """A group of the published model from scores by cache."""
    task = {"title": title, "length": length}
    results = {title: {"metric": metric, "task": task, "caches": caches}}
    (group,) = groups(rows_of_summary({**load_file("eval_qwen"), "results": results}))
    return group


def _steps(batch: int, *files: str) -> list[dict[str, Any]]:
    """Steps of so many rows that files of `benchmarks/real_speed.py` have."""
    found = [step for file in files for step in times_of(load_file(file))]
    return [step for step in found if (step["batch"], step["length"]) == (batch, LENGTH)]


# ---------------------------------------------------------------------------------------------------------- tables


def board_reads() -> str:
    """Best score of each method by the share of bytes that a step reads."""
    return markdown(*equal_costs(_needles(), of_reads))


def board_holds() -> str:
    """Best score of each method by the share of bytes that the cache holds."""
    return markdown(*equal_costs(_needles(), of_memory))


def board_drafts() -> str:
    """Most accepted tokens of a draft by the share of bytes that a draft's step reads."""
    return markdown(*equal_costs(_drafts(), of_reads))


def board_gsm8k() -> str:
    """Share of right answers by the share of bytes; GSM8K's prompts are short."""
    (group,) = groups(rows_of_summary(load_file("eval_qwen_gsm8k")))
    return markdown(*equal_costs(group, of_reads))


def board_ruler() -> str:
    """Mean of RULER's tasks by length, and the share of bytes that a step reads."""
    by_length = {
        group.length: group for group in groups(rows_of_summary(load_file("eval_qwen_ruler")))
    }
    lengths = sorted(length for length in by_length if length is not None)
    heads = [part for length in lengths for part in (str(length), "read")]
    rows = []
    for name in dict.fromkeys(row.cache for row in by_length[lengths[0]].rows):
        cells = []
        for length in lengths:
            cells += _score_and_share(by_length[length], name)
        rows.append([f"`{name}`", *cells])
    return markdown(["cache", *heads], rows)


def _score_and_share(group: Group, name: str) -> list[str]:
    """A cache's score, and the share of bytes that it reads."""
    row = next((row for row in group.rows if row.cache == name), None)
    if row is None or group.full is None:
        return ["", ""]
    return [f"{row.mean:.2f}", _percent(row.bytes_read, group.full.bytes_read)]


def board_smollm2() -> str:
    """Pass keys found by the second model, by the shares of bytes, with the question decoded and
    as the end of the prompt.
    """
    decoded, prefilled = groups(rows_of_summary(load_file("eval_smollm2")))
    if decoded.full is None:
        raise ValueError("eval_smollm2.json must have full attention; run its command again")
    scores = {row.cache: f"{row.mean:.2f}" for row in prefilled.rows}
    rows = []
    for row in decoded.rows:
        if row.bytes_read is None:  # its file of heads is not kept
            continue
        shares = [_percent(cost(row), cost(decoded.full)) for cost in (of_reads, of_memory)]
        rows.append([f"`{row.cache}`", *shares, f"{row.mean:.2f}", scores.get(row.cache, "")])
    return markdown(["cache", "read", "held", "decoded", "prefilled"], rows)


def _percent(cost: float | None, whole: float | None) -> str:
    """A cost as a share of that of full attention; empty where one of them is not known."""
    return f"{100 * cost / whole:.0f} %" if cost is not None and whole else ""


def board_perplexity() -> str:
    """Change of the perplexity of code and of a book by method, and the bytes that a step reads."""
    heads = ["cache", "budget"]
    cells: dict[tuple[str, str], list[str]] = {}
    for text in ("code", "book"):
        rows = [
            row
            for row in load_rows("perplexity_qwen")
            if (row["text"], row["length"]) == (text, LENGTH)
        ]
        caches = {_cache_name(row): _perplexity(row) for row in rows}
        group = _group(f"perplexity of {text}", "ratio", LENGTH, caches)
        heads += [f"{text}, change", "read"]
        for row in group.rows:
            _, share = _score_and_share(group, row.cache)
            budget = "" if row.budget is None else str(row.budget)
            cells.setdefault((row.method, budget), []).extend(
                [f"{100 * (row.mean - 1):+.1f} %", share]
            )
    return markdown(
        heads, [[f"`{name}`", budget, *own] for (name, budget), own in cells.items()]
    )


def _cache_name(row: Mapping[str, Any]) -> str:
    return row["cache"] if row["budget"] is None else f"{row['cache']}@{row['budget']}"


def _perplexity(row: Mapping[str, Any]) -> dict[str, Any]:
    """The ratio to the perplexity of full attention as a score."""
    return _score(
        row["tokens_read"],
        row.get("ratio", 1.0),
        row["tokens"],
        budget=row["budget"],
        dense_layers=DENSE_LAYERS,
    )


def boards() -> str:
    """Each board of `kvjax eval --board` in the folder of results: scores at equal bytes read."""
    parts = []
    for path in sorted(RESULTS.glob("board_*.json")):
        parts += _board(json.loads(path.read_text()), path.name)
    return "\n".join(parts) or "None is in the folder of results yet.\n"


def _board(board: Mapping[str, Any], file: str) -> list[str]:
    """Paragraph and tables of a board."""
    made = board["made"][-1]
    parts = [
        f"**{board['model']['name']}**, {board['dtype']}, on {made['device']}, jax {made['versions']['jax']}, "
        f"{made['date'][:10]}: `{file}`, by `{board['command']}`.\n"
    ]
    for group in groups(read_rows(board)):
        parts.append(f"{group.heading}, {group.metric}, n = {group.samples}:\n")
        parts.append(markdown(*equal_costs(group, of_reads)))
    return parts


# -------------------------------------------------------------------------------------------------------- pictures


def _by(make: Callable[[], Group], cost: Cost) -> Callable[[], str]:
    return lambda: picture(make(), cost)


def _by_time(batch: int, files: Sequence[str]) -> Callable[[], str]:
    return lambda: picture_by_time(_needles(), _steps(batch, *files))


PICTURES: dict[str, Callable[[], str]] = {
    "board_reads": _by(_needles, of_reads),
    "board_holds": _by(_needles, of_memory),
    "board_us_h200": _by_time(8, ["real_speed_h200"]),
    "board_us_h100": _by_time(32, ["real_speed", "real_speed_others"]),
    "board_drafts": _by(_drafts, of_reads),
}
