"""A prompt is one prompt, however it is cut: in any chunks, alone and in an engine, a cache
holds the same and gives the same text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.cache.cache import Cache
from kvjax.contrib.razorattention import Compensated
from kvjax.evictors import Sliding
from kvjax.generation import generate, prefill
from kvjax.generation import prefilling as reading
from kvjax.generation.staging import (
    needs_staging,
    room_for,
    rooms,
    settled,
    staged,
    with_room,
)
from kvjax.policies import PerLayer, Policy
from kvjax.presets.head_files import Heads
from tests.generation.test_generate import Tiny, compilations, words

CHUNK = 64
SMALLEST = 2  # a chunk of one token would be a decode step
# Of a prompt: two chunks of 64 and one of 2, of sizes like those of the default, which are
# CHUNK and SMALLEST here so that all cuts share their programs.
TOKENS = 2 * CHUNK + SMALLEST
NEW = 8
WHOLE = 256
SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=8, capacity=256, dtype="float32"
)

# Settings with which each method seals, rounds, selects or evicts tokens of so short a prompt.
# These keep other keys and values than came, so a prompt in several chunks is held until it ends.
CODES = {
    "kivi": "kivi:residual=32,group=8",
    "kivi values": "kivi:residual=32,group=8,value_window=16",
    "logquant": "logquant:window=16,group=8",
    "turboquant": "turboquant:bits=2,local=16,chunk=32",
    "fier over codes": "fier:budget=64,group=8,chunk=32,store=turbo4",
    "fier over 8-bit floats of the host": "fier:budget=64,group=8,chunk=32,store=float8",
    "freekv over codes": "freekv:budget=72,page=8,sink=4,local=24,store=turbo4",
    "quest over codes of the host, hot": "quest:budget=64,page=8,store=host-turbo4+64",
    "shadowkv": "shadowkv:budget=120,rank=8,page=8,outliers=2,learn=32,local=16,host=false",
    "razorattention, heads that retrieve nothing": Compensated(
        kvjax.Evicting(evictor=Sliding(sink=4), budget=64)
    ),
}
EXACT = {
    "full": "full",
    "fier": "fier:budget=64,group=8,chunk=32",
    "fier, hot": "fier:budget=64,group=8,chunk=32,store=host+64",
    "quest": "quest:budget=64,page=8",
    "pariskv": "pariskv:budget=64,local=32,dense_below=0",
    "pariskv, hot": "pariskv:budget=64,local=32,dense_below=0,store=host+64",
    "freekv": "freekv:budget=72,page=8,sink=4,local=24",
    "freekv, hot": "freekv:budget=72,page=8,sink=4,local=24,store=host+64",
    "arkvale": "arkvale:budget=72,page=8,sink=4,local=24",
    "magicpig": "magicpig:budget=110,bits=6,tables=40,local=8,chunk=32",
    "pqcache": "pqcache:budget=80,bits=3,local=16",
    "exact": "exact:budget=64",
}
# Methods that evict, or round, by a prompt's own queries get it whole, in every door, and a
# `chunk` of the caller's is another method.
EVICTS = "what a chunk evicts is gone for the chunks after it, which bounds the memory"
CODES_BY_QUERIES = "the queries of each chunk choose which of its tokens stay exact"
HEADS = Heads(kv_heads=2, layers=((1,), ()))
OBSERVING: dict[str, tuple[str | PerLayer, str]] = {
    "streaming_llm": ("streaming_llm:budget=64", EVICTS),
    "logevict": ("logevict:budget=64", EVICTS),
    "h2o": ("h2o:budget=64", EVICTS),
    "tova": ("tova:budget=64", EVICTS),
    "snapkv": ("snapkv:budget=64", EVICTS),
    "pyramidkv": ("pyramidkv:budget=64", EVICTS),
    "adakv": ("adakv:budget=64", EVICTS),
    "mikv": ("mikv:budget=64,group=8,chunk=32", CODES_BY_QUERIES),
    "raas": ("raas:budget=64", EVICTS),
    "evict": ("evict:budget=64,rule=keydiff", EVICTS),
    "razorattention": (kvjax.presets.razorattention(64, heads=HEADS), EVICTS),
    "duoattention": (kvjax.presets.duoattention(64, sink=4, heads=HEADS), EVICTS),
}
# The others run with --thorough. Each takes some seconds, most of them to compile.
DEFAULT = (
    "kivi",
    "fier over codes",
    "fier",
    "razorattention, heads that retrieve nothing",
)


@pytest.fixture(scope="module")
def model() -> Tiny:
    return Tiny(nnx.Rngs(0))


def policy_of(given: str | PerLayer | Policy) -> PerLayer | Policy:
    """The policy of a method's later layers, in all layers; one by layer as it is."""
    if not isinstance(given, str):
        return given
    found = kvjax.presets.parse(given)
    return getattr(found, "rest", found)


