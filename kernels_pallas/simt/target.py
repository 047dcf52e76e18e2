"""The differences between the GPUs that kernels are compiled for, which decide a kernel's form
and block sizes.

An architecture decides how much shared memory a block can have, whether blocks form clusters,
and which instructions exist. A card of it has a number of multiprocessors and a bandwidth.
Everything else in this package is common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from kvjax.kernels_pallas.simt.caching import bypass_cache


@dataclass(frozen=True)
class Target:
    """A card, and what its architecture allows."""

    kind: str  # as JAX names the device
    capability: str  # compute capability
    multiprocessors: int
    bandwidth: int  # of device memory by the datasheet, GB/s; 0 if not known
    smem: int  # bytes that a block can have; a multiprocessor has 1 KB more, and takes 1 KB for each block
    clusters: bool  # blocks of a cluster can read each other's shared memory
    float8: bool  # there is an instruction that converts e4m3
    measured: bool = False  # the kernels were timed on this kind of device


KB = 1024
# Shared memory of a block, clusters and float8, by compute capability. 12.0 has clusters too,
# but the forms that use them want more shared memory than a block has there.
ARCHITECTURES: dict[str, tuple[int, bool, bool]] = {
    "8.0": (163 * KB, False, False),
    "8.6": (99 * KB, False, False),
    "8.9": (99 * KB, False, True),
    "9.0": (227 * KB, True, True),
    "10.0": (227 * KB, True, True),
    "10.3": (227 * KB, True, True),
    "12.0": (99 * KB, False, True),
}
# Cards by JAX's name of the device: compute capability, multiprocessors, and bandwidth in GB/s
# by the datasheet. The first card of an architecture stands for it in tests.
CARDS: dict[str, tuple[str, int, int]] = {
    "NVIDIA A100-SXM4-80GB": ("8.0", 108, 2039),
    "NVIDIA A100-SXM4-40GB": ("8.0", 108, 1555),
    "NVIDIA A10": ("8.6", 72, 600),
    "NVIDIA GeForce RTX 3090": ("8.6", 82, 936),
    "NVIDIA GeForce RTX 4090": ("8.9", 128, 1008),
    "NVIDIA L4": ("8.9", 58, 300),
    "NVIDIA L40S": ("8.9", 142, 864),
    "NVIDIA H200": ("9.0", 132, 4800),
    "NVIDIA H100 80GB HBM3": ("9.0", 132, 3350),
    "NVIDIA B200": ("10.0", 148, 8000),
    "NVIDIA B300": ("10.3", 148, 8000),
    "NVIDIA GeForce RTX 5090": ("12.0", 170, 1792),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": ("12.0", 188, 1792),
}
MEASURED_ON = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def card(kind: str) -> Target:
    """The target of a known kind of device."""
    capability, multiprocessors, bandwidth = CARDS[kind]
    architecture = ARCHITECTURES[capability]
    return Target(
        kind,
        capability,
        multiprocessors,
        bandwidth,
        *architecture,
        measured=kind in MEASURED_ON,
    )


def stands_for(capability: str) -> Target:
    """The card that stands for an architecture."""
    return next(card(kind) for kind, (other, *_) in CARDS.items() if other == capability)


DEFAULT = card("NVIDIA H200")  # of programs for a device that is not known
_forced: ContextVar[Target | None] = ContextVar("_forced", default=None)


@contextmanager
def build_for(wanted: Target) -> Iterator[None]:
    """In the block, kernels take the form and block sizes that they have on `wanted`, on
    whatever device they run.

    A GPU can so run the forms of a smaller one. Functions that jit traced before the block keep
    their form.
    """
    token = _forced.set(wanted)
    try:
        with bypass_cache():
            yield
    finally:
        _forced.reset(token)


def target(operands: Sequence[Any] = ()) -> Target:
    """The target that a program over `operands` is lowered for; an H200 if its device is not
    known.
    """
    if (wanted := _forced.get()) is not None:
        return wanted
    if (device := _device(operands)) is None:
        return DEFAULT
    kind = device.device_kind
    capability = str(getattr(device, "compute_capability", ""))
    multiprocessors = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    if kind in CARDS:
        known = card(kind)
    else:
        known = stands_for(capability) if capability in ARCHITECTURES else DEFAULT
        known = dataclasses.replace(known, kind=kind, bandwidth=0, measured=False)
    return dataclasses.replace(known, multiprocessors=multiprocessors or known.multiprocessors)


def device_kind(operands: Sequence[Any] = ()) -> str | None:
    """The kind of GPU that a program over `operands` is lowered for, such as "NVIDIA H200";
    None if unknown.
    """
    if (wanted := _forced.get()) is not None:
        return wanted.kind
    device = _device(operands)
    return None if device is None else device.device_kind


def _device(operands: Sequence[Any]) -> Any:
    """A program that is compiled ahead of time has its device in the mesh of its operands, or
    in the mesh of the context. Any other program is for the GPUs of this process, if they are
    of one kind."""
    types = (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in operands)
    meshes = [getattr(getattr(x, "sharding", None), "mesh", None) for x in types]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        device = getattr(mesh, "abstract_device", None)
        if device is not None and device.platform == "gpu":
            return device
    kinds = {device.device_kind: device for device in jax.devices() if device.platform == "gpu"}
    return next(iter(kinds.values())) if len(kinds) == 1 else None
