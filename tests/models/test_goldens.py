"""The decoder against transformers' torch models: tiny and random, every field of the config
off its default.

Each case is saved with save_pretrained and read with kvjax.models.load, as users do. Rows of a
batch have different lengths: transformers pads on the left, kvjax on the right. Prompts and
answers cross the lengths that RoPE scaling starts at, and prompts are longer than the sliding
windows.
"""

import copy
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models

pytestmark = pytest.mark.torch

LENGTHS = (23, 9, 31)
STEPS = 64
TOLERANCE = 1e-4  # of f32 logits of magnitude 10

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 40,
    "rms_norm_eps": 3e-3,
    "initializer_range": 0.3,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "pad_token_id": 4,
    "attention_dropout": 0.1,
    "use_cache": False,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 200.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 700.0,
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 26,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 400.0,
        "factor": 4.0,
        "original_max_position_embeddings": 28,
        "beta_fast": 5.0,
        "beta_slow": 0.4,
        "mscale": 1.7,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 400.0,
        "factor": 2.0,
        "original_max_position_embeddings": 20,
        "attention_factor": 1.2,
    },
    "yarn-plain": {"rope_type": "yarn", "rope_theta": 900.0, "factor": 8.0, "beta_fast": 3.0},
}
# Phi-3's, with a text of 50 tokens beyond `original`, or within it.
LONG = {
    f"longrope-{name}": {
        "rope_type": "longrope",
        "rope_theta": 600.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 4.0, 9.0],
        "original_max_position_embeddings": original,
    }
    for name, original in (("past", 26), ("within", 60))
}
FAMILIES = {
    "llama": (
        "Llama",
        {
            "hidden_act": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-plain": (
        "Llama",
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_act": "relu",
            "eos_token_id": [7],
        },
    ),
    "qwen2": (
        "Qwen2",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen2-types": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-unused": (
        "Qwen2",
        {"sliding_window": 5, "max_window_layers": 0, "hidden_act": "quick_gelu"},
    ),
    "qwen3": (
        "Qwen3",
        {
            "hidden_act": "relu2",
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3-plain": ("Qwen3", {"use_sliding_window": False}),
    "mistral": (
        "Mistral",
        {"hidden_act": "gelu_new", "sliding_window": 9, "tie_word_embeddings": True},
    ),
    "phi3": (
        "Phi3",
        {
            "head_dim": 8,
            "hidden_act": "gelu",
            "max_position_embeddings": 104,
            "sliding_window": 30,
        },
    ),
    "phi3-plain": (
        "Phi3",
        {"head_dim": 8, "num_key_value_heads": None, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2",
        {
            "hidden_activation": "gelu",
            "query_pre_attn_scalar": 40,
            "sliding_window": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 9.0,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma2-plain": ("Gemma2", {"tie_word_embeddings": True, "attn_logit_softcapping": None}),
    "gemma3": (
        "Gemma3Text",
        {
            "query_pre_attn_scalar": 30,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            },
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "hidden_act": "gelu",
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "qwen2-moe-plain": (
        "Qwen2Moe",
        {
            "num_experts": 24,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.9,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt-oss-plain": (
        "GptOss",
        {"num_local_experts": 24, "tie_word_embeddings": True, "rope_parameters": None},
    ),
    "smollm3": (
        "SmolLM3",
        {
            "head_dim": 8,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3-plain": (
        "SmolLM3",
        {"head_dim": 8, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "phi4-mini": (
        "Phi3",
        {
            "head_dim": 8,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 600.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.5, 2.0, 4.0],
            },
            "original_max_position_embeddings": 26,
            "max_position_embeddings": 104,
        },
    ),
    "mistral-plain": (
        "Mistral",
        {"hidden_act": "mish", "sliding_window": None, "head_dim": None},
    ),
}
# Every scaling and every family generates; every pair of them compares logits.
GENERATED = [
    ("llama", "default"),
    ("llama", "linear"),
    ("llama", "llama3"),
    ("qwen2", "yarn"),
    ("qwen3", "yarn-factor"),
    ("qwen3-plain", "llama3"),
    ("qwen2-types", "default"),
    ("mistral", "linear"),
    ("mistral-plain", "yarn-plain"),
]
NEW = [
    *("gemma2", "gemma3", "mixtral", "qwen2-moe", "qwen2-moe-plain", "qwen3-moe"),
    *("gpt-oss", "gpt-oss-plain", "smollm3", "phi4-mini"),
]
GENERATED += [
    (family, "default") for family in NEW if family != "phi4-mini"
]  # whose RoPE is by the text's length
# Without --thorough these generate: scaling by frequency, with windows in some layers and in
# all. Scaling by the text's length is in test_rope_by_length.py.
QUICK = [("llama", "llama3"), ("qwen2", "yarn"), ("mistral", "linear")]
# Positions are scaled by the same code in all families. test_rope.py compares its numbers with
# those of transformers; the answers of QUICK have three rules in whole models, and
# test_rope_by_length.py two. One more is here.
COMPARED: list[Any] = [(f, "default") for f in FAMILIES] + [("llama", "yarn-factor")]
SCALED = [("phi3", rope) for rope in LONG]
SCALED += [
    (family, rope)
    for family in ("llama", "qwen2", "qwen3", "mistral")
    for rope in ROPES
    if rope != "default"
]
COMPARED += [
    pytest.param(*pair, marks=pytest.mark.thorough) for pair in SCALED if pair not in COMPARED
]


def build(family, rope, directory, **save):
    """A random torch model, saved in `directory`."""
    import torch
    import transformers

    torch.set_num_threads(1)  # threads cost these sizes far more than they give
    name, own = FAMILIES[family]
    scaling = dict((ROPES | LONG)[rope])
    if "original_max_position_embeddings" in scaling and name == "Phi3":
        own = own | {
            "original_max_position_embeddings": scaling["original_max_position_embeddings"]
        }
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, "rope_parameters": scaling, **copy.deepcopy(own)}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = (
        getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).float().eval()
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.normal_(1.0, 0.3)
            elif name.endswith("sinks"):
                p.normal_(1.0, 1.0)
            elif "bias" in name:
                p.normal_(0.0, 0.3)
            else:
                p.normal_(0.0, 0.16)
    model.save_pretrained(directory, **save)
    return model


def prompts():
    tokens = np.random.default_rng(1).integers(
        6, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS))
    )
    return [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]


def pad(rows, *, left):
    """[B, T] and its mask."""
    width = max(map(len, rows))
    tokens, mask = (
        np.zeros((len(rows), width), np.int64),
        np.zeros((len(rows), width), np.int64),
    )
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[i, at], mask[i, at] = row, 1
    return tokens, mask


def torch_logits(model, rows):
    """The logits of each row's tokens, as one batch."""
    import torch

    tokens, mask = map(torch.tensor, pad(rows, left=True))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, position_ids=positions).logits.numpy()
    return [row[-len(given) :] for row, given in zip(logits, rows, strict=True)]


def greedy(model, tokens, lengths):
    """Logits of the prompt, and tokens and logits of STEPS steps of greedy decoding through a
    Full cache.
    """

    @jax.jit
    def run(model, tokens, lengths):
        cache = kvjax.init(
            kvjax.Full(),
            model.spec(len(LENGTHS), tokens.shape[1] + STEPS),
            layers=model.config.layers,
        )
        prompt, cache = model(tokens, cache, lengths=lengths, first_chunk=True)
        first = prompt[jnp.arange(len(lengths)), lengths - 1]

        def step(carry, _):
            logits, cache = carry
            token = jnp.argmax(logits, axis=-1)
            return model(token[:, None], cache, last_logits=True), (token, logits)

        (_, cache), (new, logits) = jax.lax.scan(step, (first, cache), length=STEPS)
        return prompt, new.T, logits, cache

    prompt, new, logits, cache = run(model, tokens, lengths)
    kvjax.raise_on_overflow(cache)
    return np.asarray(prompt), np.asarray(new), np.asarray(logits)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.thorough)
        for case in GENERATED
    ],
    ids=lambda part: part,
)
def test_greedy_decoding_of_ragged_rows_is_that_of_transformers(family, rope, tmp_path):
    import torch

    reference = build(family, rope, tmp_path)
    model = models.load(tmp_path, dtype=jnp.float32).model
    rows = prompts()
    tokens, mask = map(torch.tensor, pad(rows, left=True))
    reference.generation_config.eos_token_id = None
    wanted = reference.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=STEPS,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )

    prompt, new, logits = greedy(
        model, jnp.asarray(pad(rows, left=False)[0]), jnp.asarray(LENGTHS)
    )

    for ours, theirs, n in zip(prompt, torch_logits(reference, rows), LENGTHS, strict=True):
        np.testing.assert_allclose(ours[:n], theirs, atol=TOLERANCE, rtol=0)
    theirs = wanted.sequences[:, tokens.shape[1] :].numpy()
    assert len(np.unique(theirs)) > 10  # the answers are no loop of a few tokens
    np.testing.assert_array_equal(new, theirs)
    np.testing.assert_allclose(
        logits, torch.stack(wanted.logits).numpy(), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(("family", "rope"), COMPARED, ids=lambda part: part)
def test_logits_are_those_of_transformers(family, rope, tmp_path):
    reference = build(family, rope, tmp_path)
    model = models.load(tmp_path, dtype=jnp.float32).model
    long = np.random.default_rng(2).integers(
        0, SIZES["vocab_size"], (2, 50)
    )  # past all original lengths
    wanted = np.stack(torch_logits(reference, list(long)))
    logits, cache = jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(long))
    assert cache is None
    assert np.abs(wanted).max() > 2
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)


