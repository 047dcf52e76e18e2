"""Forms of plain JAX for one platform, where the same operations suit no two compilers.

A form has the same results as that of the other platforms, and is part of a program only if it
is lowered for its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

# Whether programs of this process may be compiled for devices that it does not have.
_compiles_ahead = True
TILE = (8, 128)  # of a TPU's memory: places of the second last axis, and of the last
R = TypeVar("R")


def for_tpu(tpu: Callable[..., R], others: Callable[..., R], *operands: Any) -> R:
    """tpu(*operands) in a program for a TPU, else others(*operands).

    A process that has no TPU and cannot compile for one does not trace the form for it.
    """
    if not reaches_tpus():
        return others(*operands)
    return lax.platform_dependent(*operands, tpu=tpu, default=others)


def in_usual_layout(x: Array) -> Array:
    """x [B, K, S, D] or [B, K, S], in a program for a TPU in the layout that an argument of this
    shape has there.

    Within a branch or a loop a TPU's compiler chooses the layout of a buffer by what is near: it
    would copy a cache to the layout that suits one chunk, and back. Where the usual layout is
    not known, the choice is left to the compiler. (Seen in programs that libtpu 0.0.48 compiled
    for v5e and TPU7x; another layout costs copies, and changes no result.)
    """
    order = _usual_order(x.shape, x.dtype.itemsize)
    return x if order is None else with_layout_constraint(x, Layout(order))


def _usual_order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Axes from major to minor. A tile holds 8 places of the second last by 128 of the last, so
    this is the order that pads least.

    >>> _usual_order((1, 8, 4096, 128), 2), _usual_order((1, 8, 4096, 16), 1)
    ((0, 1, 2, 3), (0, 1, 3, 2))
    >>> _usual_order((1, 8, 9, 128), 2)
    (0, 2, 1, 3)
    """
    if len(shape) != 4:
        return None
    _, K, S, D = shape
    if D % TILE[1] == 0 and S % TILE[0] == 0:
        return (0, 1, 2, 3)
    if D % TILE[1] == 0 and K % TILE[0] == 0:
        return (0, 2, 1, 3)
    if D < TILE[1] < S and (D % TILE[0] == 0 or (itemsize > 1 and D > 1)):
        return (0, 1, 3, 2)
    return None


def compile_for_own_devices() -> None:
    """Leaves out of the programs of this process what only other devices would run.

    A process on a CPU then traces, and imports, no kernels for a GPU or TPU that its plugin
    could compile for. For a command, which runs all that it compiles; a library call leaves its
    process as it is.
    """
    global _compiles_ahead
    _compiles_ahead = False


def compiles_ahead() -> bool:
    """True if programs of this process may be compiled for devices that it does not have."""
    return _compiles_ahead


def reaches_tpus() -> bool:
    """True if this process has a TPU, or libtpu, which can compile for one that is not there."""
    return jax.default_backend() == "tpu" or (_compiles_ahead and _has_libtpu())


def gathers_by_sparsecores() -> bool:
    """True if the TPU that a program is traced for has SparseCores to which its compiler gives
    gathers: this process's, or that of the mesh of `jax.sharding.use_abstract_mesh`.
    """
    from jax.experimental.pallas import tpu

    try:
        chip = tpu.get_tpu_info()
    except ValueError:  # the device is no TPU
        return False
    # Seen of v6e and TPU7x; older ones have SparseCores for other work.
    return chip.sparse_core is not None and chip.generation >= 6


@functools.cache
def _has_libtpu() -> bool:
    return find_spec("libtpu") is not None
