"""Predicted TPOT, bytes, FLOPs and traffic of Llama shapes on groups of GPUs, beside what was
measured on two and four.

    python benchmarks/scaling.py [--devices FILE]

Runs anywhere: it measures nothing. A decode step on one GPU takes

    once + layers * fixed + weights / rate of the memory + tokens * rows * (slope of each layer)

where the first two dense layers of a method that selects have the slope of `full`. Weights are
those that a step reads: all but the table of embeddings. `once`, `fixed` and the slopes are
fitted by least squares to the steps of one GPU in results/devices.json, or in FILE (H100). On
several GPUs weights and tokens are divided by those that share them, the rest stays, and each
collective of the decode loop takes what the same file has for 16 KB (`--links`) plus `step_us`:
what the loop of links does not have, such as the wait for the last GPU. It is taken from `full`
with heads over two GPUs. A layer that selects over devices takes `selection_us` more, fitted to
`fier` with tokens over two: a constant and a time for each token of a device. All else
("cells") is a prediction. Measured is the fastest of four blocks of steps; medians have stray
pauses of collectives, and are in devices.json.

"rows" are predictions for groups of 8 H200s (the axis `heads`), and for several such groups
that share the tokens of a row (the axis `context`). `once`, `fixed` and slopes are those of the
steps of one H200 in results/end_to_end.json. A sum moves its bytes over NVLink as a ring does,
on top of the time of a small one. With several groups the MLP's sum is over all, and gathers
too: both cross nodes and take BETWEEN more. A layer gathers the parts of attention, (D + 1) * 4
bytes a query head from each group; one that selects by FIER also G * 4 bytes a KV head, and 8
bytes for each token of the budget and KV head.

Constants: NVLink moves 450 GB/s in each direction of an H100 or H200 (NVIDIA's datasheets: 900
GB/s in all). Between nodes a GPU has 50 GB/s (NVIDIA DGX H200 datasheet: eight links of 400
Gb/s). BETWEEN is an assumption.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from device_time import BYTES_PER_US, H200_BYTES_PER_US

from kvjax.evaluate.provenance import replace_file

RESULTS = Path(__file__).parent / "results"
# microseconds that a small collective over nodes takes longer than in a node: assumed
BETWEEN = 10.0
NVLINK = 450e3  # bytes a microsecond in one direction
NETWORK = 50e3  # bytes a microsecond of a GPU to other nodes
BUDGET = 2048
MEMORY = 141e9  # bytes of an H200
GROUP = 8  # GPUs of a node, one KV head each
SIZES = (
    (131072, 1),
    (1048576, 1),
    (1048576, 8),
    (10485760, 8),
    (10485760, 64),
)  # tokens of a row, groups of context
ROWS, METHODS = (1, 8), ("full", "fier")
DENSE = {"fier": 2, "quest": 2}  # layers of a preset that attend to all tokens
VOCABULARY = 128256
SHAPES = {  # parameters, layers, hidden size, query heads; all have 8 KV heads of 128
    "llama-3.1-8b": (8.03e9, 32, 4096, 32),
    "llama-3.1-70b": (70.6e9, 80, 8192, 64),
}
TOKEN_BYTES = {"full": 4096, "fier": 4352}  # of the cache, a layer


def axes(row: dict[str, Any]) -> dict[str, int]:
    """GPUs of each axis of the mesh of a step; none for one GPU."""
    return {
        axis: int(n)
        for axis, _, n in (part.partition("=") for part in row["placement"].split("+"))
        if n
    }


def selects_over_devices(row: dict[str, Any]) -> bool:
    """True if devices make one selection together: of split tokens, but not each its share."""
    split = axes(row).get("ctx", 1) > 1 and "share" not in row["placement"].split("+")
    return split and row["method"] != "full"


def read_bytes(row: dict[str, Any]) -> float:
    """Bytes of weights that a device reads in a step."""
    sizes = axes(row)
    parts = sizes.get("model", 1) * sizes.get("ctx", 1)
    return (
        float(row["weight_bytes"])
        - 2 * VOCABULARY * SHAPES[row.get("shape", "llama-3.1-8b")][2] / parts
    )


def solved(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The factors of the columns by least squares; 0 for what the rows cannot tell apart."""
    at = np.array(columns, float)
    scale = np.maximum(np.abs(at).max(axis=0), 1e-30)
    return list(np.linalg.lstsq(at / scale, np.array(values), rcond=1e-9)[0] / scale)