def make(policy: PerLayer | Policy) -> kvjax.Cache:
    return kvjax.init(policy, SPEC, layers=2)


def text_of(
    model: Tiny, policy: PerLayer | Policy, prompt: list[int], chunk: int | None
) -> Any:
    return generate(model, make(policy), [prompt], max_new_tokens=NEW, chunk=chunk).rows[0]


def text_of_engine(
    model: Tiny, policy: PerLayer | Policy, prompt: list[int], chunk: int | None = CHUNK
) -> list[int]:
    engine = kvjax.Engine(model, make(policy), block=4, chunk=chunk)
    (request,) = engine.submit(prompt, max_new_tokens=NEW)
    engine.run()
    return request.tokens


def most_thorough(names: Iterable[str], default: Container[str]) -> list[Any]:
    return [
        name if name in default else pytest.param(name, marks=pytest.mark.thorough)
        for name in names
    ]


@pytest.mark.parametrize("name", most_thorough([*CODES, *EXACT], DEFAULT))
def test_a_prompt_gives_one_text_in_any_chunks_and_in_an_engine(model, name, monkeypatch):
    monkeypatch.setattr(reading, "CPU_CHUNKS", (CHUNK, SMALLEST))
    policy = policy_of((CODES | EXACT)[name])
    assert needs_staging(make(policy)) == (name in CODES)
    (prompt,) = words(TOKENS, seed=3)
    whole = text_of(model, policy, prompt, chunk=WHOLE)
    for chunk in (None, CHUNK, SMALLEST):  # in pieces of both sizes, of one, and the smallest
        assert text_of(model, policy, prompt, chunk=chunk) == whole, chunk
    assert text_of_engine(model, policy, prompt) == whole


@pytest.mark.parametrize("name", most_thorough(OBSERVING, ("h2o",)))
def test_a_method_that_observes_reads_whole_prompts_in_every_door(model, name):
    policy = policy_of(OBSERVING[name][0])
    assert any(layer.policy.observes for layer in make(policy).layers)
    (prompt,) = words(TOKENS, seed=3)
    whole = text_of(model, policy, prompt, chunk=WHOLE)
    assert text_of(model, policy, prompt, chunk=None) == whole
    assert text_of_engine(model, policy, prompt, chunk=None) == whole


@pytest.mark.parametrize("name", most_thorough(OBSERVING, ("h2o",)))
def test_only_a_method_of_which_the_table_says_so_depends_on_a_chunk(model, name):
    """One that holds the same in chunks of 64 belongs in the tables above."""
    policy = policy_of(OBSERVING[name][0])
    (prompt,) = words(TOKENS, seed=3)
    tokens = np.array([prompt], np.int32)
    _, whole = prefill(model, make(policy), tokens, chunk=WHOLE)
    _, parts = prefill(model, make(policy), tokens, chunk=CHUNK)
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True)
    assert any(not np.allclose(a, b, atol=1e-3) for a, b in pairs)


def test_no_prompt_is_read_in_chunks_of_one_token(model):
    (prompt,) = words(5, seed=3)
    with pytest.raises(ValueError, match="chunk must be at least 2"):
        text_of(model, kvjax.Full(), prompt, chunk=1)


def test_every_preset_has_its_prompt_cut():
    of_text = [text for text in (CODES | EXACT).values() if isinstance(text, str)]
    assert {text.partition(":")[0] for text in of_text} | OBSERVING.keys() == set(
        kvjax.presets.REGISTRY
    )


