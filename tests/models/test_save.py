"""Saving: kvjax and transformers read back what was saved; what the format cannot express is
refused.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import models
from kvjax.models import rope

PLAIN = models.DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    layers=3,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    norm_eps=1e-5,
    initializer_range=0.5,
)
LLAMA3 = rope.Llama3(theta=7e4, factor=4, low_freq_factor=1, high_freq_factor=4, original=24)
YARN = rope.Yarn(theta=500.0, factor=4.0, original=24, beta_fast=8.0, truncate=False)
CONFIGS = {
    "llama": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "activation": "gelu"},
    "llama-tied": {"tied_head": True, "rope": LLAMA3},
    "mistral": {"windows": (9, 9, 9), "rope": rope.Linear(theta=300.0, factor=2.0)},
    "qwen2": {
        "qkv_bias": True,
        "windows": (None, 5, None),
        "rope": rope.Dynamic(theta=300.0, factor=2.0, original=96),
    },
    "gemma3_text": {
        "norm_offset": True,
        "post_norms": True,
        "qk_norm": True,
        "embedding_scale": 24**0.5,
        "query_scale": 0.25,
        "windows": (6, 6, None),
        "activation": "gelu_pytorch_tanh",
        "rope": rope.Linear(theta=300.0, factor=2.0),
        "local_rope": rope.Default(theta=50.0),
    },
    "qwen3_moe": {
        "qk_norm": True,
        "experts": models.Experts(count=5, per_token=2, size=16, dense_layers=(1,)),
    },
    "gpt_oss": {
        **{
            "qkv_bias": True,
            "out_bias": True,
            "sinks": True,
            "windows": (6, None, 6),
            "rope": YARN,
        },
        "experts": models.Experts(count=5, per_token=2, size=40, bias=True, clamp=(1.5, 0.5)),
    },
    "qwen3": {"qk_norm": True, "tied_head": True, "rope": YARN},
}


def decoder(name):
    return models.Decoder(dataclasses.replace(PLAIN, **CONFIGS[name]), rngs=nnx.Rngs(3))


def leaves(model):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_is_read_back_as_it_was(name, tmp_path):
    model = decoder(name)
    models.save(tmp_path / "new", model, bos_token=2, stop_tokens=(1, 4), shard_bytes=8000)
    found = models.load(tmp_path / "new", dtype=jnp.float32)
    assert found.config == model.config
    assert found.stop_tokens == (1, 4)
    wanted = leaves(model)
    assert leaves(found.model).keys() == wanted.keys()
    for key, leaf in leaves(found.model).items():
        np.testing.assert_array_equal(leaf, wanted[key], err_msg=key)
    assert (
        json.loads((tmp_path / "new" / "config.json").read_text())["model_type"]
        == name.split("-")[0]
    )
    assert len(wanted) == len(jax.tree.leaves(model))


def test_fused_tensors_are_written_and_read_back_part_by_part(tmp_path, monkeypatch):
    """As Phi-3 has them. `save` prefers Llama, which says the same, so here only Phi-3 is
    known.
    """
    monkeypatch.setattr(models.weights, "FAMILIES", {"phi3": models.weights.PHI3})
    factors = {"short_factor": (1.0, 1.0, 1.1, 1.2), "long_factor": (1.0, 2.0, 4.0, 8.0)}
    config = dataclasses.replace(
        PLAIN, rope=rope.LongRope(original=24, attention_factor=1.25, **factors)
    )
    model = models.Decoder(config, rngs=nnx.Rngs(3))
    models.save(tmp_path, model, shard_bytes=20_000)
    found = models.load(tmp_path, dtype=jnp.float32)
    assert found.config == config
    wanted = leaves(model)
    for key, leaf in leaves(found.model).items():
        np.testing.assert_array_equal(leaf, wanted[key], err_msg=key)


def test_files_hold_the_wanted_dtype_and_no_more_bytes_than_asked(tmp_path):
    model = decoder("llama-tied")
    models.save(tmp_path, model, dtype="bfloat16", shard_bytes=5000)
    files = sorted(tmp_path.glob("*.safetensors"))
    tensors = sum(leaf.size for leaf in leaves(model).values()) * 2
    assert len(files) > tensors // 5000
    assert all(file.stat().st_size < 5000 + 2000 for file in files)  # and the header
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == tensors
    found = models.load(tmp_path, dtype=jnp.bfloat16).model
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def test_one_file_needs_no_index(tmp_path):
    models.save(tmp_path, decoder("qwen3"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_directory_with_a_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_text("precious")
    with pytest.raises(
        FileExistsError,
        match=r"has a checkpoint \(model-00001-of-00002\.safetensors\); give a new",
    ):
        models.save(tmp_path, decoder("llama"))
    assert [p.name for p in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_bytes": 0}, r"save\(shard_bytes=\.\.\.\) must be at least 1, got 0"),
        ({"shard_bytes": "5GB"}, r"save\(shard_bytes=\.\.\.\) must be an integer, got '5GB'"),
        (
            {"stop_tokens": [1, 10**6]},
            r"save\(stop_tokens=\.\.\.\) must be at most \d+, got 1000000",
        ),
        ({"bos_token": -1}, r"save\(bos_token=\.\.\.\) must be at least 0, got -1"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_written(
    settings, message, tmp_path
):
    model = decoder("llama")
    with pytest.raises(ValueError, match=message):
        models.save(tmp_path / "new", model, **settings)
    assert not (tmp_path / "new").exists()


def test_a_config_that_no_architecture_has_is_refused_before_anything_is_written(tmp_path):
    config = dataclasses.replace(PLAIN, qk_norm=True, mlp_bias=True)
    with pytest.raises(ValueError, match=r"none of LlamaForCausalLM.*qk_norm=True"):
        models.save(tmp_path / "new", models.Decoder(config))
    assert not (tmp_path / "new").exists()


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample(2)
def test_transformers_reads_what_was_saved_and_computes_the_same(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = decoder(name)
    models.save(tmp_path, model, shard_bytes=8000)
    tokens = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (2, 30))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    ours, _ = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(ours, wanted, atol=1e-3 * np.abs(wanted).max())
