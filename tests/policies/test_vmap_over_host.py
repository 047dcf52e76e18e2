"""`jax.vmap` over caches with a history in host memory: it runs, or says in words what does not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=512, dtype=jnp.float32
)


def decoded(text: str, steps: int) -> Any:
    """A function from a seed to the outputs of some steps after a prompt."""
    policy = kvjax.presets.parse(text).rest

    def run(seed: Any) -> jax.Array:
        cache = kvjax.init_layer(policy, SPEC)
        key = jax.random.key(seed)

        def tokens(count: int, heads: int) -> jax.Array:
            return jax.random.normal(key, (1, count, heads, 64))

        _, cache = kvjax.prefill(cache, tokens(300, 4), tokens(300, 2), tokens(300, 2))
        verb = kvjax.attention if steps == 1 else kvjax.decode
        return verb(cache, tokens(steps, 4), tokens(steps, 2), tokens(steps, 2))[0]

    return run


@pytest.mark.parametrize("text", ["fier:budget=64,store=host", "magicpig:store=host"])
def test_a_step_runs_under_vmap(text: str) -> None:
    run = decoded(text, 1)
    alone = [jax.jit(run)(seed) for seed in range(2)]
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(jnp.arange(2)), alone, atol=1e-5)


def test_several_steps_under_vmap_are_refused_in_words() -> None:
    run = decoded("fier:budget=64,store=host", 3)
    for mapped in (jax.jit(jax.vmap(run)), jax.vmap(jax.jit(run))):
        with pytest.raises(ValueError, match="host memory do not run under"):
            jax.eval_shape(mapped, jnp.arange(2))
