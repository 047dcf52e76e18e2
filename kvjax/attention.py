"""The one function that a model calls where attention was.

    out, cache = kvjax.attention(cache, q, k, v)

T > 1 tokens are a chunk of prompt: exact causal attention over what is stored and themselves; then they are stored.
T == 1 is a decode step: the token is stored, and attends to what the layer's policy selects. `prefill` and `decode` say
which of the two is meant, and decode takes several steps at once.

Everything is a pure function over pytrees, so it runs under jit, scan and grad, in NNX and Linen modules alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType
from jax.typing import ArrayLike

from kvjax import ops
from kvjax.cache import LayerCache, as_whole, check_layer_cache, part_of, placement_of, specs_of
from kvjax.caches import Following, Info, MultiStep, Observer
from kvjax.flushing import flush_full
from kvjax.partial import group_queries
from kvjax.placement import context_axis, run_on_parts, to_context
from kvjax.prompt import (
    attend_chunk,
    attend_chunk_after,
    attend_chunk_in_parts,
    attend_own_in_parts,
    group,
    in_order,
    splits_queries,
    ungroup,
)
from kvjax.selection import Selection
from kvjax.spec import CacheSpec, check_dims, require_int
from kvjax.validation import check_array, check_flags, check_floats, check_not_empty, finite_number

MOST_STEPS = 16  # tokens of a row in one `decode`


def attention(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    first_chunk: bool = False,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache | None]:
    """Attention of q [B, T, N, D] over the cache and over k, v [B, T, K, D], all after RoPE; stores k and v.

    Args:
      cache: of this layer; None computes plain causal attention and stores nothing.
      lengths: i32[B], real tokens of each row of a right-padded chunk (default T). Outputs of padding are finite and
        meaningless.
      active: bool[B], rows that take this decode token; others store nothing, and their output is meaningless.
      window: sliding window; a token sees itself and the window - 1 before it.
      scale: of the logits; default D**-0.5.
      first_chunk: promises that the cache is empty, so a prompt attends only to itself (cuDNN attention on a GPU).
      flush: before a decode step, demote from a full recent block. A model of many layers passes False and calls
        `kvjax.flush` once a step, before its first layer: on a GPU each condition makes the host wait.
      selection: for a `Follower`, the `Info.selection` of this step in the layer that it follows; other policies select
        by themselves and do not read it.

    Returns:
      out [B, T, N, D] in q's dtype, and the cache.

    Raises:
      ValueError: shapes that disagree with each other or with the cache, `lengths` or `active` where they mean nothing.
    """
    out, cache, _ = attention_info(
        cache,
        q,
        k,
        v,
        lengths=lengths,
        active=active,
        window=window,
        scale=scale,
        first_chunk=first_chunk,
        flush=flush,
        selection=selection,
    )
    return out, cache


def attention_info(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    first_chunk: bool = False,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache | None, Info | None]:
    """`attention`, and what the step read: an `Info` for a decode step, None for a prompt or without a cache."""
    sizes, scale = _check_call("attention", cache, q, k, v, window, scale)
    check_flags("attention", first_chunk=first_chunk, flush=flush)
    if active is not None and sizes.T > 1:
        raise ValueError(
            f"active is for decode steps (T=1), got T={sizes.T}; give lengths, 0 for rows that take nothing"
        )
    count = _row_counts(sizes.B, sizes.T, lengths, active)
    operands: Any = (cache, q, k, v, count, selection)
    by: dict[str, Any] = {"scale": scale, "window": window}
    if cache is not None and sizes.T == 1:
        return _run(_attend_step, *operands, **by, flush=flush)
    return _run(_attend_prompt, *operands, **by, first_chunk=first_chunk, padded=lengths is not None)


def prefill(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    first_chunk: bool = False,
) -> tuple[Array, LayerCache]:
    """A chunk of a prompt: exact causal attention over the stored tokens and over k, v [B, T, K, D], which it stores.

    `attention` with T > 1, and also with T = 1: a single token of prompt is then read exactly and not by selection.
    Arguments and result are those of `attention`.
    """
    sizes, scale = _check_call("prefill", cache, q, k, v, window, scale)
    check_flags("prefill", first_chunk=first_chunk)
    count = _row_counts(sizes.B, sizes.T, lengths, None)
    settings: dict[str, Any] = {"first_chunk": first_chunk, "padded": lengths is not None}
    return _run(_attend_prompt, cache, q, k, v, count, None, scale=scale, window=window, **settings)[:2]


def decode(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache]:
    """T = 1 to 16 decode steps at once: out [B, T, N, D] and the cache, as T calls of `attention` would give them.

    Each token attends to what the policy selects for its own query, over the tokens up to itself. As long as no row has
    to be flushed between them, `Full`, `Compressed` and `Retrieval` store, select and attend for all tokens together.
    Other policies, and steps under a sliding window, attend for one after the other.

    Args:
      lengths: i32[B], steps that each row takes (default T); `active` bool[B] are rows that take any.
      flush: demote from full recent blocks, before the first step and between steps. With False the caller has called
        `kvjax.flush`, and no row takes more tokens than `kvjax.room` says; others are dropped and reported by
        `raise_on_overflow`.
      selection: for a `Follower`, the `Info.selection` that `decode_info` gave for the layer that it follows.

    The other arguments are those of `attention`. `rollback` takes back tokens that are not wanted after all.
    """
    settings: Any = {"window": window, "scale": scale, "flush": flush, "selection": selection}
    out, cache, _ = decode_info(cache, q, k, v, lengths=lengths, active=active, **settings)
    return out, cache


def decode_info(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache, Info]:
    """`decode`, and the `Info` of every step: their arrays stacked, T in front."""
    sizes, scale = _check_call("decode", cache, q, k, v, window, scale)
    check_flags("decode", flush=flush)
    if sizes.T > MOST_STEPS:
        raise ValueError(
            f"decode takes 1 to {MOST_STEPS} tokens of a row, got T={sizes.T}; kvjax.prefill reads a prompt"
        )
    count = _row_counts(sizes.B, sizes.T, lengths, active)
    if lengths is not None and sizes.T > 1:
        k, v = _without_padding(k, v, count)
    return _run(_attend_steps, cache, q, k, v, count, selection, scale=scale, window=window, flush=flush)


# ----------------------------------------------------------------------------------------------------------- attending


def _run(attend: Callable[..., Any], cache: LayerCache | None, *operands: Any, **settings: Any) -> Any:
    """`attend` of checked arguments, by each device for its own part where the cache has a placement."""
    # Numpy's float64 stays so under an inlined jit, where every cast to it warns.
    operands = tuple(a.astype(jnp.result_type(a)) if isinstance(a, np.ndarray) else a for a in operands)
    if cache is not None and cache.placement is not None:
        return _run_on_parts(attend, cache, *operands, **settings)
    if isinstance(operands[0], Tracer) and ops.shares_traces():
        return _traced_once(attend, cache, *operands, **settings)
    return attend(cache, *operands, **settings)


@partial(jax.jit, static_argnums=0, static_argnames=("scale", "window", "first_chunk", "flush", "padded"), inline=True)
def _traced_once(attend: Callable[..., Any], cache: LayerCache | None, *operands: Any, **settings: Any) -> Any:
    """`attend`, traced once for all layers of a program that have equal policies and shapes."""
    return attend(cache, *operands, **settings)


@partial(jax.jit, static_argnums=0, static_argnames=("scale", "window", "first_chunk", "flush", "padded"), inline=True)
def _run_on_parts(
    attend: Callable[..., Any],
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    **settings: Any,
) -> tuple[Array, LayerCache, Info | None]:
    """`attend` by each device of the placement for its rows and heads."""

    def local(state: Any, *operands: Any) -> Any:
        out, mine, info = attend(part_of(cache, state), *operands, **settings)
        return out, as_whole(cache, mine.state), info

    placement, state = placement_of(cache), specs_of(cache)
    tokens, heads = placement.spec("BTN"), placement.spec("TBK" if attend is _attend_steps else "BK")
    inside = (state, tokens, tokens, tokens, placement.spec("B"), jax.tree.map(lambda _: heads, selection))
    out, held, info = run_on_parts(
        placement, local, inside, (tokens, state, heads), cache.state, q, k, v, count, selection
    )
    out, info = to_context(out, tokens), jax.tree.map(lambda x: to_context(x, heads), info)
    return out, dataclasses.replace(cache, state=held), info


def _attend_prompt(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    _: Any,
    *,
    scale: float,
    window: int | None,
    first_chunk: bool,
    padded: bool,
) -> tuple[Array, LayerCache | None, None]:
    """A chunk of a prompt, of which the first `count` i32[B] tokens are stored."""
    own_k, own_v = k, v
    if padded:
        own_k, own_v = _without_padding(k, v, count)
    if cache is None:
        return attend_chunk(q, own_k, own_v, scale=scale, window=window), None, None
    grouped, (k, v), over = group(q, k.shape[2]), _heads_first(k, v), context_axis()
    if over is not None and not splits_queries(q.shape[1], over[1], window):
        over = None
    if first_chunk and over is not None:
        out = attend_chunk_in_parts(q, own_k, own_v, *over, scale=scale)
    elif first_chunk:
        out = attend_chunk(q, own_k, own_v, scale=scale, window=window)
    else:
        attend_stored = partial(cache.policy.attend_stored, cache.state, scale=scale, window=window)
        own_k, own_v = _heads_first(own_k, own_v)
        own = None if over is None else attend_own_in_parts(grouped, own_k, own_v, *over, scale=scale)
        out = attend_chunk_after(attend_stored, grouped, own_k, own_v, scale=scale, window=window, own=own)
        out = ungroup(out, q.dtype)
        # Read, then store: without an order XLA copies all that is stored, to be safe (CPU with jaxlib before 0.11
        # drops barriers first, and copies; measured 2026-11-21, 131072 tokens: temp bytes 391 MB, with it 117 MB).
        out, k, v = in_order(out, k, v)
    policy = cache.policy
    if isinstance(policy, Observer):
        state = policy.prefill_observed(cache.state, grouped, k, v, count, scale=scale, window=window)
    else:
        state = policy.prefill(cache.state, k, v, count)
    return out, dataclasses.replace(cache, state=state), None


def _attend_step(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None,
    flush: bool,
) -> tuple[Array, LayerCache, Info]:
    """One decode step of the rows whose `count` is 1."""
    policy, (k, v) = cache.policy, _heads_first(k, v)
    state = policy.update((flush_full(cache) if flush else cache).state, k, v, count > 0)
    queries = group_queries(q[:, 0], k.shape[1])
    if selection is not None and isinstance(policy, Following):
        out, state, info = policy.attend_selection(state, queries, selection, scale=scale, window=window)
    else:
        out, state, info = policy.attend(state, queries, scale=scale, window=window)
    return out.astype(q.dtype).reshape(q.shape), dataclasses.replace(cache, state=state), info


def _attend_steps(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None,
    flush: bool,
) -> tuple[Array, LayerCache, Info]:
    """T decode steps, of which each row takes the first `count` i32[B]; stored at once where the policy can."""

    def one_by_one(cache: LayerCache) -> tuple[Array, LayerCache, Info]:
        def one(cache: LayerCache, x: Any) -> tuple[LayerCache, tuple[Array, Info]]:
            t, selection, *qkv = x
            q, k, v = (a[:, None] for a in qkv)
            taken = (t < count).astype(jnp.int32)
            out, cache, info = _attend_step(cache, q, k, v, taken, selection, scale=scale, window=window, flush=flush)
            return cache, (out[:, 0], info)

        tokens = (jnp.moveaxis(a, 1, 0) for a in (q, k, v))
        steps = jnp.arange(q.shape[1], dtype=jnp.int32), selection, *tokens
        cache, (out, info) = lax.scan(one, cache, steps)
        return jnp.moveaxis(out, 0, 1), cache, info

    policy = cache.policy
    if not isinstance(policy, MultiStep):
        return one_by_one(cache)
    if q.shape[1] == 1:  # a loop of one step would cost kernels
        chosen = jax.tree.map(lambda a: a[0], selection)
        out, cache, info = _attend_step(cache, q, k, v, count, chosen, scale=scale, window=window, flush=flush)
        return out, cache, jax.tree.map(lambda a: a[None], info)
    several = policy

    def stored_at_once(cache: LayerCache) -> tuple[Array, LayerCache, Info]:
        keys, values = _heads_first(k, v)
        grouped = group(q, k.shape[2])
        out, state, info = several.decode(cache.state, grouped, keys, values, count, scale=scale, window=window)
        return ungroup(out, q.dtype), dataclasses.replace(cache, state=state), info

    if not flush or cache.full_rows() is None:
        return stored_at_once(cache)
    cache = flush_full(cache)
    return lax.cond(jnp.any(count > several.free(cache.state)), one_by_one, stored_at_once, cache)


# ----------------------------------------------------------------------------------------------------------- arguments


class _Sizes(NamedTuple):
    B: int
    T: int


def _check_call(
    verb: str, cache: Any, q: Array, k: Array, v: Array, window: int | None, scale: float | None
) -> tuple[_Sizes, float]:
    """Sizes and scale of a call; ValueError for arrays that disagree with each other or with the cache."""
    check_floats(q=q, k=k, v=v)
    check_layer_cache(verb, cache)
    known = {} if cache is None else _spec_dims(cache.spec)
    try:
        sizes = check_dims("q BTND, k BTKD, v BTKD", known, q=q, k=k, v=v)
    except ValueError as error:
        if not known or AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
            raise
        raise ValueError(
            f"{error}. The spec of a cache is static, so jax.shard_map splits its arrays and not its sizes; "
            "kvjax.init(..., placement=kvjax.Placement(mesh=...)) makes a cache that is split, without shard_map"
        ) from None
    B, T, N, K, D = (sizes[x] for x in "BTNKD")
    check_not_empty(sizes, B="rows", T="tokens", N="query heads", K="kv heads", D="channels")
    if N % K:
        raise ValueError(f"q has N={N} heads, which K={K} kv heads do not divide; q{list(q.shape)}, k{list(k.shape)}")
    if window is not None:
        require_int(f"{verb}(window=...)", window, at_least=1)
    return _Sizes(B, T), D**-0.5 if scale is None else finite_number(f"{verb}(scale=...)", scale)


def _without_padding(k: Array, v: Array, count: Array) -> tuple[Array, Array]:
    """k, v [B, T, K, D] with 0 past the first `count` i32[B] tokens: padding weighs 0, but 0 times NaN is NaN."""
    real = (jnp.arange(k.shape[1])[None] < count[:, None])[..., None, None]
    return jnp.where(real, k, jnp.zeros((), k.dtype)), jnp.where(real, v, jnp.zeros((), v.dtype))


def _heads_first(*arrays: Array) -> tuple[Array, ...]:
    """Arrays [B, T, K, D] as [B, K, T, D], the layout of policies."""
    return tuple(jnp.swapaxes(a, 1, 2) for a in arrays)


def _spec_dims(spec: CacheSpec) -> dict[str, int]:
    return {"B": spec.batch, "N": spec.q_heads, "K": spec.kv_heads, "D": spec.head_dim}


def _row_counts(B: int, T: int, lengths: ArrayLike | None, active: ArrayLike | None) -> Array:
    """i32[B] tokens that each row stores."""
    count = jnp.full(B, T, jnp.int32)
    for name, given in (("lengths", lengths), ("active", active)):
        if given is None:
            continue
        check_array(name, given, *(("bools", "[True, False]") if name == "active" else ("integers", "[3, 5]")))
        known = None if isinstance(given, Tracer) else np.asarray(given)
        given = jnp.asarray(given)
        if given.shape != (B,):
            raise ValueError(f"{name} must have shape [B={B}], got {list(given.shape)}")
        wanted = jnp.bool_ if name == "active" else jnp.integer
        if not jnp.issubdtype(given.dtype, wanted):
            raise ValueError(f"{name} must be {'bool' if name == 'active' else 'integers'}, got {given.dtype}")
        if name == "lengths" and known is not None:
            outside = known[(known < 0) | (known > T)]
            if outside.size:
                raise ValueError(
                    f"lengths must be in [0, T={T}], got {outside[0]}; they count this chunk's real tokens"
                )
        count = jnp.where(given, count, 0) if name == "active" else jnp.minimum(jnp.clip(given, 0, T), count)
    return count.astype(jnp.int32)
