"""Results as text: tables of scores by cache and budget, a page with all of them, and a summary
as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.evaluate.store import Cell, interval

COLUMNS = (
    "Budget: tokens that a cache may read per step and KV head, in layers that are not dense. Tokens read: how many it "
    "did read, mean over steps, KV heads and all layers, dense ones included. 95 %: confidence interval of the mean "
    "score."
)


@dataclass(frozen=True)
class Block:
    """The cells of one task at one length: a table, and a panel of a plot."""

    title: str  # of the task, without the length
    length: int | None  # tokens; None for data that has its own
    cells: tuple[Cell, ...]

    @property
    def methods(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def budgets(self) -> list[int]:
        return sorted({cell.budget for cell in self.cells if cell.budget is not None})

    @property
    def ordered(self) -> list[Cell]:
        """By method, in order of first appearance, then by budget."""
        return sorted(
            self.cells, key=lambda cell: (self.methods.index(cell.method), cell.budget or 0)
        )

    def cell(self, method: str, budget: int | None) -> Cell | None:
        found = (cell for cell in self.cells if (cell.method, cell.budget) == (method, budget))
        return next(found, None)

    @property
    def samples(self) -> str:
        counts = sorted({len(cell.examples) for cell in self.cells})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def blocks(cells: Sequence[Cell]) -> list[Block]:
    """Groups cells by task and length, in order of first appearance; cells without an answer
    are left out.
    """
    found: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in cells:
        task = cell.key["task"]
        if cell.examples:
            title = task.get("title", cell.task) + (
                f", question {task['question']}" if "question" in task else ""
            )
            found.setdefault((title, task.get("length")), []).append(cell)
    return [Block(title, length, tuple(of)) for (title, length), of in found.items()]


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a block per task and length with a row per cache and budget, its tokens read
    and mean score.

    Caches that could not be run follow, each with its reason.
    """
    return "\n\n".join(_table(block) for block in blocks(cells)) + "\n" + refusals(cells)


def _table(block: Block) -> str:
    metric = " and ".join(dict.fromkeys(cell.metric for cell in block.cells))
    scores = [score(cell) for cell in block.ordered]
    where = "" if block.length is None else f", {block.length} tokens"
    rows = []
    for cell, s in zip(block.ordered, scores, strict=True):
        numbers = [
            f"{cell.tokens_read:.0f}",
            f"{s['mean']:.2f}",
            f"{s['low']:.2f} to {s['high']:.2f}",
        ]
        rows.append([f"`{cell.method}`", _budget(cell), *numbers])
    head = f"### {block.title}{where}\n\n{metric[0].upper()}{metric[1:]}, n = {block.samples}."
    return (
        f"{head}\n\n{markdown_table(['cache', 'budget', 'tokens read', metric, '95 %'], rows)}"
    )


def _budget(cell: Cell) -> str:
    note = cell.head.get("note")
    return "all" if cell.budget is None else f"{cell.budget}" + (f" ({note})" if note else "")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + ("" if rows else "\n")


def plain(markdown: str) -> str:
    """Markdown tables as columns of text, for a terminal."""
    lines: list[str] = []
    pending: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            pending.append([cell.strip().strip("`") for cell in line.strip("|").split(" | ")])
            continue
        if pending:
            rows = [row for row in pending if not row[0].startswith("---")]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for first, *others in rows:
                rest = [
                    cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)
                ]
                lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
            pending = []
        lines.append(line.removeprefix("### "))
    return "\n".join(lines).rstrip()


def refusals(cells: Sequence[Cell]) -> str:
    """A line for each cache that could not be run, with the reason; empty if there is none."""
    found = dict.fromkeys((cell.cache, cell.refused) for cell in cells if cell.refused)
    return "".join(f"\nNot run: `{cache}`: {why}.\n" for cache, why in found)


def overview(cells: Sequence[Cell]) -> str:
    """Markdown: a block per task that has several lengths, with tokens read and mean scores at
    each of them.
    """
    parts = []
    for title, of in by_title(cells).items():
        if len(of) < 2:
            continue
        of = sorted(of, key=lambda block: block.length or 0)
        rows = []
        for first in dict.fromkeys(
            (cell.method, cell.budget) for block in of for cell in block.ordered
        ):
            here = [block.cell(*first) for block in of]
            label = next(_budget(cell) for cell in here if cell is not None)
            read = " / ".join(
                "-" if cell is None else f"{cell.tokens_read:.0f}" for cell in here
            )
            means = (
                "-" if cell is None else f"{score(cell)['mean']:.2f}".removeprefix("0")
                for cell in here
            )
            rows.append([f"`{first[0]}`", label, read, " ".join(means)])
        lengths = " / ".join(str(block.length) for block in of)
        samples = " / ".join(dict.fromkeys(block.samples for block in of))
        metric = of[0].cells[0].metric
        head = f"### {title}, {lengths} tokens\n\n{metric[0].upper()}{metric[1:]} at each length, n = {samples}."
        parts.append(
            f"{head}\n\n{markdown_table(['cache', 'budget', 'tokens read', metric], rows)}\n\n"
        )
    return "".join(parts)


