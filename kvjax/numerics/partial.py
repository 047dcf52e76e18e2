"""Attention over a part of the keys, and the merge that makes parts a whole.

If a part of the keys gives its mean of values weighted by softmax, `out`, and the natural log
of its sum of exponentials, `lse`, then two parts combine to the pair of their union. The merge
is associative and commutative, and its identity is the empty part (`out` 0, `lse` -inf). Sink,
history, recent window, prefill chunks and shards of a long context therefore combine without
knowing each other; all caches of kvjax are written in this algebra.

**Source:** Milakov and Gimelshein 2018 (online softmax); the pair as an interface follows
FlashInfer (Ye et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.memory import vary_with
from kvjax.numerics.derivatives import with_derivative
from kvjax.numerics.types import Bool, Float, Int32, Shaped


@dataclass(frozen=True)
class Logits:
    """How the logits of attention are made of products q.k: by a factor, and by a soft cap that
    may follow it, as in Gemma 2.

    It is static: a part of the program, such as a shape. It is no number, so that code which
    knows of no cap cannot lose one by arithmetic.

    >>> Logits(0.5).of(jnp.array([3.0]))
    Array([1.5], dtype=float32)
    >>> Logits(0.5, cap=2.0).of(jnp.array([3.0, 300.0]))
    Array([1.270298, 2.      ], dtype=float32)
    """

    scale: float
    cap: float | None = None

    def of(self, products: Array) -> Array:
        """Returns scale * products, or cap * tanh(scale * products / cap)."""
        if self.cap is None:
            return products * self.scale
        return self.cap * jnp.tanh(products * (self.scale / self.cap))

    def of_means(self, sums: Array, count: int) -> Array:
        """Returns the logits of means, given sums of `count` products each."""
        return replace(self, scale=self.scale / count).of(sums)

    @property
    def uncapped(self) -> float:
        """The scale, for code that cannot apply a cap. Raises NotImplementedError if there is
        one.
        """
        if self.cap is not None:
            raise NotImplementedError(
                f"this code takes no soft cap of the logits, got {self.cap}; use another one"
            )
        return self.scale


class PartialAttention(NamedTuple):
    """Attention over a part of the keys, with the log-sum-exp by which parts merge.

    Q is G in decoding and G*T in prefill.
    """

    # Mean of values weighted by softmax; 0 where the part is empty.
    out: Float[Array, "B K Q D"]
    # Natural log of the sum of exp(logits); -inf where the part is empty.
    lse: Float[Array, "B K Q"]


class Span(NamedTuple):
    """A zone of a cache in which the slots [start, stop) are attended to. Values of other slots
    are finite.

    Each of T decode steps may have its own span, with stop i32[B, T] and start i32[B, T] or
    i32[B, 1].
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    start: Int32[Array, " B *#T"]
    stop: Int32[Array, " B *T"]

    @property
    def size(self) -> Int32[Array, " B *T"]:
        """Tokens attended to."""
        return jnp.maximum(self.stop - self.start, 0)

    def mask(self, queries: int) -> Bool[Array, "B 1 _ S"]:
        """Which slots each query attends to, each step's after the previous step's; one row if
        all share a span.
        """
        slot = jnp.arange(self.k.shape[2], dtype=jnp.int32).reshape(
            (1,) * self.stop.ndim + (-1,)
        )
        mask = (slot >= self.start[..., None]) & (slot < self.stop[..., None])
        if mask.ndim == 2:
            return mask[:, None, None]
        return jnp.repeat(mask, queries // mask.shape[1], axis=1)[:, None]


def empty_part(shape: tuple[int, ...]) -> PartialAttention:
    """Returns the identity of `merge`. `shape` is that of `out`."""
    return PartialAttention(
        jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
    )


def attend_part(
    q: Float[Array, "B K Q D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S _"],
    mask: Bool[Array, "#B #K #Q #S"],
    *,
    logits: Logits,
    bias: Float[Array, "B K Q S"] | None = None,
) -> PartialAttention:
    """Attention of q [B, K, Q, D] over k, v [B, K, S, D] where `mask`, broadcastable to bool[B,
    K, Q, S], is true.

    Keys where the mask is false may hold anything. Values there must be finite (0 times NaN is
    NaN): zero them with `keep_valid` where that is not certain. Logits, to which `bias` is
    added, sums and the output are f32; the products read q, k and v in their own dtype.
    """
    scores = attention_logits(q, k, logits)
    weights, total, lse = exp_weights(scores if bias is None else scores + bias, mask)
    mixed = jnp.einsum(
        "bkqs,bksd->bkqd",
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    return PartialAttention(mixed / total[..., None], lse)


def softmax_weights(
    q: Float[Array, "B K Q D"],
    k: Float[Array, "B K S D"],
    mask: Bool[Array, "#B #K #Q #S"],
    *,
    logits: Logits,
    lse: Float[Array, "B K Q"] | None = None,
    sinks: Float[Array, "K Q"] | None = None,
) -> Float[Array, "B K Q S"]:
    """Weights with which `attend_part` mixes values; 0 where `mask` is false, and in an empty
    part: f32[B, K, Q, S].

    `lse` f32[B, K, Q], if known, is that of all keys that a query attends to, which may be more
    than these. `sinks` are logits that take a share of the weights, and are not in `lse`. If
    the program also has an `attend_part` of the same arguments, XLA computes the logits once.

    Policies call `Step.weights`, which knows how the model makes its logits.
    """
    return weights_of(attention_logits(q, k, logits), mask, lse=lse, sinks=sinks)


def weights_of(
    scores: Float[Array, "B K Q S"],
    mask: Bool[Array, "#B #K #Q #S"],
    *,
    lse: Float[Array, "B K Q"] | None = None,
    sinks: Float[Array, "K Q"] | None = None,
) -> Float[Array, "B K Q S"]:
    """Returns f32[B, K, Q, S]: `softmax_weights` of keys whose logits are `scores`."""
    if sinks is not None:
        of_keys = exp_weights(scores, mask)[2] if lse is None else lse
        lse = jnp.logaddexp(of_keys, sinks.astype(jnp.float32)[None])
    if lse is not None:
        shift = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return jnp.where(mask, jnp.exp(scores - shift[..., None]), 0.0)
    scores = jnp.where(mask, scores, -jnp.inf)
    empty = ~jnp.any(mask, axis=-1, keepdims=True)
    return jnp.where(empty, 0.0, jax.nn.softmax(jnp.where(empty, 0.0, scores), axis=-1))


def attention_logits(
    q: Float[Array, "B K Q D"], k: Float[Array, "B K S D"], logits: Logits
) -> Float[Array, "B K Q S"]:
    """Returns f32[B, K, Q, S]: the logits of q [B, K, Q, D] with k [B, K, S, D], which are
    multiplied in the dtype of k.
    """
    q = q.astype(k.dtype)
    products = jnp.einsum(
        "bkqd,bksd->bkqs", q, k, preferred_element_type=jnp.float32, precision="highest"
    )
    return logits.of(products)


def exp_weights(
    logits: Float[Array, "B K Q S"], mask: Bool[Array, "#B #K #Q #S"]
) -> tuple[Float[Array, "B K Q S"], Float[Array, "B K Q"], Float[Array, "B K Q"]]:
    """Weights that are 0 where `mask` is false, the divisor of their sum with values, and `lse`
    of logits.
    """
    logits = jnp.where(mask, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, initial=-jnp.inf)
    # An empty part has top = -inf; subtracting 0 instead gives exp(-inf - 0) = 0 and no NaN.
    # The result does not depend on the shift, so it needs no derivative. The derivative of max
    # is NaN if XLA computes its operand twice, with different rounding.
    shift = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    return weights, jnp.maximum(total, jnp.finfo(jnp.float32).tiny), jnp.log(total) + shift


def attend_causal(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T _"],
    *,
    logits: Logits,
    window: int | None = None,
    block: int = 512,
) -> PartialAttention:
    """Causal attention of q [B, K, G, T, D] over its own k, v [B, K, T, D]; PartialAttention
    over Q = G*T.

    Holds logits of block x T. `window` lets a token see itself and the window - 1 before it.
    Right-padded tokens lie after every real one, so no real token sees them; their own rows
    hold anything finite.
    """
    B, K, G, T, D = q.shape
    outs = []
    lses = []
    for first in range(0, T, block):
        # The queries of tokens [first, stop) see keys of tokens [low, stop) at most.
        stop = min(first + block, T)
        low = 0 if window is None else max(0, first - window + 1)
        token = jnp.arange(first, stop, dtype=jnp.int32)[:, None]
        slot = jnp.arange(low, stop, dtype=jnp.int32)[None]
        mask = slot <= token
        if window is not None:
            mask &= slot > token - window
        part = attend_part(
            q[:, :, :, first:stop].reshape(B, K, G * (stop - first), D),
            k[:, :, low:stop],
            v[:, :, low:stop],
            jnp.tile(mask, (G, 1))[None, None],
            logits=logits,
        )
        outs.append(part.out.reshape(B, K, G, stop - first, -1))
        lses.append(part.lse.reshape(B, K, G, stop - first))
    out = jnp.concatenate(outs, axis=3)
    lse = jnp.concatenate(lses, axis=3)
    return PartialAttention(out.reshape(B, K, G * T, -1), lse.reshape(B, K, G * T))


def attend_causal_in_turns(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T _"],
    *,
    logits: Logits,
    window: int | None = None,
    block: int = 1024,
) -> PartialAttention:
    """`attend_causal` by loops over blocks of queries and of keys, without a derivative.

    `attend_causal` traces each block of queries by itself, since each sees another number of
    keys: a second of Python for 32768 tokens. Here one trace holds for all of them. Holds
    logits of block x block.
    """
    B, K, G, T, D = q.shape
    blocks = -(-T // block)
    # Tokens that fill the last block come after every real one, so none of these sees them.
    rest = blocks * block - T
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, rest), (0, 0)))
    k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, rest), (0, 0))) for a in (k, v))
    places = jnp.arange(block, dtype=jnp.int32)
    empty = vary_with(empty_part((B, K, G * block, v.shape[-1])), q, k, v)

    def of_queries(i: Array) -> PartialAttention:
        queries = lax.dynamic_slice_in_dim(q, i * block, block, axis=3)
        queries = queries.reshape(B, K, G * block, D)
        token = (i * block + places)[:, None]

        def with_keys(j: Array, done: PartialAttention) -> PartialAttention:
            keys, values = (
                lax.dynamic_slice_in_dim(a, j * block, block, axis=2) for a in (k, v)
            )
            slot = (j * block + places)[None]
            mask = slot <= token
            if window is not None:
                mask &= slot > token - window
            seen = jnp.tile(mask, (G, 1))[None, None]
            return merge(done, attend_part(queries, keys, values, seen, logits=logits))

        oldest = i * 0 if window is None else jnp.maximum(i * block - (window - 1), 0)
        return lax.fori_loop(oldest // block, i + 1, with_keys, empty)

    found = lax.map(of_queries, jnp.arange(blocks, dtype=jnp.int32))

    def in_order(a: Array) -> Array:
        """[blocks, B, K, G * block, ...] as [B, K, G * T, ...]."""
        tail = a.shape[4:]
        a = jnp.moveaxis(a.reshape(blocks, B, K, G, block, *tail), 0, 3)
        a = a.reshape(B, K, G, blocks * block, *tail)[:, :, :, :T]
        return a.reshape(B, K, G * T, *tail)

    return PartialAttention(in_order(found.out), in_order(found.lse))


def keep_valid(
    values: Shaped[Array, "*rows D"], valid: Bool[Array, "*#rows"]
) -> Shaped[Array, "*rows D"]:
    """values [..., S, D] with 0 where `valid` [..., S] is false, so that no NaN of an unused
    slot spreads.
    """
    return jnp.where(valid[..., None], values, jnp.zeros((), values.dtype))


def merge(*parts: PartialAttention) -> PartialAttention:
    """Returns the attention over the union of disjoint parts, any of which may be empty.

    >>> a = PartialAttention(jnp.array([2.0]), jnp.array(0.0)); b = PartialAttention(jnp.array([4.0]), jnp.array(0.0))
    >>> merge(a, b).out
    Array([3.], dtype=float32)
    """
    if not parts:
        raise ValueError("merge got no parts; give at least one PartialAttention")
    a, *others = parts
    for b in others:
        top = jnp.maximum(a.lse, b.lse)
        shift = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
        wa = jnp.exp(a.lse - shift)
        wb = jnp.exp(b.lse - shift)
        total = wa + wb
        floor = jnp.finfo(jnp.float32).tiny
        share = (wb / jnp.maximum(total, floor))[..., None]
        out = jnp.where(
            share == 0, a.out, jnp.where(share == 1, b.out, a.out + share * (b.out - a.out))
        )
        a = PartialAttention(out, jnp.log(total) + shift)
    return a


def merge_sinks(part: PartialAttention, sinks: Float[Array, "K G"] | None) -> PartialAttention:
    """`part` over Q = T*G queries, each step's heads after the previous step's, merged with
    sink logits, if any.

    A sink logit s is a key without a value: e^s more in the denominator. It is neither scaled
    nor capped.
    """
    if sinks is None:
        return part
    lse = jnp.tile(sinks.astype(jnp.float32), (1, part.lse.shape[2] // sinks.shape[-1]))
    return merge(
        part, PartialAttention(jnp.zeros_like(part.out), jnp.broadcast_to(lse, part.lse.shape))
    )


def merge_blocks(
    one: Callable[..., PartialAttention],
    *operands: Any,
    bounds: Callable[..., tuple[Array | int, Array]],
    blocks: int,
    shape: tuple[int, ...],
) -> PartialAttention:
    """Returns the merge of one(i, *operands) for the blocks i from first to stop - 1, (first,
    stop) = bounds(*operands).

    `shape` is that of `out`. The bounds may be data. The derivative visits all `blocks`
    instead, so those outside of the bounds must give empty parts; it stores none of them.
    """

    def run(*operands: Any) -> PartialAttention:
        first, stop = bounds(*operands)
        return lax.fori_loop(
            first,
            stop,
            lambda i, done: merge(done, one(i, *operands)),
            vary_with(empty_part(shape), operands),
        )

    def differentiable(*operands: Any) -> PartialAttention:
        # A loop whose bounds are data has no reverse-mode derivative.
        def step(done: PartialAttention, i: Array) -> tuple[PartialAttention, None]:
            return merge(done, jax.checkpoint(one)(i, *operands)), None

        return lax.scan(
            step, vary_with(empty_part(shape), operands), jnp.arange(blocks, dtype=jnp.int32)
        )[0]

    return with_derivative(run, differentiable)(*operands)


def group_queries(q: Shaped[Array, "B N D"], kv_heads: int) -> Shaped[Array, "B K G D"]:
    """q [B, N, D] as [B, K, G, D]: query head n reads kv head n // G."""
    B, N, D = q.shape
    return q.reshape(B, kv_heads, N // kv_heads, D)
