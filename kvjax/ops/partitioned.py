"""Kernels whose operands are split over devices without a placement.

XLA's partitioner has no rule for a Pallas kernel. In a program for several GPUs it silently
gathers all operands on every device, in every step; the results are correct, and a warning says
so. A kernel for a TPU cannot even be lowered there, so that such a program has the reference.
Inside `jax.shard_map`, where `kvjax.Placement` runs everything, a kernel gets the part of its
device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

# The identity; its lowering sees how many devices a program is for.
_whole = Primitive("kvjax_whole")
_whole.def_impl(lambda x, *, op: x)
_whole.def_abstract_eval(lambda x, *, op: x)
ad.deflinear2(_whole, lambda cotangent, x, *, op: [cotangent])
batching.primitive_batchers[_whole] = lambda args, axes, *, op: (
    _whole.bind(*args, op=op),
    axes[0],
)


def warn_if_partitioned(op: str, operands: Any) -> Any:
    """`operands` of the kernel of `op`, marked: warns once when a program for several devices
    is lowered.

    All arrays are marked, because one that the kernel does not read is never lowered. This adds
    nothing to the program.
    """
    return jax.tree.map(lambda x: _whole.bind(x, op=op), operands)


def _lower(ctx: Any, x: Any, *, op: str) -> list[Any]:
    # Under plain jit this names the devices of the program; in shard_map it names the mesh.
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices > 1:
        _warn_once(devices, op)
    return [x]


mlir.register_lowering(_whole, _lower)


@functools.cache
def _warn_once(devices: int, op: str) -> None:
    warnings.warn(
        f"the GPU kernel of {op} is compiled for {devices} devices without a placement, so XLA gathers its operands on "
        "every device in every step, including the whole cache; make the cache with "
        "kvjax.init(..., placement=kvjax.Placement(mesh=..., batch=..., heads=...))",
        stacklevel=2,
    )


# One of two programs with equal operands and results.
_either = Primitive("kvjax_on_one_device")
_either.multiple_results = True
_either.def_abstract_eval(lambda *_, alone, split: alone.out_avals)


def on_one_device(alone: Callable[..., Any], split: Callable[..., Any], *operands: Any) -> Any:
    """alone(*operands) in a program for one device, and in the part that a device has of a
    `jax.shard_map`; split(*operands) where XLA's partitioner splits the program.

    Both return the same; the choice is made when the program is lowered.
    """
    leaves, tree = jax.tree.flatten(operands)

    def flat(run: Callable[..., Any]) -> Callable[..., list[Array]]:
        return lambda *arrays: jax.tree.leaves(run(*jax.tree.unflatten(tree, arrays)))

    result = jax.tree.structure(jax.eval_shape(alone, *operands))
    programs = {"alone": flat(alone), "split": flat(split)}
    traced = {name: jax.make_jaxpr(run)(*leaves) for name, run in programs.items()}
    return jax.tree.unflatten(result, _either.bind(*leaves, **traced))


def _batch(
    arrays: Sequence[Array], axes: Sequence[Any], *, alone: ClosedJaxpr, split: ClosedJaxpr
) -> tuple[list[Array], list[int]]:
    mapped = [jax.vmap(jaxpr_as_fun(program), axes) for program in (alone, split)]
    results = on_one_device(*mapped, *arrays)
    return results, [0] * len(results)


def _lower_either(ctx: Any, *arrays: Any, alone: ClosedJaxpr, split: ClosedJaxpr) -> Any:
    axes = ctx.module_context.axis_context
    # Axes of a mesh that shard_map leaves to the partitioner split the program, too.
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        whole = getattr(axes, "num_devices", 1) == 1
    else:
        whole = mesh.size == 1 or axes.manual_axes == frozenset(mesh.axis_names)
    run = jaxpr_as_fun(alone if whole else split)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *arrays)


@_either.def_impl
def _evaluate(*arrays: Array, alone: ClosedJaxpr, split: ClosedJaxpr) -> list[Array]:
    return jax.jit(functools.partial(_either.bind, alone=alone, split=split))(*arrays)


batching.primitive_batchers[_either] = _batch
mlir.register_lowering(_either, _lower_either)
