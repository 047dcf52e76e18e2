"""The cache of one layer and of a whole model, and the functions that make them.

A cache is a pytree: the arrays of its state are the leaves; policy, sizes and placement are
static. `attention` fills it, and the functions of `flushing` and `rows` change it without
attending.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import register_dataclass

from kvjax.memory import Bytes, commit_together, nbytes, on_host, shapes
from kvjax.policies import Compressed, Full, PerLayer, Policy, Recurrent
from kvjax.policies.contract import check_contract, check_is_policy
from kvjax.policies.zones import SelectedZones
from kvjax.sharding.placement import (
    Placement,
    axes_of,
    make_state,
    run_on_parts,
    state_shardings,
    state_specs,
    to_context,
)
from kvjax.spec import CacheSpec, require_int
from kvjax.stores import Dense
from kvjax.stores.prefixed import Prefixed, PrefixedBlock
from kvjax.validation import check_alive, short_repr


@register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer: arrays in `state`, everything else static."""

    state: Any
    policy: Policy = dataclasses.field(metadata={"static": True})
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    # How it is split over devices; None: it is on one.
    placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def length(self) -> Array:
        """Tokens that each row has received: i32[B]."""
        with own_axes(self):
            length = self.state.length
        return as_rows(self, length)

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the arrays in `device` and `host` memory; with a placement, those of one
        device.

        Shapes of `jax.eval_shape`, which do not say where they lie, count where the policy puts
        them.
        """
        return nbytes(_placed_shapes(self))

    def __repr__(self) -> str:
        return f"LayerCache({self.policy!r}; {_contents(self)})"

    def full_rows(self) -> Array | None:
        """Rows whose recent block is full; None for a policy without one, and within `flushed`:
        bool[B].
        """
        if _flushed.value:
            return None
        with own_axes(self):
            return self.policy.full_rows(self.state)


@register_dataclass
@dataclass(frozen=True)
class Cache:
    """The caches of a model's layers; those of layers with a state of fixed size have a
    `kvjax.policies.Recurrent`.
    """

    layers: tuple[LayerCache, ...]
    # i32[B] the longest text that the rotation of each row's keys is right for, 0 for an empty
    # row; None if the model's RoPE does not depend on the length of a text
    rotated_for: Array | None = None

    @property
    def spec(self) -> CacheSpec:
        return self.layers[0].spec

    @property
    def length(self) -> Array:
        """Tokens that each row has received, the same in all layers: i32[B]."""
        return self.layers[0].length

    @property
    def placement(self) -> Placement | None:
        """How the cache is split over devices; None for a cache on one device."""
        return self.layers[0].placement if self.layers else None

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the arrays of all layers in `device` and `host` memory; with a placement,
        those of one device. Shapes count as in `LayerCache.nbytes`.
        """
        return nbytes([_placed_shapes(layer) for layer in self.layers])

    def __repr__(self) -> str:
        if not self.layers:
            return "Cache(no layers)"
        runs = [
            (len(list(run)), policy)
            for policy, run in groupby(layer.policy for layer in self.layers)
        ]
        layers = " + ".join(f"{count} x {policy!r}" for count, policy in runs)
        return f"Cache({layers}; {_contents(self)})"


_flushed = jax.make_user_context(False)  # jit's caches have it in their keys
C = TypeVar("C", Cache, LayerCache)


