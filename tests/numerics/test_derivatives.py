"""Derivatives that are taken from another function, or refused."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.numerics.derivatives import refuse_derivative, with_derivative


def test_a_derivative_leaves_alone_what_none_is_asked_by() -> None:
    """A cache behind a kernel without a derivative does not prevent one: only the query has a
    derivative.
    """

    @jax.custom_jvp
    def read(cache: jax.Array) -> jax.Array:
        return cache * 2

    read.defjvp(lambda *_: pytest.fail("differentiated by the cache"))
    f = with_derivative(
        lambda q, cache, none, n: read(cache[1]), lambda q, cache, none, n: q * read(cache[1])
    )
    cache = jnp.zeros(()), jnp.float32(3)
    grad = jax.jit(jax.grad(lambda q: jax.checkpoint(f)(q, cache, None, jnp.int32(5))))
    assert grad(jnp.float32(7)) == 6
    assert jax.vmap(grad)(jnp.ones(2)).tolist() == [6, 6]


def test_what_does_not_depend_on_it_has_no_derivative() -> None:
    """A cache that is returned together with the output may be used where a derivative is
    refused.
    """

    def both(q: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        return q * cache, cache + 1

    def loss(q: jax.Array, cache: jax.Array) -> jax.Array:
        out, cache = with_derivative(both, both)(q, cache)
        return out * refuse_derivative("no derivative", cache)[0]

    grad = jax.jit(jax.grad(loss))
    assert grad(jnp.float32(7), jnp.float32(3)) == 12
    assert jax.vmap(grad, (0, None))(jnp.ones(2), jnp.float32(3)).tolist() == [12, 12]
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(loss, argnums=1)(jnp.float32(7), jnp.float32(3))
