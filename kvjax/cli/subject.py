"""The model of an evaluation, whose steps share what is read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.options import without_weights
from kvjax.cli.programs import load_checkpoint

if TYPE_CHECKING:
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.plan import Plan
    from kvjax.evaluate.tasks import Task
    from kvjax.models import Checkpoint


@dataclass(frozen=True)
class Subject:
    """The model that is evaluated, of which each part is read once, when it is first needed."""

    directory: Path
    dtype: str

    @cached_property
    def unloaded(self) -> Checkpoint:
        """The checkpoint without its weights."""
        return without_weights(self.directory)

    @cached_property
    def loaded(self) -> Checkpoint:
        return load_checkpoint(self.directory, dtype=self.dtype)

    @cached_property
    def digest(self) -> str:
        from kvjax.evaluate.provenance import model_digest

        return model_digest(self.directory)

    def prepare(self, task: Task, rows: Sequence[Row], *, resume: bool, out: Path) -> Plan:
        """The examples of a task, and the answers to them that the folder `out` has already."""
        from kvjax.evaluate import plan

        return plan.prepare(
            self.unloaded,
            task,
            rows,
            dtype=self.dtype,
            out=out / "results",
            model=self.digest,
            resume=resume,
        )
