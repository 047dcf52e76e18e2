"""config.json: every field is read as transformers reads it, and what would be ignored wrongly
is refused.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import models

from .conftest import CONFIG


def read(**fields):
    raw = {k: v for k, v in {**CONFIG, **fields}.items() if v is not ...}
    if "model_type" in fields:
        raw["architectures"] = None
    config = models.config.Fields(raw)
    return models.weights.find_family(config).configure(config)


TINY = models.DecoderConfig(
    vocab_size=30,
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.4,
)


DELTA = models.GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=6)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 31},
        {"hidden_size": 20},
        {"intermediate_size": 32},
        {"layers": 3, "windows": ()},
        {"q_heads": 2},
        {"kv_heads": 4},
        {"head_dim": 4},
        {"max_position_embeddings": 32},
        {"rope": models.rope.Default(theta=100.0)},
        {"norm_eps": 0.1},
        {"activation": "relu"},
        {"qkv_bias": True},
        {"out_bias": True},
        {"mlp_bias": True},
        {"qk_norm": True},
        {"windows": (3, None)},
        {"tied_head": True},
        {"local_rope": models.rope.Default(theta=50.0), "windows": (3, None)},
        {"rotary_dim": 4},
        {"unrotated": (1,)},
        {"query_scale": 1.0},
        {"soft_cap": 0.5},
        {"head_cap": 1.0},
        {"sinks": True},
        {"norm_offset": True},
        {"post_norms": True},
        {"embedding_scale": 3.0},
        {"experts": models.Experts(count=3, per_token=2, size=24)},
        {"output_gate": True},
        {"recurrent": (0,), "mixer": DELTA},
        {"recurrent": (1,), "mixer": models.ShortConv(channels=16), "mixer_bias": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_the_config_is_read(change):
    """A changed field changes the parameters, the logits, or the positions that the model
    takes.
    """

    before, after = facts(TINY), facts(dataclasses.replace(TINY, **change))
    same_logits = before[1].shape == after[1].shape and np.allclose(
        before[1], after[1], atol=1e-4
    )
    assert not same_logits or before[0] != after[0] or before[2] != after[2]


@cache
def facts(config):
    """Shapes of parameters, logits of random ones, and positions of a decoder."""
    random = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: models.Decoder(config))
    model = jax.tree.map(
        lambda x: jnp.asarray(random.normal(0.3, 0.4, x.shape), x.dtype), model
    )
    logits, _ = jax.jit(lambda model: model(jnp.arange(8, dtype=jnp.int32)[None]))(model)
    return [p.shape for p in jax.tree.leaves(model)], np.asarray(logits), model.max_positions


def test_the_list_above_has_every_field():
    marks = test_every_field_of_the_config_is_read.pytestmark
    listed = {name for change in marks[0].args[1] for name in change}
    listed.add("initializer_range")  # read by test_random_parameters_follow_the_config
    assert listed == {field.name for field in dataclasses.fields(models.DecoderConfig)}


def test_configs_are_hashable_and_equal_by_value():
    assert hash(read()) == hash(read())
    assert read() == read()
    assert read() != read(rope_theta=123.0)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, models.rope.Default(theta=10000.0)),
        ({"rope_theta": 500000}, models.rope.Default(theta=5e5)),
        ({"rope_theta": 1.5e4, "rope_scaling": None}, models.rope.Default(theta=1.5e4)),
        (
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
            models.rope.Default(theta=7.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0},
            models.rope.Default(theta=7.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_theta": 9.0},
            models.rope.Linear(theta=9, factor=2),
        ),
        (
            {
                "rope_parameters": {"rope_theta": 7.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            models.rope.Linear(factor=4.0),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            models.rope.Dynamic(factor=2.0, original=64),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}},
            models.rope.Yarn(factor=2.0, original=64),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "type": "linear",
                    "original_max_position_embeddings": 16,
                }
            },
            models.rope.Yarn(factor=4.0, original=16),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": None},
                "original_max_position_embeddings": 32,
            },
            models.rope.Yarn(factor=2.0, original=32),
        ),
        (
            {
                "original_max_position_embeddings": 8,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 16,
                },
            },
            models.rope.Llama3(factor=8, low_freq_factor=1, high_freq_factor=4, original=8),
        ),
    ],
)
def test_rope_is_read_from_new_and_old_fields(fields, wanted):
    assert read(**fields).rope == wanted


LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 64),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 64),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            64,
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            256,
        ),
        # as published: Llama-3.2-1B, Llama-3.1-8B, Qwen3 with YaRN, Qwen2.5 with YaRN,
        # Yarn-Llama-2
        (
            {"max_position_embeddings": 131072, "rope_scaling": LLAMA3 | {"factor": 32.0}},
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3 | {"factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN | {"factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN | {"factor": 4.0}}, 131072),
    ],
)
def test_positions_of_a_model_are_those_after_scaling(fields, positions):
    assert read(**fields).max_positions == positions


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 5}, (5, 5)),
        (
            {
                "model_type": "mistral",
                "sliding_window": 5,
                "layer_types": ["sliding_attention"] * 2,
            },
            (5, 5),
        ),
        ({"model_type": "qwen2", "sliding_window": 5}, (None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True},
            (None, None),
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 5),
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
            (4096, 4096),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (5, None),
        ),
        (
            {
                "model_type": "llama",
                "layer_types": ["full_attention"] * 2,
                "sliding_window": None,
            },
            (None, None),
        ),
    ],
)
def test_windows_of_layers(fields, windows):
    assert read(**fields).windows == windows


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"num_key_value_heads": ...}, 4),
        ({"num_key_value_heads": None}, 4),
        ({"num_key_value_heads": None, "model_type": "mistral"}, 4),
        ({"num_key_value_heads": ..., "model_type": "mistral", "num_attention_heads": 16}, 8),
        ({"num_key_value_heads": 1}, 1),
    ],
)
def test_kv_heads_default_as_in_transformers(fields, wanted):
    assert read(**fields).kv_heads == wanted


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": ...}, "has no vocab_size"),
        ({"hidden_size": None}, "has no hidden_size"),
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers in config.json must be at least 1, got 0",
        ),
        (
            {"num_attention_heads": "4"},
            "num_attention_heads in config.json must be an integer, got '4'",
        ),
        ({"num_attention_heads": True}, "must be an integer, got True"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4, which num_key_value_heads=3 does not divide",
        ),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None},
            "7 does not divide hidden_size=24",
        ),
        ({"head_dim": 7}, "RoPE needs an even number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps in config.json must be a finite number"),
        (
            {"tie_word_embeddings": "yes"},
            "tie_word_embeddings in config.json must be true or false",
        ),
        ({"hidden_act": "swoosh"}, "'swoosh', which is not supported; use one of silu"),
        (
            {"quantization_config": {"bits": 4}},
            "config.json is of a checkpoint that is quantised .quantization_config., wh",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "that is quantised by awq .quantization_config.",
        ),
        (
            {"compression_config": {"format": "int"}},
            "that is quantised .compression_config., which is not supported",
        ),
        (
            {"num_hidden_layers": 10**6},
            "num_hidden_layers in config.json is 1000000, more than any model has",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json is 0.5"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor in rope_parameters",
        ),
        (
            {"attn_logit_softcapping": 30.0},
            "attn_logit_softcapping in config.json is 30.0, which is not supported",
        ),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2}},
            "'ntk'.*default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "short_factor.*must be a list of finite.*got None",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of config.json has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=.*finite number above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "has no low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling in config.json must be an object"),
        (
            {"rope_theta": float("nan")},
            "rope_theta in config.json must be a finite number, got nan",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "parameters for each kind of layer",
        ),
        ({"sliding_window": 5}, "a Llama has no sliding window"),
        ({"layer_types": ["sliding_attention"] * 2}, "no window is in use"),
        ({"layer_types": ["full_attention"]}, "one name for each of the 2 layers"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "chunked_attention, which is not supported",
        ),
        (
            {
                "model_type": "qwen3",
                "layer_types": ["sliding_attention"] * 2,
                "use_sliding_window": False,
            },
            "no window",
        ),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]},
            "mixes layers",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window in config.json must be at least 1, got 0",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures in config.json must be a list"),
    ],
)
def test_bad_configs_say_what_is_wrong(fields, said):
    with pytest.raises(ValueError, match=said):
        read(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"pretraining_tp": 4},
        {"quantization_config": None},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"attn_logit_softcapping": None},
        {"is_encoder_decoder": False},
        {"attention_dropout": 0.5},
        {"torch_dtype": "float16"},
        {"hidden_size": 24.0},
        {"something_new": 3},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields):
    assert read(**fields) == read()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 0}, "must be at least 1"),
        ({"windows": (1,)}, "1 entries for 2 layers"),
        ({"windows": (0, 1)}, "at least 1"),
        ({"activation": "x"}, "not supported; use one of"),
        ({"kv_heads": 3}, "must divide q_heads"),
        ({"norm_eps": -1.0}, "at least 0"),
        ({"rotary_dim": 10}, "needs an even number"),
        ({"unrotated": (2,)}, r"unrotated=.*at most 1"),
        (
            {"experts": models.Experts(count=2, per_token=1, size=4, dense_layers=(5,))},
            "at most 1",
        ),
        ({"experts": 4}, "must be kvjax.models.Experts"),
        ({"soft_cap": 0.0}, "must be above 0, or None"),
        (
            {"local_rope": models.rope.Dynamic(factor=2.0, original=8)},
            "depends on the length of the text",
        ),
        ({"head_dim": 2, "rope": models.rope.Dynamic(factor=2.0, original=8)}, "at least 4"),
    ],
)
def test_a_decoder_config_checks_itself(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TINY, **{"windows": (), **change})


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        ("gemma3n", "layers that read the keys and values of another layer"),
        (
            "gemma4",
            "heads of another size in layers without a window and, in some sizes, layers that",
        ),
        ("nemotron_h", "Mamba-2 layers"),
        ("deepseek_v3", "attention over latent vectors"),
    ],
)
def test_families_that_people_ask_for_are_refused_with_what_they_need(kind, needs):
    with pytest.raises(ValueError, match=f"not supported, because it needs {needs}"):
        read(model_type=kind)


def test_no_family_is_both_read_and_refused():
    assert not models.weights.MISSING.keys() & models.FAMILIES.keys()
