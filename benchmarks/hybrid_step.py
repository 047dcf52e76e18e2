"""A decode step of a model with gated delta nets, and its parts beside their floors.

    python benchmarks/hybrid_step.py [--model qwen3.5-27b] [--layers 8] [--cells 131072x1,32768x8]
    [--methods full,fier,quest] [--out FILE]

The model has the published sizes but few layers and random weights: three of four layers are
gated delta nets, the others attention with heads of 256. A row is a whole step of `--layers`
layers with embedding and head, by method and length x batch, beside the time to read its weights
(of experts, those that tokens choose if they choose evenly), states and cache; "parts" are the
device time of each kernel. Two more rows a cell are one layer alone: "delta" is the recurrence of a gated delta
net (`kvjax.recurrence.advance`), whose floor is to read its state and the newest tokens beside
it; "attention" is `Full` over the cache of one layer. `delta_step.py` has fla-core's kernels
beside ours.

Without a GPU (`--quick`) a tiny model and the host's clock only show that the script works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from device_time import bytes_per_us
from jax import Array
from layers import clock, floor_us, numbers, options, out_of, parse, save, show
from moe_steps import weight_bytes
from named import names_of
from throughput import fill, random_model

import kvjax
from kvjax import presets
from kvjax.models import Decoder, DecoderConfig, Experts, GatedDelta
from kvjax.models.gated_delta import DeltaInputs
from kvjax.models.rope import Default
from kvjax.recurrence import advance

_COMMON: dict[str, Any] = {
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope": Default(theta=1e7),
    "head_dim": 256,
    "rotary_dim": 64,
    "qk_norm": True,
    "norm_offset": True,
    "output_gate": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5-27b": _COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "q_heads": 24,
        "kv_heads": 4,
        "mixer": GatedDelta(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
    },
    "qwen3-next": _COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "q_heads": 16,
        "kv_heads": 2,
        "mixer": GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        "experts": Experts(count=512, per_token=10, size=512, shared_size=512),
    },
    "tiny": _COMMON
    | {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "rotary_dim": 4,
        "mixer": GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
    },
}


def config_of(name: str, layers: int) -> DecoderConfig:
    """The sizes of a model with so many layers, of which each fourth has attention."""
    recurrent = tuple(i for i in range(layers) if (i + 1) % 4)
    return DecoderConfig(**MODELS[name], layers=layers, recurrent=recurrent)


def policy_of(method: str, budget: int) -> Any:
    if method == "full":
        return kvjax.Full()
    return presets.parse(f"{method}:budget={budget},dense_layers=0")


def step(cache: kvjax.Cache, model: Decoder, token: Array) -> tuple[Array, kvjax.Cache]:
    logits, cache = model(token[:, None], cache, last_logits=True)
    return logits, cache


def whole(
    model: Decoder, method: str, length: int, batch: int, budget: int, calls: int
) -> dict[str, Any]:
    """A step of the whole model."""
    spec = model.spec(batch, length)
    policy = policy_of(method, budget)
    empty = kvjax.init(policy, spec, layers=model.config.layers)
    cache = fill(empty, length - calls - 3)
    of_layer = next(x.policy for x in cache.layers[::-1])
    attention = model.config.attention_layers * floor_us(of_layer, spec, length)
    states = sum(
        layer.nbytes.device
        for i, layer in enumerate(cache.layers)
        if i in model.config.recurrent
    )
    floor = attention + (states + weight_bytes(model, batch)) / bytes_per_us()
    # The model is an argument: weights that a program closes over become constants of it, which
    # take minutes to compile.
    run = jax.jit(step, donate_argnums=0)
    took, _ = clock(run, cache, model, jnp.zeros(batch, jnp.int32), calls=calls)
    return {
        "part": "step",
        "method": method,
        "us": took.us,
        "floor_us": floor,
        "parts": took.parts,
    }


def delta(sizes: GatedDelta, spec: kvjax.CacheSpec, calls: int) -> dict[str, Any]:
    """The recurrence of one gated delta net, flushes between steps included."""
    layer = kvjax.init_layer(sizes, spec)
    heads = (spec.batch, 1, sizes.value_heads)
    inputs = DeltaInputs(
        jax.random.normal(jax.random.key(0), (spec.batch, 1, sizes.channels), spec.dtype),
        jnp.full(heads, -0.1),
        jnp.full(heads, 0.5),
    )
    kernel = jnp.ones((sizes.kernel, sizes.channels), spec.dtype)

    def one(layer: kvjax.LayerCache) -> tuple[Array, kvjax.LayerCache]:
        return advance(kvjax.flush(layer), inputs, kernel)

    floor = layer.nbytes.device / bytes_per_us()
    took, _ = clock(jax.jit(one, donate_argnums=0), layer, calls=calls)
    return {
        "part": "delta",
        "method": "",
        "us": took.us,
        "floor_us": floor,
        "parts": took.parts,
    }


def attention(config: DecoderConfig, spec: kvjax.CacheSpec, calls: int) -> dict[str, Any]:
    """A step of `Full` over the cache of one layer."""
    whole = kvjax.init(kvjax.Full(), dataclasses.replace(spec, recurrent=None), layers=1)
    cache = fill(whole, spec.capacity - calls - 3)
    q = jnp.ones((spec.batch, 1, spec.q_heads, spec.head_dim), spec.dtype)
    k = jnp.ones((spec.batch, 1, spec.kv_heads, spec.head_dim), spec.dtype)

    def one(layer: kvjax.LayerCache) -> tuple[Array, kvjax.LayerCache]:
        return kvjax.attention(layer, q, k, k, flush=False)

    floor = floor_us(kvjax.Full(), spec, spec.capacity)
    took, _ = clock(jax.jit(one, donate_argnums=0), cache.layers[0], calls=calls)
    return {
        "part": "attention",
        "method": "full",
        "us": took.us,
        "floor_us": floor,
        "parts": took.parts,
    }


def cells(text: str) -> list[list[int]]:
    """Length and batch of each cell, as in 131072x1,32768x8."""
    return [numbers(cell.replace("x", ",")) for cell in text.split(",")]


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "hybrid_step.json", calls=20)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3.5-27b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cells", type=cells, default=cells("131072x1,32768x8"))
    parser.add_argument(
        "--methods", type=names_of(presets.REGISTRY), default=["full", "fier", "quest"]
    )
    parser.add_argument("--budget", type=int, default=2048)
    given = parse(parser, args)
    if given.quick:
        given.model, given.layers, given.cells, given.budget = (
            "tiny",
            4,
            [[512, 1], [256, 2]],
            160,
        )
    config = config_of(given.model, given.layers)
    model = random_model(config, jnp.float32 if given.quick else jnp.bfloat16)
    sizes: Any = config.mixer
    what = (
        "a decode step of a model with gated delta nets: us of device time, or of the host's clock "
        "without a GPU; parts: by kernel"
    )
    key = ("model", "layers", "part", "method", "length", "batch", "backend")
    for length, batch in given.cells:
        spec = model.spec(batch, length)
        rows = [
            whole(model, method, length, batch, given.budget, given.calls)
            for method in given.methods
        ]
        rows += [delta(sizes, spec, given.calls), attention(config, spec, given.calls)]
        named = {"model": given.model, "layers": given.layers, "length": length, "batch": batch}
        found = [named | row | {"backend": jax.default_backend()} for row in rows]
        for row in found:
            show(row)
        save(out_of(given, "hybrid_step.json"), what, found, key)


if __name__ == "__main__":
    main()
