"""Where arrays lie: device memory or pinned host memory. The one module that spells memory kinds.

A cache counts its bytes by the memory that they lie in, so that a report can state what a method costs the GPU
and what it costs the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array

HOST_KINDS = ("pinned_host", "unpinned_host")


def to_host(x: Array) -> Array:
    """x in pinned host memory, inside and outside of jit. Its type then says so (f32<host>[...]), and XLA refuses to
    mix it with arrays of device memory in one operation."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """x in device memory, inside and outside of jit."""
    return jax.device_put(x, jax.memory.Space.Device)


def has_host_memory() -> bool:
    """Whether the default device reads pinned host memory. CPU (where it is a name alone), GPU and TPU backends do."""
    return any(kind.kind == "pinned_host" for kind in jax.devices()[0].addressable_memories())


class Bytes(NamedTuple):
    """Bytes of a tree by where they lie."""

    device: int
    host: int


def nbytes(tree: Any) -> Bytes:
    """Bytes of the concrete arrays of `tree`, in device memory and in host memory.

    On a CPU backend the default memory is that of the device, whatever its kind is called there.
    """
    device = host = 0
    for leaf in jax.tree.leaves(tree):
        default = next(iter(leaf.devices())).default_memory().kind
        kind = leaf.sharding.memory_kind
        if kind is not None and kind != default and kind in HOST_KINDS:
            host += leaf.nbytes
        else:
            device += leaf.nbytes
    return Bytes(device, host)
