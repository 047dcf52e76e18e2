"""Predicted TPOT, bytes, FLOPs and traffic of Llama shapes on groups of GPUs, beside what was
measured on two and four.

    python benchmarks/scaling.py [--devices FILE] [--predict results/predicted.json]

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

"four" are steps over four H200s, predicted by `--predict` before they were measured, from steps
of one and two H200s and the links of four H100s, beside what was measured later. There
selections over devices, and those by share, were fitted for each method.

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
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import throughput
from device_time import BYTES_PER_US, H200_BYTES_PER_US

from kvjax.evaluate.provenance import provenance, replace_file

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


def selection_form(row: dict[str, Any]) -> str | None:
    """How devices select of split tokens: "exact", together, or each its "share"; None if they
    do not."""
    if axes(row).get("ctx", 1) == 1 or row["method"] == "full":
        return None
    return "share" if "share" in row["placement"].split("+") else "exact"


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
    largest = np.abs(at).max(axis=0)
    scale = np.where(largest > 0, largest, 1)  # a column of zeros has the factor 0
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
    # of a layer that selects over devices, by method and form ("exact" or "share"): a constant,
    # and for each token of a device
    selection: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def of(self, parts: int, counts: dict[str, int]) -> float:
        return sum(
            count * (self.links[parts, kind] + self.step) for kind, count in counts.items()
        )

    def of_selection(self, method: str, form: str) -> tuple[float, float]:
        """What was fitted to the method, or to `fier`; nothing by share unless it was fitted."""
        for known in (method, "fier") if form == "exact" else (method,):
            if (known, form) in self.selection:
                return self.selection[known, form]
        return 0.0, 0.0

    def selecting(self, layers: int, tokens: float, method: str, form: str = "exact") -> float:
        constant, each = self.of_selection(method, form)
        return layers * (constant + each * tokens)


class Measured:
    """The steps of devices.json of one kind of GPU, and what the model of a step makes of them."""

    def __init__(self, rows: Sequence[dict[str, Any]], device: str, links_of: str = ""):
        """`links_of` is the kind of GPU whose links stand for those of `device`."""
        mine = [r for r in rows if r["device"] == device]
        self.device, self.rate = device, BYTES_PER_US[device]
        self.steps = [r for r in mine if r["part"] == "times" and "tpot_ms" in r]
        self.alone = [r for r in self.steps if not axes(r)]
        links = [
            r for r in rows
            if r["device"] == (links_of or device)
            and r["part"] == "links" and r["bytes"] == 1 << 14
        ]  # fmt: skip
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
        over_two: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for r in self._known():
            form = selection_form(r)
            if form and axes(r) == {"ctx": 2}:
                over_two.setdefault((r["method"], form), []).append(r)
        for key, steps in over_two.items():
            layers = [r["layers"] - DENSE.get(key[0], 0) for r in steps]
            each = [
                [n, n * r["length"] * r["batch"] / 2]
                for n, r in zip(layers, steps, strict=True)
            ]
            beyond = [self._missing(r, selecting=False) for r in steps]
            constant, slope = solved(each, beyond)
            self.traffic.selection[key] = (constant, slope)

    def _known(self) -> list[dict[str, Any]]:
        """Steps on several GPUs that the model can predict."""
        kinds = self.traffic.links
        return [
            r for r in self.steps
            if r["method"] in self.fits and axes(r)
            and all((math.prod(axes(r).values()), kind) in kinds for kind in r["collectives"])
        ]  # fmt: skip

    def _missing(self, row: dict[str, Any], *, selecting: bool = True) -> float:
        return 1e3 * float(row["tpot_ms_min"]) - self.time(row, selecting=selecting)

    def parts(self, row: dict[str, Any]) -> dict[str, float]:
        """Microseconds of a step, by what they are for."""
        sizes, fit = axes(row), self.fits[row["method"]]
        devices = math.prod(sizes.values())
        tokens = row["length"] * row["batch"] / devices
        layers = fit.time(row["layers"], 0)
        found = {
            "layers": layers,
            "tokens": fit.time(row["layers"], tokens) - layers,
            "weights": read_bytes(row) / self.rate,
            "traffic": self.traffic.of(devices, row["collectives"]),
            "selection": 0.0,
        }
        form = selection_form(row)
        if form is not None:
            selecting = row["layers"] - (fit.dense or 0)
            found["selection"] = self.traffic.selecting(selecting, tokens, row["method"], form)
        return found

    def time(self, row: dict[str, Any], *, selecting: bool = True) -> float:
        parts = self.parts(row)
        return sum(parts.values()) - (0.0 if selecting else parts["selection"])

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
                traffic.selecting(selecting, share, "fier")
                + rows * moved * (groups - 1) / NETWORK
            )
        found[f"{method}_context_ms"] = round(gathers / 1e3, 2)
        found[f"{method}_cache_gb"] = round(cache / 1e9, 1)
        whole = fits[method].time(layers, share) + read / H200_BYTES_PER_US + time + gathers
        found[f"{method}_tpot_ms"] = (
            round(whole / 1e3, 2) if weights + cache < 0.95 * MEMORY else None
        )
    return found


# ------------------------------------------------------------------------------- four H200s

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
OVER_FOUR = ("ctx=4+share", "ctx=4", "model=4", "model=2+ctx=2+share", "model=2+ctx=2")
OVER_TWO = ("ctx=2+share", "ctx=2", "model=2")
ALL = ("fier", "full", "quest", "pariskv")
PLANNED = (  # shape, layers, tokens of a row, rows, methods, placements
    ("llama-3.1-8b", 16, 1048576, 1, ALL, OVER_FOUR),
    ("llama-3.1-8b", 16, 524288, 1, ALL, OVER_FOUR),
    ("llama-3.1-8b", 16, 131072, 2, ALL, OVER_FOUR),
    ("llama-3.1-8b", 16, 1048576, 4, ALL, OVER_FOUR),
    ("llama-3.1-70b", 16, 131072, 1, ("full", "fier"), OVER_FOUR[3:]),
    ("llama-3.1-8b", 16, 1048576, 1, ALL, OVER_TWO),
)
PLAN = (
    "shape",
    "layers",
    "method",
    "placement",
    "length",
    "batch",
)  # what names a planned step


def weight_bytes(shape: str, layers: int, model: int, context: int) -> float:
    """Bytes of weights of a device, of axes of such sizes."""
    config = throughput.SHAPES[shape]
    hidden, head = config.hidden_size, config.head_dim
    attention = 2 * layers * hidden * head * (config.q_heads + config.kv_heads)
    rest = layers * 3 * hidden * config.intermediate_size + 2 * config.vocab_size * hidden
    return 2 * (attention / model + rest / model / context)


def collective_counts(method: str, layers: int, model: int, form: str | None) -> dict[str, int]:
    """Collectives of the decode loop, as rows of two GPUs have them; `form` is that of split
    tokens, None if they are not split."""
    gathers, sums = 1, layers + 4
    if model > 1:
        sums += layers
    if form is not None:
        gathers += layers
    if form == "exact" and method != "full":
        gathers += 2 * (layers - DENSE.get(method, 0))
        if method == "pariskv":
            sums += layers  # of votes
    return {"all-gather": gathers, "all-reduce": sums}


def predictions(measured: Measured) -> list[dict[str, Any]]:
    """Steps over several GPUs, of one GPU's steps, those over two, and the links of H100s."""
    found = []
    for shape, layers, length, batch, methods, placements in PLANNED:
        for placement, method in itertools.product(placements, methods):
            by_share = "share" in placement
            if method == "full" and by_share:
                continue  # the program of exact selections
            row: dict[str, Any] = {"shape": shape, "layers": layers, "method": method}
            row |= {"placement": placement, "length": length, "batch": batch}
            sizes = axes(row)
            model, context = sizes.get("model", 1), sizes.get("ctx", 1)
            form = None if context == 1 else "share" if by_share else "exact"
            whole = row | {
                "weight_bytes": weight_bytes(shape, layers, model, context),
                "collectives": collective_counts(method, layers, model, form),
            }
            found.append(row | {"predicted_ms": round(measured.time(whole) / 1e3, 2)})
    return found