@dataclass(frozen=True)
class Fit:
    """Microseconds of a step on one GPU beside its weights."""

    once: float
    fixed: float  # of a layer
    full: float  # of a token in a layer that attends to all
    own: float  # of a token in another layer
    dense: int | None  # layers that attend to all; None for all

    def time(self, layers: int, tokens: float) -> float:
        """`tokens` are those of all rows of a device."""
        dense = layers if self.dense is None else self.dense
        return (
            self.once
            + layers * self.fixed
            + tokens * (dense * self.full + (layers - dense) * self.own)
        )


def fitted(
    method: str, rows: Iterable[dict[str, Any]], rate: float, full: Fit | None
) -> Fit | None:
    """The fit to steps of one GPU; None if they are of one size. Other methods than `full` take
    `once` from its fit, and the slope of their dense layers."""
    alone = list(rows)
    tokens = [r["layers"] * r["length"] * r["batch"] for r in alone]
    if len(set(tokens)) < 2:
        return None
    beyond = [1e3 * r["tpot_ms"] - read_bytes(r) / rate for r in alone]
    if full is None:
        two = len({r["layers"] for r in alone}) > 1
        columns = [
            [1.0 if two else 0.0, r["layers"], n] for r, n in zip(alone, tokens, strict=True)
        ]
        once, fixed, slope = solved(columns, beyond)
        return Fit(once, fixed, slope, slope, None)
    dense = DENSE.get(method, 0)
    columns = [[r["layers"], (r["layers"] - dense) * r["length"] * r["batch"]] for r in alone]
    left = [
        value - full.once - dense * full.full * r["length"] * r["batch"]
        for value, r in zip(beyond, alone, strict=True)
    ]  # fmt: skip
    fixed, own = solved(columns, left)
    return Fit(full.once, fixed, full.full, own, dense)


@dataclass
class Traffic:
    """Microseconds of what several GPUs add, of the kind of GPU that `rows` name."""

    links: dict[tuple[int, str], float]  # of a collective of 16 KB over so many GPUs
    step: float = 0.0  # of a collective in a step, beyond that
    selection: tuple[float, float] = (
        0.0,
        0.0,
    )  # of a layer that selects over devices; and for each token of a device

    def of(self, parts: int, counts: dict[str, int]) -> float:
        return sum(
            count * (self.links[parts, kind] + self.step) for kind, count in counts.items()
        )

    def selecting(self, layers: int, tokens: float) -> float:
        return layers * (self.selection[0] + self.selection[1] * tokens)


