"""Kept rows on disk belong to one model: its weights, its settings and its code.

Any callable is a model. Prefixes that another function, or a module of other settings, had saved
were taken, and gave the tokens of neither.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.generation.callables import as_model
from kvjax.models import Decoder
from kvjax.serve import identity
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


def written(text, **names):
    """`model` of a text, such as a cell of a notebook, beside variables of these names."""
    variables = {"__name__": "a_users_module", **names}
    exec(text, variables)
    return variables["model"]


READS_GLOBAL = "def model(tokens, cache): return weights[tokens], cache"
CALLS_GLOBAL = """
def scaled(x): return x * {}
def model(tokens, cache): return scaled(tokens), cache
"""
READS_MODULE = "def model(tokens, cache): return settings.scale * tokens, cache"


def reads_module(scale):
    settings = types.ModuleType("a_users_settings")
    settings.scale = scale
    return written(READS_MODULE, settings=settings)


def decorated(scale):
    def model(tokens, cache):
        return tokens, cache

    @functools.wraps(model)
    def scaled(tokens, cache):
        return model(tokens * scale, cache)

    return scaled


@dataclasses.dataclass
class Table:
    """A callable whose text leaves out the middle of its weights."""

    weights: np.ndarray

    def __call__(self, tokens, cache):
        return self.weights[tokens], cache


def long_table(middle):
    weights = np.zeros(5000)
    weights[2500] = middle
    return Table(weights)


class Plain:
    """A callable whose text is the same for all of its objects."""

    def __init__(self, theta):
        self.theta = theta

    def __repr__(self):
        return "Plain()"

    def __call__(self, tokens, cache):
        return tokens * self.theta, cache


class Activated(nnx.Module):
    def __init__(self, activation):
        self.weights = nnx.Param(jnp.ones(3))
        self.activation = activation

    def __call__(self, tokens, cache):
        return self.activation(self.weights[tokens]), cache


def activated(number):
    return Activated([lambda x: x * 2, lambda x: x * 3][number])


def of_class(scale):
    """A module of a class of the same name, whose method does something else."""

    class Own(nnx.Module):
        def __init__(self):
            self.weights = nnx.Param(jnp.ones(3))

        if scale == 2:

            def __call__(self, tokens, cache):
                return self.weights[tokens] * 2, cache
        else:

            def __call__(self, tokens, cache):
                return self.weights[tokens] * 3, cache

    return Own()


def with_property(scale):
    class Own:
        @property
        def theta(self):
            return scale

        def __call__(self, tokens, cache):
            return tokens * self.theta, cache

    return Own()


def reads_class(scale):
    class Settings:
        theta = scale

    def model(tokens, cache):
        return tokens * Settings.theta, cache

    return model


def drawn(seed):
    key = jax.random.key(seed)
    return lambda tokens, cache: (jax.random.normal(key, tokens.shape), cache)


def two_numbers(first, second):
    return lambda tokens, cache: (tokens * first + second, cache)


def jitted(weights):
    return jax.jit(closed(weights))


def by_default(number):
    def model(tokens, cache, scale=number):
        return tokens * scale, cache

    return model


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Leaf:
    """A pytree whose leaf is a number of Python."""

    theta: float

    def __call__(self, tokens, cache):
        return tokens * self.theta, cache


ONE, OTHER = np.ones(3, np.float32), np.array([1, 1, 1.0000001], np.float32)
PAIRS = {
    "weights that a function closes over": (closed, (ONE,), (OTHER,)),
    "a number that it closes over": (closed, (ONE, 1.0), (ONE, 2.0)),
    "a function that it closes over": (nested, (ONE,), (OTHER,)),
    "weights of a partial": (functools.partial, (plus, ONE), (plus, OTHER)),
    "the function of a partial": (functools.partial, (plus, ONE), (minus, ONE)),
    "a setting of a module": (Scaled, (1e4,), (1e6,)),
    "the object of a method": (lambda theta: Owner(theta).forward, (1.0,), (2.0,)),
    "a global variable": (lambda w: written(READS_GLOBAL, weights=w), (ONE,), (OTHER,)),
    "a global function": (lambda k: written(CALLS_GLOBAL.format(k)), (2,), (3,)),
    "a variable of a module": (reads_module, (2,), (3,)),
    "what a decorator closes over": (decorated, (2,), (3,)),
    "the middle of a long table": (long_table, (1,), (2,)),
    "an object whose text is that of others": (Plain, (1,), (2,)),
    "a function of a module": (activated, (0,), (1,)),
    "the code of a class": (of_class, (2,), (3,)),
    "a property": (with_property, (2,), (3,)),
    "a variable of a class": (reads_class, (2,), (3,)),
    "the seed of a key": (drawn, (2,), (3,)),
    "where one number ends": (two_numbers, (1, 23), (12, 3)),
    "which number is first": (two_numbers, (1, 2), (2, 1)),
    "what jit was given": (jitted, (ONE,), (OTHER,)),
    "a default": (by_default, (2,), (3,)),
    "a leaf that is no array": (Leaf, (2.0,), (3.0,)),
    "complex weights": (closed, (ONE * 1j,), (OTHER * 1j,)),
    "texts in an array": (closed, (np.array(["a"]),), (np.array(["b"]),)),
    "members of a set": (closed, (frozenset("ab"),), (frozenset("ac"),)),
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


def test_functions_that_call_each_other_have_a_digest():
    text = """
