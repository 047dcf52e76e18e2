"""The kernel top_k against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.select import top_k
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import normal

pytestmark = pytest.mark.usefixtures("kernels")


def inputs(rows, U, k, seed=0):
    """Name, scores and valid of one row each kind that a selection must get right."""
    rng = np.random.default_rng(seed)
    normal, all_valid = rng.standard_normal((rows, U), np.float32), np.ones((rows, U), bool)
    counts = np.resize([0, 1, k - 1, k, k + 1, U - 1], rows)
    upto = np.arange(U)[None] < counts[:, None]
    extreme = normal.copy()
    extreme[:, ::7], extreme[:, 1::5], extreme[:, 3::11] = np.inf, -np.inf, np.nan
    yield "normal", normal, all_valid
    yield "counts, NaN past them", np.where(upto, normal, np.nan), upto
    yield "zeros of both signs", np.where(normal > 0, np.float32(0), -np.float32(0)), all_valid
    yield "one mask for all rows", normal, all_valid[:1, :1]
    yield "all equal", np.ones_like(normal), all_valid
    yield "few values", np.round(normal), all_valid
    yield "infinities and NaN", extreme, rng.random((rows, U)) < 0.8
    yield "rising", np.sort(normal, axis=1), all_valid
    yield "falling", -np.sort(-normal, axis=1), all_valid
    yield (
        "last bits differ",
        (1 + np.float32(2**-23) * rng.integers(0, 3, (rows, U))).astype(np.float32),
        all_valid,
    )


@pytest.mark.parametrize(
    ("rows", "U", "k", "blocks"),
    [
        (6, 600, 100, 2),
        (6, 9000, 100, -2),
        pytest.param(1, 20000, 1000, -1, marks=pytest.mark.thorough),
        pytest.param(1, 40000, 4096, -3, marks=pytest.mark.thorough),
        pytest.param(1, 5000, 1000, 1, marks=pytest.mark.thorough),
        pytest.param(1, 40000, 4096, 2, marks=pytest.mark.thorough),
        pytest.param(2, 5000, 5, 4, marks=pytest.mark.thorough),
        *(
            pytest.param(3, 70000, 1500, blocks, marks=on_gpu)
            for blocks in (1, 2, 4, 8, -1, -7, -16)
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                *((8, 131072, 2048), (8, 131328, 2048), (3, 5000, 100), (2, 300001, 4096)),
                *((1, 17, 5), (1, 1, 1), (40, 2049, 2048), (70, 1000, 1000)),
            )
        ),
    ],
)
def test_top_k_equals_its_reference(rows, U, k, blocks):
    config = blocks and top_k.Config(blocks=abs(blocks), cluster=int(blocks > 0))
    run = jax.jit(partial(top_k.top_k, k=k, config=config))
    reference = jax.jit(partial(ops.top_k, k=k, implementation="xla"))
    for name, scores, valid in inputs(rows, U, k):
        scores, valid = jnp.asarray(scores), jnp.asarray(valid)
        slots, found = run(scores, valid)
        want = reference(scores, valid)
        best = want.slots
        if (
            name == "zeros of both signs"
        ):  # for a small k on a GPU, XLA holds them equal; else 0 is above -0, as here
            best = np.argsort(np.signbit(scores), axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(slots, best, err_msg=name)
        np.testing.assert_array_equal(found, want.valid, err_msg=name)


@pytest.mark.thorough
def test_top_k_takes_16_bits_any_rank_and_vmap():
    scores = normal(0, 2, 1, 2, 99, dtype=jnp.bfloat16)
    valid = jnp.asarray((np.arange(99) < 70)[None, None, None])
    want = jax.jit(partial(ops.top_k, k=10, implementation="xla"))(scores, valid)
    run = partial(top_k.top_k, k=10, config=top_k.Config(blocks=1))
    for f in (lambda s: run(s, valid), jax.vmap(lambda s: run(s, valid[0]))):
        np.testing.assert_array_equal(jax.jit(f)(scores)[0], want.slots)
