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
    """A step's arguments, of numpy, as each operation of jax on an array is a program.

    Slots at and past `held` are NaN; a row that is full has to drop its token, and a second row
    has none.
    """
    rng = np.random.default_rng(0)
    channels = 2 * key_heads * key_dim + heads * value_dim
    held = np.resize(held, B).astype(np.int32)
    due = np.resize([1, 0, 1, 1], B).astype(np.int32)
    counts = held, held + 100, np.arange(B) == 1

    def normal(*shape, after=None, dtype=jnp.float32):
        x = rng.standard_normal(shape, np.float32)
        if after is not None:
            x[np.arange(shape[1])[None] >= (held + after)[:, None]] = np.nan
        return x.astype(dtype)

    keys = normal(B, NEWEST, key_heads, key_dim, after=0)
    decays = -np.cumsum(rng.random((B, NEWEST, heads), np.float32), axis=1)
    decays[np.arange(NEWEST)[None] >= held[:, None]] = np.nan
    return (
        normal(B, heads, key_dim, value_dim),
        normal(B, WINDOW - 1 + NEWEST, channels, after=WINDOW - 1, dtype=dtype),
        keys / key_dim**0.5,
        normal(B, NEWEST, heads, value_dim, after=0),
        decays,
        normal(B, 1, channels, dtype=dtype),
        -rng.random((B, 1, heads), np.float32),
        rng.random((B, 1, heads), np.float32),
        normal(WINDOW, channels, dtype=dtype),
        counts,
        due,
    )


def rounding_of(dtype):
    """How far two right results of a step may be apart, as a share of the largest number.

    What the convolution gives, and silu of that, is rounded to `dtype`. A GPU adds in another
    order than XLA, so that now and then one of the two is the next number of 8 bits.
    """
    return 2 * 2.0**-8 if ON_GPU and dtype == jnp.bfloat16 else 1e-5


def with_rounding(f):
    """jit(f) in which XLA keeps all roundings to bfloat16, as it does on CPU."""
    return jax.jit(f, compiler_options={"xla_allow_excess_precision": False})


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
    reference = partial(ops.delta_step, implementation="xla")
    want = with_rounding(reference)(*args)
    *arrays, counts = jax.tree.map(np.asarray, got)
    *wanted, wanted_counts = jax.tree.map(np.asarray, want)
    for one, other in zip(counts, wanted_counts, strict=True):
        np.testing.assert_array_equal(one, other)
    taken = wanted_counts[0] > args[-2][0]
    arrays[0], wanted[0] = arrays[0][taken], wanted[0][taken]
    for one, other, before in zip(arrays, wanted, (None, *args[1:5]), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        empty = np.isnan(one)
        assert not empty.any() or (empty <= np.isnan(np.asarray(before, np.float32))).all()
        np.testing.assert_array_equal(empty, np.isnan(other))
        away = np.abs(one - other)[~empty].max()
        assert away <= rounding_of(dtype) * max(1, np.abs(other[~empty]).max())


def test_a_batched_step_has_weights_of_its_own():
    args = step_of(2, 1, 1, 64, 32, jnp.float32, held=(3, 32))
    two = jax.tree.map(lambda x: np.stack([x, x[::-1]]), args)
    got = jax.tree.map(np.asarray, jax.jit(jax.vmap(delta_step.delta_step))(*two))
    for i in range(2):
        want = jax.jit(delta_step.delta_step)(*jax.tree.map(lambda x, i=i: x[i], two))
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_array_equal(one[i], other)
