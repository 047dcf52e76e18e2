"""Writes results to a folder: tables, a summary and plots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.evaluate import plots, report
from kvjax.evaluate.provenance import json_text, replace_file
from kvjax.evaluate.store import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(cells: Sequence[Cell]) -> Iterator[tuple[str, Figure]]:
    """Yields (file name, figure): scores by budget for each task, and by depth and length for tasks with depths."""
    for title, of in report.by_title(cells).items():
        name = re.sub(r"\W+", "-", title).strip("-")
        if any(len(block.budgets) > 1 for block in of):
            yield f"{name}-by-budget", plots.by_budget(of)
        if plots.depths(of):
            yield f"{name}-by-depth", plots.by_depth(of)


def write(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Writes table.md, summary.json and the plots to `out`, and returns their paths."""
    written = [out / "table.md", out / "summary.json"]
    replace_file(written[0], report.page(cells))
    replace_file(written[1], json_text(report.summary(cells)))
    for name, figure in figures(cells):
        written.append(out / f"{name}.svg")
        figure.savefig(written[-1])
    return written
