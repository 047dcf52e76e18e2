"""Checks the kernels on this process's GPU or TPU against their references, and times them,
alone and in whole steps.

A row of results is plain JSON. `error` is the share of selected tokens that differ from those
of plain JAX, or the difference of outputs over their norm where nothing is selected.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import CacheSpec, ops, presets
from kvjax.kernels_pallas import simt
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import quantize_1bit

BUDGET = 2048  # tokens that a step reads
LAYERS = 3  # of a call, more than fit into the L2 cache
CHUNK = 4096  # tokens that are stored at once
LAYER: dict[str, Any] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}  # of Llama-3.1-8B
TITLES = "what", "us", "plain JAX", "GB/s", "error", "kernels"


class Work(NamedTuple):
    """Something to measure: run(*args), made when it is its turn. With several layers, run
    returns its first argument too, and check(*args) has the result that is compared."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    bytes: int  # that it reads at least; 0 if not stated
    layers: int = 1
    check: Callable[..., Any] | None = None


def works(length: int, batch: int) -> dict[str, Work]:
    """Operations by themselves, and steps of presets, at `length` tokens of `batch` rows."""
    spec = CacheSpec(batch=batch, capacity=length, dtype=jnp.dtype(jnp.bfloat16), **LAYER)
    rows = batch * spec.kv_heads
    G = spec.q_heads // spec.kv_heads
    D = spec.head_dim

    def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    def top_k() -> tuple[Any, Any]:
        return partial(ops.top_k, k=BUDGET), (
            normal(0, rows, length),
            jnp.ones((rows, length), bool),
        )

    def top_k_grouped() -> tuple[Any, Any]:
        parts = [
            (normal(1, batch, spec.kv_heads, G, length), jnp.ones((batch, 1, 1, length), bool))
        ]
        return partial(ops.top_k_grouped, group_reduce="mean_softmax", k=BUDGET), (parts,)

    def score_pages() -> tuple[Any, Any]:
        low, high = (
            normal(2, batch, spec.kv_heads, length // 16, D, dtype=spec.dtype) + x
            for x in (-1, 1)
        )
        return partial(ops.score_pages, logits=Logits(D**-0.5)), (
            normal(3, batch, spec.kv_heads, G, D),
            low,
            high,
        )

    def score_1bit() -> tuple[Any, Any]:
        keys = normal(7, batch, spec.kv_heads, length, D, dtype=spec.dtype)
        q = normal(8, batch, spec.kv_heads, G, D, dtype=spec.dtype)
        return partial(ops.score_1bit, logits=Logits(D**-0.5)), (q, quantize_1bit(keys, 32))

    def step(policy: Any) -> tuple[Any, Any]:
        def run(cache: Any, q: Any, k: Any, v: Any) -> Any:
            # An output that nobody reads is not computed.
            layers = []
            outs = []
            for layer in cache.layers:
                out, layer = kvjax.attention(layer, q, k, v, flush=False)
                # The next layer waits, and has the same query.
                q, out = jax.lax.optimization_barrier((q, out))
                layers.append(layer)
                outs.append(out)
            return outs, kvjax.Cache(tuple(layers))

        cache = kvjax.Cache(
            tuple(_filled(policy, spec, length - 256, seed) for seed in range(LAYERS))
        )
        q, k, v = (
            normal(4 + i, batch, 1, n, D, dtype=spec.dtype) for i, n in enumerate((32, 8, 8))
        )
        return run, (cache, q, k, v)

    def read(cache: Any, q: Any, k: Any, v: Any) -> Any:
        """The tokens that the first layer reads, and whether each is one; its output if it
        selects nothing.
        """
        out, _, info = kvjax.attention_info(cache.layers[0], q, k, v, flush=False)
        return (
            out
            if info is None or info.selection is None or info.positions is None
            else (info.positions, info.positions >= 0)
        )

    chosen: dict[str, Any] = {"budget": BUDGET, "dense_capacity": 0}
    policies = {
        "full": presets.full(),
        "fier": presets.fier(**chosen),
        "quest": presets.quest(**chosen),
        "pariskv": presets.pariskv(**chosen),
        "logquant": presets.logquant(),
    }
    on_tpu = jax.default_backend() == "tpu"
    if on_tpu:  # which reads pages of a cache faster than tokens
        policies["fier:page=32"] = presets.fier(page=32, **chosen)
    found = {
        "top_k": Work(top_k, 4 * rows * length),
        "top_k_grouped": Work(top_k_grouped, 4 * G * rows * length),
        "score_pages": Work(score_pages, 4 * D * rows * length // 16),
    }
    if on_tpu:
        found["score_1bit"] = Work(score_1bit, (D // 8 + 4 * D // 32 + 4 * G) * rows * length)
    pair = 4 * D * rows * length
    for name, policy in policies.items():
        found[f"step {name}"] = Work(
            partial(step, policy.rest), pair if name == "full" else 0, LAYERS, read
        )
    return found


def _filled(policy: Any, spec: CacheSpec, length: int, seed: int) -> Any:
    """A layer with `length` tokens in each row, whose keys and values are normal random
    numbers.
    """
    layer = kvjax.init_layer(policy, spec)
    for start in range(0, length, CHUNK):
        key = jax.random.fold_in(jax.random.key(seed), start)
        layer = _store(layer, key, np.int32(min(CHUNK, length - start)), spec)
    return layer


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _store(layer: Any, key: jax.Array, count: jax.Array, spec: CacheSpec) -> Any:
    shape = spec.batch, spec.kv_heads, CHUNK, spec.head_dim
    k, v = (jax.random.normal(own, shape, spec.dtype) for own in jax.random.split(key))
    return dataclasses.replace(
        layer,
        state=layer.policy.prefill(layer.state, k, v, jnp.full(spec.batch, count, jnp.int32)),
    )


def measure(
    length: int, batch: int, *, target: simt.Target | None = None, only: Sequence[str] | None = None, calls: int = 20,
    reference: bool = True,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each of `works`: microseconds of the kernels and of plain JAX, and how far the
    results differ.

    With `target`, the kernels take the form and block sizes that they have on that card. A row
    that fails has its `failed` instead of numbers, and the next one is measured.
    """
    card: dict[str, Any] = {}
    if jax.default_backend() != "tpu":
        form = target or simt.target()
        card = {"form": form.capability, "clusters": form.clusters}
    for name, work in works(length, batch).items():
        if only is not None and name not in only:
            continue
        row: dict[str, Any] = {"what": name, "length": length, "batch": batch, **card}
        try:
            row |= _measured(work, target, calls, reference)
        except (
            Exception
        ) as error:  # one kernel that fails on a card nobody tried must not hide the others
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row


def _measured(
    work: Work, target: simt.Target | None, calls: int, reference: bool
) -> dict[str, Any]:
    results = []
    row = {}
    for implementation in ("mosaic", "xla") if reference else ("mosaic",):
        run, args = work.make()
        with ExitStack() as stack:
            if target is not None:
                stack.enter_context(simt.build_for(target))
            stack.enter_context(ops.use("xla" if implementation == "xla" else None))
            if reference:
                checked = work.check or run
                results.append(
                    jax.device_get(jax.jit(lambda *args: checked(*args))(*args))  # noqa: B023
                )
            program = (
                jax.jit(run, donate_argnums=0 if work.layers > 1 else ()).lower(*args).compile()
            )
        times = _time(program, args, work, calls if implementation == "mosaic" else 3)
        us = sum(times.values()) / work.layers
        if implementation == "xla":
            row["xla_us"] = round(us, 2)
        else:
            row["us"] = round(us, 2)
            by_kernel: Any = {
                _short(name): round(t / work.layers, 2)
                for name, t in times.items()
                if "kvjax_" in name
            }
            row["kernels"] = by_kernel
            if work.bytes:
                row["GB/s"] = round(work.bytes / us / 1e3)
    if reference:
        row["error"] = _difference(*results)
    return row


def _time(program: Any, args: Any, work: Work, calls: int) -> dict[str, float]:
    """Microseconds of a call in the kernels of each name."""
    state = args[0]
    rest = args[1:]

    def call() -> Any:
        nonlocal state
        if work.layers == 1:
            return program(state, *rest)
        out, state = program(state, *rest)
        return out

    found = kernel_times(call, calls)
    return {name: statistics.median(each) * len(each) / calls for name, each in found.items()}


def _short(name: str) -> str:
    return name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel")


def _difference(got: Any, want: Any) -> float:
    """The share of slots that only one of two selections has, or the relative difference of two
    arrays.
    """
    if isinstance(got, tuple):
        (slots, valid), (others, theirs) = (
            [np.asarray(a).reshape(-1, a.shape[-1]) for a in x] for x in (got, want)
        )
        rows = zip(slots, valid, others, theirs, strict=True)
        apart = [
            len(set(a[ok].tolist()) ^ set(b[also].tolist())) / max(2 * ok.sum(), 1)
            for a, ok, b, also in rows
        ]
        return float(np.mean(apart))
    a, b = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)


def kernel_times(call: Callable[[], Any], calls: int) -> dict[str, list[float]]:
    """Microseconds of each kernel that `calls` calls start on the device, by name, after two
    calls that warm up.

    The profiler tells them. Where it sees none, as it may not be allowed to, the host's clock
    does, with one name.
    """
    for _ in range(2):
        jax.block_until_ready(call())
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines:
                    # A GPU tells its kernels, and a TPU whole programs.
                    of_gpu = "GPU" in plane.name and "Stream" in line.name
                    of_tpu = "TPU" in plane.name and line.name == "XLA Modules"
                    for event in line.events if of_gpu or of_tpu else ():
                        found.setdefault(event.name, []).append(event.duration_ns / 1e3)
    if not found:
        for _ in range(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            found.setdefault("the host's clock", []).append(1e6 * (time.perf_counter() - start))
    return found


def columns(row: dict[str, Any]) -> list[str]:
    """A row of the printed table, under `TITLES`."""
    if "failed" in row:
        return [row["what"], "failed", "", "", "", row["failed"]]
    parts = ", ".join(f"{name} {us:g}" for name, us in row["kernels"].items())
    numbers = (f"{row[name]:g}" if name in row else "" for name in ("us", "xla_us", "GB/s"))
    return [row["what"], *numbers, f"{row['error']:.1e}" if "error" in row else "", parts]
