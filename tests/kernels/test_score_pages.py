"""The kernel score_pages beside the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.kernels_pallas.score import score_pages

from kvjax import ops
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import boxes, normal, relative

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("B", "K", "G", "P", "D", "dtype", "config"),
    [
        (2, 1, 5, 70, 128, jnp.bfloat16, None),
        pytest.param(1, 2, 8, 33, 64, jnp.float16, score_pages.Config(1, 2), marks=pytest.mark.thorough),
        *(pytest.param(2, 3, G, 1001, 128, jnp.bfloat16, None, marks=on_gpu) for G in range(1, 9)),
        *(pytest.param(1, 2, 4, P, 64, jnp.float16, None, marks=on_gpu) for P in (1, 15, 16, 17, 4096)),
        pytest.param(1, 8, 4, 8192, 128, jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_scores_of_pages_equal_the_reference(B, K, G, P, D, dtype, config):
    low, high = boxes(B, K, P, D, dtype)
    q = normal(2, B, K, G, D, dtype=dtype)
    got = jax.jit(partial(score_pages.score_pages, scale=0.1, config=config))(q, low, high)
    want = jax.jit(partial(ops.score_pages, scale=0.1, implementation="xla"))(q, low, high)
    assert relative(got, want) < 1e-6


def test_a_page_of_nan_scores_only_itself_also_under_vmap():
    low, high = boxes(1, 1, 20, 64, jnp.bfloat16)
    q = normal(2, 1, 1, 2, 64)
    run = partial(score_pages.score_pages, scale=0.1)
    lows = jnp.stack([low, low.at[:, :, 7].set(jnp.nan)])
    highs = jnp.stack([high, high.at[:, :, 9].set(jnp.inf)])
    want, got = jax.jit(jax.vmap(run, in_axes=(None, 0, 0)))(q, lows, highs)
    others = np.setdiff1d(np.arange(20), [7, 9])
    np.testing.assert_array_equal(got[..., others], want[..., others])
    assert not np.isfinite(got[..., [7, 9]]).any()
