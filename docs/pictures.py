"""Draws the pictures of the concepts and of each method: `python -m docs.pictures` writes
docs/pictures/*.svg.

A method's picture comes from a run of the method: its preset runs at a small size, and every
decode step is a row in which the tokens that it read are coloured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.evaluate.plots import COLOURS
from kvjax.presets import REGISTRY, Preset

FOLDER = Path(__file__).parent / "pictures"
INK, SOFT, LINE = "#222222", "#666666", "#999999"
ZONES = {
    "sink": "#e69f00",
    "history": "#56b4e9",
    "pending": "#b9dff5",
    "local": "#009e73",
    "selected": "#0072b2",
}


@dataclass
class Drawing:
    """An SVG of rectangles, words and arrows."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "none"
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        at: str = "middle",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{colour}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{LINE}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif" font-size="14" role="img">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        return (
            "\n".join(
                [
                    head,
                    f"<title>{escape(self.title)}</title>",
                    tip,
                    ground,
                    *self.parts,
                    "</svg>",
                ]
            )
            + "\n"
        )


# ------------------------------------------------------------------------------------------------------------ concepts


def policy_and_state() -> Drawing:
    drawing = Drawing(
        720, 210, "A policy and a state go through attention; a new state comes out"
    )
    drawing.box(20, 30, 190, 60, "#eef5fb", line="#0072b2")
    drawing.text(115, 56, "policy", bold=True)
    drawing.text(115, 76, "frozen, no arrays", colour=SOFT)
    drawing.box(20, 120, 190, 60, "#fdf4e3", line="#e69f00")
    drawing.text(115, 146, "state", bold=True)
    drawing.text(115, 166, "pytree of arrays", colour=SOFT)
    drawing.box(270, 60, 190, 90, "#f3f3f3", line=LINE)
    drawing.text(365, 92, "kvjax.attention", bold=True)
    drawing.text(365, 114, "flush, update, attend", colour=SOFT)
    drawing.text(365, 134, "one pure function", colour=SOFT)
    drawing.box(520, 30, 180, 60, "#f3f3f3", line=LINE)
    drawing.text(610, 65, "output of attention", bold=True)
    drawing.box(520, 120, 180, 60, "#fdf4e3", line="#e69f00")
    drawing.text(610, 146, "new state", bold=True)
    drawing.text(610, 166, "same shapes, in place", colour=SOFT)
    for y1, y2 in ((60, 85), (150, 125)):
        drawing.arrow(210, y1, 268, y2)
        drawing.arrow(460, y2, 518, y1)
    drawing.text(365, 30, "q, k, v of the new tokens", colour=SOFT)
    drawing.arrow(365, 36, 365, 58)
    return drawing


def zones() -> Drawing:
    drawing = Drawing(
        720,
        190,
        "The zones of a row: sink, history, and the recent block of pending tokens and local window",
    )
    parts = (("sink", 60), ("history", 340), ("pending", 160), ("local", 120))
    says = {
        "sink": ("first tokens",),
        "history": ("in a store, with the selector's index", "the selected tokens are read"),
        "pending": ("not indexed yet", "scored exactly"),
        "local": ("newest tokens", "always read"),
    }
    x = 20.0
    for name, width in parts:
        drawing.box(x, 50, width, 44, ZONES[name], line="white")
        drawing.text(x + width / 2, 77, name, bold=True)
        for i, words in enumerate(says[name]):
            at, place = ("start", x) if name == "sink" else ("middle", x + width / 2)
            drawing.text(place, 114 + 18 * i, words, at=at, colour=SOFT)
        x += width
    drawing.line(420, 40, 700, 40)
    drawing.text(560, 30, "recent block", bold=True)
    drawing.text(20, 30, "position 0", at="start", colour=SOFT)
    drawing.text(380, 168, "a full recent block flushes one chunk to the history", colour=SOFT)
    drawing.arrow(500, 150, 260, 150)
    return drawing


