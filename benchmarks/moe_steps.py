"""Decode steps of whole mixtures of experts with random weights, against the bytes that a step
must read.

    python benchmarks/moe_steps.py [--shapes qwen3-moe,gpt-oss] [--methods full,fier] \\
        [--length 32768] [--steps 32]

The shapes are those of Qwen3-30B-A3B (61 GB in bfloat16, so it takes a GPU of 80 GB) and of
gpt-oss-20b (42 GB), with a batch of 1 and a cache filled with random tokens. `ms` is the time
of a step of one program that makes `--steps` of them, and `floor_ms` that of reading all
attention weights, the router, the head, the experts that a token chooses and the cache that the
method reads, once, at the rate of the device's memory. About a minute a shape.

    python benchmarks/moe_steps.py --product row,ragged_dot,tokamax [--batches 1,8]

times the products of the chosen experts alone, by several ways (`moe_products.py`).
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import moe_products
from decode_step import policies
from device_time import bytes_per_us
from flax import nnx
from layers import clock, floor_us, numbers, options, out_of, parse, save, show
from named import names_of
from throughput import fill

import kvjax
from kvjax import models, presets
from kvjax.models import DecoderConfig, Experts, rope

SHAPES = {
    "qwen3-moe": DecoderConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        layers=48,
        q_heads=32,
        kv_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rope=rope.Default(theta=1e6),
        qk_norm=True,
        experts=Experts(count=128, per_token=8, size=768),
    ),
    "gpt-oss": DecoderConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        layers=24,
        q_heads=64,
        kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope=rope.Yarn(theta=150000.0, factor=32.0, original=4096, truncate=False),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        windows=(128, None) * 12,
        experts=Experts(count=32, per_token=4, size=2880, bias=True, clamp=(1.702, 7.0)),
    ),
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "layers": 2,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}


def shrunk(config: DecoderConfig) -> DecoderConfig:
    assert config.experts is not None
    experts = replace(config.experts, count=8, per_token=2, size=16)
    windows = tuple(None if w is None else 16 for w in config.windows[:2])
    return replace(config, **SMALL, windows=windows, experts=experts)


def weight_bytes(model: models.Decoder, batch: int = 1) -> float:
    """Bytes of the weights that a step of `batch` tokens reads: all but the embedding, and of the
    experts those that are chosen, if tokens choose independently and evenly.
    """
    by = model.config.experts
    chosen = 1.0 if by is None else 1 - (1 - by.per_token / by.count) ** batch
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path)
        if "embedding" in name and model.head is not None:
            continue
        total += leaf.size * leaf.dtype.itemsize * (chosen if _is_of_experts(name, leaf) else 1)
    return total


def _is_of_experts(name: str, leaf: Any) -> bool:
    """True for a weight of which each expert has its part; the router and the shared expert are
    read whole.
    """
    return "['mlp']" in name and (leaf.ndim == 3 or name.endswith("_bias'].value"))


@partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def run(model: models.Decoder, cache: Any, token: Any, *, steps: int) -> Any:
    def step(carry: Any, _: Any) -> Any:
        cache, token = carry
        logits, cache = model(token, cache, last_logits=True)
        return (cache, jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)), jnp.isfinite(
            logits
        ).all()

    (cache, token), finite = jax.lax.scan(step, (cache, token), length=steps)
    return cache, token, finite.all()


def measure(shape: str, method: str, given: Any) -> dict[str, Any]:
    config = shrunk(SHAPES[shape]) if given.quick else SHAPES[shape]
    model = models.Decoder(config, dtype=jnp.float32 if given.quick else jnp.bfloat16)
    layers = presets.windowed(
        kvjax.PerLayer((), policies(given.budget)[method]), config.windows
    )
    spec = model.spec(1, given.length)
    room = (given.calls + 5) * given.steps
    cache = fill(kvjax.init(layers, spec, layers=config.layers), given.length - room)
    token, times = jnp.zeros((1, 1), jnp.int32), []
    for _ in range(given.calls + 1):
        start = time.perf_counter()
        cache, token, finite = jax.block_until_ready(
            run(model, cache, token, steps=given.steps)
        )
        times.append(1e3 * (time.perf_counter() - start) / given.steps)
        if not bool(finite):
            raise SystemExit(f"{shape}, {method}: logits are not finite")
    caches = sum(
        floor_us(layers.rest, spec, given.length)
        if window is None
        else floor_us(kvjax.Full(), spec, window)
        for window in config.windows
    )
    floor = weight_bytes(model) / bytes_per_us() + caches

    row = {
        "shape": shape,
        "method": method,
        "length": given.length,
        "ms": min(times[1:]),
        "floor_ms": floor / 1e3,
        "times_floor": min(times[1:]) / (floor / 1e3),
    }
    return row | by_kind(model, cache, token, given.steps) if given.parts else row


def by_kind(model: models.Decoder, cache: Any, token: Any, steps: int) -> dict[str, Any]:
    """How many kernels a step starts, and its microseconds in those of a kind, whose names
    differ in numbers.
    """

    def again(state: Any) -> Any:
        cache, token, finite = run(model, *state, steps=steps)
        return finite, (cache, token)

    took, _ = clock(again, (cache, token), calls=1)
    parts: dict[str, float] = {}
    for name, us in took.parts.items():
        kind = re.sub(
            r"([_.]\d+)+$", "", name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel")
        )
        parts[kind] = parts.get(kind, 0.0) + us / steps
    kernels = None if took.kernels is None else took.kernels / steps
    return {
        "kernels": kernels,
        "parts": {k: round(us, 1) for k, us in sorted(parts.items(), key=lambda x: -x[1])},
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "moe_steps.json", calls=4)
    parser.add_argument("--shapes", type=names_of(SHAPES, "shape"), default=list(SHAPES))
    parser.add_argument(
        "--product",
        type=names_of(moe_products.PRODUCTS, "product"),
        help="times products alone, by these",
    )
    parser.add_argument("--batches", type=numbers, default=[1], help="of --product")
    parser.add_argument(
        "--methods", type=names_of(policies(budget=2048)), default=["full", "fier"]
    )
    parser.add_argument(
        "--parts", action="store_true", help="also count kernels, and time them by kind"
    )
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--budget", type=int, default=2048)
    given = parse(parser, args)
    if given.quick:
        given.length, given.steps, given.budget, given.calls = 2048, 2, 256, 1
    if given.product:
        products(given)
        return
    what = (
        f"decode steps of mixtures of experts, random weights, batch 1, budget {given.budget}"
    )
    for shape in given.shapes:
        for method in given.methods:
            row = measure(shape, method, given)
            show({name: x for name, x in row.items() if name != "parts"})
            save(out_of(given, "moe_steps.json"), what, [row], ("shape", "method", "length"))
            gc.collect()


def products(given: Any) -> None:
    """Times `--product`, each in each shape; one that does not take the call says why."""
    out = out_of(given, "moe_products.json")
    what = "the products of the chosen experts of a layer, random weights; us: device time"
    for shape in given.shapes:
        config = shrunk(SHAPES[shape]) if given.quick else SHAPES[shape]
        for batch in given.batches:
            for name in given.product:
                row: dict[str, Any] = {"shape": shape, "product": name, "batch": batch}
                try:
                    row = moe_products.measure(shape, config, name, batch, given.calls)
                except Exception as error:  # a library may refuse a call in any way
                    row["why"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                show(row)
                save(out, what, [row], ("shape", "product", "batch"))
                gc.collect()


if __name__ == "__main__":
    main()
