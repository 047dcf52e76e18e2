"""An engine whose rows and heads are split over devices gives each request the tokens of one
device.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import Placement
from kvjax.generation.loops import decode_loop
from kvjax.models import Decoder, distribute
from tests.devices.test_models import BOTH, CONFIG, HOSTED


@pytest.fixture(scope="module")
def alone() -> Decoder:
    """A model of one layer on one device."""
    config = dataclasses.replace(CONFIG, layers=1, windows=CONFIG.windows[:1])
    return Decoder(config, rngs=nnx.Rngs(7))


SELECTING = "fier:budget=24,sink=2,local=6,group=4,chunk=8,dense_layers=0"


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (HOSTED, {}),
        (SELECTING, {"speculate": "self", "prefix_bytes": 10**7, "park": 1}),
        (SELECTING, {"prefixes": 1, "prefix_tokens": 16}),
    ],
    ids=["hosted", "drafts", "prefixes"],
)
def test_an_engine_runs_on_the_device_of_its_cache(
    alone: Decoder, method: str, settings: Any
) -> None:
    """Whatever the default device is, which another thread may have set for itself alone: it
    gives the tokens that it gives where that is the default, by the same programs.
    """
    policies = kvjax.presets.parse(method)
    third = jax.devices()[3]
    prompts = [list(range(1, n)) for n in (20, 7, 30)]
    model = jax.device_put(alone, third)
    with jax.default_device(third):
        spec = model.spec(batch=2, capacity=64)
        caches = [kvjax.init(policies, spec, layers=1) for _ in range(2)]

    def run(cache: kvjax.Cache) -> Any:
        engine = kvjax.Engine(model, cache, block=4, chunk=16, **settings)
        sent = [engine.submit(prompt, max_new_tokens=9)[0] for prompt in prompts]
        engine.run()
        assert [request.error for request in sent] == [None] * 3
        return [request.tokens for request in sent]

    with jax.default_device(third):
        wanted = run(caches.pop())
    assert run(caches.pop()) == wanted


def call(model: Decoder, *args: Any, **named: Any) -> Any:
    return model(*args, **named)


def test_engines_of_all_kinds_run_on_a_device_that_is_not_the_default(alone: Decoder) -> None:
    """A function with the weights bound, arrays of which none was put on a device, and a cache in
    host memory that the engine makes where the model is.
    """
    third = jax.devices()[3]
    prompts = [list(range(1, n)) for n in (20, 7)]
    there = jax.device_put(alone, third)

    def cache_of(model: Decoder, method: str = SELECTING) -> kvjax.Cache:
        policies = kvjax.presets.parse(method)
        return kvjax.init(policies, model.spec(batch=2, capacity=64), layers=1)

    def answers(engine: kvjax.Engine) -> list[list[int]]:
        sent = [engine.submit(prompt, max_new_tokens=5)[0] for prompt in prompts]
        engine.run()
        assert [request.error for request in sent] == [None, None]
        return [request.tokens for request in sent]

    wanted = answers(kvjax.Engine(alone, cache_of(alone), block=4))
    assert answers(kvjax.Engine(partial(call, there), cache_of(there), block=4)) == wanted
    with jax.default_device(third):
        made = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(jax.device_get(alone))
        engine = kvjax.Engine(made, cache_of(made), block=4)
    assert not jax.tree.leaves(made)[0].committed
    assert answers(engine) == wanted

    hosted = answers(kvjax.Engine(alone, cache_of(alone, HOSTED), block=4))
    made_there = kvjax.Engine(there, HOSTED, slots=2, capacity=64, block=4)
    assert answers(made_there) == hosted


def test_a_cache_that_moved_to_the_model_is_that_of_one_engine(alone: Decoder) -> None:
    model = jax.device_put(alone, jax.devices()[3])
    cache = kvjax.init(kvjax.Full(), model.spec(batch=1, capacity=64), layers=1)
    kvjax.Engine(model, cache)
    with pytest.raises(ValueError, match="donated"):
        kvjax.Engine(model, cache)


@pytest.mark.parametrize(
    "method",
    [
        "full",
        "kivi:residual=16,group=8",  # whose prompts of two chunks are held until they end
    ],
)
def test_requests_over_rows_and_heads_get_their_tokens(alone: Decoder, method: str) -> None:
    """Two rows on each half of the devices, slots used again, a cancelled request, and answers
    to one prompt; by one program, wherever the last call left its arrays.
    """
    policies, rng = kvjax.presets.parse(method), np.random.default_rng(0)
    prompts = [rng.integers(1, 90, n).tolist() for n in (50, 3, 40, 20, 31)]

    def run(model: Decoder, placement: Placement | None) -> list[list[int]]:
        cache = kvjax.init(
            policies, model.spec(batch=4, capacity=128), layers=1, placement=placement
        )
        engine = kvjax.Engine(model, cache, block=4, chunk=32)
        sent = [
            request
            for i, prompt in enumerate(prompts)
            for request in engine.submit(prompt, max_new_tokens=9, n=2 if i == 1 else 1)
        ]
        while sent[0].state != "running":  # a step reads a bounded part of the prompts
            engine.step()
        if placement is not None:
            with pytest.raises(
                ValueError, match="no row can be taken out of slots that devices share"
            ):
                engine.row(sent[0])
        engine.cancel(sent[0])
        engine.run()
        return [request.tokens for request in sent[1:]]

    wanted = run(alone, None)
    programs = decode_loop._cache_size()
    assert run(distribute(alone, BOTH), BOTH) == wanted
    assert decode_loop._cache_size() == programs + 1
