"""Rows and slots of an engine: making, cutting and seating rows, and the prefixes that they
share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import register_dataclass

from kvjax.cache.cache import Cache, LayerCache, init_layer, with_states
from kvjax.cache.editing import insert, take_rows, truncate
from kvjax.memory import commit_together, has_host_memory, in_host_memory, on_host
from kvjax.policies import Recurrent
from kvjax.policies.per_row import PerRow, PerRowState
from kvjax.serve.prefixes import alone, seat, unshared
from kvjax.spec import CacheSpec, require_int
from kvjax.stores.prefixed import Prefixed

LONGEST = 2**30  # tokens of a chunk or a slot without a limit


def same_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens of two prompts are the same."""
    most = min(len(a), len(b))
    return int(np.argmin(np.append(a[:most] == b[:most], False)))


@dataclass(frozen=True)
class Seat:
    """Where a row begins: `shared` tokens of its prompt are those of place `prefix`; -1 for a
    row of its own.
    """

    prefix: int = -1
    shared: int = 0
    store: bool = False  # the place does not hold them yet


@register_dataclass
@dataclass(frozen=True)
class Slot:
    """A row of the cache, among all and in its group of one capacity."""

    index: Any  # i32[]
    place: Any  # i32[]
    group: int = field(metadata={"static": True})

    @classmethod
    def of(cls, cache: Cache, index: int) -> Slot:
        policy = cache.layers[0].policy
        group, place = policy.group_of(index) if isinstance(policy, PerRow) else (0, index)
        return cls(np.int32(index), np.int32(place), group)


@dataclass
class Reading:
    """A prompt that is read into a row, for the requests that it serves."""

    requests: list[Any]
    cache: Any
    chunks: list[int]  # sizes that are left
    start: int = 0  # tokens that are stored
    logits: Any = None
    seat: Seat | None = None  # where its rows begin, once the first has a slot
    homes: Any = None  # the shardings of cache and logits that are parked


