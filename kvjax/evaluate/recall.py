"""Measures selectors on live queries and keys: compares what a cache reads with exact
attention.

A policy is driven through `kvjax.attention_info` itself: the keys of the context are stored as
a prompt, then each live query makes its decode step, and the same query attends to everything.
The queries are those of full attention (`kvjax.evaluate.capture`), so errors do not add up from
layer to layer.

Set recall alone misleads, as many tokens matter little. So four numbers are reported together:
set recall, the softmax mass on the tokens read, the error of the output, and the bytes read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import call, ops
from kvjax.attention import attention_info
from kvjax.cache.cache import LayerCache, init_layer
from kvjax.evaluate.capture import Live, adjacent
from kvjax.evaluate.store import Progress
from kvjax.numerics.partial import group_queries
from kvjax.numerics.selection import Selection, membership, reduce_scores, set_recall
from kvjax.policies import Info, PerLayer, Policy, Retrieval, Speculative, ZonedState
from kvjax.policies.policy import lowest_visible
from kvjax.policies.zones import Zoned
from kvjax.selectors import Selector
from kvjax.sharding.placement import Placement
from kvjax.spec import CacheSpec
from kvjax.steps import Tokens
from kvjax.stores.demotion import Fifo


@dataclass(frozen=True)
class Reads:
    """The tokens that a policy read at T live steps of L layers and B rows.

    Recall is NaN if there was nothing to select: a policy without a selector, or no tokens
    outside sink and local window. It is 0 if a selector could select and did not, and below 1
    if its pages cannot fill the budget.
    """

    lengths: np.ndarray  # i[T] tokens that each step's query sees
    recall: np.ndarray  # f[L, T, B, K or N] share of the exact top tokens, pooled as by the selector, that was selected
    # f[L, T, B, N] share of each query head's own exact top tokens that were selected
    head_recall: np.ndarray
    # f[L, T, B, N] share of softmax mass on the tokens read, sink and local window included
    mass: np.ndarray
    error: np.ndarray  # f[L, T, B, N] |out - exact out| / |exact out|
    attended: np.ndarray  # f[L, T, B, K] tokens whose keys and values were read
    # f[L, T, B] read in a step: keys, values, index and keys of pending tokens
    bytes: np.ndarray

    def row(self) -> dict[str, float]:
        """Means over everything, for a table."""
        return {
            field.name: mean_known(getattr(self, field.name))
            for field in fields(self)
            if field.name != "lengths"
        }

    def by_length(self) -> dict[int, slice]:
        """The steps of each run of adjacent positions, by the length at its end."""
        return {int(self.lengths[run.stop - 1]): run for run in adjacent(self.lengths)}


def reads(
    live: Live,
    policy: Policy | PerLayer | Sequence[Policy],
    *,
    top: int | None = None,
    prompt: int | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> Reads:
    """Drives `policy` through the live steps of all layers.

    Each run of adjacent steps starts from the context before it, stored as one prompt; or, with
    `prompt`, as a prompt of that many tokens and a second one with the rest, for selectors that
    learn from a prompt. `top` is the number of exact top tokens that recall counts; by default
    the budget without sink and local window, whether or not the selector's pages divide that
    number. `placement` splits the cache over devices, by whose way of selecting steps then read.
    `progress` is called with the runs of steps done, their number, and the layer.

    Cost: each step runs the policy and full attention once; memory holds the cache of one
    layer.

    Raises:
      ValueError: a policy that selects by the queries of a prompt (H2O, SnapKV and others that
        evict): they are not recorded.
    """
    found = []
    runs = live.runs()
    for i, layer in enumerate(live.layers):
        one = PerLayer.of(policy).policy(i)
        if one.observes:
            raise ValueError(
                f"{one} selects by the queries of a prompt, which live steps do not have"
            )
        empty = init_layer(one, layer.spec, placement)
        steps = []
        stored = 0
        base = empty
        for run in runs:
            start = int(live.positions[run.start])
            first = start if prompt is None else min(prompt, start)
            if first != stored:
                base = store_prompt(empty, layer.k, layer.v, 0, first)
                stored = first
            cache = (
                base if first == start else store_prompt(base, layer.k, layer.v, first, start)
            )
            q = jnp.moveaxis(layer.q[:, run], 1, 0)
            seen = _run(
                cache,
                q,
                layer.k,
                layer.v,
                start,
                scale=layer.scale,
                window=layer.window,
                top=top,
            )
            steps.append(jax.tree.map(np.asarray, seen))
            if progress is not None:
                progress(i * len(runs) + len(steps), len(live.layers) * len(runs), f"layer {i}")
        seen = jax.tree.map(lambda *parts: np.concatenate(parts), *steps)
        found.append(seen._replace(read=_bytes(one, layer.spec, seen)))
    whole: _Step = jax.tree.map(lambda *layers: np.stack(_same_heads(layers)), *found)
    return Reads(
        live.lengths,
        whole.recall,
        whole.head_recall,
        whole.mass,
        whole.error,
        whole.attended,
        whole.read,
    )


class _Step(NamedTuple):
    """Measurements of one step, or of T steps along a first axis."""

    recall: Any  # f32[B, K * H]
    head_recall: Any  # f32[B, N]
    mass: Any  # f32[B, N]
    error: Any  # f32[B, N]
    attended: Any  # f32[B, K]
    # f32[B, K] tokens read from the store, each query head's own selection counted
    fetched: Any
    stored: Any  # i32[B] tokens in the store
    pending: Any  # i32[B] tokens that are not indexed yet, whose keys were scored
    read: Any  # f32[B] bytes


@jax.jit
def store_prompt(
    cache: LayerCache, k: Array, v: Array, start: Array | int, stop: Array | int
) -> LayerCache:
    """Stores the tokens [start, stop) of k, v [B, K, S, D] as one chunk of a prompt, padded to
    S.
    """
    at = start + jnp.arange(k.shape[2], dtype=jnp.int32)
    kt, vt = (jnp.take(a, at, axis=2, mode="clip") for a in (k, v))
    count = jnp.full(k.shape[0], stop - start, jnp.int32)
    if cache.placement is not None:
        new = Tokens(jnp.swapaxes(kt, 1, 2), jnp.swapaxes(vt, 1, 2), count, flush=False)
        return call.run(_store, cache, new)[1]
    return replace(cache, state=cache.policy.prefill(cache.state, kt, vt, count))


def _store(layer: LayerCache, new: Tokens) -> tuple[None, LayerCache, tuple[()]]:
    """Stores a prompt in one device's part of a layer."""
    k, v = (jnp.swapaxes(a, 1, 2) for a in (new.k, new.v))
    state = layer.policy.prefill(layer.state, k, v, new.count)
    return None, replace(layer, state=state), ()


