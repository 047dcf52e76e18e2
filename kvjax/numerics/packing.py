"""Packing orders and page arithmetic, defined once for the reference code and for the kernels.

A packed row runs along the channels of one token, lowest bit first: channel 8*i + j of a token is bit j of its byte i.
Appending needs no alignment of tokens, and byte i is also the sign pattern of the 8-channel subspace i. Little-endian
words of four bytes keep the order, so a kernel may read the same memory as u32.

Codes of 2, 4 and 8 bits follow the same rule: channel i * (8 / bits) + j is in byte i, from bit j * bits up. Codes of 3
bits are two planes, as 3 does not divide a byte: D/4 bytes of their lower two bits, then D/8 bytes of their highest.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


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
    """u8[..., D/8] as bool[..., D], the inverse of `pack_bits`; or u32[..., D/32], little-endian words of it."""
    *lead, words, width = *packed.shape, 8 * packed.dtype.itemsize
    places = lax.broadcasted_iota(packed.dtype, (*lead, words, width), packed.ndim)
    return ((packed[..., None] >> places) & packed.dtype.type(1)).astype(bool).reshape(*lead, words * width)


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
        return jnp.concatenate([pack_codes(codes & jnp.uint8(3), 2), pack_bits(codes >> jnp.uint8(2) > 0)], axis=-1)
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8, 8 // bits)
    return jnp.sum(split << _places(split.ndim, bits), axis=-1, dtype=jnp.uint8)


def unpack_codes(packed: Array, channels: int) -> Array:
    """u8[..., D * bits / 8] as codes u8[..., D] of D = `channels`; the two sizes give the bits."""
    bits = packed.shape[-1] * 8 // channels
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed[..., : channels // 4], packed[..., channels // 4 :]
        return unpack_codes(low, channels) | (unpack_bits(high).astype(jnp.uint8) << jnp.uint8(2))
    split = (packed[..., None] >> _places(packed.ndim + 1, bits)) & jnp.uint8(2**bits - 1)
    return split.reshape(*packed.shape[:-1], channels)


def channels_packed(bits: int) -> int:
    """The number of channels whose codes of 2, 3, 4 or 8 bits make whole bytes."""
    return {2: 4, 3: 8, 4: 2, 8: 1}[bits]


def _places(ndim: int, bits: int = 1) -> Array:
    """The place of the lowest bit of each code of a byte: u8[1, ..., 1, 8 / bits]."""
    return jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape((1,) * (ndim - 1) + (-1,))


def whole_units(tokens: int, unit: int) -> int:
    """`tokens` rounded down to whole pages, groups or chunks of `unit`."""
    return tokens // unit * unit


def sum_pairs(x: Array) -> Array:
    """The sum over axis 3, by adding halves, which is the same to the bit in every program.

    A plain reduction may add in another order there, and a page of a prompt would differ from the same one of steps.
    """
    while (n := x.shape[3]) > 1:
        half = n // 2
        added = x[:, :, :, :half] + x[:, :, :, half : 2 * half]
        x = added if n % 2 == 0 else jnp.concatenate([added, x[:, :, :, 2 * half :]], axis=3)
    return x[:, :, :, 0]


def page_means(k: Array, page: int) -> Array:
    """Means of the pages of keys [B, K, T, D]: f32[B, K, T / page, D]."""
    B, K, T, D = k.shape
    return sum_pairs(k.reshape(B, K, T // page, page, D).astype(jnp.float32)) / page
