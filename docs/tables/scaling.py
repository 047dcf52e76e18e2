"""The tables of docs/scaling.md: TPOT on several GPUs as measured and as predicted."""

from __future__ import annotations

from typing import Any

from docs.tables.reading import load_file, load_rows
from docs.tables.writing import markdown


def devices() -> str:
    """TPOT on one GPU and on two, by placement, and as `benchmarks/scaling.py` predicts it."""
    whole = [row for row in load_rows("devices") if (row["part"], row["layers"]) == ("times", 32)]
    rows = {(row["method"], row["placement"]): row for row in whole}
    names = ("none", "data=2", "model=2", "ctx=2")

    def cell(method: str, name: str) -> str:
        return f"{rows[method, name]['tpot_ms']:.2f}" if (method, name) in rows else ""

    predicted = {(row["method"], row["placement"]): f"{row['tpot_ms']:.2f}" for row in load_file("scaling")["check"]}
    body = [[f"`{method}`", *(cell(method, name) for name in names)] for method in ("full", "fier")]
    body.append(["`fier`, predicted", *(predicted.get(("fier", name), "") for name in names)])
    header = ("cache", "one GPU", "rows over two", "heads over two", "tokens over two")
    return markdown(header, body)


def devices_long() -> str:
    """Steps of 131072 x 2 on one GPU and on two, and with tokens over two before one kernel served each device."""
    found = {(row["method"], row["placement"]): row["tpot_ms"] for row in load_rows("devices") if row["layers"] == 16
             and row["part"] == "times"}  # fmt: skip
    rows = []
    for method in ("full", "fier"):
        one = found[method, "none"]
        split = [f"{found[method, name]:.2f} ({found[method, name] / one:.2f})"
                 for name in ("model=2", "ctx=2", "ctx=2 before")]  # fmt: skip
        rows.append([f"`{method}`", f"{one:.2f}", *split])
    return markdown(("cache", "one GPU", "heads over two", "tokens over two", "tokens, before"), rows)


def cells() -> str:
    """Steps on several GPUs, predicted from one GPU's and the links' times of the same run, and measured."""
    header = ("cache", "split", "tokens a row", "rows", "one GPU, ms", "traffic, ms", "predicted, ms", "measured, ms",
              "off, %")  # fmt: skip
    names = ("tokens", "rows", "one_gpu_ms", "traffic_ms", "predicted_ms", "measured_ms", "off_percent")
    rows = load_file("scaling").get("cells", [])
    shown = [
        [f"`{row['method']}`", row["placement"], *("" if row[n] is None else str(row[n]) for n in names)]
        for row in rows
    ]
    return markdown(header, shown) if shown else ""


def scaling() -> str:
    header = ("model", "tokens a row", "GPUs", "rows", "cache `full`, GB", "traffic `full`, ms", "TPOT `full`, ms",
              "traffic `fier`, ms", "TPOT `fier`, ms")  # fmt: skip

    def cells(row: dict[str, Any]) -> list[str]:
        times = []
        for method in ("full", "fier"):
            time = row[f"{method}_tpot_ms"]
            times += [
                f"{row['traffic_ms'] + row[f'{method}_context_ms']:.2f}",
                "does not fit" if time is None else time,
            ]
        return [row["model"], *(str(row[n]) for n in ("tokens", "gpus", "rows", "full_cache_gb")), *map(str, times)]

    return markdown(header, map(cells, load_rows("scaling")))
