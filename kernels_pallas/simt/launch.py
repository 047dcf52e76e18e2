"""Launches of kernels: grids, clusters, shared memory, and helpers for calls of many layers and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import jax
from jax import Array

from kvjax.kernels_pallas.simt.backend import Launch, backend, has_cache

MULTIPROCESSORS = 132  # of an H200
SMEM = 227 * 1024  # bytes that a block can have; a multiprocessor has 1 KB more, and takes 1 KB for each block

F = TypeVar("F", bound=Callable[..., Any])


def kernel(program: Callable[..., None], *, out_type: Any, **how: Any) -> Callable[..., Any]:
    """A kernel whose body is program(*inputs, *outputs, *scratch), as refs. `how` has the fields of `Launch`."""
    launch = Launch(**how)
    return lambda *args: backend().run(program, launch, out_type, args)


def kernel_in_place(program: Callable[..., None], **how: Any) -> Callable[..., tuple[Array, ...]]:
    """A kernel, as `kernel`, that changes its first operands in place and returns them; they are passed together.

    XLA copies these operands first, unless they are donated.
    """
    launch = Launch(**how)
    return lambda changed, *args: backend().run_in_place(program, launch, changed, args)


def lowered_once(*static: str) -> Callable[[F], F]:
    """Decorates a function that calls a kernel, so that equal calls of many layers are traced and lowered once.

    Mosaic then compiles one kernel for all layers. It would otherwise compile one for each call, about 100 for a Llama
    of 32 layers with FIER.
    """

    def wrap(f: F) -> F:
        jitted = jax.jit(f, static_argnames=static)

        @wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (jitted if has_cache() else f)(*args, **kwargs)

        return cast(F, run)

    return wrap


def flatten_batch(n: int, batches: Sequence[bool], args: Sequence[Array]) -> list[Array]:
    """Reshapes batched [n, rows, ...] to [n * rows, ...] and repeats unbatched arguments, for a kernel's vmap rule."""
    whole = (a if has else jax.numpy.broadcast_to(a[None], (n, *a.shape)) for a, has in zip(args, batches, strict=True))
    return [a.reshape(n * a.shape[1], *a.shape[2:]) for a in whole]


def by_step(number: Array | int, heads: int) -> Array:
    """Numbers that rows of a kernel share, flat: i32[B], i32[B, 1] or a number unchanged, and i32[B, T] repeated for
    each of `heads` KV heads."""
    number = jax.numpy.asarray(number, jax.numpy.int32)
    if number.ndim < 2 or number.shape[1] == 1:
        return number.reshape(-1)
    return jax.numpy.repeat(number[:, None], heads, axis=1).reshape(-1)
