"""Several devices: how the rows and the KV heads of a cache are split over a mesh.

    mesh = jax.make_mesh((2, 4), ("data", "model"))
    placement = kvjax.Placement(mesh=mesh, batch="data", heads="model")
    cache = kvjax.init(policy, spec, layers=32, placement=placement)

A cache keeps its placement, and every function of kvjax that takes the cache follows it. The
functions run in `jax.shard_map`: each device works on its own rows and heads, with the policy
that it would have alone. (A GPU kernel under plain `jit` has no rule for split operands: XLA
then gathers the whole cache on every device. kvjax warns once.)

kvjax traces `Policy.init` for more rows and for more heads, and sees which axes of a state's
arrays grow. An array must begin with its rows, and an axis that joins heads with something else
must count the heads first. A mean over all heads is the only thing that a device cannot compute
alone; a policy calls `mean_over_heads` for it.

A letter for each axis says how an array is split, such as "BKS." for keys [B, K, S, D] of a
history: B rows, K or N heads, S slots of a history that context splits; axes of any other letter,
or of ".", are not split. `Placement.spec` makes PartitionSpecs of letters, and `_letters` finds
those of a policy's state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.memory import growth, shapes, to_device, to_host
from kvjax.sharding.context import Axis
from kvjax.spec import CacheSpec
from kvjax.validation import check_one_of, parts_of, short_repr

Axes: TypeAlias = str | tuple[str, ...] | None
AXES = ("batch", "heads", "context")  # fields of a Placement
Selecting: TypeAlias = Literal["exact", "share"]

_WHOLE = PartitionSpec()
# Both are set while a function is traced, and are parts of the keys of jit's caches.
_model_mesh = jax.make_user_context(None)  # the AbstractMesh of `call_model`
_placement_of_part = jax.make_user_context(None)  # the Placement of `run_on_parts`


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which axes of a mesh split the rows, the KV heads and the tokens of a cache. Static and
    hashable.

    `kvjax.init` raises an error for a size that an axis does not divide. Arrays that no axis
    splits are on all devices. `context` splits the history of each row, see
    `kvjax.sharding.context`, and leaves the few newest tokens on all devices.

    `selection` says how a policy selects among tokens that `context` splits: "exact" makes the
    selection of one device, in two or three exchanges before a step attends; by "share" each
    device selects its part of the budget from its own tokens, and one exchange merges what they
    attend to, see `kvjax.sharding.context.shares`. Both keep the same arrays.

    Raises:
      ValueError: an axis that the mesh does not have, or one that is named twice; a selection by
        share without `context`.
    """

    mesh: Mesh = field(kw_only=False)
    batch: Axes = None  # axes that split the rows
    heads: Axes = None  # axes that split the KV heads, and the query heads with them
    context: Axes = None  # axes that split the tokens of a row
    selection: Selecting = "exact"  # how a step selects among split tokens

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise ValueError(
                f"Placement(mesh=...) must be a jax.sharding.Mesh, got {short_repr(self.mesh)}; make one with "
                'jax.make_mesh((2, 4), ("data", "model"))'
            )
        used: dict[str, str] = {}
        for what in AXES:
            axes = getattr(self, what)
            if isinstance(axes, list):
                object.__setattr__(self, what, tuple(axes))
            for axis in _axis_names(what, axes):
                if axis not in self.mesh.shape:
                    raise ValueError(
                        f"Placement({what}={axis!r}): the mesh has no axis of that name; its axes are {self._axes()}"
                    )
                if axis in used:
                    raise ValueError(
                        f"Placement({what}={axis!r}): the axis splits {used[axis]} already; give each its own axis"
                    )
                used[axis] = what
        check_one_of("Placement", get_args(Selecting), selection=self.selection)
        if self.selection == "share" and self.context is None:
            raise ValueError(
                "Placement(selection='share') says how devices select among tokens that context splits; name its "
                "axis (context=...), or leave selection out"
            )

    def __repr__(self) -> str:
        parts = [
            f"{what}={axes!r}" for what in AXES if (axes := getattr(self, what)) is not None
        ]
        by = [] if self.selection == "exact" else [f"selection={self.selection!r}"]
        return f"Placement({', '.join([self._axes(), *parts, *by])})"

    def _axes(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.mesh.shape.items())

    @property
    def auto(self) -> Placement:
        """The same placement on a mesh whose axes are all Auto, where XLA itself splits the
        products of a model.
        """
        return dataclasses.replace(self, mesh=Mesh(self.mesh.devices, self.mesh.axis_names))

    def parts(self, what: str) -> int:
        """Returns the number of parts into which the "batch", the "heads" or the "context" is
        split.
        """
        return self.devices_of(getattr(self, what))

    def devices_of(self, axes: Axes) -> int:
        """Returns the number of devices along `axes` of the mesh; 1 for None."""
        return math.prod(self.mesh.shape[axis] for axis in _axis_names("axes", axes))

    @property
    def heads_and_context(self) -> Axes:
        """The axes that split a part of a model without heads, such as its MLP."""
        heads = _axis_names("heads", self.heads)
        context = _axis_names("context", self.context)
        axes = (*heads, *context)
        return axes if len(axes) > 1 else next(iter(axes), None)

    def spec(self, letters: str) -> PartitionSpec:
        """The PartitionSpec of an array whose axes have these letters: B rows, K and N heads, S
        slots of the history; axes of other letters are not split."""
        split = {"B": self.batch, "K": self.heads, "N": self.heads, "S": self.context}
        return PartitionSpec(*(split.get(letter) for letter in letters))

    def local(self, spec: CacheSpec) -> CacheSpec:
        """Returns the sizes of one device's part of a cache of `spec`.

        Raises:
          ValueError: rows or KV heads that cannot be split evenly.
        """
        for what, size, name in (
            ("batch", spec.batch, "rows"),
            ("heads", spec.kv_heads, "KV heads"),
        ):
            parts = self.parts(what)
            if size % parts:
                fits = math.gcd(parts, size)  # devices over which it can be split
                cure = f"make the batch a multiple of {parts}, or split it over {fits}"
                if what == "heads" and fits == 1:
                    cure = "split the batch or the tokens of a row (context) in their place"
                elif what == "heads":
                    rest = parts // fits
                    cure = f"use an axis of {fits} for heads and one of {rest} for context, or for the batch"
                raise ValueError(
                    f"Placement({what}={getattr(self, what)!r}) cannot split {size} {name} evenly over {parts} "
                    f"devices; {cure}"
                )
        heads = self.parts("heads")
        return dataclasses.replace(
            spec,
            batch=spec.batch // self.parts("batch"),
            q_heads=spec.q_heads // heads,
            kv_heads=spec.kv_heads // heads,
        )

    def check(self, policy: Any, spec: CacheSpec) -> None:
        """Raises ValueError if a cache of `policy` cannot be split by this placement."""
        if self.parts("heads") > 1 and getattr(policy, "heads", None) is not None:
            raise ValueError(
                f"{policy} numbers the KV heads of a layer, so they cannot be split over the {self.parts('heads')} "
                "devices of heads; split only the batch, or use a policy that treats all heads alike"
            )
        if self.parts("heads") > 1 and any(
            getattr(part, "joins_heads", False) for part in parts_of(policy)
        ):
            raise ValueError(
                f"{policy} computes with all KV heads of a layer together, so they cannot be split over the "
                f"{self.parts('heads')} devices of heads; split only the batch"
            )
        part_of_policy = self.policy_of_part(policy)
        if (
            self.parts("context") > 1
            and part_of_policy is policy
            and growth(partial(_empty, policy, spec))
        ):
            raise ValueError(
                f"{policy} keeps an array that grows with the capacity and has no over_context, so its tokens cannot "
                f"be split over the {self.parts('context')} devices of context; split only rows and heads"
            )

        # The parts of all devices together must be the whole of each array.
        whole = _whole_shapes(policy, spec)
        devices = {
            "B": self.parts("batch"),
            "K": self.parts("heads"),
            "S": self.parts("context"),
            ".": 1,
        }
        arrays = _zip_with_paths(whole, _part_shapes(policy, spec, self))
        for (path, leaf, part), letters in zip(
            arrays, _letters(policy, spec, self), strict=True
        ):
            of_all = [
                size * devices[letter] for size, letter in zip(part.shape, letters, strict=True)
            ]
            if list(leaf.shape) != of_all:
                raise ValueError(
                    f"{policy} cannot be split as {self}: its array {path} is {list(leaf.shape)}, but a cache of the "
                    f"rows and heads of one device has {list(part.shape)}"
                )

    def policy_of_part(self, policy: Any) -> Any:
        """Returns the policy that a device runs: `policy`, or its variant for a device with a
        part of each row's tokens.
        """
        parts = self.parts("context")
        if self.context is None or parts == 1:
            return policy
        if self.selection == "share":
            return policy.over_context_by_share(self.context, parts)
        return policy.over_context(self.context, parts)

    def enter(self, policy: Any, spec: CacheSpec, state: Any) -> Any:
        """A device's part of a state, in the tree structure of `policy_of_part`'s state.

        `shard_map` splits the arrays, but keeps the structure of the whole cache's state, whose
        static fields are those of the whole.
        """
        return jax.tree.unflatten(
            jax.tree.structure(_part_shapes(policy, spec, self)), jax.tree.leaves(state)
        )


