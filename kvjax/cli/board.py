"""`kvjax eval --board`: the part after the tasks are scored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.terminal import bar, bars

if TYPE_CHECKING:
    from kvjax.cli.subject import Subject
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.store import Cell

TEXTS = 8  # excerpts that caches follow, at most


def finish(
    subject: Subject,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    *,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    text: Path | None,
    batch: int,
    parallel: int,
    resume: bool,
    step_times: Path | None,
    out: Path,
) -> list[Path]:
    """Counts accepted tokens of drafts at each length, and writes the board of all results;
    returns the paths of its files.
    """
    from kvjax.evaluate import board, continuing, plan
    from kvjax.received import read_object

    checkpoint = subject.unloaded
    found = list(cells)
    progress = bars()
    with progress:
        for length in lengths:
            with bar(progress, f"text of full attention, {length} tokens"):
                task = continuing.make_task(
                    checkpoint,
                    lambda: subject.loaded,
                    length,
                    folder=out,
                    text=text,
                    samples=min(samples, TEXTS),
                    seed=seed,
                    key={"model": subject.digest, "dtype": subject.dtype},
                )
            one = plan.prepare(
                checkpoint,
                task,
                rows,
                dtype=subject.dtype,
                out=out / "drafts",
                model=subject.digest,
                resume=resume,
            )
            with bar(progress, task.name, total=one.total) as advance_to:
                if one.done < one.total:
                    plan.run(
                        subject.loaded,
                        one,
                        continuing.follow,
                        batch=batch,
                        parallel=parallel,
                        progress=advance_to,
                    )
            found += one.cells.values()
    policies = {row.name: row.policies for row in rows if row.policies is not None}
    spec = checkpoint.config.spec(1, max(lengths), subject.dtype)
    made = board.document(
        found,
        board.rows_of(found, policies, spec, checkpoint.config.layers),
        steps=[] if step_times is None else board.times_of(read_object(step_times)),
        command=" ".join(["kvjax", *sys.argv[1:]]),
    )
    return board.write(made, out)
