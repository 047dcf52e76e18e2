"""Selectors measured on live queries and keys: what a cache read, beside what exact attention would have.

A policy is driven through `kvjax.attention_info` itself: the keys of the context are stored as a prompt stores them,
then each live query makes its decode step, and the same query attends to everything. So what is measured is what the
cache does, demotion, pending tokens, index and all, for any selector, store and schedule; nothing is simulated. The
queries are those of full attention (`kvjax.evaluate.live`), so errors do not add up from layer to layer.

Set recall alone misleads: many tokens matter little, and a choice may miss half of the set and hold 90 % of the mass.
So four numbers go together: set recall, the mass that the tokens read hold, the error of the output, and bytes read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import ops
from kvjax.attention import LayerCache, PerLayer, attention_info, init_layer
from kvjax.caches import Info, Observer, Policy, Retrieval, RetrievalState
from kvjax.caches.policy import lowest_visible
from kvjax.demotion import Fifo
from kvjax.evaluate.live import Live, adjacent
from kvjax.layouts import whole_units
from kvjax.partial import group_queries
from kvjax.rotate import SUBSPACE
from kvjax.selection import GROUP_REDUCES, Selection, membership, reduce_scores, set_recall
from kvjax.selectors import All, CentrePages, Exact, Fier, MinMaxPages, Paris, Selector
from kvjax.spec import CacheSpec


@dataclass(frozen=True)
class Reads:
    """What a policy read at T live steps of L layers and B rows. NaN where a policy chooses nothing."""

    lengths: np.ndarray  # i[T] tokens that each step's query sees
    recall: (
        np.ndarray
    )  # f[L, T, B, K or N] share of the exact top tokens that were chosen, pooled as the selector pools
    head_recall: np.ndarray  # f[L, T, B, N] share of each query head's own exact top tokens that were chosen
    mass: np.ndarray  # f[L, T, B, N] share of softmax mass that the tokens read hold, sink and local window included
    error: np.ndarray  # f[L, T, B, N] |out - exact out| / |exact out|
    attended: np.ndarray  # f[L, T, B, K] tokens whose keys and values were read
    bytes: np.ndarray  # f[L, T, B] read in a step: keys, values and index

    def row(self) -> dict[str, float]:
        """Means over everything, for a table."""
        return {field.name: _mean(getattr(self, field.name)) for field in fields(self) if field.name != "lengths"}

    def summary(self) -> dict[str, Any]:
        """Means as JSON: over everything, and by layer, by layer and head, by length."""
        kinds = ("recall", "head_recall", "mass", "error")
        by_length = {}
        for length, steps in self.by_length().items():
            by_length[length] = {kind: _mean(getattr(self, kind)[:, steps]) for kind in (*kinds, "attended", "bytes")}
        return {
            "mean": self.row(),
            "by_layer": {kind: [_mean(a) for a in getattr(self, kind)] for kind in kinds},
            "by_layer_and_head": {
                kind: [[_mean(a[..., head]) for head in range(a.shape[-1])] for a in getattr(self, kind)]
                for kind in ("head_recall", "mass")
            },
            "by_length": by_length,
        }

    def by_length(self) -> dict[int, slice]:
        """The steps of each run of adjacent positions, by the length at its end."""
        return {int(self.lengths[run.stop - 1]): run for run in adjacent(self.lengths)}


def reads(
    live: Live,
    policy: Policy | PerLayer,
    *,
    top: int | None = None,
    prompt: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Reads:
    """Drives `policy` through the live steps of all layers.

    Each run of adjacent steps starts from the context before it, stored as one prompt; or, with `prompt`, as that many
    tokens first and the rest after, for selectors that learn from a prompt. `top` is how many exact tokens recall asks
    for; by default as many as the policy chooses beside sink and local window.

    Cost: of each step, one of the policy and one of full attention; holds the cache of one layer.

    Raises:
      ValueError: a policy that chooses by the queries of a prompt (H2O, SnapKV and others that evict): they are not
        recorded.
    """
    found = []
    runs = live.runs()
    for i, layer in enumerate(live.layers):
        one = policy.policy(i) if isinstance(policy, PerLayer) else policy
        if isinstance(one, Observer):
            raise ValueError(f"{one} chooses by the queries of a prompt, which live steps do not have")
        steps, held, base = [], 0, init_layer(one, layer.spec)
        for run in runs:
            start = int(live.positions[run.start])
            first = start if prompt is None else min(prompt, start)
            if first != held:
                base, held = _store(init_layer(one, layer.spec), layer.k, layer.v, 0, first), first
            cache = base if first == start else _store(base, layer.k, layer.v, first, start)
            q = jnp.moveaxis(layer.q[:, run], 1, 0)
            seen = _run(cache, q, layer.k, layer.v, start, scale=layer.scale, window=layer.window, top=top)
            steps.append(jax.tree.map(np.asarray, seen))
            if progress is not None:
                progress(i * len(runs) + len(steps))
        seen = jax.tree.map(lambda *parts: np.concatenate(parts), *steps)
        found.append(seen._replace(read=_bytes(one, layer.spec, seen)))
    whole: _Step = jax.tree.map(lambda *layers: np.stack(_same_heads(layers)), *found)
    return Reads(live.lengths, whole.recall, whole.head_recall, whole.mass, whole.error, whole.attended, whole.read)


class _Step(NamedTuple):
    """One step, or T of them in front."""

    recall: Any  # f32[B, K * H]
    head_recall: Any  # f32[B, N]
    mass: Any  # f32[B, N]
    error: Any  # f32[B, N]
    attended: Any  # f32[B, K]
    fetched: Any  # f32[B, K] tokens read from the store, each query head's own choice counted
    held: Any  # i32[B] tokens in the store
    read: Any  # f32[B] bytes


@jax.jit
def _store(cache: LayerCache, k: Array, v: Array, start: Array | int, stop: Array | int) -> LayerCache:
    """Stores the tokens [start, stop) of k, v [B, K, S, D] as one chunk of a prompt, padded to S."""
    at = start + jnp.arange(k.shape[2])
    kt, vt = (jnp.swapaxes(jnp.take(a, at, axis=2, mode="clip"), 1, 2) for a in (k, v))
    count = jnp.full(k.shape[0], stop - start, jnp.int32)
    return replace(cache, state=cache.policy.prefill(cache.state, kt, vt, count))


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
    """q [R, B, N, D] of steps at positions start, start + 1, ...; k, v [B, K, S, D] of the whole text."""
    policy, spec, B = cache.policy, cache.spec, cache.spec.batch

    def step(cache: Any, x: Any) -> tuple[Any, _Step]:
        qt, position = x
        kt, vt = (jnp.swapaxes(lax.dynamic_slice_in_dim(a, position, 1, axis=2), 1, 2) for a in (k, v))
        out, cache, info = attention_info(cache, qt[:, None], kt, vt, scale=scale, window=window)
        assert info is not None
        logits, visible = exact_logits(qt, k, position, scale=scale, window=window)
        weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
        exact = jnp.einsum("bkgs,bksd->bkgd", weights, v.astype(jnp.float32), precision="highest")
        off = group_queries(out[:, 0].astype(jnp.float32), spec.kv_heads) - exact
        error = jnp.linalg.norm(off, axis=-1) / jnp.maximum(
            jnp.linalg.norm(exact, axis=-1), jnp.finfo(jnp.float32).tiny
        )
        none = jnp.full((B, spec.q_heads), jnp.nan)
        seen = _Step(none, none, none, error.reshape(B, -1), info.attended, jnp.zeros_like(info.attended), 0, 0.0)
        if isinstance(policy, Retrieval):
            seen = _chosen(policy, cache.state, info, seen, logits, weights, visible, top)
        return cache, seen._replace(held=jnp.broadcast_to(jnp.asarray(seen.held), B), read=jnp.zeros(B))

    return lax.scan(step, cache, (q, start + jnp.arange(q.shape[0])))[1]


def exact_logits(
    q: Array, k: Array, position: Array, *, scale: float, window: int | None = None
) -> tuple[Array, Array]:
    """f32[B, K, G, S] logits of q [B, N, D] at `position` with k [B, K, S, D], and bool[1, 1, 1, S]: which it sees."""
    qg = group_queries(q, k.shape[1]).astype(jnp.float32)
    logits = jnp.einsum("bkgd,bksd->bkgs", qg, k.astype(jnp.float32), precision="highest") * scale
    slot = jnp.arange(k.shape[2])
    return logits, ((slot <= position) & (slot >= lowest_visible(position, window)))[None, None, None]


def _chosen(
    policy: Retrieval,
    st: RetrievalState,
    info: Info,
    seen: _Step,
    logits: Array,
    weights: Array,
    visible: Array,
    top: int | None,
) -> _Step:
    """Recall and mass of what a retrieval chose. Under a `Speculative` schedule the mass leaves out the one token that
    is attended beside what was reused."""
    B, K, G, S = logits.shape
    held = st.store.count
    if info.selection is None:  # it reads all
        return seen._replace(fetched=jnp.broadcast_to(held.astype(jnp.float32)[:, None], (B, K)), held=held)
    slots, valid = info.selection
    past = slots >= st.store.slots
    in_store, in_recent = (a[:, None, None, None] for a in (st.offset_store, st.offset_recent))
    got = Selection(jnp.where(past, slots - st.store.slots + in_recent, slots + in_store), valid)

    slot = jnp.arange(S)[None, None, None]
    free = visible & (slot >= in_store) & (slot < (st.length - policy.local)[:, None, None, None])
    assert policy.budget is not None
    count = whole_units(policy.budget - policy.sink - policy.local, policy.selector.unit) if top is None else top
    count = min(count, S)
    pooled = reduce_scores([(logits, free)], policy.selector.group_reduce)
    wanted, own = (ops.top_k(scores, free, count) for scores in (pooled, logits))
    attended = membership(got, S) | (visible & ~free)
    return seen._replace(
        recall=set_recall(got, wanted, S).reshape(B, -1),
        head_recall=jnp.broadcast_to(set_recall(got, own, S), (B, K, G)).reshape(B, -1),
        mass=jnp.sum(jnp.where(attended, weights, 0.0), axis=-1).reshape(B, -1),
        fetched=jnp.sum(valid & ~past, axis=(2, 3), dtype=jnp.float32),
        held=held,
    )


def _bytes(policy: Policy, spec: CacheSpec, seen: _Step) -> np.ndarray:
    """f[T, B]: keys and values of what was read, as stored, and the index: all of it, or for Paris the signs of all
    keys and the codes of the candidates."""
    row = 2 * spec.head_dim * np.dtype(spec.dtype).itemsize
    if not isinstance(policy, Retrieval):
        return seen.attended.sum(axis=-1) * row
    selection = 1 if isinstance(policy.selector, All) or policy.selector.group_reduce != "per_head" else spec.group
    exact = selection * seen.attended - seen.fetched
    stored = policy.store.bytes_per_token(spec) / spec.kv_heads
    values = exact.sum(axis=-1) * row + seen.fetched.sum(axis=-1) * stored
    if isinstance(policy.selector, Paris):
        signs, codes = spec.head_dim / SUBSPACE, spec.head_dim * 6 / SUBSPACE
        picked = np.minimum(policy.selector.room(spec.capacity), seen.held)
        return values + spec.kv_heads * (seen.held * signs + picked * codes)
    return values + seen.held * policy.selector.bytes_per_token(spec)


def _same_heads(layers: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Layers of one shape, for stacking: a layer that chooses nothing has NaN for each query head."""
    heads = min(a.shape[-1] for a in layers)
    return [a if a.shape[-1] == heads else a[..., :heads] for a in layers] if layers[0].ndim == 3 else layers


