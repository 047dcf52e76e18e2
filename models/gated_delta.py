"""Gated delta nets: a linear attention whose state of fixed size forgets and corrects.

A head keeps a matrix S [Dk, Dv] and, for each token with query q, key k, value v, a log decay g
<= 0 and a rate beta in (0, 1), computes

    S <- exp(g) S + k d,  d = beta (v - exp(g) S k),  out = S q

so it replaces what the state held for the key by the value. q and k are normalised to length 1,
and q is scaled by Dk**-0.5.

Three forms of it compute the same. `kvjax.ops.delta_rule` reads prompts by chunks: within one, the
d of all tokens are the solution of a triangular system, and the state is read and written once. A decode
step reads the state without writing it: with S0 the state before the newest tokens, and G the
sum of their g,

    S = exp(G) S0 + sum over j of exp(G - G_j) k_j d_j

so k, d and G of the newest tokens are kept beside S0 (`kvjax.ops.delta_step`) until
`fold` sums them into it.

**Source:** Yang, Kautz, Hatamizadeh, Gated Delta Networks (2025), equation 10 and section 3.3;
Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), for the triangular
system. **Differs:** the decode form with newest tokens beside the state is ours. tokamax has a
kernel of the rule with its convolution for TPUs alone; the two operations here have kernels for
NVIDIA GPUs, and plain JAX for all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.numerics.convolution import causal_conv, take_slots
from kvjax.ops.delta import (
    delta_rule,
    delta_step,
    first_slots,
    last_decay,
    product,
    split_heads,
)
from kvjax.policies.recurrent import Recurrent, RecurrentState
from kvjax.spec import keep_ints

from .activations import ACTIVATIONS


class DeltaInputs(NamedTuple):
    """The inputs of the rule, which a layer computes of its tokens."""

    qkv: Array  # dtype[B, T, C] queries, keys and values of all heads before the convolution
    decay: Array  # f32[B, T, H] log of the factor by which a token shrinks the state, <= 0
    rate: Array  # f32[B, T, H] the share of its correction that a token writes, beta


@register_dataclass
@dataclass(frozen=True)
class DeltaMemory:
    """The state of all tokens but the newest, and these beside it, in slots of their own."""

    state: Array  # f32[B, H, Dk, Dv]
    # dtype[B, W-1+P, C] the last W-1 inputs that are in the state, then the newest
    inputs: Array
    keys: Array  # f32[B, P, Hk, Dk] normalised
    written: Array  # f32[B, P, H, Dv] d of each token
    decay: Array  # f32[B, P, H] sum of g since the state, that of the token included


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Recurrent):
    """The policy of gated delta nets: what a layer of these sizes keeps.

    Its weights are the kernel [W, C] of the convolution; C are the channels of all queries, keys
    and values, in this order. Bytes of a row and layer: the state takes 4 H Dk Dv, the newest
    tokens beside it 4 P (Hk Dk + H Dv + H) and a few inputs.
    """

    key_heads: int  # Hk
    value_heads: int  # H, a multiple of Hk: as many heads in a row share a key
    key_dim: int  # Dk
    value_dim: int  # Dv
    kernel: int = 4  # W, tokens that the short convolution sees
    activation: str = "silu"  # of what it gives

    def __post_init__(self) -> None:
        keep_ints(self, key_heads=1, value_heads=1, key_dim=1, value_dim=1, kernel=1)
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"GatedDelta(key_heads={self.key_heads}, value_heads={self.value_heads}): key_heads must divide "
                "value_heads, because as many heads share a key"
            )

    @property
    def channels(self) -> int:
        """C, the channels of queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty(self, batch: int, dtype: np.dtype) -> DeltaMemory:
        newest, heads, f32 = self.newest, self.value_heads, jnp.float32
        return DeltaMemory(
            state=jnp.zeros((batch, heads, self.key_dim, self.value_dim), f32),
            inputs=jnp.zeros((batch, self.kernel - 1 + newest, self.channels), dtype),
            keys=jnp.zeros((batch, newest, self.key_heads, self.key_dim), f32),
            written=jnp.zeros((batch, newest, heads, self.value_dim), f32),
            decay=jnp.zeros((batch, newest, heads), f32),
        )

    def read(
        self, memory: DeltaMemory, inputs: DeltaInputs, weights: Array, count: Array
    ) -> tuple[Array, DeltaMemory]:
        """Outputs f32[B, T, H, Dv] of a chunk of a prompt, by `delta_rule`."""
        before = memory.inputs[:, : self.kernel - 1]
        joined = jnp.concatenate([before, inputs.qkv.astype(before.dtype)], axis=1)
        q, k, v = self._split(causal_conv(joined, weights, like=inputs.qkv))
        # padding changes nothing: it forgets nothing and writes nothing
        real = (jnp.arange(q.shape[1], dtype=jnp.int32)[None] < count[:, None])[..., None]
        decay = jnp.where(real, inputs.decay, 0)
        rate = jnp.where(real, inputs.rate, 0)
        out, state = delta_rule(
            q, k, v, decay, rate, memory.state, dtype=np.dtype(inputs.qkv.dtype)
        )
        kept = take_slots(joined, count, self.kernel - 1)
        new = DeltaMemory(
            state,
            lax.dynamic_update_slice_in_dim(memory.inputs, kept, 0, axis=1),
            memory.keys,
            memory.written,
            memory.decay,
        )
        return out, new

    def decode(
        self, st: RecurrentState, inputs: DeltaInputs, weights: Array, count: Array
    ) -> tuple[Array, RecurrentState]:
        """Outputs f32[B, T, H, Dv] of decode steps: reads the state, and writes only k, d and G
        of the new tokens, and their number.
        """
        memory = st.memory
        out, *kept, counts = delta_step(
            memory.state,
            memory.inputs,
            memory.keys,
            memory.written,
            memory.decay,
            inputs.qkv,
            inputs.decay,
            inputs.rate,
            weights,
            (st.count, st.length, st.overflow),
            count,
            activation=ACTIVATIONS[self.activation],
        )
        return out, RecurrentState(DeltaMemory(memory.state, *kept), *counts)

    def fold(self, memory: DeltaMemory, count: Array) -> DeltaMemory:
        last = last_decay(memory.decay, count)  # [B, H]
        held = jnp.arange(self.newest, dtype=jnp.int32)[None] < count[:, None]
        left = jnp.where(held[..., None], last[:, None] - memory.decay, -jnp.inf)
        keys = self._by_value_head(first_slots(memory.keys, count), 2)
        written = first_slots(memory.written, count)
        added = product("bphd,bphe->bhde", keys * jnp.exp(left)[..., None], written)
        kept = take_slots(memory.inputs, count, self.kernel - 1)
        return DeltaMemory(
            jnp.exp(last)[..., None, None] * memory.state + added,
            lax.dynamic_update_slice_in_dim(memory.inputs, kept, 0, axis=1),
            memory.keys,
            memory.written,
            memory.decay,
        )

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Queries and keys f32[B, T, Hk, Dk], normalised and scaled, and values f32[B, T, H,
        Dv].
        """
        state = qkv.shape[0], self.value_heads, self.key_dim, self.value_dim
        return split_heads(qkv, self.key_heads, state, ACTIVATIONS[self.activation])

    def _by_value_head(self, x: Array, axis: int) -> Array:
        """x with each key head once for every value head that shares it."""
        return jnp.repeat(x, self.value_heads // self.key_heads, axis=axis)
