"""Predicted TPOT, bytes, FLOPs and traffic of Llama shapes on groups of GPUs, from times measured on one GPU.

    python benchmarks/scaling.py [--devices FILE]

Runs anywhere: it measures nothing. A decode step of one GPU took `fixed + weights / 4.3 TB/s + slope * tokens * rows`;
`fixed` and `slope` are fitted by least squares to the rows of results/end_to_end.json (one H200, Llama-3.1-8B, bf16,
budget 2048). On a group of `model` GPUs, weights and cache are split evenly, and `fixed` stays (all layers are still
launched). Each layer adds two sums over the devices, the embedding one, and the best token two small gathers. A sum
takes the time measured on two GPUs (results/devices.json) plus that of the bytes that a ring moves over NVLink. Other
groups (the axis `data`) have rows of their own and no traffic. Depth scales `fixed` and `slope`.

The axis `ctx` joins groups that serve the same rows: each has all weights of attention, while MLP, vocabulary and the
tokens of a row are split. The MLP's sum is then over all groups, and takes `BETWEEN` more. A layer gathers the parts of
attention, (D + 1) * 4 bytes a query head from each group. One that selects by FIER also gathers G * 4 bytes a KV head,
and 8 bytes for each token of the budget and KV head, and selects in more steps. A gather and these steps take the times
measured on two GPUs; gathers cross nodes, and take `BETWEEN` more.

The two GPUs were H100s. A cache takes twice the time that splitting its rows saves there; weights take the time of
their bytes at the rate of the memory; the rest is fixed. What heads over two take beyond half of cache and weights is
the time of the sums, in the step of `full`. What tokens over two take beyond rows over two is that of the gathers
with `full`, and of gathers and selections with FIER. An H200 has the same NVLink, and is assumed to take as long.

Each step of results/devices.json, or of FILE, that was timed on several GPUs is predicted too ("cells"). A step of one
GPU of the same kind, at two sizes or more, gives the fixed time and the time of a token. Weights take the time of a
device's bytes, tokens are divided by all axes, and each collective of the decode loop takes the time that the same file
has for 16 KB. What a cell takes beyond that is launches, or selections over several devices.

Constants: NVLink moves 450 GB/s in each direction of an H100 or H200 (NVIDIA's datasheets: 900 GB/s in all). Between
nodes a GPU has 50 GB/s (NVIDIA DGX H200 datasheet: eight links of 400 Gb/s). BETWEEN is an assumption. No row was run;
"check" has the formulas' time of the one step on two GPUs from which nothing was taken.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from device_time import BYTES_PER_US, H200_BYTES_PER_US

from kvjax.evaluate.provenance import replace_file

RESULTS = Path(__file__).parent / "results"
BETWEEN = 10e-6  # seconds that a small gather over nodes takes longer than in a node: assumed
NVLINK = 450e9  # bytes a second in one direction
NETWORK = 50e9  # bytes a second of a GPU to other nodes
BUDGET = 2048
MEMORY = 141e9  # bytes of an H200
GROUP = 8  # GPUs of a node, one KV head each
BANDWIDTH = H200_BYTES_PER_US * 1e6
SIZES = ((131072, 1), (1048576, 1), (1048576, 8), (10485760, 8), (10485760, 64))  # tokens of a row, groups of ctx
ROWS, METHODS = (1, 8), ("full", "fier")
GATHERS = {"full": 1, "fier": 3}  # of a layer over the axis ctx that selects, or attends to all with `full`
LAYERS = 32  # of the steps on two GPUs
DENSE_LAYERS = 2  # of the preset `fier`: they attend to all tokens
SHAPES = {  # parameters, layers, hidden size; all have 8 KV heads of 128
    "Llama-3.1-8B": (8.03e9, 32, 4096, 32),
    "Llama-3.1-70B": (70.6e9, 80, 8192, 64),
}
TOKEN_BYTES = {"full": 4096, "fier": 4352}  # of the cache, a layer


def fitted(method: str) -> tuple[float, float]:
    """Seconds of a step without the weights, and seconds for each token of each row, of 32 layers."""
    found = json.loads((RESULTS / "end_to_end.json").read_text())["rows"]
    rows = [r for r in found if r["cache"] == method and r["status"] == "ok" and not r.get("largest_batch")]
    at = np.array([[1.0, r["length"] * r["batch"]] for r in rows])
    seconds = np.array([r["tpot_ms"] / 1e3 - r["weight_bytes"] / BANDWIDTH for r in rows])
    fixed, slope = np.linalg.lstsq(at, seconds, rcond=None)[0]
    return float(fixed), float(slope)


@dataclass(frozen=True)
class Traffic:
    """Seconds of two GPUs for a small sum, for a small gather, and for a layer's selection beyond that of one."""

    sum: float
    gather: float
    selection: float


