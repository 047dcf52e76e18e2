"""Random requests through an engine: each gets the tokens that it gets alone.

    # all policies in turn, new seeds
    python -m tests.fuzz.requests --seconds 600
    # one scenario of each
    python -m tests.fuzz.requests --policies hosted kivi --seed 17

A scenario is a function of its policy and seed: requests that come, are cancelled and leave
slots that others take; a queue that is full, prompts that begin alike, several answers to one,
greedy and sampled, with limits and stop tokens of their own; rows of numbers that are not
finite, in the cache too; slots, blocks, chunks, read-ahead and shared prefixes of several
sizes, and with odd seeds slots of several capacities. Methods that keep tokens as they are also
keep rows after requests, within bounds that are checked after each step, and prompts go on from
earlier answers; so do rows that draft for themselves ("with drafts"). From seed 20 000 on, scenarios
may have rules that change logits. A scenario that fails prints its command.
`KEPT` are seeds of scenarios that found something, or that have much of this;
tests/serve/test_engine.py runs them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import traceback
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder, DecoderConfig
from kvjax.serve import EngineBusy, Request

VOCAB, NAN, CAPACITY = 64, 63, 192
WITH_RULES = 20_000  # the first seed whose scenarios may have rules
RULES = (
    Processors(),
    Processors(),
    Processors(repetition_penalty=1.5, no_repeat_ngram_size=3),
    Processors(min_new_tokens=4, suppress_tokens=(3, 5), begin_suppress_tokens=(7,)),
)
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    initializer_range=0.5,
)
SMALL = "budget=24,sink=2,local=6"
POLICIES = {
    "full": "full",
    "fier": f"fier:{SMALL},group=4,chunk=8,dense_layers=1",
    "share": f"fier:{SMALL},group=4,chunk=8,dense_layers=0,share=2",
    "quest": "quest:budget=32,page=8,dense_layers=0",
    "pariskv": "pariskv:budget=32,sink=2,local=8,chunk=16,dense_below=0",
    "hosted": "pariskv:budget=32,sink=2,local=8,chunk=16,dense_below=0,store=host",
    "freekv": "freekv:budget=48,sink=8,local=8,page=8,chunk=8,dense_layers=0",
    "logquant": "logquant:window=8,group=8",
    "kivi": "kivi:residual=16,group=8",
    "turboquant": "turboquant:sink=2,local=8,chunk=16,dense_layers=0",
    "streaming_llm": "streaming_llm:budget=24,sink=2",
    "h2o": "h2o:budget=24",
    "snapkv": "snapkv:budget=40,window=8",
    "windowed": "full",
    "windowed fier": f"fier:{SMALL},group=4,chunk=8,dense_layers=0",
    "with drafts": f"fier:{SMALL},group=4,chunk=8,dense_layers=0",  # rows draft for themselves
}
SHARING = (
    "full",
    "fier",
    "kivi",
    "share",
    "with drafts",
)  # whose rows may have a common prefix
# A kept row gives the tokens of the request alone.
EXACT = ("full", "windowed", "with drafts")
ODD = ("quest", "hosted", "logquant", "h2o", "windowed")
KEPT: dict[str, tuple[int, ...]] = {name: (int(name in ODD),) for name in POLICIES} | {
    "share": (0, 3),
    "with drafts": (0, 2),  # drafts after a token that is not finite
    "kivi": (0, 30651),  # a prefix given away between two answers to its prompt
    "full": (0, 7027, 7122),  # kept rows whose last token was not finite
}


@cache
def model_of(name: str) -> Decoder:
    """A model whose token `NAN` makes its row not finite, from the embedding on."""
    windows = (12, None) if name.startswith("windowed") else ()
    model = Decoder(dataclasses.replace(CONFIG, windows=windows), rngs=nnx.Rngs(0))
    model.embedding.set_value(model.embedding.get_value().at[NAN].set(jnp.nan))
    return model


@dataclasses.dataclass(frozen=True)
class Settings:
    slots: int
    chunk: int
    block: int
    prompt_tokens: int
    park: int
    max_waiting: int
    prefixes: int
    small_slots: dict[int, int]
    readers: int
    kept_rows: int  # of the smallest size, and as many in host memory
    hosted_rows: int
    rules: Processors  # that change logits

    @classmethod
    def draw(cls, name: str, seed: int, rng: np.random.Generator) -> Settings:
        slots, chunk = (int(rng.choice(values)) for values in ((1, 3), (32, 64)))
        more = [
            int(rng.choice(values))
            for values in ((1, 5, 16), (1, 64, 500), (0, 0, 2), (4, 100))
        ]
        prefixes = int(rng.choice((0, 2))) if name in SHARING else 0
        one_size = prefixes or name in ("share", "with drafts")
        small = {64: 1, 128: 2} if seed % 2 and not one_size else {}
        later = np.random.default_rng([seed, 1])
        readers = int(later.choice((1, 2, 3)))
        kept, hosted = (int(later.choice(values)) for values in ((0, 1, 4, 100), (0, 2, 100)))
        if name not in EXACT or not kept:
            kept = hosted = 0
        rules = RULES[int(later.integers(len(RULES)))] if seed >= WITH_RULES else Processors()
        return cls(slots, chunk, *more, prefixes, small, readers, kept, hosted, rules)


@cache
def row_bytes(name: str) -> int:
    """Bytes of a kept row of 64 tokens."""
    spec = model_of(name).spec(batch=1, capacity=64)
    return kvjax.init(
        kvjax.presets.parse(POLICIES[name]), spec, layers=CONFIG.layers
    ).nbytes.total


def engine_of(
    name: str, settings: Settings, *, keeps: bool = False, **more: Any
) -> kvjax.Engine:
    model, policies = model_of(name), kvjax.presets.parse(POLICIES[name])
    capacity = CAPACITY if not settings.prefixes else CAPACITY - 64
    cache = kvjax.init(
        policies, model.spec(batch=settings.slots, capacity=capacity), layers=CONFIG.layers
    )
    if settings.prefixes:
        more |= {"prefixes": settings.prefixes, "prefix_tokens": 64}
    if keeps and settings.kept_rows:
        row = row_bytes(name)
        more |= {"prefix_bytes": settings.kept_rows * row}
        more |= {"prefix_host_bytes": settings.hosted_rows * row}
    if name == "with drafts":
        more |= {"speculate": "self"}
    return kvjax.Engine(
        model,
        cache,
        chunk=settings.chunk,
        small_slots=settings.small_slots,
        processors=settings.rules,
        **more,
    )


def draw_request(
    rng: np.random.Generator, earlier: list[list[int]], goes_on: float = 0.4
) -> tuple[list[int], dict[str, Any]]:
    """A prompt, which may begin like an earlier one, and the settings of its request."""
    prompt = rng.integers(1, NAN, int(rng.choice([1, 2, 20, 63, 64, 65, 100]))).tolist()
    if earlier and rng.random() < goes_on:
        start = earlier[rng.integers(len(earlier))]
        whole = rng.random() < 0.5 and goes_on > 0.4
        prompt = (
            start[: len(start) if whole else int(rng.integers(1, len(start) + 1))] + prompt[:30]
        )
    if rng.random() < 0.07:
        prompt[-1] = NAN
    prompt = prompt[:140]
    settings: dict[str, Any] = {
        "max_new_tokens": int(rng.choice([1, 2, 9, 25])),
        "n": int(rng.choice([1, 1, 1, 4])),
    }
    if rng.random() < 0.5:
        settings |= {
            "sampling": sampling(float(rng.uniform(0.2, 2)), top_k=int(rng.integers(1, 30)))
        }
        settings |= {"key": jax.random.key(int(rng.integers(100)))}
    if rng.random() < 0.5:
        settings |= {"stop_tokens": rng.integers(0, VOCAB, int(rng.integers(1, 16))).tolist()}
    return prompt, settings


def run_scenario(name: str, seed: int, requests: int = 8) -> None:
    """Raises AssertionError if a request gets other tokens than alone, or if the engine keeps
    something of it.
    """
    rng = np.random.default_rng([seed, sorted(POLICIES).index(name)])
    settings = Settings.draw(name, seed, rng)
    names = ("block", "prompt_tokens", "park", "max_waiting", "readers")
    engine = engine_of(
        name, settings, keeps=True, **{name: getattr(settings, name) for name in names}
    )
    goes_on = 0.7 if settings.kept_rows else 0.4
    sent: list[tuple[list[Request], list[int], dict[str, Any]]] = []
    for _ in range(requests):
        earlier = [prompt for _, prompt, _ in sent]
        if settings.kept_rows:
            earlier += [one.known.tolist() for group, _, _ in sent for one in group if one.done]
        prompt, how = draw_request(rng, earlier, goes_on)
        try:
            sent.append((engine.submit(prompt, **how), prompt, how))
        except EngineBusy:
            for _ in range(3):
                engine.step()
        for _ in range(rng.integers(3) if not settings.kept_rows else rng.integers(12)):
            engine.step()
            check_bounds(name, settings, engine)
        running = [one for group, _, _ in sent for one in group if not one.done]
        if running and rng.random() < 0.3:
            engine.cancel(running[rng.integers(len(running))])
        decoding = [one for one in running if one.state == "running"]
        if decoding and rng.random() < 0.2:
            one = decoding[rng.integers(len(decoding))]
            row = engine.row(one)
            assert one.reason == "error" or row.length.tolist() == [
                len(one.prompt) + len(one.tokens)
            ], (
                row.length,
                one,
            )
    while any(not one.done for group, _, _ in sent for one in group):
        engine.step()
        check_bounds(name, settings, engine)
    engine.run()
    counts = engine.stats()
    TOTALS["read"] += counts.prompt_tokens
    TOTALS["shared"] += counts.shared_tokens
    TOTALS["requests"] += sum(len(group) for group, _, _ in sent)
    assert counts.decoding == counts.waiting == counts.parked == counts.prefixes == 0, counts
    alone = engine_of(name, settings, block=5, prompt_tokens=500)  # for one after another
    for group, prompt, how in sent:
        for one, same in zip(group, alone.submit(prompt, **how), strict=True):
            while not same.done:
                alone.step()
            assert one.done
            if one.reason == "cancelled":
                assert one.tokens == same.tokens[: len(one.tokens)], (one, same)
            elif name == "with drafts" and one.reason == same.reason == "error":
                # A draft that names the damaged token ends its row some tokens earlier.
                least = min(len(one.tokens), len(same.tokens))
                assert one.tokens[:least] == same.tokens[:least], (one, same)
            else:
                assert (one.reason, one.tokens) == (same.reason, same.tokens), (one, same)
        alone.run()


def check_bounds(name: str, settings: Settings, engine: kvjax.Engine) -> None:
    counts = engine.stats()
    assert counts.kept_bytes <= settings.kept_rows * row_bytes(name), counts
    assert counts.kept_host_bytes <= settings.hosted_rows * row_bytes(name), counts
    assert counts.parked <= settings.park, counts


TOTALS = {"requests": 0, "read": 0, "shared": 0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=0, help="go on with new seeds for so long"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--scenarios", type=int, default=0, help="go on for so many")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    given = parser.parse_args()
    from tests import conftest  # noqa: F401 (programs then compile in a quarter of the time)

    start = time.monotonic()
    seed = given.seed
    failed = 0
    done = dict.fromkeys(given.policies, 0)
    while (
        seed == given.seed
        or time.monotonic() - start < given.seconds
        or sum(done.values()) < given.scenarios
    ):
        for name in given.policies:
            try:
                run_scenario(name, seed)
            except Exception:
                failed += 1
                traceback.print_exc(limit=-4)
                print(
                    f"FAILED: python -m tests.fuzz.requests --policies '{name}' --seed {seed}",
                    flush=True,
                )
            done[name] += 1
        seed += 1
        print(
            f"{time.monotonic() - start:.0f} s, seeds to {seed - 1}: {sum(done.values())} scenarios",
            flush=True,
        )
    print(
        f"{failed} of {sum(done.values())} scenarios failed; {TOTALS['requests']} requests, whose prompts' "
        f"{TOTALS['read']} tokens were read and {TOTALS['shared']} copied"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
