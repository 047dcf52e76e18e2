"""Gated delta nets: a linear attention whose state of fixed size forgets and corrects.

A head keeps a matrix S [Dk, Dv] and, for each token with query q, key k, value v, a log decay g
<= 0 and a rate beta in (0, 1), computes

    S <- exp(g) S + k d,  d = beta (v - exp(g) S k),  out = S q

so it replaces what the state held for the key by the value. q and k are normalised to length 1,
and q is scaled by Dk**-0.5.

Three forms of it compute the same. `delta_rule` reads prompts by chunks: within one, the d of all
tokens are the solution of a triangular system, and the state is read and written once. A decode
step reads the state without writing it: with S0 the state before the newest tokens, and G the
sum of their g,

    S = exp(G) S0 + sum over j of exp(G - G_j) k_j d_j

so k, d and G of the newest tokens are kept beside S0 (`GatedDelta.step`) until `fold` sums them
into it.

**Source:** Yang, Kautz, Hatamizadeh, Gated Delta Networks (2025), equation 10 and section 3.3;
Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), for the triangular
system. **Differs:** the decode form with newest tokens beside the state is ours. tokamax has a
kernel of the rule with its convolution; here it is plain JAX, so that nothing but jax is needed
and all platforms run the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.policies.recurrent import Recurrent
from kvjax.spec import keep_ints

from .activations import ACTIVATIONS
from .short_conv import causal_conv, put_slots, take_slots

CHUNK = 64  # tokens whose corrections are solved for together
SEGMENT = 32  # chunks that are prepared together, which bounds the memory of a long prompt
_PRECISION = "highest"  # the default on a GPU would round f32 operands to 10 bits


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
        out, state = delta_rule(q, k, v, decay, rate, memory.state)
        kept = take_slots(joined, count, self.kernel - 1)
        new = DeltaMemory(
            state,
            lax.dynamic_update_slice_in_dim(memory.inputs, kept, 0, axis=1),
            memory.keys,
            memory.written,
            memory.decay,
        )
        return out, new

    def step(
        self,
        memory: DeltaMemory,
        inputs: DeltaInputs,
        weights: Array,
        held: Array,
        count: Array,
    ) -> tuple[Array, DeltaMemory]:
        """Outputs f32[B, T, H, Dv] of decode steps: reads the state, and writes only k, d and G
        of the new tokens.
        """
        T = inputs.qkv.shape[1]
        joined = put_slots(memory.inputs, inputs.qkv, self.kernel - 1 + held, count)
        window = take_slots(joined, held, T + self.kernel - 1)
        q, k, v = self._split(causal_conv(window, weights, like=inputs.qkv))
        total = _last(memory.decay, held)[:, None] + jnp.cumsum(inputs.decay, axis=1)
        keys = put_slots(memory.keys, k, held, count)
        decay = put_slots(memory.decay, total, held, count)
        from_state = self._read_state(memory.state, jnp.concatenate([k, q], axis=1))
        predicted, out = jnp.split(from_state, 2, axis=1)

        # the d of each new token: first against the state and the tokens before this call
        slot = jnp.arange(self.newest, dtype=jnp.int32)[None]
        before = (slot < held[:, None])[:, None]  # [B, 1, P]
        alike = self._weighted(k, keys, total, decay, before)
        predicted = jnp.exp(total)[..., None] * predicted
        predicted += _product("bhtp,bphe->bthe", alike, memory.written)
        written = inputs.rate[..., None] * (v - predicted)
        if T > 1:  # then against each other
            causal = jnp.tril(jnp.ones((T, T), bool), -1)
            alike = self._weighted(k, k, total, total, causal[None])
            system = alike * jnp.swapaxes(inputs.rate, 1, 2)[..., None]
            written = jnp.swapaxes(_solve(system, jnp.swapaxes(written, 1, 2)), 1, 2)
        written = put_slots(memory.written, written, held, count)

        own = held[:, None] + jnp.arange(T, dtype=jnp.int32)[None]  # slot of each new token
        up_to = slot[None] <= own[..., None]
        seen = self._weighted(q, keys, total, decay, up_to)
        out = jnp.exp(total)[..., None] * out
        out += _product("bhtp,bphe->bthe", seen, written)
        return out, DeltaMemory(memory.state, joined, keys, written, decay)

    def fold(self, memory: DeltaMemory, count: Array) -> DeltaMemory:
        last = _last(memory.decay, count)  # [B, H]
        held = jnp.arange(self.newest, dtype=jnp.int32)[None] < count[:, None]
        left = jnp.where(held[..., None], last[:, None] - memory.decay, -jnp.inf)
        keys = self._by_value_head(memory.keys, 2)
        added = _product("bphd,bphe->bhde", keys * jnp.exp(left)[..., None], memory.written)
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
        size = self.key_heads * self.key_dim
        activated = ACTIVATIONS[self.activation](qkv.astype(jnp.float32))
        q, k, v = jnp.split(activated, [size, 2 * size], axis=-1)
        # rounded as the layer's activations are
        q, k, v = (x.astype(qkv.dtype).astype(jnp.float32) for x in (q, k, v))
        q = _normalised(q.reshape(*q.shape[:2], self.key_heads, -1)) * self.key_dim**-0.5
        k = _normalised(k.reshape(*k.shape[:2], self.key_heads, -1))
        return q, k, v.reshape(*v.shape[:2], self.value_heads, -1)

    def _by_value_head(self, x: Array, axis: int) -> Array:
        """x with each key head once for every value head that shares it."""
        return jnp.repeat(x, self.value_heads // self.key_heads, axis=axis)

    def _read_state(self, state: Array, x: Array) -> Array:
        """x [B, T, Hk, Dk] times the states of the heads: [B, T, H, Dv]."""
        return _product("bthd,bhde->bthe", self._by_value_head(x, 2), state)

    def _weighted(
        self, x: Array, keys: Array, total: Array, decay: Array, mask: Array
    ) -> Array:
        """Products of x [B, T, Hk, Dk] and keys [B, P, Hk, Dk], times the decay from each key to
        each x, 0 where `mask` bool[B, T, P] is false: f32[B, H, T, P].
        """
        products = self._by_value_head(_product("btkd,bpkd->bktp", x, keys), 1)
        gone = jnp.swapaxes(total, 1, 2)[..., None] - jnp.swapaxes(decay, 1, 2)[:, :, None]
        return products * jnp.exp(jnp.where(mask[:, None], gone, -jnp.inf))


def delta_rule(
    q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule of T tokens by chunks: outputs f32[B, T, H, Dv], and the state f32[B,
    H, Dk, Dv] after them.

    q and k are f32[B, T, Hk, Dk], v f32[B, T, H, Dv], decay and rate f32[B, T, H]; `state` is
    the one before. A token of decay 0 and rate 0 changes nothing.
    """
    T = q.shape[1]
    chunk = min(CHUNK, max(T, 1))
    segment = chunk * min(SEGMENT, -(-T // chunk))
    count = -(-T // segment)

    def in_segments(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * segment - T), *((0, 0),) * (x.ndim - 2)))
        split = padded.reshape(x.shape[0], count, segment // chunk, chunk, *x.shape[2:])
        return jnp.moveaxis(split, 1, 0)  # [segments, B, chunks, C, ...]

    def one(state: Array, tokens: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, rate = tokens
        out, state = _segment(q, k, v, decay, rate, state)
        return state, out

    state, out = lax.scan(one, state, tuple(map(in_segments, (q, k, v, decay, rate))))
    out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], count * segment, *out.shape[-2:])
    return out[:, :T], state


def _segment(
    q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """`delta_rule` of tokens [B, n, C, ...] in n chunks: [B, n, C, H, Dv], and the state."""
    C, heads = q.shape[2], v.shape[3]
    q, k = (jnp.repeat(x, heads // x.shape[3], axis=3) for x in (q, k))
    q, k, v = (jnp.moveaxis(x, 3, 2) for x in (q, k, v))  # [B, n, H, C, D]
    rate = jnp.moveaxis(rate, 3, 2)[..., None]  # [B, n, H, C, 1]
    total = jnp.cumsum(jnp.moveaxis(decay, 3, 2), axis=-1)  # [B, n, H, C]
    causal = jnp.tril(jnp.ones((C, C), bool))
    gone = total[..., None] - total[..., None, :]
    between = jnp.exp(
        jnp.where(causal[None, None, None], gone, -jnp.inf)
    )  # decay from a token to a later one

    # The d of each token is linear in the state S before the chunk: written - reading @ S.
    alike = _product("bnhid,bnhjd->bnhij", k, k) * between * rate
    shrunk = jnp.exp(total)[..., None]
    both = _solve(alike, jnp.concatenate([rate * v, rate * shrunk * k], axis=-1))
    written, reading = jnp.split(both, [v.shape[-1]], axis=-1)
    seen = _product("bnhid,bnhjd->bnhij", q, k) * between
    left = jnp.exp(total[..., -1:] - total)[..., None]  # decay from a token to the chunk's end

    def one(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, reading, seen, q, k, shrink = chunk
        new = written - _product("bhcd,bhde->bhce", reading, state)
        out = _product("bhcd,bhde->bhce", q, state) + _product("bhij,bhje->bhie", seen, new)
        state = shrink[..., None] * state + _product("bhcd,bhce->bhde", k, new)
        return state, out

    chunks = written, reading, seen, q * shrunk, k * left, shrunk[..., -1, :]
    state, out = lax.scan(one, state, tuple(jnp.moveaxis(x, 1, 0) for x in chunks))
    return jnp.moveaxis(out, (0, 2), (1, 3)), state


def _solve(alike: Array, right: Array) -> Array:
    """x of (I + A) x = `right`, where A is what `alike` [..., C, C] holds below its diagonal.

    By substitution: a product of powers of A takes less time on a GPU, and loses all digits where
    keys are alike.
    """
    return lax.linalg.triangular_solve(
        alike, right, left_side=True, lower=True, unit_diagonal=True
    )


def _normalised(x: Array) -> Array:
    """x over its length, along the last axis."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _last(decay: Array, count: Array) -> Array:
    """The entry before slot `count` i32[B] of decay [B, P, H], 0 if that is the first: [B, H]."""
    at = jnp.maximum(count - 1, 0)[:, None, None]
    found = jnp.take_along_axis(decay, at, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, found, 0)


def _product(terms: str, x: Array, y: Array) -> Array:
    return jnp.einsum(terms, x, y, precision=_PRECISION)