def init(
    policy: Policy | PerLayer | Sequence[Policy],
    spec: CacheSpec,
    *,
    layers: int,
    placement: Placement | None = None,
) -> Cache:
    """Makes an empty cache for a model with `layers` layers, from one policy or one policy per
    layer with attention.

    Layers that keep a state of fixed size, which `spec.recurrent` names, have the policy of the
    model; the layers in `policy` count only the others.

    At a small capacity a policy may be replaced by `Full` (see `Retrieval.dense_capacity`),
    except with a `placement`: each device would attend to a part of the tokens, for which
    nothing was measured.

    A `placement` splits the cache over the devices of a mesh. Each part is allocated on its
    device, and all functions that take the cache keep it there.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=64)
    >>> kvjax.init(kvjax.Full(), spec, layers=2).length
    Array([0], dtype=int32)
    """
    layers = require_int("init(layers=...)", layers, at_least=1)
    if not isinstance(policy, list | tuple | PerLayer):
        _check_policy("init(policy=...)", policy)
    _check_spec("init(spec=...)", spec)
    attending_layers = layers - len(_recurrent_layers(spec, layers))
    kinds = "" if attending_layers == layers else f" of which {attending_layers} have attention"
    if isinstance(policy, list | tuple):
        if len(policy) != attending_layers:
            raise ValueError(
                f"init got {len(policy)} policies for layers={layers}{kinds}; give one for each layer, or a "
                "kvjax.PerLayer"
            )
        for i, own in enumerate(policy):
            _check_policy(f"init(policy=...)[{i}]", own)
    by_layer = PerLayer.of(policy)
    by_layer.check(attending_layers, spec.kv_heads)
    if not by_layer.reaches(attending_layers):
        raise ValueError(
            f"init got policies of their own for the first {len(by_layer.first)} layers and layers={layers}"
            f"{kinds}, so no layer uses {type(by_layer.rest).__name__}; give fewer, such as "
            f"Layers(dense={attending_layers - 1}) of a preset"
        )
    policies = _policies_of(by_layer, spec, layers)
    if placement is None:
        policies = [policy.of_size(spec) for policy in policies]
    layers_made = tuple(init_layer(policy, spec, placement) for policy in policies)
    rotated_for: Any = None
    if spec.rope_by_length:
        rows = None if placement is None else _rows_sharding(placement)
        rotated_for = jax.device_put(jnp.zeros(spec.batch, jnp.int32), rows)
    return commit_together(Cache(layers_made, rotated_for))


def _policies_of(by_layer: PerLayer, spec: CacheSpec, layers: int) -> list[Policy]:
    """The policy of each layer: the model's own where it keeps a state, else the next of
    `by_layer`.
    """
    stateful = _recurrent_layers(spec, layers)
    given = map(by_layer.policy, range(layers))
    if spec.recurrent is None:
        return list(given)
    own = spec.recurrent.policy
    return [own if i in stateful else next(given) for i in range(layers)]


def _recurrent_layers(spec: CacheSpec, layers: int) -> tuple[int, ...]:
    """The layers that keep a state. Raises ValueError unless others of the `layers` remain."""
    if spec.recurrent is None:
        return ()
    numbers = spec.recurrent.layers
    if numbers[-1] >= layers or len(numbers) == layers:
        raise ValueError(
            f"init got layers={layers} and a spec in which layers {list(numbers)} keep a state of fixed size; give "
            "the number of all layers of the model, of which at least one has attention"
        )
    return numbers


def _rows_sharding(placement: Placement) -> NamedSharding:
    return NamedSharding(placement.mesh, placement.spec("B"))


def init_layer(
    policy: Policy, spec: CacheSpec, placement: Placement | None = None
) -> LayerCache:
    """Makes an empty cache for one attention layer, split over the devices of a `placement` if
    one is given.

    Raises:
      ValueError: a `policy` that is not a policy, a `spec` that is not a CacheSpec, or rows, KV
        heads or a policy that the placement cannot split.
    """
    if isinstance(policy, PerLayer | list | tuple):
        raise ValueError(
            f"init_layer takes the policy of one layer, got {short_repr(policy)}; pass one of its policies, such as "
            "policies.policy(layer) of a PerLayer, or make all layers with kvjax.init"
        )
    _check_policy("init_layer(policy=...)", policy)
    _check_spec("init_layer(spec=...)", spec)
    check_contract(policy, spec)
    if spec.value_dim is not None and not _takes_value_dim(policy):
        raise ValueError(
            f"CacheSpec(value_dim={spec.value_dim}, head_dim={spec.head_dim}): only kvjax.Full, and kvjax.Retrieval "
            f"and kvjax.Compressed over kvjax.Dense keep values of another size than keys; got {policy}"
        )
    if placement is None:
        # One program for all arrays, unless some are in host memory: see `host_zeros`.
        has_host_arrays = any(
            a.memory_space == jax.memory.Space.Host
            for a in _empty.trace(policy, spec).jaxpr.out_avals
        )
        state = policy.init(spec) if has_host_arrays else _empty(policy, spec)
        return commit_together(LayerCache(state, policy, spec))
    if not isinstance(placement, Placement):
        raise ValueError(
            f"placement must be a kvjax.Placement, got {short_repr(placement)}; make one with "
            'kvjax.Placement(mesh=mesh, batch="data", heads="model")'
        )
    if (parts := placement.parts("context")) > 1:
        policy = policy.with_divisible_chunks(parts)
    make: Any = make_state  # cached per policy, which is hashable
    return LayerCache(make(policy, spec, placement)(), policy, spec, placement)


