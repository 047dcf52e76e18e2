"""Models with layers that keep a state of fixed size, against transformers' torch models: tiny
and random, every field of the config off its default, in files as users have them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import models
from kvjax.generation.drafts import DraftModel, PromptLookup

pytestmark = pytest.mark.torch

LENGTHS = (23, 9, 31)
NEW = 16
TOLERANCE = 1e-4  # of f32 logits of magnitude 10

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "pad_token_id": 4,
    "use_cache": False,
}
ROPE = {"rope_type": "default", "rope_theta": 300.0}
QWEN = {
    "head_dim": 16,
    "rms_norm_eps": 3e-3,
    "hidden_act": "gelu",
    "attention_bias": True,
    "attention_dropout": 0.1,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {
            **QWEN,
            **EXPERTS,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
            "layer_types": KINDS,
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {**QWEN, "tie_word_embeddings": True, "full_attention_interval": 2},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**QWEN, **EXPERTS, "layer_types": KINDS[:2]}),
    "lfm2": (
        "Lfm2",
        {
            "norm_eps": 3e-3,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.2,
            "tie_word_embeddings": False,
            "full_attn_idxs": [1],
            "rope_parameters": ROPE,
        },
    ),
}


def build(family, directory):
    """A random torch model, saved in `directory`."""
    import torch
    import transformers

    torch.set_num_threads(1)  # threads cost these sizes far more than they give
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | copy.deepcopy(own))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    causal = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = causal(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.normal_(0.3, 0.3)
            elif name.endswith("A_log"):
                p.normal_(0.0, 1.0)
            elif "bias" in name:
                p.normal_(0.0, 0.3)
            else:
                p.normal_(0.0, 0.3 if "conv" in name else 0.16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    """pair_of(family): a torch model, and the one that is loaded from its files; made once."""

    @cache
    def make(family):
        directory = tmp_path_factory.mktemp(family)
        reference = build(family, directory)
        return reference, models.load(directory, dtype=jnp.float32).model

    return make


def families(*quick):
    """All families, of which those that are not `quick` run with --thorough."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(name, marks=[pytest.mark.thorough] * (name not in quick))
            for name in FAMILIES
        ],
    )


def prompts():
    tokens = np.random.default_rng(1).integers(6, SIZES["vocab_size"], (len(LENGTHS), 31))
    return [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]


def torch_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def torch_answer(model, row, count=NEW):
    """Greedy tokens of one text, and their logits [count, V]."""
    import torch

    found = model.generate(
        torch.tensor(np.asarray(row)[None]),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, len(row) :].tolist(), torch.cat(found.logits).numpy()


def new_cache(model, policy=None, *, batch=1, capacity=96):
    return kvjax.init(
        kvjax.Full() if policy is None else policy,
        model.spec(batch, capacity),
        layers=model.config.layers,
    )


run = jax.jit(lambda model, tokens, cache, **rest: model(tokens, cache, **rest))
steps = jax.jit(
    lambda model, tokens, cache, lengths: model(tokens, cache, lengths=lengths, steps=True)
)


@families(*FAMILIES)
def test_logits_without_a_cache_in_chunks_and_in_steps_are_those_of_transformers(
    pair_of, family
):
    reference, model = pair_of(family)
    text = np.random.default_rng(2).integers(0, SIZES["vocab_size"], (2, 80))
    wanted = torch_logits(reference, text)
    assert np.abs(wanted).max() > 2
    alone, cache = run(model, text, None)
    assert cache is None
    np.testing.assert_allclose(alone, wanted, atol=TOLERANCE, rtol=0)

    cache = new_cache(model, batch=2)
    outs = []
    for part in (slice(0, 35), slice(35, 70), *(slice(i, i + 1) for i in range(70, 80))):
        logits, cache = run(model, text[:, part], cache)
        outs.append(logits)
    kvjax.raise_on_overflow(cache)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), wanted, atol=TOLERANCE, rtol=0)


