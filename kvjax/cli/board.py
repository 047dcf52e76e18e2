"""`kvjax eval --board`: the part after the tasks are scored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.options import without_weights
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars

if TYPE_CHECKING:
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.store import Cell

TEXTS = 8  # excerpts that caches follow, at most


def finish(
    directory: Path,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    *,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    text: Path | None,
    batch: int,
    parallel: int,
    dtype: str,
    resume: bool,
    step_times: Path | None,
    out: Path,
) -> list[Path]:
    """Counts accepted tokens of drafts at each length, and writes the board of all results;
    returns the paths of its files.
    """
    from kvjax.evaluate import board, continuing, plan
    from kvjax.evaluate.provenance import model_digest
    from kvjax.received import read_object

    checkpoint = without_weights(directory)
    loaded = cache(partial(load_checkpoint, directory, dtype=dtype))
    digest = model_digest(directory)
    found = list(cells)
    progress = bars()
    with progress:
        for length in lengths:
            with bar(progress, f"text of full attention, {length} tokens"):
                task = continuing.make_task(
                    checkpoint,
                    loaded,
                    length,
                    folder=out,
                    text=text,
                    samples=min(samples, TEXTS),
                    seed=seed,
                    key={"model": digest, "dtype": dtype},
                )
            one = plan.prepare(
                checkpoint,
                task,
                rows,
                dtype=dtype,
                out=out / "drafts",
                model=digest,
                resume=resume,
            )
            with bar(progress, task.name, total=one.total) as advance_to:
                if one.done < one.total:
                    how: dict[str, Any] = {"batch": batch, "parallel": parallel}
                    plan.run(loaded(), one, continuing.follow, **how, progress=advance_to)
            found += one.cells.values()
    policies = {row.name: row.policies for row in rows if row.policies is not None}
    spec = checkpoint.config.spec(1, max(lengths), dtype)
    made = board.document(
        found,
        board.rows_of(found, policies, spec, checkpoint.config.layers),
        steps=[] if step_times is None else board.times_of(read_object(step_times)),
        command=" ".join(["kvjax", *sys.argv[1:]]),
    )
    return board.write(made, out)
