"""Times of a decode step a layer where several layers share a selection.

    python benchmarks/shared.py [--lengths 131072] [--batches 1,8] [--shares 1,2,4]

Layers as in decode_step.py, in straight line: every `share`-th one selects, and the others attend to the same slots of
their own keys and values. "us" is the mean over layers of device time of the kernels; at share 1 it is that of
decode_step.py. "follower_us" is what the times of share 1 and this share come to for a layer that follows. Before it
times, the script compares each follower's step with attention in plain JAX over the tokens that its anchor selected.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from decode_step import random_pair
from jax import Array, lax
from layers import clock, out_of, save, show

import kvjax
from kvjax import CacheSpec, ops, presets
from kvjax.caches import Following
from kvjax.evaluate.throughput import fill

METHODS: dict[str, Callable[..., kvjax.PerLayer]] = {
    "fier": lambda budget, share: presets.fier(budget, dense_layers=0, share=share),
    "quest": lambda budget, share: presets.quest(budget, dense_layers=0, share=share),
    "pariskv": lambda budget, share: presets.pariskv(budget, dense_layers=0, share=share),
}


def step(layers: Any, q: Array, k: Array, v: Array) -> tuple[Any, Any]:
    """One token through the layers in straight line, each waiting for the one before."""
    outs, after, selection = [], [], None
    for layer in layers:
        follows = isinstance(layer.policy, Following)
        out, layer, info = kvjax.attention_info(layer, q, k, v, flush=False, selection=selection)
        selection = selection if follows else info.selection
        q, out = lax.optimization_barrier((q, out))
        outs.append(out)
        after.append(layer)
    return outs, tuple(after)


def measure(method: str, share: int, spec: CacheSpec, budget: int, calls: int, count: int) -> dict[str, Any]:
    policies = METHODS[method](budget, share)
    layers = fill(kvjax.init(policies, spec, layers=count), spec.capacity - calls - 4).layers
    q = jax.random.normal(jax.random.key(100), (spec.batch, 1, spec.q_heads, spec.head_dim), spec.dtype)
    k, v = random_pair(jax.random.key(101), (spec.batch, 1, spec.kv_heads, spec.head_dim), spec.dtype)

    with ops.use("xla"):
        wanted, _ = jax.jit(step)(layers[:share], q, k, v)
    got, _ = jax.jit(step)(layers[:share], q, k, v)
    for layer, (a, b) in enumerate(zip(got, wanted, strict=True)):
        off = float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))))
        scale = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
        if not off <= 0.05 * scale:
            raise SystemExit(f"{method}, share {share}: layer {layer} is off by {off:.3g}, of values up to {scale:.3g}")
    del got, wanted

    took, _ = clock(jax.jit(step, donate_argnums=0), layers, q, k, v, calls=calls)
    names = {name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel"): us for name, us in took.parts.items()}
    return {
        "method": method,
        "share": share,
        "length": spec.capacity,
        "batch": spec.batch,
        "layers": count,
        "us": took.us / count,
        "kernels": None if took.kernels is None else took.kernels / count,
        "parts": {name: round(us / count, 2) for name, us in names.items()},
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=numbers, default=[131072])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--shares", type=numbers, default=[1, 2, 4])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: results/shared.json; with --quick nothing is written")
    parser.add_argument("--quick", action="store_true", help="small sizes, by the host's clock")
    given = parser.parse_args(args)
    shape = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": jnp.dtype(jnp.bfloat16)}
    if given.quick:
        shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": jnp.dtype(jnp.float32)}
    elif jax.default_backend() != "gpu":
        parser.error("this measures a GPU; --quick runs small sizes without one")
    what = "a decode step of attention, mean over layers of which some share a selection, "
    what += ", ".join(f"{k} {v}" for k, v in shape.items())
    what += f"; budget {given.budget}; normal random keys, values and queries; us: device time of the kernels, median "
    what += f"of {given.calls} calls"
    for length in given.lengths:
        for batch in given.batches:
            spec = CacheSpec(batch=batch, capacity=length, **shape)
            for method in given.methods:
                alone: float | None = None
                for share in given.shares:
                    row = measure(method, share, spec, given.budget, given.calls, max(given.shares))
                    alone = row["us"] if share == 1 else alone
                    follows = None if alone is None or share == 1 else (share * row["us"] - alone) / (share - 1)
                    row["follower_us"] = follows
                    show(row)
                    save(out_of(given, "shared.json"), what, [row], ("method", "share", "length", "batch", "backend"))
                    gc.collect()


if __name__ == "__main__":
    main()