@families("qwen3-next", "lfm2")
def test_greedy_answers_of_ragged_rows_are_those_of_transformers(pair_of, family):
    reference, model = pair_of(family)
    rows = prompts()
    tokens = np.zeros((len(rows), 40), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.asarray(LENGTHS)
    # in two chunks, of which the second has no tokens of one row
    cache = new_cache(model, batch=len(rows))
    counts = np.minimum(lengths, 20), np.maximum(lengths - 20, 0)
    first, cache = run(model, tokens[:, :20], cache, lengths=counts[0])
    second, cache = run(model, tokens[:, 20:], cache, lengths=counts[1])
    last = np.where(
        (counts[1] > 0)[:, None],
        np.asarray(second)[np.arange(3), np.maximum(counts[1] - 1, 0)],
        np.asarray(first)[np.arange(3), counts[0] - 1],
    )
    found, logits = [], [last]
    for _ in range(NEW):
        found.append(logits[-1].argmax(axis=-1))
        new, cache = run(model, jnp.asarray(found[-1])[:, None], cache)
        logits.append(np.asarray(new[:, 0]))
    for i, row in enumerate(rows):
        answer, theirs = torch_answer(reference, row)
        assert len(set(answer)) > 2  # no loop of one token
        assert [int(step[i]) for step in found] == answer
        ours = np.stack([step[i] for step in logits[:NEW]])
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@families("qwen3.5")
def test_three_turns_through_one_cache_are_those_of_transformers(pair_of, family, tmp_path):
    """Between the turns the cache goes to disk and back."""
    reference, model = pair_of(family)
    text: list[int] = []
    cache = new_cache(model)
    unread: list[int] = []
    for turn, row in enumerate(prompts()):
        text += row[:12].tolist()
        unread += row[:12].tolist()
        done = kvjax.generate(model, cache, [unread], max_new_tokens=6)
        answer = np.asarray(done.tokens)[0].tolist()
        assert answer == torch_answer(reference, text, 6)[0]
        text += answer
        unread = []
        assert int(done.cache.length[0]) == len(text)
        kvjax.save(tmp_path / str(turn), done.cache)
        cache = kvjax.restore(tmp_path / str(turn), new_cache(model))


def often_wrong(model):
    """A model that keeps states too, of weights near those of another."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda w: w + w.std() * rng.normal(size=w.shape) / 10, model)


@families("qwen3.5")
@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_drafts_do_not_change_the_answer(pair_of, family, draft):
    reference, model = pair_of(family)
    rows = [np.tile(prompts()[0][:6], 4), np.tile(prompts()[2][:5], 3)]
    drafter: Any = PromptLookup(ngram=1, tokens=5)
    if draft == "model":
        drafter = DraftModel(often_wrong(model), tokens=3)
    given = [row.tolist() for row in rows]
    drafted = kvjax.generate(
        model, new_cache(model, batch=2), given, max_new_tokens=NEW, draft=drafter
    )
    told = drafted.speculation
    assert told.drafted > told.accepted
    assert told.accepted > 0 or draft == "lookup"
    for row, ours in zip(rows, np.asarray(drafted.tokens), strict=True):
        assert ours.tolist() == torch_answer(reference, row)[0]


def test_checkpoint_that_also_sees_images_gives_its_language_model(tmp_path):
    """As files of Qwen3.5 are: other names, experts in one tensor, and parts that are not read."""
    build("qwen3.5-moe", tmp_path / "text")
    plain = load_file(tmp_path / "text" / "model.safetensors")
    experts = EXPERTS["num_experts"]
    tensors = {
        "model.visual.blocks.0.norm1.weight": np.ones(3, np.float32),
        "mtp.norm.weight": np.ones(3, np.float32),
    }
    for name, tensor in plain.items():
        if ".mlp.experts." not in name:
            inner = name.replace("model.", "model.language_model.", 1)
            tensors[name if name == "lm_head.weight" else inner] = tensor
    for i in range(SIZES["num_hidden_layers"]):
        layer = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([plain[f"{layer}{e}.{part}_proj.weight"] for e in range(experts)])
            for part in ("gate", "up", "down")
        )
        joined = f"model.language_model.layers.{i}.mlp.experts."
        tensors[joined + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[joined + "down_proj"] = down
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(tensors, whole / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    fields = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
    }
    (whole / "config.json").write_text(json.dumps(fields))
    one, other = (models.load(tmp_path / name, jnp.float32).model for name in ("text", "whole"))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@families("qwen3-next", "lfm2")
def test_saved_model_is_read_by_transformers(pair_of, family, tmp_path):
    import transformers

    reference, model = pair_of(family)
    models.save(tmp_path, model, stop_tokens=[5])
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    wanted, given = reference.state_dict(), again.state_dict()
    assert wanted.keys() == given.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(given[name].numpy(), tensor.numpy(), err_msg=name)


PUBLISHED = {
    # config.json of the checkpoints of these names, without fields of training and of images
    "Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    "Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "vocab_size": 248320,
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_as_transformers_reads_them(name):
    import transformers

    fields = models.weights.text_fields(models.config.Fields(PUBLISHED[name]))
    config = models.weights.find_family(fields).configure(fields)
    raw = {key: value for key, value in fields.raw.items() if key != "architectures"}
    theirs = transformers.AutoConfig.for_model(**raw)
    own = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "linear_num_value_heads": config.mixer.value_heads,
        "linear_key_head_dim": config.mixer.key_dim,
        "rms_norm_eps": config.norm_eps,
    }
    assert own == {field: getattr(theirs, field) for field in own}
    linear = [i for i, kind in enumerate(theirs.layer_types) if kind == "linear_attention"]
    assert list(config.recurrent) == linear
    assert config.rotated == 64
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    shrunk = dataclasses.replace(
        config, layers=4, windows=(), recurrent=(0, 1, 2), vocab_size=32
    )
    spec = shrunk.spec(1, 64, "bfloat16")
    assert kvjax.init(kvjax.Full(), spec, layers=4).layers[3].spec.head_dim == 256


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate in"),
        ({"layer_types": ["mamba"] * 64}, "layer_types in .* has mamba"),
        ({"layer_types": ["linear_attention"] * 64}, "a list with full_attention in it"),
        ({"linear_num_key_heads": 7}, "key_heads must divide value_heads"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configurations_that_are_not_supported_are_refused(change, said):
    text = PUBLISHED["Qwen3.5-27B"]["text_config"] | change
    fields = models.config.Fields(text)
    with pytest.raises(ValueError, match=said):
        models.weights.find_family(fields).configure(fields)
