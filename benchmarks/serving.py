"""Tokens per second of the engine, of fixed batches, and of answers that share a prompt.

    python benchmarks/serving.py --parts engine batches full --methods full  # a GPU of 80 GB
    python benchmarks/serving.py --tiny --out serving.json  # a CPU; a trial of the script

Random weights in the shape of Llama 3.1 8B, and random prompts. The parts:

  engine     the first --requests of 256 requests, with prompts of 1K to 32K tokens and answers
             of 16 to 1024, both log-uniform, by a `kvjax.Engine`. `busy_tokens_per_second`
             counts the blocks in which all slots decode and no prompt is read;
             `loop_tokens_per_second` is the rate of `full` for rows of the lengths that the
             slots had meanwhile, and `busy_share` the quotient.
  sizes      the same by an engine whose slots, in the same memory, are of three capacities
             (`small_slots`).
  batches    the same by `kvjax.generate`, in batches in order of arrival, each as long as its
             longest answer. They have a row more than the engine has slots, for the row into
             which it reads prompts. --every 4 runs every fourth.
  full       the engine's loop, called by itself: all slots decode at the mean length of a
             request.
  copied     32 prompts with 8 answers each; each answer has a copy of its prompt.
  shared     the same, with the prompts stored once, in more slots of at most the same bytes.
  rollout    decode steps of --rows rows of 32K tokens; the method `einsum` is the attention of
             tunix's sampler: one product with all slots of a cache [B, S, K, D], of which a
             mask hides the empty ones.
  groups     the same as `copied`, by `kvjax.generate`, in batches of as many rows as `copied`
             has slots, and one.

--layers 6 is for less time: with so many of the 32 layers and as large a part of the
vocabulary, weights, products and the memory of caches are all 6/32, and the slots stay.

Every program is compiled before the clock starts, and kept on disk for the next call. A row is
written to results/serving.json as soon as it is measured, and replaces the row of the same
settings. After --minutes a part ends early, and its rates are those until then: `answered`
counts the requests.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass
from layers import out_of, save, show
from named import caches
from throughput import SHAPES, fill, random_model

import kvjax
from kvjax.compiling import use_compilation_cache
from kvjax.generation import warm_up
from kvjax.generation.loops import PAD, Flat, LoopInputs, decode_loop
from kvjax.models import Decoder, DecoderConfig
from kvjax.policies import Info
from kvjax.serve.requests import STOPS

TINY = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=3,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
)
PARTS = ("engine", "sizes", "batches", "full", "copied", "shared", "groups", "rollout")
KEY = ("part", "method", "requests", "layers", "slots", "block", "chunk", "prompt_tokens")
SIZES = {
    False: {
        "prompts": (1024, 32768),
        "answers": (16, 1024),
        "group": 8192,
        "answer": 256,
        "own": 1280,
        "copied": 32,
        "large": 6,
        "small": {15360: 6, 6144: 7},
        "rollout": 32768,
    },
    True: {
        "prompts": (8, 64),
        "answers": (2, 16),
        "group": 600,
        "answer": 8,
        "own": 400,
        "copied": 8,
        "large": 1,
        "small": {40: 1, 24: 1},
        "rollout": 100,
    },
}


@register_dataclass
@dataclass(frozen=True)
class EinsumState:
    k: Array  # [B, S, K, D]
    v: Array
    length: Array  # i32[B], the same in all rows
    overflow: Array  # bool[B]


@dataclass(frozen=True)
class Einsum(kvjax.Policy):
    """A cache of tunix's samplers: rows of one length, and products with all slots."""

    def init(self, spec: kvjax.CacheSpec) -> EinsumState:
        shape = spec.batch, spec.capacity, spec.kv_heads, spec.head_dim
        k, v = (jnp.zeros(shape, spec.dtype) for _ in range(2))
        return EinsumState(k, v, jnp.zeros(spec.batch, jnp.int32), jnp.zeros(spec.batch, bool))

    def prefill(self, st: EinsumState, k: Array, v: Array, lengths: Array) -> EinsumState:
        def put(old: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(
                old, jnp.swapaxes(new, 1, 2).astype(old.dtype), st.length[0], axis=1
            )

        return replace(st, k=put(st.k, k), v=put(st.v, v), length=st.length + lengths)

    def update(self, st: EinsumState, k: Array, v: Array, active: Array) -> EinsumState:
        return self.prefill(st, k, v, active.astype(jnp.int32))

    def attend(self, st: EinsumState, q: Array, step: Any) -> tuple[Array, EinsumState, Any]:
        logits = step.logits.of(jnp.einsum("bkgd,bskd->bkgs", q, st.k))
        seen = jnp.arange(st.k.shape[1])[None] < st.length[:, None]
        logits = jnp.where(seen[:, None, None], logits, -2.38e38)
        weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(st.v.dtype)
        attended = jnp.broadcast_to(st.length.astype(jnp.float32)[:, None], q.shape[:2])
        return jnp.einsum("bkgs,bskd->bkgd", weights, st.v), st, Info(attended, None)


def log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(int)


def mixed_requests(prompts: tuple[int, int], answers: tuple[int, int], count: int) -> list[Any]:
    """The first `count` of 256 requests: their prompts and numbers of new tokens."""
    rng = np.random.default_rng(0)
    lengths, new = log_uniform(rng, *prompts, 256), log_uniform(rng, *answers, 256)
    return [
        (rng.integers(1, 60, n).astype(np.int32), int(m))
        for n, m in zip(lengths, new, strict=True)
    ][:count]


def cache_of(model: Decoder, method: str, slots: int, capacity: int) -> kvjax.Cache:
    layers, policy = (
        model.config.layers,
        Einsum() if method == "einsum" else kvjax.presets.parse(method),
    )
    return kvjax.init(policy, model.spec(batch=slots, capacity=capacity), layers=layers)


def run_engine(engine: kvjax.Engine, work: list[Any], n: int, minutes: float) -> dict[str, Any]:
    """Answers all requests, each n times; the rates, and what the engine counted."""
    begin = time.perf_counter()
    engine.warm_up(draws=False)
    cache_bytes, warm = engine._slots.cache.nbytes.device, time.perf_counter() - begin
    start = last = time.perf_counter()
    sent = [
        request
        for prompt, new in work
        for request in engine.submit(prompt, max_new_tokens=new, n=n)
    ]
    before, asked, busy, busy_tokens, held = engine.stats(), 0, 0.0, 0, np.zeros(engine.slots)
    while any(not request.done for request in sent) and last - start < 60 * minutes:
        engine.step()
        # A step returns the tokens of the block before; but on a GPU it waits for its own,
        # whose loop asks the host whether to go on. So the clock waits for this block
        # everywhere, and counts its tokens.
        jax.block_until_ready([block.decoded.words for block in engine._blocks])
        now, counts = time.perf_counter(), engine.stats()
        asked, before_it = sum(request.asked for request in sent), asked
        if counts.prompt_tokens == before.prompt_tokens and counts.decoding == counts.slots:
            busy, busy_tokens = busy + now - last, busy_tokens + asked - before_it
            held += (now - last) * np.sort(
                [len(one.prompt) + one.asked for _, one in engine._running()]
            )
        last, before = now, counts
    seconds = last - start
    counts = engine.stats()
    for request in sent:
        engine.cancel(request)
    engine.run()
    return {
        "seconds": seconds,
        "tokens": counts.new_tokens,
        "tokens_per_second": counts.new_tokens / seconds,
        "busy_seconds": busy,
        "busy_tokens_per_second": busy_tokens / busy if busy else None,
        "busy_lengths": (held / busy).round().astype(int).tolist() if busy else None,
        "fill": counts.fill,
        "steps": counts.steps,
        "prompt_tokens_read": counts.prompt_tokens,
        "answered": sum(request.reason in ("length", "stop") for request in sent),
        "failed": sum(request.reason == "error" for request in sent),
        "cache_bytes": cache_bytes,
        "warm_up_seconds": warm,
    }


def run_batches(
    model: Decoder,
    method: str,
    rows: int,
    capacity: int,
    work: list[Any],
    minutes: float,
    every: int = 1,
) -> dict[str, Any]:
    """The same requests in fixed batches, each with an empty cache, in order of arrival."""
    begin = time.perf_counter()
    longest, most = (
        max(sizes) for sizes in zip(*((len(prompt), new) for prompt, new in work), strict=True)
    )
    for tokens in sorted({max(longest // 8, 1), longest}):
        warm_up(
            model,
            cache_of(model, method, rows, capacity),
            tokens,
            max_new_tokens=min(most, capacity - longest),
        )
    warm = time.perf_counter() - begin
    seconds = tokens = answered = 0.0
    for first in range(0, len(work), rows * every):
        batch = work[first : first + rows]
        own = batch + [batch[-1]] * (rows - len(batch))
        cache = jax.block_until_ready(cache_of(model, method, rows, capacity))
        start = time.perf_counter()
        kvjax.generate(
            model,
            cache,
            [prompt.tolist() for prompt, _ in own],
            max_new_tokens=max(m for _, m in own),
        )
        seconds += time.perf_counter() - start
        tokens += sum(new for _, new in batch)
        answered += len(batch)
        del cache
        if seconds > 60 * minutes:
            break
    found = {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "answered": answered,
    }
    return {**found, "warm_up_seconds": warm}


def full_rate(
    model: Decoder, method: str, capacity: int, lengths: Sequence[int], calls: int
) -> dict[str, Any]:
    """Tokens per second of the engine's loop, of rows of random keys and values, in calls of 64
    steps. Halfway through, the rows are as long as `lengths`, unless they would then end beyond
    the capacity."""
    rng, steps, slots = (
        np.random.default_rng(0),
        min(64, capacity // (4 * (1 + calls))),
        len(lengths),
    )
    taken = steps * (1 + calls)
    cache = fill(
        cache_of(model, method, slots, capacity),
        np.clip(np.array(lengths) - taken // 2, 1, capacity - taken),
    )
    logits: Any = jnp.asarray(rng.standard_normal((slots, model.config.vocab_size), np.float32))
    flat, active = Flat.of(model), jnp.ones(slots, bool)
    inputs = LoopInputs(
        draws=None,
        first=np.zeros(slots, np.int32),
        limit=np.full(slots, steps, np.int32),
        stop=np.full((slots, STOPS), PAD, np.int32),
    )
    seconds = []
    for _ in range(1 + calls):
        start = time.perf_counter()
        done, _ = decode_loop(flat, cache, logits, active, inputs, measure=False)
        cache, logits = done.cache, jax.block_until_ready(done.logits)
        seconds.append(time.perf_counter() - start)
    rate = steps * slots / float(np.median(seconds[1:]))
    return {
        "seconds": sum(seconds[1:]),
        "tokens_per_second": rate,
        "length": round(float(np.mean(lengths))),
    }


def run_part(
    part: str, model: Decoder, method: str, given: argparse.Namespace
) -> dict[str, Any]:
    sizes, tiny, minutes = SIZES[given.tiny], given.tiny, given.minutes
    work = mixed_requests(sizes["prompts"], sizes["answers"], given.requests)
    slots, capacity = given.slots, sizes["prompts"][1] + sizes["answers"][1]
    settings: Any = {name: getattr(given, name) for name in ("chunk", "block", "prompt_tokens")}
    rng, group = np.random.default_rng(1), sizes["group"]
    groups = [
        (rng.integers(1, 60, group).astype(np.int32), sizes["answer"])
        for _ in range(given.groups)
    ]
    # One row to read into: each more takes the memory of a slot, of which all parts have as many.
    waiting = {"max_waiting": 8 * max(len(work), len(groups)), "readers": 1}
    if part == "batches":
        found = run_batches(model, method, slots + 1, capacity, work, minutes, given.every)
        return {"slots": slots + 1, "every": given.every, **found}
    if part == "full":
        mean = int(np.mean([len(prompt) + new / 2 for prompt, new in work]))
        return {
            "slots": slots,
            **full_rate(model, method, capacity, [mean] * slots, 1 if tiny else 5),
        }
    if part == "rollout":
        rows, long = given.rows, sizes["rollout"]
        return {
            "slots": rows,
            **full_rate(model, method, long + 512, [long] * rows, 1 if tiny else 5),
        }
    copied, n = sizes["copied"], 8
    if part in ("engine", "sizes"):
        n, groups = 1, work
    if part == "sizes":
        slots, settings["small_slots"] = sizes["large"], sizes["small"]
    elif part == "copied":
        slots, capacity = copied, group + sizes["answer"]
    elif part == "shared":  # a slot holds an answer and the recent block, a prefix the prompt
        places = copied * (group + sizes["answer"]) // (group + 8 * sizes["own"])
        slots, capacity = 8 * places, sizes["own"]
        settings |= {"prefixes": places, "prefix_tokens": group, "sharers": 8}
    if part != "groups":
        # No name holds the cache, whose arrays the engine gives away.
        engine = kvjax.Engine(
            model, cache_of(model, method, slots, capacity), **settings, **waiting
        )
        found = {"slots": engine.slots, **run_engine(engine, groups, n, minutes)}
        del engine
        gc.collect()
        if part in ("engine", "copied") and found["busy_lengths"]:
            loop = full_rate(model, method, capacity, found["busy_lengths"], 1 if tiny else 5)
            found["loop_tokens_per_second"] = loop["tokens_per_second"]
            found["busy_share"] = found["busy_tokens_per_second"] / loop["tokens_per_second"]
        return found
    all_answers = [one for one in groups for _ in range(8)]
    found = run_batches(
        model, method, copied + 1, group + sizes["answer"], all_answers, minutes
    )
    return {"slots": copied + 1, **found}


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--methods",
        nargs="+",
        type=lambda text: caches("einsum")(text)[0],
        default=["full", "fier:budget=1024"],
        help="with rollout also einsum",
    )
    parser.add_argument("--requests", type=int, help="of the 256")
    parser.add_argument("--groups", type=int, help="prompts with 8 answers each")
    parser.add_argument("--layers", type=int, help="of the 32, for less time")
    parser.add_argument(
        "--every", type=int, default=1, help="of the fixed batches, run every n-th"
    )
    parser.add_argument("--rows", type=int, default=8, help="of a rollout")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--block", type=int, help="decode steps between two looks at the queue")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt that are read at once")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        help="most tokens of prompts that are read between two blocks",
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="the most of a part")
    parser.add_argument(
        "--tiny", "--quick", dest="tiny", action="store_true", help="sizes for a CPU"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    given.quick = given.tiny
    defaults = {
        "requests": 256,
        "groups": 32,
        "slots": 10,
        "block": 16,
        "chunk": 2048,
        "prompt_tokens": 40000,
    }
    if given.tiny:
        defaults = {
            "requests": 6,
            "groups": 2,
            "slots": 2,
            "block": 4,
            "chunk": 32,
            "prompt_tokens": 64,
        }
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    use_compilation_cache()
    shape = TINY if given.tiny else SHAPES["llama-3.1-8b"]
    if given.layers:
        vocabulary = max(
            64, shape.vocab_size * given.layers // shape.layers
        )  # ids of the prompts are below 60
        shape = replace(shape, layers=given.layers, windows=(), vocab_size=vocabulary)
    model = random_model(shape, jnp.float32) if given.tiny else random_model(shape)
    for part in given.parts:
        for method in given.methods:
            requests = (
                8 * given.groups if part in ("copied", "shared", "groups") else given.requests
            )
            row = {
                "part": part,
                "method": method,
                "requests": requests,
                "layers": shape.layers,
                "block": given.block,
            }
            row |= {"chunk": given.chunk, "prompt_tokens": given.prompt_tokens}
            try:
                row |= run_part(part, model, method, given)
            except Exception as error:  # such as a lack of memory: the other parts still count
                if given.tiny:
                    raise
                row |= {
                    "slots": 0,
                    "error": f"{type(error).__name__}: {error}".splitlines()[0][:200],
                }
            memory = jax.local_devices()[0].memory_stats() or {}
            row["peak_bytes"] = memory.get(
                "peak_bytes_in_use"
            )  # of all parts of this call so far
            show(row)
            save(
                out_of(given, "serving.json"),
                "tokens per second of requests, by the host's clock",
                [row],
                KEY,
            )
            gc.collect()


if __name__ == "__main__":
    main()
