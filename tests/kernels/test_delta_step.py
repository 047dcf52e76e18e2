"""The kernel of delta_step against the reference, which other tests compare with a loop in
float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.delta import delta_step
from tests.kernels.conftest import ON_GPU, on_gpu

pytestmark = pytest.mark.usefixtures("kernels")
NEWEST, WINDOW = 32, 4


def step_of(B, key_heads, heads, key_dim, value_dim, dtype=jnp.bfloat16, held=(0, 5, 31, 32)):
    """A step's arguments. Slots at and past `held` are NaN, and a row that is full takes no
    token.
    """
    rng = np.random.default_rng(0)
    channels = 2 * key_heads * key_dim + heads * value_dim
    held = np.resize(held, B).astype(np.int32)

    def normal(*shape, after=None, dtype=jnp.float32):
        x = rng.standard_normal(shape, np.float32)
        if after is not None:
            x[np.arange(shape[1])[None] >= (held + after)[:, None]] = np.nan
        return jnp.asarray(x, dtype)

    keys = normal(B, NEWEST, key_heads, key_dim, after=0)
    decays = -np.cumsum(rng.random((B, NEWEST, heads), np.float32), axis=1)
    decays[np.arange(NEWEST)[None] >= held[:, None]] = np.nan
    return (
        normal(B, heads, key_dim, value_dim),
        normal(B, WINDOW - 1 + NEWEST, channels, after=WINDOW - 1, dtype=dtype),
        keys / np.sqrt(key_dim),
        normal(B, NEWEST, heads, value_dim, after=0),
        jnp.asarray(decays),
        normal(B, 1, channels, dtype=dtype),
        jnp.asarray(-rng.random((B, 1, heads), np.float32)),
        jnp.asarray(rng.random((B, 1, heads), np.float32)),
        normal(WINDOW, channels, dtype=dtype),
        jnp.asarray(held + (held < NEWEST)),
        jnp.asarray((held < NEWEST).astype(np.int32)),
    )


def poisoned_is_zero(args):
    """The reference multiplies slots that no token has by 0, where NaN would stay."""
    return [jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]


@pytest.mark.parametrize(
    ("B", "key_heads", "heads", "key_dim", "value_dim", "dtype", "columns"),
    [
        (4, 1, 2, 64, 32, jnp.float32, None),
        (2, 2, 2, 128, 64, jnp.bfloat16, None),
        (1, 1, 1, 256, 128, jnp.bfloat16, 128),
        (1, 1, 1, 128, 64, jnp.bfloat16, 32),
        pytest.param(8, 16, 48, 128, 128, jnp.bfloat16, None, marks=on_gpu),
        pytest.param(3, 16, 32, 128, 128, jnp.float32, None, marks=on_gpu),
    ],
)
def test_a_step_is_that_of_the_reference(
    B, key_heads, heads, key_dim, value_dim, dtype, columns
):
    args = step_of(B, key_heads, heads, key_dim, value_dim, dtype)
    config = None if columns is None else delta_step.Config(columns)
    got = jax.jit(partial(delta_step.delta_step, config=config))(*args)
    want = jax.jit(partial(ops.delta_step, implementation="xla"))(*poisoned_is_zero(args))
    taken = np.asarray(args[-1]) > 0
    # On a GPU, XLA leaves out that the reference rounds what the convolution gives.
    atol = 2e-2 if ON_GPU and dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(got[0][taken], want[0][taken], atol=atol)
    for one, other, before in zip(got[1:], want[1:], args[1:5], strict=True):
        empty = np.isnan(np.asarray(one, np.float32))
        assert (empty <= np.isnan(np.asarray(before, np.float32))).all()
        np.testing.assert_allclose(
            np.where(empty, 0, np.asarray(one, np.float32)),
            np.asarray(other, np.float32),
            atol=atol,
        )


def test_a_batched_step_has_weights_of_its_own():
    args = step_of(2, 1, 1, 64, 32, jnp.float32, held=(3, 32))
    two = [jnp.stack([x, x[::-1]]) for x in args]
    got = jax.jit(jax.vmap(delta_step.delta_step))(*two)
    for i in range(2):
        want = jax.jit(delta_step.delta_step)(*(x[i] for x in two))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one[i], other)
