"""Time that a GPU spends in the kernels of calls of jax, and references in plain jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from layers import clock

from .cases import Case, Timed


def timed(
    case: Case,
    attend: Callable[[Array, Any], Any],
    q: Array,
    layers: Sequence[Any],
    *,
    calls: int | None = None,
) -> Timed:
    """Times attend(q, layer) in all layers of a call, each waiting for the one before."""

    def run(layers: Sequence[Any], q: Array) -> tuple[Any, Any]:
        outs = []
        for layer in layers:
            out = attend(q, layer)
            q, out = lax.optimization_barrier((q, out))
            outs.append(out)
        return outs, layers

    took, _ = clock(jax.jit(run, donate_argnums=0), layers, q, calls=calls or case.calls)
    count = len(layers)
    return Timed(
        took.us / count,
        {name: us / count for name, us in list(took.parts.items())[:12]},
        None if took.kernels is None else took.kernels / count,
    )


@jax.jit
def attention(q: Array, k: Array, v: Array) -> Array:
    """Attention of q [N, D] of one row to k, v [S, K, D], in float32: [N, D]."""
    N, D = q.shape
    K = k.shape[1]
    grouped = q.astype(jnp.float32).reshape(K, N // K, D)
    logits = jnp.einsum("kgd,skd->kgs", grouped, k.astype(jnp.float32), precision="highest")
    weights = jax.nn.softmax(logits * D**-0.5, axis=-1)
    out = jnp.einsum("kgs,skd->kgd", weights, v.astype(jnp.float32), precision="highest")
    return out.reshape(N, D)


def distance(got: Array, want: Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Array:
    """Normal random numbers, made in one program, so that no float32 copy stays."""
    return _normal(jax.random.key(seed), shape, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(key, shape, dtype)