def _takes_value_dim(policy: Any) -> bool:
    if isinstance(policy, Recurrent):
        return True  # it keeps no values
    if not isinstance(policy, SelectedZones | Compressed):
        return isinstance(policy, Full)
    store: Any = policy.store
    return isinstance(store.store if isinstance(store, Prefixed) else store, Dense)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _empty(policy: Policy, spec: CacheSpec) -> Any:
    """An empty state by one program: array by array, each shape and dtype would be one to
    compile.
    """
    return policy.init(spec)


def _placed_shapes(layer: LayerCache) -> Any:
    """The state of `layer`; shapes without a sharding have that of the policy's own array."""
    leaves, structure = jax.tree.flatten(layer.state)
    if not any(map(_has_no_home, leaves)):
        return layer.state
    homes = jax.tree.leaves(_homes(layer.policy, layer.spec, layer.placement))
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)
        if _has_no_home(leaf)
        else leaf
        for leaf, home in zip(leaves, homes, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _has_no_home(leaf: Any) -> bool:
    """True for the shape of an array that does not say on which devices it is."""
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


@lru_cache(maxsize=256)  # layers of a model have few policies
def _homes(policy: Policy, spec: CacheSpec, placement: Placement | None) -> Any:
    """The sharding of each array of a policy's state, memory kinds included."""
    if placement is not None:
        return state_shardings(policy, spec, placement)
    return jax.tree.map(lambda shape: shape.sharding, shapes(partial(policy.init, spec)))


def shardings(cache: C) -> C:
    """The `jax.sharding.NamedSharding` of each array of a cache with a placement, memory kinds
    included.

    For use with `jit`, `device_put` and orbax. `cache` may hold shapes in place of arrays, as
    `jax.eval_shape` of `kvjax.init` returns it.

    Raises:
      ValueError: a `cache` that is not a cache, or one without a placement.
    """
    if not isinstance(cache, Cache | LayerCache):
        raise ValueError(
            f"shardings takes a cache, got {short_repr(cache)}; kvjax.init makes one"
        )
    if any(layer.placement is None for layer in layers_of(cache)):
        raise ValueError(
            "shardings takes a cache with a placement, got one without; make it with kvjax.init(..., placement=...)"
        )
    made = with_states(
        cache, [state_shardings(x.policy, x.spec, placement_of(x)) for x in layers_of(cache)]
    )
    if isinstance(made, Cache) and made.rotated_for is not None:
        rows: Any = _rows_sharding(placement_of(layers_of(cache)[0]))
        made = dataclasses.replace(made, rotated_for=rows)
    return made


def any_full(cache: Cache | LayerCache) -> Array:
    """True if any recent block is full, so that `flush` would move tokens: bool[]."""
    check_cache("any_full", cache)
    with own_axes(cache):
        full = rows_to_flush(layers_of(cache))
        found = jnp.any(jnp.stack(full)) if full else jnp.zeros((), bool)
    return to_context(found)


def flushed() -> AbstractContextManager[None]:
    """A context in which no recent block is full, so that `flush` does nothing and needs no
    condition.

    For loops that test `any_full` in their own condition, such as the one of `kvjax.generate`:
    on a GPU each condition makes the host wait. It is a part of the keys of jit's caches.
    """
    return _flushed(True)


def raise_on_overflow(cache: Cache | LayerCache) -> None:
    """Raises RuntimeError if a row has dropped a token. Call it outside jit; it reads flags
    from the device.
    """
    check_cache("raise_on_overflow", cache)
    layers = layers_of(cache)
    if any(isinstance(layer.state.overflow, Tracer) for layer in layers):
        raise ValueError(
            "raise_on_overflow reads flags from the device, which is not possible inside jit; return the cache and "
            "call it outside"
        )
    flags = _overflows(layers)
    rows = np.flatnonzero(flags.any(axis=0)).tolist()
    if rows:
        raise RuntimeError(
            f"rows {rows} dropped tokens in layers {np.flatnonzero(flags.any(axis=1)).tolist()}: the capacity of "
            f"{layers[0].spec.capacity} tokens is used up (make the cache with a larger capacity), or kvjax.flush was "
            "not called before each decode step, or kvjax.rollback got a length that is out of reach"
        )
    if isinstance(cache, Cache):
        check_rotation(cache, cache.length, RuntimeError)


def shared_tokens(cache: Cache | LayerCache) -> np.ndarray:
    """Tokens of each row that do not count towards the capacity, because a prefix holds them:
    i32[B] on the host.
    """
    stores = [getattr(layer.state, "store", None) for layer in layers_of(cache)]
    if not stores or not all(isinstance(store, PrefixedBlock) for store in stores):
        return np.zeros(cache.spec.batch, np.int32)
    return np.min([on_host(store.base) for store in stores if store is not None], axis=0)


def check_rotation(
    cache: Cache, total: Array | np.ndarray, error: type[Exception] = ValueError
) -> None:
    """Raises an error for a row whose keys are rotated for a shorter text than its `total`
    i32[B] tokens.

    Does nothing for a model whose RoPE does not depend on the length, or under jit.
    """
    for row in outgrown(cache, total):
        most = on_host(cache.rotated_for)[row]
        needed = on_host(total)[row]
        raise error(
            f"row {row} holds keys that are rotated for a text of at most {most} tokens, because this model's "
            f"RoPE depends on the length of the text; {needed} tokens need other keys: read the whole text again "
            "into an empty cache, with prefill(..., final=the most tokens that a row will hold), or with "
            "generate(max_new_tokens=...) for the whole answer"
        )


def _overflows(layers: Sequence[LayerCache]) -> np.ndarray:
    """The rows that dropped tokens, by layer: bool[L, B]."""
    return np.stack([on_host(layer.state.overflow) for layer in layers])


def outgrown(cache: Cache, total: Array | np.ndarray) -> np.ndarray:
    """i64[n] the rows whose keys are rotated for a shorter text than `total` i32[B] tokens;
    none under jit.
    """
    if (
        cache.rotated_for is None
        or isinstance(cache.rotated_for, Tracer)
        or isinstance(total, Tracer)
    ):
        return np.zeros(0, np.int64)
    most = on_host(cache.rotated_for)
    return np.flatnonzero((most > 0) & (on_host(total) > most))


def check_layer_cache(verb: str, cache: Any) -> None:
    """Raises ValueError unless `verb` can take `cache` as the cache of a layer: one whose arrays
    were not donated.
    """
    if not isinstance(cache, LayerCache):
        check_no_cache(verb, cache)
    check_alive(verb, cache)


def check_no_cache(verb: str, cache: Any) -> None:
    """Raises ValueError for a `cache` that is no `LayerCache`; `attention` takes None."""
    if isinstance(cache, Cache):
        raise ValueError(
            f"{verb} takes the cache of one layer, got the Cache of a whole model; pass cache.layers[i], and put the "
            "returned layers into dataclasses.replace(cache, layers=(...))"
        )
    if cache is not None or verb != "attention":
        wanted = "a kvjax.LayerCache"
        cure = "kvjax.init_layer makes one"
        if verb == "attention":
            wanted += " or None"
        elif callable(cache):
            cure = f"kvjax.generation.{verb} takes a model"
        raise ValueError(f"{verb} takes {wanted}, got {short_repr(cache)}; {cure}")


def check_cache(where: str, cache: Any) -> None:
    """Raises ValueError unless `cache` is one of a layer or a model, whose arrays were not
    donated.
    """
    if not isinstance(cache, Cache | LayerCache):
        raise ValueError(
            f"{where} takes a cache, got {short_repr(cache)}; kvjax.init makes one"
        )
    check_alive(where, cache)


def layers_of(cache: Cache | LayerCache) -> tuple[LayerCache, ...]:
    """The layers of a cache; of a layer's cache, the layer alone."""
    return cache.layers if isinstance(cache, Cache) else (cache,)


def attending(cache: Cache) -> tuple[LayerCache, ...]:
    """The layers of a cache that keep keys and values, and so attend."""
    return tuple(layer for layer in cache.layers if not isinstance(layer.policy, Recurrent))


def rows_to_flush(layers: tuple[LayerCache, ...]) -> list[Array]:
    """Full rows, for each layer that can have some: bool[B]."""
    return [rows for layer in layers if (rows := layer.full_rows()) is not None]


def own_axes(cache: Cache | LayerCache) -> AbstractContextManager[Any]:
    """A context in which the arrays of a cache with a placement can be computed with; see
    `axes_of`.
    """
    placement = layers_of(cache)[0].placement
    return nullcontext() if placement is None else axes_of(placement.mesh.abstract_mesh)


def as_rows(cache: Cache | LayerCache, x: Array) -> Array:
    """x [B] as an array of the surrounding mesh, split like the rows of the cache."""
    placement = layers_of(cache)[0].placement
    return x if placement is None else to_context(x, placement.spec("B"))


def placement_of(cache: LayerCache) -> Placement:
    """The placement of a cache that has one."""
    assert cache.placement is not None
    return cache.placement


def specs_of(cache: LayerCache) -> Any:
    """The PartitionSpecs of the arrays of a state."""
    return state_specs(cache.policy, cache.spec, placement_of(cache))


def part_of(cache: LayerCache, state: Any) -> LayerCache:
    """The cache of one device, whose part of the state is `state`."""
    placement = placement_of(cache)
    policy = placement.policy_of_part(cache.policy)
    spec = placement.local(cache.spec)
    state = placement.enter(cache.policy, cache.spec, state)
    return dataclasses.replace(cache, state=state, policy=policy, spec=spec, placement=None)


def as_whole(cache: LayerCache, state: Any) -> Any:
    """The state of one device's part, in the tree structure of the whole cache's state."""
    return jax.tree.unflatten(jax.tree.structure(cache.state), jax.tree.leaves(state))


def run_by_part(
    f: Callable[..., Cache], cache: Any, *operands: Any, specs: tuple[Any, ...] = ()
) -> Any:
    """Runs f(cache, *operands) on each device for its part of the cache, and returns the cache
    with the states that `f` gives; `specs` are PartitionSpecs of `operands`.
    """
    layers = layers_of(cache)
    states = [layer.state for layer in layers]
    layer_specs = [specs_of(layer) for layer in layers]

    def local(states: list[Any], *operands: Any) -> list[Any]:
        pairs = zip(layers, states, strict=True)
        part = Cache(tuple(part_of(layer, state) for layer, state in pairs))
        changed = f(part, *operands)
        return [
            as_whole(layer, own.state)
            for layer, own in zip(layers, changed.layers, strict=True)
        ]

    new_states = run_on_parts(
        placement_of(layers[0]), local, (layer_specs, *specs), layer_specs, states, *operands
    )
    return with_states(cache, new_states)


def with_layers(cache: Any, layers: Sequence[LayerCache]) -> Any:
    """`cache` with other layers, or the one layer if it is a `LayerCache`."""
    return (
        dataclasses.replace(cache, layers=tuple(layers))
        if isinstance(cache, Cache)
        else layers[0]
    )


def map_layers(change: Callable[[LayerCache], LayerCache], cache: Cache) -> Cache:
    """`cache` with each layer as `change` makes it."""
    return dataclasses.replace(cache, layers=tuple(map(change, cache.layers)))


def with_states(cache: Any, states: Sequence[Any]) -> Any:
    """`cache` with another state of each layer."""
    pairs = zip(layers_of(cache), states, strict=True)
    return with_layers(
        cache, [dataclasses.replace(layer, state=state) for layer, state in pairs]
    )


_LAYER = "kvjax.Retrieval(selector=kvjax.Fier(), budget=256)"  # a preset has the policies of all layers
_PRESETS = "kvjax.presets.fier(256) or kvjax.presets.parse('fier:budget=256')"


def _check_policy(where: str, policy: Any) -> None:
    check_is_policy(where, policy, _LAYER if where.startswith("init_layer") else _PRESETS)


def _check_spec(where: str, spec: Any) -> None:
    if not isinstance(spec, CacheSpec):
        raise ValueError(
            f"{where} must be a kvjax.CacheSpec, got {short_repr(spec)}; make one with kvjax.CacheSpec(batch=..., "
            "q_heads=..., kv_heads=..., head_dim=..., capacity=...), or model.spec(batch=..., capacity=...)"
        )


def _contents(cache: Cache | LayerCache) -> str:
    """Rows, length and bytes for a repr. Leaves may be arrays, tracers, shapes, or whatever
    tree.map returned.
    """
    leaves = jax.tree.leaves(cache)
    spec = cache.spec
    rows = f"{spec.batch} row{'s' if spec.batch > 1 else ''}"
    if not all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves):
        return f"{rows}, capacity {spec.capacity}, leaves are not arrays"
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        length = "length traced"
    elif not all(isinstance(leaf, Array | np.ndarray) for leaf in leaves):
        length = "shapes alone"
    elif any(isinstance(leaf, Array) and leaf.is_deleted() for leaf in leaves):
        return f"{rows}, capacity {spec.capacity}, donated: its arrays are gone"
    elif not all(isinstance(leaf, np.ndarray) or leaf.is_fully_addressable for leaf in leaves):
        length = "length on several hosts"
    else:
        lengths = np.asarray(cache.length).reshape(-1)
        length = f"length {lengths.tolist() if lengths.size <= 4 else f'{lengths.min()} to {lengths.max()}'}"
        if dropped := np.flatnonzero(_overflows(layers_of(cache)).any(axis=0)).tolist():
            return f"{rows}, {length} of {spec.capacity}, rows {dropped} dropped tokens, {cache.nbytes}"
    return f"{rows}, {length} of {spec.capacity}, {cache.nbytes}"
