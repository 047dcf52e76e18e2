"""1-bit groups decode to their maximum or minimum, whatever the group."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from kvjax.numerics.quant import (
    dequantize_1bit,
    pack_bits,
    pack_codes,
    quantize_1bit,
    unpack_bits,
    unpack_codes,
)

VALUES = st.floats(-1e4, 1e4, width=32)


@partial(jax.jit, static_argnums=1)
def code_1bit(x: jax.Array, group: int) -> jax.Array:
    return dequantize_1bit(quantize_1bit(x, group, jnp.float32))


@given(x=hnp.arrays(np.float32, (12, 8), elements=VALUES), group=st.sampled_from([1, 2, 3, 12]))
def test_value_decodes_to_the_nearer_end_of_its_group(x: np.ndarray, group: int) -> None:
    decoded = np.asarray(code_1bit(x, group))
    for first in range(0, 12, group):
        block = x[first : first + group].astype(np.float64)
        high, low = block.max(axis=0), block.min(axis=0)
        want = np.where(block >= (high + low) / 2, high, low)
        gap = np.abs(decoded[first : first + group] - want)
        # f32 rounds the middle: a value that close to it may decode to either end.
        near = np.abs(block - (high + low) / 2) <= 1e-6 * (np.abs(high) + np.abs(low))
        assert ((gap <= 1e-6 * (np.abs(high) + np.abs(low)) + 1e-30) | near).all()


def test_constant_group_decodes_to_itself() -> None:
    x = jnp.full((2, 64, 16), -3.25)
    code = quantize_1bit(x, 32)
    assert not np.asarray(code.scale).any()
    np.testing.assert_array_equal(dequantize_1bit(code), x)


def test_scales_take_16_bits_and_codes_one() -> None:
    code = quantize_1bit(jnp.zeros((4, 64, 128)), 32)
    assert sum(a.nbytes for a in code) == 4 * 64 * 32  # 32 bytes a key at D = 128, g = 32


def test_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="S=10 tokens, which must be a multiple of group=4"):
        quantize_1bit(jnp.zeros((10, 8)), 4)


@given(bits=hnp.arrays(bool, (3, 24)))
def test_packing_round_trips_with_the_lowest_bit_first(bits: np.ndarray) -> None:
    packed = pack_bits(jnp.asarray(bits))
    np.testing.assert_array_equal(packed, np.packbits(bits, axis=-1, bitorder="little"))
    np.testing.assert_array_equal(unpack_bits(packed), bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_tokens_pack_and_unpack(bits: int) -> None:
    none = jnp.zeros((2, 0, 32), jnp.uint8)
    packed = pack_codes(none, bits)
    assert packed.shape == (2, 0, 4 * bits)
    np.testing.assert_array_equal(unpack_codes(packed, 32), none)
    words = jnp.zeros((2, 0, 1), jnp.uint32)
    assert unpack_bits(words).shape == unpack_bits(pack_bits(none > 0)).shape == none.shape


def test_packing_needs_whole_bytes() -> None:
    with pytest.raises(ValueError, match="multiple of 8 channels, got 12"):
        pack_bits(jnp.zeros((2, 12), bool))
