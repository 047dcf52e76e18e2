"""Mistral: a Llama whose layers all have the same sliding window, if they have one; Mixtral,
with experts.
"""

from __future__ import annotations

from .config import DecoderConfig, Experts, Family, Fields, read_common, read_layer_types
from .llama import BACKBONE, expert_weights


def configure(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=8, head_dim=None, positions=4096 * 32)
    # null says that there is no window; a config without the field means the 4096 of
    # Mistral-7B-v0.1.
    window = fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
    windows = (window,) * common["layers"]
    by_type = read_layer_types(fields, common["layers"], window)
    if by_type is not None and by_type != windows:
        raise ValueError(
            f"layer_types in {fields.source} mixes layers with and without the window of {window}, but all layers of "
            "a Mistral are alike; such a model is of another architecture"
        )
    return DecoderConfig(**common, windows=windows)


def configure_mixtral(fields: Fields) -> DecoderConfig:
    fields = Fields({"rope_theta": 1e6, **fields.raw}, fields.source)
    common = read_common(fields, kv_heads=8, head_dim=None, positions=4096 * 32, eps=1e-5)
    window = fields.integer("sliding_window", None)
    read_layer_types(fields, common["layers"], window)
    experts = Experts(
        count=fields.integer("num_local_experts", fields.integer("num_experts", 8)),
        per_token=fields.integer("num_experts_per_tok", 2),
        size=common["intermediate_size"],
    )
    return DecoderConfig(**common, windows=(window,) * common["layers"], experts=experts)


_MOE = "block_sparse_moe."
MISTRAL = Family("mistral", "MistralForCausalLM", configure, BACKBONE)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    configure_mixtral,
    tuple(w for w in BACKBONE if ".mlp." not in w.path)
    + expert_weights(_MOE + "gate", _MOE + "experts.{e}.", "w1", "w3", "w2"),
)