def merge() -> Drawing:
    drawing = Drawing(
        720,
        200,
        "Partial attention over parts of the keys merges into attention over all of them",
    )
    for x, name, zone in (
        (20, "sink", "sink"),
        (190, "history", "selected"),
        (360, "recent", "local"),
    ):
        drawing.box(x, 20, 150, 36, ZONES[zone])
        drawing.text(
            x + 75, 43, f"keys of the {name}", colour="white" if zone != "sink" else INK
        )
        drawing.arrow(x + 75, 56, x + 75, 82)
        drawing.box(x, 84, 150, 50, "#f3f3f3", line=LINE)
        drawing.text(x + 75, 105, "weighted mean")
        drawing.text(x + 75, 124, "and log-sum-exp")
        drawing.arrow(x + 75, 134, 265, 164)
    drawing.box(170, 166, 190, 30, "#eef5fb", line="#0072b2")
    drawing.text(265, 186, "merge, in any order", bold=True)
    drawing.arrow(360, 181, 528, 181)
    drawing.text(620, 178, "attention over", colour=INK)
    drawing.text(620, 196, "all of the keys", colour=INK)
    return drawing


def budget() -> Drawing:
    drawing = Drawing(
        720,
        210,
        "A budget counts sink, selected tokens and local window of a layer and KV head",
    )
    drawing.text(20, 30, "one decode step, by layer", at="start", bold=True)
    for row in range(6):
        y = 46 + 20 * row
        drawing.text(70, y + 13, f"layer {row}", at="end", colour=SOFT)
        if row < 2:
            drawing.box(80, y, 620, 16, "#bbbbbb")
            continue
        drawing.box(80, y, 620, 16, "#f0f0f0")
        drawing.box(80, y, 14, 16, ZONES["sink"])
        for place in np.random.default_rng(row).choice(
            np.arange(104, 640, 8), 12, replace=False
        ):
            drawing.box(float(place), y, 7, 16, ZONES["selected"])
        drawing.box(660, y, 40, 16, ZONES["local"])
    key = ((80, "#bbbbbb", "dense layer: not in the budget"), (320, ZONES["sink"], "sink"))
    for x, colour, words in (
        *key,
        (400, ZONES["selected"], "selected"),
        (510, ZONES["local"], "local: the budget"),
    ):
        drawing.box(x, 184, 14, 14, colour)
        drawing.text(x + 20, 196, words, at="start")
    return drawing


# ------------------------------------------------------------------------------------------------------------- methods

PROMPT, STEPS, HEAD_DIM = 72, 30, 32
SMALL: dict[str, Any] = dict(
    budget=26, dense_layers=0, dense_below=0, sink=2, local=4, chunk=16, group=8, page=4, window=8, tau=0.9,
    capacity=PROMPT + STEPS,
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # where a method needs other sizes
    "fier": dict(page=1),
    "quest": dict(chunk=4),
    "kivi": dict(group=16, residual=32),
    "pqcache": dict(learn=16, bits=3),
    "snapkv": dict(window=8, kernel_size=3),
    "logquant": dict(window=12),
    "freekv": dict(local=8),
    "pariskv": dict(candidates=32),
    "shadowkv": dict(rank=8, page=2, outliers=2, learn=16),
}
# These read every token of one KV head; their differences, in heads and bits, would not show.
NOT_DRAWN = ("duoattention", "evict", "mikv", "razorattention", "turboquant")


def small(preset: Preset) -> Any:
    """The policy of a compressed layer at a size that can be drawn."""
    takes = preset.settings
    given = {
        name: value
        for name, value in (SMALL | OWN.get(preset.name, {})).items()
        if name in takes
    }
    return preset.policies(**given).rest


