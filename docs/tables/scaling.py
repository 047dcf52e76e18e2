"""The tables of docs/scaling.md: TPOT on several GPUs as measured and as predicted."""

from __future__ import annotations

from typing import Any

from docs.tables.reading import load_file, load_rows
from docs.tables.writing import markdown

SPLITS = {"model=2": "heads 2", "model=4": "heads 4", "ctx=2": "tokens 2", "ctx=4": "tokens 4",
          "model=2+ctx=2": "heads 2, tokens 2", "data=4": "rows 4"}  # fmt: skip


def cells() -> str:
    """Milliseconds of a step on several GPUs as measured, and in brackets as predicted from one
    GPU and the links.
    """
    times: dict[Any, dict[str, str]] = {}
    for row in load_file("scaling")["cells"]:
        size = f"{row['tokens']} x {row['rows']}"
        shape = row["model"].removeprefix("llama-3.1-").upper()
        line = times.setdefault((f"{shape}, {row['layers']}", row["method"], size), {})
        line["one GPU"] = "" if row["one_gpu_ms"] is None else f"{row['one_gpu_ms']:.2f}"
        line[SPLITS[row["placement"]]] = f"{row['measured_ms']:.2f} ({row['predicted_ms']:.2f})"
    names = ("one GPU", *SPLITS.values())
    body = [
        [shape, f"`{method}`", size, *(line.get(n, "") for n in names)]
        for (shape, method, size), line in times.items()
    ]
    return markdown(("shape, layers", "cache", "tokens x rows", *names), body)


def links() -> str:
    """Microseconds of a collective by the bytes of a device."""
    found = {(row["method"], row["devices"], row["bytes"]): row["us"] for row in load_rows("devices")
             if row["part"] == "links"}  # fmt: skip
    sizes = sorted({size for *_, size in found})
    kinds = sorted({(kind, n) for kind, n, _ in found})
    body = [
        [f"{kind}, {n} GPUs", *(f"{found[kind, n, size]:.0f}" for size in sizes)]
        for kind, n in kinds
    ]
    return markdown(("bytes", *(str(size) for size in sizes)), body)


def prompts() -> str:
    """Seconds until the logits after a prompt, by placement."""
    found = {
        row["placement"]: row["prompt_ms"] / 1e3
        for row in load_rows("devices")
        if row["part"] == "prompt"
    }
    return markdown(("one GPU", *(SPLITS[name] for name in found if name != "none")),
                    [[f"{time:.2f}" for time in found.values()]])  # fmt: skip


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
        return [
            row["model"],
            *(str(row[n]) for n in ("tokens", "gpus", "rows", "full_cache_gb")),
            *map(str, times),
        ]

    return markdown(header, map(cells, load_rows("scaling")))
