"""The gated delta rule: a decode step beside a state of fixed size, and prompts by chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kvjax.numerics.convolution import causal_conv, put_slots, take_slots
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, op

CHUNK = 64  # tokens whose corrections are solved for together
SEGMENT = 32  # chunks that are prepared together, which bounds the memory of a long prompt
_PRECISION = "highest"  # the default on a GPU would round f32 operands to 10 bits


def _delta_step_limit(a: Any) -> str | None:
    if a.activation is not jax.nn.silu:
        return "the kernel delta_step takes the activation silu"
    return kernels.delta_step.unsupported(a.state, a.inputs, a.keys, a.new, a.kernel)


@op(
    kernel=lambda: kernels.delta_step,
    derivative="reference",
    limit=_delta_step_limit,
    mosaic=lambda a: kernels.delta_step.delta_step(
        a.state, a.inputs, a.keys, a.written, a.decays, a.new, a.decay, a.rate, a.kernel, a.counts, a.due
    ),
    static_argnames=("activation",),
)  # fmt: skip
def delta_step(
    state: Array,
    inputs: Array,
    keys: Array,
    written: Array,
    decays: Array,
    new: Array,
    decay: Array,
    rate: Array,
    kernel: Array,
    counts: tuple[Array, Array, Array],
    due: Array,
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
    implementation: Implementation | None = None,
) -> tuple[Array, Array, Array, Array, Array, tuple[Array, Array, Array]]:
    """Decode steps of a gated delta net, which read its state and write beside it.

    With S0 the state before the newest tokens, g the log decays, and G their sum since, a head
    has the state

        S = exp(G) S0 + sum over newest tokens j of exp(G - G_j) k_j d_j

    where d_j = rate (v_j - k_j S before it). The output of a token is q S. q and k are the
    results of the convolution over their length, q also times Dk**-0.5.

    Args:
      state: f32[B, H, Dk, Dv], S0.
      inputs: dtype[B, W-1+P, C] the last W-1 inputs of the convolution that are in the state,
        then those of the newest tokens.
      keys: f32[B, P, Hk, Dk] of the newest tokens.
      written: f32[B, P, H, Dv] their d.
      decays: f32[B, P, H] their G.
      new: dtype[B, T, C] queries, keys and values of the tokens, before the convolution.
      decay: f32[B, T, H] their g, <= 0.
      rate: f32[B, T, H].
      kernel: [W, C] of the convolution.
      counts: of each row, i32[B] newest tokens, in the first slots; i32[B] tokens in all; and
        bool[B] whether one was dropped.
      due: i32[B] of the tokens, which the row takes while it has slots; the outputs of others
        have no meaning.
      activation: of what the convolution gives.

    Returns:
      Outputs f32[B, T, H, Dv], and `inputs`, `keys`, `written`, `decays` and `counts` with the
      tokens; in place if these are donated or the carry of a loop.
    """
    T, P, width = new.shape[1], keys.shape[1], kernel.shape[0] - 1
    held, length, dropped = counts
    count = jnp.minimum(due, P - held)
    joined = put_slots(inputs, new, width + held, count)
    window = take_slots(joined, held, T + width)
    mixed = causal_conv(window, kernel, like=new)
    # A token that is not finite has no part in those before it, for which 0 times NaN would be NaN.
    finite = _finite_up_to(mixed, decay, rate)[..., None]  # [B, T, 1]
    mixed, decay, rate = (jnp.where(finite, x, 0) for x in (mixed, decay, rate))
    q, k, v = split_heads(mixed, keys.shape[2], state.shape, activation)
    total = last_decay(decays, held)[:, None] + jnp.cumsum(decay, axis=1)
    # Slots that no token has may hold anything, and are read as 0.
    all_keys = put_slots(first_slots(keys, held), k, held, count)
    all_decays = put_slots(decays, total, held, count)
    both = jnp.repeat(jnp.concatenate([k, q], axis=1), state.shape[1] // keys.shape[2], axis=2)
    predicted, out = jnp.split(product("bthd,bhde->bthe", both, state), 2, axis=1)

    # the d of each new token: first against the state and the tokens before this call
    slot = jnp.arange(P, dtype=jnp.int32)[None]
    before = (slot < held[:, None])[:, None]  # [B, 1, P]
    alike = _weighted(k, all_keys, total, all_decays, before)
    predicted = jnp.exp(total)[..., None] * predicted
    known_written = first_slots(written, held)
    predicted += product("bhtp,bphe->bthe", alike, known_written)
    mine = rate[..., None] * (v - predicted)
    if T > 1:  # then against each other
        causal = jnp.tril(jnp.ones((T, T), bool), -1)
        alike = _weighted(k, k, total, total, causal[None])
        system = alike * jnp.swapaxes(rate, 1, 2)[..., None]
        mine = jnp.swapaxes(solve_below(system, jnp.swapaxes(mine, 1, 2)), 1, 2)
    all_written = put_slots(known_written, mine, held, count)

    own = held[:, None] + jnp.arange(T, dtype=jnp.int32)[None]  # slot of each new token
    up_to = slot[None] <= own[..., None]
    seen = _weighted(q, all_keys, total, all_decays, up_to)
    out = jnp.exp(total)[..., None] * out
    out += product("bhtp,bphe->bthe", seen, all_written)

    # It stays, as long as the token does.
    out = jnp.where(finite[..., None], out, jnp.nan)
    mine = jnp.where(finite[..., None], mine, jnp.nan)
    counted = held + count, length + count, dropped | (due > count)
    return (
        out,
        joined,
        put_slots(keys, k, held, count),
        put_slots(written, mine, held, count),
        all_decays,
        counted,
    )


@op(
    kernel=lambda: kernels.delta_rule,
    derivative="reference",
    limit=lambda a: kernels.delta_rule.unsupported(a.q, a.v, a.state, a.dtype),
    mosaic=lambda a: kernels.delta_rule.delta_rule(
        a.q, a.k, a.v, a.decay, a.rate, a.state, a.dtype
    ),
    static_argnames=("dtype",),
)
def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    rate: Array,
    state: Array,
    *,
    dtype: DTypeLike = "float32",
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule of T tokens by chunks: outputs f32[B, T, H, Dv], and the state f32[B,
    H, Dk, Dv] after them.

    q and k are f32[B, T, Hk, Dk], v f32[B, T, H, Dv], decay and rate f32[B, T, H]; `state` is
    the one before. A token of decay 0 and rate 0 changes nothing.

    `dtype` is that of the model. In bfloat16 the kernel rounds the operands of its products to
    it, and sums in f32; this form rounds nothing.
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
    alike = product("bnhid,bnhjd->bnhij", k, k) * between * rate
    shrunk = jnp.exp(total)[..., None]
    both = solve_below(alike, jnp.concatenate([rate * v, rate * shrunk * k], axis=-1))
    written, reading = jnp.split(both, [v.shape[-1]], axis=-1)
    seen = product("bnhid,bnhjd->bnhij", q, k) * between
    left = jnp.exp(total[..., -1:] - total)[..., None]  # decay from a token to the chunk's end

    def one(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, reading, seen, q, k, shrink = chunk
        new = written - product("bhcd,bhde->bhce", reading, state)
        out = product("bhcd,bhde->bhce", q, state) + product("bhij,bhje->bhie", seen, new)
        state = shrink[..., None] * state + product("bhcd,bhce->bhde", k, new)
        return state, out

    chunks = written, reading, seen, q * shrunk, k * left, shrunk[..., -1, :]
    state, out = lax.scan(one, state, tuple(jnp.moveaxis(x, 1, 0) for x in chunks))
    return jnp.moveaxis(out, (0, 2), (1, 3)), state


def split_heads(
    mixed: Array, key_heads: int, state: tuple[int, ...], activation: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Queries and keys f32[B, T, Hk, Dk], normalised and scaled, and values f32[B, T, H, Dv], of
    what the convolution gives, `mixed` [B, T, C]; `state` is the shape [B, H, Dk, Dv].
    """
    _, heads, key_dim, value_dim = state
    size = key_heads * key_dim
    activated = activation(mixed.astype(jnp.float32))
    q, k, v = jnp.split(activated, [size, 2 * size], axis=-1)
    # rounded as the layer's activations are
    q, k, v = (x.astype(mixed.dtype).astype(jnp.float32) for x in (q, k, v))
    q = _normalised(q.reshape(*q.shape[:2], key_heads, key_dim)) * key_dim**-0.5
    k = _normalised(k.reshape(*k.shape[:2], key_heads, key_dim))
    return q, k, v.reshape(*v.shape[:2], heads, value_dim)


