"""The adapters of `examples/`: other stacks generate their own tokens through caches of kvjax."""

import dataclasses
import importlib.util
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.generation import right_padded
from kvjax.numerics.partial import Logits, PartialAttention, attend_part, merge
from tests.generation.test_generate import FIER, Tiny, new_cache, words

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SPEC = kvjax.CacheSpec(
    batch=3, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype="float32"
)


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def tokens(count, seed):
    heads = (SPEC.q_heads, SPEC.kv_heads, SPEC.kv_heads)
    return [
        jax.random.normal(jax.random.key(seed + i), (3, count, n, 16))
        for i, n in enumerate(heads)
    ]


@pytest.mark.parametrize(
    "mask", [[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
)
def test_right_padded_puts_real_tokens_first_in_order(mask):
    real = jnp.array([mask], bool)
    lengths, ids, wide = right_padded(real, jnp.arange(4)[None], jnp.arange(8).reshape(1, 4, 2))
    want = [i for i in range(4) if mask[i]]
    assert lengths.tolist() == [len(want)]
    assert ids[0, : len(want)].tolist() == want
    assert wide[0, : len(want), 0].tolist() == [2 * i for i in want]


@pytest.mark.parametrize(
    ("real", "array"),
    [
        (np.ones((1, 4), int), np.ones((1, 4))),
        (np.ones(4, bool), np.ones(4)),
        (np.ones((1, 4), bool), np.ones((1, 3))),
    ],
)
def test_right_padded_refuses_what_is_no_mask(real, array):
    with pytest.raises(ValueError, match="right_padded"):
        right_padded(real, array)


def gemma_style(cache, q, k, v, mask, scale):
    """The layer that Gemma-style stacks share: all rows write at one slot, and a mask says what
    a token sees.
    """
    at = (0, cache["end_index"][0], 0, 0)
    keys, values = (
        jax.lax.dynamic_update_slice(cache[name], new, at) for name, new in (("k", k), ("v", v))
    )
    B, T, N, D = q.shape
    grouped = q.reshape(B, T, SPEC.kv_heads, -1, D)
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, keys) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -2.3819763e38), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, values).reshape(B, T, N, D)
    return out, {"k": keys, "v": values, "end_index": cache["end_index"] + T}


def test_a_layer_under_a_gemma_style_mask_is_a_kvjax_layer():
    """A left-padded prompt and decode steps, among them rows of no and of all tokens."""
    adapter, lengths, T, S = example("tunix_sampler"), np.array([5, 0, 12]), 12, SPEC.capacity
    real = np.arange(T)[None] >= T - lengths[:, None]
    q, k, v = tokens(T, 0)
    slots = jnp.zeros((3, S, SPEC.kv_heads, 16))
    theirs, ours = (
        {"k": slots, "v": slots, "end_index": jnp.zeros(3, jnp.int32)},
        kvjax.init_layer(kvjax.Full(), SPEC),
    )
    seen = np.zeros((3, S), bool)
    seen[:, :T] = real
    mask = jnp.asarray(np.tril(np.ones((T, S), bool))[None] & seen[:, None])
    want, theirs = gemma_style(theirs, q, k, v, mask, 0.3)
    got, ours = jax.jit(adapter.attend, static_argnames="scale")(ours, q, k, v, mask, scale=0.3)
    np.testing.assert_allclose(got[real], want[real], atol=2e-5)
    for i in range(3):
        seen[:, T + i] = True
        q, k, v = tokens(1, 10 + i)
        want, theirs = gemma_style(theirs, q, k, v, jnp.asarray(seen[:, None]), 0.3)
        got, ours = adapter.attend(ours, q, k, v, jnp.asarray(seen[:, None]), scale=0.3)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_the_parts_of_maxtext_merge_with_those_of_kvjax():
    """(sum of weighted values, largest logit, sum of exponentials) of some keys, and attention
    to the others.
    """
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 3, n, 16)), jnp.float32) for n in (4, 40, 40)
    )
    logits = jnp.einsum("bkgd,bksd->bkgs", q, k[:, :, :25]) / 4
    largest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    theirs = jnp.einsum("bkgs,bksd->bkgd", weights, v[:, :, :25])
    part = PartialAttention(theirs / total, (largest + jnp.log(total))[..., 0])
    own, whole = (
        attend_part(q, k[:, :, at:], v[:, :, at:], jnp.array(True), logits=Logits(0.25))
        for at in (25, 0)
    )
    for a, b in zip(merge(part, own), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def tunix(name):
    """A model module and the sampler of tunix, whose own package imports more than they need."""
    if "tunix" not in sys.modules:
        found = importlib.util.find_spec("tunix")
        if found is None:
            pytest.skip("google-tunix is not installed")
        bare = types.ModuleType("tunix")
        bare.__path__ = list(found.submodule_search_locations)
        sys.modules["tunix"] = bare
    sampler = pytest.importorskip("tunix.generate.sampler")
    adapter = importlib.import_module("tunix.generate.tokenizer_adapter").TokenizerAdapter
    return importlib.import_module(f"tunix.models.{name}.model"), sampler, adapter


TUNIX_PROMPTS = ["hello", "a longer prompt than", "abc"]
SELECTING = kvjax.Retrieval(
    selector=kvjax.Fier(group=8), budget=8, sink=1, local=3, demote=kvjax.Fifo(leave=8)
)


def tiny_tunix(name):
    """A module of tunix, and a function that makes a sampler of a tiny model."""
    module, sampler, adapter = tunix(name)

    class Tokenizer(adapter):
        def __init__(self):
            pass

        def encode(self, text, **_):
            return [3 + ord(c) % 60 for c in text]

        def decode(self, ids, **_):
            return " ".join(map(str, ids))

        bos_id = eos_id = pad_id = None

    for method, token in (("bos_id", 1), ("eos_id", 2), ("pad_id", 0)):
        setattr(Tokenizer, method, lambda self, token=token: token)
    sizes = {
        "num_layers": 2,
        "vocab_size": 64,
        "embed_dim": 32,
        "hidden_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    base = (
        module.ModelConfig.llama3p2_1b()
        if name == "llama3"
        else module.ModelConfig.qwen3_0p6b()
    )
    config = dataclasses.replace(base, head_dim=16, **sizes)
    if name == "qwen3":
        config = dataclasses.replace(config, dtype=jnp.float32, param_dtype=jnp.float32)
    kind = module.Llama3 if name == "llama3" else module.Qwen3

    def make():
        model = kind(config, rngs=nnx.Rngs(0))
        cache = sampler.CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=16)
        return sampler.Sampler(model, Tokenizer(), cache)

    return module, make


