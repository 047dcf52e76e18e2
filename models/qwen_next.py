"""Qwen3-Next and Qwen3.5: three gated delta nets to one layer of attention, which has an output
gate and turns a quarter of each head by RoPE.

Qwen3-Next joins its projections by head in the files, Qwen3.5 keeps them apart. Checkpoints of
Qwen3.5 see images too; only their language model is read. Neither's layers for drafts
(`mtp`) are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config import DecoderConfig, Experts, Family, Fields, Weight, read_common
from .gated_delta import GatedDelta
from .llama import BACKBONE, OUT_BIAS, QKV_BIAS, expert_weights
from .qwen import QK_NORM, SHARED_EXPERT, read_experts

_FILE = "model.layers.{i}.linear_attn."
_OWN = "layers.{i}.mixer."


def configure_qwen3_next(fields: Fields) -> DecoderConfig:
    common = _read(fields, kv_heads=2)
    experts = read_experts(
        fields, common["layers"], count=512, per_token=10, size=512, shared=512, normalised=True
    )
    return DecoderConfig(**common, experts=experts)


def configure_qwen3_5(fields: Fields) -> DecoderConfig:
    return DecoderConfig(**_read(fields, kv_heads=4))


def configure_qwen3_5_moe(fields: Fields) -> DecoderConfig:
    size = fields.integer("moe_intermediate_size", 512)
    plain = {"intermediate_size": size}  # its configs have none, because no layer uses it
    common = _read(Fields({**plain, **fields.raw}, fields.source), kv_heads=2)
    experts = Experts(
        count=fields.integer("num_experts", 256),
        per_token=fields.integer("num_experts_per_tok", 8),
        size=size,
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
    )
    return DecoderConfig(**common, experts=experts)


def _read(fields: Fields, *, kv_heads: int) -> dict[str, Any]:
    """Reads the fields that all of them have, as arguments of DecoderConfig."""
    common = read_common(
        fields,
        kv_heads=kv_heads,
        head_dim=256,
        positions=32768,
        takes=("partial_rotary_factor",),
    )
    if not fields.flag("attn_output_gate", True):
        raise ValueError(
            f"attn_output_gate in {fields.source} is false, which is not supported: attention of these models has a "
            "gate"
        )
    bias = fields.flag("attention_bias", False)
    recurrent = read_recurrent(fields, common["layers"], "linear_attention", every=4)
    mixer = GatedDelta(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        activation=common["activation"],
    )
    return {
        **common,
        "rotary_dim": _rotary_dim(fields, common["head_dim"]),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "norm_offset": True,
        "output_gate": True,
        "recurrent": recurrent,
        "mixer": mixer if recurrent else None,
    }


def _rotary_dim(fields: Fields, head_dim: int) -> int | None:
    """Channels of a head that RoPE turns; None for all."""
    scaling = fields.group("rope_scaling")
    given = scaling if scaling.raw else fields.group("rope_parameters")
    outside = fields.number("partial_rotary_factor", 0.25)
    share = given.number("partial_rotary_factor", outside)
    if not 0 < share <= 1:
        raise fields.error("partial_rotary_factor", "above 0 and at most 1")
    return None if share == 1 else int(head_dim * share)


def read_recurrent(fields: Fields, layers: int, kind: str, *, every: int) -> tuple[int, ...]:
    """The layers that `layer_types` calls `kind`, all others having full attention; without it,
    all but each `full_attention_interval`-th.
    """
    types = fields.raw.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", every)
        return tuple(i for i in range(layers) if (i + 1) % interval)
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", f"a list of one name for each of the {layers} layers")
    strange = sorted({str(name) for name in types} - {kind, "full_attention"})
    if strange:
        raise ValueError(
            f"layer_types in {fields.source} has {', '.join(strange)}, which is not supported; those that are: "
            f"full_attention, {kind}"
        )
    if "full_attention" not in types:
        raise fields.error("layer_types", "a list with full_attention in it")
    return tuple(i for i, name in enumerate(types) if name == kind)


def _with_gate(weight: Weight) -> Weight:
    """The row of `q_proj` whose heads each have a query and a gate."""
    gate = weight.path.replace("attention.q.", "attention.gate.")
    return replace(weight, followed_by=(gate,), groups="q_heads")


def _kernels(*names: str) -> tuple[str, ...]:
    return tuple(f"{_OWN}{name}.kernel" for name in names)


_SAME = (
    Weight(_FILE + "conv1d.weight", _OWN + "conv"),
    Weight(_FILE + "A_log", _OWN + "log_speed"),
    Weight(_FILE + "dt_bias", _OWN + "decay_bias"),
    Weight(_FILE + "norm.weight", _OWN + "norm.scale"),
    Weight(_FILE + "out_proj.weight", _OWN + "out.kernel", transposed=True),
)


def _joined(name: str, *parts: str, groups: str | None = None) -> Weight:
    """The row of a tensor with several projections one after the other, or so in each group."""
    first, *others = _kernels(*parts)
    return Weight(
        f"{_FILE}{name}.weight",
        first,
        transposed=True,
        followed_by=tuple(others),
        groups=groups,
    )


_JOINED = (
    _joined("in_proj_qkvz", "q", "k", "v", "gate", groups="mixer.key_heads"),
    _joined("in_proj_ba", "rate", "decay", groups="mixer.key_heads"),
)
_APART = (
    _joined("in_proj_qkv", "q", "k", "v"),
    _joined("in_proj_z", "gate"),
    _joined("in_proj_b", "rate"),
    _joined("in_proj_a", "decay"),
)
_EXPERTS = (
    Weight(
        "model.layers.{i}.mlp.experts.gate_up_proj",
        "layers.{i}.mlp.gate",
        followed_by=("layers.{i}.mlp.up",),
        groups="experts.count",
        optional=True,
    ),
    Weight("model.layers.{i}.mlp.experts.down_proj", "layers.{i}.mlp.down", optional=True),
    *expert_weights("mlp.gate", "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
)
_COMMON = (
    tuple(
        _with_gate(weight) if ".q_proj." in weight.name else weight
        for weight in BACKBONE + QKV_BIAS + OUT_BIAS
    )
    + QK_NORM
    + _SAME
)
_DRAFTS = ("mtp.",)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    configure_qwen3_next,
    _COMMON + _JOINED + _EXPERTS + SHARED_EXPERT,
    ignored=_DRAFTS,
)
QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", configure_qwen3_5, _COMMON + _APART, ignored=_DRAFTS
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    configure_qwen3_5_moe,
    _COMMON + _APART + _EXPERTS + SHARED_EXPERT,
    ignored=_DRAFTS,
)
