"""A cache whose policy turns keys by another RoPE than the model is refused wherever the two
meet.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import presets
from kvjax.generation.prefilling import prefill
from kvjax.models import Decoder, DecoderConfig, rope

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    layers=2,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    norm_eps=1e-5,
)
TURNING = {
    "streaming_llm": lambda theta: presets.streaming_llm(16, rope_theta=theta),
    "close_up": lambda theta: presets.evict(16, every=4, close_up=True, rope_theta=theta),
    "expected": lambda theta: presets.evict(16, rule="expected", every=4, rope_theta=theta),
    "triattention": lambda theta: presets.evict(
        16, rule="triattention", every=4, rope_theta=theta
    ),
    "shadowkv": lambda theta: presets.shadowkv(
        32,
        rank=4,
        page=8,
        sink=0,
        local=8,
        outliers=0,
        learn=16,
        rope_theta=theta,
        layers=presets.Layers(dense=1),
    ),
}
OTHER = {
    "theta": (
        {"rope": rope.Default(theta=500.0)},
        r"has Default\(theta=500.0\).*: set rope_theta=500.0$",
    ),
    "scaled": (
        {"rope": rope.Linear(factor=2.0)},
        r": give it rope=Linear\(theta=10000.0, factor=2.0\)$",
    ),
    "by length": (
        {"rope": rope.Dynamic(factor=2.0, original=64)},
        "leave rope_theta out, or use a method without it",
    ),
    "partial": (
        {"rotary_dim": 4},
        "in 4 of 8 channels: no policy follows that; leave rope_theta out",
    ),
    "absent": (
        {"unrotated": (1,)},
        "than layer 1 of this model, which has None.*leave rope_theta out",
    ),
    "local": (
        {"windows": (None, 4), "local_rope": rope.Default(theta=100.0)},
        r"layer 1.*: set rope_theta=100.0$",
    ),
}


@pytest.mark.parametrize("made", TURNING.values(), ids=TURNING)
@pytest.mark.parametrize(("changes", "said"), OTHER.values(), ids=OTHER)
def test_a_policy_of_another_rope_than_the_model_is_refused(made, changes, said):
    config = dataclasses.replace(CONFIG, **changes)
    shapes = jax.eval_shape(
        lambda: kvjax.init(made(1e4), config.spec(1, 64, "float32"), layers=2)
    )
    with pytest.raises(ValueError, match=said):
        config.check_cache(shapes)
    CONFIG.check_cache(shapes)


def test_models_refuse_such_a_cache_and_take_that_of_their_own_rope():
    model = Decoder(
        dataclasses.replace(CONFIG, rope=rope.Default(theta=500.0)),
        rngs=nnx.Rngs(0),
        dtype="float32",
    )
    wrong, right = (
        kvjax.init(
            presets.streaming_llm(16, rope_theta=theta),
            model.spec(batch=1, capacity=32),
            layers=2,
        )
        for theta in (1e4, 500.0)
    )
    tokens = np.ones((1, 4), np.int32)
    for call in (
        lambda cache: prefill(model, cache, tokens),
        lambda cache: kvjax.generate(model, cache, tokens, max_new_tokens=1),
        lambda cache: kvjax.Engine(model, cache),
    ):
        with pytest.raises(ValueError, match=r"set rope_theta=500\.0"):
            call(wrong)
    kvjax.generate(model, right, tokens, max_new_tokens=1)
