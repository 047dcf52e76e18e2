"""The kernels of delta_rule against the reference, which other tests compare with a loop in
float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.delta import delta_rule
from tests.kernels.conftest import on_gpu

pytestmark = pytest.mark.usefixtures("kernels")
SIZE = 128
ROUNDING = 8e-3  # of products whose operands have 8 bits


def prompt_of(B, T, key_heads, heads, alike=False):
    """`alike`: all keys are, and hardly decay, so that corrections undo each other."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, B, T, key_heads, SIZE), np.float32)
    speed = 0.1
    if alike:
        k[:] = k[:, :1] + 0.1 * k
        speed = 1e-4
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return (
        q * SIZE**-0.5,
        k,
        rng.standard_normal((B, T, heads, SIZE), np.float32),
        -speed * rng.random((B, T, heads), np.float32),
        rng.random((B, T, heads), np.float32),
        rng.standard_normal((B, heads, SIZE, SIZE), np.float32),
    )


@pytest.mark.parametrize(
    ("B", "T", "key_heads", "heads", "alike", "columns"),
    [
        (1, 130, 1, 2, False, 32),
        (2, 60, 1, 1, True, 64),
        pytest.param(1, 1000, 16, 32, False, None, marks=on_gpu),
        pytest.param(2, 1000, 16, 48, True, None, marks=on_gpu),
        pytest.param(3, 20000, 2, 4, False, None, marks=on_gpu),
    ],
)
def test_a_prompt_is_that_of_the_reference(B, T, key_heads, heads, alike, columns):
    args = prompt_of(B, T, key_heads, heads, alike)
    config = None if columns is None else delta_rule.Config(columns)
    run = partial(delta_rule.delta_rule, dtype=jnp.bfloat16, config=config)
    got = jax.jit(run)(*args)
    want = jax.jit(partial(ops.delta_rule, implementation="xla"))(*args)
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one - other) < ROUNDING * np.linalg.norm(other)


def test_a_long_prompt_goes_in_segments_and_a_batch_in_one_grid(monkeypatch):
    monkeypatch.setattr(delta_rule, "SEGMENT", 64)
    args = prompt_of(1, 100, 1, 1)
    run = partial(delta_rule.delta_rule, dtype=jnp.bfloat16)
    want = jax.jit(partial(ops.delta_rule, implementation="xla"))(*args)
    two = [np.stack([x, x]) for x in args]
    for one, other in zip(jax.jit(jax.vmap(run))(*two), want, strict=True):
        for got in np.asarray(one):
            assert np.linalg.norm(got - other) < ROUNDING * np.linalg.norm(other)
