"""The arrays of an engine: a cache whose rows are the slots, and rows into which prompts are read.

All changes donate the cache, so one thread at a time may call what is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import register_dataclass

from kvjax.cache.cache import Cache, LayerCache, init_layer, with_states
from kvjax.cache.editing import insert, take_rows, truncate
from kvjax.generation import prefilling
from kvjax.generation.drafts import Drafter, Speculation
from kvjax.generation.loops import PAD, LoopInputs, decode_loop, draft_loop, without_loop
from kvjax.generation.reports import Packed
from kvjax.memory import commit_together, has_host_memory, in_host_memory, on_host
from kvjax.policies import Recurrent
from kvjax.policies.per_row import PerRow, PerRowState
from kvjax.serve.prefixes import assign_slot, with_row_policies, without_prefix
from kvjax.serve.requests import STOPS
from kvjax.serve.scheduler import LONGEST
from kvjax.spec import CacheSpec, require_int
from kvjax.stores.prefixed import Prefixed

T = TypeVar("T")


@register_dataclass
@dataclass(frozen=True)
class Slot:
    """A row of the cache. Slots of one capacity are a group, whose rows are in arrays of their
    own.
    """

    index: Any  # i32[] among all slots
    place: Any  # i32[] in its group
    group: int = field(metadata={"static": True})

    @classmethod
    def of(cls, cache: Cache, index: int) -> Slot:
        policy = cache.layers[0].policy
        group, place = policy.group_of(index) if isinstance(policy, PerRow) else (0, index)
        return cls(np.int32(index), np.int32(place), group)


@dataclass(frozen=True)
class SharedStart:
    """Where a row begins: `tokens` first tokens of its prompt are the stored prefix number
    `prefix`; -1 for a row that stores all of its tokens.
    """

    prefix: int = -1
    tokens: int = 0
    store: bool = False  # the prefix does not hold them yet


@dataclass(frozen=True)
class RowKind:
    """How a row is made: the policy, spec and placement of each layer, and whether keys are
    rotated for the final length of a text.
    """

    layers: tuple[Any, ...]
    rotated: bool

    @classmethod
    def of(cls, cache: Cache) -> RowKind:
        layers = [(layer.policy, layer.spec, layer.placement) for layer in cache.layers]
        return cls(tuple(layers), cache.rotated_for is not None)

    @property
    def observes(self) -> bool:
        """True if a layer selects from a prompt by all of its queries, which are read at once."""
        return any(policy.observes for policy, _, _ in self.layers)


class Slots:
    """The cache of an engine, the logits of its rows, and which of them still draw tokens.

    Args:
      cache: with a row for each slot; this takes over its arrays.
      shares: whether rows may begin with a stored prefix.
      drafter: a draft of the model by itself; None: no tokens are drafted.
      log_probabilities: whether `decode` returns those of the tokens.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        shares: bool,
        drafter: Drafter | None = None,
        log_probabilities: bool = False,
    ) -> None:
        # Donated, so that the caller's cache has its arrays no more.
        self.cache: Cache = _taken_over(committed(cache))
        self.count = cache.spec.batch
        self.logits: Any = None  # f32[slots, V], once the model has told V
        self._active: Any = None  # bool[slots], rows that have drawn no stop token
        self._shares = shares
        self._drafter = None
        if drafter is not None:
            self._drafter = committed(commit_together((self.cache, drafter))[1])
        self._log_probabilities = log_probabilities

    def speculation(self, draft_counts: np.ndarray) -> Speculation | None:
        """The acceptance of drafts by the sum of `Report.draft_counts`; None without drafts."""
        if self._drafter is None:
            return None
        steps, drafted, accepted = draft_counts.tolist()
        return Speculation(steps, drafted, accepted, idle=self._drafter.idle)

    def at(self, slot: int) -> Slot:
        return Slot.of(self.cache, slot)

    def one_of_each_size(self) -> list[int]:
        """A slot of each capacity."""
        sizes = capacities(self.cache)
        return list({capacity: slot for slot, capacity in enumerate(sizes)}.values())

    def assign(self, slot: int, row: Cache, logits: Array, start: SharedStart) -> None:
        """Puts a row and its logits into a slot, which then draws tokens."""
        if self.logits is None:
            self._make_logits(logits)
        self.cache, self.logits, self._active = _put(
            self.cache,
            self.logits,
            self._active,
            row,
            logits,
            self.at(slot),
            self._prefix(start),
            store=start.store,
        )

    def clear(self, slots: Sequence[int], kind: RowKind) -> None:
        """Empties slots, so that nothing attends to what is in them."""
        if self.logits is None:  # nothing was put into them yet
            return
        for slot in slots:
            self.cache, self.logits, self._active = _clear(
                kind,
                self.cache,
                self.logits,
                self._active,
                self.at(slot),
                self._prefix(SharedStart()),
            )

    def decode(self, model: Any, inputs: LoopInputs, *, single_tokens: bool = False) -> Packed:
        """Draws up to `inputs.limit` tokens in each slot, which all calls of an engine with
        `single_tokens` limit to one.
        """
        state = self.cache, self.logits, self._active
        settings = {"measure": False}
        if self._log_probabilities:
            settings["log_probabilities"] = True
        drafter = self._drafter
        if drafter is None:
            settings |= without_loop(single_tokens)
            done, report = _run_loop(model, *state, inputs, **settings)
        elif drafter.idle is not None:  # still the text of attention to all tokens
            settings |= {"exact": True} | without_loop(single_tokens)
            done, report = _run_loop(model, *state, inputs, **settings)
        else:
            drafting = drafter.with_state(None), drafter.state
            done, report = _run_drafts(model, *state, inputs, *drafting, **settings)
            self._drafter = drafter.with_state(done.state)
        self.cache = done.cache
        # Where they were before, or the next call would be another program.
        self.logits = jax.device_put(done.logits, self.logits.sharding)
        self._active = jax.device_put(done.active, self._active.sharding)
        return cast(Packed, report)

    def no_stops(self) -> np.ndarray:
        return np.full((self.count, STOPS), PAD, np.int32)

    def _prefix(self, start: SharedStart) -> Any:
        """Arguments of `assign_slot` for a row that begins so; None where rows share nothing."""
        return (np.int32(start.prefix), np.int32(start.tokens)) if self._shares else None

    def _make_logits(self, like: Array) -> None:
        shape, home, placement = (
            (self.count, like.shape[1]),
            like.sharding,
            self.cache.placement,
        )
        if placement is not None and isinstance(home, NamedSharding):
            # Each device has the logits of its own rows.
            home = NamedSharding(home.mesh, placement.spec("B"))
        self.logits = jax.device_put(np.zeros(shape, like.dtype), home)
        active = np.zeros(self.count, bool)
        self._active = jax.device_put(active, replicated(like.sharding))


