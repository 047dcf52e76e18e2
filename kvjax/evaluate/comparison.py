"""A comparison in one call: a task, caches by name, and a table of scores and of the tokens
that each cache read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.evaluate import plots, report
from kvjax.evaluate.accuracy import answer
from kvjax.evaluate.caches import DENSE_LAYERS, Caches, make_rows
from kvjax.evaluate.plan import prepare, run
from kvjax.evaluate.store import Cell, Progress
from kvjax.evaluate.tasks import Task, check_task, make_tasks
from kvjax.models import Checkpoint
from kvjax.validation import short_repr


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results of one comparison. Its repr is a table; a notebook shows it as one."""

    cells: tuple[Cell, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each task and cache: names, budget, n, mean score with its 95 % interval,
        tokens read.
        """
        return [
            {
                "task": cell.task,
                "cache": cell.method,
                "budget": cell.budget,
                **report.score(cell),
            }
            | ({"refused": cell.refused} if cell.refused else {})
            for cell in self.cells
        ]

    def __repr__(self) -> str:
        return report.plain(report.table(self.cells))

    def _repr_markdown_(self) -> str:
        return report.table(self.cells)

    def figures(self) -> dict[str, Any]:
        """Plots by name; they need matplotlib."""
        return dict(plots.figures(self.cells))


def compare(
    checkpoint: Checkpoint,
    task: str | Task | Sequence[str | Task],
    caches: Caches,
    *,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    budgets: Sequence[int] | None = None,
    dense_layers: int | None = DENSE_LAYERS,
    batch: int = 8,
    parallel: int = 1,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Comparison:
    """Asks a model the same questions through several caches, and scores the answers.

    >>> from kvjax import models
    >>> ck = models.load(models.shipped())
    >>> compare(ck, "pass_key", ["full", "streaming_llm:budget=32"], lengths=[256], samples=2)
    pass key, question decoded, 256 tokens
    <BLANKLINE>
    Exact match, n = 2.
    <BLANKLINE>
    cache          budget  tokens read  exact match          95 %
    full              all          246         1.00  0.34 to 1.00
    streaming_llm      32           86         0.00  0.00 to 0.66

    Args:
      task: a name of `kvjax eval --task`, optionally with settings ("needles:hidden=16"); a
        task of your own, or its name ("mine.py:quiz"); or several.
      caches: names of presets, such as "fier" or "fier:budget=64"; your own, as "mine.py:mine",
        policies, or functions of a budget; in a list, or by name: {"mine": lambda budget: ...}.
      lengths: tokens of prompt and answer together, for generated tasks; default 2048.
      samples: number of questions.
      budgets: for caches that have one and do not set it.
      dense_layers: number of first layers that attend to everything, for all caches that do not
        set their own. One policy for all layers gets them too; None adds none.
      batch: questions decoded together.
      parallel: caches that decode at the same time; their programs compile in parallel.
      out: folder for results, a table and plots, as `kvjax eval --out` writes them; existing
        results are not computed again.
      settings: `seed`, `text` and `question` of `kvjax.evaluate.tasks.make_tasks`.

    Raises:
      ValueError: before anything runs. A cache that cannot hold its budget has a row with the
        reason instead.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise ValueError(
            f"compare(checkpoint=...) must be a Checkpoint, got {short_repr(checkpoint)}; kvjax.models.load returns one"
        )
    for name, numbers in (("lengths", lengths), ("budgets", budgets)):
        if isinstance(numbers, str) or not isinstance(numbers, Sequence | None):
            raise ValueError(
                f"compare({name}=...) must be a list of integers, as [512, 1024], got {short_repr(numbers)}"
            )
    asked = [task] if isinstance(task, str) or not isinstance(task, Sequence) else list(task)
    tasks: list[Task] = []
    for one in asked:
        made = (
            make_tasks([one], lengths=lengths, samples=samples, **settings)
            if isinstance(one, str)
            else [check_task("compare(task=...)", one)]
        )
        tasks += made
    rows = make_rows(caches, budgets=budgets, dense_layers=dense_layers)
    folder = None if out is None else Path(out) / "results"
    plans = [
        prepare(checkpoint, one, rows, dtype=checkpoint.model.dtype, out=folder)
        for one in tasks
    ]
    how: dict[str, Any] = {"batch": batch, "parallel": parallel, "progress": progress}
    cells = [cell for plan in plans for cell in run(checkpoint, plan, answer, **how)]
    if out is not None:
        plots.write(cells, Path(out))
    return Comparison(tuple(cells))
