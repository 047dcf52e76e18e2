"""One decode step of the methods that papers compare with, in a layer of Llama-3.1-8B, beside
full attention by cuDNN.

    python benchmarks/compared.py [--lengths 32768,131072] [--methods cudnn,shadowkv] \\
        [--out FILE]

As `decode_step.py`, for methods that need the queries of a prompt, rebuild keys or keep parts
of a token in different places. A prompt of normal random queries, keys and values is stored by
`kvjax.attention`, a chunk at a time, so each method keeps the tokens that it would keep in use;
then steps are timed in several unrolled layers. The floor is the time to read a step's bytes of
the cache: the index, and keys and values of the budget or of everything, from the memory that
holds them. Queries are the same in every step, except for `arkvale` and `freekv`, whose steps
reuse the recall of the step before: theirs have a correlation of `ALIKE` from step to step.
`MORE` has methods that `decode_step.py` times too, or that evict. RazorAttention and
DuoAttention keep everything for a quarter and for half of the KV heads, the shares of their
papers (15 % of the heads of a model, here rounded up to whole KV heads of a layer, and 50 %
under grouped queries); which ones does not change the time. PyramidKV is left out, as its
layers differ. Without a GPU (`--quick`) the host's clock is read and cuDNN is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import layers
from decode_step import cudnn, kvjax_step, random_pair, through, turning
from device_time import bytes_per_us
from host_steps import queries
from jax import Array
from layers import LAYER, SMALL_LAYER, clock, numbers, options, out_of, parse, save, show
from named import names_of

import kvjax
from kvjax import CacheSpec, presets
from kvjax.contrib.adakv import HeadBudgets
from kvjax.contrib.magicpig import Sampled
from kvjax.contrib.mikv import Mixed
from kvjax.contrib.shadowkv import LowRank
from kvjax.presets.head_files import Heads

METHODS = [
    "cudnn",
    "shadowkv",
    "shadowkv:host=false",
    "mikv",
    "adakv",
    "snapkv",
    "arkvale",
    "pqcache",
    "magicpig",
]
MORE = ["full", "fier", "pariskv", "quest", "freekv", "logquant", "kivi", "exact"]
MORE += ["streaming_llm", "logevict", "h2o", "tova", "raas", "razorattention", "duoattention"]
RETRIEVAL_HEADS = {
    "razorattention": 4,
    "duoattention": 2,
}  # one KV head in so many keeps everything
WHOLE = ("full", "logquant", "kivi", "turboquant")  # have no budget
HOST_BYTES_PER_US = 5.5e4  # of the bus, one large copy
LAYERS = 2
ALIKE = 0.9


def floor_us(policy: Any, spec: CacheSpec, budget: int) -> float:
    """Microseconds to read the least bytes that a step of a layer needs."""
    K, D, size, B = spec.kv_heads, spec.head_dim, spec.dtype.itemsize, spec.batch
    pair, length = 2 * K * D * size, spec.capacity
    inner = getattr(policy, "retrieval", getattr(policy, "window", policy))
    if isinstance(inner, kvjax.PerHead):
        lengths = [length if k in inner.heads else min(budget, length) for k in range(K)]
        return B * 2 * D * size * sum(lengths) / bytes_per_us()
    if isinstance(inner, kvjax.Full | kvjax.Compressed):
        return layers.floor_us(inner, spec, length)
    store, selector = getattr(inner, "store", None), getattr(inner, "selector", None)
    if isinstance(inner, Mixed):
        return (
            B
            * (pair * budget + inner.bytes_per_token(spec) * (length - budget))
            / bytes_per_us()
        )
    if isinstance(inner, HeadBudgets):
        return B * pair * min(inner.head_bounds[1], length) / bytes_per_us()
    if isinstance(inner, kvjax.Evicting):
        return B * pair * min(budget, length) / bytes_per_us()
    if isinstance(inner, Sampled):
        index = K * 4 * inner.hashing.bits * inner.hashing._words * length
        return B * (index + pair * spec.group * budget) / bytes_per_us()
    assert selector is not None, policy
    index = selector.bytes_read(spec, length)
    if isinstance(store, LowRank):
        exact = K * inner.beside * 2 * D * size
        chosen = K * (budget - inner.beside)
        on_device, values = index + exact + chosen * store.rank * size, chosen * D * size
        host = isinstance(store.values, kvjax.HostOffload)
        return B * (
            (on_device + (0 if host else values)) / bytes_per_us()
            + host * values / HOST_BYTES_PER_US
        )
    if isinstance(store, kvjax.HostOffload):
        return B * (index / bytes_per_us() + pair * budget / HOST_BYTES_PER_US)
    return B * (index + pair * budget) / bytes_per_us()


@partial(jax.jit, static_argnames="tokens", donate_argnames="layer")
def store_chunk(layer: kvjax.LayerCache, key: Array, *, tokens: int) -> kvjax.LayerCache:
    spec = layer.spec
    q, (k, v) = (
        jax.random.normal(key, (spec.batch, tokens, spec.q_heads, spec.head_dim), spec.dtype),
        random_pair(
            jax.random.fold_in(key, 1),
            (spec.batch, tokens, spec.kv_heads, spec.head_dim),
            spec.dtype,
        ),
    )
    return kvjax.prefill(layer, q, k, v)[1]


def filled(
    policy: Any, spec: CacheSpec, length: int, chunk: int, seed: int
) -> kvjax.LayerCache:
    layer = kvjax.init_layer(policy, spec)
    for i, start in enumerate(range(0, length, chunk)):
        key = jax.random.fold_in(jax.random.key(seed), i)
        layer = store_chunk(layer, key, tokens=min(chunk, length - start))
    return jax.block_until_ready(layer)


def policy_of(method: str, spec: CacheSpec, budget: int) -> kvjax.Policy:
    """The policy of one layer."""
    if method in RETRIEVAL_HEADS:
        heads = Heads(spec.kv_heads, (tuple(range(0, spec.kv_heads, RETRIEVAL_HEADS[method])),))
        return presets.find(method).make(budget, heads=heads).policy(0)
    if method.partition(":")[0] in WHOLE:
        return presets.parse(method).rest
    return presets.parse_with_budget(method, budget)[0].rest


def measure(
    method: str, spec: CacheSpec, budget: int, calls: int, chunk: int
) -> dict[str, Any]:
    B, K, D, S = spec.batch, spec.kv_heads, spec.head_dim, spec.capacity
    shape = (B, S, K, D)
    policy: Any = None
    states: Any
    if method == "cudnn":
        make = jax.jit(random_pair, static_argnums=(1, 2))
        states, step = (
            tuple(make(jax.random.key(i), shape, spec.dtype) for i in range(LAYERS)),
            cudnn,
        )
        floor = B * 2 * K * D * S * spec.dtype.itemsize / bytes_per_us()
    else:
        policy = policy_of(method, spec, budget)
        floor = floor_us(policy, spec, budget)
        states = tuple(filled(policy, spec, S - calls - 3, chunk, i) for i in range(LAYERS))
        step = kvjax_step
    k, v = random_pair(jax.random.key(101), (B, 1, K, D), spec.dtype)
    alike = ALIKE if isinstance(policy, kvjax.Speculative) else None
    run: Any = through(step)
    if alike is None:
        q = jax.random.normal(jax.random.key(100), (B, 1, spec.q_heads, D), spec.dtype)
    else:
        turn = jax.device_put(
            jnp.int32(0), jax.devices()[0]
        )  # committed, as what a step returns: one program
        run, states, q = turning(step), (states, turn), queries(alike, calls + 3, spec)
    took, outs = clock(jax.jit(run, donate_argnums=0), states, q, k, v, calls=calls)
    if not all(bool(jnp.all(jnp.isfinite(out))) for out in outs):
        raise SystemExit(f"{method}: the output is not finite")
    parts = {name: round(us / LAYERS, 2) for name, us in list(took.parts.items())[:12]}
    return {
        "method": method,
        "length": S,
        "batch": B,
        "alike": alike,
        "us": took.us / LAYERS,
        "kernels": None if took.kernels is None else took.kernels / LAYERS,
        "floor_us": floor,
        "parts": parts,
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "compared.json", calls=20)
    parser.add_argument("--lengths", type=numbers, default=[32768, 131072])
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument("--methods", type=names_of(METHODS + MORE), default=METHODS)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--chunk", type=int, default=4096, help="tokens of the prompt in a call"
    )
    given = parse(parser, args)
    shape = SMALL_LAYER if given.quick else LAYER
    what = "a decode step of attention of a layer, " + ", ".join(
        f"{k} {v}" for k, v in shape.items()
    )
    what += f"; budget {given.budget}; normal random keys, values and queries; us: device time of the kernels"
    for length in given.lengths:
        for batch in given.batches:
            spec, best = CacheSpec(batch=batch, capacity=length, **shape), None
            for method in given.methods:
                if method == "cudnn" and jax.default_backend() != "gpu":
                    continue
                try:
                    row = measure(method, spec, given.budget, given.calls, given.chunk)
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    print(f"{method} | {length} | {batch} | out of memory", flush=True)
                    continue
                finally:
                    gc.collect()
                best = row["us"] if method == "cudnn" else best
                row["times_faster_than_cudnn"] = None if best is None else best / row["us"]
                show(row)
                save(
                    out_of(given, "compared.json"),
                    what,
                    [row],
                    ("method", "length", "batch", "backend"),
                )


if __name__ == "__main__":
    main()
