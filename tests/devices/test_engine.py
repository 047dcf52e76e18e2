"""An engine whose rows and heads are split over devices gives each request the tokens of one
device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
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
