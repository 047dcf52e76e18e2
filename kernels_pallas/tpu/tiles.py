"""The sizes of a register and the product of the matrix unit, which the kernels for TPUs share."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

LANES = 128  # columns of a register
HEADS = 8  # its rows, which are query heads


def product(x: Array, y: Array, contracted: tuple[int, int]) -> Array:
    """The product of bf16 over one axis of each of two matrices, summed in f32."""
    axes = (contracted[:1], contracted[1:])
    return lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)