def state_specs(policy: Any, spec: CacheSpec, placement: Placement) -> Any:
    """Returns the tree of PartitionSpecs of a policy's state."""
    structure = jax.tree.structure(_whole_shapes(policy, spec))
    specs = [placement.spec(letters) for letters in _letters(policy, spec, placement)]
    return jax.tree.unflatten(structure, specs)


def state_shardings(policy: Any, spec: CacheSpec, placement: Placement) -> Any:
    """Returns the tree of NamedShardings of a policy's state, each with the memory kind in
    which the policy puts the array.
    """
    specs = state_specs(policy, spec, placement)
    return jax.tree.map(
        lambda leaf, split: NamedSharding(
            placement.mesh, split, memory_kind=leaf.sharding.memory_kind
        ),
        shapes(partial(policy.init, spec)),
        specs,
    )


@lru_cache(maxsize=256)
def make_state(policy: Any, spec: CacheSpec, placement: Placement) -> Any:
    """A jitted function without arguments that makes an empty state, each part of it on its
    device.

    Raises:
      ValueError: rows, KV heads or a policy that cannot be split.
    """
    placement.check(policy, spec)
    return jax.jit(
        partial(policy.init, spec), out_shardings=state_shardings(policy, spec, placement)
    )


def in_order_of_place(
    policy: Any, spec: CacheSpec, placement: Placement | None, state: Any, *, back: bool = False
) -> Any:
    """A state whose histories have their slots in order of place, as on one device; with
    `back`, the inverse.

    The slots of a history over devices are those of the first device, then those of the second;
    each has its stripes in order, [devices, stripes, tokens of a stripe]. In order of place they
    are [stripes, devices, tokens of a stripe], so each device then holds adjacent places. For
    copies that must not depend on the placement, such as those on disk.
    """
    if placement is None or placement.policy_of_part(policy) is policy:
        return state
    devices = placement.parts("context")
    stripes = policy.stripes_per_device(spec, devices)
    mesh = Mesh(placement.mesh.devices, placement.mesh.axis_names)

    def moved(leaf: Any, letters: str) -> Any:
        if "S" not in letters:
            return leaf
        axis = letters.index("S")
        sizes = (stripes, devices) if back else (devices, stripes)
        on_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        home = NamedSharding(
            mesh, placement.spec(letters), memory_kind="pinned_host" if on_host else None
        )
        if not isinstance(leaf, Tracer):
            leaf = jax.device_put(leaf, home)
        return _swap(axis, sizes, on_host, home)(leaf)

    pairs = zip(jax.tree.leaves(state), _letters(policy, spec, placement), strict=True)
    leaves = [moved(leaf, letters) for leaf, letters in pairs]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