@partial(jax.jit, static_argnames=("scale", "window", "top"))
def _run(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    start: Array | int,
    *,
    scale: float,
    window: int | None,
    top: int | None,
) -> _Step:
    """Runs the steps of q [R, B, N, D] at positions start, start + 1, ...; k, v [B, K, S, D]
    are of the whole text.
    """
    policy = cache.policy
    spec = cache.spec
    B = cache.spec.batch

    def step(cache: Any, x: Any) -> tuple[Any, _Step]:
        qt, position = x
        kt, vt = (
            jnp.swapaxes(lax.dynamic_slice_in_dim(a, position, 1, axis=2), 1, 2) for a in (k, v)
        )
        out, cache, info = attention_info(
            cache, qt[:, None], kt, vt, scale=scale, window=window
        )
        assert info is not None
        logits, visible = exact_logits(qt, k, position, scale=scale, window=window)
        weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
        exact = jnp.einsum(
            "bkgs,bksd->bkgd", weights, v.astype(jnp.float32), precision="highest"
        )
        off = group_queries(out[:, 0].astype(jnp.float32), spec.kv_heads) - exact
        error = jnp.linalg.norm(off, axis=-1) / jnp.maximum(
            jnp.linalg.norm(exact, axis=-1), jnp.finfo(jnp.float32).tiny
        )
        none = jnp.full((B, spec.q_heads), jnp.nan, jnp.float32)
        seen = _Step(
            none,
            none,
            none,
            error.reshape(B, -1),
            info.attended,
            jnp.zeros_like(info.attended),
            0,
            0,
            0.0,
        )
        inner = _core(policy)
        state = cache.state.zones if isinstance(policy, Speculative) else cache.state
        if isinstance(inner, Retrieval):
            seen = _selected(inner, state, info, seen, logits, weights, visible, top)
        elif isinstance(inner, Zoned):  # reads everything
            stored = state.store.count
            fetched = jnp.broadcast_to(stored.astype(jnp.float32)[:, None], info.attended.shape)
            seen = seen._replace(fetched=fetched, stored=stored)
        stored, pending = (
            jnp.broadcast_to(jnp.asarray(a), B) for a in (seen.stored, seen.pending)
        )
        return cache, seen._replace(
            stored=stored, pending=pending, read=jnp.zeros(B, jnp.float32)
        )

    return lax.scan(step, cache, (q, start + jnp.arange(q.shape[0], dtype=jnp.int32)))[1]


