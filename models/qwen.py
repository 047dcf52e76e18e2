"""Qwen2 and 2.5 (bias on q, k, v) and Qwen3 (RMSNorm on q and k)."""

from __future__ import annotations

from .config import DecoderConfig, Family, Fields, Weight, read_common, read_layer_types
from .llama import BACKBONE, OUT_BIAS, QKV_BIAS

QK_NORM = (
    Weight("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm.scale"),
    Weight("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm.scale"),
)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """With use_sliding_window, the layers from max_window_layers on slide, unless layer_types says which do."""
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
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


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", configure_qwen2, BACKBONE + QKV_BIAS)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", configure_qwen3, BACKBONE + QKV_BIAS + OUT_BIAS + QK_NORM)
