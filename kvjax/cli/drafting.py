"""`kvjax eval --drafts`: the part after the tasks are scored, which a board has too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.terminal import bar, bars

if TYPE_CHECKING:
    from kvjax.cli.subject import Subject
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.store import Cell

TEXTS = 8  # excerpts that caches follow, at most


def follow_texts(
    subject: Subject,
    rows: Sequence[Row],
    *,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    text: Path | None,
    batch: int,
    parallel: int,
    resume: bool,
    out: Path,
) -> list[Cell]:
    """Counts the tokens of a draft that are accepted, of each cache at each length: caches follow
    the text of full attention after excerpts of a text. Results stand beside those of the tasks.
    """
    from kvjax.evaluate import continuing, plan

    checkpoint = subject.unloaded
    found: list[Cell] = []
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
            one = subject.prepare(task, rows, resume=resume, out=out)
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
    return found