@lru_cache(maxsize=256)
def _swap(axis: int, sizes: tuple[int, int], on_host: bool, home: NamedSharding) -> Any:
    """A jitted function that swaps the first two of the three axes that an axis is seen as, of
    which `sizes` has their sizes. Cached, so compiled once.
    """

    def swap(x: Array) -> Array:
        x = to_device(x) if on_host else x
        with axes_of(home.mesh.abstract_mesh):
            split = x.reshape(*x.shape[:axis], *sizes, -1, *x.shape[axis + 1 :])
            y = jnp.swapaxes(split, axis, axis + 1).reshape(x.shape)
            return to_host(y) if on_host else y

    return jax.jit(swap, out_shardings=home)


def run_on_parts(
    placement: Placement, f: Any, in_specs: tuple[Any, ...], out_specs: Any, *operands: Any
) -> Any:
    """Runs f(*operands) on each device, with its own part of the operands.

    Specs are trees of PartitionSpecs, those of `in_specs` like the operands; `out_specs` may be
    prefixes of trees.
    """

    def local(*operands: Any) -> Any:
        with _placement_of_part(placement):
            return f(*operands)

    # check_vma is off: it checks which results are equal on all devices, but not with in-place
    # kernels (jax 0.11).
    run = jax.shard_map(
        local, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    with axes_of(placement.mesh.abstract_mesh):
        return run(*jax.tree.map(partial(_split_as, placement.mesh), in_specs, operands))


def axes_of(mesh: AbstractMesh) -> AbstractContextManager[Any]:
    """A context in which arrays on `mesh` can be computed with, whatever mesh `jax.set_mesh`
    has set outside.

    The type of an array includes the kind of its mesh axes: JAX refuses an array on a mesh of
    Auto axes where Explicit ones are set, and the other way round.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.empty or mesh.empty or around == mesh or AxisType.Manual in around.axis_types:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def auto_axes(mesh: AbstractMesh) -> AbstractMesh:
    """`mesh` with Auto axes."""
    return mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))


def to_context(x: Any, spec: PartitionSpec = _WHOLE) -> Any:
    """x as an array of the mesh that `jax.set_mesh` has set; x itself if it already is one, or
    if none is set.

    `spec` says how Explicit axes split it. XLA decides for Auto ones.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.empty or not isinstance(x, Array) or AxisType.Manual in around.axis_types:
        return x
    if mesh_of(x).empty or mesh_of(x) == around:
        return x
    explicit = {
        a
        for a, kind in zip(around.axis_names, around.axis_types, strict=True)
        if kind is AxisType.Explicit
    }
    known = [
        tuple(name for name in _axis_names("spec", axes) if name in explicit) or None
        for axes in spec
    ]
    return jax.sharding.reshard(x, NamedSharding(around, PartitionSpec(*known)))


def mesh_of(x: Array) -> AbstractMesh:
    """Returns the mesh in the type of an array; an empty one for an array on one device."""
    return jax.typeof(x).sharding.mesh


@contextmanager
def loops_on_auto_axes(placement: Placement | None) -> Iterator[None]:
    """A context for loops that do not say how their arrays are split: under Auto axes XLA
    itself decides.

    It has an effect only if `jax.set_mesh` or the placement of a cache has a mesh of Explicit
    axes. `call_model` calls a model under these.
    """
    around = jax.sharding.get_abstract_mesh()
    meshes = [around] if placement is None else [around, placement.mesh.abstract_mesh]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not explicit or AxisType.Manual in around.axis_types:
        yield
        return
    with jax.sharding.use_abstract_mesh(auto_axes(explicit[0])), _model_mesh(explicit[0]):
        yield


def call_model(model: Any, tokens: Array, cache: Any, **settings: Any) -> Any:
    """Calls model(tokens, cache, **settings) under the Explicit axes that `loops_on_auto_axes`
    found, if any.
    """
    mesh = _model_mesh.value
    if mesh is None:
        return model(tokens, cache, **settings)
    rows = _WHOLE if cache.placement is None else cache.placement.spec("B")
    with jax.sharding.use_abstract_mesh(mesh):
        tokens, settings = jax.tree.map(partial(to_context, spec=rows), (tokens, settings))
        logits, cache, *infos = model(tokens, cache, **settings)
    return (to_context(logits), cache, *jax.tree.map(to_context, infos))


def mean_over_heads(x: Array) -> Array:
    """Returns the mean of x over all devices that hold KV heads of the same rows; x itself if
    heads are not split.

    A policy that takes a mean over all heads first takes the mean over its own heads, then
    calls this.
    """
    placement = _placement_of_part.value
    return x if placement is None or placement.heads is None else lax.pmean(x, placement.heads)


def context_axis() -> tuple[Axis, int] | None:
    """Returns the context axis and its number of devices, inside of `run_on_parts`; None if the
    context is not split.
    """
    placement = _placement_of_part.value
    if placement is None or placement.context is None or placement.parts("context") == 1:
        return None
    return placement.context, placement.parts("context")


def split_tokens(placement: Placement | None, x: Array) -> Array:
    """x [B, T, ...] with its tokens split over the devices of context, so that each works on
    its own part of a chunk.

    Returns x unchanged if the devices do not divide T. Call it under Auto axes.
    """
    if placement is None or not _splits_tokens(placement, x):
        return x
    return _constrained(placement, x, placement.batch, placement.context)


def keep_tokens(placement: Placement | None, x: Array) -> Array:
    """x [B, T, ...] with all tokens on each device of context where `split_tokens` would split
    them.
    """
    return (
        x
        if placement is None or not _splits_tokens(placement, x)
        else _constrained(placement, x, placement.batch)
    )


def split_channels(placement: Placement | None, x: Array) -> Array:
    """x [B, T, C] with channels in place of tokens split where `split_tokens` splits these,
    such as those of an MLP.

    Its weights are split by channel, and larger than the tokens of a chunk: XLA must gather
    tokens, not weights.
    """
    if placement is None or not _splits_tokens(placement, x):
        return x
    axes = placement.heads_and_context
    return (
        x
        if x.shape[2] % placement.devices_of(axes)
        else _constrained(placement, x, placement.batch, None, axes)
    )


def _splits_tokens(placement: Placement, x: Array) -> bool:
    return (
        placement.context is not None
        and x.shape[1] > 1
        and x.shape[1] % placement.parts("context") == 0
    )


def _constrained(placement: Placement, x: Array, *axes: Axes) -> Array:
    return lax.with_sharding_constraint(
        x, NamedSharding(placement.auto.mesh, PartitionSpec(*axes))
    )


def first_row(placement: Placement, rows: int) -> Array | int:
    """Returns the index of the first row that a device holds, if each holds `rows` rows. Call
    it in `run_on_parts`.
    """
    return 0 if placement.batch is None else lax.axis_index(placement.batch) * rows


# ------------------------------------------------------------------------------------------------------ axes of a state


def _axis_names(what: str, axes: Any) -> tuple[str, ...]:
    """The names of axes as a tuple. Raises ValueError for a field `what` that holds anything
    else.
    """
    if axes is None:
        return ()
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"Placement({what}=...) must be the name of an axis, a tuple of names, or None; got {axes!r}"
        )
    return tuple(names)


