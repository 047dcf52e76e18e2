"""Linear maps, norms, and parameters that name their axes: the parts of all modules of the
decoder.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from .config import DecoderConfig


class Linear(nnx.Module):
    """x [..., in] times a kernel, plus a bias if it has one. `axes` are the names of in and
    out.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        axes: tuple[str, str],
        bias: bool,
        scale: float,
        rngs: nnx.Rngs,
        dtype: np.dtype,
    ):
        self.kernel = named_param(
            normal(rngs, (size_in, size_out), scale, dtype), axes
        )  # [in, out]
        self.bias = named_param(jnp.zeros(size_out, dtype), axes[1:]) if bias else None  # [out]

    def __call__(self, x: Array) -> Array:
        y = product("...i,io->...o", x, self.kernel[...])
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class RMSNorm(nnx.Module):
    """x over the root of its mean square, times a scale per channel; computed in f32."""

    def __init__(
        self,
        size: int,
        *,
        axis: str = "embed",
        eps: float,
        dtype: np.dtype,
        offset: bool = False,
    ):
        self.scale = named_param(
            jnp.zeros(size, dtype) if offset else jnp.ones(size, dtype), (axis,)
        )
        self.eps = eps
        self.offset = offset  # the factor is 1 + scale

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(
            jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps
        )
        scale = jnp.broadcast_to(self.scale[...].astype(jnp.float32), x.shape)
        scale = 1 + scale if self.offset else scale
        return (normed * scale).astype(x.dtype)


def param_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of parameters, or an error that names those that are supported."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in ("bfloat16", "float16", "float32"):
        shown = found.name if found is not None else repr(dtype)
        raise ValueError(
            f"a model cannot have dtype {shown}; use one of bfloat16, float16, float32"
        )
    return found


def norm_settings(config: DecoderConfig, dtype: np.dtype) -> dict[str, Any]:
    return {"eps": config.norm_eps, "dtype": dtype, "offset": config.norm_offset}


def named_param(value: Array, axes: tuple[str, ...]) -> nnx.Param:
    """A parameter with the logical names of its axes, where `nnx.get_partition_spec` and kvjax
    look for them.
    """
    param = nnx.Param(value)
    param.set_metadata(out_sharding=axes)  # not by the constructor, which would require a mesh
    return param


class ShapesOnly(nnx.Rngs):
    """Random numbers of a model of which only the shapes count: `normal` draws none."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: np.dtype) -> Array:
    if isinstance(rngs, ShapesOnly):
        return jnp.zeros(shape, dtype)
    return _draw(rngs.params(), scale, shape=shape, dtype=dtype)


@partial(
    jax.jit, static_argnames=("shape", "dtype")
)  # traced once for a shape, not for each parameter
def _draw(key: Array, scale: float, *, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def product(terms: str, x: Array, kernel: Array, dtype: Any = None) -> Array:
    """einsum of x and a kernel; the default on a GPU would round f32 operands to 10 bits.

    One row and a 16-bit kernel, as in decoding, are given to XLA as two rows: for one row with
    few outputs (k and v of a Llama) it writes the elementwise products in 16 bits to memory,
    and then sums them.
    """
    precision = "highest" if kernel.dtype == jnp.float32 else None
    one = x.size == x.shape[-1] and kernel.dtype.itemsize == 2
    rows = jnp.concatenate([x, x]) if one else x
    out = jnp.einsum(terms, rows, kernel, precision=precision, preferred_element_type=dtype)
    return out[:1] if one else out