class Step:
    """A step of one method on two GPUs, measured in each placement (devices.json)."""

    def __init__(self, method: str):
        found = json.loads((RESULTS / "devices.json").read_text())["rows"]
        asked = ("times", method, LAYERS)
        self.rows = {r["placement"]: r for r in found if (r["part"], r["method"], r["layers"]) == asked}
        one = self.rows["none"]
        self.cache = 2 * (self.seconds("none") - self.seconds("data=2"))
        self.weights = one["weight_bytes"] / (BYTES_PER_US[one["device"]] * 1e6)
        self.fixed = self.seconds("none") - self.cache - self.weights

    def seconds(self, placement: str) -> float:
        tpot_ms: float = self.rows[placement]["tpot_ms"]
        return tpot_ms / 1e3

    @property
    def halved(self) -> float:
        """Seconds of a step whose weights and cache are split over two GPUs, without traffic."""
        return self.fixed + (self.weights + self.cache) / 2

    @property
    def beyond(self) -> float:
        """Seconds that tokens over two take longer than rows over two."""
        return self.seconds("ctx=2") - self.seconds("data=2")


def gathers_of(method: str, layers: int) -> tuple[int, int]:
    """Gathers of a step over the axis ctx, and how many of the layers select."""
    selecting = 0 if method == "full" else layers - DENSE_LAYERS
    return GATHERS["full"] * (layers - selecting) + GATHERS[method] * selecting, selecting


def measured_traffic(full: Step, fier: Step) -> Traffic:
    sums = sum(full.rows["model=2"]["collectives"].values())
    gather = full.beyond / gathers_of("full", LAYERS)[0]
    gathers, selecting = gathers_of("fier", LAYERS)
    return Traffic(
        sum=(full.seconds("model=2") - full.halved) / sums,
        gather=gather,
        selection=(fier.beyond - gathers * gather) / selecting,
    )


def check(fier: Step, traffic: Traffic) -> list[dict[str, Any]]:
    """The step of FIER with heads over two GPUs, in milliseconds, by the formulas."""
    seconds = fier.halved + (2 * LAYERS + 3) * traffic.sum
    return [{"method": "fier", "placement": "model=2", "tpot_ms": round(1e3 * seconds, 2)}]


def context_seconds(
    method: str, layers: int, heads: int, kv_heads: int, rows: int, parts: int, traffic: Traffic, bandwidth: float
) -> float:
    """Seconds of a step's traffic over `parts` devices of the axis ctx that have `heads` and `kv_heads` heads each."""
    if parts == 1:
        return 0.0
    gathers, selecting = gathers_of(method, layers)
    moved = 129 * 4 * heads * layers + (4 * heads + 8 * BUDGET * kv_heads) * selecting
    return gathers * traffic.gather + selecting * traffic.selection + rows * moved * (parts - 1) / bandwidth


def crossing(fits: dict[str, tuple[float, float]], parts: int, traffic: Traffic) -> int:
    """Tokens of all rows from which FIER is faster than full attention, where Llama-3.1-8B has its tokens split over
    `parts` devices that have all heads."""
    (fixed_full, slope_full), (fixed, slope) = fits["full"], fits["fier"]
    gathers = [context_seconds(m, 32, 32, 8, 1, parts, traffic, NVLINK) for m in METHODS]
    return int((fixed - fixed_full + gathers[1] - gathers[0]) / (slope_full - slope) * parts)


