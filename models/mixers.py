"""Layers that keep a state of fixed size where others have attention: gated delta nets and short
convolutions.

A layer computes the inputs of its recurrence from its tokens; `kvjax.recurrence.advance` and the
policy of its cache do the rest.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from kvjax.cache.cache import LayerCache
from kvjax.policies.recurrent import Recurrent
from kvjax.recurrence import advance

from .config import DecoderConfig
from .gated_delta import DeltaInputs, GatedDelta
from .linear import Linear, named_param, normal
from .short_conv import ShortConv


class GatedNorm(nnx.Module):
    """RMSNorm of each head, times a scale per channel and silu of a gate; computed in f32."""

    def __init__(self, size: int, *, eps: float, dtype: np.dtype):
        self.scale = named_param(jnp.ones(size, dtype), ("head_dim",))
        self.eps = eps

    def __call__(self, x: Array, gate: Array) -> Array:
        square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed = (x * jax.lax.rsqrt(square + self.eps)).astype(gate.dtype)
        scaled = normed * jnp.broadcast_to(self.scale[...], x.shape)
        return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


class GatedDeltaNet(nnx.Module):
    """A gated delta net: see `kvjax.models.gated_delta`."""

    def __init__(
        self, config: DecoderConfig, sizes: GatedDelta, *, rngs: nnx.Rngs, dtype: np.dtype
    ):
        hidden = config.hidden_size
        keys = sizes.key_heads * sizes.key_dim
        values = sizes.value_heads * sizes.value_dim
        common: dict[str, Any] = {
            "bias": False,
            "scale": config.initializer_range,
            "rngs": rngs,
            "dtype": dtype,
        }

        def linear(size: int) -> Linear:
            return Linear(hidden, size, axes=("embed", "state"), **common)

        self.q = linear(keys)
        self.k = linear(keys)
        self.v = linear(values)
        self.gate = linear(values)
        self.rate = linear(sizes.value_heads)
        self.decay = linear(sizes.value_heads)
        kernel = normal(rngs, (sizes.channels, 1, sizes.kernel), sizes.kernel**-0.5, dtype)
        self.conv = named_param(kernel, ("state", "one", "one"))  # [C, 1, W]
        # In f32 whatever the model's dtype: an exponential makes them the decay.
        heads = jnp.ones(sizes.value_heads, jnp.float32)
        self.log_speed = named_param(heads * jnp.log(4.0), ("state",))
        self.decay_bias = named_param(heads, ("state",))
        self.norm = GatedNorm(sizes.value_dim, eps=config.norm_eps, dtype=dtype)
        self.out = Linear(values, hidden, axes=("state", "embed"), **common)
        self.sizes = sizes

    def __call__(
        self,
        x: Array,
        cache: LayerCache | None,
        *,
        lengths: ArrayLike | None = None,
        active: ArrayLike | None = None,
        steps: bool = False,
    ) -> tuple[Array, LayerCache | None]:
        decay = self.decay(x).astype(jnp.float32)
        bias = jnp.broadcast_to(self.decay_bias[...].astype(jnp.float32), decay.shape)
        speed = jnp.exp(self.log_speed[...].astype(jnp.float32))
        inputs = DeltaInputs(
            qkv=jnp.concatenate([self.q(x), self.k(x), self.v(x)], axis=-1),
            decay=-jnp.broadcast_to(speed, decay.shape) * jax.nn.softplus(decay + bias),
            rate=jax.nn.sigmoid(self.rate(x)).astype(jnp.float32),
        )
        kernel = self.conv[...][:, 0].T  # [W, C]
        if cache is None:
            mixed = _alone(self.sizes, inputs, kernel)
        else:
            mixed, cache = advance(
                cache, inputs, kernel, lengths=lengths, active=active, steps=steps
            )
        gate = self.gate(x).reshape(*mixed.shape)
        return self.out(self.norm(mixed, gate).reshape(*x.shape[:2], -1)), cache


class ShortConvolution(nnx.Module):
    """A short causal convolution between two gates, as in LFM2: out(b * conv(a * c)) of x's
    projections a, b and c.
    """

    def __init__(
        self, config: DecoderConfig, sizes: ShortConv, *, rngs: nnx.Rngs, dtype: np.dtype
    ):
        hidden = config.hidden_size
        bias = config.mixer_bias
        common: dict[str, Any] = {
            "bias": bias,
            "scale": config.initializer_range,
            "rngs": rngs,
            "dtype": dtype,
        }

        def linear() -> Linear:
            return Linear(hidden, hidden, axes=("embed", "state"), **common)

        self.gate_in = linear()
        self.gate_out = linear()
        self.inner = linear()
        kernel = normal(rngs, (hidden, 1, sizes.kernel), sizes.kernel**-0.5, dtype)
        self.conv = named_param(kernel, ("state", "one", "one"))  # [C, 1, W]
        self.conv_bias = named_param(jnp.zeros(hidden, dtype), ("state",)) if bias else None
        self.out = Linear(hidden, hidden, axes=("state", "embed"), **common)
        self.sizes = sizes

    def __call__(
        self,
        x: Array,
        cache: LayerCache | None,
        *,
        lengths: ArrayLike | None = None,
        active: ArrayLike | None = None,
        steps: bool = False,
    ) -> tuple[Array, LayerCache | None]:
        inputs = self.gate_in(x) * self.inner(x)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        weights = self.conv[...][:, 0].T, bias
        if cache is None:
            mixed = _alone(self.sizes, inputs, weights)
        else:
            mixed, cache = advance(
                cache, inputs, weights, lengths=lengths, active=active, steps=steps
            )
        return self.out(self.gate_out(x) * mixed), cache


Mixer: TypeAlias = GatedDeltaNet | ShortConvolution


def make_mixer(config: DecoderConfig, *, rngs: nnx.Rngs, dtype: np.dtype) -> Mixer:
    """A layer of the kind of `config.mixer`."""
    if isinstance(config.mixer, GatedDelta):
        return GatedDeltaNet(config, config.mixer, rngs=rngs, dtype=dtype)
    assert isinstance(config.mixer, ShortConv)
    return ShortConvolution(config, config.mixer, rngs=rngs, dtype=dtype)


def _alone(policy: Recurrent, inputs: Any, weights: Any) -> Array:
    """The outputs of a text of its own, without a cache."""
    first = jax.tree.leaves(inputs)[0]
    size, tokens = first.shape[:2]
    empty = policy.empty(size, first.dtype)
    return policy.read(empty, inputs, weights, jnp.full(size, tokens, jnp.int32))[0]
