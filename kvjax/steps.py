"""A decode step of a layer in three calls: store the new token, select, attend.

    cache = kvjax.update(cache, k, v)
    selection = kvjax.select(cache, q)
    out, cache = kvjax.attend(cache, q, selection)

Together they do what `kvjax.attention` does. In between you may look at the selection, change it, or take another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from kvjax.attention import capped, row_counts, sink_logits
from kvjax.cache.cache import LayerCache, as_whole, check_layer_cache, part_of, placement_of, specs_of
from kvjax.cache.flushing import flush_full
from kvjax.numerics.partial import group_queries
from kvjax.numerics.selection import Selection, unpack
from kvjax.policies import Step
from kvjax.sharding.placement import run_on_parts, to_context
from kvjax.spec import require_int
from kvjax.validation import check_dims, check_flags, check_floats, finite_number, shown

AXES = {  # that a placement splits
    **{"q": "BTN", "k": "BTN", "v": "BTN", "out": "BTN"},
    **{"count": "B", "selection": "BK", "sinks": "KG"},
}


def update(cache: LayerCache, k: Array, v: Array, *, active: ArrayLike | None = None, flush: bool = True) -> LayerCache:
    """Stores a token of each row, with keys and values k, v [B, 1, K, D]; rows where `active` is false store none.

    `flush` moves tokens out of full recent blocks first; with False, call `kvjax.flush` before.

    Raises:
      ValueError: shapes that disagree with each other or with the cache.
    """
    _check("update", cache, k=k, v=v)
    check_flags("update", flush=flush)
    count = row_counts(k.shape[0], 1, None, active)
    return _run(_update, cache, {"k": k, "v": v, "count": count}, {}, flush=flush)[1]


def select(
    cache: LayerCache,
    q: Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Selection:
    """The slots that a step with queries q [B, 1, N, D] of each row's newest token attends to, besides the tokens that
    every step attends to.

    Nothing is read but the index. `window`, `scale` and `soft_cap` are as in `kvjax.attention`.

    Raises:
      ValueError: a policy that selects nothing, because its steps attend to all that it keeps (`Full`, `Compressed`,
        `Evicting`) or to what another layer selected (`Follower`); shapes that disagree with the cache.
    """
    _check("select", cache, q=q)
    by = _settings("select", q, window, scale, soft_cap)
    found, _ = _run(_select, cache, {"q": q}, {"selection": Selection(q, q)}, **by)
    return found["selection"]


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
    """Attends with q [B, 1, N, D], the queries of each row's newest token, to `selection` and to the tokens that every
    step attends to: out [B, 1, N, D], and the cache.

    None selects as `select` does, or attends to everything if the policy selects nothing. A selection of another layer
    serves too, if both layers have zones of equal sizes (`Follower`). The output of rows where `active` bool[B] is
    false means nothing.

    Raises:
      ValueError: a selection that is none, or for a policy that takes none; shapes that disagree with the cache.
    """
    _check("attend", cache, q=q)
    by = _settings("attend", q, window, scale, soft_cap)
    if selection is not None and not isinstance(selection, Selection):
        raise ValueError(f"attend(selection=...) takes what kvjax.select returns, got {shown(selection)}")
    heads = None if sinks is None else sink_logits("attend", cache, sinks, cache.spec.q_heads, cache.spec.kv_heads)
    count = row_counts(q.shape[0], 1, None, active)
    operands = {"q": q, "count": count, "selection": selection, "sinks": heads}
    found, cache = _run(_attend, cache, operands, {"out": q}, **by)
    return found["out"], cache


def _update(cache: LayerCache, k: Array, v: Array, count: Array, *, flush: bool) -> tuple[dict[str, Any], LayerCache]:
    k, v = (jnp.swapaxes(a, 1, 2) for a in (k, v))
    state = (flush_full(cache, count > 0) if flush else cache).state
    return {}, dataclasses.replace(cache, state=cache.policy.update(state, k, v, count > 0))


def _select(cache: LayerCache, q: Array, *, step: Step) -> tuple[dict[str, Any], LayerCache]:
    queries = group_queries(q[:, 0], cache.spec.kv_heads)
    return {"selection": unpack(cache.policy.select(cache.state, queries, step))}, cache


def _attend(
    cache: LayerCache, q: Array, count: Array, selection: Selection | None, sinks: Array | None, *, step: Step
) -> tuple[dict[str, Any], LayerCache]:
    queries = group_queries(q[:, 0], cache.spec.kv_heads)
    step = dataclasses.replace(step, active=count > 0, selection=selection, sinks=sinks)
    out, state, _ = cache.policy.attend(cache.state, queries, step)
    return {"out": out.astype(q.dtype).reshape(*q.shape[:-1], -1)}, dataclasses.replace(cache, state=state)


def _run(
    verb: Callable[..., Any], cache: LayerCache, operands: dict[str, Any], gives: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], LayerCache]:
    """Calls `verb`; if the cache has a placement, each device calls it for its own rows and heads."""
    if cache.placement is None:
        return verb(cache, **operands, **settings)
    return _run_on_parts(verb, cache, operands, gives, **settings)


@partial(jax.jit, static_argnums=0, static_argnames=("flush", "step"), inline=True)
def _run_on_parts(
    verb: Callable[..., Any], cache: LayerCache, operands: dict[str, Any], gives: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], LayerCache]:
    placement, state = placement_of(cache), specs_of(cache)

    def split(named: dict[str, Any]) -> dict[str, Any]:
        specs = {name: placement.spec(AXES[name]) for name in named}
        return {name: jax.tree.map(lambda _, own=specs[name]: own, tree) for name, tree in named.items()}

    def local(state: Any, operands: dict[str, Any]) -> Any:
        found, mine = verb(part_of(cache, state), **operands, **settings)
        return found, as_whole(cache, mine.state)

    out_specs = split(gives)
    found, new_state = run_on_parts(
        placement, local, (state, split(operands)), (out_specs, state), cache.state, operands
    )
    return jax.tree.map(to_context, found, out_specs), dataclasses.replace(cache, state=new_state)


def _check(verb: str, cache: LayerCache, **arrays: Array) -> None:
    """Raises ValueError for arrays that are not those of one token of each row of the cache."""
    check_floats(**arrays)
    check_layer_cache(verb, cache)
    spec = cache.spec
    known = {"B": spec.batch, "N": spec.q_heads, "K": spec.kv_heads, "D": spec.head_dim, "E": spec.value_size}
    sizes = check_dims("q BTND, k BTKD, v BTKE", known, **arrays)
    if sizes["T"] != 1:
        raise ValueError(f"{verb} takes one token of each row, got T={sizes['T']}; kvjax.attention reads a prompt")


def _settings(verb: str, q: Array, window: int | None, scale: float | None, soft_cap: float | None) -> dict[str, Step]:
    if window is not None:
        require_int(f"{verb}(window=...)", window, at_least=1)
    factor = q.shape[-1] ** -0.5 if scale is None else finite_number(f"{verb}(scale=...)", scale)
    return {"step": Step(factor if soft_cap is None else capped(verb, factor, soft_cap), window)}