@lru_cache(maxsize=256)
def _letters_without_context(policy: Any, spec: CacheSpec) -> list[str]:
    """The letters of each array of a state, by which axes grow with rows and heads; "BK.." for
    an array [B, K, S, D].
    """
    twice_rows = dataclasses.replace(spec, batch=2 * spec.batch)
    twice_heads = dataclasses.replace(
        spec, kv_heads=2 * spec.kv_heads, q_heads=2 * spec.q_heads
    )
    rows = jax.eval_shape(partial(policy.init, twice_rows))
    heads = jax.eval_shape(partial(policy.init, twice_heads))
    found = []
    for (path, a, more_rows), more_heads in zip(
        _zip_with_paths(_whole_shapes(policy, spec), rows), jax.tree.leaves(heads), strict=True
    ):
        letters = ""
        for size, of_more_rows, of_more_heads in zip(
            a.shape, more_rows.shape, more_heads.shape, strict=True
        ):
            has_rows = of_more_rows != size
            has_heads = of_more_heads != size
            if has_rows and has_heads:
                raise ValueError(
                    f"{policy} keeps an array {path} of shape {list(a.shape)} with an axis of rows and heads together, "
                    "which a Placement cannot split; give rows their own axis"
                )
            letters += "B" if has_rows else "K" if has_heads else "."
        found.append(letters)
    return found


