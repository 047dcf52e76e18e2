"""The kernel score_1bit against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.score import score_1bit
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit, quantize_1bit
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import changed, index, normal, relative

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "group", "dtype"),
    [
        (2, 1, 5, 672, 128, 32, jnp.bfloat16),
        (1, 1, 4, 1056, 64, 96, jnp.bfloat16),
        (1, 1, 3, 288, 128, 32, jnp.float16),
        (1, 1, 13, 288, 128, 32, jnp.bfloat16),
        (1, 1, 4, 320, 256, 32, jnp.bfloat16),
        (1, 1, 12, 160, 256, 32, jnp.bfloat16),
        pytest.param(2, 1, 6, 288, 256, 96, jnp.float16, marks=pytest.mark.thorough),
        pytest.param(1, 2, 8, 192, 64, 64, jnp.float16, marks=pytest.mark.thorough),
        pytest.param(1, 2, 4, 576, 128, 64, jnp.bfloat16, marks=pytest.mark.thorough),
        *(
            pytest.param(2, 3, G, 2080, 128, 32, jnp.bfloat16, marks=on_gpu)
            for G in range(1, 17)
        ),
        *(pytest.param(1, 2, G, 992, 64, 32, jnp.float16, marks=on_gpu) for G in (1, 4, 8)),
        *(
            pytest.param(*sizes, dtype, marks=on_gpu)
            for sizes in (
                (1, 1, 4, 32, 128, 32),
                (1, 2, 4, 4096, 128, 128),
                (1, 1, 4, 256, 128, 256),
            )
            for dtype in (jnp.bfloat16, jnp.float16)
        ),
        pytest.param(1, 8, 4, 32768, 128, 32, jnp.bfloat16, marks=on_gpu),
    ],
)
def test_scores_equal_the_reference(B, K, G, S, D, group, dtype):
    ix = index(B, K, S, D, group, dtype)
    q = normal(1, B, K, G, D, dtype=dtype).astype(jnp.float32)
    want = jax.jit(partial(ops.score_1bit, logits=Logits(D**-0.5), implementation="xla"))(q, ix)
    for config in (
        None,
        score_1bit.Config(units=3, stages=2),
        score_1bit.Config(units=11, stages=8),
    ):
        got = jax.jit(partial(score_1bit.score_1bit, scale=D**-0.5, config=config))(q, *ix)
        # Each product of query and step is rounded once to 16 bits, and so is each query times
        # scale.
        assert relative(got, want) < 2 * float(jnp.finfo(dtype).eps)


@pytest.mark.thorough
def test_scores_of_equal_keys_are_exact_and_other_rows_do_not_matter():
    k = jnp.asarray(
        np.broadcast_to(normal(0, 2, 2, 1, 128, dtype=jnp.bfloat16), (2, 2, 96, 128))
    )
    ix = jax.jit(partial(quantize_1bit, group=32))(k)
    q = jnp.asarray(np.random.default_rng(1).integers(-3, 4, (2, 2, 4, 128)).astype(np.float32))
    run = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=1.0))
    got = run(q, ix)
    want = np.einsum("bkgd,bksd->bkgs", np.asarray(q, np.float64), np.asarray(k, np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    poisoned = OneBit(ix.bits, ix.scale.at[1].set(jnp.nan), ix.zero.at[1, :, 1:].set(jnp.inf))
    np.testing.assert_array_equal(run(q, poisoned)[0], got[0])


@pytest.mark.thorough
def test_scores_of_queries_times_a_power_of_two_are_so_many_times_as_large():
    ix, q = index(1, 1, 64, 128, 32, jnp.bfloat16), normal(1, 1, 1, 4, 128, dtype=jnp.bfloat16)
    run = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=1.0))
    for factor in (2.0**50, 2.0**-30):
        np.testing.assert_array_equal(
            run(q * jnp.asarray(factor, q.dtype), ix), run(q, ix) * factor
        )


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("G", [4, 5])
def test_scores_are_finite_where_those_of_the_reference_are(G, dtype):
    ix, q = (
        index(1, 1, 320, 128, 32, dtype),
        normal(1, 1, 1, G, 128, dtype=dtype).astype(jnp.float32),
    )
    step = changed(ix.scale, ((0, 0, 1, 5), np.inf), ((0, 0, 4, 7), np.nan))
    ix = ix._replace(
        scale=step, zero=changed(ix.zero, ((0, 0, 7, 3), -np.inf), ((0, 0, 8, 3), np.nan))
    )
    for queries in (q, changed(q, ((0, 0, 2, 9), np.inf))):
        got = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=0.1))(queries, ix)
        want = jax.jit(partial(ops.score_1bit, logits=Logits(0.1), implementation="xla"))(
            queries, ix
        )
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@pytest.mark.thorough
def test_scores_take_vmap():
    ix, q = index(2, 1, 64, 64, 32, jnp.bfloat16), normal(1, 2, 1, 2, 64)
    run = partial(score_1bit.score_1bit, scale=0.1)
    whole = jax.jit(run)(q, *ix)
    apart = jax.jit(jax.vmap(lambda *a: run(*(x[None] for x in a))[0]))(q, *ix)
    np.testing.assert_array_equal(apart, whole)
    shared = jax.jit(jax.vmap(lambda q: run(q, *ix)))(jnp.stack([q, -q]))
    np.testing.assert_array_equal(shared[0], whole)


@pytest.mark.parametrize("of", [0, 1])
def test_a_sparse_product_adds_the_rows_that_its_pattern_names(of):
    """Against numpy: of each four rows of b, row `first` and row 2 + `second`."""
    rng = np.random.default_rng(of)
    b = jnp.asarray(rng.standard_normal((32, 8)), jnp.bfloat16)
    first, second = rng.integers(0, 2, (2, 16, 8))  # of each row of a and four columns
    a = np.zeros((16, 32))
    row, four = np.indices((16, 8))
    a[row, 4 * four + first] = 1
    a[row, 4 * four + 2 + second] = 1
    nibbles = (first | (2 | second) << 2).astype(np.uint32)
    lane = np.arange(32)
    quad, col = lane >> 2, lane & 3
    pattern = np.zeros(32, np.uint32)
    for i in range(8):  # four of the rows `quad`, then four of those after 8
        of_row = nibbles[quad + 8 * (i // 4), 4 * (col % 2) + i % 4]
        pattern |= np.where(col // 2 == of, of_row << np.uint32(4 * i), 0).astype(np.uint32)
    places = 2 * col[:, None, None] + 8 * np.arange(4)[:, None] + np.arange(2)
    right = b[places, quad[:, None, None]]  # [32, 4, 2]

    def program(right_m, pattern_m, out_m):
        lane = simt.special("tid.x") & 31
        load = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        words = simt.ptx(load, simt.offset(simt.global_address(right_m), lane * 16), results=4)
        known = simt.load(simt.offset(simt.global_address(pattern_m), lane * 4))
        sums = simt.mma_sparse("bf16", [simt.word(0)] * 4, words, known, of)
        at = simt.offset(simt.global_address(out_m), lane * 16)
        simt.ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", at, *sums)

    out = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    run = simt.kernel(program, name="sparse_product", out_type=out, blocks=1, warpgroups=1)
    got = np.asarray(jax.jit(run)(right, jnp.asarray(pattern)))
    want = a @ np.asarray(b, np.float64)
    for i in range(4):
        np.testing.assert_allclose(
            got[:, i], want[quad + 8 * (i // 2), 2 * col + i % 2], rtol=1e-5, atol=1e-5
        )
