"""Phi-3 and Phi-4-mini: a Llama whose files hold q, k and v in one tensor, and gate and up in
another.

Long variants have LongRoPE, and in Phi-4-mini it turns only the first channels of a head.
"""

from __future__ import annotations

from .config import DecoderConfig, Family, Fields, Weight, read_common, read_layer_types
from .llama import BACKBONE

_LAYER = "model.layers.{i}."
_OWN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
FUSED = (
    Weight(
        _LAYER + "self_attn.qkv_proj.weight",
        "layers.{i}.attention.q.kernel",
        transposed=True,
        followed_by=("layers.{i}.attention.k.kernel", "layers.{i}.attention.v.kernel"),
    ),
    Weight(
        _LAYER + "mlp.gate_up_proj.weight",
        "layers.{i}.mlp.gate.kernel",
        transposed=True,
        followed_by=("layers.{i}.mlp.up.kernel",),
    ),
)


def configure(fields: Fields) -> DecoderConfig:
    takes = ("partial_rotary_factor",)
    fields = _with_longrope(fields)
    common = read_common(fields, kv_heads=None, head_dim=None, positions=4096, takes=takes)
    scaling = fields.group("rope_scaling")
    inside = (scaling if scaling.raw else fields.group("rope_parameters")).number(
        "partial_rotary_factor", None
    )
    share = fields.number("partial_rotary_factor", 1.0) if inside is None else inside
    if not 0 < share <= 1:
        raise fields.error("partial_rotary_factor", "above 0 and at most 1")
    common["rotary_dim"] = None if share == 1 else int(common["head_dim"] * share)
    window = fields.integer("sliding_window", None)
    read_layer_types(fields, common["layers"], window)
    windows = (window,) * common["layers"]
    common["norm_eps"] = fields.number("rms_norm_eps", 1e-5)
    return DecoderConfig(**common, windows=windows)


def _with_longrope(fields: Fields) -> Fields:
    """The fields with the RoPE types "su" and "yarn", as early Phi-3 configs call it, replaced
    by "longrope".
    """
    raw = dict(fields.raw)
    inside = False
    for name in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(name)
        if isinstance(scaling, dict):
            inside |= "original_max_position_embeddings" in scaling
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind in ("su", "yarn"):
                raw[name] = {**scaling, "rope_type": "longrope"}
    if not inside:
        raw.setdefault("original_max_position_embeddings", 4096)
    return Fields(raw, fields.source)


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    configure,
    tuple(weight for weight in BACKBONE if not any(name in weight.name for name in _OWN))
    + FUSED,
)
