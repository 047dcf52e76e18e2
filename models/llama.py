"""Llama 1, 2 and 3.x, SmolLM3 (layers without RoPE), and the table of weights that all families
share.
"""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, Family, Fields, Weight, read_common, read_layer_types

BACKBONE = (
    Weight("model.embed_tokens.weight", "embedding"),
    Weight("model.norm.weight", "norm.scale"),
    Weight("lm_head.weight", "head.kernel", transposed=True),
    Weight("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.scale"),
    Weight("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.scale"),
    Weight(
        "model.layers.{i}.self_attn.q_proj.weight",
        "layers.{i}.attention.q.kernel",
        transposed=True,
    ),
    Weight(
        "model.layers.{i}.self_attn.k_proj.weight",
        "layers.{i}.attention.k.kernel",
        transposed=True,
    ),
    Weight(
        "model.layers.{i}.self_attn.v_proj.weight",
        "layers.{i}.attention.v.kernel",
        transposed=True,
    ),
    Weight(
        "model.layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.attention.out.kernel",
        transposed=True,
    ),
    Weight(
        "model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.gate.kernel", transposed=True
    ),
    Weight("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.mlp.up.kernel", transposed=True),
    Weight(
        "model.layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down.kernel", transposed=True
    ),
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


def expert_weights(
    router: str, expert: str, gate: str, up: str, down: str
) -> tuple[Weight, ...]:
    """Rows of a router and of experts with a tensor each, by their names in a layer."""
    names = (
        (expert + gate, "gate"),
        (expert + up, "up"),
        (expert + down, "down"),
        (router, "router.kernel"),
    )
    layer = "model.layers.{i}."
    own = "layers.{i}.mlp."
    return tuple(Weight(f"{layer}{n}.weight", own + path) for n, path in names)


def configure(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=None, head_dim=None, positions=2048)
    if fields.given("sliding_window"):
        raise ValueError(
            f"sliding_window in {fields.source} is {fields.raw['sliding_window']!r}, but a Llama has no sliding "
            "window; leave it out, or use model_type mistral"
        )
    read_layer_types(fields, common["layers"], None)  # refuses sliding layers
    bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **common, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False)
    )


def configure_smollm3(fields: Fields) -> DecoderConfig:
    fields = Fields({"rope_theta": 2e6, **fields.raw}, fields.source)
    takes = ("no_rope_layers",)
    common = read_common(
        fields, kv_heads=4, head_dim=None, positions=32768, takes=takes, tied=True
    )
    layers = common["layers"]
    every = fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.raw.get("no_rope_layers")  # 1 where a layer has it
    if has_rope is None:
        has_rope = [int((i + 1) % every != 0) for i in range(layers)]
    if (
        not isinstance(has_rope, list)
        or len(has_rope) < layers
        or not all(x in (0, 1) for x in has_rope)
    ):
        raise fields.error(
            "no_rope_layers", f"a list of 0 or 1 for each of the {layers} layers"
        )
    unrotated = tuple(i for i in range(layers) if not has_rope[i])
    window = (
        fields.integer("sliding_window", None)
        if fields.flag("use_sliding_window", False)
        else None
    )
    windows = read_layer_types(fields, layers, window)
    windows = windows or tuple(window if i in unrotated else None for i in range(layers))
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    settings: dict[str, Any] = {
        "unrotated": unrotated,
        "windows": windows,
        "mlp_bias": mlp_bias,
    }
    return DecoderConfig(**common, **settings, qkv_bias=bias, out_bias=bias)


_WEIGHTS = BACKBONE + QKV_BIAS + OUT_BIAS + MLP_BIAS
LLAMA = Family("llama", "LlamaForCausalLM", configure, _WEIGHTS)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", configure_smollm3, _WEIGHTS)
