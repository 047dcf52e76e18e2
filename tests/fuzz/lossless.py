"""Random generations by `SelfDraft` give the text of full attention.

A case is a tiny model in float32 and a cache of any parts that can draft for themselves, with
random rows, lengths, chunks, sinks, windows, soft caps, stop tokens, processors, draws and
drafts. Both texts come from the same call of `kvjax.generate`, one with `Full()` and one with a
draft. A seed always names the same case:

    python -m tests.fuzz.lossless --cases 2000 --seed 0

Logits of two programs differ by rounding, so a token may differ where the two best are as near
as that. Such a row is compared up to there, and counted.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

import kvjax
from kvjax import Exact, Fier, Fifo, MinMaxPages, Paris, Retrieval, SelfDraft
from kvjax.contrib.magicpig import Sampled, SimHash
from kvjax.generation.drafts import check_draft
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import Sampling, sampling
from kvjax.models import Decoder, DecoderConfig

VOCABULARY = 24
NEAR = 1e-3  # of two logits, which are of order 1
SHARED = 40  # cases that share a model, a cache and settings, and so compiled programs


DRAWS = sampling(0.7), sampling(1.2, top_k=6), sampling(0.9, top_p=0.8)
PROCESSORS = (
    Processors(repetition_penalty=1.3),
    Processors(no_repeat_ngram_size=3),
    Processors(min_new_tokens=5, suppress_tokens=(2,)),
)


@dataclass(frozen=True)
class Shape:
    """What decides the programs of a case."""

    config: DecoderConfig
    layers: tuple[kvjax.Policy, ...]
    batch: int
    capacity: int
    draft: SelfDraft
    draws: bool  # with a temperature
    processes: bool  # with rules that change the logits
    chunk: int


@dataclass(frozen=True)
class Request:
    """What a case asks for; data of the programs."""

    prompt: list[list[int]]
    new: int
    stop: tuple[int, ...]
    draw: Sampling
    key: int
    processors: Processors


class Differs(AssertionError):
    """The text is not that of full attention."""


def shape(seed: int) -> Shape:
    """The shape of a seed; the first of its draws that the library accepts."""
    rng = np.random.default_rng([seed, 67])
    for _ in range(100):
        config, layers, batch, capacity = (
            _config(rng),
            _layers(rng),
            _int(rng, 1, 4),
            _int(rng, 40, 110),
        )
        tokens = _int(rng, 1, 8)
        draft = SelfDraft(tokens, _one(rng, None, 1, 2, 3))
        drawn = Shape(
            config,
            layers,
            batch,
            capacity,
            draft,
            draws=_one(rng, False, False, True),
            processes=_one(rng, False, False, True),
            chunk=_one(rng, 8, 16),
        )
        try:
            check_draft(draft, jax.eval_shape(partial(empty, drawn, layers)))
        except (ValueError, NotImplementedError) as refusal:
            if "\n" in str(refusal):
                raise Differs(
                    f"seed {seed} is refused by more than a sentence: {refusal}"
                ) from refusal
            continue
        return drawn
    raise AssertionError(f"seed {seed}: nothing of 100 draws was accepted")


def request(drawn: Shape, seed: int) -> Request:
    rng = np.random.default_rng([seed, 68])
    new = _int(rng, 2, 36)
    longest = max(drawn.capacity - new, 1)
    # a small alphabet repeats, so that drafts are right now and then
    alphabet = _int(rng, 3, VOCABULARY)
    prompt = [
        rng.integers(0, alphabet, _int(rng, 1, longest + 1)).tolist()
        for _ in range(drawn.batch)
    ]
    stop = tuple(rng.integers(0, VOCABULARY, _one(rng, 0, 1, 2)).tolist())
    return Request(
        prompt=prompt,
        new=new,
        stop=stop,
        draw=_one(rng, *DRAWS) if drawn.draws else Sampling(),
        key=_int(rng, 0, 1000),
        processors=_one(rng, *PROCESSORS) if drawn.processes else Processors(),
    )


def empty(drawn: Shape, layers: Any) -> kvjax.Cache:
    spec = drawn.config.spec(drawn.batch, drawn.capacity, "float32")
    return kvjax.init(layers, spec, layers=drawn.config.layers)


def run(
    drawn: Shape, model: Decoder, asked: Request, layers: Any, draft: Any
) -> kvjax.generation.Generation:
    return kvjax.generate(
        model,
        empty(drawn, layers),
        asked.prompt,
        max_new_tokens=asked.new,
        sampling=asked.draw,
        key=None if asked.draw.greedy else jax.random.key(asked.key),
        stop_tokens=asked.stop,
        processors=asked.processors,
        chunk=drawn.chunk,
        draft=draft,
    )


def check(drawn: Shape, model: Decoder, seed: int, told: Counter) -> None:
    """Runs a case, and raises Differs where a text is not that of full attention."""
    asked = request(drawn, seed)
    want = run(drawn, model, asked, kvjax.Full(), None)
    found = run(drawn, model, asked, list(drawn.layers), drawn.draft)
    assert found.speculation is not None
    told["cases"] += 1
    told["rows"] += drawn.batch
    told["tokens"] += sum(map(len, want.rows))
    told["drafted"] += found.speculation.drafted
    told["accepted"] += found.speculation.accepted
    for row, (new, wanted) in enumerate(zip(found.rows, want.rows, strict=True)):
        if new == wanted:
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(new, wanted, strict=False)) if a != b),
            min(len(new), len(wanted)),
        )
        if not near(drawn, model, asked, row, wanted[:same]):
            raise Differs(
                f"seed {seed}, row {row}: token {same} of {new} is not that of {wanted}; {drawn}; {asked}"
            )
        told["near"] += 1


def near(drawn: Shape, model: Decoder, asked: Request, row: int, before: list[int]) -> bool:
    """True if rounding decides the next token after `before`, by the logits of full attention."""
    if not asked.draw.greedy:  # noise is added, so no threshold of the logits alone decides
        return _by_noise(drawn, model, asked, row, before)
    last = logits_after(drawn, model, asked.prompt[row] + before)
    other, best = np.sort(last)[-2:].tolist()
    plain = asked.processors == Processors()
    return best - other < NEAR if plain else False


_whole = jax.jit(lambda model, tokens: model(tokens)[0])


def logits_after(drawn: Shape, model: Decoder, text: list[int]) -> np.ndarray:
    """f32[V] after a text, which is padded so that all share a program."""
    tokens = np.zeros((1, drawn.capacity), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(_whole(model, tokens)[0, len(text) - 1])


def _by_noise(
    drawn: Shape, model: Decoder, asked: Request, row: int, before: list[int]
) -> bool:
    """True if the draw itself changes when logits change by rounding."""
    from kvjax.generation.sampling import Draws, drawing

    if asked.processors != Processors():
        return False
    one = np.repeat(
        logits_after(drawn, model, asked.prompt[row] + before)[None], drawn.batch, axis=0
    )
    draw = drawing(Draws.of(asked.draw, jax.random.key(asked.key), drawn.batch), drawn.batch)
    rng, first = (
        np.random.default_rng(0),
        int(np.asarray(draw(one, np.int32(len(before))))[row]),
    )
    for _ in range(8):
        moved = one + NEAR * rng.standard_normal(one.shape).astype(np.float32)
        if int(np.asarray(draw(moved, np.int32(len(before))))[row]) != first:
            return True
    return False


def _config(rng: np.random.Generator) -> DecoderConfig:
    q_heads, kv_heads = _one(rng, (4, 2), (2, 2), (3, 1))
    layers = 2
    windows = _one(rng, (None, None), (None, None), (None, 9), (20, None), (5, 5))
    return DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=8,
        initializer_range=_one(rng, 0.2, 0.4),
        windows=windows,
        soft_cap=_one(rng, None, None, None, 5.0),
        sinks=bool(rng.random() < 0.2),
    )


def _layers(rng: np.random.Generator) -> tuple[kvjax.Policy, ...]:
    first = _policy(rng)
    if isinstance(first, Retrieval) and rng.random() < 0.3:
        return first, first.follower()
    second = _one(rng, first, first, kvjax.Full())
    return (first, second) if rng.random() < 0.5 else (second, first)


def _policy(rng: np.random.Generator) -> kvjax.Policy:
    demote = Fifo(leave=_one(rng, 8, 16))
    sink, local = _int(rng, 0, 5), _int(rng, 1, 8)
    if rng.random() < 0.1:
        budget = sink + demote.slots(local) + _int(rng, 1, 20)
        return Sampled(
            hashing=SimHash(bits=3, tables=32, learn=8),
            budget=budget,
            sink=sink,
            local=local,
            demote=demote,
        )
    selector = (
        _one(rng, Fier(group=8), Fier(group=4), MinMaxPages(page=4), Exact(), Paris())
        if rng.random() < 0.9
        else Fier(group=8, group_reduce="per_head")
    )
    return Retrieval(
        selector=selector,
        budget=sink + local + selector.unit * _int(rng, 0, 4),
        sink=sink,
        local=local,
        demote=demote,
        dense_below=_one(rng, 0, 0, 0, 20),
    )


def _int(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high))


def _one(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def run_cases(first: int, cases: int, told: Counter, progress: Any = None) -> None:
    """Runs cases from number `first` on; those with the same number over `SHARED` share
    programs."""
    drawn: Shape | None = None
    model: Any = None
    group = None
    for seed in range(first, first + cases):
        if seed // SHARED != group:
            group = seed // SHARED
            drawn = shape(group)
            model = Decoder(drawn.config, rngs=nnx.Rngs(group))
            jax.clear_caches()
            gc.collect()
        assert drawn is not None
        check(drawn, model, seed, told)
        if progress is not None:
            progress(seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--keep-going", action="store_true", help="report differences, and go on"
    )
    given = parser.parse_args()
    told: Counter = Counter()
    start = time.monotonic()
    end = given.seed + given.cases
    at = given.seed
    while at < end:
        count = min(SHARED - at % SHARED, end - at)
        try:
            run_cases(at, count, told)
        except Differs as wrong:
            told["differ"] += 1
            print(wrong, flush=True)
            if not given.keep_going:
                raise SystemExit(1) from wrong
        at += count
        print(f"{time.monotonic() - start:.0f} s", dict(told), flush=True)
    print("done", dict(told), flush=True)


if __name__ == "__main__":
    main()
