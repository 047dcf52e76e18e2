"""Kept rows on disk belong to one model: its weights, its settings and its code.

Any callable is a model. Prefixes that another function, or a module of other settings, had saved
were taken, and gave the tokens of neither.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.generation.callables import as_model
from kvjax.models import Decoder
from kvjax.serve.identity import digest_of
from tests.fuzz.requests import CONFIG


class Scaled(nnx.Module):
    """A module whose setting is no weight, and that has no `config`."""

    def __init__(self, theta):
        self.weights = nnx.Param(jnp.ones((4, 4)))
        self.theta = theta


def closed(weights, theta=1.0):
    def model(tokens, cache, **settings):
        return weights[tokens] * theta, cache

    return model


def nested(weights):
    inner = closed(weights)
    return lambda tokens, cache: inner(tokens, cache)


def plus(weights, tokens, cache, scale=1):
    return weights[tokens] + scale, cache


def minus(weights, tokens, cache, scale=1):
    return weights[tokens] - scale, cache


class Owner(nnx.Module):
    def __init__(self, theta):
        self.weights = nnx.Param(jnp.ones(3))
        self.theta = theta

    def forward(self, tokens, cache):
        return self.weights[tokens] * self.theta, cache


ONE, OTHER = np.ones(3, np.float32), np.array([1, 1, 1.0000001], np.float32)
PAIRS = {
    "weights that a function closes over": (closed, (ONE,), (OTHER,)),
    "a number that it closes over": (closed, (ONE, 1.0), (ONE, 2.0)),
    "a function that it closes over": (nested, (ONE,), (OTHER,)),
    "weights of a partial": (functools.partial, (plus, ONE), (plus, OTHER)),
    "the function of a partial": (functools.partial, (plus, ONE), (minus, ONE)),
    "a setting of a module": (Scaled, (1e4,), (1e6,)),
    "the object of a method": (lambda theta: Owner(theta).forward, (1.0,), (2.0,)),
}


@pytest.mark.parametrize("case", PAIRS)
def test_models_are_told_apart(case):
    make, one, other = PAIRS[case]
    digest = digest_of(as_model(make(*one)))
    assert digest == digest_of(as_model(make(*one)))
    assert digest != digest_of(as_model(make(*other)))


def test_settings_of_a_partial_are_told_apart():
    one, same, other = (functools.partial(plus, ONE, scale=scale) for scale in (1, 1, 2))
    assert digest_of(as_model(one)) == digest_of(as_model(same)) != digest_of(as_model(other))


def test_a_function_that_calls_itself_has_a_digest():
    def again(tokens, cache):
        return again(tokens, cache)

    assert digest_of(as_model(again)) == digest_of(as_model(again))


def test_a_model_that_cannot_be_told_from_others_is_refused():
    model = as_model(closed(object()))
    with pytest.raises(ValueError, match="its function holds an object; give its weights"):
        digest_of(model)


def test_saved_rows_of_a_function_with_other_weights_are_refused(tmp_path):
    def engine_of(seed):
        decoder = Decoder(CONFIG, rngs=nnx.Rngs(seed))
        empty = kvjax.init(
            kvjax.Full(), decoder.spec(batch=1, capacity=64), layers=CONFIG.layers
        )

        def model(tokens, cache, **settings):
            return decoder(tokens, cache, **settings)

        return kvjax.Engine(model, empty, block=2, chunk=16, prefix_bytes=10**9)

    engine = engine_of(0)
    engine.submit([4, 5, 6], max_new_tokens=2)
    engine.run()
    assert engine.save_prefixes(tmp_path) == 1
    assert engine_of(0).restore_prefixes(tmp_path) == 1
    with pytest.raises(ValueError, match="of a model with other weights or settings"):
        engine_of(1).restore_prefixes(tmp_path)
