"""Integers of callers: every public verb takes those of NumPy, and refuses what is none or does
not fit in 32 bits.

A value that is cut to 32 bits would be another one in silence: 2**32 + 5 tokens become 5.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import presets
from kvjax.generation import generate, prefill, stream
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import sampling

SPEC = kvjax.CacheSpec(batch=2, q_heads=2, kv_heads=1, head_dim=8, capacity=64, dtype="float32")
V, ROWS = 11, [[1, 2, 3], [4, 5]]


def layer(filled: bool = True) -> kvjax.LayerCache:
    empty = kvjax.init_layer(kvjax.Full(), SPEC)
    return kvjax.prefill(empty, *step(8))[1] if filled else empty


def step(tokens: int) -> tuple[Any, ...]:
    q, k = jnp.ones((2, tokens, 2, 8)), jnp.ones((2, tokens, 1, 8))
    return q, k, k


def cache() -> kvjax.Cache:
    return kvjax.init(kvjax.Full(), SPEC, layers=1)


@jax.tree_util.Partial
def model(tokens: Any, cache: Any, **settings: Any) -> Any:
    return jnp.zeros((len(tokens), V)).at[:, 3].set(1.0), cache


def run(**settings: Any) -> Any:
    return generate(
        model, cache(), settings.pop("prompt", ROWS), **{"max_new_tokens": 3, **settings}
    ).tokens


def saved(**settings: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save(
            folder, layer(), **({"keep": settings["keep"]} if "keep" in settings else {})
        )
        if "step" in settings:
            return kvjax.restore(folder, layer(False), step=settings["step"]).spec.capacity
        return 0


# What each takes, by a good value. Verbs that take one integer, and those that take one for
# each row.
ONE: dict[str, tuple[int, Callable[[Any], Any]]] = {
    **{
        f"CacheSpec({name}=)": (2, lambda n, name=name: dataclasses.replace(SPEC, **{name: n}))
        for name in ("batch", "q_heads", "head_dim", "capacity")
    },
    "init(layers=)": (2, lambda n: len(kvjax.init(kvjax.Full(), SPEC, layers=n).layers)),
    "grow(capacity=)": (128, lambda n: kvjax.grow(layer(), n).spec.capacity),
    "insert(row=)": (
        1,
        lambda n: kvjax.insert(layer(), kvjax.take_rows(layer(), [0]), n).length,
    ),
    "generate(max_new_tokens=)": (3, lambda n: run(max_new_tokens=n)),
    "generate(chunk=)": (16, lambda n: run(chunk=n)),
    "generate(stop_tokens=)": (3, lambda n: run(stop_tokens=n)),
    "generate(stop_tokens=[])": (3, lambda n: run(stop_tokens=[n])),
    "stream(block=)": (
        2,
        lambda n: np.asarray(next(stream(model, cache(), ROWS, max_new_tokens=4, block=n))),
    ),
    "save(keep=)": (1, lambda n: saved(keep=n)),
    "restore(step=)": (0, lambda n: saved(step=n)),
    "sampling(top_k=)": (3, lambda n: float(sampling(1.0, top_k=n).top_k)),
    "PromptLookup(tokens=)": (4, lambda n: kvjax.PromptLookup(tokens=n)),
    "PromptLookup(ngram=)": (2, lambda n: kvjax.PromptLookup(ngram=n)),
    "Processors(min_new_tokens=)": (2, lambda n: Processors(min_new_tokens=n)),
    "Processors(suppress_tokens=)": (2, lambda n: Processors(suppress_tokens=(n,))),
    "fier(budget=)": (256, lambda n: presets.fier(budget=n)),
    "Layers(dense=)": (1, lambda n: presets.fier(256, layers=presets.Layers(dense=n))),
    "Sliding via streaming_llm(budget=)": (64, lambda n: presets.streaming_llm(budget=n)),
}
EACH: dict[str, tuple[list[int], Callable[[Any], Any]]] = {
    "prefill(lengths=)": (
        [3, 8],
        lambda n: kvjax.prefill(layer(False), *step(8), lengths=n)[1].length,
    ),
    "attention(lengths=)": (
        [3, 8],
        lambda n: kvjax.attention(layer(False), *step(8), lengths=n)[1].length,
    ),
    "decode(lengths=)": (
        [1, 4],
        lambda n: kvjax.decode(layer(), *step(4), lengths=n)[1].length,
    ),
    "truncate": ([5, 8], lambda n: kvjax.truncate(layer(), n).length),
    "rollback": ([5, 8], lambda n: kvjax.rollback(layer(), n).length),
    "take_rows": ([1, 0], lambda n: kvjax.take_rows(layer(), n).length),
    "generate(lengths=)": ([3, 8], lambda n: run(prompt=np.ones((2, 8), int), lengths=n)),
    "generate(prompt=)": ([3, 8], lambda n: run(prompt=[n, n])),
    "generate(prompt=[B, T])": ([3, 8], lambda n: run(prompt=np.array([n, n]))),
    "generation.prefill(lengths=)": (
        [3, 8],
        lambda n: prefill(model, cache(), np.ones((2, 8), int), n)[0],
    ),
    "generation.prefill(tokens=)": (
        [3, 8],
        lambda n: prefill(model, cache(), np.array([n, n]))[0],
    ),
}
DTYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("verb", ONE)
def test_one_integer_is_one_of_any_kind(verb: str) -> None:
    good, call = ONE[verb]
    wanted = call(good)
    for dtype in DTYPES if good < 128 else DTYPES[2:]:
        found = call(dtype(good))
        np.testing.assert_array_equal(np.asarray(found, object), np.asarray(wanted, object))
        assert repr(found) == repr(wanted)
    for bad in (
        2**32 + good,
        np.int64(2**32 + good),
        np.uint64(2**32 + good),
        -1 - good,
        True,
        2.0,
        np.float32(2),
        "2",
    ):
        if (
            "top_k" in verb
            and not isinstance(bad, str | float | np.floating | bool)
            and bad > 0
        ):
            continue  # more than any vocabulary has keeps all
        with pytest.raises(ValueError) as error:  # noqa: PT011 (each verb has its own words)
            call(bad)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("verb", EACH)
def test_one_integer_for_each_row_is_one_of_any_kind(verb: str) -> None:
    good, call = EACH[verb]
    wanted = call(good) if verb.startswith("generate(prompt=)") else call(np.array(good))
    for dtype in DTYPES:
        np.testing.assert_array_equal(call(np.array(good, dtype)), wanted)
    first, second = good
    for bad in (
        [2**32 + first, second],
        np.array([2**32 + first, second]),
        np.array([2**32 + first, second], np.uint64),
        [-1 - first, second],
        [-(2**32) + first, second],
        np.array([-(2**32) + first, second]),
        [2**70, second],
        [True, False],
        [1.0, 2.0],
        np.array(good, np.float32),
        ["1", "2"],
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call(bad)
        assert len(str(error.value)) < 400
