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
    """Name, scores and valid of what a selection must get right: rows of any counts, rows of
    one mask, and a row of each kind of scores.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rows, U), np.float32)
    counts = np.resize([0, 1, k - 1, k, k + 1, U - 1], rows)
    upto = np.arange(U)[None] < counts[:, None]
    yield "counts, NaN past them", np.where(upto, normal, np.nan), upto
    yield "one mask for all rows", normal[:2], np.ones((1, 1), bool)
    one = normal[0]
    extreme = one.copy()
    extreme[::7], extreme[1::5], extreme[3::11] = np.inf, -np.inf, np.nan
    kinds = {
        "normal": one,
        "zeros of both signs": np.where(one > 0, np.float32(0), -np.float32(0)),
        "all equal": np.ones_like(one),
        "few values": np.round(one),
        "infinities and NaN": extreme,
        "rising": np.sort(one),
        "falling": -np.sort(-one),
        "last bits differ": 1 + np.float32(2**-23) * rng.integers(0, 3, U),
    }
    valid = np.ones((len(kinds), U), bool)
    valid[list(kinds).index("infinities and NaN")] = rng.random(U) < 0.8
    yield ", ".join(kinds), np.stack(list(kinds.values())).astype(np.float32), valid


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
        slots, found = run(scores, valid)
        want = reference(scores, valid)
        best = np.array(want.slots)
        # Of zeros alone XLA holds both signs equal on a GPU for a small k; else 0 is above -0,
        # as here.
        zeros = np.all(scores == 0, axis=1)
        best[zeros] = np.argsort(np.signbit(scores[zeros]), axis=1, kind="stable")[:, :k]
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
