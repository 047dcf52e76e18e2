"""A warning for GPU kernels whose operands are split over devices without a placement.

XLA's partitioner has no rule for a Pallas kernel. In a program for several devices it silently
gathers all operands on every device, in every step; the results are correct. Inside
`jax.shard_map`, where `kvjax.Placement` runs everything, a kernel gets the part of its device.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_whole = Primitive(
    "kvjax_whole"
)  # the identity; its lowering sees how many devices a program is for
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
