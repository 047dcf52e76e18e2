"""The gated delta rule and short convolutions against plain loops in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import GatedDelta, ShortConv
from kvjax.models.gated_delta import DeltaInputs, delta_rule
from kvjax.recurrence import advance

B, T = 2, 150
NET = GatedDelta(key_heads=2, value_heads=6, key_dim=5, value_dim=7, kernel=4)
SPEC = kvjax.CacheSpec(
    batch=B, q_heads=4, kv_heads=2, head_dim=8, capacity=256, dtype="float32"
)


def inputs(seed=0, alike=False):
    """Random inputs of a gated delta net, and its kernel; `alike`: all keys are, and hardly decay."""
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((B, T, NET.channels), np.float32)
    speed = 1e-4 if alike else 0.2
    if alike:
        qkv[:] = qkv[:, :1] + 1e-3 * qkv
    decay = -speed * np.exp(rng.standard_normal((B, T, NET.value_heads), np.float32))
    rate = 1 / (1 + np.exp(-2 - rng.standard_normal((B, T, NET.value_heads), np.float32)))
    kernel = rng.standard_normal((NET.kernel, NET.channels), np.float32)
    return DeltaInputs(qkv, decay, rate.astype(np.float32)), kernel


def by_loop(given, kernel, b, count=T):
    """Outputs [count, H, Dv] and the state of a row, one token after the other, in float64."""
    qkv, decay, rate = (np.asarray(x[b], np.float64) for x in given)
    before = np.zeros((NET.kernel - 1, NET.channels))
    padded = np.concatenate([before, qkv])
    state = np.zeros((NET.value_heads, NET.key_dim, NET.value_dim))
    out = np.zeros((count, NET.value_heads, NET.value_dim))
    shared = NET.value_heads // NET.key_heads
    for t in range(count):
        mixed = (padded[t : t + NET.kernel] * kernel).sum(axis=0)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k = mixed[:20].reshape(2, NET.key_heads, NET.key_dim)
        v = mixed[20:].reshape(NET.value_heads, NET.value_dim)
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        for h in range(NET.value_heads):
            key = k[h // shared]
            state[h] *= np.exp(decay[t, h])
            state[h] += np.outer(key, rate[t, h] * (v[h] - key @ state[h]))
            out[t, h] = q[h // shared] @ state[h] * NET.key_dim**-0.5
    return out, state


def part(given, start, stop):
    return jax.tree.map(lambda x: x[:, start:stop], given)


call = jax.jit(advance, static_argnames="steps")
empty = partial(kvjax.init_layer, NET, SPEC)


@pytest.mark.parametrize("alike", [False, True])
def test_chunked_form_is_the_recurrent_one(alike):
    """Also where keys are alike and nothing decays, so that corrections undo each other."""
    given, kernel = inputs(alike=alike)
    out, cache = call(empty(), given, kernel)
    for b in range(B):
        wanted, state = by_loop(given, kernel, b)
        np.testing.assert_allclose(out[b], wanted, atol=1e-5)
        np.testing.assert_allclose(cache.state.memory.state[b], state, atol=1e-4)


def test_any_mix_of_chunks_steps_and_drafts_is_the_recurrent_form():
    given, kernel = inputs(1)
    cache, outs, t = empty(), [], 0
    for size in (1, 3, 40, 1, 1, 16, 16, 2, 5, 1):
        cache = kvjax.flush(cache)
        steps = size <= 16
        size = min(size, int(kvjax.room(cache).min())) if steps else size
        out, cache = call(cache, part(given, t, t + size), kernel, steps=steps)
        if steps and size > 2:  # two tokens that were not accepted come again
            cache = kvjax.rollback(cache, np.full(B, t + size - 2))
            again, cache = call(cache, part(given, t + size - 2, t + size), kernel, steps=True)
            np.testing.assert_allclose(again, out[:, -2:], atol=1e-5)
        outs.append(out)
        t += size
    kvjax.raise_on_overflow(cache)
    found = np.concatenate(outs, axis=1)
    for b in range(B):
        np.testing.assert_allclose(found[b], by_loop(given, kernel, b, t)[0], atol=1e-5)


def test_ragged_rows_with_padding_of_nan_are_rows_alone():
    given, kernel = inputs(2)
    lengths = np.array([70, 5])
    real = np.arange(T)[None] < lengths[:, None]
    poisoned = jax.tree.map(lambda x: np.where(real[..., None], x, np.nan), given)
    out, cache = call(empty(), poisoned, kernel, lengths=lengths)
    active = np.array([False, True])
    poisoned = jax.tree.map(lambda x: np.where(active[:, None, None], x[:, 5:6], np.nan), given)
    step, cache = call(cache, poisoned, kernel, active=active)
    for b in range(B):
        wanted, _ = by_loop(given, kernel, b, 71)
        np.testing.assert_allclose(out[b, : lengths[b]], wanted[: lengths[b]], atol=1e-5)
    np.testing.assert_allclose(step[1, 0], by_loop(given, kernel, 1, 6)[0][5], atol=1e-5)
    assert cache.length.tolist() == [70, 6]


def with_nan(given, token):
    return jax.tree.map(
        lambda x: np.where(np.arange(x.shape[1])[:, None] == token, np.nan, x), given
    )


def test_a_token_that_is_not_finite_changes_none_before_it():
    """A draft may have one where the text has none: it is taken back, and must leave nothing."""
    given, kernel = inputs()
    _, start = call(empty(), part(given, 0, 20), kernel)
    wanted, whole = call(start, part(given, 20, 24), kernel, steps=True)
    for bad in range(1, 4):
        drafted = with_nan(part(given, 20, 24), bad)
        out, cache = call(start, drafted, kernel, steps=True)
        np.testing.assert_allclose(out[:, :bad], wanted[:, :bad], atol=1e-6)
        assert np.isnan(out[:, bad:]).all()
        # The row keeps it if it is not taken back, as a cache of keys and values does.
        after, _ = call(cache, part(given, 24, 25), kernel, steps=True)
        assert np.isnan(after).all()
        cache = kvjax.rollback(cache, jnp.full(B, 20 + bad, jnp.int32))
        expected = kvjax.rollback(whole, jnp.full(B, 20 + bad, jnp.int32))
        for length in (1, 2, 7):  # steps beside the state, and a chunk that folds them into it
            more = part(given, 20 + bad, 20 + bad + length)
            got, _ = call(cache, more, kernel, steps=length < 7)
            one, _ = call(expected, more, kernel, steps=length < 7)
            np.testing.assert_allclose(got, one, atol=1e-6)


def test_long_prompts_go_through_segments():
    rng = np.random.default_rng(3)
    tokens, heads, size = 2200, 1, 4
    q, k, v = rng.standard_normal((3, 1, tokens, heads, size), np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -0.1 * rng.random((1, tokens, heads), np.float32)
    rate = rng.random((1, tokens, heads), np.float32)
    start = rng.standard_normal((1, heads, size, size), np.float32)
    out, end = jax.jit(delta_rule)(q, k, v, decay, rate, start)
    state = start[0, 0].astype(np.float64)
    for t in range(tokens):
        state = state * np.exp(decay[0, t, 0])
        key = k[0, t, 0].astype(np.float64)
        state = state + np.outer(key, rate[0, t, 0] * (v[0, t, 0] - key @ state))
        if t % 500 == 0 or t == tokens - 1:
            np.testing.assert_allclose(out[0, t, 0], q[0, t, 0] @ state, atol=1e-4)
    np.testing.assert_allclose(end[0, 0], state, atol=1e-4)


def test_short_convolution_mixes_adjacent_tokens():
    policy = ShortConv(channels=3, kernel=4)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((B, 60, 3), np.float32)
    kernel, bias = rng.standard_normal((4, 3), np.float32), np.float32([1, 2, 3])
    padded = np.concatenate([np.zeros((B, 3, 3)), x], axis=1)
    wanted = sum(padded[:, i : i + 60] * kernel[i] for i in range(4)) + bias
    cache, outs, t = kvjax.init_layer(policy, SPEC), [], 0
    for size in (2, 1, 20, 16, 1, 15, 5):
        cache = kvjax.flush(cache)
        out, cache = call(cache, x[:, t : t + size], (kernel, bias), steps=size in (1, 15, 16))
        outs.append(out)
        t += size
    np.testing.assert_allclose(np.concatenate(outs, axis=1), wanted, atol=1e-5)
    kvjax.raise_on_overflow(cache)


def test_gradients_reach_through_a_prompt():
    given, kernel = inputs(5)

    @jax.jit
    def loss(rate):
        out, _ = advance(empty(), given._replace(rate=rate), kernel)
        return jnp.sum(out[0, 70:74] ** 2)

    rate = given.rate
    grad = np.asarray(jax.jit(jax.grad(loss))(rate))
    bump = np.zeros_like(given.rate)
    bump[0, 70, 1] = 0.05
    slope = (loss(rate + bump) - loss(rate - bump)) / 0.1
    np.testing.assert_allclose(grad[0, 70, 1], slope, rtol=2e-2, atol=1e-6)


def test_heads_that_do_not_share_keys_evenly_are_refused():
    with pytest.raises(ValueError, match=r"key_heads must divide value_heads"):
        GatedDelta(key_heads=4, value_heads=6, key_dim=2, value_dim=2)
