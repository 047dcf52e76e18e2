"""References for the laws: attention in NumPy, tokens as a policy stores them, and the parts of
a state that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.cache import LayerCache
from kvjax.policies import Info, Policy
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import (
    core,
    core_state,
    has_history,
    has_zones,
    map_slots,
    memory_of_steps,
    of_copies,
    replace_core,
    require,
    sink,
)
from kvjax.testing._drive import random_tokens, step


def tolerance(spec: CacheSpec, policy: Any = None) -> float:
    """Largest error of an attention output over values of order 1: f32 sums, or weights rounded
    to 16 bits.

    If the policy's store rounds the scales of tokens to fewer bits (`rounds_scales_to`), two
    programs whose f32 sums differ may round a scale to either side. That moves a key by a unit
    in its last place, and an output by less.
    """
    sums = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[jnp.dtype(spec.dtype).name]
    store = getattr(core(policy), "store", None)
    scales = getattr(getattr(store, "store", store), "rounds_scales_to", None)
    return sums if scales is None else max(sums, float(jnp.finfo(scales).eps))


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, log_weights: Any = 0.0) -> np.ndarray:
    """Attention of q [N, D] over k [S, K, D] and v [S, K, E] in float64, one head at a time;
    `log_weights` [S] add to the logits.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[0] // k.shape[1]
    out = np.zeros((len(q), v.shape[2]))
    for n in range(q.shape[0]):
        logits = k[:, n // group] @ q[n] / np.sqrt(q.shape[1]) + log_weights
        weights = np.exp(logits - logits.max())
        out[n] = weights @ v[:, n // group] / weights.sum()
    return out


_decode = jax.jit(lambda store, k, v: store.decoded(k, v), static_argnums=0)


def zones(policy: Policy, spec: CacheSpec, length: int) -> tuple[list[list[int]], list[int]]:
    """Positions of the chunks of the history and of the recent block, in order, of a flushed
    row of `length` tokens.
    """
    inner = core(policy)
    leaving = inner.demote.leaving(inner.local)
    staying = inner.demote.staying(inner.local)
    limit = _slots(policy, spec) // inner.demote.leave
    chunks: list[list[int]] = []
    block: list[int] = []
    for position in range(sink(policy), length):
        block.append(position)
        if len(block) == len(leaving) + len(staying) and len(chunks) < limit:
            chunks.append([block[i] for i in leaving])
            block = [block[i] for i in staying]
    return chunks, block


@lru_cache
def _slots(policy: Policy, spec: CacheSpec) -> int:
    return core_state(jax.eval_shape(partial(policy.init, spec))).store.slots


def as_stored(
    policy: Policy, spec: CacheSpec, k: np.ndarray, v: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """A row's k, v [S, K, D] as the policy returns them after `length` tokens; later tokens are
    exact.
    """
    if not has_history(policy):
        return k, v
    require(
        getattr(core(policy), "value_window", None) is None,
        "values of the recent block are rounded by age, and this law is for tokens that are rounded when they leave it",
    )
    k = k.astype(np.float32)
    v = v.astype(np.float32)
    chunks = zones(policy, spec, length)[0]
    store = core(policy).store
    # The values read for a chunk depend on the chunks before it.
    if hasattr(getattr(store, "store", store), "learn") and chunks:
        chunks = [[position for chunk in chunks for position in chunk]]
    for chunk in chunks:
        heads_first = (np.swapaxes(a[chunk], 0, 1)[None] for a in (k, v))
        k[chunk], v[chunk] = (
            np.swapaxes(np.asarray(a)[0], 0, 1) for a in _decode(store, *heads_first)
        )
    return k, v


def require_read_as_stored(
    cache: LayerCache, stored: Sequence[Any], exact: Sequence[Any]
) -> None:
    """Requires that a step reads tokens as they are stored now: as `exact`, or without a memory
    between steps.
    """
    require(
        all(np.array_equal(a, b) for a, b in zip(stored, exact, strict=True))
        or not memory_of_steps(cache.state),
        "the store rounds keys and values, and a step may read them as they were at the step before",
    )


def assert_close(
    got: np.ndarray, want: np.ndarray, spec: CacheSpec, what: str, policy: Any = None
) -> None:
    """`policy`, if one of the two was rounded as its store does by another program: see
    `tolerance`.
    """
    assert np.isfinite(got).all(), f"{what}: not finite"
    error = float(np.max(np.abs(got - want), initial=0.0))
    allowed = tolerance(spec, policy)
    assert error <= allowed, f"{what}: differs by {error:.2e}, allowed {allowed:.0e}"


def assert_same(got: Any, want: Any, what: str) -> None:
    """Raises AssertionError unless two trees are equal to the bit."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree_util.tree_leaves_with_path(want),
        strict=True,
    )
    for (path, a), (path_wanted, b) in pairs:
        assert path == path_wanted, f"{what}: {path} is not {path_wanted}"
        equal = np.array_equal(
            np.asarray(a), np.asarray(b), equal_nan=jnp.issubdtype(a.dtype, jnp.floating)
        )
        assert equal, (
            f"{what}{jax.tree_util.keystr(path)} {_difference(np.asarray(a), np.asarray(b))}"
        )


def _difference(got: np.ndarray, want: np.ndarray) -> str:
    """The difference of two arrays, in words."""
    if got.shape != want.shape:
        return f"has shape {list(got.shape)}, not {list(want.shape)}"
    lost = ~np.isfinite(got) & np.isfinite(want)
    if lost.any():
        return f"is not finite in {lost.sum()} of {got.size} numbers"
    return f"differs in {(got != want).sum()} of {got.size} numbers"


def assert_attended(info: Info, want: np.ndarray) -> None:
    """Every head of a row attended to `want` i[B] tokens; the mean over a group's selections is
    rounded.
    """
    got = np.asarray(info.attended)
    assert np.allclose(got, want[:, None], rtol=1e-6, atol=0), (
        f"attended to {got.tolist()}, not {want.tolist()}"
    )


def held_positions(cache: LayerCache) -> list[list[list[int]]]:
    """Positions of the tokens that each row and kv head of a policy that evicts holds, by slot."""
    st = core_state(cache.state)
    position = np.asarray(st.position)
    counts = getattr(st, "head_counts", None)  # by head, where heads hold different numbers
    counts = (
        np.asarray(st.tokens.count)[:, None].repeat(position.shape[1], axis=1)
        if counts is None
        else counts
    )
    return [
        [head[:count].tolist() for head, count in zip(row, heads, strict=True)]
        for row, heads in zip(position, np.asarray(counts), strict=True)
    ]


def valid_part(cache: LayerCache) -> list[Any]:
    """The core of the state with zeros in every slot past count, as leaves: equal for two
    caches of equal tokens.

    It leaves out what a state remembers of earlier steps, and the copies of a hot set, because
    a prompt leaves neither. Unordered slots, as those of a policy that evicts, are sorted by
    position.
    """
    st = core_state(cache.state)
    if hasattr(st, "position") and hasattr(st, "tokens"):
        used = np.arange(st.tokens.slots) < np.asarray(st.tokens.count)[:, None]
        position = np.where(used[:, None], np.asarray(st.position), np.iinfo(np.int32).max)
        order = np.argsort(position, axis=-1, kind="stable")

        def sort(leaf: Array) -> Array:
            if leaf.shape[:3] != order.shape:
                return leaf
            index = order.reshape(*order.shape, *(1,) * (leaf.ndim - 3))
            return jax.device_put(
                np.take_along_axis(np.asarray(leaf), index, axis=2), leaf.sharding
            )

        st = jax.tree.map(sort, st)
    valid = map_slots(st, lambda _, leaf, used: np.where(used, leaf, np.zeros_like(leaf)))
    return [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(valid) if not of_copies(path)
    ]


def assert_same_contents(
    got: LayerCache, want: LayerCache, spec: CacheSpec, what: str, row: int | None = None
) -> None:
    """Two caches hold the same, in one row or in all: equal to the bit in every used slot.

    A state without zones is compared only by the outputs of two steps.
    """
    if has_zones(want.state):
        one = slice(None) if row is None else row
        found, wanted = (
            [np.asarray(a)[one] for a in valid_part(cache)] for cache in (got, want)
        )
        assert_same(found, wanted, what)
        return
    tokens = random_tokens(spec, 99)
    for i in range(2):
        out, got, _ = step(got, tokens, np.full(spec.batch, i))
        out_wanted, want, _ = step(want, tokens, np.full(spec.batch, i))
        rows = slice(None) if row is None else slice(row, row + 1)
        assert_close(out[rows], out_wanted[rows], spec, f"{what}: what a step then reads")


def poison(cache: LayerCache) -> Any:
    """The state with every slot past count spoiled: floats are NaN, but values 1e4, and codes
    are all ones.
    """
    require(
        has_zones(cache.state),
        "the state has no zone: no field with `count` and `slots` says which slots are used",
    )

    def spoil(path: Any, leaf: np.ndarray, used: np.ndarray) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bad = 1e4 if jax.tree_util.keystr(path).endswith(".v") else jnp.nan
        else:
            bad = True if leaf.dtype == jnp.bool_ else jnp.iinfo(leaf.dtype).max
        return np.where(used, leaf, np.asarray(bad, leaf.dtype))

    return replace_core(cache.state, map_slots(cache.state, spoil))


def slots_of(selection: Any) -> list[set[int]]:  # by row, KV head and list
    slots = np.asarray(selection.slots)
    valid = np.asarray(selection.valid)
    return [set(slots[i][valid[i]].tolist()) for i in np.ndindex(*slots.shape[:3])]
