"""kvjax.attention inside attention modules that a user writes: NNX and Linen, jitted, donated,
in a scan over steps.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import kvjax

WIDTH, PROMPT, STEPS = 24, 50, 70
SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=PROMPT + STEPS, dtype=jnp.float32
)
FIER = kvjax.Retrieval(
    selector=kvjax.Fier(group=8),
    budget=SPEC.capacity,
    sink=2,
    local=8,
    demote=kvjax.Fifo(leave=16),
    dense_below=0,
)
POLICIES = pytest.mark.parametrize("policy", [kvjax.Full(), FIER], ids=["full", "fier"])


class NnxAttention(nnx.Module):
    def __init__(self, width: int, spec: kvjax.CacheSpec, *, rngs: nnx.Rngs):
        heads, kv_heads, size = spec.q_heads, spec.kv_heads, spec.head_dim
        self.q = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.k = nnx.LinearGeneral(width, (kv_heads, size), rngs=rngs)
        self.v = nnx.LinearGeneral(width, (kv_heads, size), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), rngs=rngs)

    def __call__(self, x, cache=None):
        out, cache = kvjax.attention(cache, self.q(x), self.k(x), self.v(x))
        return self.out(out), cache


class LinenAttention(nn.Module):
    spec: kvjax.CacheSpec

    def setup(self):
        heads, kv_heads, size = self.spec.q_heads, self.spec.kv_heads, self.spec.head_dim
        self.q = nn.DenseGeneral((heads, size))
        self.k = nn.DenseGeneral((kv_heads, size))
        self.v = nn.DenseGeneral((kv_heads, size))
        self.out = nn.DenseGeneral(WIDTH, axis=(-2, -1))

    def __call__(self, x, cache=None):
        out, cache = kvjax.attention(cache, self.q(x), self.k(x), self.v(x))
        return self.out(out), cache


def nnx_model():
    return NnxAttention(WIDTH, SPEC, rngs=nnx.Rngs(0))


def linen_model():
    module = LinenAttention(SPEC)
    return jax.tree_util.Partial(
        module.apply, module.init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)))
    )


MODELS = pytest.mark.parametrize("make", [nnx_model, linen_model], ids=["nnx", "linen"])


def tokens():
    return jax.random.normal(jax.random.key(1), (SPEC.batch, PROMPT + STEPS, WIDTH))


@partial(jax.jit, donate_argnums=1)
def prefill(model, cache, x):
    return model(x, cache)


@partial(jax.jit, donate_argnums=1)
def decode(model, cache, xs):
    """Steps over xs [S, B, 1, width] on the device."""

    def step(cache, x):
        out, cache = model(x, cache)
        return cache, out

    return lax.scan(step, cache, xs)


def dense_answer(model, x):
    """The module's output by one softmax over all of a causal sequence, in numpy."""
    parts = model if isinstance(model, nnx.Module) else model.func.__self__.bind(*model.args)
    q, k, v = (np.asarray(getattr(parts, name)(x), np.float64) for name in "qkv")
    k, v = (np.repeat(a, SPEC.group, axis=2) for a in (k, v))
    logits = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(SPEC.head_dim)
    logits = np.where(np.tri(x.shape[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    out = np.einsum("bnts,bsnd->btnd", weights / weights.sum(axis=-1, keepdims=True), v)
    return np.asarray(parts.out(jnp.asarray(out, jnp.float32)))


@pytest.mark.sample(2)
@MODELS
@POLICIES
def test_prompt_and_scanned_steps_equal_dense_attention(make, policy):
    model, x = make(), tokens()
    prompt_out, cache = prefill(model, kvjax.init_layer(policy, SPEC), x[:, :PROMPT])
    cache, step_outs = decode(model, cache, jnp.swapaxes(x[:, PROMPT:, None], 0, 1))
    kvjax.raise_on_overflow(cache)
    got = np.concatenate([prompt_out, np.swapaxes(step_outs[:, :, 0], 0, 1)], axis=1)
    np.testing.assert_allclose(got, dense_answer(model, x), atol=2e-5)
    np.testing.assert_array_equal(cache.length, [PROMPT + STEPS] * SPEC.batch)


@MODELS
@POLICIES
def test_steps_keep_the_structure_of_the_cache_and_consume_it(make, policy):
    model, x = make(), tokens()
    cache = kvjax.init_layer(policy, SPEC)
    before = jax.tree.structure(cache), [(a.shape, a.dtype) for a in jax.tree.leaves(cache)]
    _, filled = prefill(model, cache, x[:, :PROMPT])
    after, _ = decode(model, filled, jnp.swapaxes(x[:, PROMPT:, None], 0, 1))
    assert (
        jax.tree.structure(after),
        [(a.shape, a.dtype) for a in jax.tree.leaves(after)],
    ) == before
    for passed in (cache, filled):
        assert all(a.is_deleted() for a in jax.tree.leaves(passed))


@MODELS
def test_without_a_cache_the_module_is_a_plain_one(make):
    model, x = make(), tokens()
    out, cache = jax.jit(lambda model, x: model(x))(model, x)
    assert cache is None
    np.testing.assert_allclose(out, dense_answer(model, x), atol=2e-5)


@MODELS
def test_the_module_trains_through_the_hook(make):
    model, x = make(), tokens()[:, :8]

    def loss(model):
        return jnp.mean(jnp.square(model(x)[0]))

    if isinstance(model, nnx.Module):
        gradients = nnx.grad(loss)(model)
    else:
        gradients = jax.grad(lambda params: loss(jax.tree_util.Partial(model.func, params)))(
            model.args[0]
        )
    leaves = jax.tree.leaves(gradients)
    assert leaves
    assert all(np.isfinite(g).all() for g in leaves)
    assert any(np.abs(g).max() > 0 for g in leaves)