def _mean(a: np.ndarray) -> float:
    known = a[~np.isnan(a)]
    return round(float(known.mean()), 5) if known.size else float("nan")


# ------------------------------------------------------------------------------------------------- what to put beside


def selectors(budget: int) -> dict[str, Policy]:
    """All selectors of kvjax, and the exact choice, at one budget in every layer, with 4 sink tokens and the newest 16
    always read.

    Tokens are indexed in chunks of 32 or as pages, so that nearly all of a choice is the index's.
    """
    return {
        "Exact": _retrieval(Exact(), budget),
        "Fier": _retrieval(Fier(), budget),
        "Paris": _retrieval(Paris(), budget),
        "MinMaxPages 16": _retrieval(MinMaxPages(page=16), budget),
        "MinMaxPages 32": _retrieval(MinMaxPages(page=32), budget),
        "CentrePages 32": _retrieval(CentrePages(page=32), budget),
    }


def groups(budget: int, sizes: Sequence[int] = (32, 64, 128, 256)) -> dict[str, Policy]:
    """FIER by group size beside Quest, each query head choosing for itself as in the papers (FIER, Fig. 6, Table 4).

    Chunks of FIER have the size of the largest group.
    """
    fier = {f"Fier g={g}": _retrieval(Fier(group=g, group_reduce="per_head"), budget, leave=max(sizes)) for g in sizes}
    return {**fier, "Quest": _retrieval(MinMaxPages(page=16, group_reduce="per_head"), budget)}


