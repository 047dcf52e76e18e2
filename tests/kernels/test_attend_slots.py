"""The kernel attend_slots against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_slots
from kvjax.kernels_pallas.attend.softmax import SIZES
from kvjax.kernels_pallas.select import top_k
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Selection
from tests.kernels.conftest import ON_GPU, on_gpu
from tests.kernels.inputs import changed, normal, relative
from tests.kernels.simulate import Simulator

pytestmark = pytest.mark.usefixtures("kernels")


def attended(B, K, G, H, S, D, M, dtype, counts):
    q, k, v = (
        normal(0, B, K, G, D, dtype=dtype),
        *(normal(s, B, K, S, D, dtype=dtype) for s in (1, 2)),
    )
    slots = jnp.asarray(np.random.default_rng(3).integers(0, S, (B, K, H, M)).astype(np.int32))
    count = np.resize(counts, (B, K, H, 1))
    return q, k, v, Selection(slots, jnp.asarray(np.arange(M) < count))


def assert_attends(args, config=None, scale=0.125):
    q, k, v, selection = args
    run = jax.jit(partial(attend_slots.attend_slots, scale=scale, config=config))
    out, lse = run(q, k, v, *selection)
    want = jax.jit(partial(ops.attend_slots, logits=Logits(scale), implementation="xla"))(
        q, k, v, selection
    )
    # Weights are rounded to the dtype of the values, each once.
    assert relative(out, want.out) < float(jnp.finfo(k.dtype).eps)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("B", "K", "G", "H", "S", "D", "M", "dtype", "config"),
    [
        (
            1,
            6,
            4,
            1,
            300,
            64,
            130,
            jnp.bfloat16,
            attend_slots.Config(2, 1),
        ),  # a step of each warp
        (1, 6, 4, 1, 300, 64, 130, jnp.bfloat16, attend_slots.Config(3, 1, cluster=0)),
        (1, 2, 5, 1, 300, 128, 300, jnp.float16, attend_slots.Config(1, 1)),  # a loop
        (2, 1, 4, 4, 50, 64, 33, jnp.bfloat16, None),
        (1, 1, 10, 1, 200, 80, 150, jnp.bfloat16, attend_slots.Config(1, 1)),
        (1, 1, 2, 1, 200, 96, 150, jnp.float16, attend_slots.Config(2, 1, cluster=0, tile=16)),
        (1, 1, 6, 1, 200, 256, 150, jnp.bfloat16, attend_slots.Config(1, 1, tile=16, copies=4)),
        *(
            pytest.param(1, 1, 18, 2, 70, D, 50, jnp.bfloat16, None, marks=pytest.mark.thorough)
            for D in SIZES
        ),
        pytest.param(1, 1, 8, 1, 500, 256, 200, jnp.bfloat16, None, marks=pytest.mark.thorough),
        pytest.param(
            1,
            1,
            2,
            1,
            2000,
            128,
            2048,
            jnp.bfloat16,
            attend_slots.Config(8, 2),
            marks=pytest.mark.thorough,
        ),
        *(
            pytest.param(2, 3, G, 1, 5000, 128, 1000, jnp.bfloat16, None, marks=on_gpu)
            for G in range(1, 9)
        ),
        *(
            pytest.param(2, 3, 4, 1, 5000, D, 777, jnp.float16, None, marks=on_gpu)
            for D in SIZES
        ),
        *(
            pytest.param(2, 3, G, 1, 5000, 128, 777, jnp.float16, None, marks=on_gpu)
            for G in (9, 11, 12, 16)
        ),
        *(
            pytest.param(
                1,
                8,
                4,
                1,
                131072,
                128,
                2048,
                jnp.bfloat16,
                attend_slots.Config(b, w),
                marks=on_gpu,
            )
            for b in (1, 2, 4, 8)
            for w in (1, 2)
        ),
        pytest.param(8, 8, 4, 1, 32768, 128, 4096, jnp.bfloat16, None, marks=on_gpu),
        pytest.param(1, 8, 8, 8, 32768, 128, 2048, jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_attention_over_slots_equals_the_reference(B, K, G, H, S, D, M, dtype, config):
    assert_attends(attended(B, K, G, H, S, D, M, dtype, [M, 0, 1, 31, 32, 33]), config)


def test_attention_over_slots_reads_nothing_that_is_not_valid():
    q, k, v, (slots, valid) = attended(1, 2, 2, 1, 100, 64, 40, jnp.bfloat16, [7, 40])
    used = jnp.where(valid, slots % 50, 50 + slots % 50)
    poisoned = [changed(a, (np.s_[:, :, 50:], np.nan)) for a in (k, v)]
    run = jax.jit(partial(attend_slots.attend_slots, scale=0.125))
    for name, slots_, keys, values in (
        ("poison", used, *poisoned),
        ("out of range", jnp.where(valid, used, 10**9), k, v),
        ("clipped", jnp.where(valid, used, -5), k, v),
    ):
        for got, want in zip(
            run(q, keys, values, slots_, valid), run(q, k, v, used, valid), strict=True
        ):
            np.testing.assert_array_equal(got, want, err_msg=name)


def test_attention_over_equal_and_over_far_apart_keys():
    q, k, v, selection = attended(1, 1, 4, 1, 64, 64, 64, jnp.bfloat16, [64])
    same = jnp.broadcast_to(k[:, :, :1], k.shape)
    selection = Selection(jnp.arange(64, dtype=jnp.int32)[None, None, None], selection.valid)
    out, _ = jax.jit(partial(attend_slots.attend_slots, scale=0.125))(q, same, v, *selection)
    mean = np.mean(np.asarray(v, np.float32), axis=2)  # equal keys: the mean of the values
    np.testing.assert_allclose(out, np.broadcast_to(mean[:, :, None], out.shape), atol=2e-6)
    assert_attends((q * 40, k, v, selection))  # scores of hundreds: one key has all the weight


def test_attention_over_slots_takes_vmap():
    q, k, v, (slots, valid) = attended(1, 2, 2, 1, 40, 64, 20, jnp.bfloat16, [20, 9])
    run = partial(attend_slots.attend_slots, scale=0.1)
    over = jax.jit(jax.vmap(run, in_axes=(0, None, None, None, None)))
    for got, want in zip(
        over(jnp.stack([q, -q]), k, v, slots, valid),
        jax.jit(run)(q, k, v, slots, valid),
        strict=True,
    ):
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.skipif(ON_GPU, reason="of the simulator")
@pytest.mark.parametrize("barrier", ["block_barrier", "cluster_barrier", "warp_barrier"])
def test_the_simulator_sees_that_a_barrier_is_missing(barrier, monkeypatch):
    q, k, v, (slots, valid) = attended(1, 1, 2, 1, 40, 64, 140, jnp.bfloat16, [140])
    config = attend_slots.Config(2 if barrier == "cluster_barrier" else 1, 1)
    run = jax.jit(partial(attend_slots.attend_slots, scale=0.1, config=config))
    monkeypatch.setattr(simt, barrier, lambda: None)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"races|may still read|may not have begun"
    ):
        jax.block_until_ready(run(q, k, v, slots, valid))


class Early(Simulator):
    """A backend whose threads, once they waited at a barrier of their cluster, arrive at the
    next one at once.
    """

    early = False

    def ptx(self, code, *args):
        if code.startswith("barrier.cluster.arrive") and self.early:
            return []
        found = super().ptx(code, *args)
        if code.startswith("barrier.cluster.wait"):
            self.early = True
            super().ptx("barrier.cluster.arrive.release;", (), 0, True)
        return found


@pytest.mark.skipif(ON_GPU, reason="of the simulator")
def test_the_simulator_sees_that_a_block_arrives_before_it_has_written():
    run = jax.jit(partial(top_k.top_k, k=20, config=top_k.Config(blocks=2)))
    with (
        simt.use(Early()),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"races|may still read"),
    ):
        jax.block_until_ready(run(normal(0, 1, 300), jnp.ones((1, 300), bool)))
