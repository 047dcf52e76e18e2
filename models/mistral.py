"""Mistral: a Llama whose layers all have the same sliding window, if they have one."""

from __future__ import annotations

from .config import DecoderConfig, Family, Fields, read_common, read_layer_types
from .llama import BACKBONE


def configure(fields: Fields) -> DecoderConfig:
    common = read_common(fields, kv_heads=8, head_dim=None, positions=4096 * 32)
    # null says that there is no window; a config without the field means the 4096 of Mistral-7B-v0.1.
    window = fields.integer("sliding_window", None) if "sliding_window" in fields.raw else 4096
    windows = (window,) * common["layers"]
    by_type = read_layer_types(fields, common["layers"], window)
    if by_type is not None and by_type != windows:
        raise ValueError(
            f"layer_types in {fields.source} mixes layers with and without the window of {window}, but all layers of "
            "a Mistral are alike; such a model is of another architecture"
        )
    return DecoderConfig(**common, windows=windows)


MISTRAL = Family("mistral", "MistralForCausalLM", configure, BACKBONE)
