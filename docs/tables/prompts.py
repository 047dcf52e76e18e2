"""The tables of docs/board.md on prompts beside those of lm-evaluation-harness, from what
benchmarks/prompts.py found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docs.tables.reading import load_rows
from docs.tables.writing import markdown, short

PARTS = {
    "before": "before the text",
    "line": "a line",
    "question": "question",
    "begun": "answer begun",
}
ONE, SEVERAL = "needle", "needles:hidden=4,asked=4"


def _tasks() -> list[dict[str, Any]]:
    """The tasks of RULER."""
    return [row for row in load_rows("prompts") if row["task"] != "gsm8k"]


def prompts_counted() -> str:
    """Tokens of each part of a prompt, and numbers of lines and answers: ours / the harness's."""
    heads = (
        "ours",
        "the harness's",
        *PARTS.values(),
        "lines",
        "an answer",
        "may write",
        "whole prompt",
    )

    def pair(numbers: Sequence[float]) -> str:
        ours, theirs = (f"{number:.0f}" for number in numbers)
        return f"{ours} / {theirs}"

    rows = [
        [
            f"`{row['task']}`",
            f"`{row['harness']}`",
            *(pair(row["parts"][name]["tokens"]) for name in PARTS),
            *(pair(row[n]) for n in ("hidden", "answer_tokens", "allowed", "prompt_tokens")),
        ]
        for row in _tasks()
    ]
    return markdown(heads, rows)


def prompts_differ() -> str:
    """Where the wording of a part differs, token by token: ours and the harness's."""

    def shown(text: str) -> str:
        return f"`{text.strip()}`" if text.strip() else "nothing"

    rows = []
    for row in _tasks():
        cells = [
            "; ".join(
                f"{shown(ours)}, {shown(theirs)}"
                for ours, theirs in row["parts"][name]["differs"]
            )
            or "equal"
            for name in ("line", "question", "begun")
        ]
        rows.append([f"`{row['task']}`", *cells])
    return markdown(("task", "a line", "question", "answer begun"), rows, numbers=False)


def prompts_scored() -> str:
    """What both rules give to answers of several forms, of one asked for and of four."""
    one, several = (
        next(row["scores"] for row in _tasks() if row["task"] == task)
        for task in (ONE, SEVERAL)
    )
    heads = ("the model writes", "one, ours", "the harness's", "four, ours", "the harness's")
    rows = [[name, *map(short, [*one[name], *several[name]])] for name in one]
    return markdown(heads, rows)


def prompts_gsm8k() -> str:
    """What both rules give to answers of which 2 is right."""
    (row,) = [row for row in load_rows("prompts") if row["task"] == "gsm8k"]
    ours, theirs = row["parts"]["whole"]["tokens"]
    same = "equal, token for token" if not row["parts"]["whole"]["differs"] else "not equal"
    table = markdown(
        ("the model writes", "ours", "flexible-extract", "strict-match"),
        [[f"`{said}`", *map(short, scores)] for said, scores in row["scores"].items()],
    )
    return f"Prompts of GSM8K ({ours} and {theirs} tokens with one solved problem) are {same}.\n\n{table}"
