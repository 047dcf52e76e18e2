"""Any callable is a model: the tokens are those of the module that it calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.generation import as_model, prefill, stream, warm_up

LAYERS = 2
SPEC = kvjax.CacheSpec(batch=2, q_heads=2, kv_heads=1, head_dim=8, capacity=32, dtype="float32")
PROMPT = [[1, 2, 3], [4, 5]]


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: Any, cache: Any, **call: Any) -> Any:
        parts = [linen.DenseGeneral((heads, 8), use_bias=False)(x) for heads in (2, 1, 1)]
        mixed, cache = kvjax.attention(cache, *parts, **call)
        return x + linen.DenseGeneral(16, (-2, -1), use_bias=False)(mixed), cache


class Linen(linen.Module):
    """A language model of two blocks."""

    @linen.compact
    def __call__(
        self,
        tokens: Any,
        cache: Any,
        *,
        lengths: Any = None,
        active: Any = None,
        last_logits: bool = False,
        first_chunk: bool = False,
    ) -> Any:
        call = {"lengths": lengths, "active": active, "first_chunk": first_chunk}
        x, layers = linen.Embed(32, 16)(tokens), []
        for layer in cache.layers:
            x, layer = Block()(x, layer, **call)
            layers.append(layer)
        logits = linen.Dense(32, use_bias=False)(x)
        if last_logits:
            last = lengths - 1 if lengths is not None else jnp.zeros(x.shape[0], jnp.int32)
            logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
        return logits, kvjax.Cache(tuple(layers))


def empty() -> kvjax.Cache:
    return kvjax.init(kvjax.Full(), SPEC, layers=LAYERS)


@pytest.fixture(scope="module")
def variables() -> Any:
    return jax.jit(Linen().init)(jax.random.key(0), jnp.zeros((2, 3), jnp.int32), empty())


@pytest.fixture(scope="module")
def wanted(variables: Any) -> list[list[int]]:
    """The tokens of `jax.tree_util.Partial`, which is a pytree."""
    model: Any = jax.tree_util.Partial(Linen().apply, variables)
    return kvjax.generate(model, empty(), PROMPT, max_new_tokens=4).rows


class Server:
    """Not a pytree, with the weights in a field."""

    def __init__(self, variables: Any) -> None:
        self.variables = variables

    def __call__(self, tokens: Any, cache: Any, **call: Any) -> Any:
        return Linen().apply(self.variables, tokens, cache, **call)

    def answer(self, tokens: Any, cache: Any, **call: Any) -> Any:
        return self(tokens, cache, **call)


KINDS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda v: lambda t, c, **call: Linen().apply(v, t, c, **call),
    "a partial": lambda v: partial(Linen().apply, v),
    "a partial with a flag": lambda v: partial(Linen().apply, v, mutable=False),
    "a bound Linen module": lambda v: Linen().bind(v),
    "an object": Server,
    "a bound method": lambda v: Server(v).answer,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_callable_generates_as_the_pytree_of_its_weights(
    kind: str, variables: Any, wanted: list[list[int]]
) -> None:
    model = KINDS[kind](variables)
    assert kvjax.generate(model, empty(), PROMPT, max_new_tokens=4).rows == wanted
    blocks = list(stream(model, empty(), PROMPT, max_new_tokens=4, block=2))
    assert np.concatenate(blocks, axis=1).tolist() == wanted


def test_a_partial_and_a_bound_module_give_their_weights_as_arguments(variables: Any) -> None:
    weights = len(jax.tree.leaves(variables))
    for kind in ("a partial", "a partial with a flag", "a bound Linen module"):
        assert len(jax.tree.leaves(as_model(KINDS[kind](variables)))) == weights
    module = Linen()
    first, again = (as_model(partial(module.apply, variables)) for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(again)
    other = as_model(partial(module.apply, variables, mutable=False))
    assert jax.tree.structure(first) != jax.tree.structure(other)


def test_the_same_callable_compiles_once(variables: Any) -> None:
    traces = []

    def model(tokens: Any, cache: Any, **call: Any) -> Any:
        traces.append(1)
        return Linen().apply(variables, tokens, cache, **call)

    warm_up(model, empty(), 3, max_new_tokens=4)
    traced = len(traces)
    kvjax.generate(model, empty(), PROMPT, max_new_tokens=4)
    again = len(traces)
    kvjax.generate(model, empty(), PROMPT, max_new_tokens=4)
    assert len(traces) == again <= traced + 1
    prefill(model, empty(), PROMPT[:1] * 2)


def test_an_engine_serves_a_callable(variables: Any, wanted: list[list[int]]) -> None:
    engine = kvjax.Engine(partial(Linen().apply, variables), empty())
    requests = [engine.submit(row, max_new_tokens=4)[0] for row in PROMPT]
    engine.run()
    assert [request.tokens for request in requests] == wanted


def test_an_engine_makes_the_cache_of_a_model_that_says_its_sizes() -> None:
    config = models.DecoderConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
    )
    model = models.Decoder(config)
    made = kvjax.Engine(model, "full", slots=2, capacity=64)
    given = kvjax.Engine(model, kvjax.init(kvjax.Full(), model.spec(2, 64), layers=2))
    answers = []
    for engine in (made, given):
        (request,) = engine.submit([1, 2, 3], max_new_tokens=3)
        engine.run()
        answers.append(request.tokens)
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match=r"for another make it: kvjax\.init\(policy, "):
        kvjax.Engine(lambda *args, **call: args, kvjax.Full(), slots=2, capacity=64)


def test_what_is_a_pytree_stays_as_it_is(variables: Any) -> None:
    for model in (jax.tree_util.Partial(Linen().apply, variables), 3, Linen):
        assert as_model(model) is model


class Scanned(linen.Module):
    """The blocks of `Linen` as one, whose weights are stacked by a scan; it has no cache."""

    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        over = {"params": 0}
        scan = linen.scan(Block, variable_axes=over, split_rngs={"params": True}, length=LAYERS)
        x, _ = scan(name="blocks")(linen.Embed(32, 16, name="embed")(tokens), None)
        return linen.Dense(32, use_bias=False, name="logits")(x)


def layer_by_layer(params: Any, tokens: Any, cache: Any, **call: Any) -> Any:
    """The recipe of the guide for stacked weights."""
    last_logits = call.pop("last_logits", False)
    x = params["embed"]["embedding"][tokens]
    layers = []
    for i, layer in enumerate(cache.layers):
        weights = jax.tree.map(lambda w, i=i: w[i], params["blocks"])
        x, layer = Block().apply({"params": weights}, x, layer, **call)
        layers.append(layer)
    if last_logits:
        lengths = call.get("lengths")
        last = jnp.zeros(len(x), jnp.int32) if lengths is None else lengths - 1
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return x @ params["logits"]["kernel"], kvjax.Cache(tuple(layers))


def test_stacked_weights_of_a_scan_generate_layer_by_layer() -> None:
    params = Scanned().init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    spec = dataclasses.replace(SPEC, batch=1)
    cache = kvjax.init(kvjax.Full(), spec, layers=LAYERS)
    model = partial(layer_by_layer, params)
    (found,) = kvjax.generate(model, cache, [[1, 2, 3]], max_new_tokens=4).rows
    text = jnp.array([[1, 2, 3, *found]])
    wanted = jnp.argmax(Scanned().apply({"params": params}, text), axis=-1)[0, 2:-1]
    assert found == wanted.tolist()


def test_a_cache_that_was_stacked_is_refused_with_the_recipe(variables: Any) -> None:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *empty().layers)
    for cache in (stacked, kvjax.Cache((stacked,))):
        with pytest.raises(ValueError, match=r"layers that are stacked, .*\bw\[i\], stacked\)"):
            kvjax.generate(partial(Linen().apply, variables), cache, PROMPT, max_new_tokens=2)  # type: ignore[arg-type]
