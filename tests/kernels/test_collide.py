"""The kernel collide against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.vote import collide
from kvjax.numerics.rotate import turned
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import normal

pytestmark = pytest.mark.usefixtures("kernels")


def ballot(B, K, G, S, D, T, kind, most=0.8):
    """Queries whose patterns have scores exact in f32, patterns of keys, counts of the first
    keys of a row, limits up to a share of them."""
    rng, N = np.random.default_rng(S), D // 8
    q = np.round(rng.standard_normal((B, K, G, D), np.float32) * 64) / 64
    ids = rng.integers(0, 256, (B, K, S, N), np.uint8)
    stored = np.resize([S, 0, 1, S - 1], B)
    if kind == "ties":
        q = np.round(q)
        q[..., ::3] = 0
        q[0, 0, 0] = -0.0
        ids = ids % 5 * 51
    elif kind == "close":  # sums of 24 bits that differ in the last but one
        q = (rng.integers(1, 8, q.shape) * 2.0**-12).astype(np.float32)
        q[..., 3::8] = rng.choice([-4095, 4094, 1], q[..., 3::8].shape)
    elif kind == "infinite":
        q[..., 2::16] = np.inf
    elif kind == "one pattern":
        ids[:] = 255
    kept = np.arange(S)[None] < stored[:, None]
    counts = np.zeros((B, K, N, 256), np.int32)
    b, k, s, n = np.indices(ids.shape)
    np.add.at(counts, (b, k, n, ids), kept[b, s].astype(np.int32))
    limits = np.ceil(stored[:, None] * np.linspace(0.01, most, T)).astype(np.int32)
    return tuple(map(jnp.asarray, (q, ids, counts, limits)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "T", "config"),
    [
        (2, 2, 4, 548, 128, 6, collide.Config(2, 1, 4, 2, 1)),
        (1, 1, 8, 132, 64, 31, collide.Config(3, 1, 1, 2, 1)),
        (1, 1, 1, 556, 128, 3, collide.Config(1, 1, 4, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, 1, 1, 4, 128, 1, None),
                (1, 1, 5, 260, 128, 6, collide.Config(2, 1, 1, 2, 1)),
                (4, 1, 3, 2052, 128, 6, collide.Config(5, 2, 2, 2)),
                (1, 2, 5, 1028, 128, 15, collide.Config(2, 4, 4, 2)),
                (1, 1, 6, 1024, 64, 6, collide.Config(1, 1, 4, 2)),
                (1, 1, 2, 9004, 128, 6, collide.Config(2, 8, 4, 1)),
                (1, 1, 1, 3000, 128, 6, collide.Config(33, 1, 2, 3)),
            )
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                (1, 8, 4, 131072, 128, 6),
                (1, 8, 1, 131072, 128, 6),
                (2, 8, 1, 33028, 128, 6),
                (8, 8, 8, 4096, 64, 31),
            )
        ),
    ],
)
def test_collide_equals_its_reference(B, K, G, S, D, T, config):
    run = jax.jit(partial(collide.collide, config=config))
    reference = jax.jit(partial(ops.collide, implementation="xla"))
    for kind in ("random", "ties", "close", "infinite", "one pattern"):
        for most in (0.2, 0.8):  # below half no pattern of a score below 0 earns any
            args = ballot(B, K, G, S, D, T, kind, most)
            np.testing.assert_array_equal(
                run(*args), reference(*args), err_msg=f"{kind}, {most}"
            )


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_collide_rotates_queries(D):
    q, *rest = ballot(2, 1, 3, 132, D, 3, "random")
    # what a head of 64 comes to is exact
    q = jnp.round(q) if D == 64 else normal(9, 2, 1, 3, D)
    got = jax.jit(
        partial(collide.collide, turned=turned(D, 5), config=collide.Config(1, 1, 1))
    )(q, *rest)
    want = np.asarray(ops.collide(q, *rest, seed=5, implementation="xla"))
    assert (got != want).mean() <= (0 if D == 64 else 0.02)


@pytest.mark.thorough
def test_collide_takes_vmap():
    q, *rest = ballot(2, 1, 2, 64, 64, 3, "random")
    many = jnp.stack([q, -q])
    run = partial(collide.collide, config=collide.Config(2, 1, 1, 2))
    got = jax.jit(jax.vmap(lambda q: run(q, *rest)))(many)
    want = jnp.stack([ops.collide(q, *rest, implementation="xla") for q in many])
    np.testing.assert_array_equal(got, want)
