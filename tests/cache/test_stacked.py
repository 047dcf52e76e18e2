"""Layers that are stacked for a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype="float32"
)
attend, flush = jax.jit(kvjax.attention, static_argnames="flush"), jax.jit(kvjax.flush)
POLICY = kvjax.Retrieval(
    selector=kvjax.Fier(group=4),
    budget=16,
    sink=2,
    local=6,
    demote=kvjax.Fifo(leave=4),
    dense_below=0,
)


def draw(seed, tokens):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((2, tokens, n, 16), np.float32) for n in (4, 2, 2)]


@functools.cache
def filled(seed):
    """A layer whose recent block is full in row 0."""
    layer = kvjax.init_layer(POLICY, SPEC)
    q, k, v = draw(seed, 12)
    _, layer = attend(layer, q, k, v, lengths=jnp.array([12, 9]))
    while not bool(kvjax.any_full(layer)):
        _, layer = attend(layer, q[:, :1], k[:, :1], v[:, :1], flush=False)
    return layer


def test_flush_of_stacked_layers_is_that_of_each():
    layers = [filled(0), filled(7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    got = flush(stacked)
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *map(flush, layers))
    jax.tree.map(np.testing.assert_array_equal, got.state, want.state)
    assert jax.tree.structure(got) == jax.tree.structure(stacked)


def test_a_scan_over_stacked_layers_is_the_loop():
    layers = [filled(0), filled(7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    q, k, v = draw(1, 1)

    @jax.jit
    def one(x, layer):
        out, layer = kvjax.attention(layer, q + x, k, v)
        return x + out, layer

    x, after = jax.jit(lambda x, layers: jax.lax.scan(one, x, layers))(
        jnp.zeros_like(q), stacked
    )
    y = jnp.zeros_like(q)
    for layer in layers:
        y, _ = one(y, layer)
    np.testing.assert_allclose(x, y, atol=1e-5)
    assert after.length.tolist() == [
        layer.length.tolist() for layer in map(lambda a: one(y, a)[1], layers)
    ]
