"""Tokens per second of the engine, of fixed batches, and of answers that share a prompt.

    python benchmarks/serving.py --out benchmarks/results/serving.json            # a GPU of 80 GB; 25 minutes
    python benchmarks/serving.py --out serving.json --tiny                        # a CPU; a trial of the script

Three workloads, of random weights in the shape of Llama 3.1 8B and random prompts:

  mixed      256 requests, prompts of 1K to 32K tokens and answers of 16 to 1024, both log-uniform. `engine` has as many
             slots as fit; `batches` are `kvjax.generate` calls of the same cache, in order of arrival, each as long as
             its longest answer; `full_rate` are decode steps of all slots at the mean length, without arrivals.
  copied     32 prompts with 8 answers each; each answer has a copy of its prompt.
  shared     the same, with the prompts stored once.

Every program is compiled before the clock starts, by `warm_up` or by a first run. The file has the rows, the device,
versions and the commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from throughput import SHAPES, random_model

import kvjax
from kvjax.evaluate.provenance import provenance
from kvjax.models import Decoder, DecoderConfig

TINY = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=64, layers=2, q_heads=4, kv_heads=2, head_dim=16)


def log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(int)


def requests(rng: np.random.Generator, count: int, prompts: tuple[int, int], answers: tuple[int, int]) -> list[Any]:
    lengths, new = log_uniform(rng, *prompts, count), log_uniform(rng, *answers, count)
    return [(rng.integers(1, 60, n).astype(np.int32), int(m)) for n, m in zip(lengths, new, strict=True)]


def cache_of(model: Decoder, method: str, slots: int, capacity: int) -> kvjax.Cache:
    layers = model.config.layers
    return kvjax.init(kvjax.presets.parse(method), model.spec(batch=slots, capacity=capacity), layers=layers)


def run_engine(model: Decoder, cache: kvjax.Cache, work: list[Any], *, n: int = 1, **settings: Any) -> dict[str, Any]:
    """Seconds to answer all requests, and what the engine counted."""
    engine = kvjax.Engine(model, cache, max_waiting=len(work) * n, **settings)
    del cache
    engine.warm_up()
    start = time.perf_counter()
    sent = [request for prompt, new in work for request in engine.submit(prompt, max_new_tokens=new, n=n)]
    engine.run()
    seconds = time.perf_counter() - start
    failed = sum(request.reason == "error" for request in sent)
    tokens = sum(len(request.tokens) for request in sent)
    counts = engine.stats()
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "fill": counts.fill,
        "steps": counts.steps,
        "prompt_tokens": counts.prompt_tokens,
        "failed": failed,
        "cache_bytes": engine._cache.nbytes.device,
    }


def run_batches(model: Decoder, method: str, slots: int, capacity: int, work: list[Any]) -> dict[str, Any]:
    """The same requests in fixed batches, each with an empty cache, in order of arrival."""
    total = tokens = 0.0
    for trial in (True, False):
        for first in range(0, slots if trial else len(work), slots):
            batch = work[first : first + slots]
            batch += [batch[-1]] * (slots - len(batch))
            new, cache = max(m for _, m in batch), cache_of(model, method, slots, capacity)
            start = time.perf_counter()
            kvjax.generate(model, cache, [p.tolist() for p, _ in batch], max_new_tokens=new)
            if not trial:
                total += time.perf_counter() - start
                tokens += sum(m for _, m in work[first : first + slots])
            del cache
            gc.collect()
    return {"seconds": total, "tokens": tokens, "tokens_per_second": tokens / total}


def full_rate(model: Decoder, method: str, slots: int, capacity: int, length: int, steps: int) -> dict[str, Any]:
    """Tokens per second of decode steps in which all slots hold `length` tokens and none leaves."""
    cache, prompt = cache_of(model, method, slots, capacity), np.ones((slots, length), np.int32)
    block = max(steps // 4, 1)
    run = kvjax.stream(model, cache, prompt, max_new_tokens=steps, block=block)
    run.advance(block)
    jax.block_until_ready(run.logits)
    start, done = time.perf_counter(), 0
    while (found := run.advance(block)).shape[1]:
        done += found.shape[1]
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_second": done * slots / seconds, "length": length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["full", "fier:budget=1024"])
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try the script")
    given = parser.parse_args()
    tiny = given.tiny
    sizes = {"prompts": (8, 64), "answers": (2, 16), "requests": 6, "slots": 2, "long": 96, "groups": 2, "answer": 8}
    if not tiny:
        sizes = {
            "prompts": (1024, 32768),
            "answers": (16, 1024),
            "requests": 256,
            "slots": 10,
            "long": 8192,
            "groups": 32,
            "answer": 256,
        }
    model = random_model(TINY, jnp.float32) if tiny else random_model(SHAPES["llama-3.1-8b"])
    rows: list[dict[str, Any]] = []

    def note(workload: str, method: str, **found: Any) -> None:
        rows.append({"workload": workload, "method": method, **found})
        print(json.dumps(rows[-1]), flush=True)
        data = {"sizes": sizes, "rows": rows, "provenance": provenance()}
        given.out.write_text(json.dumps(data, indent=1, default=str) + "\n")

    slots, capacity = sizes["slots"], sizes["prompts"][1] + sizes["answers"][1]
    settings = {"chunk": 32 if tiny else 2048, "block": 4 if tiny else 16}
    for method in given.methods:
        rng = np.random.default_rng(0)
        work = requests(rng, sizes["requests"], sizes["prompts"], sizes["answers"])
        note("mixed, engine", method, **run_engine(model, cache_of(model, method, slots, capacity), work, **settings))
        gc.collect()
        note("mixed, batches", method, **run_batches(model, method, slots, capacity, work))
        mean = int(np.mean([len(prompt) + new / 2 for prompt, new in work]))
        note("full rate", method, **full_rate(model, method, slots, capacity, mean, 8 if tiny else 256))
        gc.collect()
        long, answer = sizes["long"], sizes["answer"]
        groups = [(rng.integers(1, 60, long).astype(np.int32), answer) for _ in range(sizes["groups"])]
        copied = cache_of(model, method, 8, long + answer)
        note("copied", method, **run_engine(model, copied, groups, n=8, **settings))
        del copied
        gc.collect()
        # The bytes of `copied`, in more slots: a slot holds an answer and the recent block, a prefix the prompt.
        own, places = answer + (64 if tiny else 1024), 1 if tiny else 4
        shared = cache_of(model, method, 8 * places, own)
        by = {"prefixes": places, "prefix_tokens": long}
        note("shared", method, **run_engine(model, shared, groups, n=8, **settings, **by))
        del shared
        gc.collect()


if __name__ == "__main__":
    main()
