"""The kernel attend_key_blocks against the reference, in JAX's interpreter of Mosaic kernels or
on a GPU.
"""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_key_blocks
from kvjax.kernels_pallas.attend.attend_key_blocks import Config
from kvjax.numerics.partial import Logits
from tests.kernels.conftest import HAS_KERNELS, ON_GPU
from tests.kernels.inputs import normal, relative

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="there are kernels from jax 0.11 on")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Without a GPU the body is interpreted, but for its two products: the interpreter has no
    operand in registers.
    """
    if ON_GPU:
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def product(a, b, meanwhile):
        meanwhile()
        return jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)

    def add_product(sums, a, b):
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    monkeypatch.setattr(
        plgpu, "kernel", partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams())
    )
    monkeypatch.setattr(attend_key_blocks, "_product", product)
    monkeypatch.setattr(attend_key_blocks, "_add_product", add_product)


def lists(B, K, G, n, S, stops, seed=0):
    """Random lists for each row, in order, of which only the last block may reach the row's
    stop; and their lengths.
    """
    rng, most = np.random.default_rng(seed), -(-S // 128)
    blocks, counts = np.zeros((B, K, G, n, most), np.int32), np.ones((B, K, G, n), np.int32)
    for row in np.ndindex(B, K, G, n):
        stored = max(-(-stops[row[0]] // 128), 1)
        own = np.sort(rng.choice(stored, rng.integers(1, stored + 1), replace=False))
        blocks[row][: len(own)], counts[row] = own, len(own)
    return jnp.asarray(blocks), jnp.asarray(counts)


@pytest.mark.parametrize(
    ("B", "K", "G", "T", "S", "D", "stops", "dtype", "config"),
    [
        # More blocks than stages; a last block that is read from before its first slot; rows of
        # 100 and no tokens.
        (3, 1, 2, 256, 696, 64, [690, 100, 0], jnp.bfloat16, Config(2)),
        (1, 2, 1, 128, 640, 128, [640], jnp.float16, Config(3)),
    ],
)
def test_attention_to_lists_of_blocks_equals_the_reference(
    B, K, G, T, S, D, stops, dtype, config
):
    q, k, v = (
        np.array(normal(i, *s, dtype=dtype))
        for i, s in enumerate([(B, K, G, T, D), *2 * [(B, K, S, D)]])
    )
    for b, stop in enumerate(stops):
        k[b, :, stop:], v[b, :, stop:] = np.nan, 1e4
    args = (
        *map(jnp.asarray, (q, k, v)),
        *lists(B, K, G, T // 128, S, stops),
        jnp.array(stops, jnp.int32),
    )
    out, lse = jax.jit(partial(attend_key_blocks.attend_key_blocks, scale=0.1, config=config))(
        *args
    )
    want = jax.jit(partial(ops.attend_key_blocks, logits=Logits(0.1), implementation="xla"))(
        *args
    )
    assert relative(out, want.out) < 1e-2
    np.testing.assert_allclose(lse, want.lse, atol=2e-5)
    for b, stop in enumerate(stops):
        assert np.all(np.isneginf(lse[b])) == (stop == 0)


def test_a_batched_call_is_one_launch_of_more_rows():
    B, K, G, T, S, D = 1, 1, 1, 128, 304, 64
    q, k, v = (normal(i, *s) for i, s in enumerate([(2, B, K, G, T, D), *2 * [(B, K, S, D)]]))
    q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
    blocks, counts = lists(B, K, G, 1, S, [300])
    rest = k, v, blocks, counts, jnp.array([300], jnp.int32)
    run = partial(attend_key_blocks.attend_key_blocks, scale=0.1)
    with mock.patch.object(
        attend_key_blocks, "_launch", wraps=attend_key_blocks._launch
    ) as launched:
        out, _ = jax.jit(jax.vmap(run, (0, *5 * [None])))(q, *rest)
    assert [call.args[0].shape for call in launched.call_args_list][-1] == (2, T, D)
    for i in range(2):
        np.testing.assert_array_equal(out[i], jax.jit(run)(q[i], *rest)[0])


def test_stages_are_checked():
    with pytest.raises(ValueError, match="stages must be at least 2"):
        Config(stages=1)
    assert (
        attend_key_blocks.smem_bytes(128, Config(3))
        <= 227 * 1024
        < attend_key_blocks.smem_bytes(128, Config(4))
    )
