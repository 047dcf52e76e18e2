"""A prompt is one prompt, however it is cut: in any chunks, alone and in an engine, a cache
holds the same and gives the same text.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.cache.cache import Cache
from kvjax.generation import generate, prefill
from kvjax.generation import prefilling as reading
from kvjax.generation.staging import needs_staging, room_for, rooms, settled, staged
from kvjax.policies import Policy
from tests.generation.test_generate import Tiny, compilations, words

TOKENS = 280  # of a prompt: 256 and 64 in chunks of the default
NEW = 8
CHUNKS = (2, 64, 256, 512)
SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=8, capacity=512, dtype="float32"
)


# Settings with which each method seals, rounds or evicts tokens of so short a prompt. A chunk of
# 2 tokens runs for the first ones only: it makes 140 calls.
CODES = {
    "kivi": "kivi:residual=32,group=8",
    "kivi values": "kivi:residual=32,group=8,value_window=16",
    "logquant": "logquant:window=16,group=8",
    "turboquant": "turboquant:bits=2,local=16,chunk=32",
    "fier over codes": "fier:budget=64,group=8,chunk=32,store=turbo4",
    "freekv over codes": "freekv:budget=72,page=8,sink=4,local=24,store=turbo4",
    "shadowkv": "shadowkv:budget=120,rank=8,page=8,outliers=2,learn=32,local=16,host=false",
}
EXACT = {
    "full": "full",
    "fier": "fier:budget=64,group=8,chunk=32",
    "quest": "quest:budget=64,page=8",
    "pariskv": "pariskv:budget=64,local=32,dense_below=0",
    "freekv": "freekv:budget=72,page=8,sink=4,local=24",
    "arkvale": "arkvale:budget=72,page=8,sink=4,local=24",
    "magicpig": "magicpig:budget=110,bits=6,tables=40,local=8,chunk=32",
    "pqcache": "pqcache:budget=80,bits=3,local=16",
    "exact": "exact:budget=64",
}


@pytest.fixture(scope="module")
def model() -> Tiny:
    return Tiny(nnx.Rngs(0))


def policy_of(text: str) -> Policy:
    """The policy of a method's later layers, in all layers."""
    found = kvjax.presets.parse(text)
    return getattr(found, "rest", found)


def make(policy: Policy) -> kvjax.Cache:
    return kvjax.init(policy, SPEC, layers=2)


def text_of(model: Tiny, policy: Policy, prompt: list[int], chunk: int | None) -> Any:
    return generate(model, make(policy), [prompt], max_new_tokens=NEW, chunk=chunk).rows[0]


def text_of_engine(model: Tiny, policy: Policy, prompt: list[int]) -> list[int]:
    engine = kvjax.Engine(model, make(policy), block=4, chunk=64)
    (request,) = engine.submit(prompt, max_new_tokens=NEW)
    engine.run()
    return request.tokens


@pytest.mark.parametrize(
    "name", [*CODES, *(pytest.param(name, marks=pytest.mark.thorough) for name in EXACT)]
)
def test_a_prompt_gives_one_text_in_any_chunks_and_in_an_engine(model, name):
    policy = policy_of((CODES | EXACT)[name])
    assert needs_staging(make(policy)) == (name in CODES)
    (prompt,) = words(TOKENS, seed=3)
    whole = text_of(model, policy, prompt, chunk=512)
    chunks = (None, 64, 2) if name == "kivi" else (None, 64)
    for chunk in chunks:
        assert text_of(model, policy, prompt, chunk=chunk) == whole, chunk
    assert text_of_engine(model, policy, prompt) == whole


# Methods that choose by a prompt's own queries get it whole, in every door. With `chunk` they
# evict after each chunk, which is another method, of bounded memory.
OBSERVING = {
    "streaming_llm": "streaming_llm:budget=64",
    "h2o": "h2o:budget=64",
    "tova": "tova:budget=64",
    "snapkv": "snapkv:budget=64",
    "pyramidkv": "pyramidkv:budget=64",
    "adakv": "adakv:budget=64",
    "logevict": "logevict:window=16",
    "raas": "raas:budget=64",
    "mikv": "mikv:budget=64,group=8,chunk=32",
    "evict": "evict:budget=64,rule=keydiff",
}


@pytest.mark.parametrize(
    "name",
    ["h2o", *(pytest.param(n, marks=pytest.mark.thorough) for n in OBSERVING if n != "h2o")],
)
def test_a_method_that_observes_reads_whole_prompts_in_every_door(model, name):
    policy = policy_of(OBSERVING[name])
    assert not needs_staging(make(policy))
    (prompt,) = words(TOKENS, seed=3)
    whole = text_of(model, policy, prompt, chunk=512)
    assert text_of(model, policy, prompt, chunk=None) == whole
    assert text_of_engine(model, policy, prompt) == whole


def test_every_preset_has_its_prompt_cut():
    heads = {"razorattention", "duoattention"}  # need a file of heads; they hold the two above
    known = {text.partition(":")[0] for text in (CODES | EXACT | OBSERVING).values()}
    assert known | heads == set(kvjax.presets.REGISTRY)


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
    before = jax.tree.structure(cache)
    _, after = prefill(model, cache, [words(100)[0]], chunk=32)
    assert jax.tree.structure(after) == before


def test_a_prompt_that_is_stored_leaves_no_second_copy(model):
    held = staged(make(policy_of(CODES["kivi"])), room=256)
    arrays = jax.tree.leaves(held)
    settled(held)
    assert all(array.is_deleted() for array in arrays)


def test_what_is_compiled_ahead_is_what_reads_a_prompt(model):
    cache = make(policy_of(CODES["kivi"]))
    names = [p.function.__name__ for p in reading.prompt_programs(model, cache, TOKENS)]
    assert names == ["_settle", "_prefill_chunk", "_prefill_chunk"]


def test_nothing_compiles_after_an_engine_has_warmed_up_for_codes(model):
    engine = kvjax.Engine(model, make(policy_of(CODES["kivi"])), block=4, chunk=64)
    engine.warm_up()
    with compilations() as seen:
        for prompt in words(TOKENS, 20, 130, seed=4):
            engine.submit(prompt, max_new_tokens=5)
        engine.run()
    assert not seen
