"""Results as a page: a table of scores by cache and budget, a block a length, and plots where there is a curve."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.evaluate.results import Cell

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
    budgets: list[int | None] = [*block.budgets]
    if any(cell.budget is None for cell in block.cells):
        budgets.insert(0, None)
    metric = " and ".join(dict.fromkeys(cell.metric for cell in block.cells))
    where = "" if block.length is None else f", {block.length} tokens"
    rows = [["cache", *("all" if b is None else str(b) for b in budgets)], ["---", *["---:"] * len(budgets)]]
    for method in block.methods:
        rows.append([f"`{method}`", *(_score(block.cell(method, budget)) for budget in budgets)])
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"### {block.title}{where}\n\n{metric[0].upper()}{metric[1:]}, n = {block.samples}.\n\n{lines}"


def _score(cell: Cell | None) -> str:
    if cell is None:
        return ""
    s = cell.summary()
    return f"{s['mean']:.2f} ({s['low']:.2f}, {s['high']:.2f})"


def page(cells: Sequence[Cell]) -> str:
    """The table, and above it what was run."""
    head, key = cells[0].head, cells[0].key
    versions = ", ".join(f"{name} {version}" for name, version in key["versions"].items())
    how = (
        "Greedy decoding through each cache. Mean score (interval of 95 %) by budget, the tokens attended a step and "
        f'KV head; "all" is for caches without a budget. {head["date"][:10]}, {key["device"]}, {versions}.'
    )
    return f"# {head['model']['name']}, {key['dtype']}\n\n{how}\n\n{table(cells)}"


def figures(cells: Sequence[Cell]) -> Iterator[tuple[str, Figure]]:
    """(name for a file, figure): scores by budget of each task, and by depth and length where examples tell a depth."""
    from kvjax.evaluate import plots

    by_title: dict[str, list[Block]] = {}
    for block in blocks(cells):
        by_title.setdefault(block.title, []).append(block)
    for title, of in by_title.items():
        name = re.sub(r"\W+", "-", title).strip("-")
        if any(len(block.budgets) > 1 for block in of):
            yield f"{name}-by-budget", plots.by_budget(of)
        if plots.depths(of):
            yield f"{name}-by-depth", plots.by_depth(of)


def write(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Writes table.md and the plots to `out`, and returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(page(cells), encoding="utf-8")
    written = [out / "table.md"]
    for name, figure in figures(cells):
        written.append(out / f"{name}.svg")
        figure.savefig(written[-1])
    return written