class Measured:
    """The steps of devices.json of one kind of GPU, and what the model of a step makes of them."""

    def __init__(self, rows: Sequence[dict[str, Any]], device: str):
        mine = [r for r in rows if r["device"] == device]
        self.device, self.rate = device, BYTES_PER_US[device]
        self.steps = [r for r in mine if r["part"] == "times" and "tpot_ms" in r]
        self.alone = [r for r in self.steps if not axes(r)]
        links = [r for r in mine if r["part"] == "links" and r["bytes"] == 1 << 14]
        self.traffic = Traffic({(r["devices"], r["method"]): r["us"] for r in links})
        self.fits: dict[str, Fit] = {}
        for method in ("full", *sorted({r["method"] for r in self.alone} - {"full"})):
            own = (r for r in self.alone if r["method"] == method)
            if fit := fitted(method, own, self.rate, self.fits.get("full")):
                self.fits[method] = fit
        heads = [r for r in self._known() if (r["method"], axes(r)) == ("full", {"model": 2})]
        counts = [sum(r["collectives"].values()) for r in heads]
        (self.traffic.step,) = (
            solved([[n] for n in counts], [self._missing(r) for r in heads])
            if heads
            else (0.0,)
        )
        over_two = (r for r in self._known() if (r["method"], axes(r)) == ("fier", {"ctx": 2}))
        tokens = list(filter(selects_over_devices, over_two))
        layers = [r["layers"] - DENSE["fier"] for r in tokens]
        each = [
            [n, n * r["length"] * r["batch"] / 2] for n, r in zip(layers, tokens, strict=True)
        ]
        if tokens:
            self.traffic.selection = tuple(solved(each, [self._missing(r) for r in tokens]))  # type: ignore[assignment]

    def _known(self) -> list[dict[str, Any]]:
        """Steps on several GPUs that the model can predict."""
        kinds = self.traffic.links
        return [
            r for r in self.steps
            if r["method"] in self.fits and axes(r)
            and all((math.prod(axes(r).values()), kind) in kinds for kind in r["collectives"])
        ]  # fmt: skip

    def _missing(self, row: dict[str, Any]) -> float:
        return 1e3 * float(row["tpot_ms_min"]) - self.time(row)

    def time(self, row: dict[str, Any]) -> float:
        sizes, fit = axes(row), self.fits[row["method"]]
        parts = math.prod(sizes.values())
        tokens = row["length"] * row["batch"] / parts
        time = (
            fit.time(row["layers"], tokens)
            + read_bytes(row) / self.rate
            + self.traffic.of(parts, row["collectives"])
        )
        if selects_over_devices(row):
            time += self.traffic.selecting(row["layers"] - (fit.dense or 0), tokens)
        return time

    def cells(self) -> list[dict[str, Any]]:
        """Predicted and measured milliseconds of each step on several GPUs."""
        one = {(r["method"], r["layers"], r["length"], r["batch"]): r for r in self.alone}
        found = []
        for r in self._known():
            alone, predicted = (
                one.get((r["method"], r["layers"], r["length"], r["batch"])),
                self.time(r),
            )
            parts = math.prod(axes(r).values())
            found.append(
                {
                    "model": r.get("shape", "llama-3.1-8b"),
                    "device": self.device,
                    "layers": r["layers"],
                    "method": r["method"],
                    "placement": r["placement"],
                    "tokens": r["length"],
                    "rows": r["batch"],
                    "one_gpu_ms": alone and round(alone["tpot_ms_min"], 2),
                    "share_of_linear": alone
                    and round(alone["tpot_ms_min"] / r["tpot_ms_min"] / parts, 2),
                    "traffic_ms": round(self.traffic.of(parts, r["collectives"]) / 1e3, 2),
                    "predicted_ms": round(predicted / 1e3, 2),
                    "measured_ms": round(r["tpot_ms_min"], 2),
                    "off_percent": round(100 * (1e3 * r["tpot_ms_min"] / predicted - 1)),
                }
            )
        return found

    def crossings(self) -> dict[str, int]:
        """By number of GPUs that share the tokens: tokens of all rows from which `fier` is
        faster than `full`, between the steps at one row and at eight of the same length; 0 if
        it is at one row."""
        at = {
            (axes(r)["ctx"], r["method"], r["batch"]): r["tpot_ms_min"]
            for r in self.steps if list(axes(r)) == ["ctx"] and (r["length"], r["layers"]) == (131072, 8)
        }  # fmt: skip
        found = {}
        for n in sorted({n for n, *_ in at}):
            few, many = (at[n, "fier", rows] - at[n, "full", rows] for rows in (1, 8))
            found[str(n)] = 0 if few <= 0 else round(131072 * (1 + 7 * few / (few - many)))
        return found


