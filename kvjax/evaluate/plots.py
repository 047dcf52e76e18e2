"""Plots of results: score by tokens read, with a line per method.

A method has the same colour in every plot. If too many settings of one preset are compared,
they get a panel of their own and a colour each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import isotonic_regression

from kvjax.evaluate.provenance import json_text, replace_file
from kvjax.evaluate.report import Block, by_title, page, score, summary
from kvjax.presets import REGISTRY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvjax.evaluate.store import Cell

# Okabe and Ito's colours, which are distinct to people with any colour vision, darkened for
# lines; then greys.
COLOURS = {
    "full": "#000000",
    "exact": "#7f7f7f",
    "fier": "#0072b2",
    "quest": "#e69f00",
    "pariskv": "#009e73",
    "freekv": "#56b4e9",
    "snapkv": "#d55e00",
    "h2o": "#cc79a7",
    "tova": "#882255",
    "streaming_llm": "#999933",
    "logquant": "#332288",
    "kivi": "#44aa99",
    "turboquant": "#225522",
    "evict": "#775533",
    "arkvale": "#6699cc",
    "magicpig": "#ffaabb",
    "pqcache": "#994455",
    "shadowkv": "#aa4466",
    "pyramidkv": "#ee8866",
    "adakv": "#44bb99",
    "mikv": "#7f7fcc",
    "logevict": "#555577",
    "raas": "#bbaa33",
    "razorattention": "#117733",
    "duoattention": "#88ccee",
}
MARKERS = (*"oDs^vPX*<>hpdH81234x+|_.", "$T$")
LINES = ("-", "--", ":", "-.")
NEEDED = "plots need matplotlib: pip install matplotlib"


def can_draw() -> bool:
    """True if matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches, outside of pyplot's state.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if not can_draw():
        raise ImportError(NEEDED)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style(method: str, among: Sequence[str] = ()) -> dict[str, Any]:
    """Colour, marker and line of a method; settings of one preset
    (`fier:group_reduce=per_head`) share a colour and differ in their lines.

    If there are more of them than line styles, they differ in colour.
    """
    name = _preset(method)
    known = list(REGISTRY)
    place = known.index(name) if name in known else len(known)
    same = [other for other in dict.fromkeys((*among, method)) if _preset(other) == name]
    if len(same) > len(LINES):
        at = same.index(method)
        return {
            "color": [*COLOURS.values()][at % len(COLOURS)],
            "marker": MARKERS[at % len(MARKERS)],
            "linestyle": "-",
        }
    return {
        "color": COLOURS.get(name, "#555555"),
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[same.index(method) % len(LINES)],
    }


def _preset(name: str) -> str:
    """ "fier" of "fier:group=16@64"."""
    return name.partition("@")[0].partition(":")[0]


def labels(methods: Sequence[str]) -> dict[str, str]:
    """Short names: without the settings that all of the methods of a preset share.

    >>> labels(["full", "h2o:dense_layers=2", "quest", "quest:page=32"])
    {'full': 'full', 'h2o:dense_layers=2': 'h2o', 'quest': 'quest', 'quest:page=32': 'quest:page=32'}
    """
    settings = {method: method.partition(":")[2].split(",") for method in methods}
    short = {}
    for method, own in settings.items():
        name = method.partition(":")[0]
        same = [settings[other] for other in methods if other.partition(":")[0] == name]
        distinct = [setting for setting in own if not all(setting in others for others in same)]
        short[method] = ":".join(filter(None, (name, ",".join(distinct))))
    return short


# ----------------------------------------------------------------------------------------- scores of an evaluation


def figures(cells: Sequence[Cell]) -> Iterator[tuple[str, Figure]]:
    """Yields (file name, figure): scores by budget for each task that was asked with several."""
    for title, of in by_title(cells).items():
        if any(len(block.budgets) > 1 for block in of):
            yield re.sub(r"\W+", "-", title).strip("-") + "-by-budget", by_budget(of)


