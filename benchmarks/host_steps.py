"""Times of a decode step per layer with the history in host memory, by length and by how much
queries turn.

    python benchmarks/host_steps.py [--lengths 131072] [--methods fier,quest] \\
        [--hot 4096,8192] [--correlations 1,0.9,0]

Unrolled layers as in decode_step.py, with the history on the device, in host memory, and in
host memory with a hot set. The queries of a step are `correlation` times those of the step
before, plus noise that keeps their length. "us" is device time of the kernels of a layer,
"clock_us" the host's clock; "read" is tokens of a row and KV head that a step read from the
host. With `--float8` the histories under hot sets are in 8-bit floats, and "where" says so.
`--shape qwen` has the heads of Qwen2.5-7B, for the growth from 262144 to 786432 tokens:

    python benchmarks/host_steps.py --shape qwen --lengths 262144,786432 --hot 0 \\
        --correlations 0 --layers 2
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_step import kvjax_step, random_pair, turning
from jax import Array, lax
from layers import clock, implementation, numbers, options, out_of, parse, save, show
from named import names_of
from throughput import fill

import kvjax
from kvjax import CacheSpec, presets

SHAPES = {
    "llama": (32, 8, 128),
    "qwen": (28, 4, 128),
    "quick": (4, 2, 64),
}  # query heads, KV heads, channels
WARM = 12  # steps that fill a hot set before it is timed


def policy(method: str, where: str, hot: int, budget: int) -> Any:
    settings = {
        "dense_layers": 0,
        "dense_capacity": 0,
        "store": f"{where}+{hot}" if hot else where,
    }
    return presets.find(method).policies(budget=budget, **settings).rest


def queries(correlation: float, steps: int, spec: CacheSpec) -> Array:
    """[steps, B, 1, N, D]."""
    noise = jax.random.normal(
        jax.random.key(100), (steps, spec.batch, 1, spec.q_heads, spec.head_dim)
    )
    turn = (1 - correlation**2) ** 0.5

    def next_query(q: Array, new: Array) -> tuple[Array, Array]:
        q = correlation * q + turn * new
        return q, q

    return lax.scan(next_query, noise[0], noise)[1].astype(spec.dtype)


def measure(
    method: str,
    where: str,
    hot: int,
    correlation: float,
    spec: CacheSpec,
    budget: int,
    calls: int,
    count: int,
) -> dict[str, Any]:
    steps = WARM + 2 * calls + 8
    layers = fill(
        kvjax.init(policy(method, where, hot, budget), spec, layers=count),
        spec.capacity - steps,
    ).layers
    k, v = random_pair(
        jax.random.key(101), (spec.batch, 1, spec.kv_heads, spec.head_dim), spec.dtype
    )
    args = queries(correlation, steps, spec), k, v
    step, carry = jax.jit(turning(kvjax_step), donate_argnums=0), (layers, jnp.int32(0))
    del layers
    for _ in range(WARM):
        out, carry = step(carry, *args)
    jax.block_until_ready(out)

    def loads() -> float:
        if not hot:
            return 0.0
        pages = np.mean([np.asarray(layer.state.store.hot.loads) for layer in carry[0]])
        return float(pages) * carry[0][0].policy.store.page

    before, times = loads(), []
    for _ in range(calls):
        start = time.perf_counter()
        out, carry = step(carry, *args)
        jax.block_until_ready(out)
        times.append(1e6 * (time.perf_counter() - start) / count)
    read = (loads() - before) / calls if hot else float(budget if where == "host" else 0)
    took, _ = clock(step, carry, *args, calls=calls)
    names = {
        name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel"): us
        for name, us in took.parts.items()
    }
    return {
        "method": method,
        "where": where,
        "hot": hot,
        "correlation": correlation,
        "length": spec.capacity,
        "batch": spec.batch,
        "kv_heads": spec.kv_heads,
        "us": took.us / count,
        "clock_us": statistics.median(times),
        "kernels": None if took.kernels is None else took.kernels / count,
        "read": read,
        "parts": {name: round(us / count, 2) for name, us in names.items()},
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "host_steps.json", calls=20)
    reals: Callable[[str], list[float]] = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=numbers, default=[131072])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--methods", type=names_of(presets.REGISTRY), default=["fier"])
    parser.add_argument(
        "--hot", type=numbers, default=[4096, 8192], help="tokens of the hot set; 0: none"
    )
    parser.add_argument("--correlations", type=reals, default=[1.0, 0.97, 0.9, 0.0])
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--float8", action="store_true", help="hot sets of a history in 8-bit floats"
    )
    parser.add_argument(
        "--implementation",
        default="default",
        help="or kernels: also those without a measurement",
    )
    given = parse(parser, args)
    heads, kv_heads, channels = SHAPES["quick" if given.quick else given.shape]
    dtype = jnp.dtype(jnp.float32 if given.quick else jnp.bfloat16)
    what = f"a decode step of attention of a layer, history on the device or the host; head_dim {channels}, {dtype}, "
    what += f"budget {given.budget}; normal random keys and values; us: device time, median of {given.calls} calls"
    key = (
        "method",
        "where",
        "hot",
        "correlation",
        "length",
        "batch",
        "kv_heads",
        "implementation",
        "backend",
    )
    for length in given.lengths:
        spec = CacheSpec(
            batch=given.batch,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=channels,
            capacity=length,
            dtype=dtype,
        )
        for method in given.methods:
            kept = "float8" if given.float8 else "host"
            places = [("device", 0), ("host", 0), *((kept, hot) for hot in given.hot if hot)]
            for where, hot in places:
                for correlation in given.correlations if hot else [0.0]:
                    with implementation(given.implementation):
                        row = measure(
                            method,
                            where,
                            hot,
                            correlation,
                            spec,
                            given.budget,
                            given.calls,
                            given.layers,
                        )
                    row["implementation"] = given.implementation
                    show(row)
                    save(out_of(given, "host_steps.json"), what, [row], key)
                    gc.collect()


if __name__ == "__main__":
    main()
