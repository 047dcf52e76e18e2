"""Derivatives of functions that have none of their own: taken from another function, or refused
with a reason.

Both look at which arrays are differentiated: JAX marks the tangents of the others as
`SymbolicZero`. So a cache behind a kernel or in host memory is not touched if only the query is
differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero


def with_derivative(
    run: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """`run`, which has no derivative (a kernel, or a loop whose bounds are data), with that of
    the reference.

    The reference is differentiated only by the arrays for which a derivative is requested, and
    only results that depend on them get one. A cache in host memory, which has none, then gets
    no tangents of zeros, and may pass through operations that cannot be differentiated.
    """
    f = jax.custom_jvp(run)

    def rule(primals: Any, tangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(primals)
        along = {
            i: t
            for i, t in enumerate(jax.tree.leaves(tangents))
            if not isinstance(t, SymbolicZero)
        }
        varies: list[bool] = []  # by array of the result; empty if none does

        def of_varied(varied: dict[int, Array]) -> Any:
            out = reference(
                *jax.tree.unflatten(
                    tree, [varied.get(i, leaf) for i, leaf in enumerate(leaves)]
                )
            )
            flat, kind = jax.tree.flatten(out)
            return jax.tree.unflatten(kind, _noting_which_vary(varies)(*flat))

        out = f(*primals)
        own = jax.tree.leaves(jax.jvp(of_varied, ({i: leaves[i] for i in along},), (along,))[1])
        flat, kind = jax.tree.flatten(out)
        nothing = [SymbolicZero(jax.typeof(a).to_tangent_aval()) for a in flat]
        own = [
            own[i] if i < len(varies) and varies[i] else none for i, none in enumerate(nothing)
        ]
        return out, jax.tree.unflatten(kind, own)

    f.defjvp(rule, symbolic_zeros=True)
    return f


def _noting_which_vary(varies: list[bool]) -> Callable[..., tuple[Any, ...]]:
    """The identity; when it is differentiated, it writes to `varies` which arrays have a
    tangent.
    """

    @jax.custom_jvp
    def same(*arrays: Any) -> tuple[Any, ...]:
        return arrays

    def rule(primals: Any, tangents: Any) -> Any:
        varies[:] = [not isinstance(t, SymbolicZero) for t in tangents]
        return primals, tangents

    same.defjvp(rule, symbolic_zeros=True)
    return same


def refuse_derivative(why: str, *arrays: Array) -> tuple[Array, ...]:
    """`arrays` unchanged; raises NotImplementedError with `why` if any of them is
    differentiated.

    For derivatives that would otherwise silently be zero, such as that of rounded keys. Costs
    nothing in a compiled program.

    >>> import jax.numpy as jnp
    >>> jax.grad(lambda x: refuse_derivative("codes have no derivative", x)[0])(jnp.float32(1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    NotImplementedError: codes have no derivative...
    """

    @jax.custom_jvp
    def same(*arrays: Array) -> tuple[Array, ...]:
        return arrays

    def rule(primals: Any, tangents: Any) -> Any:
        if any(not isinstance(t, SymbolicZero) for t in tangents):
            raise NotImplementedError(why)
        return primals, tangents

    same.defjvp(rule, symbolic_zeros=True)
    return same(*arrays)


def refuse_vmap(why: str, *arrays: Array) -> tuple[Array, ...]:
    """Returns `arrays` unchanged; raises ValueError with `why` if `jax.vmap` maps any of them.

    >>> import jax.numpy as jnp
    >>> jax.vmap(lambda x: refuse_vmap("one at a time", x)[0])(jnp.ones(2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: one at a time...
    """

    @jax.custom_batching.custom_vmap
    def same(*arrays: Array) -> tuple[Array, ...]:
        return arrays

    @same.def_vmap
    def rule(size: int, mapped: Any, *arrays: Array) -> Any:
        raise ValueError(why)

    return same(*arrays)
