"""Results as a page: tables of scores by cache and budget, plots where there is a curve, and all of it as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.evaluate.provenance import replace_file
from kvjax.evaluate.store import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Block:
    """The cells of one task at one length: a table, and a panel of a plot."""

    title: str  # of the task, without the length
    length: int | None  # tokens; None for data that has its own
    cells: tuple[Cell, ...]

    @property
    def methods(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def budgets(self) -> list[int]:
        return sorted({cell.budget for cell in self.cells if cell.budget is not None})

    def cell(self, method: str, budget: int | None) -> Cell | None:
        found = (cell for cell in self.cells if (cell.method, cell.budget) == (method, budget))
        return next(found, None)

    @property
    def samples(self) -> str:
        counts = sorted({len(cell.examples) for cell in self.cells})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def blocks(cells: Sequence[Cell]) -> list[Block]:
    """By task and length, each in the order in which it came; cells without an answer are left out."""
    found: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in cells:
        task = cell.key["task"]
        if cell.examples:
            found.setdefault((task.get("title", cell.task), task.get("length")), []).append(cell)
    return [Block(title, length, tuple(of)) for (title, length), of in found.items()]


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a cache, a column a budget, a block a task and length; mean score (interval of 95 %).

    "all" is for caches without a budget.
    """
    return "\n\n".join(_table(block) for block in blocks(cells)) + "\n"


def _table(block: Block) -> str:
    budgets = _columns([block])
    metric = " and ".join(dict.fromkeys(cell.metric for cell in block.cells))
    where = "" if block.length is None else f", {block.length} tokens"
    rows = [[f"`{name}`", *(_score(block.cell(name, budget)) for budget in budgets)] for name in block.methods]
    head = f"### {block.title}{where}\n\n{metric[0].upper()}{metric[1:]}, n = {block.samples}."
    return f"{head}\n\n{_markdown(budgets, rows)}"


def _columns(of: Sequence[Block]) -> list[int | None]:
    """Budgets, rising, after None if there is a cache without one."""
    budgets: list[int | None] = [*sorted({budget for block in of for budget in block.budgets})]
    return [None, *budgets] if any(cell.budget is None for block in of for cell in block.cells) else budgets


def _markdown(budgets: Sequence[int | None], rows: Sequence[Sequence[str]]) -> str:
    head = [["cache", *("all" if b is None else str(b) for b in budgets)], ["---", *["---:"] * len(budgets)]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


def overview(cells: Sequence[Cell]) -> str:
    """Markdown: a block a task that has several lengths, with the mean scores at all of them in each place."""
    parts = []
    for title, of in by_title(cells).items():
        if len(of) < 2:
            continue
        of = sorted(of, key=lambda block: block.length or 0)
        budgets = _columns(of)
        rows = []
        for method in dict.fromkeys(method for block in of for method in block.methods):
            found = [[block.cell(method, budget) for block in of] for budget in budgets]
            rows.append([f"`{method}`", *(_means(here) if any(here) else "" for here in found)])
        lengths = " / ".join(str(block.length) for block in of)
        samples = " / ".join(dict.fromkeys(block.samples for block in of))
        metric = of[0].cells[0].metric
        head = f"### {title}, {lengths} tokens\n\n{metric[0].upper()}{metric[1:]} at each length, n = {samples}."
        parts.append(f"{head}\n\n{_markdown(budgets, rows)}\n\n")
    return "".join(parts)


def _means(cells: Sequence[Cell | None]) -> str:
    """As ".97 .85 -"."""
    return " ".join("-" if cell is None else f"{cell.summary()['mean']:.2f}".removeprefix("0") for cell in cells)


def by_title(cells: Sequence[Cell]) -> dict[str, list[Block]]:
    """The blocks of each task."""
    found: dict[str, list[Block]] = {}
    for block in blocks(cells):
        found.setdefault(block.title, []).append(block)
    return found


def _score(cell: Cell | None) -> str:
    if cell is None:
        return ""
    s = cell.summary()
    return f"{s['mean']:.2f} ({s['low']:.2f}, {s['high']:.2f})"


def page(cells: Sequence[Cell]) -> str:
    """The tables, the short one first, and above them what was run."""
    runs = dict.fromkeys(
        f"{cell.head['date'][:10]}, {cell.key['device']}, "
        + ", ".join(f"{name} {version}" for name, version in cell.key["versions"].items())
        for cell in cells
    )
    how = (
        "Greedy decoding through each cache. Mean score (interval of 95 %) by budget, the tokens attended a step and "
        f'KV head; "all" is for caches without a budget. {"; ".join(runs)}.'
    )
    name, dtype = cells[0].head["model"]["name"], cells[0].key["dtype"]
    return f"# {name}, {dtype}\n\n{how}\n\n{overview(cells)}{table(cells)}"


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """What was run and what came out, without the answers; JSON."""
    wanted = ("versions", "source", "python", "backend", "device")
    made: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    for cell in cells:
        one: dict[str, Any] = {name: cell.key[name] for name in wanted if name in cell.key}
        if one not in made:
            made.append(one)
        if cell.examples:
            found = results.setdefault(cell.task, {"metric": cell.metric, "task": cell.key["task"], "caches": {}})
            found["caches"][cell.cache] = {"budget": cell.budget, **_rounded(cell.summary())}
    model = {**cells[0].head["model"], "digest": cells[0].key.get("model")}
    date = max(cell.head["date"] for cell in cells)
    return {"date": date, "made": made, "model": model, "dtype": cells[0].key["dtype"], "results": results}


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def figures(cells: Sequence[Cell]) -> Iterator[tuple[str, Figure]]:
    """(name for a file, figure): scores by budget of each task, and by depth and length where examples tell a depth."""
    from kvjax.evaluate import plots

    for title, of in by_title(cells).items():
        name = re.sub(r"\W+", "-", title).strip("-")
        if any(len(block.budgets) > 1 for block in of):
            yield f"{name}-by-budget", plots.by_budget(of)
        if plots.depths(of):
            yield f"{name}-by-depth", plots.by_depth(of)


def write(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Writes table.md, summary.json and the plots to `out`, and returns their paths."""
    written = [out / "table.md", out / "summary.json"]
    replace_file(written[0], page(cells))
    replace_file(written[1], json.dumps(summary(cells)) + "\n")
    for name, figure in figures(cells):
        written.append(out / f"{name}.svg")
        figure.savefig(written[-1])
    return written
