"""Gemma 2 and 3 (text): norms before and after each part, by 1 + w; scaled embeddings; soft
caps in Gemma 2.
"""

from __future__ import annotations

import math
from typing import Any

from .config import (
    DecoderConfig,
    Family,
    Fields,
    Weight,
    read_common,
    read_layer_types,
    read_rope,
)
from .llama import BACKBONE, OUT_BIAS, QKV_BIAS
from .qwen import QK_NORM

_LAYER = "model.layers.{i}."
_NORMS = (
    Weight(_LAYER + "post_attention_layernorm.weight", "layers.{i}.post_attention_norm.scale"),
    Weight(_LAYER + "pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.scale"),
    Weight(_LAYER + "post_feedforward_layernorm.weight", "layers.{i}.post_mlp_norm.scale"),
)
_WEIGHTS = tuple(w for w in BACKBONE if "mlp_norm" not in w.path) + _NORMS + QKV_BIAS + OUT_BIAS
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _configure(
    fields: Fields, *, every: int, caps: tuple[float | None, ...], **settings: Any
) -> DecoderConfig:
    """`every`-th layers are full if the config has no layer_types; `caps` are the defaults of
    an absent field.
    """
    if fields.raw.get("use_bidirectional_attention"):
        raise ValueError(
            f"use_bidirectional_attention in {fields.source} is not supported: leave it out"
        )
    common = read_common(
        fields, takes=_CAPS, activation="hidden_activation", tied=True, **settings
    )
    window = fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
    windows = read_layer_types(fields, common["layers"], window)
    windows = windows or tuple(
        window if (i + 1) % every else None for i in range(common["layers"])
    )
    bias = fields.flag("attention_bias", False)
    soft_cap, head_cap = (
        (fields.number(name, None) or None) if name in fields.raw else default
        for name, default in zip(_CAPS, caps, strict=True)
    )
    return DecoderConfig(
        **common,
        windows=windows,
        qkv_bias=bias,
        out_bias=bias,
        norm_offset=True,
        post_norms=True,
        embedding_scale=math.sqrt(common["hidden_size"]),
        query_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=soft_cap,
        head_cap=head_cap,
    )


def configure_gemma2(fields: Fields) -> DecoderConfig:
    fields = _with_defaults(fields, vocab_size=256000)
    return _configure(
        fields, every=2, caps=(50.0, 30.0), kv_heads=4, head_dim=256, positions=8192
    )


def configure_gemma3(fields: Fields) -> DecoderConfig:
    fields = _with_defaults(fields, vocab_size=262208)  # files of the 4B model leave them out
    positions = fields.integer("max_position_embeddings", 131072)
    by_kind = fields.group("rope_parameters")
    scaling = fields.group("rope_scaling").raw
    full, local = (
        dict(by_kind.group(kind).raw) for kind in ("full_attention", "sliding_attention")
    )
    full = {"rope_theta": fields.number("rope_theta", 1e6), **full, **scaling}
    local = {"rope_theta": fields.number("rope_local_base_freq", 1e4), **local}
    rope, local_rope = (
        read_rope(Fields({"rope_parameters": own}, fields.source), positions)
        for own in (full, local)
    )
    common: dict[str, Any] = {"kv_heads": 4, "head_dim": 256, "positions": 131072, "rope": rope}
    every = fields.integer("sliding_window_pattern", 6)
    config = _configure(fields, every=every, caps=(None, None), **common)
    # Its attention takes no soft cap, whatever the config says; nor does that of transformers.
    found = {
        **vars(config),
        "qk_norm": True,
        "soft_cap": None,
        "local_rope": None if local_rope == rope else local_rope,
    }
    return DecoderConfig(**found)


def _with_defaults(fields: Fields, **defaults: Any) -> Fields:
    defaults |= {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    }
    return Fields(
        {"hidden_activation": "gelu_pytorch_tanh", **defaults, **fields.raw}, fields.source
    )


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", configure_gemma2, _WEIGHTS)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", configure_gemma3, _WEIGHTS + QK_NORM)
