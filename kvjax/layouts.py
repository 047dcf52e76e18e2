"""Packing orders and page arithmetic, stated once for the reference code and for the kernels.

A packed row lies along the channels of one token, lowest bit first: channel 8*i + j of a token is bit j of its byte
i. A token's signs are therefore D/8 adjacent bytes (16 at D = 128, one vector load), appending needs no alignment
of tokens, and byte i is at once the sign pattern of the 8-channel subspace i. Little-endian words of four
bytes keep the order, so a kernel may read the same memory as u32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def pack_bits(bits: Array) -> Array:
    """bool[..., D] as u8[..., D/8].

    >>> pack_bits(jnp.array([True, False, False, False, False, False, False, True])).tolist()
    [129]
    """
    if bits.shape[-1] % 8:
        raise ValueError(f"pack_bits needs a multiple of 8 channels, got {bits.shape[-1]}")
    split = bits.reshape(*bits.shape[:-1], -1, 8).astype(jnp.uint8)
    return jnp.sum(split << _places(split.ndim), axis=-1, dtype=jnp.uint8)


def unpack_bits(packed: Array) -> Array:
    """u8[..., D/8] as bool[..., D]; the inverse of `pack_bits`."""
    split = (packed[..., None] >> _places(packed.ndim + 1)) & jnp.uint8(1)
    return split.astype(bool).reshape(*packed.shape[:-1], -1)


def _places(ndim: int) -> Array:
    """u8[1, ..., 1, 8]: the place of each bit of a byte."""
    return jnp.arange(8, dtype=jnp.uint8).reshape((1,) * (ndim - 1) + (8,))


def whole_units(tokens: int, unit: int) -> int:
    """`tokens` rounded down to whole pages, groups or chunks of `unit`."""
    return tokens // unit * unit
