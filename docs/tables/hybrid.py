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


def delta_nets() -> str:
    """The recurrence of a gated delta net by kvjax and by fla-core, in one run."""
    found = {_delta_key(row): row for row in load_rows("delta_step")}
    libraries = "kvjax", "kvjax, plain JAX", "fla-core"
    body = []
    for key in dict.fromkeys(key[1:] for key in found):
        part, model, batch, tokens = key
        ours, plain, fla = (found.get((library, *key)) for library in libraries)
        what = part if tokens == 1 else f"{part} of {tokens} tokens"
        times = [_us(ours), _us(plain), _us(fla), _us(fla, "graph_us")]
        floor = _us(ours or fla, "floor_us")
        errors = [_error(row) for row in (ours, plain, fla)]
        body.append([what, model, str(batch), *times, floor, *errors])
    titles = ["part", "shape", "rows", "kvjax, us", "plain JAX, us", "fla-core, us"]
    titles += ["fla-core in a CUDA graph, us", "floor, us"]
    return markdown([*titles, *(f"error of {x}" for x in ("kvjax", "plain JAX", "fla"))], body)


def _error(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['error']:.0e}"


def _delta_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("library", "part", "model", "batch", "tokens"))


def _us(row: dict[str, Any] | None, field: str = "us") -> str:
    if row is None or row[field] is None:
        return ""
    return f"{row[field]:.0f}" if row[field] >= 100 else f"{row[field]:.1f}"


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


def heads_by_group() -> str:
    """The same in one run, by the query heads that share a KV head."""
    steps = [row for row in load_rows("heads_of_256") if row["part"] == "step"]
    found = {_step_key(row, row["D"]): row["us"] for row in steps}
    keys = dict.fromkeys(_step_key(row, 256) for row in steps)
    body = []
    for key in sorted(keys, key=lambda key: (key[1], key[3] > 1, key[2])):
        _, method, group, batch, length = key
        wide, narrow = found[key], found[(128, *key[1:])]
        cells = [f"`{method}`", str(group), _cell(length, batch)]
        body.append([*cells, f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.2f}"])
    titles = ["method", "query heads of a KV head", "tokens x rows"]
    return markdown([*titles, "4 heads of 256, us", "8 heads of 128, us", "times"], body)


def attention_of_256() -> str:
    """`attend_zones` alone by the fastest block sizes of its sweep, by the same."""
    rows = [row for row in load_rows("heads_of_256") if row["part"] == "attend"]
    found = {_step_key(row, row["D"]): row["best"] for row in rows}
    keys = dict.fromkeys(_step_key(row, 256) for row in rows)
    body = []
    for key in sorted(keys, key=lambda key: (key[3] > 1, key[2])):
        _, _, group, batch, length = key
        wide, narrow = found[key], found[(128, *key[1:])]
        us = [f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.2f}"]
        body.append([str(group), _cell(length, batch), *us])
    titles = ["query heads of a KV head", "tokens x rows"]
    return markdown([*titles, "4 heads of 256, us", "8 heads of 128, us", "times"], body)


def _step_key(row: dict[str, Any], head_dim: int) -> tuple[Any, ...]:
    return (head_dim, *(row[name] for name in ("method", "G", "batch", "length")))


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
