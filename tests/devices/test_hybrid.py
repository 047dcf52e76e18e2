"""A model with states of fixed size on several devices: its text is that of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax import Placement
from kvjax.models import Decoder, DecoderConfig, GatedDelta, distribute

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    q_heads=8,
    kv_heads=4,
    head_dim=16,
    recurrent=(0,),
    mixer=GatedDelta(key_heads=1, value_heads=3, key_dim=8, value_dim=6),
    output_gate=True,
    initializer_range=0.3,
)
BOTH = Placement(mesh=jax.make_mesh((2, 4), ("data", "model")), batch="data", heads="model")
THREE = Placement(
    mesh=jax.make_mesh((2, 2, 2), ("data", "model", "ctx")),
    batch="data",
    heads="model",
    context="ctx",
)
TEXT = np.random.default_rng(0).integers(0, 64, (2, 24))


def new_cache(model, placement=None, batch=2):
    return kvjax.init(kvjax.Full(), model.spec(batch, 64), layers=2, placement=placement)


@pytest.mark.parametrize(
    "placement",
    [pytest.param(BOTH, marks=pytest.mark.thorough), THREE],
    ids=["rows and heads", "context too"],
)
def test_text_is_that_of_one_device(placement):
    alone = Decoder(CONFIG)
    model = distribute(alone, placement)
    cache = new_cache(model, placement)
    state = cache.layers[0].state.memory.state
    assert state.sharding.spec[0] == "data"
    assert kvjax.shardings(cache).layers[0].state.memory.state == state.sharding
    rows = [row.tolist() for row in TEXT]
    wanted = kvjax.generate(alone, new_cache(alone), rows, max_new_tokens=12)
    found = kvjax.generate(model, cache, rows, max_new_tokens=12)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    taken = kvjax.take_rows(found.cache, [1, 0])
    assert taken.length.tolist() == found.cache.length.tolist()[::-1]
    other = kvjax.take_rows(wanted.cache, [1, 0])
    again, there = (
        kvjax.generate(own, cache, [[5], [6]], max_new_tokens=1)
        for own, cache in ((model, taken), (alone, other))
    )
    np.testing.assert_array_equal(again.tokens, there.tokens)
    np.testing.assert_allclose(again.logits, there.logits, atol=1e-4)
