"""Functions that change rows of a cache: take back tokens, shorten to a prefix, insert a
prefilled row, move rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from kvjax.cache.cache import (
    C,
    Cache,
    LayerCache,
    as_rows,
    as_whole,
    check_cache,
    layers_of,
    own_axes,
    placement_of,
    run_by_part,
    specs_of,
    with_layers,
    with_states,
)
from kvjax.cache.serialize import differences, plain, summarize
from kvjax.memory import on_host, to_device, to_host
from kvjax.numerics.blocks import where_rows
from kvjax.numerics.sharing import is_shared
from kvjax.policies import Policy
from kvjax.policies.short import refilled
from kvjax.sharding.placement import Placement, first_row, run_on_parts, state_specs, to_context
from kvjax.validation import check_array, short_repr


def room(cache: Cache | LayerCache) -> Array:
    """Tokens that each row can take before a flush is due or the cache is full: i32[B], the
    minimum over layers.

    Raises:
      ValueError: a policy without `free`, because it cannot take back tokens either: see
        `rollback`.
    """
    check_cache("room", cache)
    with own_axes(cache):
        free = [_reversible(layer, "room").free(layer.state) for layer in layers_of(cache)]
        least = jnp.min(jnp.stack(free), axis=0)
    return as_rows(cache, least)


def rollback(cache: C, lengths: ArrayLike) -> C:
    """`cache` with the first `lengths` i32[B] tokens of each row, as if later ones had never
    been stored.

    Takes back tokens of the recent block, such as drafted tokens that the model did not accept,
    and moves no array. Tokens cannot be taken back past a flush, so store at most `room(cache)`
    tokens in each row between two rollbacks.

    Raises:
      ValueError: a policy that forgets tokens (`Evicting`) or remembers its last step
        (`Speculative`); a length beyond the tokens of the row, or before its last flush. Under
        jit, where lengths are not known, such a row stays as it is and `raise_on_overflow`
        reports it.
    """
    check_cache("rollback", cache)
    target = _target_lengths("rollback", cache, lengths)
    states = []
    with own_axes(cache):
        target = as_rows(cache, target)
        for layer in layers_of(cache):
            policy = _reversible(layer, "rollback")
            if not isinstance(lengths, Tracer):
                _check_reach(np.asarray(target), policy.earliest(layer.state), layer.length)
            states.append(policy.rollback(layer.state, target))
    return _forget_rotation(with_states(cache, states), target)


def truncate(cache: C, lengths: ArrayLike) -> C:
    """`cache` with the first `lengths` i32[B] tokens of each row, any number up to its length.

    Everything in the result equals, to the bit, the cache of the shorter prompt. So a long
    prompt that was read once gives any shorter prefix for `insert`, or for a prompt that
    continues differently. Costs about as much as a flush.

    Raises:
      ValueError: a policy that evicts or remembers its last step (`Evicting`, `Speculative`), a
        store that keeps codes in place of keys and values, a demotion that forgets the order of
        tokens; a length below 0 or beyond the tokens of the row. Under jit, where lengths are
        not known, such a row stays as it is and `raise_on_overflow` reports it.
    """
    check_cache("truncate", cache)
    target = _target_lengths("truncate", cache, lengths)
    layers = layers_of(cache)
    if not isinstance(lengths, Tracer) and not isinstance(layers[0].length, Tracer):
        known = np.asarray(target)
        length = on_host(layers[0].length)
        for row in np.flatnonzero((known < 0) | (known > length)):
            raise ValueError(
                f"truncate of row {row} to {known[row]} tokens: it holds {length[row]}; use 0 to {length[row]}"
            )
    shorter = (
        _truncate_on_parts(cache, target) if layers[0].placement else _truncate(cache, target)
    )
    return _forget_rotation(shorter, target)


def insert(cache: C, prefix: C, row: int | Array) -> C:
    """`cache` with row `row` replaced by `prefix`, a cache of batch 1 with the same policies
    and capacity.

    A server prefills a request separately and inserts it into a running batch. A `row` that the
    cache does not have raises ValueError, or, if it is traced, changes nothing. If `cache` has
    a placement, give `prefix` the same one without `batch`, because one row cannot be split.
    """
    check_cache("insert(cache=...)", cache)
    check_cache("insert(prefix=...)", prefix)
    if isinstance(cache, Cache) != isinstance(prefix, Cache):
        raise ValueError(
            f"insert takes two caches of a layer or two of a model, got a {type(cache).__name__} and for its row a "
            f"{type(prefix).__name__}; kvjax.init makes a Cache of a model, kvjax.init_layer a LayerCache"
        )
    prefix = _with_policies_of(cache, prefix)
    _check_prefix(cache, prefix)
    _check_row(cache, row)
    if layers_of(cache)[0].placement is not None:
        return _insert_on_parts(cache, prefix, row)
    if isinstance(row, Tracer):
        return _insert_if_in_range(cache, prefix, row)
    return _insert(cache, prefix, row)


def _check_prefix(cache: Any, prefix: Any) -> None:
    """Raises ValueError unless `prefix` can be a row of `cache`."""
    if _kinds(cache) != _kinds(prefix):
        raise ValueError(
            "insert needs a prefix of the same layers, policies, capacity and dtype; "
            f"{'; '.join(_unlike(prefix, cache))}; make it like the cache, with the spec "
            "dataclasses.replace(cache.spec, batch=1)"
        )
    if prefix.spec.batch != 1:
        raise ValueError(
            f"insert takes one row: the prefix must have batch 1, got {prefix.spec.batch}"
        )
    placement = layers_of(cache)[0].placement
    given = layers_of(prefix)[0].placement
    if placement is None or given is None:
        return
    if list(given.mesh.devices.flat) != list(placement.mesh.devices.flat):
        raise ValueError(
            f"insert got a cache of {placement} and a prefix of {given}, over other devices; make the prefix with the "
            "placement of the cache without its batch: dataclasses.replace(cache.placement, batch=None)"
        )


def _check_row(cache: Any, row: int | Array) -> None:
    """Raises ValueError unless `row` is the number of a row of `cache`, with tokens of its own."""
    check_array("insert(row=...)", row, "an integer", "0")
    if np.shape(row) != () or not jnp.issubdtype(jnp.result_type(row), jnp.integer):
        raise ValueError(
            f"insert(row=...) must be an integer, got {short_repr(row)}; it counts rows from 0"
        )
    if not isinstance(row, Tracer) and not 0 <= int(row) < cache.spec.batch:
        raise ValueError(
            f"insert got row={row}; the cache has rows 0 to {cache.spec.batch - 1}"
        )
    states = [layer.state for layer in layers_of(cache)]
    if any(map(is_shared, jax.tree.leaves(states, is_leaf=is_shared))):
        raise ValueError(
            "insert takes rows of their own, and the rows of this cache share prefixes; use "
            "kvjax.serve.prefixes.assign_slot, which also says which prefix the row has"
        )


def take_rows(cache: C, rows: ArrayLike) -> C:
    """A cache of n rows, of which row i is row rows[i] of `cache`: takes, repeats, reorders and
    drops rows.

    Beams reorder their rows by `take_rows(cache, parents)`; n answers to one prompt start from
    `take_rows(cache, [0] * n)`; `take_rows(cache, [i])` is row i as a cache of one, as `insert`
    takes it. Copies every array, in the memory that it is in. Capacity, policies and placement
    stay; the devices of `batch` must divide n.

    Args:
      rows: integers [n], n at least 1, each below the number of rows. Under jit, where they are
        not known, a row that the cache does not have becomes an empty row.

    >>> import jax.numpy as jnp, kvjax
    >>> spec = kvjax.CacheSpec(batch=2, q_heads=1, kv_heads=1, head_dim=8, capacity=16, dtype="float32")
    >>> _, cache = kvjax.prefill(kvjax.init_layer(kvjax.Full(), spec), *[jnp.ones((2, 3, 1, 8))] * 3, lengths=[3, 1])
    >>> kvjax.take_rows(cache, [1, 1, 0]).length.tolist()
    [1, 1, 3]

    Raises:
      ValueError: rows that are not integers [n] below the number of rows; n rows that a
        placement cannot split.
    """
    check_cache("take_rows(cache=...)", cache)
    batch = cache.spec.batch
    check_array("take_rows(rows=...)", rows, "integers [n]", "[1, 0, 0]")
    rows = rows if isinstance(rows, Array) else np.asarray(rows)
    if rows.ndim != 1 or not rows.size or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"take_rows(rows=...) must be one or more integers [n], rows from 0 to {batch - 1}; got {short_repr(rows)}"
        )
    if not isinstance(rows, Tracer):
        given = np.asarray(rows)
        for i in np.flatnonzero((given < 0) | (given >= batch)):
            raise ValueError(
                f"take_rows(rows=...)[{i}] is {given[i]}; the cache has rows 0 to {batch - 1}"
            )
    placement = layers_of(cache)[0].placement
    if placement is not None:
        placement.local(dataclasses.replace(cache.spec, batch=rows.size))
    with own_axes(cache):
        wanted = jnp.asarray(rows, jnp.int32)
        taken = _take_rows(cache, wanted)
        # A row that the cache does not have is empty: it takes the 0 that is appended.
        source = jnp.where((wanted >= 0) & (wanted < batch), wanted, batch)
        return _change_rotated_for(
            taken, lambda old: jnp.take(jnp.append(old, jnp.int32(0)), source)
        )


def _reversible(layer: LayerCache, verb: str) -> Policy:
    if not layer.policy.reversible:
        raise ValueError(
            f"{verb} needs a policy that can take back tokens, which {layer.policy!r} cannot: it evicts tokens or "
            "remembers its last step; use Full, Retrieval or Compressed, or a copy of the cache"
        )
    return layer.policy


def _target_lengths(verb: str, cache: Any, lengths: ArrayLike) -> Array:
    check_array(f"{verb}(lengths=...)", lengths, f"integers [B={cache.spec.batch}]", "[3, 5]")
    target = jnp.asarray(lengths)
    if target.shape != (cache.spec.batch,) or not jnp.issubdtype(target.dtype, jnp.integer):
        raise ValueError(
            f"{verb}(lengths=...) must be integers [B={cache.spec.batch}], the tokens that each row keeps; got "
            f"{target.dtype}{list(target.shape)}"
        )
    return target.astype(jnp.int32)


def _change_rotated_for(cache: Any, change: Callable[[Array], Array]) -> Any:
    """A cache with a `change` of its `rotated_for` i32[B], if it has that: the one array of a
    cache that is not of its layers.
    """
    if not isinstance(cache, Cache) or cache.rotated_for is None:
        return cache
    return dataclasses.replace(cache, rotated_for=change(as_rows(cache, cache.rotated_for)))


def _forget_rotation(cache: Any, lengths: Array) -> Any:
    """The cache whose rows of length 0, of `lengths` i32[B], may rotate their keys for another
    text; other rows keep the rotation that their keys have.
    """
    with own_axes(cache):
        return _change_rotated_for(
            cache, lambda final: jnp.where(as_rows(cache, lengths) == 0, 0, final)
        )


def _check_reach(target: np.ndarray, earliest: Array, length: Array) -> None:
    if isinstance(earliest, Tracer) or isinstance(length, Tracer):
        return
    first = np.asarray(earliest)
    last = np.asarray(length)
    for row in np.flatnonzero((target < first) | (target > last)):
        raise ValueError(
            f"rollback of row {row} to {target[row]} tokens: it holds {last[row]}, and can go back to {first[row]}, "
            "where its recent block was last flushed; kvjax.room says how many tokens it takes before the next flush"
        )


@partial(jax.jit, inline=True)
def _truncate(cache: Any, lengths: Array) -> Any:
    layers = layers_of(cache)
    policies: list[Any] = [layer.policy for layer in layers]
    states = [
        policy.truncate(layer.state, lengths)
        for policy, layer in zip(policies, layers, strict=True)
    ]
    return with_states(cache, states)


@partial(jax.jit, inline=True)
def _truncate_on_parts(cache: Any, lengths: Array) -> Any:
    """`_truncate` by each device for its rows and heads."""
    return run_by_part(
        _truncate, cache, lengths, specs=(placement_of(layers_of(cache)[0]).spec("B"),)
    )


@partial(jax.jit, inline=True)
def _insert(cache: C, prefix: C, row: int | Array) -> C:
    def place(whole: Array, one: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, one.astype(whole.dtype), row, axis=0)

    # The prefix gets the static fields of the cache, which has another batch.
    same = jax.tree.unflatten(jax.tree.structure(cache), jax.tree.leaves(prefix))
    return jax.tree.map(place, cache, same)


def _insert_if_in_range(cache: Any, prefix: Any, row: Array) -> Any:
    in_range = (row >= 0) & (row < jax.tree.leaves(cache)[0].shape[0])
    return lax.cond(
        in_range, lambda cache: _insert(cache, prefix, row), lambda cache: cache, cache
    )


@partial(jax.jit, inline=True)
def _insert_on_parts(cache: Any, prefix: Any, row: Array) -> Any:
    """Each device has the prefix's row for its own heads; the devices that hold the row of the
    cache write it.
    """
    layers = layers_of(cache)
    prefix_layers = layers_of(prefix)
    placement = placement_of(layers[0])
    cache_specs = [specs_of(layer) for layer in layers]
    row_placement = dataclasses.replace(placement, batch=None)
    prefix_specs = [
        state_specs(layer.policy, layer.spec, row_placement) for layer in prefix_layers
    ]

    def local(states: list[Any], prefix: list[Any], row: Array) -> list[Any]:
        rows = layers[0].spec.batch // placement.parts("batch")
        return _insert_if_in_range(states, prefix, row - first_row(placement, rows))

    row = jnp.asarray(row, jnp.int32)
    states = run_on_parts(
        placement,
        local,
        (cache_specs, prefix_specs, PartitionSpec()),
        cache_specs,
        [layer.state for layer in layers],
        [layer.state for layer in prefix_layers],
        row,
    )
    inserted = with_states(cache, states)

    def of_prefix(old: Array) -> Array:
        is_row = jnp.arange(old.size, dtype=jnp.int32) == row
        return jnp.where(is_row, to_context(prefix.rotated_for), old)

    with own_axes(cache):
        return _change_rotated_for(inserted, of_prefix)


@partial(jax.jit, inline=True)
def _take_rows(cache: Any, rows: Array) -> Any:
    layers = layers_of(cache)
    olds = [layer.state for layer in layers]
    n = rows.shape[0]
    placement = layers[0].placement
    # The layers with room for n rows, but yet with the states of the old ones.
    resized = [
        dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, batch=n))
        for layer in layers
    ]
    if placement is None:
        empty = [layer.policy.init(layer.spec) for layer in resized]
        return with_states(with_layers(cache, resized), _rows_of(olds, empty, rows))

    def local(olds: list[Any], rows: Array) -> list[Any]:
        own_empty = [
            placement.policy_of_part(layer.policy).init(placement.local(layer.spec))
            for layer in resized
        ]
        empty = [as_whole(layer, st) for layer, st in zip(layers, own_empty, strict=True)]
        move = _rows_of if placement.batch is None else partial(_rows_over_devices, placement)
        return move(olds, empty, rows)

    states = run_on_parts(
        placement,
        local,
        ([specs_of(layer) for layer in layers], PartitionSpec()),
        [specs_of(layer) for layer in resized],
        olds,
        rows,
    )
    return with_states(with_layers(cache, resized), states)


def _rows_of(olds: Any, empty: Any, rows: Array) -> Any:
    """`empty` with row i replaced by row rows[i] of `olds`, if there is one."""
    batch = jax.tree.leaves(olds)[0].shape[0]
    held = (rows >= 0) & (rows < batch)
    rows = jnp.clip(rows, 0, batch - 1)

    def move(old: Any, new: Any) -> Any:
        if is_shared(old):
            return old
        if jax.typeof(old).memory_space == jax.memory.Space.Host:  # where no gather runs

            def put(i: Array, new: Array) -> Array:
                row = lax.dynamic_slice_in_dim(old, rows[i], 1)
                return lax.cond(
                    held[i],
                    lambda: lax.dynamic_update_slice_in_dim(new, row, i, axis=0),
                    lambda: new,
                )

            return lax.fori_loop(0, rows.shape[0], put, new)
        return where_rows(held, jnp.take(old, rows, axis=0), new)

    return jax.tree.map(move, olds, empty, is_leaf=is_shared)


def _rows_over_devices(placement: Placement, olds: Any, empty: Any, rows: Array) -> Any:
    """`_rows_of`, where devices hold different rows: each row goes through all of them, one at
    a time.
    """
    batch = jax.tree.leaves(olds)[0].shape[0]  # rows of this device
    new_batch = jax.tree.leaves(empty)[0].shape[0]
    held = (rows >= 0) & (rows < batch * placement.parts("batch"))
    source = rows - first_row(placement, batch)
    here = (source >= 0) & (source < batch)

    def move(old: Any, new: Any) -> Any:
        if is_shared(old):
            return old
        hosted = jax.typeof(old).memory_space == jax.memory.Space.Host

        def put(i: Array, new: Array) -> Array:
            """`new` with row i, if it is one of this device."""
            # The device that has the row gives it to all: the sum of it and of zeros.
            row = lax.dynamic_slice_in_dim(old, jnp.clip(source[i], 0, batch - 1), 1)
            row = to_device(row) if hosted else row
            code = _bits_of(row)
            code = lax.psum(jnp.where(here[i], code, jnp.zeros_like(code)), placement.batch)
            row = _from_bits(code, old.dtype)
            row = to_host(row) if hosted else row

            place = i - first_row(placement, new_batch)
            mine = held[i] & (place >= 0) & (place < new_batch)
            place = jnp.clip(place, 0, new_batch - 1)
            return lax.cond(
                mine,
                lambda: lax.dynamic_update_slice_in_dim(new, row, place, axis=0),
                lambda: new,
            )

        return lax.fori_loop(0, rows.shape[0], put, new)

    return jax.tree.map(move, olds, empty, is_leaf=is_shared)


def _bits_of(x: Array) -> Array:
    """x as unsigned integers, whose sum with zeros is exact: one of floats loses the sign of
    -0.0.
    """
    unsigned: Any = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return x.astype(unsigned) if x.dtype == bool else lax.bitcast_convert_type(x, unsigned)


def _from_bits(code: Array, dtype: Any) -> Array:
    is_bool = jnp.issubdtype(dtype, jnp.bool_)
    return code.astype(bool) if is_bool else lax.bitcast_convert_type(code, dtype)


def _with_policies_of(cache: Any, prefix: Any) -> Any:
    """`prefix` with the policies of `cache`: at batch 1, a policy may have been replaced by
    `Full` (`of_size`).
    """

    def convert(own: LayerCache, layer: LayerCache) -> LayerCache:
        old = layer.policy
        wanted = old.of_size(own.spec)
        if wanted == layer.policy or wanted != own.policy:
            return layer
        state = refilled(wanted, layer.spec, old, layer.state)
        return (
            layer if state is None else dataclasses.replace(layer, state=state, policy=wanted)
        )

    if not isinstance(prefix, Cache) or len(cache.layers) != len(prefix.layers):
        return prefix
    return with_layers(prefix, list(map(convert, cache.layers, prefix.layers)))


def _kinds(cache: Any) -> list[Any]:
    """Policy and spec of each layer, without the batch."""
    return [
        (layer.policy, dataclasses.replace(layer.spec, batch=1)) for layer in layers_of(cache)
    ]


def _unlike(prefix: Any, cache: Any) -> list[str]:
    """Where policies and specs of two caches differ, without the batch, as text."""

    def described(cache: Any) -> dict[str, Any]:
        kinds = [
            {"policy": plain(policy), "spec": plain(spec)} for policy, spec in _kinds(cache)
        ]
        return {"layers": kinds}

    names = ("in the prefix", "in the cache")
    return summarize(differences(described(prefix), described(cache), names=names))
