"""The kernel score_pages against the reference, on random and on adversarial input."""

import importlib
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.score import score_pages
from kvjax.numerics.partial import Logits
from tests.kernels.conftest import HAS_KERNELS, ON_GPU, on_gpu
from tests.kernels.inputs import boxes, changed, normal, relative

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("B", "K", "G", "P", "D", "dtype", "config"),
    [
        (2, 1, 5, 70, 128, jnp.bfloat16, None),
        (1, 1, 13, 70, 64, jnp.bfloat16, None),
        (1, 1, 6, 40, 256, jnp.bfloat16, None),
        pytest.param(
            1, 2, 8, 33, 64, jnp.float16, score_pages.Config(1, 2), marks=pytest.mark.thorough
        ),
        *(
            pytest.param(2, 3, G, 1001, 128, jnp.bfloat16, None, marks=on_gpu)
            for G in range(1, 17)
        ),
        *(
            pytest.param(1, 2, 4, P, 64, jnp.float16, None, marks=on_gpu)
            for P in (1, 15, 16, 17, 4096)
        ),
        pytest.param(1, 8, 4, 8192, 128, jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_scores_of_pages_equal_the_reference(B, K, G, P, D, dtype, config):
    low, high = boxes(B, K, P, D, dtype)
    q = normal(2, B, K, G, D, dtype=dtype)
    got = jax.jit(partial(score_pages.score_pages, scale=0.1, config=config))(q, low, high)
    want = jax.jit(partial(ops.score_pages, logits=Logits(0.1), implementation="xla"))(
        q, low, high
    )
    assert relative(got, want) < 1e-6


def test_a_page_of_nan_scores_only_itself_also_under_vmap():
    low, high = boxes(1, 1, 20, 64, jnp.bfloat16)
    q = normal(2, 1, 1, 2, 64)
    run = partial(score_pages.score_pages, scale=0.1)
    lows = np.stack([low, changed(low, (np.s_[:, :, 7], np.nan))])
    highs = np.stack([high, changed(high, (np.s_[:, :, 9], np.inf))])
    want, got = jax.jit(jax.vmap(run, in_axes=(None, 0, 0)))(q, lows, highs)
    others = np.setdiff1d(np.arange(20), [7, 9])
    np.testing.assert_array_equal(got[..., others], want[..., others])
    assert not np.isfinite(got[..., [7, 9]]).any()


@pytest.mark.thorough
@pytest.mark.skipif(ON_GPU or not HAS_KERNELS, reason="interprets a kernel of jax >= 0.11")
def test_the_plain_kernel_of_the_benchmark_equals_the_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    for name in ("score_pages", "sweep", "device_time", "plain_score_pages"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plain = importlib.import_module("plain_score_pages")
    kernel, interpret = plain.plgpu.kernel, plain.plgpu.InterpretGPUParams()
    monkeypatch.setattr(plain.plgpu, "kernel", partial(kernel, interpret=interpret))
    monkeypatch.setattr(plain, "MULTIPROCESSORS", 6)  # the last block of a row has fewer tiles
    low, high = boxes(1, 2, 320, 128, jnp.bfloat16)
    q = normal(2, 1, 2, 4, 128, dtype=jnp.bfloat16)
    got = plain.plain_score_pages(q, low, high, scale=0.1, config=plain.Config(stages=2))
    assert (
        relative(got, ops.score_pages(q, low, high, logits=Logits(0.1), implementation="xla"))
        < 1e-6
    )
