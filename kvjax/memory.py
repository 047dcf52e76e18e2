"""Where arrays are kept: device memory or pinned host memory. The only module that names memory
kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

T = TypeVar("T")
S = TypeVar("S")
HOST_KINDS = ("pinned_host", "unpinned_host")

CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""`jax.jit(step, compiler_options=CONCURRENT)` lets a GPU run independent operations at the
same time, and so read host memory for the next step (`Speculative`) during the rest of this
one. `kvjax.generate`'s loop uses it. From jax 0.12, operations that do not depend on each other
then have memory of their own, whatever their order."""

QUICK: dict[str, Any] = {
    "xla_gpu_enable_triton_gemm": False,  # products by cuBLAS: XLA would compile and time dozens of its own for each
    "xla_gpu_dot_merger_threshold_mb": 0,  # or the weights of some products would be joined in every step
    "xla_llvm_disable_expensive_passes": True,  # XLA's kernels, which move data, gain nothing from them
}
"""Options with which the programs of a GPU compile in less time, for those of one layer or
none.
"""


def to_host(x: Array) -> Array:
    """x in pinned host memory, inside and outside of jit. Its type shows it (f32<host>[...]),
    and XLA refuses to mix it with arrays of device memory in one operation."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """x in device memory, inside and outside of jit."""
    return jax.device_put(x, jax.memory.Space.Device)


def move_to(x: Array, *, host: bool) -> Array:
    """x in pinned host memory or in that of the device; x itself if it is there."""
    return x if in_host_memory(x) == host else (to_host if host else to_device)(x)


def host_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros in pinned host memory. One zero is moved there and broadcast, so that the array
    never occupies device memory: a store may be larger than the device. (XLA warns that the
    host does the broadcast, which is intended.)"""
    return jnp.broadcast_to(to_host(jnp.zeros((), dtype)), shape)


def zeros_like(shape: Any) -> np.ndarray:
    """An array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), shape.dtype), shape.shape)


def computed_last(tree: T, after: S, before: S) -> tuple[T, S]:
    """`tree` and `after`, where XLA computes what follows from `tree` after all that `after`
    has in place of `before`.

    The last write of an array can be in place: nothing reads the old one any more. Both have
    one structure; arrays of the host do not wait and are not waited for.
    """
    leaves, structure = jax.tree.flatten((tree, after))
    same = [None] * len(jax.tree.leaves(tree)) + jax.tree.leaves(before)
    new = [
        i for i, leaf in enumerate(leaves) if leaf is not same[i] and not in_host_memory(leaf)
    ]
    # jax 0.10 lets all results of a barrier vary over devices if one does, and then they no
    # longer replace `before`.
    if len({varying_axes(leaves[i]) for i in new}) > 1:
        return tree, after
    for i, leaf in zip(new, lax.optimization_barrier([leaves[i] for i in new]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def vary_with(tree: Any, *like: Any) -> Any:
    """`tree`, cast to vary over the mesh axes over which arrays of `like` vary.

    Inside of `jax.shard_map` a loop that starts from zeros needs this: its carry must have one
    type from the start.
    """
    axes = varying_axes(like)
    if not axes:
        return tree

    def cast(leaf: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def varying_axes(tree: Any) -> frozenset[str]:
    """Mesh axes over which some array of `tree` varies, where `jax.shard_map` checks types."""
    axes = frozenset[str]()
    for leaf in jax.tree.leaves(tree):
        aval: Any = jax.typeof(leaf)  # jax 0.11 has renamed the field of the type
        axes |= (
            aval.vma
            if hasattr(aval, "vma")
            else getattr(getattr(aval, "mat", None), "varying", frozenset())
        )
    return axes


def shapes(make: Callable[[], Any]) -> Any:
    """The arrays that `make` would return, as `jax.ShapeDtypeStruct`s with the memory kind on
    the default device.

    `make` is traced, not run: nothing is allocated.
    """
    traced = jax.jit(make).trace()
    device = default_device()

    def shape(aval: Any) -> jax.ShapeDtypeStruct:
        kind = "pinned_host" if aval.memory_space == jax.memory.Space.Host else None
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_on_one(device, kind))

    tree = jax.tree.structure(traced.out_info)
    return jax.tree.unflatten(tree, [shape(aval) for aval in traced.jaxpr.out_avals])


def _on_one(device: jax.Device, kind: str | None) -> NamedSharding:
    """One device and a kind of its memory. JAX types a shape, or an array made of parts, as one
    of host memory only if its sharding is a NamedSharding."""
    return NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec(), memory_kind=kind)


def typed(sharding: Any) -> Any:
    """A sharding of the same devices and memory, by which arrays made of parts, as orbax makes
    them, get the type of their memory.

    jit takes an array in host memory without that type for one in device memory. With jax 0.11
    the results of a step are then in device memory; 0.10 aborts. `jax.device_put` to `sharding`
    itself keeps the type and copies nothing.
    """
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    (device,) = sharding.device_set
    return _on_one(device, sharding.memory_kind)


def default_device() -> jax.Device:
    config: Any = jax.config
    chosen = config.jax_default_device  # a device, the name of a platform, or None
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def on_host(x: Any) -> np.ndarray:
    """x as a NumPy array. If its parts are on the devices of several processes, all of these
    must call this.
    """
    if not isinstance(x, Array) or x.is_fully_addressable:
        return np.asarray(x)
    if not x.is_fully_replicated:
        assert isinstance(x.sharding, NamedSharding)
        x = _everywhere(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
    return np.asarray(x.addressable_data(0))


def free_bytes() -> int | None:
    """Bytes that the first device has free; None for one that does not tell, as a CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def of_first_process(number: int) -> int:
    """The `number` of the first process. All processes must call this; they wait for each
    other.
    """
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


