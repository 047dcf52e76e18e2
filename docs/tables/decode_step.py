"""Draws docs/decode_step.svg: the time of a decode step by method and tokens in the cache, as a
user's default gives it.
"""

from __future__ import annotations

import math

from docs.tables.speed import default_steps
from kvjax.evaluate.plots import COLOURS
from kvjax.policies import short

PICTURED = ("full", "logquant", "pariskv", "fier", "quest")
SELECTORS = {"fier": "Fier", "quest": "MinMaxPages", "pariskv": "Paris"}
DEVICE = "NVIDIA H200"
BYTES_PER_TOKEN = 2 * 8 * 128 * 2  # keys and values of 8 heads of 128 in bfloat16


def default_us(method: str, batch: int) -> dict[int, float]:
    """Tokens in the cache -> microseconds of a step: those of `full` where the method by default
    reads so short a cache whole.
    """
    found = default_steps()
    lengths = sorted(length for length, rows, name in found if (rows, name) == (batch, method))
    bounds = short.measured()[DEVICE].get(SELECTORS.get(method, ""), {"bytes": 0})
    whole = bounds["bytes"] // (batch * BYTES_PER_TOKEN)
    return {n: found[n, batch, "full" if n <= whole else method]["us"] for n in lengths}


def message(batch: int = 1) -> str:
    """How many times the step of `full` takes as long as that of FIER, at two lengths."""
    full = default_us("full", batch)
    fier = default_us("fier", batch)
    said = [f"{full[n] / fier[n]:.1f} times at {n // 1024}K" for n in (131072, 1048576)]
    return f"fier is faster than full: {said[0]}, {said[1]}"


def picture(batch: int = 1) -> str:
    """SVG: time of a decode step by tokens in the cache, both on logarithmic axes."""
    by_method = {method: default_us(method, batch) for method in PICTURED}
    lengths = list(by_method["full"])
    left, top, width, height = 44, 60, 326, 290
    low, high = 8.0, 1300.0

    def x(tokens: float) -> float:
        return left + width * math.log(tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y(us: float) -> float:
        return top + height * (1 - math.log(us / low) / math.log(high / low))

    def text(at: tuple[float, float], words: str, anchor: str, colour: str = "#333333") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="500" height="402" viewBox="0 0 500 402" '
        'font-family="sans-serif" font-size="14" role="img">',
        f"<title>{message(batch)}</title>",
        '<rect width="500" height="402" fill="white"/>',
        f'<text x="{left - 36}" y="22" fill="#222222" font-weight="bold">{message(batch)}</text>',
        text(
            (left - 36, 43),
            f"microseconds of attention in a step, one layer, {DEVICE}",
            "start",
            "#666666",
        ),
    ]
    for us in (10, 30, 100, 300, 1000):
        lines.append(f'<path d="M{left} {y(us):.1f}H{left + width}" stroke="#dddddd"/>')
        lines.append(text((left - 8, y(us) + 4), str(us), "end"))
    for tokens in lengths:
        lines.append(f'<path d="M{x(tokens):.1f} {top}V{top + height}" stroke="#dddddd"/>')
        lines.append(text((x(tokens), top + height + 20), f"{tokens // 1024}K", "middle"))
    lines.append(
        text(
            (left + width / 2, top + height + 42),
            f"tokens in the cache, {batch} row{'s' * (batch > 1)}",
            "middle",
        )
    )
    ends = {method: y(times[lengths[-1]]) for method, times in by_method.items()}
    place = 0.0
    for method in sorted(ends, key=lambda method: ends[method]):
        place = max(ends[method], place + 16)  # labels must not cover each other
        points = [(x(tokens), y(us)) for tokens, us in by_method[method].items()]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        colour = COLOURS[method]
        lines.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        lines += [
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}"/>'
            for across, down in points
        ]
        last = f"{method} {by_method[method][lengths[-1]]:.0f}"
        lines.append(text((left + width + 10, place + 4), last, "start", colour))
    return "\n".join([*lines, "</svg>"]) + "\n"
