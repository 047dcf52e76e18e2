"""Kernels for TPUs against their references, in Pallas' interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax import ops
from kvjax.kernels_pallas.tpu import score_1bit
from kvjax.numerics import platforms
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit, quantize_1bit
from kvjax.ops.op import _forms
from kvjax.ops.partitioned import on_one_device

STRICT = pltpu.InterpretParams(uninitialized_memory="nan")
LOGITS = Logits(0.1)


def keys_of(kind: str, rows: tuple[int, int], tokens: int, D: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(*rows, tokens, D)).astype(np.float32)
    sizes = np.exp(4 * rng.normal(size=D)).astype(np.float32)
    return {
        "random": normal,
        "equal": np.full_like(normal, 0.5),
        "far from zero": normal + 100,
        "channels of many sizes": normal * sizes,
        "huge": normal * 1e15,
        "tiny": normal * 1e-15,
    }[kind]


def error_allowed(q: jax.Array, keys: OneBit) -> np.ndarray:
    """f32[B, K, G, S]: products of query and step are rounded once to bf16, each with a factor
    of 0 or 2; sums in f32 add little."""
    step = jnp.repeat(keys.scale.astype(jnp.float32), 32, axis=2)
    zero = jnp.repeat(jnp.abs(keys.zero.astype(jnp.float32)), 32, axis=2)
    of_steps = jnp.einsum("bkgd,bksd->bkgs", jnp.abs(q).astype(jnp.float32), step)
    of_zeros = jnp.einsum("bkgd,bksd->bkgs", jnp.abs(q).astype(jnp.float32), zero)
    return np.asarray(2 * 2.0**-8 * of_steps + 2.0**-18 * of_zeros)


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "kind", "interpret"),
    [
        (1, 1, 4, 4096, 128, "random", STRICT),
        (2, 1, 3, 4096 + 128, 128, "random", True),
        (1, 2, 8, 4096, 128, "channels of many sizes", True),
        (1, 1, 1, 4096, 128, "far from zero", True),
        pytest.param(1, 1, 1, 4096, 256, "random", True, marks=pytest.mark.thorough),
        (1, 1, 5, 4096, 128, "huge", True),
        (1, 1, 4, 4096, 128, "tiny", True),
        (1, 1, 2, 4096, 128, "equal", True),
    ],
)
def test_scores_equal_the_reference(B, K, G, S, D, kind, interpret) -> None:
    keys = quantize_1bit(jnp.asarray(keys_of(kind, (B, K), S, D)), 32)
    q = jax.random.normal(jax.random.key(1), (B, K, G, D), jnp.bfloat16)
    want = ops.score_1bit(q, keys, logits=Logits(1.0), implementation="xla")
    got = score_1bit.score_1bit(q, *keys, interpret=interpret)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    difference = np.abs(np.asarray(got) - np.asarray(want))
    assert (difference <= error_allowed(q, keys) + 1e-30).all()


def test_each_bit_of_each_channel_counts_for_its_own_token() -> None:
    """Whole numbers, so that scores are exact: a bit in another place changes one."""
    rng = np.random.default_rng(0)
    bits = jnp.asarray(rng.integers(0, 256, size=(1, 1, 4096, 16)), jnp.uint8)
    step = jnp.asarray(rng.integers(1, 4, size=(1, 1, 128, 128)), jnp.bfloat16)
    zero = jnp.asarray(rng.integers(-3, 4, size=(1, 1, 128, 128)), jnp.bfloat16)
    q = jnp.asarray(rng.integers(-4, 5, size=(1, 1, 4, 128)), jnp.bfloat16)
    keys = OneBit(bits, step, zero)
    want = ops.score_1bit(q, keys, logits=Logits(1.0), implementation="xla")
    np.testing.assert_array_equal(score_1bit.score_1bit(q, *keys, interpret=True), want)


def test_slots_of_nan_leave_the_scores_of_others() -> None:
    keys = quantize_1bit(jnp.asarray(keys_of("random", (1, 1), 4096, 128)), 32)
    q = jax.random.normal(jax.random.key(1), (1, 1, 4, 128), jnp.bfloat16)
    past = jnp.arange(128)[:, None] >= 70  # groups
    poisoned = OneBit(
        jnp.where(jnp.arange(4096)[:, None] >= 70 * 32, jnp.uint8(255), keys.bits),
        jnp.where(past, jnp.nan, keys.scale),
        jnp.where(past, jnp.nan, keys.zero),
    )
    run = partial(score_1bit.score_1bit, interpret=True)
    got, want = run(q, *poisoned), run(q, *keys)
    np.testing.assert_array_equal(got[..., : 70 * 32], want[..., : 70 * 32])
    assert np.isnan(got[..., 70 * 32 :]).all()


@pytest.mark.parametrize(
    ("q", "bits", "step", "why"),
    [
        ((1, 1, 4, 64), (1, 1, 4096, 8), (1, 1, 128, 64), "head sizes"),
        ((1, 1, 9, 128), (1, 1, 4096, 16), (1, 1, 128, 128), "query heads"),
        ((1, 1, 4, 128), (1, 1, 4096, 16), (1, 1, 64, 128), "groups of 32"),
        ((1, 1, 4, 128), (1, 1, 2048, 16), (1, 1, 64, 128), "4096 tokens or more"),
        ((1, 1, 4, 128), (1, 1, 4128, 16), (1, 1, 129, 128), "tiles of 128"),
    ],
)
def test_limits_are_named(q, bits, step, why) -> None:
    shapes = [jnp.zeros(shape, dtype) for shape, dtype in (
        (q, jnp.bfloat16), (bits, jnp.uint8), (step, jnp.bfloat16), (step, jnp.bfloat16)
    )]  # fmt: skip
    with pytest.raises(NotImplementedError, match=why):
        score_1bit.score_1bit(*shapes)


# ----------------------------------------------------------------------------------- dispatch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can compile for a TPU; kernels for it are interpreted."""
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    run = partial(score_1bit.score_1bit, interpret=True)
    monkeypatch.setattr(score_1bit, "score_1bit", run)