@dataclass
class Places:
    """Places for prefixes, each used by slots, in the order in which they were last used."""

    policies: Sequence[Any]  # of the cache with prefixes, by layer
    prompts: list[np.ndarray]  # by place, the tokens that it holds; empty if none
    sharers: int  # most slots of a place
    users: list[set[int]] = field(default_factory=list)  # by place, slots
    last: list[int] = field(default_factory=list)  # by place, when it was used
    clock: int = 0

    @classmethod
    def of(cls, cache: Cache, count: int, sharers: int | None) -> Places:
        policies, users = (
            [layer.policy for layer in cache.layers],
            [set[int]() for _ in range(count)],
        )
        return cls(
            policies,
            [np.zeros(0, np.int32)] * count,
            sharers or cache.spec.batch,
            users,
            [0] * count,
        )

    def takes(self, seat: Seat) -> bool:
        """True if one more row can begin there."""
        return seat.prefix < 0 or len(self.users[seat.prefix]) < self.sharers

    def held(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a prompt a prefix holds, in the layer where
        that is least.
        """
        least = tokens
        for policy in self.policies:
            chunk, stay = policy.demote.leave, len(policy.demote.staying(policy.local))
            least = min(
                least, max(tokens - policy.sink - stay, 0) // chunk * chunk, policy.store.tokens
            )
        return least

    def check_room(self, prompt: int, new: int, capacity: int) -> None:
        """Raises ValueError for a request that does not fit in a slot beside the prefix that it
        would have.
        """
        if (own := prompt + new - self.held(prompt)) > capacity:
            raise ValueError(
                f"{prompt} prompt + {new} new tokens need {own} tokens beside the longest prefix, and a slot has "
                f"{capacity}; make the engine with larger capacity or prefix_tokens"
            )

    def find(
        self, prompt: np.ndarray, answers: int, others: Iterable[np.ndarray], room: int
    ) -> Seat | None:
        """The seat of rows for a prompt; None if they must wait for a place, because `room`
        tokens are too few alone.

        A prompt with several `answers` is shared as a whole, and one that begins like some of
        the `others` as far as that. A place whose last row has gone keeps its prefix, for
        prompts to come, until another needs it.
        """
        want = (
            len(prompt)
            if answers > 1
            else max((same_tokens(prompt, other) for other in others), default=0)
        )
        best = Seat()
        for place, known in enumerate(self.prompts):
            better = (
                len(known) > best.shared
                and len(self.users[place]) < self.sharers
                and self.held(len(known))
            )
            if better and same_tokens(prompt, known) == len(known):
                best = Seat(place, len(known))
        fits = len(prompt) - self.held(best.shared) <= room
        if not fits:
            want = len(prompt)
        free = [place for place, users in enumerate(self.users) if not users]
        if self.held(want) > self.held(best.shared) and free:
            return Seat(min(free, key=self.last.__getitem__), want, store=True)
        return best if fits else None

    def use(self, seat: Seat, slot: int, prompt: np.ndarray) -> None:
        """Notes that the row in `slot` begins at `seat`."""
        self.leave(slot)
        if seat.prefix >= 0:
            self.clock += 1
            self.prompts[seat.prefix], self.last[seat.prefix] = (
                prompt[: seat.shared],
                self.clock,
            )
            self.users[seat.prefix].add(slot)

    def leave(self, slot: int) -> None:
        for users in self.users:
            users.discard(slot)


@partial(jax.jit, donate_argnums=(0, 1, 2), static_argnames="store")
def put(
    cache: Cache,
    logits: Array,
    active: Array,
    row: Cache,
    row_logits: Array,
    slot: Slot,
    place: Any,
    *,
    store: bool,
) -> tuple[Cache, Array, Array]:
    """The cache and the logits with those of a row in a slot, which then is active; `place` is
    its prefix and how many tokens that has."""
    logits = lax.dynamic_update_slice_in_dim(logits, row_logits, slot.index, axis=0)
    active = lax.dynamic_update_slice_in_dim(active, jnp.ones(1, bool), slot.index, axis=0)
    if place is not None:
        return (
            seat(cache, row, slot.index, prefix=place[0], shared=place[1], store=store),
            logits,
            active,
        )
    if not isinstance(cache.layers[0].policy, PerRow):
        return insert(cache, row, slot.index), logits, active
    pairs: Any = zip(cache.layers, row.layers, strict=True)
    whole = with_states(
        cache, [a.policy.put_row(a.state, b.state, slot.group, slot.place) for a, b in pairs]
    )
    if cache.rotated_for is not None:
        rotated = lax.dynamic_update_slice_in_dim(
            cache.rotated_for, jnp.asarray(row.rotated_for), slot.index, axis=0
        )
        whole = dataclasses.replace(whole, rotated_for=rotated)
    return whole, logits, active


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def clear(
    layers: tuple[Any, ...],
    rotated: bool,
    cache: Cache,
    logits: Array,
    active: Array,
    slot: Slot,
    place: Any,
) -> tuple[Cache, Array, Array]:
    """`put` of an empty row: see `empty_row`."""
    row, nothing = empty_row(layers, rotated), jnp.zeros_like(logits[:1])
    new, *rest = put(cache, logits, active, row, nothing, slot, place, store=False)
    return jax.tree.map(_as_on_host, new, cache), *rest


@partial(jax.jit, static_argnames="spec")
def first_tokens(cache: Cache, slot: Slot, length: Array, *, spec: CacheSpec) -> Cache:
    """`row_of` a slot, cut to its first tokens."""
    return truncate(row_of(cache, slot, spec), length)


def row_of(cache: Cache, slot: Slot, spec: CacheSpec) -> Cache:
    """The row of a slot as a cache of one row, of `spec` if slots differ or may share prefixes."""
    policy: Any = cache.layers[0].policy
    if isinstance(policy, PerRow):
        return _take_row(cache, slot, spec)
    if cache.placement is not None and cache.placement.parts("batch") > 1:
        raise ValueError(
            f"no row can be taken out of slots that devices share, {cache.placement}; split heads alone"
        )
    if isinstance(getattr(policy, "store", None), Prefixed):
        return unshared(cache, slot.index, capacity=spec.capacity)
    return take_rows(cache, slot.index[None])


@partial(jax.jit, static_argnums=2, inline=True)
def _take_row(cache: Cache, slot: Slot, spec: CacheSpec) -> Cache:
    def take(layer: Any) -> LayerCache:
        own = dataclasses.replace(layer.spec, batch=1, capacity=spec.capacity)
        return LayerCache(
            layer.policy.take_row(layer.state, slot.group, slot.place, own),
            layer.policy.policy,
            own,
        )

    rotated = (
        None
        if cache.rotated_for is None
        else lax.dynamic_slice_in_dim(cache.rotated_for, slot.index, 1)
    )
    return Cache(tuple(map(take, cache.layers)), rotated)


def with_small_slots(cache: Cache, small: Mapping[int, int]) -> Cache:
    """`cache`, whose arrays it keeps, with more rows of smaller capacities: how many of each."""
    if not isinstance(small, Mapping):
        raise ValueError(
            f"small_slots must say how many slots of each capacity, such as {{8192: 12}}; got {small!r}"
        )
    most, sizes = cache.spec.capacity, [(cache.spec.batch, cache.spec.capacity)]
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
    for capacity in sorted(small, reverse=True):
        capacity = require_int(
            "a capacity of small_slots", capacity, at_least=1, at_most=most - 1
        )
        sizes.append(
            (require_int(f"small_slots[{capacity}]", small[capacity], at_least=1), capacity)
        )

    def widened(layer: LayerCache) -> LayerCache:
        policy = PerRow(policy=layer.policy, sizes=tuple(sizes))
        own = [
            dataclasses.replace(layer.spec, batch=rows, capacity=capacity)
            for rows, capacity in sizes
        ]
        state = PerRowState(
            (layer.state, *(init_layer(layer.policy, spec).state for spec in own[1:]))
        )
        return LayerCache(
            state, policy, dataclasses.replace(layer.spec, batch=sum(rows for rows, _ in sizes))
        )

    layers = tuple(map(widened, cache.layers))
    rotated_for = (
        None if cache.rotated_for is None else jnp.zeros(layers[0].spec.batch, jnp.int32)
    )
    return commit_together(Cache(layers, rotated_for))


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
    longer = [
        dataclasses.replace(layer.spec, capacity=layer.spec.capacity + tokens)
        for layer in cache.layers
    ]
    layers = zip(jax.eval_shape(alone, cache).layers, longer, strict=True)
    return dataclasses.replace(
        cache, layers=tuple(dataclasses.replace(layer, spec=spec) for layer, spec in layers)
    )


def empty_row(layers: tuple[Any, ...], rotated: bool) -> Cache:
    """An empty cache of one row of these layers: policies, specs and placements of a cache of
    many.
    """

    def row(policy: Any, spec: Any, placement: Any) -> Any:
        alone = None if placement is None else dataclasses.replace(placement, batch=None)
        return init_layer(policy, dataclasses.replace(spec, batch=1), alone)

    return Cache(
        tuple(row(*layer) for layer in layers), jnp.zeros(1, jnp.int32) if rotated else None
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2, keep_unused=True)
def emptied(layers: tuple[Any, ...], rotated: bool, row: Cache) -> Cache:
    """`empty_row` in the arrays of a row of these layers.

    Arrays in host memory stay: no policy reads slots past the tokens that it counts, and to
    fill host memory takes seconds.
    """
    return jax.tree.map(_as_on_host, empty_row(layers, rotated), row)


def parked(reading: Reading) -> Reading:
    """The row of a prompt in host memory, if the device has memory of its own."""
    if not has_host_memory():
        return reading
    tree = reading.cache, reading.logits
    homes = jax.tree.map(lambda x: x.sharding, tree)
    hosted = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), tree
    )
    return dataclasses.replace(reading, cache=hosted[0], logits=hosted[1], homes=homes)


def can_share(first: Any, cache: Cache) -> bool:
    """True if rows of a cache can be copied and cut to a prefix."""
    try:
        jax.eval_shape(first, cache, Slot.of(cache, 0), jax.ShapeDtypeStruct((1,), jnp.int32))
    except (
        ValueError
    ):  # a policy that forgets tokens, a store of codes, or rows that are split over devices
        return False
    return True


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


def _as_on_host(new: Array, old: Array) -> Array:
    return old if in_host_memory(old) else new