@partial(jax.jit, static_argnames="sharding")
def _everywhere(x: Array, sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(x, sharding)


def commit_together(tree: T) -> T:
    """`tree`, with all arrays committed to their device if any is, as arrays in host memory
    are.

    A program returns all arrays committed if one of its arguments is, and jit compiles again
    for each mixture, so a loop that feeds a program its own results would compile it twice.
    Arrays that are not committed move to the device of those that are, as jit moves them; if
    those are on several, they stay as they are.
    """
    homes = places_of(tree)
    if not homes:
        return tree

    def commit(leaf: Any) -> Any:
        if not isinstance(leaf, Array) or isinstance(leaf, Tracer):
            return leaf
        sharding = leaf.sharding
        if not leaf.committed and sharding.device_set not in homes:
            (home, *others) = homes
            if others or len(home) > 1:
                return leaf
            sharding = SingleDeviceSharding(*home, memory_kind=sharding.memory_kind)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(commit, tree)


def places_of(tree: Any) -> set[frozenset[jax.Device]]:
    """The devices of the committed arrays of `tree`: one set of them if a program can take all
    of it.
    """
    return {
        frozenset(leaf.sharding.device_set)
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, Array) and not isinstance(leaf, Tracer) and leaf.committed
    }


@contextmanager
def making_on(places: set[frozenset[jax.Device]]) -> Iterator[None]:
    """In the block, new arrays are made on the one device of `places_of`, if there is one and it
    is not the default.
    """
    home = next(iter(places)) if len(places) == 1 else frozenset[jax.Device]()
    if len(home) != 1 or default_device() in home:
        yield
        return
    with jax.default_device(*home):
        yield


def has_host_memory() -> bool:
    """True if the default device reads pinned host memory. CPU (where it is only a name), GPU
    and TPU backends do.
    """
    return any(kind.kind == "pinned_host" for kind in default_device().addressable_memories())


class Bytes(NamedTuple):
    """Bytes of a tree in device and host memory.

    >>> str(Bytes(device=3 * 2**20, host=0))
    '3.0 MiB on the device'
    """

    device: int
    host: int

    @property
    def total(self) -> int:
        return self.device + self.host

    def __str__(self) -> str:
        parts = [(self.device, "the device"), (self.host, "the host")]
        return (
            ", ".join(f"{in_units(size)} on {where}" for size, where in parts if size) or "0 B"
        )


def in_units(size: int) -> str:
    """Bytes as text in a readable unit.

    >>> in_units(1023), in_units(1536), in_units(5 * 2**30)
    ('1023 B', '1.5 KiB', '5.0 GiB')
    """
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, 4)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def nbytes(tree: Any) -> Bytes:
    """Bytes of the arrays of `tree` in device memory and in host memory.

    An array that is split over devices counts with the part of one device.

    The arrays may be traced, or shapes as `shapes` and `jax.eval_shape` return them. A shape
    without a sharding counts for the device; `Cache.nbytes` asks the policies instead. On a CPU
    backend the default memory counts as device memory, whatever its kind is called.
    """
    device = host = 0
    for leaf in jax.tree.leaves(tree):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        size = int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize
        if in_host_memory(leaf):
            host += size
        else:
            device += size
    return Bytes(device, host)


SLOTS = 8 * 2**12 * 3**2 * 5 * 7  # which most groups, pages and chunks divide


def growth(make: Callable[[int], Any], unit: int = 1) -> float:
    """Bytes that each further slot takes in the tree that make(slots) returns, for many slots
    in whole units.
    """
    slots = math.lcm(SLOTS, unit)
    one, two = (nbytes(jax.eval_shape(partial(make, n))).total for n in (slots, 2 * slots))
    return (two - one) / slots


def in_host_memory(tree: Any) -> bool:
    """True if an array of the tree is in pinned host memory, on a backend where that is apart
    from the device's.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer):
            if leaf.aval.memory_space == jax.memory.Space.Host:  # type: ignore[attr-defined]
                return True
        elif (
            sharding := getattr(leaf, "sharding", None)
        ) is not None and sharding.memory_kind in HOST_KINDS:
            (device, *_) = sharding.device_set
            if sharding.memory_kind != device.default_memory().kind:
                return True
    return False


def has_host_arrays(tree: Any) -> bool:
    """Whether some array of a tree has the type of one in host memory, also on a CPU."""
    return any(
        jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in jax.tree.leaves(tree)
    )
