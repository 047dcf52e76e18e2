"""Predicted TPOT, bytes, FLOPs and traffic of Llama shapes on groups of GPUs, from times measured on one GPU.

    python benchmarks/scaling.py

Runs anywhere: it measures nothing. A decode step of one GPU took `fixed + weights / 4.3 TB/s + slope * tokens * rows`;
`fixed` and `slope` are fitted by least squares to the rows of results/end_to_end.json (one H200, Llama-3.1-8B, bf16,
budget 2048). On a group of `model` GPUs, weights and cache are split evenly, `fixed` stays (all layers are still
launched), and two sums over the devices a layer, one for the embedding and two small gathers for the best token come in
addition. A sum takes `LATENCY` and what a ring moves over NVLink. Other groups (the axis `data`) have rows of their own
and no traffic. Depth scales `fixed` and `slope`.

Constants: NVLink moves 450 GB/s in each direction of an H200 (NVIDIA H200 datasheet: 900 GB/s in all). LATENCY is an
assumption; `benchmarks/devices.py` measures it with the rest. No row was run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from device_time import BYTES_PER_US

from kvjax.evaluate.provenance import replace_file

RESULTS = Path(__file__).parent / "results"
LATENCY = 15e-6  # seconds of a small sum over the GPUs of a node: assumed
NVLINK = 450e9  # bytes a second in one direction
MEMORY = 141e9  # bytes of an H200
GROUP = 8  # GPUs of a node, one KV head each
BANDWIDTH = BYTES_PER_US * 1e6
TOKENS, ROWS, METHODS = (131072, 1048576, 10485760), (1, 8), ("full", "fier")
SHAPES = {  # parameters, layers, hidden size; all have 8 KV heads of 128
    "Llama-3.1-8B": (8.03e9, 32, 4096, 32),
    "Llama-3.1-70B": (70.6e9, 80, 8192, 64),
}
TOKEN_BYTES = {"full": 4096, "fier": 4352}  # of the cache, a layer


def fitted(method: str) -> tuple[float, float]:
    """Seconds of a step beside the weights, and seconds for each token of each row, of 32 layers."""
    found = json.loads((RESULTS / "end_to_end.json").read_text())["rows"]
    rows = [r for r in found if r["cache"] == method and r["status"] == "ok" and not r.get("largest_batch")]
    at = np.array([[1.0, r["length"] * r["batch"]] for r in rows])
    seconds = np.array([r["tpot_ms"] / 1e3 - r["weight_bytes"] / BANDWIDTH for r in rows])
    fixed, slope = np.linalg.lstsq(at, seconds, rcond=None)[0]
    return float(fixed), float(slope)


def row(model: str, tokens: int, rows: int, fits: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """One group of GPUs that decodes `rows` rows of `tokens` each."""
    parameters, layers, hidden, heads = SHAPES[model]
    weights = 2 * parameters / GROUP
    sums = 2 * layers + 1
    moved = 2 * rows * hidden * 2 * (GROUP - 1) / GROUP
    traffic = (sums + 2) * LATENCY + sums * moved / NVLINK
    found: dict[str, Any] = {
        "model": model,
        "tokens": tokens,
        "rows": rows,
        "weight_gb": round(weights / 1e9, 1),
        "collectives": sums + 2,
        "traffic_ms": round(1e3 * traffic, 2),
        "gflop_full": round((2 * parameters + 4 * heads * 128 * layers * tokens) * rows / GROUP / 1e9, 1),
    }
    for method in METHODS:
        fixed, slope = fits[method]
        cache = TOKEN_BYTES[method] * layers * tokens * rows / GROUP
        found[f"{method}_cache_gb"] = round(cache / 1e9, 1)
        seconds = fixed * layers / 32 + weights / BANDWIDTH + slope * layers / 32 * tokens * rows / GROUP + traffic
        found[f"{method}_tpot_ms"] = round(1e3 * seconds, 2) if weights + cache < 0.95 * MEMORY else None
    return found


def main() -> None:
    fits = {method: fitted(method) for method in METHODS}
    about = {
        "what": f"predicted, not run: a group of {GROUP} H200s, heads split over them; other groups have other rows",
        "from": "end_to_end.json, one H200",
        "constants": {"latency_s": LATENCY, "nvlink_bytes_s": NVLINK, "memory_bytes_s": BANDWIDTH},
        "fits": {m: {"fixed_ms": round(1e3 * a, 3), "ns_a_token": round(1e9 * b, 4)} for m, (a, b) in fits.items()},
        "rows": [row(model, tokens, rows, fits) for model in SHAPES for tokens in TOKENS for rows in ROWS],
    }
    replace_file(RESULTS / "scaling.json", json.dumps(about, indent=1) + "\n")
    print(json.dumps(about["fits"]))
    for line in about["rows"]:
        print(" | ".join(map(str, line.values())))


if __name__ == "__main__":
    main()