class Rows:
    """Makes empty rows into which prompts are read, from the arrays of rows that are not needed
    any more.
    """

    def __init__(self, kind: RowKind, *, most: int) -> None:
        self.kind = kind
        self._most = most  # rows that wait for a prompt
        self._spare = list[Cache]()
        # An empty row without its arrays, to check requests by.
        self.empty: Cache = jax.tree.map(zeros_like, jax.eval_shape(partial(empty_row, kind)))

    def make(self) -> Cache:
        return committed(
            emptied(self.kind, self._spare.pop()) if self._spare else empty_row(self.kind)
        )

    def give_back(self, row: Cache) -> None:
        if len(self._spare) < self._most:
            self._spare.append(row)


# ------------------------------------------------------------------ programs


def committed(tree: T) -> T:
    """`tree` with all arrays committed to the devices that they are on, as those of programs
    are that read or write slots: a program compiles again for arrays that are not.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def _taken_over(tree: Any) -> Any:
    """`tree` in its arrays, which the argument loses."""
    return tree


@partial(jax.jit, donate_argnums=(0, 1, 2), static_argnames="store")
def _put(
    cache: Cache,
    logits: Array,
    active: Array,
    row: Cache,
    row_logits: Array,
    slot: Slot,
    prefix: Any,
    *,
    store: bool,
) -> tuple[Cache, Array, Array]:
    """The cache, the logits and the active slots with a row in a slot, which then is active.

    `prefix` is the number of the row's stored prefix, -1 for none, and how many tokens that has;
    None where rows share nothing.
    """
    logits = lax.dynamic_update_slice_in_dim(logits, row_logits, slot.index, axis=0)
    active = lax.dynamic_update_slice_in_dim(active, jnp.ones(1, bool), slot.index, axis=0)
    if prefix is not None:
        number, tokens = prefix
        cache = assign_slot(cache, row, slot.index, prefix=number, shared=tokens, store=store)
    elif isinstance(cache.layers[0].policy, PerRow):
        cache = _put_row(cache, row, slot)
    else:
        cache = insert(cache, row, slot.index)
    return cache, logits, active


def _put_row(cache: Cache, row: Cache, slot: Slot) -> Cache:
    """`cache`, whose slots differ in capacity, with a row in a slot."""
    pairs: Any = zip(cache.layers, row.layers, strict=True)
    states = [
        layer.policy.put_row(layer.state, new.state, slot.group, slot.place)
        for layer, new in pairs
    ]
    filled = with_states(cache, states)
    if cache.rotated_for is None:
        return filled
    rotated = lax.dynamic_update_slice_in_dim(
        cache.rotated_for, jnp.asarray(row.rotated_for), slot.index, axis=0
    )
    return dataclasses.replace(filled, rotated_for=rotated)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def _clear(
    kind: RowKind, cache: Cache, logits: Array, active: Array, slot: Slot, prefix: Any
) -> tuple[Cache, Array, Array]:
    """`_put` of an empty row: see `empty_row`."""
    nothing = jnp.zeros_like(logits[:1])
    new, logits, active = _put(
        cache, logits, active, empty_row(kind), nothing, slot, prefix, store=False
    )
    return jax.tree.map(_old_if_in_host, new, cache), logits, active


@partial(jax.jit, static_argnames="spec")
def whole_row(cache: Cache, slot: Slot, *, spec: CacheSpec) -> Cache:
    """`row_of` a slot, in one program."""
    return row_of(cache, slot, spec)


@partial(jax.jit, static_argnames="spec")
def first_tokens(cache: Cache, slot: Slot, length: Array, *, spec: CacheSpec) -> Cache:
    """`row_of` a slot, cut to its first tokens."""
    return truncate(row_of(cache, slot, spec), length)


def row_of(cache: Cache, slot: Slot, spec: CacheSpec) -> Cache:
    """The row of a slot as a cache of one row, of `spec` if slots differ or may share prefixes."""
    policy: Any = cache.layers[0].policy
    if isinstance(policy, PerRow):
        return _take_row(cache, slot, spec)
    if splits_rows(cache):
        raise ValueError(
            f"no row can be taken out of slots that devices share, {cache.placement}; split heads alone"
        )
    if isinstance(getattr(policy, "store", None), Prefixed):
        return without_prefix(cache, slot.index, capacity=spec.capacity)
    return take_rows(cache, slot.index[None])


def splits_rows(cache: Cache) -> bool:
    """True if devices have rows of their own, of which none is taken out."""
    return cache.placement is not None and cache.placement.parts("batch") > 1


@partial(jax.jit, static_argnums=2, inline=True)
def _take_row(cache: Cache, slot: Slot, spec: CacheSpec) -> Cache:
    def take(layer: Any) -> LayerCache:
        own = dataclasses.replace(layer.spec, batch=1, capacity=spec.capacity)
        state = layer.policy.take_row(layer.state, slot.group, slot.place, own)
        return LayerCache(state, layer.policy.policy, own)

    rotated = (
        None
        if cache.rotated_for is None
        else lax.dynamic_slice_in_dim(cache.rotated_for, slot.index, 1)
    )
    return Cache(tuple(map(take, cache.layers)), rotated)


# ------------------------------------------------------------------ caches of slots and rows


def with_small_slots(cache: Cache, small: Mapping[int, int]) -> Cache:
    """`cache`, whose arrays it keeps, with more rows of smaller capacities: how many of each."""
    check_small_slots(cache, small)
    # Rows and their capacity, the largest first.
    sizes = [(cache.spec.batch, cache.spec.capacity)]
    for capacity in sorted(small, reverse=True):
        sizes.append((int(small[capacity]), int(capacity)))
    slots = sum(rows for rows, _ in sizes)

    def widened(layer: LayerCache) -> LayerCache:
        specs = [
            dataclasses.replace(layer.spec, batch=rows, capacity=capacity)
            for rows, capacity in sizes
        ]
        smaller = [init_layer(layer.policy, spec).state for spec in specs[1:]]
        return LayerCache(
            state=PerRowState((layer.state, *smaller)),
            policy=PerRow(policy=layer.policy, sizes=tuple(sizes)),
            spec=dataclasses.replace(layer.spec, batch=slots),
        )

    layers = tuple(map(widened, cache.layers))
    rotated_for = None if cache.rotated_for is None else jnp.zeros(slots, jnp.int32)
    return commit_together(Cache(layers, rotated_for))


def check_small_slots(cache: Cache, small: Mapping[int, int]) -> None:
    """Raises ValueError for numbers of slots that mean nothing, or a cache whose rows have one
    capacity.
    """
    if not isinstance(small, Mapping):
        raise ValueError(
            f"small_slots must say how many slots of each capacity, such as {{8192: 12}}; got {small!r}"
        )
    if cache.placement is not None:
        raise ValueError(
            "small_slots are for a cache on one device; make it without a placement, or leave them out"
        )
    if any(isinstance(layer.policy, Recurrent) for layer in cache.layers):
        raise ValueError(
            "small_slots are for models whose layers all have attention, and this one keeps states of fixed size; "
            "leave them out"
        )
    if any(
        isinstance(getattr(layer.policy, "store", None), Prefixed) for layer in cache.layers
    ):
        raise ValueError(
            "give prefixes or small_slots: slots that share prefixes have one capacity"
        )
    largest = cache.spec.capacity - 1
    for capacity in sorted(small, reverse=True):
        require_int("a capacity of small_slots", capacity, at_least=1, at_most=largest)
        require_int(f"small_slots[{capacity}]", small[capacity], at_least=1)


def capacities(cache: Cache) -> list[int]:
    """Tokens that each slot has room for, in slots of several sizes; no limit if they are
    alike.
    """
    policy = cache.layers[0].policy
    if not isinstance(policy, PerRow):
        return [LONGEST] * cache.spec.batch
    return [capacity for rows, capacity in policy.sizes for _ in range(rows)]


def long_rows(cache: Cache, tokens: int) -> Cache:
    """The shapes of `cache`, with policies whose rows can share prefixes and room for `tokens`
    more tokens.
    """
    layers = jax.eval_shape(with_row_policies, cache).layers
    return dataclasses.replace(
        cache,
        layers=tuple(
            dataclasses.replace(
                layer,
                spec=dataclasses.replace(own.spec, capacity=own.spec.capacity + tokens),
            )
            for layer, own in zip(layers, cache.layers, strict=True)
        ),
    )


def empty_row(kind: RowKind) -> Cache:
    """An empty cache of one row of this kind."""

    def row(policy: Any, spec: Any, placement: Any) -> LayerCache:
        if placement is not None:  # no devices share one row
            placement = dataclasses.replace(placement, batch=None)
        return init_layer(policy, dataclasses.replace(spec, batch=1), placement)

    rotated_for = jnp.zeros(1, jnp.int32) if kind.rotated else None
    return Cache(tuple(row(*layer) for layer in kind.layers), rotated_for)


@partial(jax.jit, static_argnums=0, donate_argnums=1, keep_unused=True)
def emptied(kind: RowKind, row: Cache) -> Cache:
    """`empty_row` in the arrays of a row of this kind.

    Arrays in host memory stay: no policy reads slots past the tokens that it counts, and to
    fill host memory takes seconds.
    """
    return jax.tree.map(_old_if_in_host, empty_row(kind), row)


def resized(row: Cache, capacity: int) -> Cache:
    """The tokens of a row in a row of another capacity, which must have room for them. Slots of
    every array fill in order, so what a smaller one lacks is unused.
    """

    def fit(new: Any, old: Array) -> Array:
        start = (0,) * old.ndim
        if all(a <= b for a, b in zip(new.shape, old.shape, strict=True)):
            return old if new.shape == old.shape else lax.dynamic_slice(old, start, new.shape)
        return lax.dynamic_update_slice(new, old, start)

    def one(layer: LayerCache) -> LayerCache:
        spec = dataclasses.replace(layer.spec, capacity=capacity)
        if spec == layer.spec:
            return layer
        state = jax.tree.map(fit, layer.policy.init(spec), layer.state)
        if capacity > layer.spec.capacity:
            state = layer.policy.grown(state, layer.state)
        return LayerCache(state, layer.policy, spec)

    return dataclasses.replace(row, layers=tuple(map(one, row.layers)))


@partial(jax.jit, static_argnames=("spec", "capacity", "cuts"))
def copy_of_slot(
    cache: Cache, slot: Slot, tokens: Array, *, spec: CacheSpec, capacity: int, cuts: bool
) -> Cache:
    """The row of a slot in a row of `capacity`; with `cuts` its first `tokens` i32[1], or all
    if it has fewer.
    """
    row = row_of(cache, slot, spec)
    row = truncate(row, jnp.minimum(tokens, row.length)) if cuts else row
    return _copied(resized(row, capacity))


@partial(jax.jit, static_argnames="capacity")
def copy_of_row(row: Cache, *, capacity: int) -> Cache:
    """A row in another one of `capacity`, which has room for its tokens."""
    return _copied(resized(row, capacity))


@partial(jax.jit, static_argnames=("capacity", "cuts"))
def row_from(kept: Cache, tokens: Array, *, capacity: int, cuts: bool) -> Cache:
    """A row of `capacity` that begins with the first `tokens` i32[1] of a kept one; without
    `cuts` with all of them.
    """
    row = resized(kept, capacity)
    return _copied(truncate(row, tokens) if cuts else row)


def _copied(row: Cache) -> Cache:
    """`row` in arrays of its own: a program may return an argument itself, and rows are donated."""
    return jax.tree.map(jnp.copy, row)


def can_truncate(cache: Cache, spec: CacheSpec) -> bool:
    """True if rows of a cache can be copied and cut to any of their first tokens."""
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    try:
        jax.eval_shape(partial(first_tokens, spec=spec), cache, Slot.of(cache, 0), length)
    except ValueError:  # it forgets tokens, keeps codes, or is split over devices
        return False
    return True


def in_host(tree: Any) -> tuple[Any, Any]:
    """`tree` in host memory, and the shardings that it had on the device: `jax.device_put` with
    them takes it back. As it is, and None, if the device has no memory of its own.
    """
    if not has_host_memory():
        return tree, None
    device_shardings = jax.tree.map(lambda x: x.sharding, tree)
    hosted = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), tree
    )
    return hosted, device_shardings


def zeros_like(shape: Any) -> np.ndarray:
    """An array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), shape.dtype), shape.shape)


def all_finite(logits: Any) -> bool:
    """True if a row holds no NaN, which attention would spread over all tokens of a chunk.
    Waits for the device.
    """
    return bool(np.isfinite(np.max(on_host(logits), axis=-1)).all())


def replicated(sharding: Sharding) -> Sharding:
    """The sharding of an array that all devices of another one have whole."""
    return (
        NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, NamedSharding)
        else sharding
    )


def _old_if_in_host(new: Array, old: Array) -> Array:
    """`new`, or the old array where that is in host memory: see `emptied`."""
    return old if in_host_memory(old) else new


read_chunk = prefilling.on_auto_axes(prefilling._read)
_run_loop = prefilling.on_auto_axes(decode_loop)
_run_drafts = prefilling.on_auto_axes(draft_loop)
