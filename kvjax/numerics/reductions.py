"""Sums that are the same to the bit in every program.

A plain reduction may add in a different order in another program. A page that a prompt stored could then differ in its
last bit from the same page stored by single steps.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def sum_pairs(x: Array) -> Array:
    """The sum over axis 3, by adding halves."""
    while (n := x.shape[3]) > 1:
        half = n // 2
        added = x[:, :, :, :half] + x[:, :, :, half : 2 * half]
        x = added if n % 2 == 0 else jnp.concatenate([added, x[:, :, :, 2 * half :]], axis=3)
    return x[:, :, :, 0]


def page_means(k: Array, page: int) -> Array:
    """Means of the pages of keys [B, K, T, D]: f32[B, K, T / page, D]."""
    B, K, T, D = k.shape
    return sum_pairs(k.reshape(B, K, T // page, page, D).astype(jnp.float32)) / page
