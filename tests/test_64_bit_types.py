"""Under `jax_enable_x64`, where constants and indices have 64 bits by default: nothing widens, and
int32 never meets int64.

Promotion is strict, which raises wherever the standard one would widen.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.generation import generate
from kvjax.generation.drafts import DraftModel, PromptLookup, SelfDraft
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder, DecoderConfig, GatedDelta, ShortConv
from kvjax.numerics import blocks
from kvjax.presets import REGISTRY
from tests.laws.cases import CASES

SPEC = kvjax.CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=4096)
PROMPT = 150
LAYERS = 32  # pyramidkv shares a budget among so many


@contextmanager
def wide() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def policy_of_the_last_layer(policies: Any, spec: kvjax.CacheSpec) -> kvjax.Policy:
    return kvjax.PerLayer.of(policies).policy(LAYERS - 1).of_size(spec)


def check_calls_keep_types(policies: Any, spec: kvjax.CacheSpec) -> None:
    """Traces a prompt, a step and several steps, which return arrays of at most 32 bits, and
    the state as it was."""
    policy = policy_of_the_last_layer(policies, spec)
    cache = jax.eval_shape(lambda: kvjax.init_layer(policy, spec))

    def array(tokens: int, heads: int, size: int) -> Any:
        return jax.ShapeDtypeStruct((spec.batch, tokens, heads, size), spec.dtype)

    for verb, tokens in ((kvjax.prefill, PROMPT), (kvjax.attention, 1), (kvjax.decode, 3)):
        q = array(tokens, spec.q_heads, spec.head_dim)
        k = array(tokens, spec.kv_heads, spec.head_dim)
        v = array(tokens, spec.kv_heads, spec.value_size)
        out, after = jax.eval_shape(verb, cache, q, k, v)
        assert out.dtype == spec.dtype
        assert _types(after) == _types(cache)
        assert all(dtype.itemsize <= 4 for _, dtype in _types(after))


def _types(tree: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", REGISTRY)
def test_a_preset_keeps_its_types(name: str) -> None:
    with wide():
        check_calls_keep_types(REGISTRY[name].make(), SPEC)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_policy_keeps_its_types(case: str) -> None:
    with wide():
        check_calls_keep_types(CASES[case].policy, CASES[case].spec)


EXACT = ("magicpig", "streaming_llm:budget=64", "h2o:budget=64", "mikv", "pariskv")


@pytest.mark.parametrize("text", EXACT)
def test_a_step_returns_what_it_returns_with_32_bit_types(text: str) -> None:
    spec = kvjax.CacheSpec(
        batch=1, q_heads=2, kv_heads=1, head_dim=64, capacity=256, dtype=jnp.float32
    )
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(1, PROMPT + 3, heads, 64)).astype(np.float32) for heads in (2, 1, 1)
    )

    def run() -> np.ndarray:
        policy = policy_of_the_last_layer(kvjax.presets.parse(text), spec)
        cache = kvjax.init_layer(policy, spec)
        _, cache = jax.jit(kvjax.prefill)(cache, *(a[:, :PROMPT] for a in (q, k, v)))
        out, _ = jax.jit(kvjax.decode)(cache, *(a[:, PROMPT:] for a in (q, k, v)))
        return np.asarray(out)

    expected = run()
    with wide():
        np.testing.assert_allclose(run(), expected, atol=1e-5)


# ---------------------------------------------------------------------------------- generation

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, layers=2, q_heads=4, kv_heads=2, head_dim=8,
)  # fmt: skip
TEXT = np.random.default_rng(1).integers(40, size=(2, 20)).astype(np.int32)
LENGTHS = np.array([20, 13])
RULES = Processors(repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=2)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


SELECTING = "fier:budget=16,sink=2,local=4,group=4,chunk=8,dense_layers=0"


def _generate(model: Decoder, policy: str = "full", **how: Any) -> Any:
    policies = kvjax.presets.parse(policy)
    cache = kvjax.init(policies, model.spec(2, 64), layers=CONFIG.layers)
    return generate(model, cache, TEXT, LENGTHS, max_new_tokens=4, stop_tokens=1, **how).rows


def _through_an_engine(model: Decoder, policy: str = "full", **settings: Any) -> Any:
    """Two requests, and the next turn of each."""
    engine = kvjax.Engine(model, policy, slots=2, capacity=64, chunk=16, block=2, **settings)
    talks = [row[:length].tolist() for row, length in zip(TEXT, LENGTHS, strict=True)]
    for _ in range(2):
        for talk in talks:
            (request,) = engine.submit(talk, max_new_tokens=4)
            engine.run()
            talk += [*request.tokens, 5]
    return talks


def _with_states(_: Decoder, mixer: Any, **how: Any) -> Any:
    """Of a model whose first layer keeps a state."""
    config = dataclasses.replace(CONFIG, recurrent=(0,), mixer=mixer)
    hybrid = Decoder(config, rngs=nnx.Rngs(3))
    cache = kvjax.init(kvjax.Full(), hybrid.spec(2, 64), layers=config.layers)
    return generate(hybrid, cache, TEXT, LENGTHS, max_new_tokens=4, **how).rows


DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=6)
LOOK_UP = PromptLookup(ngram=2, tokens=3)
DRAWS = sampling(0.7, top_k=9, top_p=0.9, min_p=0.01)
ANSWERS: dict[str, Callable[[Decoder], Any]] = {
    "greedy": lambda m: _generate(m, measure=True),
    "drawn": lambda m: _generate(m, sampling=DRAWS, key=jax.random.key(0)),
    "by rules": lambda m: _generate(m, processors=RULES),
    "with a look-up": lambda m: _generate(m, draft=LOOK_UP),
    "with a draft model": lambda m: _generate(m, draft=DraftModel(m, tokens=3)),
    "with drafts of its own": lambda m: _generate(m, SELECTING, draft=SelfDraft(tokens=3)),
    "drawn with drafts of its own": lambda m: _generate(
        m, SELECTING, draft=SelfDraft(tokens=3), sampling=DRAWS, key=jax.random.key(0)
    ),
    "by layers that share": lambda m: _generate(m, f"{SELECTING},share=2", draft=SelfDraft()),
    "of sparse prompts": lambda m: _generate(m, sparse_prompt=0.5, chunk=8),
    "of delta nets": lambda m: _with_states(m, DELTA),
    "of delta nets with a look-up": lambda m: _with_states(m, DELTA, draft=LOOK_UP),
    "of short convolutions": lambda m: _with_states(m, ShortConv(channels=32)),
    "of an engine": _through_an_engine,
    "of an engine that drafts": lambda m: _through_an_engine(m, SELECTING, speculate="self"),
    "of an engine that keeps rows": lambda m: _through_an_engine(m, prefix_bytes=10**9),
    "of kept codes": lambda m: _through_an_engine(
        m, "kivi:residual=16,group=8", prefix_bytes=10**9
    ),
    "of stored prefixes": lambda m: _through_an_engine(m, prefixes=1, prefix_tokens=64),
    "of small slots": lambda m: _through_an_engine(m, small_slots={32: 1}),
}


USUAL = (
    "greedy", "drawn", "by rules", "with a look-up", "with a draft model", "with drafts of its own",
    "of an engine",
)  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[] if how in USUAL else pytest.mark.thorough) for how in ANSWERS],
)
def test_answers_are_those_of_32_bit_types(model: Decoder, how: str) -> None:
    expected = ANSWERS[how](model)
    with wide():
        assert ANSWERS[how](model) == expected


# -------------------------------------------------------------------------------------- sources

# How many arguments a call has where its dtype is among them.
WITH_DTYPE = {"zeros": 2, "ones": 2, "empty": 2, "full": 3, "arange": 4, "linspace": 7}
ROOT = Path(kvjax.__file__).parent


def test_every_new_array_has_a_dtype() -> None:
    untyped = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            least = WITH_DTYPE.get(node.func.attr)
            if least is None or ast.unparse(node.func.value) != "jnp":
                continue
            if len(node.args) < least and all(word.arg != "dtype" for word in node.keywords):
                untyped.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not untyped, "with jax_enable_x64 these arrays have 64 bits"


def test_what_tpus_write_has_indices_of_one_type() -> None:
    buffers, news = [jnp.zeros((2, 1, 8, 4))], [jnp.ones((2, 1, 2, 4))]
    start, count = jnp.array([0, 3], jnp.int32), jnp.array([2, 1], jnp.int32)
    with wide():
        (written,) = blocks._write_slices(buffers, news, start, count)
    assert written[:, 0, :, 0].tolist() == [[1, 1, *[0] * 6], [0, 0, 0, 1, *[0] * 4]]
