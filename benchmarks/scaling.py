"""Predicted TPOT, bytes, FLOPs and traffic of Llama shapes on groups of GPUs, from times measured on one GPU.

    python benchmarks/scaling.py

Runs anywhere: it measures nothing. A decode step of one GPU took `fixed + weights / 4.3 TB/s + slope * tokens * rows`;
`fixed` and `slope` are fitted by least squares to the rows of results/end_to_end.json (one H200, Llama-3.1-8B, bf16,
budget 2048). On a group of `model` GPUs, weights and cache are split evenly, and `fixed` stays (all layers are still
launched). Each layer adds two sums over the devices, the embedding one, and the best token two small gathers. A sum
takes the time measured on two GPUs (results/devices.json) plus that of the bytes that a ring moves over NVLink. Other
groups (the axis `data`) have rows of their own and no traffic. Depth scales `fixed` and `slope`.

The axis `ctx` joins groups that serve the same rows: each has all weights, and the tokens of a row are split. A layer
then gathers the parts of attention, (D + 1) * 4 bytes a query head from each group. One that selects by FIER also
gathers G * 4 bytes a KV head, and 8 bytes for each token of the budget and KV head. These gathers cross nodes. A gather
takes the time measured within a node (`CONTEXT_MS`) plus `BETWEEN`.

Constants: NVLink moves 450 GB/s in each direction of an H200 (NVIDIA H200 datasheet: 900 GB/s in all). Between nodes a
GPU has 50 GB/s (NVIDIA DGX H200 datasheet: eight links of 400 Gb/s). BETWEEN is an assumption. No row was run; "check"
has the formulas' values for the two GPUs that were measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from device_time import BYTES_PER_US

from kvjax.evaluate.provenance import replace_file

RESULTS = Path(__file__).parent / "results"
# One GPU, and tokens over two, in milliseconds, in the shape of devices.json. That file lacks them: they are of one
# run, during which the host had other work. Gathers may take less than they say, by an unknown amount.
# `devices.py --placements ctx=2` measures them again on a host of two GPUs.
CONTEXT_MS = {"full": (3.33, 3.18), "fier": (2.25, 3.54)}
BETWEEN = 10e-6  # seconds that a small gather over nodes takes longer than in a node: assumed
NVLINK = 450e9  # bytes a second in one direction
NETWORK = 50e9  # bytes a second of a GPU to other nodes
BUDGET = 2048
MEMORY = 141e9  # bytes of an H200
GROUP = 8  # GPUs of a node, one KV head each
BANDWIDTH = BYTES_PER_US * 1e6
SIZES = ((131072, 1), (1048576, 1), (1048576, 8), (10485760, 8), (10485760, 64))  # tokens of a row, groups of ctx
ROWS, METHODS = (1, 8), ("full", "fier")
GATHERS = {"full": 1, "fier": 3}  # of a layer over the axis ctx
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


def measured() -> dict[str, dict[str, Any]]:
    """The rows of full attention in devices.json, by placement."""
    found = json.loads((RESULTS / "devices.json").read_text())["rows"]
    return {r["placement"]: r for r in found if (r["part"], r["method"]) == ("times", "full")}


def sum_seconds(fits: dict[str, tuple[float, float]]) -> float:
    """Seconds of a small sum over two GPUs: the time with heads over two beyond half of all but the fixed time."""
    one, two = (measured()[name] for name in ("none", "model=2"))
    fixed = fits["full"][0] * one["layers"] / 32
    ideal = fixed + (one["tpot_ms"] / 1e3 - fixed) / 2
    return (two["tpot_ms"] / 1e3 - ideal) / sum(two["collectives"].values())


def gather_seconds(fits: dict[str, tuple[float, float]]) -> float:
    """Seconds of a small gather over two GPUs: the time with tokens over two beyond half of the time of the cache."""
    row, beyond = measured()["none"], 0.0
    for method, (one, two) in CONTEXT_MS.items():
        whole = fits[method][0] * row["layers"] / 32 + row["weight_bytes"] / BANDWIDTH
        beyond += two / 1e3 - whole - (one / 1e3 - whole) / 2
    return beyond / (row["layers"] * sum(GATHERS[method] for method in CONTEXT_MS))


def check(fits: dict[str, tuple[float, float]], latency: float, gather: float) -> list[dict[str, Any]]:
    """Milliseconds of a step on two GPUs by the formulas, in the shape of devices.json."""
    row, found = measured()["none"], []
    layers, rows, weights = row["layers"], row["batch"], row["weight_bytes"] / BANDWIDTH
    for method in METHODS:
        fixed, cache = fits[method][0] * layers / 32, fits[method][1] * layers / 32 * row["length"] * rows
        gathers = context_seconds(method, layers, 32, 8, rows, 2, (gather, NVLINK))
        times = {
            "none": fixed + weights + cache,
            "data=2": fixed + weights + cache / 2,
            "model=2": fixed + weights / 2 + cache / 2 + (2 * layers + 3) * latency,
            "ctx=2": fixed + weights + cache / 2 + gathers,
        }
        found += [{"method": method, "placement": k, "tpot_ms": round(1e3 * v, 2)} for k, v in times.items()]
    return found


def context_seconds(
    method: str, layers: int, heads: int, kv_heads: int, rows: int, parts: int, link: tuple[float, float]
) -> float:
    """Seconds of a step's gathers over `parts` devices of the axis ctx, with `heads` query heads and `kv_heads` each.
    `link` is the seconds of a small gather and the bytes per second."""
    if parts == 1:
        return 0.0
    gathers, moved = GATHERS[method], 129 * 4 * heads
    if method != "full":
        moved += 4 * heads + 8 * BUDGET * kv_heads
    return layers * (gathers * link[0] + rows * moved * (parts - 1) / link[1])


def crossing(fits: dict[str, tuple[float, float]], parts: int, link: tuple[float, float]) -> int:
    """Tokens of all rows from which FIER is faster than full attention, where Llama-3.1-8B has its tokens split over
    `parts` devices that have all heads."""
    (fixed_full, slope_full), (fixed, slope) = fits["full"], fits["fier"]
    gathers = [context_seconds(m, 32, 32, 8, 1, parts, link) for m in METHODS]
    return int((fixed - fixed_full + gathers[1] - gathers[0]) / (slope_full - slope) * parts)


def row(
    model: str,
    tokens: int,
    groups: int,
    rows: int,
    fits: dict[str, tuple[float, float]],
    latency: float,
    gather: float,
) -> dict[str, Any]:
    """The row of `groups` groups of GPUs that decode `rows` rows of `tokens` each."""
    parameters, layers, hidden, heads = SHAPES[model]
    weights = 2 * parameters / GROUP
    sums = 2 * layers + 1
    moved = 2 * rows * hidden * 2 * (GROUP - 1) / GROUP
    traffic = (sums + 2) * latency + sums * moved / NVLINK
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
        far = gather + BETWEEN, NETWORK
        gathers = context_seconds(method, layers, heads // GROUP, 1, rows, groups, far)
        found[f"{method}_context_ms"] = round(1e3 * gathers, 2)
        found[f"{method}_cache_gb"] = round(cache / 1e9, 1)
        seconds = (
            fixed * layers / 32 + weights / BANDWIDTH + slope * layers / 32 * tokens * rows / GROUP / groups + traffic
        )
        seconds += gathers
        found[f"{method}_tpot_ms"] = round(1e3 * seconds, 2) if weights + cache < 0.95 * MEMORY else None
    return found


def main() -> None:
    fits = {method: fitted(method) for method in METHODS}
    latency, gather = sum_seconds(fits), gather_seconds(fits)
    about = {
        "what": f"predicted, not run: groups of {GROUP} H200s, heads split over a group and tokens over groups",
        "from": "end_to_end.json, one H200",
        "constants": {
            "sum_s": round(latency, 7),
            "gather_s": round(gather, 7),
            "between_s": BETWEEN,
            "nvlink_bytes_s": NVLINK,
            "network_bytes_s": NETWORK,
            "memory_bytes_s": BANDWIDTH,
        },
        "fits": {m: {"fixed_ms": round(1e3 * a, 3), "ns_a_token": round(1e9 * b, 4)} for m, (a, b) in fits.items()},
        "crossing": {parts: crossing(fits, parts, (gather, NVLINK)) for parts in (1, 2, 4, 8)},
        "check": check(fits, latency, gather),
        "rows": [row(model, *size, rows, fits, latency, gather) for model in SHAPES for size in SIZES for rows in ROWS],
    }
    replace_file(RESULTS / "scaling.json", json.dumps(about, indent=1) + "\n")
    print(json.dumps(about["fits"]))
    for line in about["rows"]:
        print(" | ".join(map(str, line.values())))


if __name__ == "__main__":
    main()
