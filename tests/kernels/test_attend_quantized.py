"""The kernel attend_quantized against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_quantized
from kvjax.numerics.partial import Logits, Span
from kvjax.numerics.quant import QuantArray, quantize
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import BIG, normal, relative, spans_of

pytestmark = pytest.mark.usefixtures("kernels")


def quantized(B, K, Q, S, D, bits, tokens, channels, value_channels):
    q, k, v = (
        normal(0, B, K, Q, D, dtype=jnp.bfloat16),
        *(normal(seed, B, K, S, D) for seed in (1, 2)),
    )
    keys = jax.jit(lambda k: quantize(k, bits[0], tokens=tokens, channels=channels))(k)
    return q, keys, jax.jit(lambda v: quantize(v, bits[1], channels=value_channels))(v)


@pytest.mark.parametrize(
    ("B", "K", "Q", "S", "D", "bits", "groups", "spans", "config"),
    [
        # LogQuant's groups, over a unit of three products of which the last is in part a
        # group's.
        (
            1,
            1,
            4,
            210,
            128,
            (2, 2),
            (42, 1, 64),
            [(0, 200)],
            attend_quantized.Config(2, stages=3),
        ),
        (
            3,
            1,
            8,
            120,
            64,
            (2, 4),
            (1, 32, 32),
            [(0, 120), (5, 5), (70, 71)],
            attend_quantized.Config(1),
        ),
        # A team with fewer units than warps; then two teams, with products of a warpgroup.
        (1, 1, 11, 96, 64, (2, 2), (32, 1, 32), [(3, 90)], attend_quantized.Config(1, 1)),
        (
            2,
            1,
            27,
            378,
            128,
            (2, 2),
            (42, 1, 64),
            [(0, 370), (50, 51)],
            attend_quantized.Config(1, 2, wide=True),
        ),
        pytest.param(
            1, 2, 40, 96, 128, (4, 2), (1, 64, 32), [(3, 90)], None, marks=pytest.mark.thorough
        ),
        pytest.param(
            2,
            1,
            33,
            128,
            64,
            (2, 4),
            (64, 1, 16),
            [(9, 120), (5, 5)],
            None,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            2,
            1,
            3,
            256,
            128,
            (4, 2),
            (32, 1, 32),
            [(0, 256), (31, 33)],
            None,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            1,
            2,
            1,
            192,
            64,
            (2, 2),
            (64, 1, 16),
            [(1, 190)],
            attend_quantized.Config(2, 2),
            marks=pytest.mark.thorough,
        ),
        pytest.param(  # value scales of a unit are no multiple of 16 bytes
            1,
            1,
            2,
            105,
            64,
            (2, 2),
            (21, 1, 64),
            [(0, 99)],
            attend_quantized.Config(1, 1, 2),
            marks=pytest.mark.thorough,
        ),
        *(
            pytest.param(4, 2, Q, 131040, 128, bits, groups, BIG, None, marks=on_gpu)
            for Q, bits in (
                (4, (2, 2)),
                (8, (4, 4)),
                (1, (2, 4)),
                (3, (4, 2)),
                (32, (2, 2)),
                (32, (4, 4)),
            )
            for groups in ((42, 1, 64), (32, 1, 32), (1, 64, 64))
        ),
        *(
            pytest.param(4, 2, Q, 131040, 128, (2, 2), (42, 1, 64), BIG, None, marks=on_gpu)
            for Q in (9, 12, 16)
        ),
        pytest.param(8, 8, 4, 32768, 64, (2, 2), (32, 1, 32), [(0, 32768)], None, marks=on_gpu),
    ],
)
def test_attention_over_codes_equals_the_reference(B, K, Q, S, D, bits, groups, spans, config):
    q, keys, values = quantized(B, K, Q, S, D, bits, *groups)
    span = spans_of(B, *spans)
    out, lse = jax.jit(partial(attend_quantized.attend_quantized, scale=0.1, config=config))(
        q, keys, values, *span
    )
    reference = jax.jit(partial(ops.attend_quantized, logits=Logits(0.1), implementation="xla"))
    want, doubled = (reference(x, keys, values, *span) for x in (q, 2 * q))
    # Queries and weights times scales, and keys by token, are rounded to bf16, each once.
    assert relative(out, want.out) < 4e-3
    # So a score is a sum of D terms q_i k_i with errors of up to 2^-8 each, 0.43 of it in root mean square (uniform in
    # half a unit of the last bit), and off by 0.43 * 2^-8 |q| scale, as keys are normal. Of lse that is averaged by the
    # weights p, sum p^2 = exp(lse of scores twice as large - 2 lse). Five deviations are 2.2: products have long tails,
    # and 1 of 600 heads was off by four in the simulator. Keys of a group share what they are off by, hence the least.
    together = np.exp(
        0.5 * np.asarray(doubled.lse) - np.where(np.isneginf(want.lse), 0, want.lse)
    )
    of_scores = 2.2 * 2**-8 * 0.1 * np.linalg.norm(np.asarray(q, np.float32), axis=-1)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want.lse))
    off = np.abs(np.where(np.isneginf(lse), 0, lse - want.lse))
    assert (off <= np.maximum(of_scores * together, 1e-3)).all(), (
        off / np.maximum(of_scores * together, 1e-3)
    ).max()


@pytest.mark.parametrize(
    ("D", "bits", "R", "spans", "dtype"),
    [
        (128, 2, 30, [(3, 100), (0, 0), (126, 126)], jnp.bfloat16),
        pytest.param(
            64, 4, 17, [(0, 126), (40, 41), (7, 7)], jnp.float32, marks=pytest.mark.thorough
        ),
    ],
)
def test_attention_over_codes_takes_a_zone_of_exact_keys(D, bits, R, spans, dtype):
    q, keys, values = quantized(3, 1, 4, 126, D, (bits, bits), 42, 1, 32)
    zone = [normal(seed, 3, 1, R, D, dtype=jnp.bfloat16) for seed in (3, 4)]
    args = (
        q.astype(dtype),
        keys,
        values,
        *spans_of(3, *spans),
        Span(*zone, *spans_of(3, (0, R), (2, 19), (5, 5))),
    )
    config = attend_quantized.Config(2, 1)
    got = jax.jit(partial(attend_quantized.attend_quantized, scale=-0.1, config=config))(*args)
    want = jax.jit(
        partial(ops.attend_quantized_zones, logits=Logits(-0.1), implementation="xla")
    )(*args, None)
    assert got.dtype == want.dtype == dtype
    assert relative(got, want) < 4e-3 + (dtype == jnp.bfloat16) * 4e-3
    np.testing.assert_array_equal(got[2], np.zeros((1, 4, D)))  # nothing to attend to
    out, lse = jax.jit(
        partial(attend_quantized.attend_quantized, scale=-0.1, config=config, part=True)
    )(*args)
    whole = jax.jit(
        partial(
            ops.attend_quantized_zones, logits=Logits(-0.1), part=True, implementation="xla"
        )
    )(*args, None)
    assert relative(out, whole.out) < 4e-3
    np.testing.assert_allclose(lse, whole.lse, atol=5e-3)
    assert out.dtype == jnp.float32


def test_attention_over_codes_reads_nothing_outside_of_its_span_and_takes_vmap():
    q, keys, values = quantized(2, 1, 2, 126, 64, (2, 2), 42, 1, 32)
    span = spans_of(2, (42, 84))
    run = partial(
        attend_quantized.attend_quantized, scale=0.1, config=attend_quantized.Config(1)
    )
    want = jax.jit(run)(q, keys, values, *span)

    def poisoned(code, first, last):
        # NaN
        scales = code.scales.at[:, :, :first].set(0x7FFF7FFF).at[:, :, last:].set(0x7FFF7FFF)
        return QuantArray(code.codes, scales)

    for got, expected in zip(
        jax.jit(run)(q, poisoned(keys, 1, 2), poisoned(values, 42, 84), *span),
        want,
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)
    whole = (q, keys, values, *span)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(*whole)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6)
