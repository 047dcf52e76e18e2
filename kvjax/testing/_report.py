"""The report of a check of a policy: one row per law."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["held", "failed", "does not apply"]


@dataclass(frozen=True)
class Row:
    """The outcome of one law."""

    law: str
    outcome: Outcome
    reason: str = ""  # why it failed or does not apply; empty if it held
    # With its traceback, if it failed.
    error: Exception | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Report:
    """The outcome of every law that was run, in order."""

    policy: Any
    spec: Any
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, law: str) -> Row:
        """The row of a law by its name."""
        for row in self.rows:
            if row.law == law:
                return row
        raise KeyError(
            f"the report has no law {law!r}; it has {', '.join(row.law for row in self.rows)}"
        )

    def laws(self, outcome: Outcome) -> tuple[str, ...]:
        """Names of the laws with this outcome."""
        return tuple(row.law for row in self.rows if row.outcome == outcome)

    @property
    def failed(self) -> bool:
        return bool(self.laws("failed"))

    def raise_for_failures(self) -> None:
        """Raises AssertionError with every law that failed and its reason; does nothing if none
        failed.
        """
        failures = [row for row in self.rows if row.outcome == "failed"]
        if failures:
            lines = "\n".join(f"{row.law}: {row.reason}" for row in failures)
            raise AssertionError(lines) from failures[0].error

    def __repr__(self) -> str:
        held, failed, others = (len(self.laws(o)) for o in ("held", "failed", "does not apply"))
        counts = f"{held} held, {failed} failed, {others} {'does' if others == 1 else 'do'} not apply"
        lines = [f"{self.policy!r}", f"on {self.spec!r}: {counts}"]
        for row in self.rows:
            reason = row.reason.split("\n")[0]
            lines.append(f"  {row.outcome:<14}  {row.law}" + (f": {reason}" if reason else ""))
        return "\n".join(lines)
