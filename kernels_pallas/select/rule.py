"""The rule by which units are selected."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.kernels_pallas.select import tiling


@dataclass(frozen=True)
class How:
    """The rule of a selection.

    Units past the first `limits` of a part do not count, nor the last `local` tokens of the
    second span. Spans are in tokens; a unit has `unit` of them, and counts if any of them does.
    """

    rows: int
    room: int
    limits: tuple[int, ...]
    group_reduce: str
    config: tiling.Config
    local: int = 0
    unit: int = 1
    # what the first unit of the second part is written as; None: its number
    beyond: int | None = None