def exact_logits(
    q: Array, k: Array, position: Array, *, scale: float, window: int | None = None
) -> tuple[Array, Array]:
    """f32[B, K, G, S] logits of q [B, N, D] at `position` with k [B, K, S, D], and bool[1, 1,
    1, S]: which it sees.
    """
    qg = group_queries(q, k.shape[1]).astype(jnp.float32)
    logits = (
        jnp.einsum("bkgd,bksd->bkgs", qg, k.astype(jnp.float32), precision="highest") * scale
    )
    slot = jnp.arange(k.shape[2], dtype=jnp.int32)
    return logits, ((slot <= position) & (slot >= lowest_visible(position, window)))[
        None, None, None
    ]


def _selected(
    policy: Retrieval,
    st: ZonedState,
    info: Info,
    seen: _Step,
    logits: Array,
    weights: Array,
    visible: Array,
    top: int | None,
) -> _Step:
    """Recall and mass of what a retrieval selected."""
    B, K, G, S = logits.shape
    assert info.selection is not None
    assert info.positions is not None
    slots, valid = info.selection
    got = Selection(policy.positions(st, slots), valid)
    read = membership(Selection(jnp.maximum(info.positions, 0), info.positions >= 0), S)

    slot = jnp.arange(S, dtype=jnp.int32)[None, None, None]
    free = (
        visible
        & (slot >= policy.sink)
        & (slot < (st.length - policy.local)[:, None, None, None])
    )
    count = min(policy.budget - policy.sink - policy.local if top is None else top, S)
    pooled = reduce_scores([(logits, free)], policy.selector.group_reduce)
    wanted, own = (ops.top_k(scores, free, count) for scores in (pooled, logits))

    def recall(wanted: Selection) -> Array:
        return jnp.where(jnp.any(wanted.valid, axis=-1), set_recall(got, wanted, S), jnp.nan)

    return seen._replace(
        recall=recall(wanted).reshape(B, -1),
        head_recall=jnp.broadcast_to(recall(own), (B, K, G)).reshape(B, -1),
        mass=jnp.sum(jnp.where(read, weights, 0.0), axis=-1).reshape(B, -1),
        fetched=jnp.sum(valid & (slots < st.store.slots), axis=(2, 3), dtype=jnp.float32),
        stored=st.store.count,
        pending=jnp.maximum(st.recent.count - policy.local, 0),
    )


def _core(policy: Policy) -> Policy:
    """The policy that stores the tokens: the one that a `Speculative` wraps, or `policy`
    itself.
    """
    return policy.retrieval if isinstance(policy, Speculative) else policy


def _bytes(policy: Policy, spec: CacheSpec, seen: _Step) -> np.ndarray:
    """Bytes f[T, B] that steps read: keys and values of the tokens read, as stored, the index,
    and pending keys.
    """
    policy = _core(policy)
    row = 2 * spec.head_dim * np.dtype(spec.dtype).itemsize
    if not isinstance(policy, Zoned):
        return seen.attended.sum(axis=-1) * row
    per_head = isinstance(policy, Retrieval) and policy.selector.group_reduce == "per_head"
    exact = (spec.group if per_head else 1) * seen.attended - seen.fetched
    stored = policy.store.bytes_per_token(spec) / spec.kv_heads
    values = exact.sum(axis=-1) * row + seen.fetched.sum(axis=-1) * stored
    if not isinstance(policy, Retrieval):
        return values
    return (
        values
        + policy.selector.bytes_read(spec, seen.stored)
        + seen.pending * (spec.kv_heads * row / 2)
    )


def _same_heads(layers: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Layers cut to one shape, for stacking: a layer that selects nothing has NaN for each
    query head.
    """
    heads = min(a.shape[-1] for a in layers)
    return (
        [a if a.shape[-1] == heads else a[..., :heads] for a in layers]
        if layers[0].ndim == 3
        else layers
    )


def known_mean(a: np.ndarray) -> float:
    """The mean of the numbers that are not NaN; NaN if there are none."""
    known = a[~np.isnan(a)]
    return float(known.mean()) if known.size else float("nan")


def mean_known(a: np.ndarray) -> float:
    """`known_mean` to five digits, for tables and files."""
    return round(known_mean(a), 5)


def retrieval(selector: Selector, budget: int, *, leave: int = 32) -> Retrieval:
    """A `Retrieval` for measurements: tokens are indexed in chunks of `leave`, pages as soon as
    they are full.
    """
    demote = Fifo(leave=leave if selector.unit == 1 else selector.unit)
    return Retrieval(
        selector=selector, budget=budget, sink=4, local=16, demote=demote, dense_below=0
    )
