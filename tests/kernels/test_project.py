"""The kernels of project and route against the references."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.project import project, route
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import normal as of_dtype

pytestmark = pytest.mark.usefixtures("kernels")
normal = partial(of_dtype, dtype=jnp.bfloat16)
NORM = {"eps": 1e-5, "offset": False}


def product_of(size, widths, biased, normed, added):
    kernels, biases = ([normal(n, *lead, width) for n, width in enumerate(widths)] for lead in ((size,), ()))
    scale, residual = normal(7, size) if normed else None, normal(8, sum(widths)) if added else None
    return 3 * normal(9, size), kernels, biases if biased else [], scale, residual


@pytest.mark.parametrize(
    ("size", "widths", "biased", "normed", "added", "offset", "config"),
    [
        (1160, (64, 32, 32), True, True, True, False, None),
        (288, (96,), False, False, True, False, project.Config(warpgroups=2, unroll=3)),
        (256, (64, 128), False, True, False, True, project.Config(columns=64, warpgroups=1)),
        pytest.param(2880, (4096, 512, 512), True, True, False, False, None, marks=on_gpu),
        pytest.param(14336, (4096,), False, False, True, False, None, marks=on_gpu),
    ],
)
def test_a_row_is_projected_as_by_the_reference(size, widths, biased, normed, added, offset, config):
    args = product_of(size, widths, biased, normed, added)
    how = {"eps": 1e-5, "offset": offset}
    got = jax.jit(partial(project.project, **how, config=config))(*args)
    want = jax.jit(partial(ops.project, **how, implementation="xla"))(*args)
    ulp = 2.0**-7 * np.abs(want.astype(np.float32)).max()  # of sums that are rounded three times
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=ulp, rtol=2**-7)


@pytest.mark.parametrize(
    ("size", "experts", "k", "biased"),
    [
        (264, 128, 8, True),
        (160, 8, 2, False),
        pytest.param(2880, 32, 4, True, marks=on_gpu),
        pytest.param(2048, 128, 8, False, marks=on_gpu),
    ],
)
def test_a_row_is_routed_as_by_the_reference(size, experts, k, biased):
    args = 3 * normal(0, size), normal(1, size), normal(2, experts, size), normal(3, experts) if biased else None
    got = jax.jit(partial(route.route, k=k, **NORM))(*args)
    want = jax.jit(partial(ops.route, k=k, **NORM, normalised=True, implementation="xla"))(*args)
    np.testing.assert_allclose(got[0].astype(np.float32), want[0].astype(np.float32), rtol=2**-7)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3)
    np.testing.assert_array_equal(got[2], want[2])


def test_of_equal_experts_the_lower_is_chosen():
    x, scale, same = normal(0, 64), normal(1, 64), jnp.tile(normal(2, 64), (12, 1))
    row, shares, chosen = jax.jit(partial(route.route, bias=None, k=3, **NORM))(x, scale, same.at[3].set(-same[0]))
    first = [0, 1, 2] if np.dot(row.astype(np.float32), same[0].astype(np.float32)) > 0 else [3, 0, 1]
    np.testing.assert_array_equal(chosen, first)
    if first == [0, 1, 2]:
        np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)


def test_rows_under_vmap_share_their_kernels():
    x, kernels, *rest = product_of(64, (32,), False, True, False)
    rows = jnp.stack([x, -x])
    got = jax.jit(jax.vmap(lambda x: project.project(x, kernels, *rest, **NORM)))(rows)
    np.testing.assert_array_equal(got[0], jax.jit(partial(project.project, **NORM))(x, kernels, *rest))
    routed = jax.jit(jax.vmap(lambda x: route.route(x, normal(1, 64), normal(2, 8, 64), None, 2, **NORM)))(rows)
    assert [a.shape for a in routed] == [(2, 64), (2, 2), (2, 2)]
