"""Draws docs/decode_step.svg: the time of a decode step by method and tokens in the cache."""

from __future__ import annotations

import math

from docs.tables.speed import default_steps
from kvjax.evaluate.plots import COLOURS

PICTURED = ("cudnn", "logquant", "pariskv", "fier", "quest")


def picture(batch: int = 1) -> str:
    """SVG: time of a decode step by tokens in the cache, both on logarithmic axes."""
    found = default_steps()
    lengths = sorted({length for length, rows, _ in found if rows == batch})
    left, top, width, height = 44, 50, 326, 290
    low, high = 8.0, 1300.0

    def x(tokens: float) -> float:
        return left + width * math.log(tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y(us: float) -> float:
        return top + height * (1 - math.log(us / low) / math.log(high / low))

    def text(at: tuple[float, float], words: str, anchor: str, colour: str = "#333333") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="500" height="400" viewBox="0 0 500 400" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="500" height="400" fill="white"/>',
        text(
            (left - 36, 24),
            "Attention of one decode step in one layer, microseconds (NVIDIA H200)",
            "start",
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
            f"tokens in the cache, batch {batch}",
            "middle",
        )
    )
    ends = {method: y(found[lengths[-1], batch, method]["us"]) for method in PICTURED}
    place = 0.0
    for method in sorted(ends, key=lambda method: ends[method]):
        place = max(ends[method], place + 16)  # labels must not cover each other
        times = [found[n, batch, method]["us"] for n in lengths]
        points = " ".join(
            f"{x(n):.1f},{y(us):.1f}" for n, us in zip(lengths, times, strict=True)
        )
        name, preset = ("full, cuDNN", "full") if method == "cudnn" else (method, method)
        colour = COLOURS[preset]
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        lines += [
            f'<circle cx="{x(n):.1f}" cy="{y(us):.1f}" r="3.5" fill="{colour}"/>'
            for n, us in zip(lengths, times, strict=True)
        ]
        lines.append(
            text((left + width + 10, place + 4), f"{name} {times[-1]:.0f}", "start", colour)
        )
    return "\n".join([*lines, "</svg>"]) + "\n"
