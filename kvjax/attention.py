"""The function that a model calls instead of its own attention.

    out, cache = kvjax.attention(cache, q, k, v)

T > 1 is a chunk of a prompt: exact causal attention over the stored tokens and the chunk, which
is then stored. T == 1 is a decode step: the token is stored, and attends to what the layer's
policy selects. `prefill` and `decode` state explicitly which of the two is meant, and `decode`
takes several steps in one call.

All of these are pure functions over pytrees, so they run under jit, scan and grad, in NNX and
Linen modules alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from kvjax.cache.cache import LayerCache
from kvjax.cache.flushing import flush_full
from kvjax.call import (
    Call,
    check_empty,
    check_exact,
    checked_step,
    row_counts,
    run,
    without_padding,
)
from kvjax.memory import has_host_arrays
from kvjax.numerics.derivatives import refuse_vmap
from kvjax.numerics.selection import Selection
from kvjax.ops.chunk import (
    attend_chunk,
    attend_chunk_after,
    attend_chunk_in_parts,
    attend_own_in_parts,
    group,
    in_order,
    splits_queries,
    ungroup,
)
from kvjax.policies import Info
from kvjax.policies.policy import step_lengths
from kvjax.sharding.placement import context_axis
from kvjax.validation import check_flags

MaybeCache = TypeVar("MaybeCache", bound=LayerCache | None)
"""The cache that comes back is of the kind that was given."""
Attended: TypeAlias = tuple[Array, LayerCache, Info]
MOST_STEPS = 16  # tokens of a row in one `decode`


def attention(
    cache: MaybeCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    first_chunk: bool = False,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, MaybeCache]:
    """Attends with queries q [B, T, N, D] to the cache and to the new k, v [B, T, K, D], and
    stores k and v.

    Values may have another head size than keys, as in MLA: see `CacheSpec.value_dim`.

    Apply RoPE to q and k before the call. Matmuls accumulate in float32, but q is first cast to
    the cache's dtype, as k and v are, so a float32 q is rounded if the cache is bfloat16.

    Args:
      cache: the layer's cache; None computes plain causal attention and stores nothing.
      lengths: i32[B], real tokens of each row of a right-padded chunk (default T). Outputs of
        padding are finite and meaningless.
      active: bool[B], rows that take this decode token; others store nothing, and their output
        is meaningless.
      window: sliding window; a token sees itself and the window - 1 before it.
      scale: factor of the logits, at most 1e6; default D**-0.5.
      soft_cap: the logits become soft_cap * tanh(logits / soft_cap), as in Gemma 2. Kernels
        that select or read codes do not have it, nor does cuDNN: they run in plain JAX.
      sinks: f32[N], a logit for each query head that only the denominator of softmax counts, as
        in gpt-oss. Selection by shares of attention does not count it.
      first_chunk: promises that the cache is empty, so a prompt attends only to itself (cuDNN
        attention on a GPU). Checked outside of jit.
      flush: flush full recent blocks before a decode step. A model with many layers passes
        False and calls `kvjax.flush` once per step, before its first layer: on a GPU each
        `lax.cond` makes the host wait.
      selection: for a `Follower`, the `Info.selection` of this step in the layer that it
        follows; other policies make their own selection and ignore it.

    Returns:
      out [B, T, N, D] in q's dtype, and the cache.

    Raises:
      ValueError: shapes that disagree with each other or with the cache, `lengths` outside of
        [0, T], `active` for a chunk of a prompt.
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
        soft_cap=soft_cap,
        sinks=sinks,
        first_chunk=first_chunk,
        flush=flush,
        selection=selection,
    )
    return out, cache


def attention_info(
    cache: MaybeCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    first_chunk: bool = False,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, MaybeCache, Info | None]:
    """`attention` that also returns an `Info` of what a decode step read; None for a prompt or
    without a cache.
    """
    step = checked_step("attention", cache, q, k, v, window, scale, soft_cap, sinks)
    check_flags("attention", first_chunk=first_chunk, flush=flush)
    if first_chunk:
        check_empty("attention", cache)
    B, T = q.shape[:2]
    if active is not None and T > 1:
        raise ValueError(
            f"active is for decode steps (T=1), got T={T}; for a prompt give lengths, 0 for rows without tokens"
        )
    count = row_counts(B, T, lengths, active)
    if cache is not None and T == 1:
        if cache.policy.follows:
            step = replace(step, selection=selection)
        out, after, info = run(_attend_step, cache, Call(q, k, v, count, step, flush=flush))
        return out, cast(MaybeCache, after), info
    call = Call(q, k, v, count, step, first_chunk=first_chunk, padded=lengths is not None)
    return run(_attend_prompt, cache, call)