def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v f32[T, D] of a text of a few topics that returns to the first ones."""
    rng = np.random.default_rng(3)
    total = PROMPT + STEPS
    topics = rng.normal(size=(6, HEAD_DIM))
    topic = np.repeat(rng.integers(0, 6, total // 6 + 1), 6)[:total]
    k = topics[topic] + 0.7 * rng.normal(size=(total, HEAD_DIM))
    asked = np.repeat(rng.integers(0, 6, total // 10 + 1), 10)[:total]
    q = 1.6 * topics[asked] + 0.6 * rng.normal(size=(total, HEAD_DIM))
    return tuple(a.astype(np.float32) for a in (q, k, rng.normal(size=(total, HEAD_DIM))))


def run(policy: Any) -> list[tuple[set[int], set[int]]]:
    """For each decode step the positions that were read, and those of them that are stored in
    few bits.
    """
    spec = kvjax.CacheSpec(
        batch=1,
        q_heads=1,
        kv_heads=1,
        head_dim=HEAD_DIM,
        capacity=PROMPT + STEPS,
        dtype=jnp.float32,
    )
    q, k, v = (a[None, :, None] for a in tokens())
    attend = jax.jit(kvjax.attention_info)
    _, cache, _ = attend(
        kvjax.init_layer(policy, spec), q[:, :PROMPT], k[:, :PROMPT], v[:, :PROMPT]
    )
    rows = []
    for t in range(PROMPT, PROMPT + STEPS):
        _, cache, info = attend(cache, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
        held = set(range(t + 1))
        read = (
            held
            if info.positions is None
            else {int(p) for p in np.asarray(info.positions).ravel() if p >= 0}
        )
        rows.append(
            (read, read - _exact(cache, k[0, :, 0]) if _is_quantized(policy) else set())
        )
    return rows


def _is_quantized(policy: Any) -> bool:
    return isinstance(policy, kvjax.Compressed)


def _exact(cache: kvjax.LayerCache, keys: np.ndarray) -> set[int]:
    """Positions whose keys are stored unchanged in sink or recent block."""
    held = {np.asarray(a).tobytes() for leaf in jax.tree.leaves((cache.state.sink, cache.state.recent))
            if leaf.ndim == 4 for a in np.asarray(leaf)[0, 0]}  # fmt: skip
    return {i for i, key in enumerate(keys) if key.tobytes() in held}


def reads(name: str, rows: Sequence[tuple[set[int], set[int]]]) -> Drawing:
    """A row per decode step, a column per token: coloured if the step read the token."""
    cell, left, top = 6.0, 60, 44
    total = PROMPT + STEPS
    drawing = Drawing(
        int(left + cell * total + 20), int(top + 7 * STEPS + 62), f"Tokens that {name} reads"
    )
    colour = COLOURS.get(name, "#0072b2")
    drawing.text(
        left,
        26,
        f"{name}: tokens that each decode step reads, newest step at the bottom",
        at="start",
        bold=True,
    )
    for i, (read, quantized) in enumerate(rows):
        y = top + 7 * i
        for kind, fill in (
            (set(range(PROMPT + i + 1)), "#ececec"),
            (read - quantized, colour),
            (quantized, _tint(colour)),
        ):
            for first, last in _runs(kind):
                drawing.box(left + cell * first, y, cell * (last - first + 1) - 0.5, 6.4, fill)
    bottom = top + 7 * STEPS
    drawing.line(left + cell * PROMPT, top - 6, left + cell * PROMPT, bottom + 4)
    drawing.text(left + cell * PROMPT / 2, bottom + 18, "prompt", colour=SOFT)
    drawing.text(left + cell * (PROMPT + STEPS / 2), bottom + 18, "generated", colour=SOFT)
    drawing.text(left - 8, top + 10, "step 1", at="end", colour=SOFT)
    drawing.text(left - 8, bottom - 2, f"step {STEPS}", at="end", colour=SOFT)
    legend = [(colour, "read"), ("#ececec", "not read")]
    if any(quantized for _, quantized in rows):
        legend = [(colour, "read in full precision"), (_tint(colour), "read in few bits")]
    for (fill, words), x in zip(legend, (left, left + 190), strict=True):
        drawing.box(x, bottom + 34, 14, 14, fill)
        drawing.text(x + 20, bottom + 46, words, at="start")
    return drawing


def _tint(colour: str) -> str:
    return "#" + "".join(
        f"{(int(colour[i : i + 2], 16) + 2 * 255) // 3:02x}" for i in (1, 3, 5)
    )


def _runs(kind: Iterable[int]) -> Iterable[tuple[int, int]]:
    first = last = None
    for at in sorted(kind):
        if last is None or at != last + 1:
            if first is not None:
                yield first, last
            first = at
        last = at
    if first is not None:
        yield first, last


CONCEPTS = {
    "policy_and_state": policy_and_state,
    "zones": zones,
    "merge": merge,
    "budget": budget,
}


def main(names: Sequence[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    drawings = {name: draw for name, draw in CONCEPTS.items()} | {
        f"reads_{p.name}": partial(lambda p: reads(p.name, run(small(p))), p)
        for p in REGISTRY.values()
        if p.name not in NOT_DRAWN
    }
    for name, draw in drawings.items():
        if not names or name in names:
            try:
                (FOLDER / f"{name}.svg").write_text(draw().svg())
            except (ValueError, NotImplementedError) as error:
                raise SystemExit(f"{name}: {error}; give its sizes in OWN") from error


if __name__ == "__main__":
    main(sys.argv[1:])
