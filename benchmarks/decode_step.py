"""One decode step of attention in a layer, of Llama-3.1-8B or by `--layer` of another model, by
method, length and batch.

    python benchmarks/decode_step.py [--lengths 8192,131072] [--batches 1,8] [--methods
    cudnn,fier] [--layer qwen3.5-27b] [--out FILE]

A step writes the new token and attends: score, select `--budget` tokens in all, attend, merge
with the recent window. Each method runs with the defaults ("default"); then, if kernels without
a measurement were left out, with these too ("kernels"); and last with the references in plain
JAX ("xla"). A row is written as soon as it is measured; its "parts" are the time per layer of
each kernel. The same run also has:
- cudnn: `jax.nn.dot_product_attention(implementation="cudnn")` over keys and values [B, S, K,
  D], all of them valid.
- full: kvjax's Full, which XLA reads as [B, K, S, D].
- fier, quest and pariskv leave short caches to `Full` where that was measured to be faster, as
  by default; `--dense-capacity 0` measures how they select there, for `short.py`.
- by hand: exact scores, `lax.top_k`, `take_along_axis`, softmax, as one writes it without a
  library.

Device time is that of the kernels of several unrolled layers, each waiting for the one before,
over their number: as many layers as read twice the size of the L2 cache. (A loop over layers
would cost 10 us per kernel, which no model pays.) A call keeps its token, as in a model, and
the next call has one more; once a block is full, tokens are dropped, which is the same work.
The floor is the bytes that must be read over the rate of the device's memory. Without a GPU
(`--quick`) the host's clock is read and cuDNN is left out; that only shows that the script
works.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from device_time import bytes_per_us
from jax import Array, lax
from layers import (
    LAYERS,
    SMALL_LAYER,
    clock,
    floor_us,
    implementation,
    numbers,
    options,
    out_of,
    parse,
    save,
    show,
)
from named import names_of
from throughput import fill

import kvjax
from kvjax import CacheSpec, ops, presets
from kvjax.numerics.partial import group_queries

LENGTHS, BATCHES = (8192, 32768, 131072, 1 << 20), (1, 8)
METHODS = [
    "cudnn",
    "fier",
    "quest",
    "pariskv",
    "logquant",
    "fier:turbo4",
    "full",
    "by hand",
]  # in order of worth
IMPLEMENTATIONS = ["default", "kernels", "xla"]
L2_BYTES = 60e6
Step = Callable[
    [Any, Array, Array, Array], tuple[Array, Any]
]  # state, q, k, v [B, 1, heads, D] -> out, state


def policies(budget: int, dense_capacity: Any = "auto") -> dict[str, kvjax.Policy]:
    return {
        "full": presets.full().rest,
        "fier": presets.fier(budget, dense_capacity=dense_capacity).rest,
        "fier:turbo4": presets.fier(budget, dense_capacity=dense_capacity, store="turbo4").rest,
        "quest": presets.quest(budget, dense_capacity=dense_capacity).rest,
        "pariskv": presets.pariskv(budget, dense_capacity=dense_capacity).rest,
        "logquant": presets.logquant().rest,
    }


def cudnn(state: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    """`state` has keys and values [B, S, K, D]; the new token goes to the last slot."""
    keys, values = (a.at[:, -1:].set(new) for a, new in zip(state, (k, v), strict=True))
    return jax.nn.dot_product_attention(q, keys, values, implementation="cudnn"), (keys, values)


def by_hand(budget: int) -> Step:
    def step(state: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        keys, values = (
            a.at[:, :, -1].set(new[:, 0]) for a, new in zip(state, (k, v), strict=True)
        )
        K, S, D = keys.shape[1:]
        qg = group_queries(q[:, 0], K)
        scores = (
            jnp.einsum("bkgd,bksd->bkgs", qg, keys, preferred_element_type=jnp.float32)
            * D**-0.5
        )
        _, slots = lax.top_k(jnp.mean(jax.nn.softmax(scores, axis=-1), axis=2), min(budget, S))
        picked_k, picked_v = (
            jnp.take_along_axis(a, slots[..., None], axis=2) for a in (keys, values)
        )
        few = (
            jnp.einsum("bkgd,bksd->bkgs", qg, picked_k, preferred_element_type=jnp.float32)
            * D**-0.5
        )
        weights = jax.nn.softmax(few, axis=-1).astype(values.dtype)
        return jnp.einsum("bkgs,bksd->bkgd", weights, picked_v).reshape(q.shape), (keys, values)

    return step


def kvjax_step(cache: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    return kvjax.attention(cache, q, k, v, flush=False)


def through(step: Step) -> Step:
    """The step in each of several layers, unrolled."""

    def run(states: Any, q: Array, k: Array, v: Array) -> tuple[Any, Any]:
        outs, after = [], []
        for state in states:
            out, state = step(state, q, k, v)
            q, out = lax.optimization_barrier(
                (q, out)
            )  # the next layer waits, without a kernel for it
            outs.append(out)
            after.append(state)
        return outs, tuple(after)

    return run


def turning(step: Step) -> Step:
    """`through`, with another query of q [steps, B, 1, N, D] in each step; the state has the
    number of the next.
    """

    def run(carry: Any, q: Array, k: Array, v: Array) -> tuple[Any, Any]:
        states, turn = carry
        own = lax.dynamic_index_in_dim(q, turn % len(q), keepdims=False)
        outs, states = through(step)(states, own, k, v)
        return outs, (states, turn + 1)

    return run


def random_pair(key: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    k, v = (jax.random.normal(own, shape, dtype) for own in jax.random.split(key))
    return k, v


def measure(
    method: str,
    how: str,
    spec: CacheSpec,
    budget: int,
    calls: int,
    most_layers: int,
    dense_capacity: Any = "auto",
) -> dict[str, Any]:
    B, K, D, S = spec.batch, spec.kv_heads, spec.head_dim, spec.capacity
    named = policies(budget, dense_capacity)
    policy = named.get(method, named["full"]).of_size(spec)
    floor = floor_us(policy, spec, S)
    if method == "by hand":  # the keys, and the selected tokens
        floor = (
            floor / 2 + B * 2 * K * D * spec.dtype.itemsize * min(budget, S) / bytes_per_us()
        )
    layers = int(min(max(2, -(-2 * L2_BYTES // (floor * bytes_per_us()))), most_layers))
    states: Any
    if method in named:
        step: Step = kvjax_step
        states = fill(kvjax.init(policy, spec, layers=layers), S - calls - 3).layers
    else:
        step, shape = (
            (cudnn, (B, S, K, D)) if method == "cudnn" else (by_hand(budget), (B, K, S, D))
        )
        make = jax.jit(random_pair, static_argnums=(1, 2))
        states = tuple(make(jax.random.key(i), shape, spec.dtype) for i in range(layers))
    q = jax.random.normal(jax.random.key(100), (B, 1, spec.q_heads, D), spec.dtype)
    k, v = random_pair(jax.random.key(101), (B, 1, K, D), spec.dtype)
    with implementation(how):
        took, outs = clock(
            jax.jit(through(step), donate_argnums=0), states, q, k, v, calls=calls
        )
    del states
    if not all(bool(jnp.all(jnp.isfinite(out))) and bool(jnp.any(out != 0)) for out in outs):
        raise SystemExit(f"{method}: the output is not finite, or zero")
    return {
        "method": method,
        "implementation": how,
        "policy": type(policy).__name__ if method in named else None,
        "length": S,
        "batch": B,
        "layers": layers,
        "us": took.us / layers,
        "kernels": None if took.kernels is None else took.kernels / layers,
        "floor_us": floor,
        "parts": {
            name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel"): round(
                us / layers, 2
            )
            for name, us in took.parts.items()
        },
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "decode_step.json", calls=20)
    parser.add_argument("--lengths", type=numbers, default=list(LENGTHS))
    parser.add_argument("--batches", type=numbers, default=list(BATCHES))
    parser.add_argument("--methods", type=names_of(METHODS), default=METHODS)
    parser.add_argument(
        "--implementations",
        type=names_of(IMPLEMENTATIONS, "implementation"),
        default=IMPLEMENTATIONS,
    )
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--dense-capacity", type=int, help="default: as measured for this device"
    )
    parser.add_argument("--layer", choices=sorted(LAYERS), default="llama-3.1-8b")
    given = parse(parser, args)
    shape, most_layers = (SMALL_LAYER, 2) if given.quick else (LAYERS[given.layer], 16)

    dense_capacity = "auto" if given.dense_capacity is None else given.dense_capacity
    key, shown = ("method", "implementation", "length", "batch", "backend"), False
    what = "a decode step of attention of a layer, " + ", ".join(
        f"{k} {v}" for k, v in shape.items()
    )
    what += f"; budget {given.budget}; normal random keys, values and queries; us: device time of the kernels, "
    what += "parts: by kernel"
    for length in given.lengths:
        for batch in given.batches:
            spec = CacheSpec(batch=batch, capacity=length, **shape)
            best, left_out = None, set()  # methods that "default" runs without some kernel
            for how, method in (
                (how, method) for how in given.implementations for method in given.methods
            ):
                if how != "default" and method not in (
                    "fier",
                    "fier:turbo4",
                    "quest",
                    "pariskv",
                    "logquant",
                ):
                    continue
                if method == "cudnn" and jax.default_backend() != "gpu":
                    continue
                if (
                    how == "kernels"
                    and "default" in given.implementations
                    and method not in left_out
                ):
                    continue
                try:
                    with ops.explained() as found:
                        row = measure(
                            method,
                            how,
                            spec,
                            given.budget,
                            given.calls,
                            most_layers,
                            dense_capacity,
                        )
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    print(f"{method} | {how} | {length} | {batch} | out of memory", flush=True)
                    continue
                finally:
                    gc.collect()
                if how == "default" and any(
                    "not yet measured" in why for why in map(str, found)
                ):
                    left_out.add(method)
                best = row["us"] if method == "cudnn" else best
                row["times_faster_than_cudnn"] = None if best is None else best / row["us"]
                if not shown:
                    print(" | ".join(name for name in row if name != "parts"))
                shown = True
                show(row)
                save(out_of(given, "decode_step.json"), what, [row], key)


if __name__ == "__main__":
    main()
