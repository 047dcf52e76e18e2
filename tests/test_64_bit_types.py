"""Under `jax_enable_x64`, where constants and indices have 64 bits by default: nothing widens, and
int32 never meets int64.

Promotion is strict, which raises wherever the standard one would widen.
"""

from __future__ import annotations

import ast
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
from kvjax.generation.drafts import DraftModel, PromptLookup
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder, DecoderConfig
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
        _, cache = kvjax.prefill(cache, *(a[:, :PROMPT] for a in (q, k, v)))
        out, _ = kvjax.decode(cache, *(a[:, PROMPT:] for a in (q, k, v)))
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


def _generate(model: Decoder, **how: Any) -> Any:
    cache = kvjax.init(kvjax.Full(), model.spec(2, 64), layers=CONFIG.layers)
    return generate(model, cache, TEXT, LENGTHS, max_new_tokens=4, stop_tokens=1, **how).rows


def _through_an_engine(model: Decoder) -> Any:
    cache = kvjax.init(kvjax.Full(), model.spec(2, 64), layers=CONFIG.layers)
    engine = kvjax.Engine(model, cache, chunk=16, block=2)
    requests = []
    for row, length in zip(TEXT, LENGTHS, strict=True):
        requests += engine.submit(row[:length], max_new_tokens=4)
    engine.run()
    return [request.tokens for request in requests]


DRAWS = sampling(0.7, top_k=9, top_p=0.9, min_p=0.01)
ANSWERS: dict[str, Callable[[Decoder], Any]] = {
    "greedy": lambda m: _generate(m, measure=True),
    "drawn": lambda m: _generate(m, sampling=DRAWS, key=jax.random.key(0)),
    "by rules": lambda m: _generate(m, processors=RULES),
    "with a look-up": lambda m: _generate(m, draft=PromptLookup(ngram=2, tokens=3)),
    "with a draft model": lambda m: _generate(m, draft=DraftModel(m, tokens=3)),
    "of an engine": _through_an_engine,
}


@pytest.mark.parametrize("how", ANSWERS)
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
