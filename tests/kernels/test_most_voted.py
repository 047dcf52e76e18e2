"""The kernel most_voted against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.vote import most_voted
from tests.kernels.conftest import on_gpu

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "room", "config"),
    [
        (6, 1, 2, 1040, 130, most_voted.Config(2, 2)),
        (6, 1, 2, 1040, 130, most_voted.Config(3, 2, cluster=0)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (6, 2, 1, 8208, 2000, most_voted.Config(8, 4)),
                (1, 1, 1, 16, 1, most_voted.Config(8, 4)),
                (6, 1, 1, 4112, 4112, most_voted.Config(1, 2)),
                (2, 1, 3, 20000, 999, None),
                (1, 1, 1, 33008, 999, most_voted.Config(2, 8)),
                (6, 1, 1, 4112, 777, most_voted.Config(16, 2)),
            )
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                (1, 8, 4, 131072, 13108),
                (6, 8, 1, 33008, 6000),
                (1, 1, 1, 1 << 20, 104858),
            )
        ),
    ],
)
def test_most_voted_equals_its_reference(B, K, G, S, room, config):
    rng = np.random.default_rng(S)
    length = jnp.asarray(np.resize([S, S + 9, 0, 1, S - 5, room], B), jnp.int32)
    count = jnp.asarray(np.resize([room, room // 2, 3, room + 5, 0, 1], B), jnp.int32)
    run = jax.jit(partial(most_voted.most_voted, room=room, local=3, config=config))
    reference = jax.jit(partial(ops.most_voted, room=room, local=3, implementation="xla"))
    stop = jnp.asarray(np.resize([0, 9, 2, 50, 40, 3], B), jnp.int32)
    for values, complement in (
        ([0, 1, 2], None),
        ([7], (room, 2, stop)),
        ([0, 255], (count + 20, jnp.asarray([1], jnp.int32), stop)),
        (range(97), None),
        (range(256), (room // 2, jnp.minimum(stop, 4), stop)),
    ):
        votes = jnp.asarray(rng.choice(np.array(values, np.uint8), (B, K, G, S)))
        for got, want in zip(
            run(votes, length, count, complement=complement),
            reference(votes, length, count, complement=complement),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want, err_msg=str(values))


@pytest.mark.thorough
def test_most_voted_takes_vmap():
    votes = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 2, 1, 2, 48)), jnp.uint8)
    length, count = (
        jnp.full(2, 48, jnp.int32),
        jnp.asarray([[5, 9], [0, 48], [48, 1]], jnp.int32),
    )
    got = jax.jit(jax.vmap(lambda v, n: most_voted.most_voted(v, length, n, 20)))(votes, count)
    for i in range(3):
        want = ops.most_voted(votes[i], length, count[i], 20, implementation="xla")
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours[i], theirs)