def test_the_guide_names_the_methods_that_depend_on_a_chunk():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "memory.md"
    (row,) = [line for line in guide.read_text().splitlines() if "`Policy.observes`" in line]
    assert set(re.findall("`([a-z0-9_]+)`", row.split("|")[1])) == set(OBSERVING)


def test_prompts_of_several_turns_and_rows_are_cut_alike(model):
    policy = policy_of(CODES["kivi"])
    spec = kvjax.CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=8, capacity=512, dtype="float32"
    )
    turns = [words(90, 41, seed=1), words(70, 100, seed=2)]

    def read(chunk: int) -> Any:
        cache = kvjax.init(policy, spec, layers=2)
        for turn in turns:
            tokens, lengths = reading_rows(turn)
            logits, cache = prefill(model, cache, tokens, lengths, chunk=chunk)
        return logits, cache

    (whole, one), (parts, other) = read(128), read(32)
    np.testing.assert_allclose(whole, parts, atol=2e-4, rtol=2e-4)
    assert one.length.tolist() == other.length.tolist() == [160, 141]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        # Codes on the edge of two levels may fall to either side.
        assert np.mean(~np.isclose(a, b, atol=1e-3)) < 0.01


def reading_rows(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array(list(map(len, prompts)), np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def test_a_window_reaches_over_the_chunks_of_a_prompt_and_into_earlier_turns():
    spec = kvjax.CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=256, dtype="float32"
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 160, heads, 16)).astype(np.float32) for heads in (4, 2, 2))

    def read(policy: Policy, window: int) -> np.ndarray:
        """The outputs of two prompts of 80 tokens in chunks of 40, of which the second is held
        as it came.
        """
        layer = kvjax.init_layer(policy, spec)
        found = []
        for first in range(0, 160, 40):
            if first == 80:
                (layer,) = staged(Cache((layer,)), room=256).layers
            part = (a[:, first : first + 40] for a in (q, k, v))
            out, layer = kvjax.prefill(layer, *part, window=window)
            found.append(np.asarray(out))
        return np.concatenate(found, axis=1)

    # A store of 8 bits is read as it was written, but for rounding.
    codes = kvjax.Compressed(store=kvjax.stores.Quantized(bits=8, key_group=8), local=8)
    for window in (30, 70):
        np.testing.assert_allclose(read(codes, window), read(kvjax.Full(), window), atol=0.05)


def test_no_room_is_made_for_a_prompt_in_one_chunk_and_little_otherwise(model):
    assert rooms(5000) == [1024, 2048, 4096, 5000]
    assert [room_for(n, 5000) for n in (3, 1025, 5000, 6000)] == [1024, 2048, 5000, 6000]
    cache = make(policy_of(CODES["kivi"]))
    whole = make(policy_of("full"))
    assert with_room(cache, 100, chunks=1) is cache
    assert with_room(whole, 100, chunks=4) is whole
    assert with_room(cache, 100, chunks=4) is not cache
    before = jax.tree.structure(cache)
    _, after = prefill(model, cache, [words(100)[0]], chunk=32)
    assert jax.tree.structure(after) == before


def test_a_prompt_that_is_stored_leaves_no_second_copy(model):
    held = staged(make(policy_of(CODES["kivi"])), room=256)
    arrays = jax.tree.leaves(held)
    settled(held)
    assert all(array.is_deleted() for array in arrays)


def test_what_is_compiled_ahead_is_what_reads_a_prompt(model):
    spec = dataclasses.replace(SPEC, capacity=512)
    cache = kvjax.init(policy_of(CODES["kivi"]), spec, layers=2)
    names = [p.function.__name__ for p in reading.prompt_programs(model, cache, 280)]
    assert names == ["_settle", "_prefill_chunk", "_prefill_chunk"]


def test_nothing_compiles_after_an_engine_has_warmed_up_for_codes(model):
    engine = kvjax.Engine(model, make(policy_of(CODES["kivi"])), block=4, chunk=64)
    engine.warm_up()
    with compilations() as seen:
        for prompt in words(TOKENS, 20, 100, seed=4):
            engine.submit(prompt, max_new_tokens=5)
        engine.run()
    assert not seen