def write(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Writes table.md, summary.json and the plots to `out`, and returns their paths.

    Without matplotlib there are no plots.
    """
    written = [out / "table.md", out / "summary.json"]
    replace_file(written[0], page(cells))
    replace_file(written[1], json_text(summary(cells)))
    if not can_draw():
        return written
    for name, figure in figures(cells):
        written.append(out / f"{name}.svg")
        figure.savefig(written[-1])
    return written


def by_budget(panels: Sequence[Block]) -> Figure:
    """Mean score by tokens read: a line per method with 95 % intervals, a panel per length.

    Tokens read are the mean over steps, KV heads and all layers, so methods with the same
    budget but different dense layers differ in x. Caches without a budget are dashed horizontal
    lines.
    """
    panels = [block for whole in panels for block in _uncrowded(whole) if block.budgets]
    figure = new_figure(1.6 + 4.2 * len(panels), 4.2)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    methods = list(dict.fromkeys(method for block in panels for method in block.methods))
    for axis, block in zip(axes, panels, strict=True):
        _lines(axis, block, methods)
        if block.length is not None:
            axis.set_title(f"{block.length:,} tokens".replace(",", " "), fontsize=10)
        axis.set_xlabel("tokens read per step and KV head, mean over layers")
    axes[0].set_ylabel(panels[0].cells[0].metric)
    samples = dict.fromkeys(block.samples for block in panels)
    model = panels[0].cells[0].head["model"]["name"]
    figure.suptitle(
        f"{panels[0].title} · {model} · n = {' / '.join(samples)}",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure


def _uncrowded(block: Block) -> list[Block]:
    """A block for each preset, if one of them has too many settings for lines of one colour."""
    parts: dict[str, list[str]] = {}
    for method in block.methods:
        parts.setdefault(method.partition(":")[0], []).append(method)
    if max(map(len, parts.values())) <= len(LINES):
        return [block]
    return [
        replace(block, cells=tuple(c for c in block.cells if c.method in part))
        for part in parts.values()
    ]


def _lines(axis: Axes, block: Block, methods: Sequence[str]) -> None:
    budgets = block.budgets
    ends: list[tuple[float, str, str]] = []
    short = labels(methods)
    for method in block.methods:
        look = style(method, methods)
        found = [score(cell) for b in budgets if (cell := block.cell(method, b)) is not None]
        if found:
            x = [s["tokens_read"] for s in found]
            y = [s["mean"] for s in found]
            axis.plot(x, y, markersize=4.5, linewidth=1.6, **look)
            axis.vlines(
                x,
                [s["low"] for s in found],
                [s["high"] for s in found],
                color=look["color"],
                alpha=0.35,
            )
            ends.append((y[-1], short[method], look["color"]))
        cell = block.cell(method, None)
        if cell is not None:
            mean = score(cell)["mean"]
            axis.axhline(mean, color=look["color"], linewidth=1.1, linestyle=(0, (6, 3)))
            ends.append((mean, short[method], look["color"]))
    read = [cell.tokens_read or 1.0 for cell in block.cells if cell.budget is not None]
    axis.set_xscale("log", base=2)
    ticks: list[float] = []
    for at in sorted(read):
        if not ticks or at > 1.1 * ticks[-1]:  # numbers need room
            ticks.append(at)
    axis.set_xticks(ticks, [f"{at:.0f}" for at in ticks])
    axis.minorticks_off()
    best = block.cells[0].key["task"].get("draft", 1)  # that a score can be
    axis.set_ylim(-0.03 * best, 1.03 * best)
    axis.set_xlim(min(read) / 1.15, max(read) * 1.15)
    tidy(axis)
    ends.sort(key=lambda end: end[0])
    for (_, label, colour), place in zip(
        ends, spread([end[0] for end in ends], gap=0.055 * best, top=1.02 * best), strict=True
    ):
        axis.annotate(
            label, (1.0, place), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
            va="center", color=colour, fontsize=9, annotation_clip=False,
        )  # fmt: skip


def tidy(axis: Axes) -> None:
    """Puts a light grid behind the lines, and removes the frame at the top and right."""
    axis.grid(color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def spread(places: Sequence[float], *, gap: float, top: float) -> list[float]:
    """Moves ascending `places` as little as possible (least squares), to be at least `gap`
    apart and at most `top`.

    >>> [round(y, 3) for y in spread([0.5, 0.5, 0.9, 1.0], gap=0.1, top=0.95)]
    [0.45, 0.55, 0.85, 0.95]
    """
    # Places are `gap` apart if they do not fall after these are subtracted.
    steps = gap * np.arange(len(places))
    flat = isotonic_regression(np.asarray(places) - steps).x if len(places) else steps
    return (np.minimum(flat, top - (len(places) - 1) * gap) + steps).tolist()
