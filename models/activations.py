"""The functions that `hidden_act` of a config can name, with the names of transformers' ACT2FN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_10": lambda x: jnp.clip(_gelu(x), -10, 10),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "hardswish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}
