"""Several decode steps of a row in one call of `kvjax.decode`, by method, length and number of
tokens.

    python benchmarks/decode_tokens.py [--lengths 131072] [--batches 1] \\
        [--tokens 1,2,4,8,16] [--methods fier]

A layer of Llama-3.1-8B takes T tokens that each attend by selection, as in a model that
verifies the tokens of a draft. Device time is measured as in `decode_step.py`: several unrolled
layers, over their number. `times_one` is the time over that of one token, in the same run: 1 if
T tokens cost no more than one, T if nothing is saved. `floor_us` is the time to read cache or
index once, and the selections of T random queries, which have no tokens in common.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from decode_step import L2_BYTES, policies, random_pair, through
from device_time import bytes_per_us
from jax import Array
from layers import (
    LAYER,
    SMALL_LAYER,
    clock,
    floor_us,
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
from kvjax import CacheSpec
from kvjax.kernels_pallas import tuned

METHODS = ["full", "fier", "quest", "pariskv", "logquant"]


def step(cache: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    return kvjax.decode(cache, q, k, v, flush=False)


@contextmanager
def block_sizes(given: str) -> Iterator[None]:
    """Runs kernels with the block sizes in `given`, "KERNEL:FIELD=N,...;KERNEL:..."."""
    changes: dict[str, dict[str, int]] = {}
    for text in filter(None, given.split(";")):
        kernel, _, fields = text.partition(":")
        pairs = (field.partition("=") for field in fields.split(","))
        changes[kernel] = {name: int(number) for name, _, number in pairs}
    usual = tuned.select

    def select(kernel: str, rule: Any, *args: Any, **shape: Any) -> Any:
        chosen = usual(kernel, rule, *args, **shape)
        return replace(chosen, **changes[kernel]) if kernel in changes else chosen

    jax.clear_caches()  # drops programs that were traced with other sizes
    with mock.patch.object(tuned, "select", select):
        yield


def alike(key: Array, shape: tuple[int, ...], dtype: Any, share: float) -> Array:
    """Normal random queries [B, T, N, D]; the queries of any two tokens have the correlation
    `share`.
    """
    both, each = (jax.random.normal(x, shape) for x in jax.random.split(key))
    return (share**0.5 * both[:, :1] + (1 - share) ** 0.5 * each).astype(dtype)


def measure(
    method: str,
    spec: CacheSpec,
    tokens: int,
    budget: int,
    calls: int,
    most_layers: int,
    share: float,
) -> dict[str, Any]:
    B, K, D, S = spec.batch, spec.kv_heads, spec.head_dim, spec.capacity
    policy = policies(budget)[method]
    layers = int(
        min(
            max(2, -(-2 * L2_BYTES // (floor_us(policy, spec, S) * bytes_per_us()))),
            most_layers,
        )
    )
    states: Any = fill(kvjax.init(policy, spec, layers=layers), S - (calls + 3) * tokens).layers
    q = alike(jax.random.key(100), (B, tokens, spec.q_heads, D), spec.dtype, share)
    k, v = random_pair(jax.random.key(101), (B, tokens, K, D), spec.dtype)
    took, outs = clock(jax.jit(through(step), donate_argnums=0), states, q, k, v, calls=calls)
    del states
    if not all(bool(jnp.all(jnp.isfinite(out))) and bool(jnp.any(out != 0)) for out in outs):
        raise SystemExit(f"{method}: the output is not finite, or zero")
    return {
        "method": method,
        "length": S,
        "batch": B,
        "tokens": tokens,
        "alike": share,
        "layers": layers,
        "us": took.us / layers,
        "kernels": None if took.kernels is None else took.kernels / layers,
        "floor_us": floor_us(policy, spec, S, tokens),
        "parts": {name: round(us / layers, 2) for name, us in took.parts.items()},
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "decode_tokens.json", calls=6)
    parser.add_argument("--lengths", type=numbers, default=[131072])
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--methods", type=names_of(METHODS), default=METHODS)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--alike", type=lambda text: [float(part) for part in text.split(",")], default=[0.0]
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="also time block sizes KERNEL:FIELD=N,...;KERNEL:...; these rows are not written",
    )
    given = parse(parser, args)
    shape, most_layers = (SMALL_LAYER, 2) if given.quick else (LAYER, 16)
    what = "several decode steps of a row at once, a layer, " + ", ".join(
        f"{k} {v}" for k, v in shape.items()
    )
    what += f"; budget {given.budget}; normal random keys, values and queries; us: device time of the kernels; "
    what += "alike: correlation of the queries of two tokens"
    key = ("method", "length", "batch", "tokens", "alike", "backend")
    for length in given.lengths:
        for batch in given.batches:
            spec = CacheSpec(batch=batch, capacity=length, **shape)
            for method, share in product(given.methods, given.alike):
                one = None
                for tokens, sizes in product(given.tokens, ["", *given.config]):
                    with block_sizes(sizes):
                        row = measure(
                            method, spec, tokens, given.budget, given.calls, most_layers, share
                        )
                    one = row["us"] if tokens == 1 and not sizes else one
                    row["times_one"] = None if one is None else row["us"] / one
                    show(row)
                    print("  ", sizes or "default", row["parts"], flush=True)
                    if not sizes:
                        save(out_of(given, "decode_tokens.json"), what, [row], key)
                    gc.collect()


if __name__ == "__main__":
    main()
