"""Tokens per second at the largest batch that device and host memory hold together, by the hit
rate of the hot set.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.95 XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=82 \\
        python benchmarks/host_batch.py [--method quest] [--hot 4096] [--steady 0,0.9,1] \\
        [--host-bytes 82e9] [--plan]

A Llama-3.1-8B shape with random weights and random keys and values. The first two layers attend
to everything. Of the others, as many keep their history on the device as fit there, and the
rest on the host with a hot set. `--plan` prints the result of the formulas in `plan` and runs
nothing.

The queries of a random model turn in every step, which those of a trained model do not. So a
step selects by `steady` x a constant query + sqrt(1 - steady^2) x its own, of equal length: 0
selects new tokens in each step, 1 always the same ones. "hit_rate" is measured, for the
selected units; `hit_rates.py` has those of trained models.

The pool of pinned memory grows to its limit, whatever part of it holds arrays. So set the limit
only a little above the need that `--plan` prints: with a limit of 110 GB for 71 GB of arrays, a
host of 128 GB killed the process while another one ran.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import throughput
from jax import Array
from layers import implementation, out_of, save, show

import kvjax
from kvjax import CacheSpec, Full, PerLayer, Retrieval, presets
from kvjax.generation import Stream
from kvjax.memory import nbytes
from kvjax.numerics.partial import Logits

DENSE = 2  # first layers that attend to everything
BESIDE = 6e9  # bytes of the device for logits, temporaries and fragments


@dataclass(frozen=True)
class Steady:
    """A selector that calls `selector` with queries that turn less than those of the model."""

    selector: Any
    share: float

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "selector"), name)

    def _steady(self, q: Array) -> Array:
        own = q / jnp.maximum(jnp.linalg.norm(q, axis=-1, keepdims=True), 1e-6)
        same = jax.random.normal(jax.random.key(5), q.shape[1:], q.dtype)[None]
        same = same / jnp.linalg.norm(same, axis=-1, keepdims=True)
        mixed = self.share * same + (1 - self.share**2) ** 0.5 * own
        return mixed.astype(q.dtype) * q.shape[-1] ** 0.5

    def score(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        out: Array = self.selector.score(ix, self._steady(q), logits=logits)
        return out

    def select(self, ix: Any, q: Array, among: Any, *, logits: Logits) -> Any:
        return self.selector.select(ix, self._steady(q), among, logits=logits)


@dataclass(frozen=True)
class Plan:
    """The number of rows that fit, and the number of layers that keep their history on the
    device.
    """

    rows: int
    on_device: int  # past the dense ones
    device_bytes_row: float
    host_bytes_row: float


def arrays_in_pool(limit: float, size: float) -> int:
    """The number of arrays of `size` bytes that fit in XLA's pool of pinned memory; no array
    spans two of its regions.

    The first region is the smallest power of two that holds an array, from 2 MiB on. The second
    is as large, each later one twice as large as the one before, and the last one is the rest
    of the limit.
    """
    region, taken, found = float(1 << 21), 0.0, 0
    while region < size:
        region *= 2
    again = True
    while (part := min(region, limit - taken)) >= size:
        found, taken = found + int(part // size), taken + part
        region, again = (region, False) if again else (2 * region, False)
    return found


def plan(
    policy: Retrieval,
    on_host: Any,
    spec: CacheSpec,
    layers: int,
    device_bytes: float,
    host_bytes: float,
    rows: int | None = None,
) -> Plan:
    """The split of layers with the most rows, or for given `rows` the one with the fewest
    layers on the host.

    A token takes 2 K D e bytes of keys and values, and its index. A dense layer keeps
    everything on the device. A layer with its history on the host keeps index, recent block,
    hot set and 4 K bytes per page on the device.
    """
    K, D, S, e = spec.kv_heads, spec.head_dim, spec.capacity, jnp.dtype(spec.dtype).itemsize
    pair, index = 2 * K * D * e, policy.selector.bytes_per_token(spec)
    recent = pair * (policy.demote.slots(policy.local) + policy.sink)
    hot = on_host.tokens * (pair + 8 * K / on_host.page) + 4 * K * S / on_host.page
    array = S * on_host.store.bytes_per_token(spec)
    best = Plan(0, 0, 0.0, 0.0)
    for on_device in range(layers - DENSE, -1, -1):
        away = layers - DENSE - on_device
        device = (
            DENSE * S * pair
            + on_device * S * pair
            + (layers - DENSE) * (S * index + recent)
            + away * hot
        )
        most = max(int(device_bytes // device), 0)
        while most and arrays_in_pool(host_bytes, most * array) < away:
            most -= 1
        if rows is not None and most >= rows:
            return Plan(rows, on_device, device, away * array)
        if most > best.rows:
            best = Plan(most, on_device, device, away * array)
    if rows is not None or not best.rows:
        more = "lower --length, or give more --device-bytes or --host-bytes"
        raise SystemExit(f"--rows {rows or 1}: at most {best.rows} fit; {more}")
    return best


def measure(
    model: Any, policies: PerLayer, length: int, rows: int, steps: int, block: int
) -> tuple[dict[str, Any], float | None]:
    """The result of `throughput.time_steps`, and the units read from the host per step, head
    and layer.
    """
    spec = model.spec(batch=rows, capacity=length)
    cache = throughput.fill(
        kvjax.init(policies, spec, layers=model.config.layers), length - block - steps - 4
    )
    logits = jnp.zeros((rows, model.config.vocab_size), jnp.float32)
    run = Stream(model, cache, logits, block + steps)
    del cache, logits
    run.advance(block)

    def loads() -> float | None:
        stores = [getattr(layer.state, "store", None) for layer in run.cache.layers]
        found = [np.asarray(store.hot.loads) for store in stores if hasattr(store, "hot")]
        return float(np.mean(found)) if found else None

    before = loads()
    times = throughput.time_steps(run, block)
    after = loads()
    size = nbytes(run.cache)
    row = {**times, "cache_bytes_device": size.device, "cache_bytes_host": size.host}
    return row, None if before is None or after is None else (after - before) / steps


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reals: Callable[[str], list[float]] = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--method", choices=["fier", "quest", "pariskv"], default="quest")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--hot", type=int, default=4096, help="tokens of a row and KV head")
    parser.add_argument(
        "--float8", action="store_true", help="keep the history on the host in 8-bit floats"
    )
    parser.add_argument("--steady", type=reals, default=[0.9, 0.0, 1.0])
    parser.add_argument(
        "--rows",
        type=int,
        help="in place of the most rows that fit; as few layers as possible go to the host",
    )
    parser.add_argument("--device-bytes", type=float, default=135e9)
    parser.add_argument(
        "--host-bytes", type=float, default=82e9, help="limit of the pool of pinned memory"
    )
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument(
        "--implementation",
        default="default",
        help="or kernels: also those without a measurement",
    )
    parser.add_argument("--plan", action="store_true", help="say what fits and run nothing")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: results/host_batch.json; with --quick nothing is written",
    )
    parser.add_argument(
        "--quick", action="store_true", help="four narrow layers in float32 and two rows"
    )
    given = parser.parse_args(args)
    if not (given.quick or given.plan) and jax.default_backend() != "gpu":
        parser.error("this measures a GPU; --quick runs a small model without one")
    config, dtype = throughput.SHAPES["llama-3.1-8b"], "bfloat16"
    if given.quick:
        small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
        config, dtype = replace(config, layers=4, windows=(), **small), "float32"
        given.rows, given.device_bytes = given.rows or 2, BESIDE + 1e9
    heads = {
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }
    spec = CacheSpec(batch=1, capacity=given.length, dtype=jnp.dtype(dtype), **heads)
    base = (
        presets.find(given.method)
        .policies(budget=given.budget, dense_layers=0, dense_capacity=0)
        .rest
    )
    assert isinstance(base, Retrieval)
    kept = "float8" if given.float8 else "host"
    where = {"store": f"{kept}+{given.hot}" if given.hot else kept}
    hosted = (
        presets.find(given.method).policies(budget=given.budget, dense_layers=0, **where).rest
    )
    assert isinstance(hosted, Retrieval)
    store: Any = hosted.store
    parameters = 16e9 if not given.quick else 0.0
    room = given.device_bytes - parameters - BESIDE
    found = plan(base, store, spec, config.layers, room, given.host_bytes, given.rows)
    rows = found.rows
    print(
        f"{found}: {rows * found.device_bytes_row / 1e9:.1f} GB of caches on the device, ",
        end="",
    )
    print(f"{rows * found.host_bytes_row / 1e9:.1f} GB on the host", flush=True)
    if given.plan:
        return
    model = throughput.random_model(config, dtype)
    what = f"tokens a second of a Llama-3.1-8B shape with random weights, length {given.length}, budget {given.budget}"
    key = ("method", "store", "hot", "rows", "steady", "implementation", "backend")
    for steady in given.steady:
        selector = Steady(base.selector, steady)
        device = replace(base, selector=selector)
        host = replace(base, selector=selector, store=store)
        away = config.layers - DENSE - found.on_device
        policies = PerLayer.of([Full()] * DENSE + [device] * found.on_device + [host] * away)
        with implementation(given.implementation):
            times, read = measure(model, policies, given.length, rows, given.steps, given.block)
        row = {
            "method": given.method,
            "store": type(store.store).__name__,
            "hot": given.hot,
            "rows": rows,
            "layers_on_host": away,
            "steady": steady,
            "hit_rate": None
            if read is None
            else 1 - read / (base.selected // base.selector.unit),
            "tokens_per_second": times["tokens_per_second"],
            **{name: x for name, x in times.items() if name != "tokens_per_second"},
            "implementation": given.implementation,
        }
        show(row)
        save(out_of(given, "host_batch.json"), what, [row], key)
        gc.collect()


if __name__ == "__main__":
    main()