# Logits of the plain ones, whose config has fewer parts, are compared above.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * name.endswith("-plain"))
        for name in NEW
    ],
)
@pytest.mark.parametrize("method", ["full", pytest.param("fier", marks=pytest.mark.thorough)])
def test_chunks_and_steps_through_a_cache_are_one_text_of_transformers(
    family, method, tmp_path
):
    """The steps of a mixture gather experts, its chunks sort tokens by expert. `fier` has a
    budget of all tokens.
    """
    reference = build(family, "default", tmp_path)
    model = models.load(tmp_path, dtype=jnp.float32).model
    layers = kvjax.presets.Layers(dense=0)
    policies = (
        kvjax.Full()
        if method == "full"
        else kvjax.presets.fier(budget=128, group=8, chunk=16, layers=layers)
    )
    text = np.random.default_rng(2).integers(0, SIZES["vocab_size"], (1, 50))
    wanted = np.stack(torch_logits(reference, list(text)))
    cache = kvjax.init(policies, model.spec(1, 64), layers=3)
    cache = model.rotate_for(cache, jnp.array([50]))
    run, outs = jax.jit(lambda *args: model(*args)), []
    for part in (slice(0, 20), slice(20, 40), *(slice(i, i + 1) for i in range(40, 50))):
        logits, cache = run(jnp.asarray(text[:, part]), cache)
        outs.append(logits)
    logits = np.concatenate(outs, axis=1)
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(logits.argmax(axis=-1), wanted.argmax(axis=-1))


