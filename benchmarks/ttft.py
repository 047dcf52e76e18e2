"""Time to first token: prompts of any length through `kvjax.generation.prefill` with its
defaults, and next turns.

    python benchmarks/ttft.py [--shape llama-3.1-8b] [--lengths 65536,131072] [--turn 1024] \\
        [--methods full,fier]

A model of random bf16 weights reads random tokens, batch 1. Each method reads the shortest
prompt once untimed, which compiles; then every length `--calls` times into an empty cache, of
which the median is kept, and a turn of `--turn` tokens after 32768 tokens and after the longest
prompt. The method `floor` is the same prompt in one chunk, whose attention is one cuDNN call
per layer. Each row is written as soon as it is measured.

The blocks of a prompt of `full|sparse:0.1` attend to a tenth of the blocks stored before them
(`sparse_prompt` of `prefill`).

FLOPs are those of the matrix products and of causal attention; tflops is their rate.
`cache_bytes` and `host_bytes` are the cache's bytes on the device and on the host, and
`peak_over_cache` is the largest amount of device memory in use so far beyond the weights and
the cache: activations of a chunk, if nothing is kept twice. It never falls within a process:
measure one method per run to compare methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import throughput
from layers import out_of, save, show
from named import names_of

import kvjax
from kvjax import presets
from kvjax.generation import prefill
from kvjax.memory import nbytes, shapes
from kvjax.models import Decoder, DecoderConfig

METHODS: dict[str, Callable[[], Any]] = {
    "full": presets.full,
    "fier": lambda: presets.fier(2048),
    "quest": lambda: presets.quest(2048),
    "pariskv": lambda: presets.pariskv(2048),
    "logquant": presets.logquant,
    "kivi": presets.kivi,
    "fier:host": lambda: presets.fier(2048, store="host"),
    "pariskv:host": lambda: presets.pariskv(2048, store="host"),
    "freekv": lambda: presets.freekv(2048),
    "h2o": lambda: presets.h2o(2048),
    "h2o:queries=none": lambda: presets.h2o(2048, queries=None),
    "mikv": lambda: presets.mikv(2048),
}
FLOOR = "floor: one cuDNN call"
TURN_AFTER = 32768


def flops(config: DecoderConfig, tokens: int, before: int = 0) -> float:
    """FLOPs of the matrix products of `tokens` tokens, with only the last one's logits, and of
    attention after `before` more."""
    hidden, heads = config.hidden_size, (config.q_heads + config.kv_heads) * config.head_dim
    layer = 2 * hidden * heads + 3 * hidden * config.intermediate_size
    attention = 4 * config.q_heads * config.head_dim * tokens * (before + tokens / 2)
    return config.layers * (2.0 * layer * tokens + attention) + 2.0 * hidden * config.vocab_size


def memory_in_use(model: Decoder, spec: kvjax.CacheSpec, policy: Any) -> dict[str, int | None]:
    """Bytes of the cache, and the largest amount of device memory in use so far beyond it and
    the weights.
    """
    cache = nbytes(shapes(lambda: kvjax.init(policy, spec, layers=model.config.layers)))
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    over = None if peak is None else peak - nbytes(model).device - cache.device
    return {"cache_bytes": cache.device, "host_bytes": cache.host, "peak_over_cache": over}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = jax.block_until_ready(call())
    return time.perf_counter() - start, out


def measure(
    name: str, policy: Any, config: DecoderConfig, model: Decoder, given: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    floor = name == FLOOR
    longest = max(given.lengths)
    spec = model.spec(batch=1, capacity=-(-(longest + given.turn + 64) // 128) * 128)
    share = float(name.partition("|sparse:")[2]) if "|sparse:" in name else None
    tokens = np.random.default_rng(0).integers(
        0, config.vocab_size, (1, longest + given.turn), dtype=np.int32
    )

    def row(what: str, length: int, count: int, before: int, seconds: list[float]) -> None:
        took = statistics.median(seconds)
        rate = flops(config, count, before) / took / 1e12
        sizes = {"shape": given.shape, "method": name, "what": what, "tokens": length}
        found = {
            **sizes,
            "seconds": took,
            "tflops": rate,
            "runs": seconds,
            **memory_in_use(model, spec, policy),
        }
        show({k: v for k, v in found.items() if k != "runs"})
        keep(found)

    def read(length: int, cache: Any) -> tuple[float, Any]:
        how: dict[str, Any] = {"chunk": length} if floor else {"sparse_prompt": share}
        return timed(lambda: prefill(model, cache, tokens[:, :length], **how))

    def empty() -> Any:
        return jax.block_until_ready(kvjax.init(policy, spec, layers=config.layers))

    if not floor:
        took, (_, cache) = read(min(given.lengths), empty())
        show({"method": name, "tokens": min(given.lengths), "seconds with compilation": took})
        del cache
    for length in given.lengths:
        seconds, turns = [], []
        for i in range(given.calls + floor):
            took, (logits, cache) = read(length, empty())
            if not bool(jnp.all(jnp.isfinite(logits))):
                raise SystemExit(f"{name}: the logits are not finite")
            seconds.append(took)
            if length == longest and not floor and i == given.calls - 1:
                turns.append(_turn(model, cache, tokens, length, given.turn))
            del cache
            gc.collect()
        row("prompt", length, length, 0, seconds[floor:])
        if turns:
            row("turn", length, given.turn, length, turns[0])
    if not floor:
        _, (_, cache) = read(min(TURN_AFTER, longest), empty())
        after = min(TURN_AFTER, longest)
        row("turn", after, given.turn, after, _turn(model, cache, tokens, after, given.turn))


def _narrow(config: DecoderConfig, given: argparse.Namespace) -> DecoderConfig:
    """`config`, or two narrow layers of it with --quick."""
    small = {
        "layers": 2,
        "windows": (),
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 64,
        "head_dim": 16,
    }
    return dataclasses.replace(config, **small) if given.quick else config


def _turn(model: Decoder, cache: Any, tokens: np.ndarray, after: int, size: int) -> list[float]:
    """Seconds of a second turn, as the first compiles; it begins at most half a turn further."""
    part = tokens[:, after : after + size]
    # Both must fit. The first stores few of its tokens, in a program of the same shape.
    few = 1 if cache.spec.capacity < after + 2 * size else max(size // 2, 1)
    _, (_, cache) = timed(
        lambda: prefill(model, cache, part, np.full(1, few, np.int32), first_chunk=False)
    )
    took, _ = timed(lambda: prefill(model, cache, part, first_chunk=False))
    return [took]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(throughput.SHAPES), default="llama-3.1-8b")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[65536, 131072],
    )
    parser.add_argument("--turn", type=int, default=1024)
    parser.add_argument(
        "--methods", type=names_of(["floor", *METHODS]), default=["floor", *METHODS]
    )
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="default: results/ttft.json; with --quick nothing is written"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two narrow layers in float32, short prompts"
    )
    given = parser.parse_args(args)
    config, dtype = throughput.SHAPES[given.shape], "bfloat16"
    config = _narrow(config, given)
    if given.quick:
        given.lengths, given.turn, dtype = [600, 1200], 64, "float32"
    elif jax.default_backend() != "gpu":
        parser.error("this measures a GPU; --quick runs a small model without one")
    model = throughput.random_model(config, dtype)
    what = f"{__doc__.splitlines()[0]} Random weights and tokens, batch 1; tokens of a turn: {given.turn}"
    key = ("shape", "method", "what", "tokens")

    def keep(row: dict[str, Any]) -> None:
        save(out_of(given, "ttft.json"), what, [row], key)

    for name in given.methods:
        policy = presets.full() if name == "floor" else METHODS[name.partition("|")[0]]()
        measure(FLOOR if name == "floor" else name, policy, config, model, given, keep)
        gc.collect()


if __name__ == "__main__":
    main()
