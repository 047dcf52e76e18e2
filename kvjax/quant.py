"""Group quantisers: codes of few bits with a scale and a zero point for each group.

A group is g consecutive tokens of one channel (keys have channels of very different size, and a channel keeps its size
from token to token). The 1-bit quantiser keeps the group's midpoint and half-range, so that a value decodes to the
group's maximum or minimum.

**Source:** FIER, section 3 (1-bit keys by group of tokens a channel).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvjax.layouts import pack_bits, unpack_bits


class OneBit(NamedTuple):
    """1-bit codes of keys: S tokens in groups of g, D channels."""

    bits: Array  # u8[..., S, D/8] bit j of byte i is 1 where channel 8i + j of the token is >= its zero
    scale: Array  # dtype[..., S/g, D] half the range of the group; 0 for a constant group, which decodes to itself
    zero: Array  # dtype[..., S/g, D] middle of the group


def quantize_1bit(x: Array, group: int, dtype: DTypeLike = jnp.bfloat16) -> OneBit:
    """1-bit codes of x [..., S, D], S a multiple of `group`; scale and zero are stored in `dtype`.

    Codes are taken against the exact midpoint, before it is rounded to `dtype`.
    """
    *lead, S, D = x.shape
    if S % group:
        raise ValueError(f"quantize_1bit got S={S} tokens, which group={group} does not divide")
    grouped = x.astype(jnp.float32).reshape(*lead, S // group, group, D)
    high, low = jnp.max(grouped, axis=-2), jnp.min(grouped, axis=-2)
    zero = (high + low) / 2
    bits = pack_bits((grouped >= zero[..., None, :]).reshape(*lead, S, D))
    return OneBit(bits, ((high - low) / 2).astype(dtype), zero.astype(dtype))


def dequantize_1bit(code: OneBit) -> Array:
    """f32[..., S, D]: zero + scale where the bit is 1, zero - scale where it is 0."""
    *lead, S, _ = code.bits.shape
    groups, D = code.scale.shape[-2:]
    positive = unpack_bits(code.bits).reshape(*lead, groups, S // groups, D)
    scale, zero = (a.astype(jnp.float32)[..., None, :] for a in (code.scale, code.zero))
    return jnp.where(positive, zero + scale, zero - scale).reshape(*lead, S, D)