def prefill(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    first_chunk: bool = False,
) -> tuple[Array, LayerCache]:
    """Attends a chunk of a prompt exactly and causally to the stored tokens and to itself, and
    stores k and v.

    The same as `attention` with T > 1. With T = 1 the token is a prompt of one token: attention
    is exact, without a selection. Arguments and result are those of `attention`.
    """
    step = checked_step("prefill", cache, q, k, v, window, scale, soft_cap, sinks)
    check_flags("prefill", first_chunk=first_chunk)
    if first_chunk:
        check_empty("prefill", cache)
    B, T = q.shape[:2]
    count = row_counts(B, T, lengths, None)
    call = Call(q, k, v, count, step, first_chunk=first_chunk, padded=lengths is not None)
    out, cache, _ = run(_attend_prompt, cache, call)
    return out, cache


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
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    flush: bool = True,
    selection: Selection | None = None,
    exact: bool = False,
) -> tuple[Array, LayerCache]:
    """Runs T = 1 to 16 decode steps in one call: out [B, T, N, D] and the cache are those of T
    calls of `attention`.

    Each token attends to what the policy selects for its own query among the tokens up to
    itself. As long as no row needs a flush in between, `Full`, `Compressed` and `Retrieval`
    store, select and attend for all tokens together. Other policies attend one step after the
    other, as do `Compressed` and `Retrieval` under a sliding window.

    Args:
      lengths: i32[B], steps that each row takes (default T). Rows where `active` bool[B] is
        false take none.
      flush: flush full recent blocks before the first step and between steps. With False, call
        `kvjax.flush` first and give no row more tokens than `kvjax.room` says; further tokens
        are dropped, which `raise_on_overflow` reports.
      selection: for a `Follower`, the `Info.selection` that `decode_info` returned for the
        layer that it follows.
      exact: attend to all tokens of the row instead of a selection, as the cache stores them.
        So tokens that were drafted with a selection are verified on the same cache.

    The other arguments are those of `attention`. `rollback` removes tokens again, such as
    rejected drafts.
    """
    out, cache, _ = decode_info(
        cache,
        q,
        k,
        v,
        lengths=lengths,
        active=active,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        flush=flush,
        selection=selection,
        exact=exact,
    )
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
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    flush: bool = True,
    selection: Selection | None = None,
    exact: bool = False,
) -> tuple[Array, LayerCache, Info]:
    """`decode` that also returns the `Info`s of all steps, stacked along a first axis T."""
    step = checked_step("decode", cache, q, k, v, window, scale, soft_cap, sinks)
    check_flags("decode", flush=flush, exact=exact)
    if exact:
        check_exact("decode(exact=True)", cache.policy)
        step = replace(step, exact=True)
    B, T = q.shape[:2]
    if T > MOST_STEPS:
        raise ValueError(
            f"decode takes 1 to {MOST_STEPS} tokens per row, got T={T}; read a prompt with kvjax.prefill"
        )
    count = row_counts(B, T, lengths, active)
    if lengths is not None and T > 1:
        k, v = without_padding(k, v, count)
    if cache.policy.follows:
        step = replace(step, selection=selection)
    call = Call(q, k, v, count, step, flush=flush)
    return run(_attend_steps, cache, call, by_head="TBK")


# ------------------------------------------------------------------------------------------------------------- prompts


def _attend_prompt(cache: MaybeCache, call: Call) -> tuple[Array, MaybeCache, None]:
    """Attends a chunk of a prompt, and stores the first `count` tokens of each row."""
    q = call.q
    k = call.k
    v = call.v
    step = call.step
    own_k, own_v = without_padding(k, v, call.count) if call.padded else (k, v)
    if cache is None:
        out = attend_chunk(q, own_k, own_v, step.sinks, logits=step.logits, window=step.window)
        return out, cache, None

    queries = group(q, k.shape[2])
    k = _heads_first(k)
    v = _heads_first(v)
    over = context_axis()
    if over is not None and not splits_queries(q.shape[1], over[1], step.window):
        over = None
    if call.first_chunk and over is None:
        out = attend_chunk(q, own_k, own_v, step.sinks, logits=step.logits, window=step.window)
    elif call.first_chunk and over is not None and step.sinks is None:
        out = attend_chunk_in_parts(q, own_k, own_v, *over, logits=step.logits)
    else:
        own_k = _heads_first(own_k)
        own_v = _heads_first(own_v)
        own = None
        if over is not None:
            own = attend_own_in_parts(queries, own_k, own_v, *over, logits=step.logits)
        out = attend_chunk_after(
            partial(cache.policy.attend_stored, cache.state, step=step),
            queries,
            own_k,
            own_v,
            logits=step.logits,
            window=step.window,
            own=own,
            sinks=step.sinks,
        )
        out = ungroup(out, q.dtype)
        # Read, then store: without a fixed order XLA copies everything stored, to be safe. (On
        # CPU, jaxlib before 0.11 drops the barrier and copies. Measured 2026-11-21, 131072
        # tokens: 391 MB of temp bytes, 117 MB with it.)
        out, k, v = in_order(out, k, v)
    state = cache.policy.prefill_observed(cache.state, queries, k, v, call.count, step)
    return out, replace(cache, state=state), None


# --------------------------------------------------------------------------------------------------------------- steps