def row(
    model: str,
    tokens: int,
    groups: int,
    rows: int,
    fits: dict[str, tuple[float, float]],
    took: Traffic,
) -> dict[str, Any]:
    """The row of `groups` groups of GPUs that decode `rows` rows of `tokens` each."""
    parameters, layers, hidden, heads = SHAPES[model]
    attention = layers * hidden * 2 * 128 * (heads + 8)
    weights = 2 * (attention + (parameters - attention) / groups) / GROUP
    sums = 2 * layers + 1
    moved = 2 * rows * hidden * 2 * (GROUP - 1) / GROUP
    traffic = (sums + 2) * took.sum + sums * moved / NVLINK
    if groups > 1:
        traffic += layers * (BETWEEN + moved / NETWORK - moved / NVLINK)
    far = replace(took, gather=took.gather + BETWEEN)
    found: dict[str, Any] = {
        "model": model,
        "tokens": tokens,
        "gpus": GROUP * groups,
        "rows": rows,
        "weight_gb": round(weights / 1e9, 1),
        "collectives": sums + 2,
        "traffic_ms": round(1e3 * traffic, 2),
        "gflop_full": round((2 * parameters + 4 * heads * 128 * layers * tokens / groups) * rows / GROUP / 1e9, 1),
    }
    for method in METHODS:
        fixed, slope = fits[method]
        cache = TOKEN_BYTES[method] * layers * tokens * rows / GROUP / groups
        gathers = context_seconds(method, layers, heads // GROUP, 1, rows, groups, far, NETWORK)
        found[f"{method}_context_ms"] = round(1e3 * gathers, 2)
        found[f"{method}_cache_gb"] = round(cache / 1e9, 1)
        seconds = (
            fixed * layers / 32 + weights / BANDWIDTH + slope * layers / 32 * tokens * rows / GROUP / groups + traffic
        )
        seconds += gathers
        found[f"{method}_tpot_ms"] = round(1e3 * seconds, 2) if weights + cache < 0.95 * MEMORY else None
    return found


def cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted and measured milliseconds of each step on several GPUs; without those whose method was timed on one GPU
    at less than two sizes."""
    timed = [r for r in rows if r["part"] == "times" and "tpot_ms" in r]
    links = {(r["device"], r["method"]): r["us"] for r in rows if r["part"] == "links" and r["bytes"] == 1 << 14}
    groups: dict[Any, list[dict[str, Any]]] = {}
    for r in timed:
        groups.setdefault((r.get("shape", "llama-3.1-8b"), r["device"], r["layers"], r["method"]), []).append(r)
    found = []
    for (shape, device, layers, method), group in groups.items():
        alone = {(r["length"], r["batch"]): r for r in group if r["placement"] == "none"}
        if len({length * batch for length, batch in alone}) < 2 or device not in BYTES_PER_US:
            continue
        rate = BYTES_PER_US[device] * 1e3  # bytes a millisecond
        at = np.array([[1.0, r["length"] * r["batch"]] for r in alone.values()])
        beyond = np.array([r["tpot_ms"] - r["weight_bytes"] / rate for r in alone.values()])
        fixed, slope = np.linalg.lstsq(at, beyond, rcond=None)[0]
        for r in group:
            parts = math.prod(int(axis.partition("=")[2]) for axis in r["placement"].split("+") if "=" in axis)
            counts = r["collectives"]
            if parts == 1 or any((device, kind) not in links for kind in counts):
                continue
            traffic = sum(count * links[device, kind] for kind, count in counts.items()) / 1e3
            size = r["length"], r["batch"]
            predicted = fixed + r["weight_bytes"] / rate + slope * size[0] * size[1] / parts + traffic
            found.append(
                {
                    "model": shape,
                    "device": device,
                    "layers": layers,
                    "method": method,
                    "placement": r["placement"],
                    "tokens": size[0],
                    "rows": size[1],
                    "one_gpu_ms": round(alone[size]["tpot_ms"], 2) if size in alone else None,
                    "traffic_ms": round(traffic, 2),
                    "predicted_ms": round(float(predicted), 2),
                    "measured_ms": round(r["tpot_ms"], 2),
                    "off_percent": round(100 * (r["tpot_ms"] / float(predicted) - 1)),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=Path, default=RESULTS / "devices.json", help="rows of benchmarks/devices.py")
    timed = json.loads(parser.parse_args().devices.read_text())["rows"]
    fits = {method: fitted(method) for method in METHODS}
    full, fier = (Step(method) for method in METHODS)
    traffic = measured_traffic(full, fier)
    about = {
        "what": f"predicted, not run: groups of {GROUP} H200s, heads split over a group and tokens over groups",
        "from": "end_to_end.json, one H200; devices.json, two H100s",
        "constants": {
            "sum_s": round(traffic.sum, 7),
            "gather_s": round(traffic.gather, 7),
            "selection_s": round(traffic.selection, 7),
            "between_s": BETWEEN,
            "nvlink_bytes_s": NVLINK,
            "network_bytes_s": NETWORK,
            "memory_bytes_s": BANDWIDTH,
        },
        "fits": {m: {"fixed_ms": round(1e3 * a, 3), "ns_a_token": round(1e9 * b, 4)} for m, (a, b) in fits.items()},
        "crossing": {parts: crossing(fits, parts, traffic) for parts in (1, 2, 4, 8)},
        "check": check(fier, traffic),
        "cells": cells(timed),
        "rows": [row(model, *size, rows, fits, traffic) for model in SHAPES for size in SIZES for rows in ROWS],
    }
    replace_file(RESULTS / "scaling.json", json.dumps(about, indent=1) + "\n")
    print(json.dumps(about["fits"]))
    for line in [*about["cells"], *about["rows"]]:
        print(" | ".join(map(str, line.values())))


if __name__ == "__main__":
    main()
