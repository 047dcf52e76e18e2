"""Launches of kernels: grids, clusters, shared memory, and helpers for calls of many layers and
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import jax
from jax import Array

from kvjax.kernels_pallas.simt.backend import backend, traced
from kvjax.kernels_pallas.simt.caching import has_cache
from kvjax.kernels_pallas.simt.target import target
from kvjax.kernels_pallas.simt.types import Launch

F = TypeVar("F", bound=Callable[..., Any])


def kernel(program: Callable[..., None], *, out_type: Any, **how: Any) -> Callable[..., Any]:
    """A kernel whose body is program(*inputs, *outputs, *scratch), as refs. `how` has the
    fields of `Launch`.
    """
    launch = Launch(**how)

    def run(*args: Any) -> Any:
        if (launch.cluster or 1) > 1 and not (device := target(args)).clusters:
            raise NotImplementedError(
                f"{launch.name}: {device.kind} has no clusters of blocks; leave out the config, or pass cluster=0"
            )
        return backend().run(traced(program, launch), launch, out_type, args)

    return run


def kernel_in_place(
    program: Callable[..., None], **how: Any
) -> Callable[..., tuple[Array, ...]]:
    """A kernel, as `kernel`, that changes its first operands in place and returns them; they
    are passed together.

    XLA copies these operands first, unless they are donated.
    """
    launch = Launch(**how)
    return lambda changed, *args: backend().run_in_place(
        traced(program, launch), launch, changed, args
    )


def lowered_once(*static: str) -> Callable[[F], F]:
    """Decorates a function that calls a kernel, so that equal calls of many layers are traced
    and lowered once.

    Mosaic then compiles one kernel for all layers. It would otherwise compile one for each
    call, about 100 for a Llama of 32 layers with FIER.
    """

    def wrap(f: F) -> F:
        jitted = jax.jit(f, static_argnames=static)

        @wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (jitted if has_cache() else f)(*args, **kwargs)

        return cast(F, run)

    return wrap


def over_rows(again: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a launch for arrays of flat rows [rows, ...]: a batched call is one launch for
    n times as many rows, by `again`. Arrays without a batch are repeated."""

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        launch = jax.custom_batching.custom_vmap(run)

        @launch.def_vmap
        def batched(n: int, batches: Sequence[bool], *args: Array) -> tuple[Any, Any]:
            every = (
                a if has else jax.numpy.broadcast_to(a[None], (n, *a.shape))
                for a, has in zip(args, batches, strict=True)
            )
            made = again(*(a.reshape(n * a.shape[1], *a.shape[2:]) for a in every))
            return jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), made), jax.tree.map(
                lambda _: True, made
            )

        return cast(Callable[..., Any], launch)

    return wrap


def by_step(number: Array | int, heads: int) -> Array:
    """Numbers that rows of a kernel share, flat: i32[B], i32[B, 1] or a number unchanged, and
    i32[B, T] repeated for each of `heads` KV heads."""
    number = jax.numpy.asarray(number, jax.numpy.int32)
    if number.ndim < 2 or number.shape[1] == 1:
        return number.reshape(-1)
    return jax.numpy.repeat(number[:, None], heads, axis=1).reshape(-1)
