"""jax's transformations over the hook: vmap and grad over caches in host memory, devices that
are not the first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import presets
from kvjax.testing._expect import dense

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype="float32"
)
FREEKV = presets.freekv(
    32, page=8, sink=8, local=8, layers=presets.Layers(dense=0), tau=0.0
).rest
HOST = {
    "fier": presets.fier(
        24, group=8, chunk=16, layers=presets.Layers(dense=0), store="host"
    ).rest,
    "freekv": FREEKV,
    "all": kvjax.Compressed(
        store=kvjax.HostOffload(page=8), sink=4, local=8, demote=kvjax.Fifo(leave=16)
    ),
}


def qkv(tokens: int, *lead: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(tokens)
    return tuple(
        jnp.asarray(rng.normal(size=(*lead, 2, tokens, h, 16)).astype(np.float32))
        for h in (4, 2, 2)
    )


def talk(cache: Any, prompt: Any, more: Any, step: Any) -> tuple[Any, ...]:
    """A prompt, a chunk after it, and a step that flushes and reads host memory."""
    first, cache = kvjax.attention(cache, *prompt)
    later, cache = kvjax.attention(cache, *more)
    out, cache = kvjax.attention(cache, *step)
    return first, later, out, cache


def test_vmap_over_caches_in_host_memory_gives_each_its_own() -> None:
    """The second cache has the rows of the first in turn, and so its outputs and contents."""
    both = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), kvjax.init_layer(HOST["all"], SPEC))
    tokens = [tuple(jnp.concatenate([a, a[:, ::-1]]) for a in qkv(n, 1)) for n in (30, 18, 1)]
    *outs, cache = jax.jit(jax.vmap(talk))(both, *tokens)
    for out in (*outs, *jax.tree.leaves(cache)):
        np.testing.assert_allclose(out[1], out[0][::-1], atol=1e-6)
    q, k, v = (
        np.concatenate([np.asarray(part[i][0]) for part in tokens], axis=1) for i in range(3)
    )
    want = dense(q[0, -1], k[0], v[0])  # every token is attended
    np.testing.assert_allclose(outs[2][0, 0, 0], want, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", HOST)
def test_vmap_over_a_cache_in_host_memory_is_that_of_each(name: str) -> None:
    caches = [kvjax.init_layer(HOST[name], SPEC) for _ in range(2)]
    both = jax.tree.map(lambda *a: jnp.stack(a), *caches)
    tokens = qkv(30, 2), qkv(18, 2), qkv(1, 2)
    got = jax.jit(jax.vmap(talk))(both, *tokens)
    one = jax.jit(talk)
    for i, cache in enumerate(caches):
        want = one(cache, *jax.tree.map(lambda a, i=i: a[i], tokens))
        jax.tree.map(
            lambda g, w, i=i: np.testing.assert_allclose(g[i], w, atol=1e-5), got, want
        )


@pytest.mark.parametrize("name", HOST)
def test_a_gradient_by_queries_passes_a_flush_into_host_memory(name: str) -> None:
    """A state that remembers the query, as FreeKV's, does not make flushed keys depend on it."""

    def loss(q: jax.Array, cache: Any) -> jax.Array:
        _, cache = kvjax.attention(cache, q, *step[1:])
        return jnp.sum(kvjax.attention(cache, q, *step[1:])[0])

    step = qkv(1)
    jax.eval_shape(
        jax.grad(loss), step[0], kvjax.init_layer(HOST[name], SPEC)
    )  # tracing would refuse it


@pytest.mark.thorough  # the law of gradients has prompts and steps; this adds vmap
def test_gradients_by_queries_pass_a_cache_in_host_memory_also_under_vmap() -> None:
    """For two rows of queries that read one cache, the gradient of each is that of the row
    alone.
    """
    _, _, _, cache = jax.jit(talk)(
        kvjax.init_layer(HOST["fier"], SPEC), qkv(30), qkv(18), qkv(1)
    )
    queries, step = qkv(1, 2)[0], qkv(1)

    def loss(q: jax.Array) -> jax.Array:
        return jnp.sum(kvjax.attention(cache, q, *step[1:])[0] ** 2)

    grad = jax.grad(loss)
    got = jax.jit(jax.vmap(grad))(queries)
    assert np.abs(got).max() > 1e-3
    for i in range(2):
        np.testing.assert_allclose(got[i], jax.jit(grad)(queries[i]), atol=1e-5)