def test_mxfp4_files_load_as_transformers_expands_them(tmp_path, monkeypatch):
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "intermediate_size": 32,
    }
    monkeypatch.setitem(FAMILIES, "gpt-oss-32", ("GptOss", sizes))
    build("gpt-oss-32", "default", tmp_path)
    tensors, wanted, rng = (
        load_file(tmp_path / "model.safetensors"),
        {},
        np.random.default_rng(5),
    )
    for name in [
        n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, size_in, size_out = tensors.pop(name).shape
        tensors[name + "_blocks"] = rng.integers(
            0, 256, (experts, size_out, size_in // 32, 16), np.uint8
        )
        tensors[name + "_scales"] = rng.integers(
            120, 130, (experts, size_out, size_in // 32), np.uint8
        )
        parts = (torch.tensor(tensors[name + end]) for end in ("_blocks", "_scales"))
        wanted[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    mlp = models.load(tmp_path, dtype=jnp.float32).model.layers[1].mlp
    gate_up, down = (
        wanted[f"model.layers.1.mlp.experts.{part}_proj"] for part in ("gate_up", "down")
    )
    np.testing.assert_array_equal(mlp.gate[...], gate_up[..., 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(mlp.up[...], gate_up[..., 1::2].swapaxes(1, 2))
    np.testing.assert_array_equal(mlp.down[...], down.swapaxes(1, 2))
    bits = (tmp_path / "config.json").read_text().replace("mxfp4", "gptq")
    (tmp_path / "config.json").write_text(bits)
    with pytest.raises(ValueError, match=r"quantised by gptq"):
        models.load(tmp_path)


@pytest.mark.parametrize("rope", [r for r in ROPES if r != "yarn-plain"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_older_config_files_read_the_same(rope, key, tmp_path):
    import transformers

    _, own = FAMILIES["mistral"]
    config = transformers.MistralConfig(
        **{**SIZES, "rope_parameters": dict(ROPES[rope]), **own}
    )
    wanted = from_json(config.to_dict() | {"architectures": ["MistralForCausalLM"]})
    raw = json.loads(config.to_json_string())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    scaling[key] = scaling.pop("rope_type")
    raw["rope_scaling"] = None if rope == "default" else scaling
    assert from_json(raw) == wanted

    # and so does transformers
    (tmp_path / "config.json").write_text(json.dumps(raw))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    again.rope_parameters.pop("type", None)
    assert again.rope_parameters == config.rope_parameters


def from_json(raw):
    fields = models.config.Fields(raw)
    return models.weights.find_family(fields).configure(fields)


# One family of each layout of files: biases, one kernel for q, k and v, experts of each kind,
# norms of q and k.
LAYOUTS = ("llama", "qwen3", "phi3", "gemma3", "mixtral", "qwen2-moe", "gpt-oss")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in LAYOUTS))
        for name in FAMILIES
    ],
)
def test_sharded_checkpoint_loads_as_the_single_file(family, tmp_path):
    build(family, "default", tmp_path / "one")
    build(family, "default", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (
        models.load(tmp_path / name, dtype=jnp.float32).model for name in ("one", "many")
    )
    assert jax.tree.structure(one) == jax.tree.structure(many)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)


def test_activations_are_those_of_transformers():
    import torch
    from transformers.activations import ACT2FN

    x = np.linspace(-12, 12, 241, dtype=np.float32)
    for name, activation in models.activations.ACTIVATIONS.items():
        wanted = ACT2FN[name](torch.tensor(x)).numpy()
        np.testing.assert_allclose(
            activation(jnp.asarray(x)), wanted, atol=2e-6, rtol=1e-5, err_msg=name
        )


def test_bfloat16_model_stays_near_the_float32_one(tmp_path):
    """It rounds to bf16 as much as transformers does, so the errors are similar."""
    import torch

    reference = build("qwen3", "default", tmp_path)
    long = np.random.default_rng(2).integers(0, SIZES["vocab_size"], (2, 30))
    exact = np.stack(torch_logits(reference, list(long)))
    theirs = np.stack(
        torch_logits(reference.to(torch.bfloat16).float(), list(long))
    )  # rounded weights alone
    checkpoint = models.load(tmp_path, "bfloat16")
    ours, _ = checkpoint.model(jnp.asarray(long))
    assert checkpoint.model.dtype == jnp.bfloat16
    assert ours.dtype == jnp.float32
    assert np.sqrt(np.mean((ours - exact) ** 2)) < 4 * np.sqrt(np.mean((theirs - exact) ** 2))


def test_gradients_are_those_of_torch(tmp_path):
    import torch

    reference = build("qwen3", "yarn", tmp_path)
    model = models.load(tmp_path, dtype=jnp.float32).model
    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], (2, 20))
    loss = reference(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    loss.backward()

    @jax.jit
    @jax.value_and_grad
    def ours(model):
        logits, _ = model(jnp.asarray(tokens))
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    value, grads = ours(model)
    assert abs(float(value) - float(loss.detach())) < 1e-5
    attention = reference.model.layers[1].self_attn
    for ours_, theirs in (
        (grads.embedding, reference.model.embed_tokens.weight.grad),
        (grads.layers[1].attention.q.kernel, attention.q_proj.weight.grad.T),
        (grads.layers[1].attention.k_norm.scale, attention.k_norm.weight.grad),
        (
            grads.layers[2].mlp.down.kernel,
            reference.model.layers[2].mlp.down_proj.weight.grad.T,
        ),
    ):
        np.testing.assert_allclose(ours_[...], theirs.numpy(), atol=1e-5, rtol=1e-4)
