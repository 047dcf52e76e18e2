"""Products of one token's row in a decode step of a model, with the norm before and the sum after; and its experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.numerics.types import Float, Int32
from kvjax.ops.op import Implementation, op


@op(
    kernel="project.project",
    static_argnames=("eps", "offset"),
    derivative="reference",
    limit=lambda kernel, a: kernel.unsupported(a.x, a.kernels),
    mosaic=lambda kernel, a: kernel.project(a.x, a.kernels, a.biases, a.scale, a.residual, eps=a.eps, offset=a.offset),
)
def project(
    x: Float[Array, " in"],
    kernels: Sequence[Float[Array, "in _"]],
    biases: Sequence[Float[Array, " _"]],
    scale: Float[Array, " in"] | None,
    residual: Float[Array, " out"] | None,
    *,
    eps: float,
    offset: bool,
    implementation: Implementation | None = None,
) -> Float[Array, " out"]:
    """The row x times each of `kernels` [in, out], one after the other: [sum of out].

    With `scale` the row is normed first (`rms_norm`). `biases`, none or one for each kernel, and `residual` [sum of
    out] are added. The kernel takes bfloat16; XLA takes a launch or more for each of norm, product and sum.
    """
    row = x if scale is None else rms_norm(x, scale, eps=eps, offset=offset)
    parts = [product("ni,io->no", row[None], kernel)[0] for kernel in kernels]
    parts = [part + bias for part, bias in zip(parts, biases, strict=True)] if biases else parts
    y = jnp.concatenate(parts)
    return y if residual is None else residual + y


@op(
    kernel="project.route",
    static_argnames=("k", "eps", "offset", "normalised"),
    derivative="reference",
    limit=lambda kernel, a: kernel.unsupported(a.x, a.kernel, a.k, a.normalised),
    mosaic=lambda kernel, a: kernel.route(
        a.x, a.scale, a.kernel, a.bias, a.k, eps=a.eps, offset=a.offset, normalised=a.normalised
    ),
)
def route(
    x: Float[Array, " in"],
    scale: Float[Array, " in"],
    kernel: Float[Array, "E in"],
    bias: Float[Array, " E"] | None,
    k: int,
    *,
    eps: float,
    offset: bool,
    normalised: bool,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, " in"], Float[Array, " k"], Int32[Array, " k"]]:
    """(the normed row, shares f32[k], experts i32[k]) of the row x and a router's `kernel` [E, in] and `bias` [E].

    Logits are a sum in f32, which XLA fuses with what makes the row. See `highest_experts`.
    """
    row = rms_norm(x, scale, eps=eps, offset=offset)
    logits = jnp.sum(row.astype(jnp.float32)[None] * kernel.astype(jnp.float32), axis=-1)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    weights, chosen = highest_experts(logits[None], k, normalised=normalised)
    return row, weights[0], chosen[0]


def rms_norm(x: Array, scale: Array, *, eps: float, offset: bool = False) -> Array:
    """x over the root of its mean square along the last axis, times `scale`, or 1 + scale with `offset`, in f32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
    scale = 1 + scale if offset else scale
    return (normed * scale).astype(x.dtype)


def product(terms: str, x: Array, kernel: Array, dtype: Any = None) -> Array:
    """einsum of x and a kernel; the default on a GPU would round f32 operands to 10 bits.

    One row and a 16-bit kernel, as in decoding, are given to XLA as two rows: for one row with few outputs (k and v of
    a Llama) it writes the elementwise products in 16 bits to memory, and then sums them.
    """
    precision = "highest" if kernel.dtype == jnp.float32 else None
    one = x.size == x.shape[-1] and kernel.dtype.itemsize == 2
    rows = jnp.concatenate([x, x]) if one else x
    out = jnp.einsum(terms, rows, kernel, precision=precision, preferred_element_type=dtype)
    return out[:1] if one else out


def highest_experts(logits: Array, k: int, *, normalised: bool) -> tuple[Array, Array]:
    """The k experts with the largest of logits f32[n, E], in order, equal ones by number: their weights f32[n, k], and
    which they are, i32[n, k].

    A weight is the expert's share of the softmax, over all experts or, if `normalised`, over these. An expert's place
    is the number of those before it: a GPU counts in one kernel, and `jax.lax.top_k` is a sort of several microseconds.
    """
    (n, E), count = logits.shape, functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)
    own, other = (jax.lax.broadcasted_iota(jnp.int32, (n, E, E), i) for i in (1, 2))
    before = (logits[:, None] > logits[..., None]) | ((logits[:, None] == logits[..., None]) & (other < own))
    place, expert = (jax.lax.broadcasted_iota(jnp.int32, (n, k, E), i) for i in (1, 2))
    chosen = count(jnp.where(count(before)[:, None] == place, expert, 0))
    best = jnp.take_along_axis(logits, chosen, axis=1)
    largest = jax.lax.stop_gradient(best[:, :1])
    shares = jnp.exp(best - largest)
    if normalised:  # a sum by hand, which needs no kernel of its own
        total = functools.reduce(jnp.add, jnp.split(shares, k, axis=1))
    else:
        total = jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True)
    return shares / total, chosen
