"""What a program for a TPU moves that XLA's figure of bytes does not say.

XLA knows nothing of a Pallas kernel but what its author wrote as `cost_estimate`. So its blocks
and its own DMAs are counted from the jaxpr: `kernel_moves`. And to a gather each token is a DMA
of its own, which takes a TPU as long as one of several KiB: `gathered` counts them in the
compiled program. `derived_us` puts a price on both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

BANDWIDTH = {"v5e": 819e9, "v6e": 1640e9, "tpu7x": 3690e9}  # bytes a second of a device
CLOCK = {"v5e": 1.5e9}  # bundles a second: 197 TFLOPS are four units of 128 x 128 at it
DMA = 30e-9  # seconds from one small DMA to the next


@dataclass(frozen=True)
class Moves:
    """What kernels move between memories in a run."""

    bytes: int = 0
    dmas: int = 0
    steps: int = 0  # of the kernels' grids

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.bytes + other.bytes, self.dmas + other.dmas, self.steps + other.steps)

    def __mul__(self, times: int) -> Moves:
        return Moves(self.bytes * times, self.dmas * times, self.steps * times)


def kernel_moves(jaxpr: Any) -> Moves:
    """The moves of all Pallas kernels that a program for one TPU has.

    Of branches by data the one with the most bytes counts, and a loop whose rounds depend on
    the data counts once.
    """
    total = Moves()
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind == "pallas_call":
            total += _of_kernel(eqn)
        elif kind == "cond":
            found = [kernel_moves(branch.jaxpr) for branch in _branches(eqn)]
            total += max(found, key=lambda moves: moves.bytes)
        elif kind == "kvjax_on_one_device":
            total += kernel_moves(eqn.params["alone"].jaxpr)
        else:
            inside = sum(map(kernel_moves, _jaxprs(eqn)), Moves())
            total += inside * (eqn.params["length"] if kind == "scan" else 1)
    return total


def _branches(eqn: Any) -> Sequence[Any]:
    """The branches of a `cond` that a TPU runs."""
    branches = eqn.params["branches"]
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return branches
    named = [one for one, names in zip(branches, platforms, strict=True) if names == ("tpu",)]
    others = [one for one, names in zip(branches, platforms, strict=True) if names is None]
    return named or others


def _jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner


def _of_kernel(eqn: Any) -> Moves:
    """Blocks that are copied because the last step of the grid had another, and own DMAs."""
    grid_mapping = eqn.params["grid_mapping"]
    grid = grid_mapping.grid
    steps = prod(grid)
    total = Moves(steps=steps)
    for block in grid_mapping.block_mappings:
        if "any" not in str(block.block_aval) and "hbm" not in str(block.block_aval):
            total += _of_block(block, grid)
    return total + _own_dmas(eqn.params["jaxpr"]) * steps


def _of_block(block: Any, grid: tuple[int, ...]) -> Moves:
    """The copies of one operand or result; blocks past the end of an array are cut."""
    steps = np.stack(np.unravel_index(np.arange(prod(grid)), grid), axis=1).astype(np.int32)
    place = jax.vmap(jaxpr_as_fun(block.index_map_jaxpr))(*jnp.asarray(steps).T)
    places = np.stack([np.broadcast_to(one, len(steps)) for one in place], axis=1)
    moved = np.ones(len(places), bool)
    moved[1:] = (places[1:] != places[:-1]).any(axis=1)

    sizes = np.array([getattr(size, "block_size", 1) for size in block.block_shape])
    left = np.array(block.array_aval.shape) - places[moved] * sizes
    tokens = np.minimum(left, sizes).prod(axis=1).sum()
    return Moves(int(tokens) * block.array_aval.dtype.itemsize, int(moved.sum()))


def _own_dmas(jaxpr: Any) -> Moves:
    """The DMAs that a kernel starts itself in one step of its grid."""
    total = Moves()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dma_start":
            types = [operand.aval for operand in eqn.invars]
            source = jax.tree.unflatten(eqn.params["tree"], types)[0]
            total += Moves(prod(source.shape) * source.dtype.itemsize, 1)
            continue
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += sum(map(_own_dmas, _jaxprs(eqn)), Moves()) * rounds
    return total


GATHER = re.compile(
    r"= (?P<result>\S+?)(?:\{\S*)? gather\(%(?P<source>[\w.\-]+),.*slice_sizes=\{(?P<sizes>[\d,]+)\}"
)
ARRAY = re.compile(r"\w+\[(?P<sizes>[\d,]*)\]")


def gathered(hlo: str) -> int:
    """The slices that gathers of a compiled program read from a TPU's main memory, each by a
    DMA; those of arrays in its fast memory are none."""
    reads = 0
    sources = dict[str, str]()
    for line in hlo.splitlines():
        if named := re.match(r"^\s+(?:ROOT )?%(\S+) = (\S+) ", line):
            sources[named[1]] = named[2]
        if found := GATHER.search(line):
            if "S(1)" in sources.get(found["source"], ""):
                continue
            reads += _count(ARRAY.match(found["result"])) // _product(found["sizes"])
    return reads


def _count(array: re.Match[str] | None) -> int:
    return _product(array["sizes"]) if array else 0


def _product(sizes: str) -> int:
    return prod(int(size) for size in sizes.split(",") if size)


def derived_us(chip: str, moved: int, dmas: int, kernel: Moves, bundles: int | None) -> float:
    """Microseconds of a run that moves `moved` bytes outside of kernels, and so many in `dmas`
    that are small; a kernel takes as long as its bytes or its `bundles`, whichever is longer.

    Left out is what XLA's own fusions compute while nothing moves.
    """
    bandwidth = BANDWIDTH[chip]
    of_kernel = kernel.bytes / bandwidth
    if bundles is not None and chip in CLOCK:
        of_kernel = max(of_kernel, bundles * kernel.steps / CLOCK[chip])
    return 1e6 * (moved / bandwidth + dmas * DMA + of_kernel)
