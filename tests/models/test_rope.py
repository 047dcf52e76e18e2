"""RoPE: against transformers' functions, and the properties that hold of any rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import models

KINDS = [
    models.rope.Default(theta=300.0),
    models.rope.Linear(theta=300.0, factor=4.0),
    models.rope.Dynamic(theta=300.0, factor=4.0, original=32),
    models.rope.Llama3(
        theta=300.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original=64
    ),
    models.rope.Yarn(theta=300.0, factor=4.0, original=32),
    models.rope.LongRope(
        theta=300.0, short_factor=(1.0,) * 8, long_factor=(1.5,) * 8, original=32
    ),
]
some = st.floats(1.0, 20.0, width=16)


@pytest.mark.torch
@given(
    theta=st.floats(50.0, 1e6, width=32),
    factor=some,
    dim=st.sampled_from([4, 8, 64, 128]),
    original=st.sampled_from([8, 100, 8192]),
    low=st.floats(0.25, 4.0, width=16),
    width=st.floats(0.25, 8.0, width=16),
    fast=st.floats(4.0, 64.0, width=16),
    slow=st.floats(0.25, 2.0, width=16),
    attention=st.none() | st.floats(0.5, 2.0, width=16),
    mscale=st.none() | st.floats(0.0, 2.0, width=16),
    mscale_all=st.none() | st.floats(0.0, 2.0, width=16),
    truncate=st.booleans(),
    length=st.integers(1, 40000),
)
def test_frequencies_are_those_of_transformers(
    theta,
    factor,
    dim,
    original,
    low,
    width,
    fast,
    slow,
    attention,
    mscale,
    mscale_all,
    truncate,
    length,
):
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {"factor": factor, "original_max_position_embeddings": original}
    yarn = {
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": attention,
        "mscale": mscale,
        "mscale_all_dim": mscale_all,
        "truncate": truncate,
    }
    llama3 = {"low_freq_factor": low, "high_freq_factor": low + width}
    for kind, ours, parameters in (
        ("linear", models.rope.Linear(theta=theta, factor=factor), {"factor": factor}),
        (
            "dynamic",
            models.rope.Dynamic(theta=theta, factor=factor, original=4 * original),
            {"factor": factor},
        ),
        (
            "llama3",
            models.rope.Llama3(theta=theta, factor=factor, original=original, **llama3),
            scaled | llama3,
        ),
        (
            "yarn",
            models.rope.Yarn(theta=theta, factor=factor, original=original, **yarn),
            scaled | yarn,
        ),
    ):
        config = transformers.LlamaConfig(
            head_dim=dim,
            max_position_embeddings=4 * original,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
        )
        wanted, amplitude = ROPE_INIT_FUNCTIONS[kind](config, seq_len=torch.tensor(length))
        np.testing.assert_allclose(
            ours.frequencies(dim, length), wanted.numpy(), rtol=4e-6, err_msg=kind
        )
        assert ours.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_scores_depend_on_distance_alone(kind):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    at = jnp.array([[3, 40, 100]])

    def scores(distance):
        (qc, qs), (kc, ks) = (
            models.rope.angles(kind, at + d, 16, length=400) for d in (distance, 0)
        )
        turned = (
            models.rope.rotate(jnp.tile(q, (1, 3, 1, 1)), qc, qs),
            models.rope.rotate(jnp.tile(k, (1, 3, 1, 1)), kc, ks),
        )
        return jnp.sum(turned[0] * turned[1], axis=-1).ravel()

    for distance in (0, 1, 17):
        np.testing.assert_allclose(
            scores(distance), np.full(3, scores(distance)[0]), rtol=2e-4, atol=2e-4
        )
    assert abs(float(scores(1)[0] - scores(17)[0])) > 1e-3


def test_dynamic_is_the_default_up_to_the_original_length_and_traced_past_it():
    kind = models.rope.Dynamic(theta=300.0, factor=4.0, original=32)
    plain = models.rope.Default(theta=300.0).frequencies(16)
    for length in (0, 1, 31, 32):
        np.testing.assert_allclose(kind.frequencies(16, length), plain, rtol=1e-6)
    traced = jax.jit(lambda n: kind.frequencies(16, n))
    for length in (32, 33, 100):
        # theta grows by (factor * length / original - (factor - 1)) ^ (D / (D - 2))
        theta = 300.0 * max(4 * length / 32 - 3, 1) ** (16 / 14)
        np.testing.assert_allclose(
            traced(length), theta ** -(np.arange(0, 16, 2) / 16), rtol=1e-5
        )


def test_rotation_computes_in_f32_and_keeps_the_dtype():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8), jnp.bfloat16)
    cos, sin = models.rope.angles(
        models.rope.Default(), jnp.tile(jnp.arange(1000, 1005)[None], (2, 1)), 8
    )
    turned = models.rope.rotate(x, cos, sin)
    assert turned.dtype == jnp.bfloat16
    exact = models.rope.rotate(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))
    np.testing.assert_allclose(
        jnp.linalg.norm(exact), jnp.linalg.norm(x.astype(jnp.float32)), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: models.rope.Default(theta=1.0),
            r"Default\(theta=...\) must be a finite number above 1.0, got 1.0",
        ),
        (lambda: models.rope.Linear(factor=float("inf")), r"Linear\(factor=...\)"),
        (
            lambda: models.rope.LongRope(
                short_factor=(1.0, 0.0), long_factor=(1.0,), original=8
            ),
            r"LongRope\(short_factor=...\) must be finite numbers above 0",
        ),
        (
            lambda: models.rope.LongRope(
                short_factor=(1.0,), long_factor=(1.0,), original=8
            ).frequencies(8),
            "LongRope has 1 factors for a head of 8 channels; it needs 4",
        ),
        (lambda: models.rope.Yarn(factor=2.0, original=0), r"Yarn\(original=...\)"),
        (
            lambda: models.rope.Llama3(
                factor=2.0, low_freq_factor=4, high_freq_factor=4, original=8
            ),
            "high_freq_factor must be the larger one",
        ),
    ],
)
def test_bad_parameters_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_longrope_scales_attention_past_the_original_length_alone():
    for factor, squared in (
        (0.5, 1.0),
        (1.0, 1.0),
        (1.5, 1 + np.log(1.5) / np.log(4096)),
        (32.0, 1 + 5 / 12),
    ):
        assert models.rope.longrope_attention(factor, 4096) ** 2 == pytest.approx(squared)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_each_length_of_any_shape_has_its_own_frequencies(kind, shape):
    # 31, below the original length, 63, ...
    lengths = np.arange(int(np.prod(shape))).reshape(shape) * 32 + 31
    got = np.broadcast_to(kind.frequencies(16, lengths), (*shape, 8))
    for at in np.ndindex(shape):
        np.testing.assert_allclose(got[at], kind.frequencies(16, int(lengths[at])), rtol=1e-6)


def test_theta_is_that_of_the_paper_unless_it_is_given():
    stretched = {"factor": 1.0, "original": 64}
    kinds = (
        models.rope.Default(),
        models.rope.Linear(factor=1.0),
        models.rope.Dynamic(**stretched),
        models.rope.Llama3(**stretched, low_freq_factor=1.0, high_freq_factor=4.0),
        models.rope.Yarn(**stretched),
        models.rope.LongRope(short_factor=(1.0,) * 4, long_factor=(1.0,) * 4, original=64),
    )
    for kind in kinds:
        np.testing.assert_allclose(
            kind.frequencies(8), 10.0 ** -np.arange(4), rtol=1e-6, err_msg=str(kind)
        )
