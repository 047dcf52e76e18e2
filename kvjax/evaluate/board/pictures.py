"""Pictures of the board: score by bytes, and by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.evaluate.board.groups import Cost, Group, by_time, curves, of_reads
from kvjax.evaluate.curves import Axis, around, draw, evenly, ratios
from kvjax.evaluate.drafting import DRAFT


def picture(group: Group, cost: Cost) -> str:
    """SVG: score by cost, a line for each method; full attention must be among them."""
    points = curves(group, cost)
    reads = cost is of_reads
    what = "bytes that a step reads" if reads else "bytes of the cache"
    shares = [x for of in points.values() for x, _ in of]
    return draw(
        points,
        ratios(shares),
        score_axis(group),
        title=group.heading,
        x_label=f"{what}, of those of full attention",
        y_label=group.metric,
    )


def picture_by_time(group: Group, steps: Sequence[Mapping[str, Any]]) -> str:
    """SVG: score by microseconds of a step, a dot for each method that was timed.

    `steps` are of one device and one number of rows.
    """
    points = by_time(group, steps)
    first = steps[0]
    return draw(
        points,
        around([x for of in points.values() for x, _ in of]),
        score_axis(group),
        title=f"{group.heading}, budget {first['budget']}",
        x_label=f"microseconds of a step, {first['batch']} rows, {first['device']}",
        y_label=group.metric,
    )


def score_axis(group: Group) -> Axis:
    """From 0 to the best score that there can be."""
    return evenly(DRAFT if is_of_drafts(group) else 1)


def is_of_drafts(group: Group) -> bool:
    """True if scores are tokens accepted of a draft."""
    return group.metric.startswith("tokens accepted")
