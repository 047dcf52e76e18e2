"""Qwen2 and 2.5 (bias on q, k, v), Qwen3 (RMSNorm on q and k), and both with experts."""

from __future__ import annotations

from .config import (
    DecoderConfig,
    Experts,
    Family,
    Fields,
    Weight,
    read_common,
    read_layer_types,
)
from .llama import BACKBONE, OUT_BIAS, QKV_BIAS, expert_weights

QK_NORM = (
    Weight("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm.scale"),
    Weight("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm.scale"),
)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """With use_sliding_window, the layers from max_window_layers on slide, unless layer_types
    says which do.
    """
    window = None
    if fields.flag("use_sliding_window", False):
        window = (
            fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
        )
    by_type = read_layer_types(fields, layers, window)
    first = fields.integer("max_window_layers", 28, at_least=0)
    return by_type or tuple(window if i >= first else None for i in range(layers))


def configure_qwen2(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=32, head_dim=None, positions=32768)
    return DecoderConfig(**common, qkv_bias=True, windows=_windows(fields, common["layers"]))


def configure_qwen3(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=32, head_dim=128, positions=32768)
    bias = fields.flag("attention_bias", False)
    windows = _windows(fields, common["layers"])
    return DecoderConfig(**common, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=windows)


def read_experts(
    fields: Fields,
    layers: int,
    *,
    count: int,
    per_token: int,
    size: int,
    shared: int | None,
    normalised: bool = False,
) -> Experts:
    """The experts of a config; the arguments are the defaults of absent fields."""
    alone = fields.raw.get("mlp_only_layers") or []
    step = fields.integer("decoder_sparse_step", 1)
    if not isinstance(alone, list) or not all(isinstance(i, int) for i in alone):
        raise fields.error("mlp_only_layers", "a list of numbers of layers")
    return Experts(
        count=fields.integer("num_experts", fields.integer("num_local_experts", count)),
        per_token=fields.integer("num_experts_per_tok", per_token),
        size=fields.integer("moe_intermediate_size", size),
        normalised=fields.flag("norm_topk_prob", normalised),
        dense_layers=tuple(i for i in range(layers) if i in alone or (i + 1) % step),
        shared_size=fields.integer("shared_expert_intermediate_size", shared)
        if shared
        else None,
    )


def configure_qwen2_moe(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=16, head_dim=None, positions=32768)
    layers = common["layers"]
    window = None
    if fields.flag("use_sliding_window", False):
        window = (
            fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
        )
    last = fields.integer("max_window_layers", 28, at_least=0)
    by_rule = tuple(window if (i + 1) % 2 and i < last else None for i in range(layers))
    windows = read_layer_types(fields, layers, window) or by_rule
    experts = read_experts(fields, layers, count=60, per_token=4, size=1408, shared=5632)
    return DecoderConfig(
        **common, qkv_bias=fields.flag("qkv_bias", True), windows=windows, experts=experts
    )


def configure_qwen3_moe(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=4, head_dim=None, positions=32768)
    layers = common["layers"]
    window = None
    if fields.flag("use_sliding_window", False):
        window = (
            fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
        )
    read_layer_types(fields, layers, window)
    bias = fields.flag("attention_bias", False)
    experts = read_experts(fields, layers, count=128, per_token=8, size=768, shared=None)
    own = {"windows": (window,) * layers, "experts": experts}
    return DecoderConfig(**common, **own, qkv_bias=bias, out_bias=bias, qk_norm=True)


SHARED_EXPERT = tuple(
    Weight(
        f"model.layers.{{i}}.mlp.{name}.weight",
        f"layers.{{i}}.mlp.{path}.kernel",
        transposed=True,
    )
    for name, path in (
        *((f"shared_expert.{part}_proj", f"shared.{part}") for part in ("gate", "up", "down")),
        ("shared_expert_gate", "shared_gate"),
    )
)
_EXPERTS = expert_weights("mlp.gate", "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj")
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", configure_qwen2, BACKBONE + QKV_BIAS)
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", configure_qwen3, BACKBONE + QKV_BIAS + OUT_BIAS + QK_NORM
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    configure_qwen2_moe,
    BACKBONE + QKV_BIAS + _EXPERTS + SHARED_EXPERT,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    configure_qwen3_moe,
    BACKBONE + QKV_BIAS + OUT_BIAS + QK_NORM + _EXPERTS,
)
