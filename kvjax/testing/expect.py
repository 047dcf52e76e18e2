"""What a law compares: attention in numpy, the tokens as a policy keeps them, and what of a state must agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention import LayerCache
from kvjax.caches import EvictingState, Info, Policy, Retrieval, RetrievalState
from kvjax.memory import to_device
from kvjax.spec import CacheSpec


def tolerance(spec: CacheSpec) -> float:
    """Largest error of an attention output over values of order 1: f32 sums, or weights rounded to 16 bits."""
    return {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[jnp.dtype(spec.dtype).name]


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of q [N, D] over k, v [S, K, D] in float64, a head at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[0] // k.shape[1]
    out = np.zeros_like(q)
    for n in range(q.shape[0]):
        logits = k[:, n // group] @ q[n] / np.sqrt(q.shape[1])
        weights = np.exp(logits - logits.max())
        out[n] = weights @ v[:, n // group] / weights.sum()
    return out


_decode = jax.jit(lambda store, k, v: store.decoded(k, v), static_argnums=0)


def zones(policy: Retrieval, spec: CacheSpec, held: int) -> tuple[list[list[int]], list[int]]:
    """Positions of the chunks of the history and of the recent block, in order, of a flushed row of `held` tokens."""
    leaving, staying = policy.demote.leaving(policy.local), policy.demote.staying(policy.local)
    most = jax.eval_shape(partial(policy.init, spec)).store.slots // policy.demote.leave
    chunks: list[list[int]] = []
    block: list[int] = []
    for position in range(policy.sink, held):
        block.append(position)
        if len(block) == len(leaving) + len(staying) and len(chunks) < most:
            chunks.append([block[i] for i in leaving])
            block = [block[i] for i in staying]
    return chunks, block


def as_stored(
    policy: Policy, spec: CacheSpec, k: np.ndarray, v: np.ndarray, held: int
) -> tuple[np.ndarray, np.ndarray]:
    """A row's k, v [S, K, D] as the policy gives them back when it holds the first `held`; later ones are exact."""
    if not isinstance(policy, Retrieval):
        return k, v
    k, v = k.astype(np.float32), v.astype(np.float32)
    for chunk in zones(policy, spec, held)[0]:
        heads_first = (np.swapaxes(a[chunk], 0, 1)[None] for a in (k, v))
        k[chunk], v[chunk] = (np.swapaxes(np.asarray(a)[0], 0, 1) for a in _decode(policy.store, *heads_first))
    return k, v


def assert_close(got: np.ndarray, want: np.ndarray, spec: CacheSpec, what: str) -> None:
    assert np.isfinite(got).all(), f"{what}: not finite"
    error = float(np.max(np.abs(got - want), initial=0.0))
    assert error <= tolerance(spec), f"{what}: differs by {error:.2e}, allowed {tolerance(spec):.0e}"


def assert_same(got: Any, want: Any, what: str) -> None:
    """Equal to the bit."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(want), strict=True)
    for (path, a), (path_wanted, b) in pairs:
        assert path == path_wanted, f"{what}: {path} is not {path_wanted}"
        equal = np.array_equal(np.asarray(a), np.asarray(b), equal_nan=jnp.issubdtype(a.dtype, jnp.floating))
        assert equal, f"{what}: {jax.tree_util.keystr(path)} differs"


def assert_attended(info: Info, want: np.ndarray) -> None:
    """Every head of a row attended to `want` i[B] tokens; the mean over a group's own choices is rounded."""
    got = np.asarray(info.attended)
    assert np.allclose(got, want[:, None], rtol=1e-6, atol=0), f"attended to {got.tolist()}, not {want.tolist()}"


def held_positions(cache: LayerCache) -> list[list[list[int]]]:
    """Positions of the tokens that each row and kv head of a policy that evicts holds, by slot."""
    st = cache.state
    return [
        [head[:count].tolist() for head in row]
        for row, count in zip(np.asarray(st.position), np.asarray(st.tokens.count), strict=True)
    ]


def valid_part(cache: LayerCache, spec: CacheSpec) -> list[Any]:
    """The state with zeros in every slot past count, as leaves; what two caches that hold the same must agree on.

    Without what a schedule remembers of the last step: a prompt leaves none. Slots that hold a bag, as those of a
    policy that evicts, in order of position.
    """
    st = cache.state
    if isinstance(st, RetrievalState):
        cache = dataclasses.replace(cache, state=dataclasses.replace(st, schedule=()))
    if isinstance(st, EvictingState):
        used = jnp.arange(st.tokens.slots)[None] < st.tokens.count[:, None]
        order = jnp.argsort(jnp.where(used[:, None], st.position, spec.capacity), axis=-1)

        def sort(leaf: Array) -> Array:
            if leaf.ndim < 3:
                return leaf
            return jnp.take_along_axis(leaf, order.reshape(*order.shape, *(1,) * (leaf.ndim - 3)), axis=2)

        cache = dataclasses.replace(cache, state=jax.tree.map(sort, st))
    return jax.tree.leaves(_map_slots(cache, spec, lambda leaf, used: jnp.where(used, leaf, jnp.zeros_like(leaf))))


def poison(cache: LayerCache, spec: CacheSpec) -> Any:
    """The state with every slot past count spoiled: floats NaN but values 1e4, codes of all ones."""

    def spoil(leaf: Array, used: Array, is_value: bool) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.where(used, leaf, jnp.asarray(1e4 if is_value else jnp.nan, leaf.dtype))
        return jnp.where(used, leaf, jnp.asarray(jnp.iinfo(leaf.dtype).max, leaf.dtype))

    return _map_slots(cache, spec, spoil, values=True)


def _map_slots(cache: LayerCache, spec: CacheSpec, change: Callable[..., Array], values: bool = False) -> Any:
    """Applies change(leaf, used[, is_value]) to each leaf with slots on axis 2; `used` broadcasts against the leaf.

    A leaf of the store or the index that has fewer slots than the store has one for each unit of tokens.
    """

    def zone(tree: Any, count: Array, slots: int) -> Any:
        def one(path: Any, leaf: Array) -> Array:
            if leaf.ndim < 3:
                return leaf
            used = jnp.arange(leaf.shape[2])[None] < (count * leaf.shape[2] // slots)[:, None]
            used = used.reshape(used.shape[0], 1, -1, *(1,) * (leaf.ndim - 3))
            extra = (jax.tree_util.keystr(path).endswith(".v"),) if values else ()
            return jax.device_put(change(to_device(leaf), used, *extra), leaf.sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    st = cache.state
    if isinstance(st, RetrievalState):
        return dataclasses.replace(
            st,
            sink=None if st.sink is None else zone(st.sink, st.sink.count, st.sink.slots),
            store=zone(st.store, st.store.count, st.store.slots),
            index=zone(st.index, st.store.count, st.store.slots),
            recent=zone(st.recent, st.recent.count, st.recent.slots),
        )
    if isinstance(st, EvictingState):
        return zone(st, st.tokens.count, st.tokens.slots)
    return zone(st, st.length, spec.capacity)
