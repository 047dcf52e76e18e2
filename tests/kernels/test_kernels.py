"""The Pallas kernels: what they refuse, what is chosen, that they compile for a Hopper GPU, and on one, what they give.

Their bodies are PTX, which interpret mode does not run. Without a GPU the tests check the choice and what surrounds the
kernel; with one (JAX_PLATFORMS=cuda, jax >= 0.11, compute capability 9.0) each kernel is compared with its reference.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.kernels_pallas import _common, score_1bit, top_k

from kvjax import ops
from kvjax.quant import quantize_1bit

HAS_KERNELS = jax.__version_info__ >= (0, 11)
ON_GPU = HAS_KERNELS and jax.default_backend() == "gpu" and _common.why_not() is None

on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU of compute capability 9.0 and jax >= 0.11")


def index(B, K, S, D, group, dtype, seed=0):
    k = (
        jax.random.normal(jax.random.key(seed), (B, K, S, D))
        * (1 + jnp.arange(D) % 5).astype(jnp.float32)[None, None, None]
    )
    return jax.jit(partial(quantize_1bit, group=group, dtype=dtype))(k)


def shapes_1bit(B=1, K=2, G=4, S=64, D=64, group=32, dtype=jnp.bfloat16):
    groups = jax.ShapeDtypeStruct((B, K, S // group, D), dtype)
    bits = jax.ShapeDtypeStruct((B, K, S, D // 8), jnp.uint8)
    return jax.ShapeDtypeStruct((B, K, G, D), jnp.float32), bits, groups


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64 and 128"),
        (dict(G=9), "1 to 8 query heads"),
        (dict(group=16), "groups of a multiple of 32"),
        (dict(dtype=jnp.float32), "scales in bf16 or f16"),
        (dict(B=0), "at least one row"),
    ],
)
def test_score_1bit_refuses_what_it_has_no_kernel_for(changed, words):
    assert score_1bit.supported(*shapes_1bit())
    q, bits, step = shapes_1bit(**changed)
    assert words in score_1bit.unsupported(q, bits, step)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(score_1bit.score_1bit, scale=1.0), q, bits, step, step)


@pytest.mark.parametrize(
    ("shape", "dtype", "k", "words"),
    [
        ((8, 64), jnp.float32, 0, "k from 1 to 4096"),
        ((8, 8192), jnp.float32, 4097, "k from 1 to 4096"),
        ((8, 64), jnp.float32, 65, "rows of k to"),
        ((1, 1 << 22), jnp.float32, 5, "rows of k to"),
        ((0, 64), jnp.float32, 5, "at least one row"),
        ((8, 64), jnp.int32, 5, "f32, bf16 or f16"),
    ],
)
def test_top_k_refuses_what_it_has_no_kernel_for(shape, dtype, k, words):
    assert top_k.supported((8, 64), jnp.float32, 64)
    assert words in top_k.unsupported(shape, dtype, k)
    scores = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda s: top_k.top_k(s, jnp.ones(shape, bool), k), scores)
    with pytest.raises(NotImplementedError, match=words if HAS_KERNELS else r"jax >= 0\.11"):
        jax.eval_shape(lambda s: ops.top_k(s, jnp.ones(shape, bool), k, implementation="mosaic"), scores)


def test_configs_refuse_what_a_cluster_or_a_product_cannot_be():
    with pytest.raises(ValueError, match="blocks must be"):
        top_k.Config(blocks=3)
    with pytest.raises(ValueError, match="units must be"):
        score_1bit.Config(units=17)


@pytest.mark.parametrize("k", [1, 100, 2048, 4096])
def test_top_k_fits_in_shared_memory(k):
    assert top_k.smem_bytes(k) <= 227 * 1024


def test_an_unknown_implementation_or_operation_is_refused():
    with pytest.raises(ValueError, match="implementation must be None or one of 'xla', 'mosaic'"):
        ops.top_k(jnp.zeros((1, 4)), jnp.ones((1, 4), bool), 2, implementation="cuda")
    with pytest.raises(ValueError, match="op must be one of"):
        ops.explain("attend")


@pytest.mark.skipif(ON_GPU, reason="says what is chosen where no kernel can run")
def test_the_reference_runs_where_there_is_no_kernel():
    scores, valid = jax.random.normal(jax.random.key(0), (2, 50)), jnp.ones((2, 50), bool)
    why = "jax >= 0.11" if not HAS_KERNELS else "for GPUs"
    assert why in ops.explain("top_k", scores, valid, 5)
    assert why in ops.explain("score_1bit", jnp.zeros((1, 1, 2, 64)), index(1, 1, 64, 64, 32, jnp.bfloat16))
    chosen, named = (jax.jit(partial(ops.top_k, k=5, implementation=i))(scores, valid) for i in (None, "xla"))
    np.testing.assert_array_equal(chosen.slots, named.slots)
    assert "kvjax_top_k" not in jax.jit(partial(ops.top_k, k=5)).lower(scores, valid).as_text()
    with pytest.raises(NotImplementedError, match=r"platform cpu" if HAS_KERNELS else r"jax >= 0\.11"):
        jax.jit(partial(ops.top_k, k=5, implementation="mosaic"))(scores, valid)


@pytest.mark.skipif(not HAS_KERNELS, reason="there are kernels from jax 0.11 on")
def test_a_program_lowered_for_a_gpu_has_the_kernels():
    if not ON_GPU and jax.default_backend() == "gpu":
        pytest.skip(_common.why_not())
    ix = index(1, 2, 64, 64, 32, jnp.bfloat16)

    def step(q, ix):
        scores = jnp.max(ops.score_1bit(q, ix, scale=0.1), axis=2)
        return ops.top_k(scores, jnp.ones(scores.shape, bool), 16)

    q = jnp.zeros((1, 2, 4, 64))
    text = jax.jit(step).trace(q, ix).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") + text.count("custom_call @mosaic_gpu_v2") >= 2
    assert "chlo.top_k" not in text


def test_keys_have_the_order_of_the_scores():
    scores = jnp.array([-jnp.inf, jnp.nan, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, jnp.inf])
    keys = np.asarray(top_k.ordered_keys(scores, jnp.ones(scores.shape, bool))).astype(np.int64)
    assert keys[0] == keys[1] > 0
    assert (np.diff(keys[1:]) > 0).all()
    assert not np.asarray(top_k.ordered_keys(scores, jnp.zeros(scores.shape, bool))).any()


def test_the_derivative_of_scores_is_the_references():
    ix, q = index(1, 1, 64, 64, 32, jnp.bfloat16), jax.random.normal(jax.random.key(1), (1, 1, 2, 64))
    chosen, named = (
        jax.jit(jax.grad(lambda q, i=i: jnp.sum(ops.score_1bit(q, ix, scale=0.1, implementation=i))))(q)
        for i in (None, "xla")
    )
    np.testing.assert_allclose(chosen, named, rtol=1e-5)


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
    yield "all equal", np.ones_like(normal), all_valid
    yield "few values", np.round(normal), all_valid
    yield "infinities and NaN", extreme, rng.random((rows, U)) < 0.8
    yield "rising", np.sort(normal, axis=1), all_valid
    yield "falling", -np.sort(-normal, axis=1), all_valid
    yield "last bits differ", (1 + np.float32(2**-23) * rng.integers(0, 3, (rows, U))).astype(np.float32), all_valid


@on_gpu
@pytest.mark.parametrize(
    ("rows", "U", "k"),
    [(8, 131072, 2048), (3, 5000, 100), (2, 300001, 4096), (1, 17, 5), (1, 1, 1), (40, 2049, 2048), (70, 1000, 1000)],
)
def test_top_k_equals_its_reference(rows, U, k):
    run = {i: jax.jit(partial(ops.top_k, k=k, implementation=i)) for i in ("mosaic", "xla")}
    for name, scores, valid in inputs(rows, U, k):
        got, want = (f(jnp.asarray(scores), jnp.asarray(valid)) for f in run.values())
        np.testing.assert_array_equal(got.slots, want.slots, err_msg=name)
        np.testing.assert_array_equal(got.valid, want.valid, err_msg=name)


@on_gpu
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_top_k_equals_its_reference_in_every_config(blocks):
    for name, scores, valid in inputs(3, 70000, 1500):
        args = jnp.asarray(scores), jnp.asarray(valid)
        slots, _ = jax.jit(partial(top_k.top_k, k=1500, config=top_k.Config(blocks=blocks)))(*args)
        np.testing.assert_array_equal(slots, ops.top_k(*args, 1500, implementation="xla").slots, err_msg=name)


@on_gpu
def test_top_k_takes_16_bits_any_rank_and_vmap():
    scores = jax.random.normal(jax.random.key(0), (3, 2, 1, 999), jnp.bfloat16)
    valid = (jnp.arange(999) < 700)[None, None, None]
    want = ops.top_k(scores, valid, 50, implementation="xla")
    for f in (lambda s: ops.top_k(s, valid, 50), jax.vmap(lambda s: ops.top_k(s, valid[0], 50))):
        np.testing.assert_array_equal(jax.jit(f)(scores).slots, want.slots)


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "group"),
    [
        *((2, 3, G, 2080, 128, 32) for G in range(1, 9)),
        *((1, 2, G, 992, 64, 32) for G in (1, 4, 8)),
        (1, 1, 4, 32, 128, 32),
        (1, 2, 4, 4096, 128, 128),
        (1, 2, 5, 4096, 64, 64),
        (1, 1, 4, 256, 128, 256),
        (1, 8, 4, 32768, 128, 32),
    ],
)
def test_scores_equal_the_reference(B, K, G, S, D, group, dtype):
    ix = index(B, K, S, D, group, dtype)
    q = jax.random.normal(jax.random.key(1), (B, K, G, D), dtype).astype(jnp.float32)
    got, want = (
        np.asarray(jax.jit(partial(ops.score_1bit, scale=D**-0.5, implementation=i))(q, ix), np.float64)
        for i in ("mosaic", "xla")
    )
    # Each product of query and step is rounded once to 16 bits, and so is each query times scale.
    assert np.linalg.norm(got - want) < 2 * float(jnp.finfo(dtype).eps) * np.linalg.norm(want)


@on_gpu
def test_scores_of_equal_keys_are_exact_and_other_rows_do_not_matter():
    k = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (2, 2, 1, 128), jnp.bfloat16), (2, 2, 96, 128))
    ix = quantize_1bit(k, 32)
    q = jax.random.randint(jax.random.key(1), (2, 2, 4, 128), -3, 4).astype(jnp.float32)
    got = jax.jit(partial(ops.score_1bit, scale=1.0, implementation="mosaic"))(q, ix)
    want = np.einsum("bkgd,bksd->bkgs", np.asarray(q, np.float64), np.asarray(k, np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    poisoned = ix._replace(scale=ix.scale.at[1].set(jnp.nan), zero=ix.zero.at[1, :, 1:].set(jnp.inf))
    again = jax.jit(partial(ops.score_1bit, scale=1.0, implementation="mosaic"))(q, poisoned)
    np.testing.assert_array_equal(again[0], got[0])


@on_gpu
def test_scores_take_vmap():
    ix, q = index(3, 2, 160, 64, 32, jnp.bfloat16), jax.random.normal(jax.random.key(1), (3, 2, 4, 64))
    f = partial(ops.score_1bit, scale=0.1, implementation="mosaic")
    apart = jax.jit(jax.vmap(lambda q, ix: f(q[None], jax.tree.map(lambda a: a[None], ix))[0]))(q, ix)
    np.testing.assert_array_equal(apart, jax.jit(f)(q, ix))
    shared = jax.jit(jax.vmap(lambda q: f(q, ix)))(jnp.stack([q, -q]))
    np.testing.assert_array_equal(shared[0], jax.jit(f)(q, ix))
