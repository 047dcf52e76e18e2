"""Short causal convolutions over the tokens of a row, and the slots that keep its newest inputs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.blocks import write


def causal_conv(x: Array, kernel: Array, bias: Array | None = None, *, like: Array) -> Array:
    """Each channel's sum of W adjacent tokens of x [B, W-1+T, C] by a kernel [W, C]: [B, T, C],
    summed in f32, in the dtype of `like`.
    """
    W = kernel.shape[0]
    T = x.shape[1] - kernel.shape[0] + 1
    weights = kernel.astype(jnp.float32)
    out = jnp.zeros((x.shape[0], T, x.shape[2]), jnp.float32)
    for i in range(W):  # W is 3 or 4
        out += x[:, i : i + T].astype(jnp.float32) * weights[i][None, None]
    if bias is not None:
        out += bias.astype(jnp.float32)[None, None]
    return out.astype(like.dtype)


def take_slots(x: Array, start: Array, size: int) -> Array:
    """`size` tokens of x [B, S, C] from `start` i32[B] on: [B, size, C]."""
    slots = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.take_along_axis(x, slots[..., None], axis=1, mode="clip")


def put_slots(buffer: Array, new: Array, start: Array, count: Array) -> Array:
    """buffer [B, S, ...] with new[b, i] in slot start[b] + i, for i < count[b]."""
    return write(buffer[:, None], new[:, None], start, count)[:, 0]
