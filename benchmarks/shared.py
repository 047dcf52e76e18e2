"""Times of a decode step per layer if several layers share a selection.

    python benchmarks/shared.py [--lengths 131072] [--batches 1,8] [--shares 1,2,4]

Unrolled layers as in decode_step.py: every `share`-th one selects, and the others attend to the
same slots of their own keys and values. "us" is the mean over layers of device time of the
kernels; at share 1 it is that of decode_step.py. "follower_us" is the time of a layer that
follows, computed from the times of share 1 and of this share. Before timing, the script
compares the step of every layer with attention in plain JAX over the tokens that the kernels'
anchor selected, and that selection with the one of plain JAX. The two may differ in tokens near
the threshold, whose scores are equal but for rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from decode_step import random_pair
from jax import Array, lax
from layers import LAYER, SMALL_LAYER, clock, numbers, options, out_of, parse, save, show
from named import names_of
from throughput import fill

import kvjax
from kvjax import CacheSpec, ops, presets
from kvjax.numerics.selection import set_recall

METHODS: dict[str, Callable[..., kvjax.PerLayer]] = {
    "fier": lambda budget, share: presets.fier(
        budget, layers=presets.Layers(dense=0, share=share), dense_capacity=0
    ),
    "quest": lambda budget, share: presets.quest(
        budget, layers=presets.Layers(dense=0, share=share), dense_capacity=0
    ),
    "pariskv": lambda budget, share: presets.pariskv(
        budget, layers=presets.Layers(dense=0, share=share), dense_capacity=0
    ),
}


LEAST_EQUAL = 0.9  # of the tokens that the kernels and plain JAX select


def step(layers: Any, q: Array, k: Array, v: Array) -> tuple[Any, Any]:
    """One token through the unrolled layers, each waiting for the one before."""
    outs, _, after = through(layers, q, k, v)
    return outs, after


def through(layers: Any, q: Array, k: Array, v: Array) -> tuple[Any, Any, Any]:
    """`step`, and the selection that each layer attended to."""
    outs, selections, after, selection = [], [], [], None
    for layer in layers:
        follows = layer.policy.follows
        out, layer, info = kvjax.attention_info(
            layer, q, k, v, flush=False, selection=selection
        )
        selection = selection if follows else info.selection
        q, out = lax.optimization_barrier((q, out))
        outs.append(out)
        selections.append(selection)
        after.append(layer)
    return outs, selections, tuple(after)


def check(name: str, layers: Any, q: Array, k: Array, v: Array) -> None:
    """Raises SystemExit if a layer's output is not attention over its selection, or its
    selection not plain JAX's.
    """
    got, selections = jax.jit(lambda *args: through(*args)[:2])(layers, q, k, v)

    @jax.jit
    def over(layers: Any, selections: Any) -> Any:
        with ops.use("xla"):
            return [attend_to(*two, q, k, v)[0] for two in zip(layers, selections, strict=True)]

    @jax.jit
    def select(layer: Any) -> Any:
        with ops.use("xla"):
            return kvjax.attention_info(layer, q, k, v, flush=False)[2].selection

    for number, (a, b) in enumerate(zip(got, over(layers, selections), strict=True)):
        off = float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))))
        scale = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
        if not off <= 0.05 * scale:
            raise SystemExit(
                f"{name}: layer {number} is off by {off:.3g}, of values up to {scale:.3g}"
            )
    anchor = layers[0].state
    slots = anchor.store.slots + anchor.recent.slots
    equal = float(
        jnp.min(jax.jit(set_recall, static_argnums=2)(selections[0], select(layers[0]), slots))
    )
    if not equal >= LEAST_EQUAL:
        raise SystemExit(
            f"{name}: the selections of the kernels and of plain JAX have only {equal:.3f} in common"
        )


def attend_to(layer: Any, selection: Any, q: Array, k: Array, v: Array) -> Any:
    """A step of `layer` that attends to `selection`, whether it follows or selects."""
    policy = layer.policy if layer.policy.follows else layer.policy.follower()
    return kvjax.attention(
        replace(layer, policy=policy), q, k, v, flush=False, selection=selection
    )


def measure(
    method: str, share: int, spec: CacheSpec, budget: int, calls: int, count: int
) -> dict[str, Any]:
    policies = METHODS[method](budget, share)
    layers = fill(kvjax.init(policies, spec, layers=count), spec.capacity - calls - 4).layers
    q = jax.random.normal(
        jax.random.key(100), (spec.batch, 1, spec.q_heads, spec.head_dim), spec.dtype
    )
    k, v = random_pair(
        jax.random.key(101), (spec.batch, 1, spec.kv_heads, spec.head_dim), spec.dtype
    )

    check(f"{method}, share {share}", layers[:share], q, k, v)
    took, _ = clock(jax.jit(step, donate_argnums=0), layers, q, k, v, calls=calls)
    names = {
        name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel"): us
        for name, us in took.parts.items()
    }
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
    parser = options(__doc__, "shared.json", calls=20)
    parser.add_argument("--lengths", type=numbers, default=[131072])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--shares", type=numbers, default=[1, 2, 4])
    parser.add_argument("--methods", type=names_of(METHODS), default=list(METHODS))
    parser.add_argument("--budget", type=int, default=2048)
    given = parse(parser, args)
    shape = SMALL_LAYER if given.quick else LAYER
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
                    row = measure(
                        method, share, spec, given.budget, given.calls, max(given.shares)
                    )
                    alone = row["us"] if share == 1 else alone
                    follows = (
                        None
                        if alone is None or share == 1
                        else (share * row["us"] - alone) / (share - 1)
                    )
                    row["follower_us"] = follows
                    show(row)
                    save(
                        out_of(given, "shared.json"),
                        what,
                        [row],
                        ("method", "share", "length", "batch", "backend"),
                    )
                    gc.collect()


if __name__ == "__main__":
    main()