def predict(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Writes what the model says of steps over several H200s, before they are measured.

    A prediction that the file has stays as it is, with the date of its run.
    """
    made = provenance()
    kept = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    before = [{"date": kept["date"], **row} for row in kept["rows"]]
    known = {tuple(row[name] for name in PLAN) for row in before}
    new = [
        {"date": made["date"], **row}
        for row in predictions(Measured(rows, H200, links_of=H100))
        if tuple(row[name] for name in PLAN) not in known
    ]
    about = {
        "what": "milliseconds of a step over two and four H200s, predicted before they were measured",
        "from": "devices.json, one and two H200s, and the links of two and four H100s",
        "rows": before + new,
        **made,
    }
    replace_file(out, json.dumps(about, indent=1) + "\n")


def where(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the milliseconds of `fier` by share over four H200s at a million tokens are for."""
    measured = Measured(rows, H200, links_of=H100)
    (row,) = [
        r
        for r in measured.steps
        if (r["method"], r["placement"], r["length"], r["batch"])
        == ("fier", "ctx=4+share", 1 << 20, 1)
    ]
    return {name: round(us / 1e3, 2) for name, us in measured.parts(row).items()}


def beside(rows: Sequence[dict[str, Any]], predicted: Sequence[dict[str, Any]]) -> list[Any]:
    """The predicted steps of several H200s, with what was measured; None if it was not."""
    times = {
        tuple(r[name] for name in PLAN): r["tpot_ms_min"]
        for r in rows
        if r["device"] == H200 and r["part"] == "times" and "tpot_ms_min" in r
    }
    found = []
    for r in predicted:
        own = times.get(tuple(r[name] for name in PLAN))
        one = times.get(tuple("none" if name == "placement" else r[name] for name in PLAN))
        found.append(
            r
            | {
                "one_gpu_ms": one and round(one, 2),
                "measured_ms": own and round(own, 2),
                "of_one_gpu": own and one and round(own / one, 2),
                "off_percent": own and round(100 * (own / r["predicted_ms"] - 1)),
            }
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
    parser.add_argument(
        "--predict", type=Path, help="only write predictions of several H200s to this file"
    )
    given = parser.parse_args()
    rows = json.loads(given.devices.read_text())["rows"]
    if given.predict:
        predict(rows, given.predict)
        return
    measured = Measured(rows, H100)
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
    selection = traffic.of_selection("fier", "exact")
    about = {
        "what": f"predicted, not run: groups of {GROUP} H200s, heads split over a group and tokens over groups; cells: "
        "predicted, and measured on two and four H100s",
        "from": "end_to_end.json, one H200; devices.json, two and four H100s",
        "constants": {
            "links_us": {f"{kind}, {n} GPUs": us for (n, kind), us in traffic.links.items()},
            "step_us": round(traffic.step, 2),
            "selection_us": [round(selection[0], 1), round(1e3 * selection[1], 4)],
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
        "four": beside(rows, json.loads((RESULTS / "predicted.json").read_text())["rows"]),
        "fier_by_share_ms": where(rows),
        "rows": [row(model, *size, n, fits, traffic) for model in SHAPES for size in SIZES for n in ROWS],
    }  # fmt: skip
    replace_file(RESULTS / "scaling.json", json.dumps(about, indent=1) + "\n")
    print(
        json.dumps({name: about[name] for name in ("constants", "fits", "crossing")}, indent=1)
    )
    for line in [*about["cells"], *about["four"], *about["rows"]]:
        print(" | ".join(map(str, line.values())))


if __name__ == "__main__":
    main()
