"""Llama 1, 2 and 3.x, and the table of weights that all families share."""

from __future__ import annotations

from .config import DecoderConfig, Family, Fields, Weight, read_common, read_layer_types

BACKBONE = (
    Weight("model.embed_tokens.weight", "embedding"),
    Weight("model.norm.weight", "norm.scale"),
    Weight("lm_head.weight", "head.kernel", transposed=True),
    Weight("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.scale"),
    Weight("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.scale"),
    Weight("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attention.q.kernel", transposed=True),
    Weight("model.layers.{i}.self_attn.k_proj.weight", "layers.{i}.attention.k.kernel", transposed=True),
    Weight("model.layers.{i}.self_attn.v_proj.weight", "layers.{i}.attention.v.kernel", transposed=True),
    Weight("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.out.kernel", transposed=True),
    Weight("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.gate.kernel", transposed=True),
    Weight("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.mlp.up.kernel", transposed=True),
    Weight("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down.kernel", transposed=True),
)
QKV_BIAS = (
    Weight("model.layers.{i}.self_attn.q_proj.bias", "layers.{i}.attention.q.bias"),
    Weight("model.layers.{i}.self_attn.k_proj.bias", "layers.{i}.attention.k.bias"),
    Weight("model.layers.{i}.self_attn.v_proj.bias", "layers.{i}.attention.v.bias"),
)
OUT_BIAS = (Weight("model.layers.{i}.self_attn.o_proj.bias", "layers.{i}.attention.out.bias"),)
MLP_BIAS = (
    Weight("model.layers.{i}.mlp.gate_proj.bias", "layers.{i}.mlp.gate.bias"),
    Weight("model.layers.{i}.mlp.up_proj.bias", "layers.{i}.mlp.up.bias"),
    Weight("model.layers.{i}.mlp.down_proj.bias", "layers.{i}.mlp.down.bias"),
)


def configure(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=None, head_dim=None, positions=2048)
    if fields.given("sliding_window"):
        raise ValueError(
            f"sliding_window in {fields.source} is {fields.raw['sliding_window']!r}, but a Llama has no sliding "
            "window; leave it out, or use model_type mistral"
        )
    read_layer_types(fields, common["layers"], None)  # refuses sliding layers
    bias = fields.flag("attention_bias", False)
    return DecoderConfig(**common, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


LLAMA = Family("llama", "LlamaForCausalLM", configure, BACKBONE + QKV_BIAS + OUT_BIAS + MLP_BIAS)