def row(
    model: str, tokens: int, groups: int, rows: int, fits: dict[str, Fit], traffic: Traffic
) -> dict[str, Any]:
    """The row of `groups` groups of H200s that decode `rows` rows of `tokens` each."""
    parameters, layers, hidden, heads = SHAPES[model]
    attention = layers * hidden * 2 * 128 * (heads + 8)
    weights = 2 * (attention + (parameters - attention) / groups) / GROUP
    read = weights - 2 * VOCABULARY * hidden / GROUP / groups
    sums, widest = 2 * layers + 1, max(n for n, _ in traffic.links)
    moved = 2 * rows * hidden * 2 * (GROUP - 1) / GROUP
    time = traffic.of(widest, {"all-reduce": sums, "all-gather": 2}) + sums * moved / NVLINK
    if groups > 1:
        time += layers * (BETWEEN + moved / NETWORK - moved / NVLINK)
    found: dict[str, Any] = {
        "model": model.replace("llama", "Llama").replace("b", "B"),
        "tokens": tokens,
        "gpus": GROUP * groups,
        "rows": rows,
        "weight_gb": round(weights / 1e9, 1),
        "collectives": sums + 2,
        "traffic_ms": round(time / 1e3, 2),
        "gflop_full": round(
            (2 * parameters + 4 * heads * 128 * layers * tokens / groups) * rows / GROUP / 1e9,
            1,
        ),
    }
    for method in METHODS:
        cache = TOKEN_BYTES[method] * layers * tokens * rows / GROUP / groups
        gathers, share = 0.0, tokens * rows / GROUP / groups
        if groups > 1:
            selecting = 0 if method == "full" else layers - DENSE[method]
            moved = (
                129 * 4 * heads / GROUP * layers + (4 * heads / GROUP + 8 * BUDGET) * selecting
            )
            gathers = (layers + 2 * selecting) * (
                traffic.of(widest, {"all-gather": 1}) + BETWEEN
            )
            gathers += (
                traffic.selecting(selecting, share) + rows * moved * (groups - 1) / NETWORK
            )
        found[f"{method}_context_ms"] = round(gathers / 1e3, 2)
        found[f"{method}_cache_gb"] = round(cache / 1e9, 1)
        whole = fits[method].time(layers, share) + read / H200_BYTES_PER_US + time + gathers
        found[f"{method}_tpot_ms"] = (
            round(whole / 1e3, 2) if weights + cache < 0.95 * MEMORY else None
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices",
        type=Path,
        default=RESULTS / "devices.json",
        help="rows of benchmarks/devices.py",
    )
    rows = json.loads(parser.parse_args().devices.read_text())["rows"]
    measured = Measured(rows, "NVIDIA H100 80GB HBM3")
    ends = json.loads((RESULTS / "end_to_end.json").read_text())["rows"]
    fits: dict[str, Fit] = {}
    for method in METHODS:
        own = (
            r | {"placement": "none", "layers": 32}
            for r in ends if r["cache"] == method and r["status"] == "ok" and not r.get("largest_batch")
        )  # fmt: skip
        found = fitted(method, own, H200_BYTES_PER_US, fits.get("full"))
        assert found is not None, f"end_to_end.json has {method} at one size"
        fits[method] = found
    traffic = measured.traffic
    about = {
        "what": f"predicted, not run: groups of {GROUP} H200s, heads split over a group and tokens over groups; cells: "
        "predicted, and measured on two and four H100s",
        "from": "end_to_end.json, one H200; devices.json, two and four H100s",
        "constants": {
            "links_us": {f"{kind}, {n} GPUs": us for (n, kind), us in traffic.links.items()},
            "step_us": round(traffic.step, 2),
            "selection_us": [round(traffic.selection[0], 1), round(1e3 * traffic.selection[1], 4)],
            "between_us": BETWEEN,
            "nvlink_bytes_us": NVLINK,
            "network_bytes_us": NETWORK,
            "memory_bytes_us": H200_BYTES_PER_US,
        },
        "fits": {
            f"{where} {m}": {name: round(v, 3) for name, v in
                             (("once_us", f.once), ("layer_us", f.fixed), ("ns_a_token", 1e3 * f.own))}
            for where, kind in (("H200", fits), ("H100", measured.fits)) for m, f in kind.items()
        },
        "crossing": measured.crossings(),
        "cells": measured.cells(),
        "rows": [row(model, *size, n, fits, traffic) for model in SHAPES for size in SIZES for n in ROWS],
    }  # fmt: skip
    replace_file(RESULTS / "scaling.json", json.dumps(about, indent=1) + "\n")
    print(
        json.dumps({name: about[name] for name in ("constants", "fits", "crossing")}, indent=1)
    )
    for line in [*about["cells"], *about["rows"]]:
        print(" | ".join(map(str, line.values())))


if __name__ == "__main__":
    main()
