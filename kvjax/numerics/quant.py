"""Group quantisers: codes of few bits with a scale and a zero point for each group, and how
codes are packed.

By channel, a group is g consecutive tokens of one channel; by token it is g consecutive
channels of one token. The 1-bit quantiser keeps the group's midpoint and half-range, so that a
value decodes to the group's maximum or minimum. The quantisers of 2, 3, 4 and 8 bits keep the
minimum and the step: 2**bits levels from minimum to maximum. Their scale and zero point are two
bfloat16 in one u32, which a kernel loads at once; codes are computed with these rounded
numbers.

A packed row runs along the channels of one token, lowest bit first: channel 8*i + j of a token
is bit j of its byte i. Appending needs no alignment of tokens, and byte i is also the sign
pattern of the 8-channel subspace i. Little-endian words of four bytes keep the order, so a
kernel may read the same memory as u32. Codes of 2, 4 and 8 bits follow the same rule: channel i
* (8 / bits) + j is in byte i, from bit j * bits up. Codes of 3 bits are two planes, as 3 does
not divide a byte: D/4 bytes of their lower two bits, then D/8 bytes of their highest.

**Source:** FIER, section 3 (1-bit keys, groups of tokens per channel). KIVI, section 3
(asymmetric minimum and step).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from kvjax.numerics.types import Float, UInt8

# Codes of tokens: arrays [B, K, S or groups, ...], the first by token.
C = TypeVar("C", bound=tuple[Array, ...])


def pack_bits(bits: Array) -> Array:
    """bool[..., D] as u8[..., D/8].

    >>> pack_bits(jnp.array([True, False, False, False, False, False, False, True])).tolist()
    [129]
    """
    if bits.shape[-1] % 8:
        raise ValueError(f"pack_bits needs a multiple of 8 channels, got {bits.shape[-1]}")
    split = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 8, 8).astype(jnp.uint8)
    return jnp.sum(split << _places(split.ndim), axis=-1, dtype=jnp.uint8)


def unpack_bits(packed: Array) -> Array:
    """u8[..., D/8] as bool[..., D], the inverse of `pack_bits`; or u32[..., D/32],
    little-endian words of it.
    """
    *lead, words, width = *packed.shape, 8 * packed.dtype.itemsize
    places = lax.broadcasted_iota(packed.dtype, (*lead, words, width), packed.ndim)
    return (
        ((packed[..., None] >> places) & packed.dtype.type(1))
        .astype(bool)
        .reshape(*lead, words * width)
    )


def pack_codes(codes: Array, bits: int) -> Array:
    """u8[..., D] of codes below 2**bits as u8[..., D * bits / 8]; bits is 2, 3, 4 or 8.

    >>> pack_codes(jnp.array([1, 2, 3, 0], dtype=jnp.uint8), 2).tolist()
    [57]
    """
    if codes.shape[-1] % channels_packed(bits):
        raise ValueError(
            f"codes of {bits} bits pack a multiple of {channels_packed(bits)} channels, got {codes.shape[-1]}"
        )
    if bits == 8:
        return codes
    if bits == 3:
        return jnp.concatenate(
            [pack_codes(codes & jnp.uint8(3), 2), pack_bits(codes >> jnp.uint8(2) > 0)], axis=-1
        )
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8, 8 // bits)
    return jnp.sum(split << _places(split.ndim, bits), axis=-1, dtype=jnp.uint8)


def unpack_codes(packed: Array, channels: int) -> Array:
    """u8[..., D * bits / 8] as codes u8[..., D] of D = `channels`; the two sizes give the bits."""
    bits = packed.shape[-1] * 8 // channels
    if bits == 8:
        return packed
    if bits == 3:
        low = packed[..., : channels // 4]
        high = packed[..., channels // 4 :]
        return unpack_codes(low, channels) | (
            unpack_bits(high).astype(jnp.uint8) << jnp.uint8(2)
        )
    split = (packed[..., None] >> _places(packed.ndim + 1, bits)) & jnp.uint8(2**bits - 1)
    return split.reshape(*packed.shape[:-1], channels)


def channels_packed(bits: int) -> int:
    """Returns the number of channels whose codes of 2, 3, 4 or 8 bits make whole bytes."""
    return {2: 4, 3: 8, 4: 2, 8: 1}[bits]


def _places(ndim: int, bits: int = 1) -> Array:
    """Returns the place of the lowest bit of each code of a byte: u8[1, ..., 1, 8 / bits]."""
    return jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape((1,) * (ndim - 1) + (-1,))


class OneBit(NamedTuple):
    """1-bit codes of keys: S tokens in groups of g, D channels."""

    # Bit j of byte i is 1 where channel 8i + j of the token is >= its zero.
    bits: UInt8[Array, "*rows S D/8"]
    # Half the range of the group; 0 for a constant group, which decodes to itself.
    scale: Float[Array, "*rows S/g D"]
    zero: Float[Array, "*rows S/g D"]  # middle of the group


def quantize_1bit(
    x: Float[Array, "*rows S D"], group: int, dtype: DTypeLike = jnp.bfloat16
) -> OneBit:
    """1-bit codes of x [..., S, D], S a multiple of `group`; scale and zero are stored in
    `dtype`.

    Codes are computed with the exact midpoint, before it is rounded to `dtype`.
    """
    *lead, S, D = x.shape
    if S % group:
        raise ValueError(
            f"quantize_1bit got S={S} tokens, which must be a multiple of group={group}"
        )
    grouped = x.astype(jnp.float32).reshape(*lead, S // group, group, D)
    high = jnp.max(grouped, axis=-2)
    low = jnp.min(grouped, axis=-2)
    zero = (high + low) / 2
    bits = pack_bits((grouped >= zero[..., None, :]).reshape(*lead, S, D))
    return OneBit(bits, ((high - low) / 2).astype(dtype), zero.astype(dtype))


def dequantize_1bit(code: OneBit) -> Float[Array, "*rows S D"]:
    """Keys of one bit: zero + scale where the bit is 1, zero - scale where it is 0: f32[..., S,
    D].
    """
    *lead, S, _ = code.bits.shape
    groups, D = code.scale.shape[-2:]
    positive = unpack_bits(code.bits).reshape(*lead, groups, S // max(groups, 1), D)
    scale = code.scale.astype(jnp.float32)[..., None, :]
    zero = code.zero.astype(jnp.float32)[..., None, :]
    return jnp.where(positive, zero + scale, zero - scale).reshape(*lead, S, D)


class QuantArray(NamedTuple):
    """Codes of x [..., S, D] in groups of gs tokens by gd channels; sizes of groups are read
    from the shapes.

    By channel gd is 1, by token gs is 1.
    """

    codes: Array  # u8[..., S, D * bits / 8] packed along channels by `pack_codes`
    scales: Array  # u32[..., S / gs, D / gd] bfloat16 scale in the low half, bfloat16 zero in the high half


def quantize(
    x: Float[Array, "*rows S D"], bits: int, *, tokens: int = 1, channels: int = 1
) -> QuantArray:
    """Codes of x [..., S, D] in groups of `tokens` by `channels`: round((x - min) / scale),
    half to even.

    scale is (max - min) / (2**bits - 1). A constant group has scale 0 and decodes to itself,
    rounded to bfloat16; so does one whose scale would be below 2**-125.
    """
    *lead, S, D = x.shape
    for name, size, group in (("tokens", S, tokens), ("channels", D, channels)):
        if size % group:
            raise ValueError(
                f"quantize got {size} {name}, which groups of {group} do not divide"
            )
    grouped = x.astype(jnp.float32).reshape(*lead, S // tokens, tokens, D // channels, channels)
    low = jnp.min(grouped, axis=(-3, -1), keepdims=True)
    high = jnp.max(grouped, axis=(-3, -1), keepdims=True)
    # Multiply by reciprocals instead of dividing: XLA rewrites some divisions that way, and a
    # value halfway between two levels must get the same code wherever it is computed.
    scales = _join((high - low) * np.float32(1 / (2**bits - 1)), low)
    scale, zero = split_scales(scales)
    levels = jnp.round((grouped - zero) * (1 / jnp.where(scale > 0, scale, 1.0)))
    codes = jnp.clip(levels, 0, 2**bits - 1).astype(jnp.uint8)
    return QuantArray(pack_codes(codes.reshape(*lead, S, D), bits), scales[..., :, 0, :, 0])


def dequantize(code: QuantArray, channels: int) -> Float[Array, "*rows S D"]:
    """f32[..., S, D] of D = `channels`: scale * code + zero."""
    *lead, S, _ = code.codes.shape
    groups, slices = code.scales.shape[-2:]
    codes = unpack_codes(code.codes, channels).astype(jnp.float32)
    scale, zero = (a[..., :, None, :, None] for a in split_scales(code.scales))
    grouped = codes.reshape(*lead, groups, S // max(groups, 1), slices, channels // slices)
    return (grouped * scale + zero).reshape(*lead, S, channels)


def split_scales(scales: Array) -> tuple[Array, Array]:
    """Scale and zero f32 of scales u32, of the same shape."""
    scale = lax.bitcast_convert_type(scales << jnp.uint32(16), jnp.float32)
    return scale, lax.bitcast_convert_type(scales & jnp.uint32(0xFFFF0000), jnp.float32)


def _join(scale: Array, zero: Array) -> Array:
    """u32 of scale and zero f32, each rounded to bfloat16; a scale without a normal reciprocal
    becomes 0.
    """
    scale = jnp.where(scale >= 2.0**-125, scale, 0.0)
    low, high = (
        lax.bitcast_convert_type(a.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        for a in (scale, zero)
    )
    return low | (high << jnp.uint32(16))


def slice_tokens(code: C, first: Array | int, size: int) -> C:
    """Returns the codes of the `size` tokens from `first` on, both multiples of a group of
    tokens.
    """
    groups = [code[0].shape[2] // a.shape[2] for a in code]
    parts = zip(code, groups, strict=True)
    return type(code)(
        *(lax.dynamic_slice_in_dim(a, first // g, size // g, axis=2) for a, g in parts)
    )