def pools(budget: int) -> dict[str, Policy]:
    """FIER and Quest under each rule of pooling over a GQA group, and with a choice for each query head."""
    made: dict[str, Policy] = {}
    for group_reduce in GROUP_REDUCES:
        rule: Any = group_reduce
        made[f"Fier {group_reduce}"] = _retrieval(Fier(group_reduce=rule), budget)
        made[f"Quest {group_reduce}"] = _retrieval(MinMaxPages(page=16, group_reduce=rule), budget)
    return made


def _retrieval(selector: Selector, budget: int, *, leave: int = 32) -> Retrieval:
    """Pages are indexed as soon as they are full: tokens that wait compete by exact scores, which lie below the bounds
    of pages, so a Quest that lets many wait loses its newest tokens."""
    demote = Fifo(leave=leave if selector.unit == 1 else selector.unit)
    return Retrieval(selector=selector, budget=budget, sink=4, local=16, demote=demote, dense_below=0)


def compare(
    live: Live,
    policies: Mapping[str, Policy | PerLayer],
    *,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> dict[str, Reads]:
    """`reads` of each policy by name."""
    found = {}
    for name, policy in policies.items():
        if progress is not None:
            progress(name)
        found[name] = reads(live, policy, **settings)
    return found


# ------------------------------------------------------------------------------------------ queries of adjacent steps


@dataclass(frozen=True)
class Turns:
    """How far queries turn from step to step, as FreeKV's correction sees it."""

    cosines: np.ndarray  # f[L, T, B, K] mean over the group of cosine(q_t, q_{t-1}), for each pair of adjacent steps

    def corrected(self, tau: float) -> tuple[float, float]:
        """Shares of (step, kv head) below `tau`, and of (step, layer) where any head is: FreeKV then selects anew."""
        below = self.cosines < tau
        return float(below.mean()), float(below.any(axis=-1).mean())

    def summary(self, taus: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)) -> dict[str, Any]:
        """Quantiles by layer, and corrected shares by tau, as JSON."""
        at = (0.05, 0.25, 0.5, 0.75, 0.95)
        quantiles = np.quantile(self.cosines.reshape(len(self.cosines), -1), at, axis=-1).T
        return {
            "quantiles": list(at),
            "cosine_by_layer": quantiles.round(5).tolist(),
            "mean_by_layer": [_mean(layer) for layer in self.cosines],
            "corrected_heads": {str(tau): round(self.corrected(tau)[0], 5) for tau in taus},
            "corrected_steps": {str(tau): round(self.corrected(tau)[1], 5) for tau in taus},
            "corrected_heads_by_layer": {
                str(tau): [round(float((layer < tau).mean()), 5) for layer in self.cosines] for tau in taus
            },
        }


def turns(live: Live) -> Turns:
    """The cosine of each live query to the one of the step before, by kv head.

    Raises:
      ValueError: no two recorded steps are adjacent.
    """
    first = np.flatnonzero(np.diff(live.positions) == 1)
    if not len(first):
        raise ValueError("turns needs steps at adjacent positions; capture with steps=2 or more")
    cosines = []
    for layer in live.layers:
        B = layer.q.shape[0]
        q = np.asarray(layer.q, np.float32)
        q = q / np.maximum(np.linalg.norm(q, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
        each = np.sum(q[:, first] * q[:, first + 1], axis=-1)  # [B, T, N]
        grouped = each.reshape(B, len(first), layer.k.shape[1], -1).mean(axis=-1)
        cosines.append(np.clip(np.moveaxis(grouped, 1, 0), -1.0, 1.0))
    return Turns(np.stack(cosines))
