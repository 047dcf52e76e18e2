"""A decode step where no kernel runs, beside the same by hand: `python benchmarks/plain.py
[--lengths 8192,131072]`.

Every preset takes steps in plain JAX (`ops.use("xla")`) on whatever device there is: a CPU, a
TPU, a GPU. By hand means what one writes in ten lines, without a library, in the same run:
- select: exact scores, `lax.top_k`, `take_along_axis`, softmax, for presets that select a
  budget of stored tokens; on a GPU also with values in host memory (`fetch_by_hand_us`) for
  those of these presets that keep theirs there;
- attend: softmax attention to all tokens, for presets that read everything, in whatever form
  they keep it;
- held: the same over as many slots as the preset has for each head, for presets that keep no
  other tokens.

On a GPU, times are those of the kernels; elsewhere the host's clock, with the two programs
taking turns, so that a busy machine slows both: read the ratios. States are filled with random
keys and values; for presets that need the queries of a prompt, with a prompt of `--prompt`
tokens, so that these read no more than that many.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from compared import filled, policy_of
from decode_step import by_hand, kvjax_step, random_pair, through
from jax import Array
from layers import LAYER, clock, numbers, options, out_of, save, show
from named import names_of
from throughput import fill

import kvjax
from kvjax import CacheSpec, ops
from kvjax.memory import to_host
from kvjax.numerics.partial import group_queries

SELECT = (
    "fier",
    "pariskv",
    "quest",
    "exact",
    "pqcache",
    "magicpig",
    "shadowkv",
    "arkvale",
    "freekv",
)
ATTEND = ("full", "logquant", "kivi", "turboquant", "mikv", "razorattention", "duoattention")
FETCH = ("shadowkv", "arkvale", "freekv")  # keep values in host memory
HELD = (
    "streaming_llm",
    "logevict",
    "h2o",
    "tova",
    "snapkv",
    "pyramidkv",
    "adakv",
    "raas",
    "evict",
)
CPU_LAYER = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": jnp.dtype(jnp.float32)}


def attend_by_hand(state: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    keys, values = (a.at[:, :, -1].set(new[:, 0]) for a, new in zip(state, (k, v), strict=True))
    grouped = group_queries(q[:, 0], keys.shape[1])
    scores = (
        jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32)
        * q.shape[-1] ** -0.5
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgs,bksd->bkgd", weights, values).reshape(q.shape), (keys, values)


def fetch_by_hand(budget: int) -> Any:
    """`decode_step.by_hand` with values f[B, K, S, 1, 1, D] in host memory."""

    def step(state: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        keys, values = state
        keys = keys.at[:, :, -1].set(k[:, 0])
        new = to_host(v[:, 0, :, None, None, None])
        values = jax.lax.dynamic_update_slice(values, new, (0, 0, keys.shape[2] - 1, 0, 0, 0))
        grouped, scale = group_queries(q[:, 0], keys.shape[1]), q.shape[-1] ** -0.5
        scores = (
            jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32)
            * scale
        )
        _, slots = jax.lax.top_k(jnp.mean(jax.nn.softmax(scores, axis=-1), axis=2), budget)
        (picked,) = ops.host_rows(values, slots)
        weights = jax.nn.softmax(
            jnp.take_along_axis(scores, slots[:, :, None], axis=3), axis=-1
        ).astype(picked.dtype)
        return jnp.einsum("bkgs,bksd->bkgd", weights, picked).reshape(q.shape), (keys, values)

    return step


class Cell:
    """A compiled step with its state."""

    def __init__(self, step: Any, states: Any, inputs: tuple[Array, ...]) -> None:
        self.run: Callable[..., Any] = jax.jit(through(step), donate_argnums=0)
        self.states, self.inputs = states, inputs

    def us(self) -> float:
        start = time.perf_counter()
        outs, self.states = self.run(self.states, *self.inputs)
        jax.block_until_ready(outs)
        return 1e6 * (time.perf_counter() - start)

    def device_us(self, calls: int) -> tuple[float, float | None]:
        """Microseconds in kernels, and how many kernels; gives the state away."""
        states, self.states = self.states, None
        took, _ = clock(self.run, states, *self.inputs, calls=calls)
        return took.us, took.kernels


def state_of(
    method: str, spec: CacheSpec, budget: int, room: int, prompt: int
) -> kvjax.LayerCache:
    policy = policy_of(method, spec, budget).of_size(spec)
    try:
        (layer,) = fill(kvjax.init(policy, spec, layers=1), spec.capacity - room).layers
        return layer
    except ValueError as error:
        if "queries of a prompt" not in str(error):
            raise
    return filled(policy, spec, min(spec.capacity - room, prompt), min(prompt, 4096), 0)


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "plain.json", calls=9)
    parser.add_argument("--lengths", type=numbers, default=[8192, 32768, 131072])
    parser.add_argument(
        "--methods", type=names_of([*SELECT, *ATTEND, *HELD]), default=[*SELECT, *ATTEND, *HELD]
    )
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--prompt", type=int, default=8192, help="most tokens of a prompt with queries"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="start no method after these"
    )
    given = parser.parse_args(args)
    gpu = jax.default_backend() == "gpu"
    shape: dict[str, Any] = LAYER if gpu else CPU_LAYER
    if given.quick:
        given.lengths, given.budget, given.prompt = [1024], 256, 1024
    what = "a decode step of a layer in plain JAX beside the same by hand, " + ", ".join(
        f"{k} {v}" for k, v in shape.items()
    )
    what += f"; budget {given.budget}; us: " + (
        "device time of the kernels" if gpu else "the host's clock, medians"
    )
    begin = time.time()
    for length in given.lengths:
        spec = CacheSpec(batch=1, capacity=length, **shape)
        pair = random_pair(jax.random.key(1), (1, 1, spec.kv_heads, spec.head_dim), spec.dtype)
        inputs = (
            jax.random.normal(
                jax.random.key(0), (1, 1, spec.q_heads, spec.head_dim), spec.dtype
            ),
            *pair,
        )

        def hand(
            kind: str, slots: int, spec: CacheSpec = spec, inputs: tuple[Array, ...] = inputs
        ) -> Cell:
            make = jax.jit(random_pair, static_argnums=(1, 2))
            state = make(
                jax.random.key(2), (1, spec.kv_heads, slots, spec.head_dim), spec.dtype
            )
            if kind == "fetch":
                keys, values = state
                values = jax.device_put(values[:, :, :, None, None], jax.memory.Space.Host)
                return Cell(fetch_by_hand(given.budget), ((keys, values),), inputs)
            return Cell(
                by_hand(given.budget) if kind == "select" else attend_by_hand, (state,), inputs
            )

        by_kind: dict[tuple[str, int], tuple[float, float | None]] = {}
        for method in given.methods:
            if time.time() - begin > 60 * given.minutes:
                print(f"no time left for {method} | {length}", flush=True)
                continue
            kind = "held" if method in HELD else "attend" if method in ATTEND else "select"
            layer = state_of(method, spec, given.budget, given.calls + 3, given.prompt)
            policy = type(layer.policy).__name__
            slots = layer.state.tokens.slots if kind == "held" else spec.capacity
            with ops.use("xla"):
                ours = Cell(kvjax_step, (layer,), inputs)
                del layer
                if gpu:
                    if (kind, slots) not in by_kind:
                        by_kind[kind, slots] = hand(kind, slots).device_us(given.calls)
                    (us, kernels), (hand_us, hand_kernels) = (
                        ours.device_us(given.calls),
                        by_kind[kind, slots],
                    )
                else:
                    theirs, kernels, hand_kernels = hand(kind, slots), None, None
                    ours.us(), theirs.us()
                    us, hand_us = map(
                        statistics.median,
                        zip(
                            *((ours.us(), theirs.us()) for _ in range(given.calls)), strict=True
                        ),
                    )
            row = {
                "method": method,
                "policy": policy,
                "length": length,
                "by_hand": kind,
                "us": us,
                "by_hand_us": hand_us,
            }
            row |= {
                "ratio": us / hand_us,
                "kernels": kernels,
                "by_hand_kernels": hand_kernels,
                "calls": given.calls,
            }
            if gpu and method in FETCH:
                if ("fetch", slots) not in by_kind:
                    with ops.use("xla"):
                        by_kind["fetch", slots] = hand("fetch", slots).device_us(given.calls)
                row["fetch_by_hand_us"], _ = by_kind["fetch", slots]
            show(row)
            save(
                out_of(given, "plain.json"),
                what,
                [row],
                ("method", "length", "backend", "device"),
            )
            del ours
            gc.collect()


if __name__ == "__main__":
    main()
