"""The kernel attend_span against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_span
from kvjax.kernels_pallas.attend.softmax import SIZES
from kvjax.numerics.partial import Logits, Span
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import BIG, normal, relative, spans_of

pytestmark = pytest.mark.usefixtures("kernels")


def span_of(B, K, S, D, dtype, *spans):
    """Keys outside of the span are NaN, values infinite."""
    k, v = (np.array(normal(seed, B, K, S, D, dtype=dtype)) for seed in (1, 2))
    start, stop = spans_of(B, *spans)
    for kept, poison in ((k, np.nan), (v, np.inf)):
        for b in range(B):
            kept[b, :, : start[b]] = kept[b, :, max(stop[b], start[b]) :] = poison
    return Span(jnp.asarray(k), jnp.asarray(v), start, stop)


def attend_in_span(q, span, config=None, scale=0.125):
    return jax.jit(partial(attend_span.attend_span, scale=scale, config=config))(q, *span)


def over_span(q, span, scale=0.125):
    """The reference, of finite values."""
    finite = span._replace(v=jnp.where(jnp.isinf(span.v), jnp.zeros((), span.v.dtype), span.v))
    return jax.jit(partial(ops.attend_span, logits=Logits(scale), implementation="xla"))(
        q, finite
    )


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "dtypes", "spans", "config"),
    [
        # Rows with more than the stages hold, from a slot that begins no tile; with none, by
        # both ends; with one.
        (
            4,
            1,
            4,
            300,
            128,
            "bf",
            [(3, 300), (9, 9), (9, 4), (17, 18)],
            attend_span.Config(2, stages=2, keys=16),
        ),
        (2, 2, 1, 150, 64, "hh", [(0, 150), (1, 65)], attend_span.Config(1, stages=1)),
        (1, 1, 8, 150, 64, "bb", [(5, 133)], attend_span.Config(2, warpgroups=2)),
        (1, 1, 12, 150, 80, "bb", [(5, 133)], attend_span.Config(1, stages=1)),
        (2, 1, 2, 150, 192, "bb", [(5, 133), (0, 0)], attend_span.Config(1, stages=2, keys=16)),
        *(
            pytest.param(1, 1, 9, 70, D, "bb", [(5, 66)], None, marks=pytest.mark.thorough)
            for D in SIZES
        ),
        pytest.param(
            2, 1, 4, 200, 128, "hb", [(0, 200), (100, 163)], None, marks=pytest.mark.thorough
        ),
        pytest.param(1, 1, 3, 150, 256, "bb", [(5, 149)], None, marks=pytest.mark.thorough),
        *(
            pytest.param(4, 2, G, 131072, 128, "bb", BIG, None, marks=on_gpu)
            for G in range(1, 9)
        ),
        *(pytest.param(4, 2, 4, 131072, D, "hh", BIG, None, marks=on_gpu) for D in SIZES),
        *(
            pytest.param(4, 2, G, 131072, 128, "hh", BIG, None, marks=on_gpu)
            for G in (9, 11, 12, 16)
        ),
        pytest.param(8, 8, 4, 32768, 128, "bb", [(0, 32768)], None, marks=on_gpu),
    ],
)
def test_attention_over_a_span_equals_the_reference(B, K, G, S, D, dtypes, spans, config):
    kept, queries = ({"b": jnp.bfloat16, "h": jnp.float16, "f": jnp.float32}[x] for x in dtypes)
    q, span = normal(0, B, K, G, D, dtype=queries), span_of(B, K, S, D, kept, *spans)
    got, want = attend_in_span(q, span, config), over_span(q, span)
    assert got.dtype == want.dtype == queries
    # Weights are rounded to the dtype of the values, each once, and the result to that of the
    # queries.
    assert relative(got, want) < float(jnp.finfo(kept).eps) + float(jnp.finfo(queries).eps)
    np.testing.assert_array_equal(np.asarray(got)[np.asarray(span.size) == 0], 0)


def test_part_over_a_span_has_its_log_sum():
    q, span = (
        normal(0, 2, 1, 4, 64, dtype=jnp.bfloat16),
        span_of(2, 1, 90, 64, jnp.bfloat16, (5, 83), (9, 9)),
    )
    config = attend_span.Config(2, stages=1)
    got = jax.jit(partial(attend_span.attend_span, scale=0.125, part=True, config=config))(
        q, *span
    )
    finite = span._replace(v=jnp.where(jnp.isinf(span.v), jnp.zeros((), span.v.dtype), span.v))
    want = jax.jit(
        partial(ops.attend_span, logits=Logits(0.125), part=True, implementation="xla")
    )(q, finite)
    assert got[0].dtype == jnp.float32
    assert relative(got[0], want.out) < float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(got[1], want.lse, rtol=1e-5, atol=1e-5)


def test_attention_over_a_span_takes_ends_out_of_range_far_apart_scores_and_vmap():
    q, config = 40 * normal(0, 2, 1, 2, 64, dtype=jnp.bfloat16), attend_span.Config(1)
    span = span_of(2, 1, 40, 64, jnp.bfloat16, (0, 40), (7, 40))
    want = attend_in_span(q, span, config)
    assert (
        relative(want, over_span(q, span)) < 1e-2
    )  # scores of hundreds: one key has all the weight
    beyond = span._replace(
        start=jnp.array([-9, 7], jnp.int32), stop=jnp.array([41, 1 << 30], jnp.int32)
    )
    np.testing.assert_array_equal(attend_in_span(q, beyond, config), want)
    run = partial(attend_span.attend_span, scale=0.125, config=config)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(q, *span)
    np.testing.assert_array_equal(apart[:, 0], want)