def _attend_step(cache: LayerCache, call: Call) -> Attended:
    """One decode step of the rows whose `count` is 1: flush, store, attend.

    The policy of the layer has these verbs: `Retrieval` stores as all `Zoned` policies do, in
    `kvjax.policies.zones`, and attends in `kvjax.policies.retrieval`.
    """
    q = call.q
    active = call.count > 0
    k = _heads_first(call.k)
    v = _heads_first(call.v)
    if call.flush:
        cache = flush_full(cache, active)
    state = cache.policy.update_for_step(cache.state, k, v, active, call.step)
    queries = q[:, 0].reshape(*k.shape[:2], -1, q.shape[3])  # [B, K, G, D]
    out, state, info = cache.policy.attend(state, queries, replace(call.step, active=active))
    out = out.astype(q.dtype).reshape(*q.shape[:-1], -1)
    return out, replace(cache, state=state), info


def _attend_steps(cache: LayerCache, call: Call) -> Attended:
    """T decode steps, of which each row takes its first `count`: together if the policy can."""
    policy = cache.policy
    count = call.count
    if not (policy.takes_steps or call.step.exact):
        return _one_by_one(cache, call)
    if call.q.shape[1] == 1:  # a loop over one step would add kernels
        return _only_step(cache, call)
    if not call.flush or cache.full_rows() is None:
        return _together(cache, call)

    # A row may need a flush between its steps, whatever the others need. It takes its steps one
    # by one; the others do not wait for it, and take theirs together.
    if has_host_arrays(cache.state):
        # vmap makes a choice of a condition on data, and XLA cannot choose between such arrays.
        why = (
            "several decode steps of a cache in host memory do not run under jax.vmap; decode one token at a time, or "
            "use rows of one cache instead of vmap"
        )
        q, k, count, _ = refuse_vmap(why, call.q, call.k, count, cache.length)
        call = replace(call, q=q, k=k)
    cache = flush_full(cache, count > 0)
    late = count > policy.free(cache.state)
    of_late = replace(call, count=jnp.where(late, count, 0))
    of_others = replace(call, count=jnp.where(late, 0, count))

    def late_steps(cache: LayerCache) -> Attended:
        return _one_by_one(cache, of_late)

    def no_steps(cache: LayerCache) -> Attended:
        out, _, info = jax.eval_shape(late_steps, cache)
        out, info = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (out, info))
        return out, cache, info

    late_out, cache, late_info = lax.cond(jnp.any(late), late_steps, no_steps, cache)
    out, cache, info = _together(cache, of_others)
    infos = jax.tree.map(partial(_where_rows, late, axis=1), late_info, info)
    return _where_rows(late, late_out, out, axis=0), cache, infos


def _together(cache: LayerCache, call: Call) -> Attended:
    """All steps in one pass over the cache."""
    k = _heads_first(call.k)
    v = _heads_first(call.v)
    queries = group(call.q, call.k.shape[2])
    state = cache.policy.store_steps(cache.state, k, v, call.count)
    # From the counts after the steps, which change in place: XLA would copy those before.
    lengths = step_lengths(state.length, call.count, call.k.shape[1])
    # Rows that take none of the steps read nothing where that saves most: in exact steps.
    active = call.count > 0 if call.step.exact else None
    step = replace(call.step, lengths=lengths, active=active)
    out, state, info = cache.policy.attend(state, queries, step)
    return ungroup(out, call.q.dtype), replace(cache, state=state), info


def _one_by_one(cache: LayerCache, call: Call) -> Attended:
    """Each step after the one before it."""

    def one(cache: LayerCache, x: Any) -> tuple[LayerCache, tuple[Array, Info]]:
        t, selection, q, k, v = x
        step = Call(
            q[:, None],
            k[:, None],
            v[:, None],
            count=(t < call.count).astype(jnp.int32),
            step=replace(call.step, selection=selection),
            flush=call.flush,
        )
        out, cache, info = _attend_step(cache, step)
        return cache, (out[:, 0], info)

    q, k, v = (jnp.moveaxis(a, 1, 0) for a in (call.q, call.k, call.v))
    t = jnp.arange(call.q.shape[1], dtype=jnp.int32)
    cache, (out, info) = lax.scan(one, cache, (t, call.step.selection, q, k, v))
    return jnp.moveaxis(out, 0, 1), cache, info


def _only_step(cache: LayerCache, call: Call) -> Attended:
    """The steps of a call that has one."""
    selection = jax.tree.map(lambda a: a[0], call.step.selection)
    only = replace(call, step=replace(call.step, selection=selection))
    out, cache, info = _attend_step(cache, only)
    return out, cache, jax.tree.map(lambda a: a[None], info)


def _where_rows(rows: Array, a: Array, b: Array, *, axis: int) -> Array:
    """`a` in the rows where bool[B] is true, else `b`; rows are their axis `axis`."""
    shape = [1] * a.ndim
    shape[axis] = -1
    return jnp.where(rows.reshape(shape), a, b)


def _heads_first(a: Array) -> Array:
    """[B, T, K, D] as [B, K, T, D]."""
    return jnp.swapaxes(a, 1, 2)
