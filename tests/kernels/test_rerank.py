"""The kernel rerank against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.score import rerank
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import encode
from kvjax.numerics.selection import PackedSelection
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import CENTRES, normal

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "M", "config"),
    [
        (2, 1, 3, 50, 128, 130, rerank.Config(1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, 2, 1, 7, 64, 513, rerank.Config(4)),
                (1, 1, 1, 1, 128, 1, rerank.Config(2)),
                (1, 1, 40, 70, 64, 1500, rerank.Config(8)),
                (1, 1, 8, 300, 64, 256, None),
            )
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                (1, 8, 1, 131072, 128, 6554),
                (2, 8, 4, 33000, 128, 3301),
                (8, 8, 8, 4096, 64, 409),
            )
        ),
    ],
)
def test_rerank_equals_its_reference(B, K, G, S, D, M, config):
    k = np.array(normal(S, B, K, S, D))
    k[:, :, ::5] = 0.0
    k[:, :, 1::7] *= 1e4
    keys = jax.tree.map(np.array, jax.jit(encode)(k))
    keys.sizes[:, :, ::3] = 255
    slots = np.random.default_rng(M).integers(-3, S + 3, (B, K, G, M)).astype(np.int32)
    found = np.full((B, K, G), M, np.int32)
    args = normal(1, B, K, G, D), keys, PackedSelection(slots, found)
    got = jax.jit(partial(rerank.rerank, centres=CENTRES, scale=0.3, config=config))(
        args[0], *keys, slots
    )
    want = jax.jit(partial(ops.rerank, logits=Logits(0.3), implementation="xla"))(*args)
    # Sums of D products in f32, in another order.
    size = jax.jit(partial(ops.rerank, logits=Logits(0.3), implementation="xla"))(
        np.abs(args[0]), keys._replace(signs=np.full_like(keys.signs, 255)), args[2]
    )
    assert (
        np.abs(np.asarray(got) - np.asarray(want))
        <= 16 * np.finfo(np.float32).eps * np.asarray(size)
    ).all()


@pytest.mark.thorough
def test_rerank_takes_vmap():
    keys = jax.jit(encode)(normal(0, 1, 2, 30, 64))
    q, slots = (
        normal(1, 3, 1, 2, 2, 64),
        jnp.arange(20).reshape(1, 1, 1, 20) + jnp.zeros((1, 2, 2, 1), jnp.int32),
    )
    got = jax.jit(
        jax.vmap(lambda q: rerank.rerank(q, *keys, slots, centres=CENTRES, scale=1.0))
    )(q)
    picked = PackedSelection(slots, jnp.full((1, 2, 2), 20))
    want = jnp.stack(
        [ops.rerank(x, keys, picked, logits=Logits(1.0), implementation="xla") for x in q]
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
