"""A prompt of a million tokens on one GPU, read by the model, and decoding after it; half a
million over host memory.

    python benchmarks/million.py [--methods full,fier,quest,pariskv,logquant] \\
        [--length 1048576] [--last 2]
    python benchmarks/million.py --methods fier:host,pariskv:host,freekv --length 524288

A Qwen2.5-7B shape with random bf16 weights reads random tokens in chunks of `--chunk`. With
`--last N` random keys and values replace all but the last N chunks; `--last 0` reads the whole
prompt, some 2e17 FLOPs at a million. A row has the seconds of each chunk, of which the first
compiles, the rate of the last one (with `--last 0` the median of all) by the FLOPs of the
matrix products and of causal attention, the time of the whole prompt at that rate, and
milliseconds per decoded token. Half a million tokens over host memory take 30 GB there: see
`pinned.py` for XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import throughput
from layers import out_of, save, show
from named import names_of
from ttft import METHODS, flops

import kvjax
from kvjax.generation import Stream, prefill
from kvjax.memory import nbytes
from kvjax.models import Decoder


def measure(
    name: str, model: Decoder, given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:  # fmt: skip
    """Keeps a row once the prompt is read, and again with the times of decoding."""
    config, chunk = model.config, given.chunk
    spec = model.spec(
        batch=1, capacity=-(-(given.length + given.steps + given.block) // 128) * 128
    )
    cache = jax.block_until_ready(kvjax.init(METHODS[name](), spec, layers=config.layers))
    before = given.length - given.last * chunk if given.last else 0
    if before:
        cache = throughput.fill(cache, before)
    logits: Any = None
    seconds, rates, rng = [], [], np.random.default_rng(0)
    for start in range(before, given.length, chunk):
        tokens = rng.integers(
            config.vocab_size, size=(1, min(chunk, given.length - start)), dtype=np.int32
        )
        begin = time.perf_counter()
        logits, cache = jax.block_until_ready(
            prefill(model, cache, tokens, chunk=chunk, first_chunk=not start)
        )
        seconds.append(time.perf_counter() - begin)
        rates.append(flops(config, tokens.shape[1], start) / seconds[-1] / 1e12)
        show(
            {
                "method": name,
                "tokens": start + tokens.shape[1],
                "seconds": seconds[-1],
                "tflops": rates[-1],
            }
        )
    if not bool(jnp.all(jnp.isfinite(logits))):
        raise SystemExit(f"{name}: the logits are not finite")
    # The first chunk of each program compiles: that of an empty cache, and that of a filled
    # one.
    rate = rates[-1] if given.last else statistics.median(rates[2:] or rates)
    size = nbytes(cache)
    row = {
        "method": name,
        "length": given.length,
        "layers": config.layers,
        "last": given.last,
        "chunk": chunk,
        "tflops": rate,
        "prompt_seconds": sum(seconds) if not given.last else None,
        "prompt_seconds_at_rate": flops(config, given.length) / rate / 1e12,
        "cache_bytes_device": size.device,
        "cache_bytes_host": size.host,
        "chunk_seconds": seconds,
    }
    keep(row)
    run = Stream(model, cache, logits, given.block + given.steps)
    del cache, logits
    run.advance(given.block)
    keep(
        {
            **row,
            **{
                k: v
                for k, v in throughput.time_steps(run, given.block).items()
                if k.startswith("tpot")
            },
        }
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--methods",
        type=names_of(METHODS),
        default=["full", "fier", "quest", "pariskv", "logquant"],
    )
    parser.add_argument("--length", type=int, default=1 << 20)
    parser.add_argument("--chunk", type=int, default=1 << 15)
    parser.add_argument(
        "--last", type=int, default=2, help="chunks that the model reads; 0: all"
    )
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument(
        "--out",
        type=Path,
        help="default: results/million.json; with --quick nothing is written",
    )
    parser.add_argument(
        "--quick", action="store_true", help="two narrow layers in float32, a short prompt"
    )
    given = parser.parse_args(args)
    config, dtype = throughput.SHAPES["qwen2.5-7b"], "bfloat16"
    if given.quick:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 64,
            "q_heads": 4,
            "kv_heads": 2,
        }
        config, dtype = replace(config, layers=2, windows=(), head_dim=16, **sizes), "float32"
        given.length, given.chunk, given.steps, given.block = 1024, 256, 4, 2
    elif jax.default_backend() != "gpu":
        parser.error("this measures a GPU; --quick runs a small model without one")
    if given.layers:
        config = replace(config, layers=given.layers)
    model = throughput.random_model(config, dtype)
    what = f"{__doc__.splitlines()[0]} A Qwen2.5-7B shape, random weights and tokens, batch 1"

    def keep(row: dict[str, Any]) -> None:
        show({k: v for k, v in row.items() if k != "chunk_seconds"})
        save(out_of(given, "million.json"), what, [row], ("method", "length", "layers", "last"))

    for name in given.methods:
        measure(name, model, given, keep)
        gc.collect()


if __name__ == "__main__":
    main()