def inputs() -> tuple[jax.Array, OneBit]:
    keys = quantize_1bit(jnp.asarray(keys_of("random", (1, 1), 4096, 128)), 32)
    return jax.random.normal(jax.random.key(1), (1, 1, 4, 128), jnp.bfloat16), keys


def score(q: jax.Array, keys: OneBit) -> jax.Array:
    return ops.score_1bit(q, keys, logits=LOGITS)


def program(platform: str) -> str:
    traced = jax.jit(score).trace(*inputs())
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_only_a_program_for_a_tpu_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    assert "tpu_custom_call" in program("tpu")
    assert "custom_call" not in program("cpu")


def test_a_reference_that_is_asked_for_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    with ops.use("xla"):
        assert "tpu_custom_call" not in program("tpu")


def test_the_kernel_has_the_derivative_of_the_reference_and_is_mapped(interpreted) -> None:
    q, keys = inputs()
    op = ops.OPS["score_1bit"]

    def kernel(q: jax.Array) -> jax.Array:
        static = (("logits", LOGITS),)
        return _forms.__wrapped__(op, static, False, False).on_tpu(q, keys)

    exact = partial(ops.score_1bit, keys=keys, logits=LOGITS, implementation="xla")
    slope = jax.grad(lambda q: kernel(q.astype(jnp.bfloat16)).sum())(q.astype(jnp.float32))
    want = jax.grad(lambda q: exact(q.astype(jnp.bfloat16)).sum())(q.astype(jnp.float32))
    np.testing.assert_allclose(slope, want, rtol=1e-2, atol=1e-2)

    several = jnp.stack([q, 2 * q])
    np.testing.assert_allclose(jax.vmap(kernel)(several)[1], kernel(2 * q), rtol=1e-6)


def test_on_one_device_keeps_the_tree_of_its_results() -> None:
    def run(x: jax.Array, more: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"sum": x + more["y"], "x": x}

    operands = jnp.ones(3), {"y": jnp.arange(3.0)}
    got = jax.jit(partial(on_one_device, run, run))(*operands)
    jax.tree.map(np.testing.assert_array_equal, got, run(*operands))
