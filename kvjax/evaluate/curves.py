"""Curves as SVG without a plotting library: a line for each method, with its name at the right.

The same points always give the same text, so a page's picture can be checked against its
figures, and `kvjax eval --board` needs no extra.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvjax.evaluate.plots import labels, spread, style

Point = tuple[float, float]
WIDTH = 500  # letters of this size can be read on a phone, where the picture has 380 pixels
LEFT = 40  # of the numbers beside the axis
PLOT = 312  # width of the axis
TOP = 46
ROW = 15  # between two names
LETTERS = 16  # of a name
DASHES = {"--": "6 3", ":": "2 3", "-.": "6 3 2 3"}


@dataclass(frozen=True)
class Axis:
    """An axis, whose ticks lie within its ends; logarithmic where its numbers are ratios."""

    low: float
    high: float
    ticks: Mapping[float, str]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends, in [0, 1]."""
        at, low, high = (
            math.log(number) if self.log else number for number in (value, self.low, self.high)
        )
        return (at - low) / (high - low)


def ratios(values: Sequence[float]) -> Axis:
    """A logarithmic axis of shares of a whole, with a tick at every other power of two.

    >>> list(ratios([0.03, 0.9]).ticks.values())
    ['1/64', '1/16', '1/4', '1']
    """
    first = math.floor(math.log2(min(values)))
    last = max(first + 1, math.ceil(math.log2(max(values))))
    ticks = {
        2.0**power: f"1/{2**-power}" if power < 0 else f"{2**power}"
        for power in range(first, last + 1, 2)
    }
    return Axis(2.0**first, 2.0**last, ticks, log=True)


def around(values: Sequence[float], parts: int = 4) -> Axis:
    """An axis a little wider than the values, with some `parts` round ticks.

    >>> list(around([2450, 3810]).ticks.values())
    ['2500', '3000', '3500']
    """
    margin = 0.08 * (max(values) - min(values) or max(values))
    low = min(values) - margin
    high = max(values) + margin
    least = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least)
    first = math.ceil(low / step)
    ticks = (step * number for number in range(first, math.floor(high / step) + 1))
    return Axis(low, high, {tick: f"{tick:g}" for tick in ticks})


def evenly(high: float, parts: int = 4) -> Axis:
    """An axis from 0 to `high`.

    >>> list(evenly(8).ticks.values())
    ['0', '2', '4', '6', '8']
    """
    ticks = (high * part / parts for part in range(parts + 1))
    return Axis(0.0, high, {tick: f"{tick:g}" for tick in ticks})


def draw(
    curves: Mapping[str, Sequence[Point]],
    x: Axis,
    y: Axis,
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> str:
    """SVG of the curves by method; a method of one point is a dot.

    Names stand in the order of the curves' last points, as near to them as there is room.
    """
    height = max(280, ROW * (len(curves) - 1))
    place = _Place(x, y, height)
    parts = [*_frame(place, title, x_label, y_label)]
    methods = sorted(curves, key=lambda method: place.at(curves[method][-1])[1])
    ends = [place.at(curves[method][-1]) for method in methods]
    heights = _names_at([end[1] for end in ends], height)
    short = labels(methods)
    for method, end, beside in zip(methods, ends, heights, strict=True):
        colour = style(method, methods)["color"]
        name = _cut(short[method])
        parts += _curve(place, curves[method], method, methods)
        parts.append(
            f'<path d="M{end[0] + 4:.1f} {end[1]:.1f}L{LEFT + PLOT + 8} {beside:.1f}" '
            f'stroke="{colour}" stroke-opacity=".25"/>'
        )
        parts.append(_text(LEFT + PLOT + 12, beside + 4, name, "start", colour))
    whole = TOP + height + 48
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{whole}" '
        f'viewBox="0 0 {WIDTH} {whole}" font-family="sans-serif" font-size="12" role="img">'
    )
    ground = f'<rect width="{WIDTH}" height="{whole}" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"]) + "\n"


def _names_at(ends: Sequence[float], height: int) -> list[float]:
    """Where the names of curves stand that end at ascending `ends`, all inside the picture."""
    found: list[float] = []
    for number, at in enumerate(spread(ends, gap=ROW, top=TOP + height)):
        found.append(max(at, found[-1] + ROW if number else TOP))
    return found


@dataclass(frozen=True)
class _Place:
    """Pixels of a point."""

    x: Axis
    y: Axis
    height: int

    def at(self, point: Point) -> Point:
        return (
            LEFT + PLOT * self.x.share(point[0]),
            TOP + self.height * (1 - self.y.share(point[1])),
        )


def _frame(place: _Place, title: str, x_label: str, y_label: str) -> list[str]:
    """Title, grid, ticks and the names of the axes."""
    bottom = TOP + place.height
    parts = [
        _text(8, 18, title, "start", "#222222", bold=True),
        _text(8, 36, y_label, "start", "#666666"),
        _text(LEFT + PLOT / 2, bottom + 38, x_label, "middle", "#666666"),
    ]
    for tick, words in place.y.ticks.items():
        _, at = place.at((place.x.low, tick))
        parts.append(f'<path d="M{LEFT} {at:.1f}H{LEFT + PLOT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, at + 4, words, "end", "#333333"))
    for tick, words in place.x.ticks.items():
        at, _ = place.at((tick, place.y.low))
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#dddddd"/>')
        parts.append(_text(at, bottom + 18, words, "middle", "#333333"))
    return parts


def _curve(
    place: _Place, points: Sequence[Point], method: str, methods: Sequence[str]
) -> list[str]:
    """The line and the dots of a method."""
    look = style(method, methods)
    pixels = [place.at(point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    dash = DASHES.get(look["linestyle"])
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [
        f'<polyline points="{line}" fill="none" stroke="{look["color"]}" stroke-width="2"{dashed}/>'
    ]
    parts += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{look["color"]}"/>' for x, y in pixels
    ]
    return parts


def _cut(name: str) -> str:
    """A name that fits beside the axis."""
    return name if len(name) <= LETTERS else name[: LETTERS - 1] + "…"


def _text(
    x: float, y: float, words: str, anchor: str, colour: str, *, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )
