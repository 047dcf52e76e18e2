"""gpt-oss: a sink logit for each query head, a window in every second layer, and a mixture of
experts with biases.

Files hold the experts in bf16, or in MXFP4, which is expanded while loading.
"""

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
from .llama import BACKBONE, OUT_BIAS, QKV_BIAS

_MLP = "model.layers.{i}.mlp."
_OWN = "layers.{i}.mlp."
_WEIGHTS = (
    Weight("model.layers.{i}.self_attn.sinks", "layers.{i}.attention.sinks"),
    Weight(_MLP + "router.weight", _OWN + "router.kernel"),
    Weight(_MLP + "router.bias", _OWN + "router.bias"),
    Weight(
        _MLP + "experts.gate_up_proj", _OWN + "gate", interleaved=_OWN + "up", transposed=True
    ),
    Weight(
        _MLP + "experts.gate_up_proj_bias", _OWN + "gate_bias", interleaved=_OWN + "up_bias"
    ),
    Weight(_MLP + "experts.down_proj", _OWN + "down", transposed=True),
    Weight(_MLP + "experts.down_proj_bias", _OWN + "down_bias"),
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def configure(fields: Fields) -> DecoderConfig:
    quantised = fields.raw.get("quantization_config") or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    takes = ("quantization_config",) if method == "mxfp4" else ()
    raw = {"rope_theta": 150000.0, **fields.raw}
    if not any(fields.given(name) for name in ("rope_scaling", "rope_parameters")):
        raw |= {"rope_parameters": {**_ROPE, "original_max_position_embeddings": 4096}}
    common = read_common(
        Fields(raw, fields.source),
        kv_heads=8,
        head_dim=64,
        positions=131072,
        takes=takes,
        eps=1e-5,
    )
    window = fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 128
    windows = read_layer_types(fields, common["layers"], window)
    windows = windows or tuple(None if i % 2 else window for i in range(common["layers"]))
    bias = fields.flag("attention_bias", True)
    chosen = (
        "num_experts_per_tok" if fields.given("num_experts_per_tok") else "experts_per_token"
    )
    experts = Experts(
        count=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        per_token=fields.integer(chosen, 4),
        size=common["intermediate_size"],
        bias=True,
        clamp=(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
    )
    return DecoderConfig(
        **common, windows=windows, qkv_bias=bias, out_bias=bias, sinks=True, experts=experts
    )


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    configure,
    tuple(w for w in BACKBONE if ".mlp." not in w.path) + QKV_BIAS + OUT_BIAS + _WEIGHTS,
)