@contextmanager
def as_tunix_needs():
    """Rules for dtypes and ranks that its own code needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_the_sampler_of_tunix_gives_its_own_tokens(name):
    """Prompts of several lengths, greedy; then with a selection, whose tokens may differ."""
    module, make = tiny_tunix(name)

    def answers():
        out = make()(TUNIX_PROMPTS, max_generation_steps=12, max_prompt_length=32)
        return [row.tolist() for row in out.tokens]

    kvjax_caches = example("tunix_sampler").kvjax_caches
    with as_tunix_needs():
        want = answers()
        with kvjax_caches(module, kvjax.Full()):
            assert answers() == want
        with kvjax_caches(module, SELECTING):
            assert len(answers()) == len(want)
        assert answers() == want


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_rollouts_of_tunix_have_the_log_probabilities_of_the_exact_policy(name):
    """Greedy: tokens and log-probabilities of tunix's own sampler. Drawn: those of one pass of
    its model over the text, without a cache.
    """
    module, make = tiny_tunix(name)
    adapter = example("tunix_sampler")
    with as_tunix_needs():
        want = make()(
            TUNIX_PROMPTS, max_generation_steps=24, max_prompt_length=32, return_logprobs=True
        )
        with adapter.kvjax_caches(module, SELECTING):
            found = adapter.exact_rollouts(make(), TUNIX_PROMPTS, max_generation_steps=24)
            drawn = adapter.exact_rollouts(
                make(), TUNIX_PROMPTS, max_generation_steps=24, temperature=0.7, seed=3
            )
        assert [row.tolist() for row in found.tokens] == [row.tolist() for row in want.tokens]
        assert found.text == want.text
        for ours, theirs in zip(found.logprobs, want.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)

        sampler = make()
        for prompt, new, logprobs in zip(
            TUNIX_PROMPTS, drawn.tokens, drawn.logprobs, strict=True
        ):
            before = list(sampler.tokenize(prompt))
            text = jnp.asarray([before + new.tolist()], jnp.int32)
            n = text.shape[1]
            seen = jnp.tril(jnp.ones((n, n), bool))[None]
            logits, _ = sampler.transformer(text, jnp.arange(n)[None], None, seen)
            every = jax.nn.log_softmax(logits[0].astype(jnp.float32) / 0.7)
            mine = every[jnp.arange(len(before) - 1, n - 1), text[0, len(before) :]]
            np.testing.assert_allclose(logprobs, mine, atol=2e-4)


def test_the_tunix_adapter_names_models_that_it_does_not_know():
    with pytest.raises(ValueError, match=r"knows tunix.models.llama3.model, .*got json"):
        example("tunix_sampler").kvjax_caches(__import__("json"), kvjax.Full()).__enter__()


@pytest.mark.parametrize(
    "policy",
    [pytest.param(kvjax.Full(), marks=pytest.mark.thorough), FIER],
    ids=["full", "fier"],
)
def test_the_attention_interface_moves_sequences_between_caches(policy):
    """Sequences read elsewhere, cut to a length, and padding of the lists; then without the
    other rows.
    """
    model, adapter = Tiny(nnx.Rngs(0)), example("attention_interface")
    long, other = words(50, 20)
    source = kvjax.generate(
        model, new_cache(2, policy=policy), [long[:-1], other[:-1]], max_new_tokens=1
    ).cache
    interface = adapter.attention_interface(new_cache(3, policy=policy))
    sequences, lengths = zip(
        *(interface.get_sequence(source, row) for row in range(2)), strict=True
    )
    assert [int(n) for n in lengths] == [50, 20]
    insert = jax.jit(interface.insert_sequences, static_argnames="erase")
    cache = insert(interface.cache, list(sequences), [2, 0], [33, 20])
    assert cache.length.tolist() == [20, 0, 33]
    cache = insert(cache, [sequences[1], sequences[1]], [1, 3], [20, 0], erase=True)
    assert cache.length.tolist() == [0, 20, 0]
    alone = kvjax.generate(
        model, new_cache(1, policy=policy), [other[:-1]], max_new_tokens=1
    ).cache
    for a, b in zip(
        jax.tree.leaves(kvjax.take_rows(cache, [1])), jax.tree.leaves(alone), strict=True
    ):
        if a.ndim == 1:
            np.testing.assert_array_equal(a, b)
