"""Caches whose rows share prefixes: n answers to one prompt store the prompt once.

    # row: a cache of one row that holds the prompt
    cache = prefixes.share_prefix(row, 8, new_tokens=1024)

The history of `row`, nearly all of a long prompt, becomes a prefix that is stored once; the
sink and the recent block are copied for each of the n rows. The rows go on as n copies of `row`
would (`kvjax.take_rows`), and outputs differ only by the rounding of a sum in two parts.

A cache for several prefixes is made by `prefixed_like`; `assign_slot` puts a row into it, and
`without_prefix` takes one out.

`kvjax.rollback`, `kvjax.take_rows`, `kvjax.grow` and `kvjax.save` treat rows with prefixes like
others, and store a prefix once. `kvjax.insert` and `kvjax.truncate` raise errors that name what
to do.

**Source:** Hydragen (Juravsky et al. 2024), and cascade inference in FlashInfer (Ye et al.
2025), for the attention.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from kvjax.cache.cache import (
    C,
    Cache,
    LayerCache,
    check_cache,
    init_layer,
    layers_of,
    with_layers,
)
from kvjax.memory import commit_together, in_host_memory, move_to, on_host
from kvjax.numerics.sharing import Shared, SlotAxis, slot_axes
from kvjax.policies import Compressed, Full, Policy, Retrieval
from kvjax.policies.short import refilled
from kvjax.selectors.prefixed import PrefixedSelector
from kvjax.spec import CacheSpec, require_int
from kvjax.stores import Dense, Fifo
from kvjax.stores.prefixed import Prefixed, PrefixedBlock

FULL = Compressed(store=Dense(), sink=0, local=1, demote=Fifo(leave=64))
"""The policy as which rows of `Full` share prefixes: it attends to every token too, and has a
history to share.
"""


def share_prefix(row: C, rows: int, *, new_tokens: int) -> C:
    """A cache of n rows that continue one row, whose history they share; each can take
    `new_tokens` more tokens.

    Args:
      row: a cache of one row: a prompt that was read, `kvjax.take_rows(cache, [i])`, or
        `without_prefix(cache, i)`. It stays as it is.

    >>> import jax.numpy as jnp, kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=8, capacity=4096, dtype="float32")
    >>> _, row = kvjax.prefill(kvjax.init_layer(kvjax.Full(), spec), *[jnp.ones((1, 4000, 1, 8))] * 3)
    >>> cache = share_prefix(row, 8, new_tokens=64)
    >>> cache.length.tolist()[:2], cache.nbytes.device / row.nbytes.device < 1.5
    ([4000, 4000], True)

    Raises:
      ValueError: more than one row; a policy whose rows cannot share a prefix: see `prefixed`.
    """
    check_cache("share_prefix(row=...)", row)
    rows = require_int("share_prefix(rows=...)", rows, at_least=1)
    new_tokens = require_int("share_prefix(new_tokens=...)", new_tokens, at_least=1)
    if row.spec.batch != 1:
        raise ValueError(
            f"share_prefix takes a cache of one row, got {row.spec.batch}; take one with kvjax.take_rows(cache, [i])"
        )
    row = with_row_policies(row)
    layers: Any = layers_of(row)  # their policies have zones

    # The prefix of a layer is all of its history; a row needs room for the rest.
    counts = [int(on_host(layer.state.store.count)[0]) for layer in layers]
    rest = int(on_host(row.length)[0]) - min(counts)
    spec = dataclasses.replace(row.spec, batch=rows, capacity=rest + new_tokens)
    policies = [
        prefixed(layer.policy, max(count, layer.policy.demote.leave))
        for count, layer in zip(counts, layers, strict=True)
    ]
    return _fill_slots(_made_like(row, policies, spec), row)


def prefixed(
    policy: Policy, tokens: int, *, prefixes: int = 1, sharers: int | None = None
) -> Policy:
    """`policy` for rows that share prefixes of at most `tokens` tokens, rounded up to whole
    chunks.

    A `Full` becomes a `Compressed` that keeps its tokens unchanged, because a prefix is the
    history of a row.

    Args:
      prefixes, sharers: how many different ones there may be, and how many rows of each
      (default: all).

    Raises:
      ValueError: a policy that evicts, remembers its last step, or keeps what does not belong
        to single tokens.
    """
    row: Any = _row_policy(policy)
    chunk = row.demote.leave
    by: Any = {"tokens": -(-tokens // chunk) * chunk, "prefixes": prefixes, "sharers": sharers}
    parts: Any = {"store": Prefixed(store=row.store, **by)}
    if isinstance(row, Retrieval):
        parts["selector"] = PrefixedSelector(selector=row.selector, **by)
    return dataclasses.replace(row, **parts)


def prefixed_like(
    cache: Cache, tokens: int, *, prefixes: int, sharers: int | None = None
) -> Cache:
    """An empty cache of as many rows and of the same capacity, with room for `prefixes` shared
    prefixes beside it.

    Raises:
      ValueError: as `prefixed`; a cache with a placement.
    """
    policies = [
        prefixed(layer.policy, tokens, prefixes=prefixes, sharers=sharers)
        for layer in cache.layers
    ]
    return _made_like(cache, policies, cache.spec)


def with_row_policies(cache: C) -> C:
    """`cache` with the policies of single rows, which may begin with a shared prefix: as it is,
    but tokens of `Full` are in zones (see `FULL`).
    """

    def single(layer: LayerCache) -> LayerCache:
        policy = _row_policy(layer.policy)
        if policy == layer.policy:
            return layer
        state = layer.state
        if isinstance(layer.policy, Full):
            state = refilled(policy, layer.spec, layer.policy, state)
        return dataclasses.replace(layer, policy=policy, state=state)

    return with_layers(cache, [single(layer) for layer in layers_of(cache)])


def assign_slot(
    cache: C, row: C, slot: ArrayLike, *, prefix: ArrayLike, shared: ArrayLike, store: bool
) -> C:
    """`cache` with row `slot` replaced by `row`, whose first tokens are prefix number `prefix`.

    Call it under jit, with a donated cache.

    Args:
      row: a cache of one row of the policies that `with_row_policies` gives, of any capacity.
      shared: tokens of `row` that the prefix may hold, i32[]; it holds those of them that are
        in the history.
      store: True stores the prefix, in place of another that no row has any more. False takes
        the stored one, which must be that of a row with the same first `shared` tokens. With
        prefix=-1 and False, the row shares nothing.
    """
    filled = with_layers(
        cache,
        [
            _assign_slot(layer, own, slot, prefix, shared, store)
            for layer, own in zip(layers_of(cache), layers_of(row), strict=True)
        ],
    )
    if not isinstance(cache, Cache) or cache.rotated_for is None:
        return filled
    one: Any = row
    rotated = lax.dynamic_update_slice_in_dim(cache.rotated_for, one.rotated_for, slot, 0)
    return dataclasses.replace(filled, rotated_for=rotated)


def without_prefix(cache: C, row: ArrayLike, *, capacity: int | None = None) -> C:
    """A copy of row `row` as a cache of one row that shares nothing, with the policies that
    `with_row_policies` gives.

    Its `capacity` is by default that of the cache and its longest prefix together.
    """
    check_cache("without_prefix", cache)
    layers: Any = layers_of(cache)
    longest = max(layer.state.store.shared.value.slots for layer in layers)
    return _take_out(cache, row, capacity or cache.spec.capacity + longest)


@partial(jax.jit, static_argnums=2, inline=True)
def _take_out(cache: Any, row: Array, capacity: int) -> Any:
    spec = dataclasses.replace(cache.spec, batch=1, capacity=capacity)
    layers = [_without_prefix(layer, spec, row) for layer in layers_of(cache)]
    taken = with_layers(cache, layers)
    if not isinstance(cache, Cache) or cache.rotated_for is None:
        return taken
    rotated = lax.dynamic_slice_in_dim(cache.rotated_for, row, 1)
    return dataclasses.replace(taken, rotated_for=rotated)


@partial(jax.jit, donate_argnums=0)
def _fill_slots(cache: Any, row: Any) -> Any:
    """`row` in all slots; the first one stores the prefix."""
    most = jnp.int32(2**31 - 1)
    cache = assign_slot(cache, row, 0, prefix=0, shared=most, store=True)

    def one(slot: Array, cache: Any) -> Any:
        return assign_slot(cache, row, slot, prefix=0, shared=most, store=False)

    return lax.fori_loop(1, cache.spec.batch, one, cache)


# ------------------------------------------------------------------ one layer


def _row_policy(policy: Policy) -> Any:
    """The policy of a row that can begin with a shared prefix, or be made one."""
    if isinstance(getattr(policy, "store", None), Prefixed):
        store: Any = policy.store  # type: ignore[attr-defined]
        parts = {"store": store.store}
        if isinstance(policy, Retrieval):
            parts["selector"] = policy.selector.selector  # type: ignore[attr-defined]
        return dataclasses.replace(policy, **parts)  # type: ignore[type-var]
    if not policy.shares_prefixes:
        raise ValueError(
            f"rows of {policy!r} cannot share a prefix: it evicts tokens, remembers its last step or keeps a state, "
            "so its rows change what they keep of a prompt; use Full, Compressed or Retrieval, or copies "
            "(kvjax.take_rows)"
        )
    if isinstance(policy, Full):
        return FULL
    if isinstance(policy, Retrieval):
        return dataclasses.replace(policy, dense_capacity=0)
    return policy


def _assign_slot(
    layer: LayerCache, row: LayerCache, slot: Any, prefix: Any, shared: Any, store: bool
) -> LayerCache:
    """`assign_slot` of one layer."""
    policy: Any = layer.policy
    st = layer.state
    one = row.state

    # Tokens of the row that its prefix has: whole chunks of its history.
    stay = len(policy.demote.staying(policy.local))
    leave = policy.demote.leave
    most = jnp.minimum(one.store.count, policy.store.tokens) // leave
    chunks = jnp.clip((shared - policy.sink - stay) // leave, 0, most)
    base = jnp.where(prefix < 0, 0, chunks * leave)  # i32[1]

    # The sink and the recent block are the row's own; so is the rest of its history.
    history = partial(_assign_history, layer, base=base, slot=slot, prefix=prefix, store=store)
    index = st.index
    if isinstance(policy, Retrieval):
        selector: Any = policy.selector
        index = history(selector.selector, st.index, one.index)
    own_slots = st.store.own.slots
    too_many = one.store.count - base > own_slots
    state = dataclasses.replace(
        st,
        sink=_put(st.sink, one.sink, slot),
        store=history(policy.store.store, st.store, one.store),
        index=index,
        recent=_put(st.recent, one.recent, slot),
        overflow=_put(st.overflow, one.overflow | too_many, slot),
    )
    return dataclasses.replace(layer, state=state)


def _assign_history(
    layer: LayerCache,
    part: Any,
    held: Any,
    row: Any,
    *,
    base: Array,
    slot: Any,
    prefix: Any,
    store: bool,
) -> Any:
    """`held`, a PrefixedBlock or PrefixedIndex of `part`, with the history of a row: its first
    `base` i32[1] tokens are those of the prefix, and the slot gets the others.
    """
    axes = slot_axes(part, layer.spec)
    policy: Any = layer.policy
    own_slots = layer.state.store.own.slots
    own = _cut(row, axes, base[0], own_slots)
    early = _cut(row, axes, 0, policy.store.tokens, base[0])
    if isinstance(held, PrefixedBlock):
        own = dataclasses.replace(own, count=row.count - base)
        early = dataclasses.replace(early, count=base)
    stored = held.shared.value
    if store:
        stored = _put(stored, early, jnp.maximum(prefix, 0))
    return dataclasses.replace(
        held,
        prefix=_put(held.prefix, jnp.full(1, prefix, jnp.int32), slot),
        base=_put(held.base, base, slot),
        own=_put(held.own, own, slot),
        shared=Shared(stored),
    )


def _without_prefix(layer: LayerCache, spec: CacheSpec, row: Any) -> LayerCache:
    """`without_prefix` of one layer."""
    policy = _row_policy(layer.policy)
    st = layer.state
    new = policy.init(spec)
    slots = new.store.slots
    whole = partial(_whole_history, layer, row=row, slots=slots)

    count = _take(st.store.count, row)
    store = dataclasses.replace(whole(policy.store, st.store), count=count)
    store = jax.tree.map(lambda a, b: move_to(b, host=in_host_memory(a)), new.store, store)
    index = st.index
    if isinstance(policy, Retrieval):
        index = whole(policy.selector, st.index)
    state = dataclasses.replace(
        new,
        sink=_take(st.sink, row),
        store=store,
        index=index,
        recent=_take(st.recent, row),
        overflow=_take(st.overflow, row),
    )
    return LayerCache(state, policy, spec)


def _whole_history(layer: LayerCache, part: Any, held: Any, *, row: Any, slots: int) -> Any:
    """The history of a row in `slots` slots: that of its prefix, and its own after it."""
    axes = slot_axes(part, layer.spec)
    base = _take(held.base, row)[0]
    prefix = jnp.maximum(_take(held.prefix, row)[0], 0)
    early = _take(held.shared.value, prefix)
    room = slots + layer.state.store.own.slots
    both = _paste(_cut(early, axes, 0, room), _take(held.own, row), axes, base)
    return _cut(both, axes, 0, slots)


# ------------------------------------------------------------------ arrays


def _put(whole: Any, new: Any, at: Any) -> Any:
    """`whole` with row `at` of each array replaced."""

    def put(a: Array, b: Array) -> Array:
        b = move_to(b.astype(a.dtype), host=in_host_memory(a))
        return lax.dynamic_update_slice_in_dim(a, b, at, axis=0)

    return jax.tree.map(put, whole, new)


def _take(tree: Any, at: Any) -> Any:
    """Row `at` of each array, as an array of one row."""
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, at, 1), tree)


def _cut(tree: Any, axes: Any, start: Any, slots: int, end: Any = None) -> Any:
    """The slots [start, start + slots) of each array, along its `axes`; slots past the array's
    end, or past `end`, are zeros.
    """

    def cut(a: Array, at: SlotAxis | None) -> Array:
        if at is None:
            return a
        a = move_to(a, host=False)
        size = at.entries(slots)
        if not isinstance(start, int) or size > a.shape[at.axis]:
            a = jnp.pad(a, [(0, size if i == at.axis else 0) for i in range(a.ndim)])
        a = lax.dynamic_slice_in_dim(a, at.entries(start), size, at.axis)
        if end is None:
            return a
        place = lax.broadcasted_iota(jnp.int32, a.shape, at.axis)
        return jnp.where(place < at.entries(end), a, jnp.zeros_like(a))

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, map(cut, leaves, axes))


def _paste(tree: Any, piece: Any, axes: Any, start: Any) -> Any:
    """`tree` with the slots of `piece` from `start` on."""

    def paste(a: Array, b: Array, at: SlotAxis | None) -> Array:
        if at is None:
            return a
        b = move_to(b, host=False)
        return lax.dynamic_update_slice_in_dim(a, b, at.entries(start), at.axis)

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, map(paste, leaves, jax.tree.leaves(piece), axes))


def _made_like(cache: Any, policies: list[Policy], spec: CacheSpec) -> Any:
    """An empty cache of other policies and another spec; a layer cache if `cache` is one."""
    if layers_of(cache)[0].placement is not None:
        raise ValueError(
            "rows that share prefixes have no placement yet; make the cache on one device"
        )
    made = [init_layer(policy, spec) for policy in policies]
    if not isinstance(cache, Cache):
        return made[0]
    rotated = None if cache.rotated_for is None else jnp.zeros(spec.batch, jnp.int32)
    return commit_together(Cache(tuple(made), rotated))