def score(cell: Cell) -> dict[str, Any]:
    """n, the mean score with its 95 % interval, tokens read per step (over all layers and in
    the last), seconds.
    """
    low, high = interval(cell.scores)
    attended = cell.attended
    return {
        "n": len(cell.scores),
        "mean": float(np.mean(cell.scores)) if len(cell.scores) else None,
        "low": low,
        "high": high,
        "tokens_read": cell.tokens_read,
        "tokens_read_last_layer": None if attended is None else attended[-1],
        "seconds": cell.seconds,
    }


def by_title(cells: Sequence[Cell]) -> dict[str, list[Block]]:
    """The blocks of each task."""
    found: dict[str, list[Block]] = {}
    for block in blocks(cells):
        found.setdefault(block.title, []).append(block)
    return found


def page(cells: Sequence[Cell]) -> str:
    """All tables, the overview first, below a paragraph about the run."""
    runs = dict.fromkeys(
        f"{made['date'][:10]}, {made['device']}, "
        + ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        for cell in cells
        for made in cell.head.get("made", [])
    )
    dense = sorted(
        {
            cell.head["dense_layers"]
            for cell in cells
            if cell.head.get("dense_layers") is not None
        }
    )
    how = (
        f"Greedy decoding through each cache. {COLUMNS} First layers that attend to everything: "
        f"{' or '.join(map(str, dense)) or 'none'} of {cells[0].head['model']['layers']}; a row that sets its own "
        f"number says so. {'; '.join(runs)}."
    )
    name = cells[0].head["model"]["name"]
    dtype = cells[0].key["dtype"]
    return f"# {name}, {dtype}\n\n{how}\n\n{overview(cells)}{table(cells)}"


def about(cells: Sequence[Cell]) -> dict[str, Any]:
    """The provenance of the results: dates, versions and devices; the model; JSON."""
    made: list[dict[str, Any]] = []
    for cell in cells:
        made += [one for one in cell.head.get("made", []) if one not in made]
    key = cells[0].key
    model = {**cells[0].head["model"], "digest": key.get("model")}
    return {"made": made, "kvjax": key["kvjax"], "model": model, "dtype": key["dtype"]}


def differences(cell: Cell, full: Cell) -> dict[str, Any]:
    """Mean difference of a cache's scores from those of full attention, question by question,
    with its standard error.

    `other_wording` is the share of questions whose answers differ in their text, where there are
    answers. Empty unless two or more questions were answered through both caches.
    """
    pairs = _same_questions(cell, full)
    if cell is full or len(pairs) < 2:
        return {}
    mean, stderr = _difference(pairs)
    found = {"difference": mean, "difference_stderr": stderr}
    if all("answer" in own for own, _ in pairs):  # drafts have none
        other = [own["answer"] != wanted["answer"] for own, wanted in pairs]
        found["other_wording"] = float(np.mean(other))
    return found


def by_position(cell: Cell) -> dict[str, Any]:
    """The share of steps that agree with full attention, and of drafts whose first 1, 2, ... tokens
    are all right, for a cell of drafts; else empty.
    """
    if not all("by_position" in example for example in cell.examples):
        return {}
    shares = np.mean([example["by_position"] for example in cell.examples], axis=0)
    agreement = np.mean([example["agreement"] for example in cell.examples])
    return {"agreement": float(agreement), "by_position": shares.round(4).tolist()}


def pairwise(cells: Sequence[Cell]) -> dict[str, dict[str, list[float]]]:
    """Two caches of one task -> the mean difference of their scores, question by question, and
    its standard error: found[one][other] for each `other` that stands before `one`.

    The error is much below that of two means of the same questions, as most answers are alike.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for at, cell in enumerate(cells):
        for other in cells[:at]:
            pairs = _same_questions(cell, other)
            if len(pairs) > 1:
                beside = [round(number, 4) for number in _difference(pairs)]
                found.setdefault(cell.cache, {})[other.cache] = beside
    return found


def _same_questions(one: Cell, other: Cell) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The results of both for each question that both answered."""
    theirs = {example["id"]: example for example in other.examples}
    return [
        (example, theirs[example["id"]]) for example in one.examples if example["id"] in theirs
    ]


def _difference(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, float]:
    """The mean difference of two scores of the same questions, and its standard error."""
    by_question = np.array([own["score"] - other["score"] for own, other in pairs])
    return float(by_question.mean()), float(by_question.std(ddof=1) / np.sqrt(len(pairs)))


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """The runs and their scores, without the answers, each beside full attention where that was
    asked too, and the differences of every two caches of a task; JSON.
    """
    results: dict[str, dict[str, Any]] = {}
    whole = {cell.task: cell for cell in cells if cell.cache == "full" and cell.examples}
    for cell in cells:
        if cell.examples:
            found = results.setdefault(
                cell.task, {"metric": cell.metric, "task": cell.key["task"], "caches": {}}
            )
            settings = {name: cell.head.get(name) for name in ("budget", "dense_layers")}
            beside = differences(cell, whole[cell.task]) if cell.task in whole else {}
            found["caches"][cell.cache] = {
                **settings,
                **_rounded(score(cell) | beside | by_position(cell)),
            }
    for task, found in results.items():
        found["differences"] = pairwise([cell for cell in cells if cell.task == task])
    refused = {cell.cache: cell.refused for cell in cells if cell.refused}
    return {**about(cells), "results": results} | ({"refused": refused} if refused else {})


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in found.items()
    }
