"""The function that a model calls in place of its own attention.

    out, cache = kvjax.attention(cache, q, k, v)

T > 1 is a chunk of a prompt: exact causal attention over the stored tokens and the chunk, which
is then stored. T == 1 is a decode step: the token is stored, and attends to what the layer's
policy selects. `prefill` and `decode` state explicitly which of the two is meant, and `decode`
takes several steps in one call.

All of these are pure functions over pytrees, so they run under jit, scan and grad, in NNX and
Linen modules alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType
from jax.typing import ArrayLike

from kvjax import ops
from kvjax.cache.cache import (
    LayerCache,
    as_whole,
    check_no_cache,
    part_of,
    placement_of,
    specs_of,
)
from kvjax.cache.flushing import flush_full
from kvjax.memory import on_host
from kvjax.numerics.partial import Logits
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
from kvjax.policies import Index, Info, Policy, Step
from kvjax.policies.indexed import with_index
from kvjax.policies.policy import step_lengths
from kvjax.sharding.placement import context_axis, run_on_parts, to_context
from kvjax.spec import require_int
from kvjax.validation import (
    check_alive,
    check_array,
    check_dims,
    check_flags,
    finite_number,
    is_traced,
)

MaybeCache = TypeVar(
    "MaybeCache", bound=LayerCache | None
)  # the cache that comes back is of the kind that was given
MOST_STEPS = 16  # tokens of a row in one `decode`
MOST_SCALE = 1e6  # of the logits, which are f32


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
    index: Index | None = None,
) -> tuple[Array, MaybeCache]:
    """Attends with queries q [B, T, N, D] to the cache and to the new k, v [B, T, K, D], and
    stores k and v.

    Values may have another head size than keys, as in MLA: see `CacheSpec.value_dim`.

    Apply RoPE to q and k before the call. Products are exact in f32, but read queries in the
    dtype of the stored keys: a float32 q is rounded to bfloat16 with a bfloat16 cache, as its k
    and v are.

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
        in gpt-oss. Selection and eviction by shares of attention do not count it.
      first_chunk: promises that the cache is empty, so a prompt attends only to itself (cuDNN
        attention on a GPU). Checked outside of jit.
      flush: flush full recent blocks before a decode step. A model with many layers passes
        False and calls `kvjax.flush` once per step, before its first layer: on a GPU each
        `lax.cond` makes the host wait.
      selection: for a `Follower`, the `Info.selection` of this step in the layer that it
        follows; other policies make their own selection and ignore it.
      index: for a cache of `kvjax.policies.Indexed`, the queries and keys of the model's own
        indexer (`Index`).

    Returns:
      out [B, T, N, D] in q's dtype, and the cache.

    Raises:
      ValueError: shapes that disagree with each other or with the cache, `lengths` outside of
        [0, T], `active` for a chunk of a prompt.
    """
    settings: Any = {
        "window": window,
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "selection": selection,
    }
    settings |= {
        "lengths": lengths,
        "active": active,
        "first_chunk": first_chunk,
        "flush": flush,
        "index": index,
    }
    return attention_info(cache, q, k, v, **settings)[:2]


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
    index: Index | None = None,
) -> tuple[Array, MaybeCache, Info | None]:
    """`attention` that also returns an `Info` of what a decode step read; None for a prompt or
    without a cache.
    """
    B, T, step, heads = _check_call("attention", cache, q, k, v, window, scale, soft_cap, sinks)
    check_flags("attention", first_chunk=first_chunk, flush=flush)
    if first_chunk:
        _check_first("attention", cache)
    if active is not None and T > 1:
        raise ValueError(
            f"active is for decode steps (T=1), got T={T}; for a prompt give lengths, 0 for rows without tokens"
        )
    count = row_counts(B, T, lengths, active)
    if index is not None or (cache is not None and cache.policy.takes_index):
        cache = with_index("attention", cache, index, count)
    operands: dict[str, Any] = {"q": q, "k": k, "v": v, "count": count, "sinks": heads}
    if cache is not None and T == 1:
        return run(
            _attend_step, cache, operands | {"selection": selection}, step=step, flush=flush
        )
    return run(
        _attend_prompt,
        cache,
        operands,
        step=step,
        first_chunk=first_chunk,
        padded=lengths is not None,
    )


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
    B, T, step, heads = _check_call("prefill", cache, q, k, v, window, scale, soft_cap, sinks)
    check_flags("prefill", first_chunk=first_chunk)
    if first_chunk:
        _check_first("prefill", cache)
    count = row_counts(B, T, lengths, None)
    if cache.policy.takes_index:
        with_index("prefill", cache, None, count)
    operands = {"q": q, "k": k, "v": v, "count": count, "sinks": heads}
    return run(
        _attend_prompt,
        cache,
        operands,
        step=step,
        first_chunk=first_chunk,
        padded=lengths is not None,
    )[:2]


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
    settings: Any = {
        "window": window,
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "flush": flush,
        "exact": exact,
    }
    out, cache, _ = decode_info(
        cache, q, k, v, lengths=lengths, active=active, selection=selection, **settings
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
    B, T, step, heads = _check_call("decode", cache, q, k, v, window, scale, soft_cap, sinks)
    check_flags("decode", flush=flush, exact=exact)
    if exact:
        check_exact("decode(exact=True)", cache.policy)
        step = dataclasses.replace(step, exact=True)
    if T > MOST_STEPS:
        raise ValueError(
            f"decode takes 1 to {MOST_STEPS} tokens per row, got T={T}; read a prompt with kvjax.prefill"
        )
    count = row_counts(B, T, lengths, active)
    if cache.policy.takes_index:
        with_index("decode", cache, None, count)
    if lengths is not None and T > 1:
        k, v = _without_padding(k, v, count)
    operands = {"q": q, "k": k, "v": v, "count": count, "selection": selection, "sinks": heads}
    return run(_attend_steps, cache, operands, step=step, flush=flush)


# ----------------------------------------------------------------------------------------------------------- attending


def run(
    verb: Callable[..., Any], cache: LayerCache | None, operands: dict[str, Any], **static: Any
) -> Any:
    """verb(cache, **operands, **static) of checked arguments; each device of a placement calls
    it for its own part.

    A verb returns an output [B, T, N, D] or None, the cache, and a tree of arrays [B, K, ...].
    """
    # A NumPy float64 array stays float64 under an inlined jit, where every cast to it warns.
    if np.ndarray in map(type, operands.values()):
        operands = {
            n: a.astype(jnp.result_type(a)) if isinstance(a, np.ndarray) else a
            for n, a in operands.items()
        }
    if cache is not None and cache.placement is not None:
        return _run_on_parts(verb, cache, operands, **static)
    # The policy refuses other selections by their kind.
    if ops.shares_traces() and isinstance(operands.get("selection"), Selection | None):
        return _traced_once(verb, cache, operands, **static)
    return verb(cache, **operands, **static)


STATIC = ("step", "first_chunk", "flush", "padded")


@partial(jax.jit, static_argnums=0, static_argnames=STATIC)
def _traced_once(
    verb: Callable[..., Any], cache: LayerCache | None, operands: dict[str, Any], **static: Any
) -> Any:
    """`verb`, traced once for all layers of a program with equal policies and shapes; without
    jit, one program.

    A call, which XLA inlines first: to inline it in JAX takes twice the time to trace and lower
    32 layers.
    """
    return verb(cache, **operands, **static)


@partial(jax.jit, static_argnums=0, static_argnames=STATIC, inline=True)
def _run_on_parts(
    verb: Callable[..., Any], cache: LayerCache, operands: dict[str, Any], **static: Any
) -> tuple[Array | None, LayerCache, Any]:
    """`verb`, run by each device of the placement for its own rows and heads."""

    def local(state: Any, operands: dict[str, Any]) -> Any:
        out, mine, found = verb(part_of(cache, state), **operands, **static)
        return out, as_whole(cache, mine.state), found

    placement, state, by_head = (
        placement_of(cache),
        specs_of(cache),
        "TBK" if verb is _attend_steps else "BK",
    )
    letters = {"count": "B", "sinks": "KG", "selection": by_head}
    tokens, heads = placement.spec("BTN"), placement.spec(by_head)

    def specs(name: str, tree: Any) -> Any:
        own = placement.spec(letters.get(name, "BTN"))
        return jax.tree.map(lambda _: own, tree)

    in_specs = state, {name: specs(name, tree) for name, tree in operands.items()}
    out, new_state, found = run_on_parts(
        placement, local, in_specs, (tokens, state, heads), cache.state, operands
    )
    out, found = to_context(out, tokens), jax.tree.map(lambda x: to_context(x, heads), found)
    return out, dataclasses.replace(cache, state=new_state), found


def _attend_prompt(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    sinks: Array | None,
    *,
    step: Step,
    first_chunk: bool,
    padded: bool,
) -> tuple[Array, LayerCache | None, None]:
    """Attends a chunk of a prompt and stores the first `count` i32[B] tokens of each row."""
    logits, window, own_k, own_v = step.logits, step.window, k, v
    if padded:
        own_k, own_v = _without_padding(k, v, count)
    if cache is None:
        return attend_chunk(q, own_k, own_v, sinks, logits=logits, window=window), None, None
    grouped, k, v, over = (
        group(q, k.shape[2]),
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(v, 1, 2),
        context_axis(),
    )
    if over is not None and not splits_queries(q.shape[1], over[1], window):
        over = None
    if first_chunk and over is not None and sinks is None:
        out = attend_chunk_in_parts(q, own_k, own_v, *over, logits=logits)
    elif first_chunk and over is None:
        out = attend_chunk(q, own_k, own_v, sinks, logits=logits, window=window)
    else:
        attend_stored = partial(cache.policy.attend_stored, cache.state, step=step)
        own_k, own_v = jnp.swapaxes(own_k, 1, 2), jnp.swapaxes(own_v, 1, 2)
        own = (
            None
            if over is None
            else attend_own_in_parts(grouped, own_k, own_v, *over, logits=logits)
        )
        out = attend_chunk_after(
            attend_stored,
            grouped,
            own_k,
            own_v,
            logits=logits,
            window=window,
            own=own,
            sinks=sinks,
        )
        out = ungroup(out, q.dtype)
        # Read, then store: without a fixed order XLA copies everything stored, to be safe. (On
        # CPU, jaxlib before 0.11 drops the barrier and copies. Measured 2026-11-21, 131072
        # tokens: 391 MB of temp bytes, 117 MB with it.)
        out, k, v = in_order(out, k, v)
    policy = cache.policy
    # The policy sees the sink logits too: they take their share of a prompt's weights.
    observed = dataclasses.replace(step, sinks=sinks)
    state = policy.prefill_observed(cache.state, grouped, k, v, count, observed)
    return out, dataclasses.replace(cache, state=state), None


def _attend_step(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    sinks: Array | None,
    *,
    step: Step,
    flush: bool,
) -> tuple[Array, LayerCache, Info]:
    """One decode step of the rows whose `count` is 1."""
    policy, active, k, v = (
        cache.policy,
        count > 0,
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(v, 1, 2),
    )  # heads before tokens
    state = policy.update((flush_full(cache, active) if flush else cache).state, k, v, active)
    queries = q[:, 0].reshape(*k.shape[:2], -1, q.shape[3])
    selection = selection if policy.follows else None
    step = dataclasses.replace(step, active=active, selection=selection, sinks=sinks)
    out, state, info = policy.attend(state, queries, step)
    out = out.astype(q.dtype).reshape(*q.shape[:-1], -1)
    return out, dataclasses.replace(cache, state=state), info


def _attend_steps(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    sinks: Array | None,
    *,
    step: Step,
    flush: bool,
) -> tuple[Array, LayerCache, Info]:
    """T decode steps, of which each row takes the first `count` i32[B]; in one pass if the
    policy supports it.
    """
    settings: Any = {"step": step, "flush": flush}

    def one_by_one(cache: LayerCache, count: Array) -> tuple[Array, LayerCache, Info]:
        def one(cache: LayerCache, x: Any) -> tuple[LayerCache, tuple[Array, Info]]:
            t, selection, *qkv = x
            q, k, v = (a[:, None] for a in qkv)
            taken = (t < count).astype(jnp.int32)
            out, cache, info = _attend_step(cache, q, k, v, taken, selection, sinks, **settings)
            return cache, (out[:, 0], info)

        tokens = (jnp.moveaxis(a, 1, 0) for a in (q, k, v))
        steps = jnp.arange(q.shape[1], dtype=jnp.int32), selection, *tokens
        cache, (out, info) = lax.scan(one, cache, steps)
        return jnp.moveaxis(out, 0, 1), cache, info

    policy = cache.policy
    if not (policy.takes_steps or step.exact):
        return one_by_one(cache, count)
    if q.shape[1] == 1:  # a loop over one step would add kernels
        first = jax.tree.map(lambda a: a[0], selection)
        out, cache, info = _attend_step(cache, q, k, v, count, first, sinks, **settings)
        return out, cache, jax.tree.map(lambda a: a[None], info)

    def at_once(cache: LayerCache, count: Array) -> tuple[Array, LayerCache, Info]:
        keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        grouped = group(q, k.shape[2])
        state = policy.store_steps(cache.state, keys, values, count)
        # From the counts after the steps, which change in place: XLA would copy those before.
        lengths = step_lengths(state.length, count, k.shape[1])
        out, state, info = policy.attend(
            state, grouped, dataclasses.replace(step, lengths=lengths, sinks=sinks)
        )
        return ungroup(out, q.dtype), dataclasses.replace(cache, state=state), info

    if not flush or cache.full_rows() is None:
        return at_once(cache, count)
    cache = flush_full(cache, count > 0)
    late = count > policy.free(
        cache.state
    )  # rows that need a flush in between, whatever the others need

    def late_rows(cache: LayerCache) -> tuple[Array, LayerCache, Info]:
        return one_by_one(cache, jnp.where(late, count, 0))

    def nothing(cache: LayerCache) -> tuple[Array, LayerCache, Info]:
        out, _, info = jax.eval_shape(late_rows, cache)
        out, info = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (out, info))
        return out, cache, info

    late_out, cache, late_info = lax.cond(jnp.any(late), late_rows, nothing, cache)
    out, cache, info = at_once(cache, jnp.where(late, 0, count))

    def choose(of_late: Array, of_others: Array, axis: int) -> Array:
        return jnp.where(
            late.reshape(*(1,) * axis, -1, *(1,) * (of_late.ndim - axis - 1)),
            of_late,
            of_others,
        )

    return (
        choose(late_out, out, 0),
        cache,
        jax.tree.map(lambda a, b: choose(a, b, 1), late_info, info),
    )


# ----------------------------------------------------------------------------------------------------------- arguments


def _check_first(verb: str, cache: LayerCache | None) -> None:
    """Raises ValueError if rows of a cache that is promised to be empty are known to hold
    tokens.
    """
    if cache is None or isinstance(length := cache.length, Tracer):
        return
    if most := int(on_host(length).max()):
        raise ValueError(
            f"{verb}(first_chunk=True) promises an empty cache, but a row of this one holds {most} tokens; leave it "
            "out for later chunks"
        )


def _check_call(
    verb: str,
    cache: Any,
    q: Array,
    k: Array,
    v: Array,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: ArrayLike | None,
) -> tuple[int, int, Step, Array | None]:
    """B, T, scale and window of the step, and the sink logits f32[K, G] of a call.

    Raises ValueError for arrays that disagree with each other or with the cache.
    """
    if isinstance(v, LayerCache):
        raise ValueError(f"{verb} takes the cache first: kvjax.{verb}(cache, q, k, v)")
    spec, cure = None, ""
    if isinstance(cache, LayerCache):
        check_alive(verb, cache)
        spec = cache.spec
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            cure = (
                ". The spec of a cache is static, so jax.shard_map splits its arrays but not its sizes; in place of "
                "shard_map, make a cache that is split: kvjax.init(..., placement=kvjax.Placement(mesh=...))"
            )
    else:
        check_no_cache(verb, cache)
    sizes = check_dims("q BTND, k BTKD, v BTKE", spec, cure, q=q, k=k, v=v)
    B, T, N, K, D = map(sizes.__getitem__, "BTNKD")
    if 0 in sizes.values():
        letter = next(letter for letter, size in sizes.items() if not size)
        words = {
            "B": "rows",
            "T": "tokens",
            "N": "query heads",
            "K": "kv heads",
            "D": "channels",
        }
        raise ValueError(f"q, k and v have {letter}=0 {words[letter]}; give at least one")
    if N % K:
        raise ValueError(
            f"q has N={N} heads, which must be a multiple of k's K={K} kv heads; q{list(q.shape)}, k{list(k.shape)}"
        )
    step = plain_step(verb, D, window, scale, soft_cap)
    return B, T, step, None if sinks is None else sink_logits(verb, cache, sinks, N, K)


def check_exact(where: str, policy: Policy) -> None:
    """Raises ValueError for a policy whose steps cannot attend to all tokens of a row."""
    if not policy.takes_exact:
        raise ValueError(
            f"{where} needs a policy that keeps all tokens and can attend to them, which {policy!r} cannot; use full, "
            "or a retrieval or compressed method other than freekv"
        )


def plain_step(
    verb: str, D: int, window: int | None, scale: float | None, soft_cap: float | None
) -> Step:
    """The `Step` of a call without its arrays, for keys of D channels."""
    if window is not None:
        require_int(f"{verb}(window=...)", window, at_least=1)
    scale = D**-0.5 if scale is None else finite_number(f"{verb}(scale=...)", scale)
    if abs(scale) > MOST_SCALE:
        raise ValueError(
            f"{verb}(scale=...) must be at most {MOST_SCALE:.0e}, got {scale}: larger logits overflow; it is usually "
            "head_dim**-0.5"
        )
    if soft_cap is None:
        return Step(Logits(scale), window)
    soft_cap = finite_number(f"{verb}(soft_cap=...)", soft_cap)
    if soft_cap <= 0:
        raise ValueError(
            f"{verb}(soft_cap=...) must be above 0, got {soft_cap}; leave it out for no cap"
        )
    return Step(Logits(scale, soft_cap), window)


def sink_logits(verb: str, cache: Any, sinks: ArrayLike, N: int, K: int) -> Array:
    """Sink logits f32[N] as f32[K, G]."""
    if jnp.shape(sinks) != (N,):
        raise ValueError(
            f"{verb}(sinks=...) must have one logit for each of the {N} query heads, got shape {list(jnp.shape(sinks))}"
        )
    if cache is not None and not cache.policy.takes_sinks:
        raise ValueError(
            f"{cache.policy} takes no sink logits; a policy whose attend merges Step.sinks says so by takes_sinks"
        )
    return jnp.asarray(sinks, jnp.float32).reshape(K, N // K)


def _without_padding(k: Array, v: Array, count: Array) -> tuple[Array, Array]:
    """k, v [B, T, K, D] with zeros past the first `count` i32[B] tokens: padding has weight 0,
    but 0 * NaN is NaN.
    """
    real = (jnp.arange(k.shape[1])[None] < count[:, None])[..., None, None]
    return jnp.where(real, k, jnp.zeros((), k.dtype)), jnp.where(
        real, v, jnp.zeros((), v.dtype)
    )


def row_counts(B: int, T: int, lengths: ArrayLike | None, active: ArrayLike | None) -> Array:
    """Tokens that each row stores: i32[B]."""
    count = jnp.full(B, T, jnp.int32)
    for name, given in (("lengths", lengths), ("active", active)):
        if given is None:
            continue
        check_array(
            name,
            given,
            *(("bools", "[True, False]") if name == "active" else ("integers", "[3, 5]")),
        )
        known = None if is_traced(given) else np.asarray(given)
        given = jnp.asarray(given)
        if given.dtype.itemsize < 4 and jnp.issubdtype(given.dtype, jnp.integer):
            given = given.astype(jnp.int32)  # T need not fit in fewer bits
        if given.shape != (B,):
            raise ValueError(
                f"{name} must have shape [B={B}], got {list(given.shape)}; give one for each row"
            )
        wanted = jnp.bool_ if name == "active" else jnp.integer
        if not jnp.issubdtype(given.dtype, wanted):
            kind, dtype = ("bool", "bool") if name == "active" else ("integers", "int")
            raise ValueError(
                f"{name} must be {kind}, got {given.dtype}; convert it with jnp.asarray({name}, {dtype})"
            )
        if name == "lengths" and known is not None:
            outside = known[(known < 0) | (known > T)]
            if outside.size:
                raise ValueError(
                    f"lengths must be in [0, T={T}], got {outside[0]}; they count this chunk's real tokens"
                )
        count = (
            jnp.where(given, count, 0)
            if name == "active"
            else jnp.minimum(jnp.clip(given, 0, T).astype(jnp.int32), count)
        )
    return count.astype(jnp.int32)
