"""What was cut off a cache has no effect on what follows, whatever it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=256, dtype="float32"
)


def tokens(count: int, seed: int) -> list[jax.Array]:
    """q, k, v [2, count, heads, 16]."""
    return [
        jax.random.normal(jax.random.key(seed + i), (2, count, heads, 16))
        for i, heads in enumerate((4, 2, 2))
    ]


@pytest.mark.parametrize(
    "preset",
    [
        "full",
        "fier",
        *(pytest.param(p, marks=pytest.mark.thorough) for p in ("quest", "pariskv", "exact")),
    ],
)
def test_numbers_that_are_not_finite_go_with_the_tokens_that_are_cut(preset):
    policy = kvjax.presets.parse(preset).rest
    prompt, more = tokens(150, 0), tokens(30, 9)
    damaged = [prompt[0], *(a.at[:, 60:].set(jnp.nan) for a in prompt[1:])]
    found = []
    for text in (prompt, damaged):
        layer = kvjax.prefill(kvjax.init_layer(policy, SPEC), *text)[1]
        layer = kvjax.truncate(layer, jnp.array([60, 40]))
        out, layer = kvjax.prefill(layer, *more)
        step, _ = kvjax.attention(layer, *(a[:, :1] for a in more))
        found.append((out, step))
    for clean, after in zip(*found, strict=True):
        np.testing.assert_allclose(after, clean, atol=1e-5)
