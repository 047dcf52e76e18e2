"""A decode step of a layer in three calls: store the new token, select, attend.

    cache = kvjax.update(cache, k, v)
    selection = kvjax.select(cache, q)
    out, cache = kvjax.attend(cache, q, selection)

Together they do what `kvjax.attention` does. In between you may look at the selection, change
it, or take another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax.cache.cache import LayerCache, check_layer_cache
from kvjax.cache.flushing import flush_full
from kvjax.call import plain_step, row_counts, run, sink_logits
from kvjax.numerics.partial import group_queries
from kvjax.numerics.selection import Selection, unpack
from kvjax.policies import Info, Step
from kvjax.policies.policy import STATIC
from kvjax.validation import check_dims, check_flags, short_repr


@register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Tokens that each row stores."""

    k: Array  # [B, T, K, D]
    v: Array  # [B, T, K, E]
    count: Array  # i32[B] how many each row stores
    flush: bool = field(metadata=STATIC)  # full recent blocks before
    # How the one token attends, by which a full cache evicts; None where they are a prompt.
    step: Step | None = None


@register_dataclass
@dataclass(frozen=True)
class Query:
    """The queries of the newest token of each row."""

    q: Array  # [B, 1, N, D]
    step: Step  # how it attends, with `selection` and `sinks`
    count: Array | None = None  # i32[B] 1 in rows that attend; None: all


def update(
    cache: LayerCache,
    k: Array,
    v: Array,
    *,
    active: ArrayLike | None = None,
    flush: bool = True,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> LayerCache:
    """Stores a token of each row, with keys and values k, v [B, 1, K, D]; rows where `active`
    is false store none.

    `flush` moves tokens out of full recent blocks first; with False, call `kvjax.flush` before.
    `window`, `scale`, `soft_cap` and `sinks` are as in `kvjax.attention`. Policies that evict
    tokens by remembered queries weigh them so, and others ignore them.

    Raises:
      ValueError: shapes that disagree with each other or with the cache.
    """
    _check("update", cache, k=k, v=v)
    check_flags("update", flush=flush)
    step = plain_step("update", k.shape[-1], window, scale, soft_cap)
    step = _with_sinks("update", cache, step, sinks)
    count = row_counts(k.shape[0], 1, None, active)
    _, cache, _ = run(_update, cache, Tokens(k, v, count, flush, step))
    return cache


def select(
    cache: LayerCache,
    q: Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Selection:
    """The slots that a step with queries q [B, 1, N, D] of each row's newest token attends to,
    besides the tokens that every step attends to.

    Nothing is read but the index. `window`, `scale` and `soft_cap` are as in `kvjax.attention`.

    Raises:
      ValueError: a policy that selects nothing, because its steps attend to all that it keeps
        (`Full`, `Compressed`, `Evicting`) or to what another layer selected (`Follower`);
        shapes that disagree with the cache.
    """
    _check("select", cache, q=q)
    step = plain_step("select", q.shape[-1], window, scale, soft_cap)
    _, _, selection = run(_select, cache, Query(q, step))
    return selection


def attend(
    cache: LayerCache,
    q: Array,
    selection: Selection | None = None,
    *,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[Array, LayerCache]:
    """Attends with q [B, 1, N, D], the queries of each row's newest token, to `selection` and
    to the tokens that every step attends to: out [B, 1, N, D], and the cache.

    None selects as `select` does, or attends to everything if the policy selects nothing. A
    selection of another layer serves too, if both layers have zones of equal sizes
    (`Follower`). The output of rows where `active` bool[B] is false means nothing.

    Raises:
      ValueError: a selection that is none, or for a policy that takes none; shapes that
        disagree with the cache.
    """
    _check("attend", cache, q=q)
    step = plain_step("attend", q.shape[-1], window, scale, soft_cap)
    if selection is not None and not isinstance(selection, Selection):
        raise ValueError(
            f"attend(selection=...) takes what kvjax.select returns, got {short_repr(selection)}"
        )
    step = _with_sinks("attend", cache, replace(step, selection=selection), sinks)
    count = row_counts(q.shape[0], 1, None, active)
    out, cache, _ = run(_attend, cache, Query(q, step, count))
    return out, cache


def _update(cache: LayerCache, tokens: Tokens) -> tuple[None, LayerCache, None]:
    k = jnp.swapaxes(tokens.k, 1, 2)
    v = jnp.swapaxes(tokens.v, 1, 2)
    active = tokens.count > 0
    if tokens.flush:
        cache = flush_full(cache, active)
    assert tokens.step is not None
    state = cache.policy.update_for_step(cache.state, k, v, active, tokens.step)
    return None, replace(cache, state=state), None


def _select(cache: LayerCache, query: Query) -> tuple[None, LayerCache, Selection]:
    queries = group_queries(query.q[:, 0], cache.spec.kv_heads)
    return None, cache, unpack(cache.policy.select(cache.state, queries, query.step))


def _attend(cache: LayerCache, query: Query) -> tuple[Array, LayerCache, Info]:
    q = query.q
    assert query.count is not None
    queries = group_queries(q[:, 0], cache.spec.kv_heads)
    step = replace(query.step, active=query.count > 0)
    out, state, info = cache.policy.attend(cache.state, queries, step)
    out = out.astype(q.dtype).reshape(*q.shape[:-1], -1)
    return out, replace(cache, state=state), info


def _with_sinks(verb: str, cache: LayerCache, step: Step, sinks: ArrayLike | None) -> Step:
    """`step` with the sink logits f32[N] of a call, if any."""
    if sinks is None:
        return step
    spec = cache.spec
    return replace(step, sinks=sink_logits(verb, cache, sinks, spec.q_heads, spec.kv_heads))


def _check(verb: str, cache: LayerCache, **arrays: Array) -> None:
    """Raises ValueError for arrays that are not those of one token of each row of the cache."""
    check_layer_cache(verb, cache)
    sizes = check_dims("q BTND, k BTKD, v BTKE", cache.spec, **arrays)
    if sizes["T"] != 1:
        raise ValueError(
            f"{verb} takes one token of each row, got T={sizes['T']}; kvjax.attention reads a prompt"
        )
