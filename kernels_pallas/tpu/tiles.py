"""The sizes of a register, the product of the matrix unit, and arrays that stay in the main memory:
shared by the kernels for TPUs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # columns of a register
HEADS = 8  # its rows, which are query heads


def product(x: Array, y: Array, contracted: tuple[int, int]) -> Array:
    """The product of bf16 over one axis of each of two matrices, summed in f32."""
    axes = (contracted[:1], contracted[1:])
    return lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def far(x: Array, interpret: Any) -> Array:
    """x in the main memory. Where it fits, XLA else copies all of an operand to the fast memory,
    though the kernel reads parts of it."""
    return x if interpret else _far(x)


@custom_vmap
def _far(x: Array) -> Array:
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


@_far.def_vmap
def _far_of_many(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    """x itself, as jax has no rule for many arrays with a constraint."""
    return x, batched[0]
