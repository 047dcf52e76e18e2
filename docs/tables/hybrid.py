"""Tables of models with gated delta nets, and of attention with heads of 256."""

from __future__ import annotations

from typing import Any

from docs.tables.reading import load_rows
from docs.tables.writing import markdown

CELLS = ((131072, 1), (32768, 8))


def _cell(length: int, batch: int) -> str:
    return f"{length} x {batch}"


def hybrid_steps() -> str:
    """Steps of whole models with gated delta nets, of few layers, beside their floors."""
    rows = [row for row in load_rows("hybrid_step") if row["part"] == "step"]
    body = [
        [
            f"{row['model']}, {row['layers']} layers",
            f"`{row['method']}`",
            _cell(row["length"], row["batch"]),
            f"{row['us']:.0f}",
            f"{row['floor_us']:.0f}",
            f"{row['us'] / row['floor_us']:.2f}",
        ]
        for row in rows
    ]
    titles = ["shape", "cache", "tokens x rows", "us", "floor, us", "times the floor"]
    return markdown(titles, body)


def hybrid_parts() -> str:
    """One layer alone: the recurrence of a gated delta net, and attention over a cache."""
    titles = {"delta": "gated delta net", "attention": "attention, `full`"}
    body = [
        [
            titles[row["part"]],
            row["model"],
            _cell(row["length"], row["batch"]),
            f"{row['us']:.0f}",
            f"{row['floor_us']:.1f}",
        ]
        for row in load_rows("hybrid_step")
        if row["part"] in titles
    ]
    return markdown(["layer", "shape", "tokens x rows", "us", "floor, us"], body)


def heads_of_256() -> str:
    """A step of attention with heads of 256 beside the same bytes in heads of 128."""
    wide, narrow = (_steps(load_rows(name)) for name in ("decode_step_256", "decode_step"))
    body = []
    for cell in CELLS:
        for method in ("cudnn", "full", "fier", "quest"):
            us, beside = wide[method, cell], narrow[method, cell]
            body.append(
                [
                    f"`{method}`",
                    _cell(*cell),
                    f"{us:.1f}",
                    f"{beside:.1f}",
                    f"{us / beside:.2f}",
                ]
            )
    titles = ["method", "tokens x rows", "4 heads of 256, us", "8 heads of 128, us", "times"]
    return markdown(titles, body)


def commands() -> str:
    """What wrote the rows of `hybrid_steps`, of each model."""
    runs = dict.fromkeys((row["model"], row["layers"]) for row in load_rows("hybrid_step"))
    calls = (
        f"`python benchmarks/hybrid_step.py --model {model} --layers {layers}`"
        for model, layers in runs
    )
    return " and ".join(calls)


def _steps(rows: list[dict[str, Any]]) -> dict[tuple[str, tuple[int, int]], float]:
    return {
        (row["method"], (row["length"], row["batch"])): row["us"]
        for row in rows
        if row["implementation"] == "default"
    }
