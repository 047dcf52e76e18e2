"""Checkpoints in Hugging Face format, written tensor by tensor without torch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}


def tensors_of(config, dtype=np.float32):
    """Random tensors of a Llama without biases, by their names in Hugging Face files."""
    hidden, inner, vocab = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    q, kv = (
        config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (q, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def write(tmp_path):
    """write(**fields of config.json) makes a checkpoint and returns its directory; `...` leaves
    a field out.
    """

    def write(*, dtype=np.float32, shards=0, change=None, files=None, **config):
        config = {k: v for k, v in {**CONFIG, **config}.items() if v is not ...}
        sizes = {
            k: v if isinstance(v, int) else CONFIG[k]
            for k, v in {**CONFIG, **config}.items()
            if k in CONFIG
        }
        tensors = tensors_of(
            {**sizes, "tie_word_embeddings": config.get("tie_word_embeddings")}, dtype
        )
        if change is not None:
            change(tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, content in (files or {}).items():
            (tmp_path / name).write_text(
                content if isinstance(content, str) else json.dumps(content)
            )
        if not shards:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        where = {name: names[i % shards] for i, name in enumerate(tensors)}
        for file in names:
            save_file({k: v for k, v in tensors.items() if where[k] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": where})
        )
        return tmp_path

    return write