def other(tokens): return model(tokens[1:], None)
def model(tokens, cache): return other(tokens), cache
"""
    assert digest_of(as_model(written(text))) == digest_of(as_model(written(text)))


def test_a_set_has_no_order():
    """That of its texts is another in each process; that of these numbers is as they came."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert list(one) != list(other)
    assert digest_of(as_model(closed(one))) == digest_of(as_model(closed(other)))


def test_code_of_packages_is_told_by_its_name():
    """The functions of jax that a model calls read thousands of variables, and some of them are
    counters.
    """
    text = "def model(tokens, cache): return softmax(jnp.sin(tokens)), cache"
    names = {"softmax": jax.nn.softmax, "jnp": jnp}
    before = digest_of(as_model(written(text, **names)))
    jax.nn.softmax(jnp.ones(3))
    assert digest_of(as_model(written(text, **names))) == before


def test_a_model_that_cannot_be_told_from_others_is_refused():
    for held in (object(), iter([1])):
        with pytest.raises(ValueError, match=r"it holds .*; leave that out of the model"):
            digest_of(as_model(closed(held)))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool", "complex64"]
)
def test_each_number_and_its_place_counts(dtype):
    """Flags, too: those of other places had the same sum of places."""
    weights = np.random.default_rng(0).permutation(np.arange(1, 25)).reshape(2, 3, 4)
    if dtype == "bool":
        weights = weights % 2
    elif dtype in ("int32", "uint32"):
        weights = weights + 2**25  # the next number in float32 is 4 more
    elif dtype != "int8":
        weights = weights / 8
    others = [
        np.where(weights == number, 0, weights) for number in (weights.min(), weights.max())
    ]
    others += [weights + (weights == weights.max()) / 8] if "float" in dtype else []
    others += [weights - (weights == weights.max())]
    others += [np.flip(weights, axis) for axis in range(3)]
    others += [np.swapaxes(weights, 0, 1), weights.reshape(3, 2, 4), weights[:1]]
    others = [one for one in others if one.shape != weights.shape or (one != weights).any()]
    told = {digest_of(as_model(closed(jnp.asarray(one, dtype)))) for one in others}
    assert digest_of(as_model(closed(jnp.asarray(weights, dtype)))) not in told


def test_any_two_numbers_that_change_places_are_told():
    weights = np.arange(24, dtype=np.float32)
    swapped = [weights]
    for one, other in itertools.combinations(range(24), 2):
        swapped.append(weights.copy())
        swapped[-1][[one, other]] = weights[[other, one]]
    sums = jax.vmap(identity._checksum)(jnp.stack(swapped).reshape(-1, 2, 2, 6))
    assert len({tuple(both) for both in sums.tolist()}) == len(swapped)


def test_numbers_are_mixed_as_by_murmurhash():
    """Its last steps, on numbers of Python."""
    numbers = [0, 1, 2, 1 << 16, 1 << 31, 0xDEADBEEF, 2**32 - 1]

    def mixed(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    assert mixed(1) == 0x514E28B7
    found = identity._mixed(jnp.array(numbers, jnp.uint32))
    assert found.tolist() == [mixed(number) for number in numbers]


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
    with pytest.raises(ValueError, match="of a model with other weights, settings or code"):
        engine_of(1).restore_prefixes(tmp_path)
