"""What a program for a TPU moves that XLA's figure of bytes does not say.

XLA knows nothing of a Pallas kernel but what its author wrote as `cost_estimate`. So its blocks
and its own DMAs are counted from the jaxpr: `kernel_moves`. And to a gather each token is a DMA
of its own, which takes a TPU as long as one of several KiB: `tpu_program.Program.gathered` counts
them in the compiled program. `derived_us` puts a price on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
# Of the SparseCores that a device has, each of which starts its own DMAs.
SUBCORES = {"v5e": 0, "v6e": 32, "tpu7x": 32}


@dataclass(frozen=True)
class Moves:
    """What a kernel moves between memories in a run."""

    bytes: int = 0
    dmas: int = 0
    steps: int = 0  # of the kernels' grids

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.bytes + other.bytes, self.dmas + other.dmas, self.steps + other.steps)

    def __mul__(self, times: int) -> Moves:
        return Moves(self.bytes * times, self.dmas * times, self.steps * times)


def kernel_moves(jaxpr: Any, by_data: Mapping[str, Moves] | None = None) -> dict[str, Moves]:
    """The moves of all Pallas kernels that a program for one TPU has, by their names.

    Of branches by data the one with the most bytes counts, and a loop whose rounds depend on
    the data counts once. `by_data` has by the names of kernels what their own DMAs move in a
    step of the grid, where the data say how many these are.
    """
    by_data = by_data or {}
    found = dict[str, Moves]()
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind == "pallas_call":
            name = eqn.params["name"]
            parts = {name: _of_kernel(eqn, by_data.get(name))}
        elif kind == "cond":
            branches = (kernel_moves(b.jaxpr, by_data) for b in _branches(eqn))
            parts = max(branches, key=bytes_of)
        elif kind == "kvjax_on_one_device":
            parts = kernel_moves(eqn.params["alone"].jaxpr, by_data)
        else:
            parts = {}
            for inside in _jaxprs(eqn):
                parts = _sum_of(parts, kernel_moves(inside, by_data))
            rounds = eqn.params["length"] if kind == "scan" else 1
            parts = {name: moves * rounds for name, moves in parts.items()}
        found = _sum_of(found, parts)
    return found


def bytes_of(kernels: dict[str, Moves]) -> int:
    return sum(moves.bytes for moves in kernels.values())


def _sum_of(one: dict[str, Moves], other: dict[str, Moves]) -> dict[str, Moves]:
    return {name: one.get(name, Moves()) + other.get(name, Moves()) for name in one | other}


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


def _of_kernel(eqn: Any, own: Moves | None) -> Moves:
    """Blocks that are copied because the last step of the grid had another, and the kernel's
    own DMAs in a step, which are counted unless they are known."""
    grid_mapping = eqn.params["grid_mapping"]
    grid = grid_mapping.grid
    steps = prod(grid)
    total = Moves(steps=steps)
    for block in grid_mapping.block_mappings:
        if "any" not in str(block.block_aval) and "hbm" not in str(block.block_aval):
            total += _of_block(block, grid)
    own = _own_dmas(eqn.params["jaxpr"]) if own is None else own
    return total + own * steps


def _of_block(block: Any, grid: tuple[int, ...]) -> Moves:
    """The copies of one operand or result; blocks past the end of an array are cut."""
    steps = np.stack(np.unravel_index(np.arange(prod(grid)), grid), axis=1).astype(np.int32)
    index_map = jaxpr_as_fun(block.index_map_jaxpr)
    # Data that are known ahead follow the place in the grid; no map of ours reads them.
    ahead = [0] * (len(block.index_map_jaxpr.in_avals) - len(grid))
    place = jax.vmap(lambda *at: index_map(*at, *ahead))(*jnp.asarray(steps).T)
    places = np.stack([np.broadcast_to(one, len(steps)) for one in place], axis=1)
    moved = np.ones(len(places), bool)
    moved[1:] = (places[1:] != places[:-1]).any(axis=1)

    sizes = np.array([getattr(size, "block_size", 1) for size in block.block_shape])
    left = np.array(block.array_aval.shape) - places[moved] * sizes
    tokens = np.minimum(left, sizes).prod(axis=1).sum()
    return Moves(int(tokens) * block.array_aval.dtype.itemsize, int(moved.sum()))


def _own_dmas(jaxpr: Any) -> Moves:
    """The DMAs that a kernel starts itself in one step of its grid; of branches, those of the
    one with the most."""
    total = Moves()
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind == "dma_start":
            types = [operand.aval for operand in eqn.invars]
            source = jax.tree.unflatten(eqn.params["tree"], types)[0]
            total += Moves(prod(source.shape) * source.dtype.itemsize, 1)
        elif kind == "cond":
            branches = (_own_dmas(branch.jaxpr) for branch in eqn.params["branches"])
            total += max(branches, key=lambda moves: moves.dmas)
        else:
            inside = sum(map(_own_dmas, _jaxprs(eqn)), Moves())
            total += inside * (eqn.params["length"] if kind == "scan" else 1)
    return total


def derived_us(
    chip: str,
    moved: int,
    slices: int,
    on_sparsecore: int,
    kernels: dict[str, Moves],
    bundles: dict[str, int],
) -> float:
    """Microseconds of a run that moves `moved` bytes outside of kernels, with one DMA for each
    of the `slices` that gathers take, and of those that SparseCores gather.

    A kernel starts its copies ahead and computes meanwhile. It takes as long as its bytes, its
    DMAs one after the other, or its `bundles` of each step, whichever is longest. Left out is
    what XLA's own fusions compute while nothing moves.
    """
    seconds = moved / BANDWIDTH[chip] + slices * DMA
    if on_sparsecore:
        seconds += on_sparsecore * DMA / SUBCORES[chip]
    for name, kernel in kernels.items():
        of_bundles = bundles.get(name, 0) * kernel.steps / CLOCK.get(chip, float("inf"))
        seconds += max(kernel.bytes / BANDWIDTH[chip], kernel.dmas * DMA, of_bundles)
    return 1e6 * seconds
