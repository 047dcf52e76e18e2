"""One GPU against several: the same tokens, and TPOT of a Llama-3.1-8B shape with random weights, by placement.

    python benchmarks/devices.py [--methods full,fier] [--placements none,ctx=2] [--layers 8] [--seconds 110]

Needs two GPUs or more; with n of them the placements are none, a mesh of one device (what a placement costs by itself),
data=n (rows split, the model on each), model=n (heads, MLP and vocabulary split) and ctx=n (the tokens of each row
split, the model on each).

First a small model in float32 decodes by each method and placement, in plain JAX, and its tokens must equal those of
one GPU. Kernels are not compared in this way: that of `fier` rounds queries to 16 bits, which by itself changes tokens
of a model with random weights. The times are of bfloat16 over a synthetic cache, medians over blocks of steps. Each
decode loop is one program, so they include one call from the host per block. `--prompt` also measures the time until
the logits after a prompt, and the difference of the logits from those of one GPU, in standard deviations of the logits.

Each row is written to results/devices.json as soon as it is measured, and replaces the row of the same sizes. It has
the bytes of weights and cache of one device, the floor (the weights over the memory's bandwidth, without the traffic
between devices), and the collectives of the decode loop.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import throughput
from device_time import bytes_per_us
from jax.sharding import Mesh
from layers import implementation, out_of, save, show

import kvjax
from kvjax import Cache, PerLayer, Placement, presets
from kvjax.generation import Stream, generate, prefill
from kvjax.memory import nbytes
from kvjax.models import Decoder, distribute
from kvjax.sharding.placement import in_order_of_place

METHODS: dict[str, Callable[[int], PerLayer]] = {
    "full": lambda budget: presets.full(),
    "fier": partial(presets.fier, dense_capacity=0),  # a cache with a placement selects however short it is
    "quest": partial(presets.quest, dense_capacity=0),
    "pariskv": partial(presets.pariskv, dense_capacity=0),
    "freekv": presets.freekv,
    "kivi": lambda budget: presets.kivi(),
    "tova": presets.tova,
}
KEY = ("part", "method", "placement", "layers", "length", "batch", "budget")
COLLECTIVE = re.compile(r" = .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def placements(devices: Sequence[Any]) -> dict[str, Placement | None]:
    """By name; None is one device without a mesh."""

    def over(data: int, model: int, ctx: int = 1) -> Placement:
        mesh = Mesh(np.array(devices[: data * model * ctx]).reshape(data, model, ctx), ("data", "model", "ctx"))
        return Placement(mesh=mesh, batch="data", heads="model", context="ctx")

    n = len(devices)
    found = {"none": None, "mesh of 1": over(1, 1)}
    return found | ({f"data={n}": over(n, 1), f"model={n}": over(1, n), f"ctx={n}": over(1, 1, n)} if n > 1 else {})


def check(
    method: str, places: dict[str, Placement | None], *, width: int, length: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """By placement, whether the tokens of a small model in float32 are those of one device."""
    config = replace(
        throughput.SHAPES["llama-3.2-1b"], layers=2, windows=(), hidden_size=width, intermediate_size=width, head_dim=64
    )
    config = replace(config, vocab_size=512, initializer_range=0.2)
    model = throughput.random_model(config, "float32")
    tokens = np.random.default_rng(0).integers(512, size=(8, length), dtype=np.int32)
    lengths = length - length // 16 * np.arange(8, dtype=np.int32)
    policy = METHODS[method](320)
    policies = PerLayer(policy.first[:1], policy.rest)
    alone: Any = None
    for name, place in places.items():
        own = model if place is None else distribute(model, place)
        cache = kvjax.init(policies, own.spec(batch=8, capacity=length + 128), layers=2, placement=place)
        done = generate(own, cache, tokens, lengths, max_new_tokens=length // 8)
        alone = done if alone is None else alone
        error = float(np.abs(np.asarray(done.logits) - np.asarray(alone.logits)).max())
        same = bool(np.array_equal(done.tokens, alone.tokens))
        yield name, {"same_tokens": same, "largest_difference": error}


def fill(cache: Cache, length: int) -> Cache:
    """`throughput.fill`, with each array on the devices of its placement."""
    cache = throughput.fill(cache, length)
    if cache.placement is None:
        return cache
    cache = jax.device_put(cache, kvjax.shardings(cache), donate=True)

    def dealt(layer: Any) -> Any:  # the same tokens as on one device, where context has them
        return replace(
            layer, state=in_order_of_place(layer.policy, layer.spec, layer.placement, layer.state, back=True)
        )

    return Cache(tuple(map(dealt, cache.layers)))


def decode_time(
    model: Decoder, policies: PerLayer, place: Placement | None, *, length: int, batch: int, block: int, blocks: int
) -> tuple[dict[str, Any], np.ndarray]:
    """A row of the table, and the first generated tokens."""
    new = block * (blocks + 1)
    spec = model.spec(batch=batch, capacity=-(-(length + new) // 1024) * 1024)
    cache = fill(kvjax.init(policies, spec, layers=model.config.layers, placement=place), length)
    size, weights = nbytes(cache), nbytes(model)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((batch, model.config.vocab_size), np.float32))
    if place is not None:
        logits = jax.device_put(logits, jax.NamedSharding(place.mesh, place.spec("B")))
    begin = time.perf_counter()
    run = Stream(model, cache, logits, new)
    del cache
    first = run.advance(block)
    compiled = time.perf_counter() - begin
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        run.advance(block)
        times.append(1e3 * (time.perf_counter() - start) / block)
    kvjax.raise_on_overflow(run.cache)
    found = COLLECTIVE.findall(run.lower().compile().as_text())  # compiled before, and found again
    row = {
        "tpot_ms": round(float(np.median(times)), 4),
        "tpot_ms_min": round(min(times), 4),
        "tpot_ms_max": round(max(times), 4),
        "weight_bytes": weights.device,
        "cache_bytes": size.device,
        "host_bytes": size.host,
        "floor_ms": round(weights.device / bytes_per_us() / 1e3, 4),
        "collectives": {kind: found.count(kind) for kind in sorted(set(found))},
        "compile_seconds": round(compiled, 1),
    }
    return row, first


def prompt_time(
    model: Decoder, policies: PerLayer, place: Placement | None, *, tokens: np.ndarray, dtype: str
) -> tuple[dict[str, Any], np.ndarray]:
    """A row: milliseconds until the logits after a prompt, read in two chunks; and the logits."""
    B, T = tokens.shape
    spec, times = model.spec(batch=B, capacity=T + 1024, dtype=dtype), []
    for _ in range(4):
        cache = jax.block_until_ready(kvjax.init(policies, spec, layers=model.config.layers, placement=place))
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(prefill(model, cache, tokens, chunk=T // 2))
        times.append(1e3 * (time.perf_counter() - start))
        del cache
    row = {"prompt_ms": round(float(np.median(times[1:])), 3), "first_ms": round(times[0], 1)}
    return row, np.asarray(logits, np.float32)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["full", "fier"])
    parser.add_argument("--placements", type=lambda text: text.split(","), help="of those above, in addition to none")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=0, help="also time a prompt of this many tokens, one row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further row after this many")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes on any devices; nothing is written")
    given = parser.parse_args(args)
    end = time.monotonic() + given.seconds
    if not given.quick and (jax.default_backend() != "gpu" or jax.device_count() < 2):
        parser.error("this compares one GPU with several, and found fewer than two; --quick runs on any devices")
    config = replace(throughput.SHAPES["llama-3.1-8b"], layers=given.layers, windows=())
    dtype, blocks, block, small = "bfloat16", 4, 32, {"width": 1024, "length": 800}
    if given.quick:
        config = replace(config, layers=3, windows=(), hidden_size=64, intermediate_size=64, vocab_size=64, head_dim=16)
        dtype, given.length, given.budget, blocks, block, small = "float32", 300, 128, 2, 4, {"width": 64, "length": 96}
    places = placements(jax.devices())
    if unknown := set(given.placements or ()) - set(places):
        parser.error(f"--placements: {', '.join(sorted(unknown))}; here are {', '.join(places)}")
    # The others are compared with "none".
    places = {"none": None} | {name: places[name] for name in given.placements or places}
    sizes = {
        "layers": config.layers,
        "length": given.length,
        "batch": given.batch,
        "budget": given.budget,
    }
    rows: list[dict[str, Any]] = []

    def keep(part: str, method: str, name: str, found: dict[str, Any]) -> None:
        rows.append({"part": part, "method": method, "placement": name, **sizes, **found})
        show({name: value for name, value in rows[-1].items() if name not in sizes})
        save(
            out_of(given, "devices.json"),
            "one GPU against several. tokens: those of a small model in float32. times: milliseconds a step of the "
            "shape of llama-3.1-8b in bfloat16 by the host's clock, medians of 4 blocks of 32 steps of one program; "
            "keys, values and weights normal; floor: bytes of the weights of a device over the rate of its memory",
            rows[-1:],
            KEY,
        )

    for method in () if given.no_check else given.methods:
        with implementation("xla"):
            for name, found in check(method, places, **small):
                keep("tokens", method, name, found)
                if time.monotonic() > end:
                    break
    model, alone = throughput.random_model(config, dtype), {}
    prompt = np.random.default_rng(1).integers(config.vocab_size, size=(1, given.prompt), dtype=np.int32)
    for name, place in places.items() if given.prompt else ():
        if time.monotonic() > end:
            break
        if place is not None and place.mesh.shape["data"] > 1:  # one row is not split
            continue
        own = model if place is None else distribute(model, place)
        row, logits = prompt_time(own, presets.full(), place, tokens=prompt, dtype=dtype)
        base = alone.setdefault("prompt", logits)
        apart = float(np.abs(logits - base).max() / np.std(base))
        row |= {"difference_of_logits": round(apart, 5), "same_tokens": apart < 0.5, "length": given.prompt, "batch": 1}
        keep("prompt", "full", name, row)
        del own
        gc.collect()
    left = [(method, name) for method in given.methods for name in places]
    while left and time.monotonic() < end:
        method, name = left.pop(0)
        place = places[name]
        own = model if place is None else distribute(model, place)
        settings = {"length": given.length, "batch": given.batch, "block": block, "blocks": blocks}
        row, first = decode_time(own, METHODS[method](given.budget), place, **settings)
        alone.setdefault(method, first)
        keep("times", method, name, {**row, "share_of_same_tokens": round(float(np.mean(first == alone[method])), 4)})
        del own
        gc.collect()
    if left:
        print("no time left for", ", ".join(f"{method} {name}" for method, name in left))
    wrong = [row for row in rows if row.get("same_tokens") is False]
    if wrong:
        raise SystemExit(f"tokens differ from those of one device: {wrong}")


if __name__ == "__main__":
    main()
