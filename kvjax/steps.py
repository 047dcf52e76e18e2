"""A decode step of a layer in three calls: store the new token, select, attend.

    cache = kvjax.update(cache, k, v)
    selection = kvjax.select(cache, q)
    out, cache = kvjax.attend(cache, q, selection)

Together they do what `kvjax.attention` does. In between you may look at the selection, change
it, or take another one.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from kvjax.attention import plain_step, row_counts, run, sink_logits
from kvjax.cache.cache import LayerCache, check_layer_cache
from kvjax.cache.flushing import flush_full
from kvjax.numerics.partial import group_queries
from kvjax.numerics.selection import Selection, unpack
from kvjax.policies import Info, Step
from kvjax.validation import check_dims, check_flags, shown


def update(
    cache: LayerCache,
    k: Array,
    v: Array,
    *,
    active: ArrayLike | None = None,
    flush: bool = True,
) -> LayerCache:
    """Stores a token of each row, with keys and values k, v [B, 1, K, D]; rows where `active`
    is false store none.

    `flush` moves tokens out of full recent blocks first; with False, call `kvjax.flush` before.

    Raises:
      ValueError: shapes that disagree with each other or with the cache.
    """
    _check("update", cache, k=k, v=v)
    check_flags("update", flush=flush)
    count = row_counts(k.shape[0], 1, None, active)
    return run(_update, cache, {"k": k, "v": v, "count": count}, flush=flush)[1]


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
    return run(
        _select,
        cache,
        {"q": q},
        step=plain_step("select", q.shape[-1], window, scale, soft_cap),
    )[2]


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
            f"attend(selection=...) takes what kvjax.select returns, got {shown(selection)}"
        )
    heads = (
        None
        if sinks is None
        else sink_logits("attend", cache, sinks, cache.spec.q_heads, cache.spec.kv_heads)
    )
    count = row_counts(q.shape[0], 1, None, active)
    operands = {"q": q, "count": count, "selection": selection, "sinks": heads}
    return run(_attend, cache, operands, step=step)[:2]


def _update(
    cache: LayerCache, k: Array, v: Array, count: Array, *, flush: bool
) -> tuple[None, LayerCache, None]:
    k, v = (jnp.swapaxes(a, 1, 2) for a in (k, v))
    state = (flush_full(cache, count > 0) if flush else cache).state
    return (
        None,
        dataclasses.replace(cache, state=cache.policy.update(state, k, v, count > 0)),
        None,
    )


def _select(cache: LayerCache, q: Array, *, step: Step) -> tuple[None, LayerCache, Selection]:
    queries = group_queries(q[:, 0], cache.spec.kv_heads)
    return None, cache, unpack(cache.policy.select(cache.state, queries, step))


def _attend(
    cache: LayerCache,
    q: Array,
    count: Array,
    selection: Selection | None,
    sinks: Array | None,
    *,
    step: Step,
) -> tuple[Array, LayerCache, Info]:
    queries = group_queries(q[:, 0], cache.spec.kv_heads)
    step = dataclasses.replace(step, active=count > 0, selection=selection, sinks=sinks)
    out, state, info = cache.policy.attend(cache.state, queries, step)
    return (
        out.astype(q.dtype).reshape(*q.shape[:-1], -1),
        dataclasses.replace(cache, state=state),
        info,
    )


def _check(verb: str, cache: LayerCache, **arrays: Array) -> None:
    """Raises ValueError for arrays that are not those of one token of each row of the cache."""
    check_layer_cache(verb, cache)
    sizes = check_dims("q BTND, k BTKD, v BTKE", cache.spec, **arrays)
    if sizes["T"] != 1:
        raise ValueError(
            f"{verb} takes one token of each row, got T={sizes['T']}; kvjax.attention reads a prompt"
        )