def _split_as(mesh: Mesh, spec: PartitionSpec, x: Array) -> Array:
    """x as an array of `mesh`, with `spec` in its type if the axes are Explicit; for Auto axes
    XLA decides.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return to_context(x)
    own = jax.typeof(x).sharding
    if (
        own.spec == PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))
        and own.mesh == mesh.abstract_mesh
    ):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


@lru_cache(maxsize=256)
def _letters(policy: Any, spec: CacheSpec, placement: Placement) -> list[str]:
    """Returns the letters of each array of a state, with "S" for the axis that context splits:
    the one that is smaller in the state of a device.
    """
    known = _letters_without_context(policy, spec)
    if placement.parts("context") == 1:
        return known
    whole = jax.tree.leaves(_whole_shapes(policy, placement.local(spec)))
    parts = jax.tree.leaves(_part_shapes(policy, spec, placement))

    def with_context(letters: str, whole: Any, part: Any) -> str:
        axes = zip(letters, whole.shape, part.shape, strict=True)
        return "".join(letter if size == own else "S" for letter, size, own in axes)

    pairs = zip(known, whole, parts, strict=True)
    return [with_context(letters, one, part) for letters, one, part in pairs]


@lru_cache(maxsize=256)
def _whole_shapes(policy: Any, spec: CacheSpec) -> Any:
    """Returns the shapes of a state on one device that has everything."""
    return jax.eval_shape(partial(policy.init, spec))


@lru_cache(maxsize=256)
def _part_shapes(policy: Any, spec: CacheSpec, placement: Placement) -> Any:
    """Returns the shapes of a device's part of a state."""
    init = partial(placement.policy_of_part(policy).init, placement.local(spec))
    if placement.policy_of_part(policy) is not policy:  # its init may depend on the device
        init = jax.shard_map(
            init, mesh=placement.mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
        )
    with axes_of(placement.mesh.abstract_mesh):
        return jax.eval_shape(init)


def _empty(policy: Any, spec: CacheSpec, capacity: int) -> Any:
    return policy.init(dataclasses.replace(spec, capacity=capacity))


def _zip_with_paths(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        yield jax.tree_util.keystr(path), x, y
