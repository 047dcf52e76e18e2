"""LFM2: short convolutions between two gates, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from .config import DecoderConfig, Family, Fields, Weight, read_common
from .llama import BACKBONE
from .qwen import QK_NORM
from .qwen_next import read_recurrent
from .short_conv import ShortConv


def configure(fields: Fields) -> DecoderConfig:
    raw = {"rope_theta": 1e6, **fields.raw}
    for old, new in (
        ("block_ff_dim", "intermediate_size"),
        ("tie_embedding", "tie_word_embeddings"),
        ("norm_eps", "rms_norm_eps"),
    ):
        if fields.given(old):
            raw[new] = fields.raw[old]
    inner = Fields(raw, fields.source)
    common = read_common(
        inner, kv_heads=8, head_dim=None, positions=128000, eps=1e-5, tied=True
    )
    layers = common["layers"]
    if not fields.given("layer_types"):
        attending = fields.raw.get("full_attn_idxs")
        attending = list(range(layers)) if attending is None else attending
        if not isinstance(attending, list):
            raise fields.error("full_attn_idxs", "a list of numbers of layers")
        raw["layer_types"] = [
            "full_attention" if i in attending else "conv" for i in range(layers)
        ]
    recurrent = read_recurrent(inner, layers, "conv", every=1)
    mixer = ShortConv(channels=common["hidden_size"], kernel=fields.integer("conv_L_cache", 3))
    return DecoderConfig(
        **common | {"intermediate_size": _adjusted(fields, common["intermediate_size"])},
        qk_norm=True,
        recurrent=recurrent,
        mixer=mixer if recurrent else None,
        mixer_bias=bool(recurrent) and fields.flag("conv_bias", False),
    )


def _adjusted(fields: Fields, size: int) -> int:
    """The intermediate size that a stated one stands for: two thirds of it, times a factor, in
    whole multiples.
    """
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiple = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    return -(-int(factor * size) // multiple) * multiple


_NAMES = (
    ("model.norm.", "model.embedding_norm."),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)


def _renamed(weight: Weight) -> Weight:
    name = weight.name
    for general, own in _NAMES:
        name = name.replace(general, own)
    return replace(weight, name=name)


def _conv(kind: str, suffix: str, *, transposed: bool) -> tuple[Weight, ...]:
    """Rows of the projections of a short convolution: their kernels or their biases."""
    layer = "model.layers.{i}.conv."
    own = "layers.{i}.mixer."
    inputs = tuple(f"{own}{name}.{suffix}" for name in ("gate_in", "gate_out", "inner"))
    return (
        Weight(
            f"{layer}in_proj.{kind}", inputs[0], transposed=transposed, followed_by=inputs[1:]
        ),
        Weight(f"{layer}out_proj.{kind}", f"{own}out.{suffix}", transposed=transposed),
    )


LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    configure,
    tuple(map(_renamed, BACKBONE + QK_NORM))
    + _conv("weight", "kernel", transposed=True)
    + _conv("bias", "bias", transposed=False)
    + (
        Weight("model.layers.{i}.conv.conv.weight", "layers.{i}.mixer.conv"),
        Weight("model.layers.{i}.conv.conv.bias", "layers.{i}.mixer.conv_bias"),
    ),
)
