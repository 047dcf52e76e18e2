"""`kvjax eval --board`: the part after the tasks are scored and drafts are counted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.cli.subject import Subject
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.store import Cell


def finish(
    subject: Subject,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    *,
    lengths: Sequence[int],
    step_times: Path | None,
    out: Path,
) -> list[Path]:
    """Writes the board of all results; returns the paths of its files."""
    from kvjax.evaluate import board
    from kvjax.received import read_object

    config = subject.unloaded.config
    policies = {row.name: row.policies for row in rows if row.policies is not None}
    spec = config.spec(1, max(lengths), subject.dtype)
    made = board.document(
        cells,
        board.rows_of(cells, policies, spec, config.layers),
        steps=[] if step_times is None else board.times_of(read_object(step_times)),
        command=" ".join(["kvjax", *sys.argv[1:]]),
    )
    return board.write(made, out)