def first_slots(x: Array, count: Array) -> Array:
    """x [B, P, ...] with 0 in slots past `count` i32[B], which may hold anything."""
    held = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < count[:, None]
    return jnp.where(held.reshape(*held.shape, *(1,) * (x.ndim - 2)), x, 0)


def _finite_up_to(*of_tokens: Array) -> Array:
    """bool[B, T]: whether arrays [B, T, n] are finite for a token and for those before it."""
    bad = [jnp.any(~jnp.isfinite(x), axis=2).astype(jnp.int32) for x in of_tokens]
    return jnp.cumsum(sum(bad), axis=1) == 0


def last_decay(decays: Array, count: Array) -> Array:
    """The entry before slot `count` i32[B] of decays [B, P, H], 0 if that is the first: [B, H]."""
    at = jnp.maximum(count - 1, 0)[:, None, None]
    found = jnp.take_along_axis(decays, at, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, found, 0)


def solve_below(alike: Array, right: Array) -> Array:
    """x of (I + A) x = `right`, where A is what `alike` [..., C, C] holds below its diagonal.

    By substitution: a product of powers of A takes less time on a GPU, and loses all digits where
    keys are alike.
    """
    return lax.linalg.triangular_solve(
        alike, right, left_side=True, lower=True, unit_diagonal=True
    )


def product(terms: str, x: Array, y: Array) -> Array:
    """`einsum` of f32 without rounding its operands."""
    return jnp.einsum(terms, x, y, precision=_PRECISION)


def _weighted(x: Array, keys: Array, total: Array, decays: Array, mask: Array) -> Array:
    """Products of x [B, T, Hk, Dk] and keys [B, P, Hk, Dk], times the decay from each key to
    each x, 0 where `mask` bool[B, T, P] is false: f32[B, H, T, P].
    """
    shared = total.shape[2] // keys.shape[2]
    products = jnp.repeat(product("btkd,bpkd->bktp", x, keys), shared, axis=1)
    gone = jnp.swapaxes(total, 1, 2)[..., None] - jnp.swapaxes(decays, 1, 2)[:, :, None]
    return products * jnp.exp(jnp.where(mask[:, None], gone, -jnp.inf))


def _normalised(x: Array) -> Array:
    """x over its length, along the last axis."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
