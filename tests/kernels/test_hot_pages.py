"""The kernels of the hot set against the references, over steps that fill it, hit, miss and
replace.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.host import host_rows, hot_float8, hot_pages
from kvjax.memory import to_host
from kvjax.stores.hot import empty_hot
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import normal

pytestmark = pytest.mark.usefixtures("kernels")


def wanted(rng, B, K, N, P, spread):
    """Different pages, pending tokens and empty entries, and the number of entries."""
    near = rng.integers(0, P - spread, (B, K, 1))
    index = near + np.stack([rng.permutation(spread)[:N] for _ in range(B * K)]).reshape(
        B, K, N
    )
    index.reshape(-1)[:: N // 2 + 1] = P + rng.integers(0, 5)
    index.reshape(-1)[:: N // 3 + 2] = -1
    return jnp.asarray(index, jnp.int32), jnp.asarray(
        rng.integers(N // 2, N + 1, (B, K)), jnp.int32
    )


@pytest.mark.parametrize(
    ("B", "K", "n", "N", "P", "spread"),
    [
        (1, 2, 40, 17, 90, 60),
        (2, 1, 700, 300, 2000, 900),
        (1, 1, 9, 9, 64, 12),  # every place is wanted
        *(
            pytest.param(2, 8, n, 2048, 131072, n + n // 2, marks=on_gpu)
            for n in (2048, 4096, 8192, 32768)
        ),
        pytest.param(1, 8, 129, 64, 4096, 300, marks=on_gpu),
    ],
)
def test_places_are_those_of_the_reference(B, K, n, N, P, spread):
    hot, rng = empty_hot((B, K), n, P, 1, 8, jnp.bfloat16), np.random.default_rng(0)
    kernel, reference = (
        jax.jit(hot_pages.hot_places),
        jax.jit(partial(ops.hot_places, implementation="xla")),
    )
    ours = theirs = hot.tables
    for step in range(8):
        if step != 5:  # then nothing is missing
            index, found = wanted(rng, B, K, N, P, spread)
        theirs, want = reference(theirs, index, found)
        made, at = kernel(tuple(ours), index, found)
        ours = ops.HotTables(*made)
        np.testing.assert_array_equal(at, want)
        for name, a, b in zip(ours._fields, ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{name}, step {step}")
    assert n > 8 * N or (np.asarray(theirs.loads) > n).any(), "nothing was replaced"
    two = jax.tree.map(lambda a: jnp.stack([a, a]), (tuple(ours), index, found))
    _, at = jax.jit(jax.vmap(hot_pages.hot_places))(*two)
    np.testing.assert_array_equal(at[1], reference(ours, index, found)[1])


@pytest.mark.parametrize(
    ("B", "K", "n", "N", "P", "Z", "D"),
    [
        (1, 2, 12, 9, 40, 1, 64),
        (2, 1, 7, 5, 20, 4, 8),
        (2, 4, 400, 300, 900, 1, 8),  # a warp looks at several
        (1, 1, 9, 5, 20, 16, 32),  # a page is more than a warp moves at once
        pytest.param(2, 8, 8192, 2048, 65536, 1, 128, marks=on_gpu),
        pytest.param(1, 8, 256, 56, 4096, 32, 128, marks=on_gpu),
    ],
)
def test_pages_with_a_new_place_are_read_to_it(B, K, n, N, P, Z, D):
    # so that warps take turns
    config = host_rows.Config(ahead=4, blocks=25) if n == 400 else None
    x = to_host(normal(7, B, K, P, 2, Z, D, dtype=jnp.bfloat16))
    kernel = jax.jit(partial(hot_pages.hot_load, config=config))
    same_pages(kernel, ops.hot_load, x, jnp.bfloat16, n, N)


@pytest.mark.parametrize(
    ("B", "K", "n", "N", "P", "Z", "D", "dtype"),
    [
        (1, 2, 12, 9, 40, 1, 64, jnp.bfloat16),
        (2, 1, 7, 5, 20, 4, 16, jnp.float16),
        (1, 1, 9, 5, 20, 16, 64, jnp.float32),  # a page is more than a warp moves at once
        (2, 4, 400, 300, 900, 1, 16, jnp.bfloat16),  # a warp looks at several
        pytest.param(2, 8, 8192, 2048, 65536, 1, 128, jnp.bfloat16, marks=on_gpu),
        pytest.param(4, 8, 512, 126, 2048, 16, 128, jnp.bfloat16, marks=on_gpu),
        pytest.param(1, 8, 256, 56, 4096, 32, 128, jnp.float32, marks=on_gpu),
    ],
)
def test_pages_of_8_bit_floats_are_read_as_their_values(B, K, n, N, P, Z, D, dtype):
    codes = np.random.default_rng(3).permutation(
        np.arange(B * K * P * 2 * Z * D) % 256
    )  # every code, NaN among them
    x = to_host(jnp.asarray(codes.reshape(B, K, P, 2, Z, D), jnp.uint8))
    same_pages(jax.jit(hot_float8.hot_load_float8), ops.hot_load_float8, x, dtype, n, N)


@pytest.mark.parametrize("ahead", [1, 3, 4])
@pytest.mark.parametrize(
    "D", [8, 160]
)  # a page is a part of a turn of the warp, or more than one
def test_a_warp_that_lacks_many_pages_moves_them_all(ahead, D, monkeypatch):
    monkeypatch.setattr(hot_pages, "LEAST_WARPS", 4)  # so that a warp looks at 32
    config = host_rows.Config(ahead=ahead, warpgroups=1)
    x = to_host(normal(7, 2, 1, 90, 2, 1, D, dtype=jnp.bfloat16))
    same_pages(
        jax.jit(partial(hot_pages.hot_load, config=config)),
        ops.hot_load,
        x,
        jnp.bfloat16,
        80,
        70,
    )


def same_pages(kernel, op, x, dtype, n, N):
    """Kernel and reference read the same pages of x to the same places of zones."""
    B, K, P, _, Z, D = x.shape
    rng = np.random.default_rng(0)
    zones = [normal(s, B, K, n * Z, D, dtype=dtype) for s in (1, 2)]
    page = jnp.asarray(
        np.stack([rng.permutation(P)[:n] for _ in range(B * K)]).reshape(B, K, n), jnp.int32
    )
    used = jnp.asarray(rng.integers(1, 3, (B, K, n)), jnp.int32)
    at = np.stack([rng.permutation(n)[:N] for _ in range(B * K)]).reshape(B, K, N)
    at.reshape(-1)[::4] = n + 3
    at = jnp.asarray(at, jnp.int32)
    got = kernel(x, zones, page, used, at)
    want = jax.jit(partial(op, implementation="xla"))(x, tuple(zones), page, used, at)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(want, zones, strict=True))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        )
