"""Block-sparse prompts: which blocks of keys a block of queries attends to, and what attending
to them gives.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.numerics.partial import Logits
from kvjax.ops import chunk as prompts
from kvjax.ops import key_blocks
from kvjax.ops.key_blocks import list_length, sparse_prompts

B, K, G, T, S, D = 2, 2, 2, 256, 5000, 16
STOPS = np.array([4990, 2300], np.int32)
SCALE = 0.6
CAPS = {"no cap": Logits(SCALE), "a cap": Logits(3 * SCALE, 1.5)}  # most logits are above it
attend_zone = jax.jit(prompts.attend_zone, static_argnames="logits")
attend_sparse = jax.jit(key_blocks.attend_sparse, static_argnames="logits")
choose_blocks = jax.jit(key_blocks.choose_blocks, static_argnames=("share", "logits"))
estimated_mass = jax.jit(key_blocks.estimated_mass, static_argnames="logits")


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def chunk():
    """Queries, and keys and values that hold anything past each row's stop."""
    q, k, v = normal(0, B, K, G, T, D), normal(1, B, K, S, D), normal(2, B, K, S, D)
    for b, stop in enumerate(STOPS):
        k[b, :, stop:], v[b, :, stop:] = np.nan, 1e4
    return tuple(map(jnp.asarray, (q, k, v, STOPS)))


def logits_by_hand(products, logits):
    capped = logits.scale * products
    return capped if logits.cap is None else logits.cap * np.tanh(capped / logits.cap)


def mass_by_hand(q, k, stop, logits):
    """f64[T / 128, S // 128] of one head, from the method's text: for every second stride of 16
    queries, the softmax over whole strides of 16 keys of the logit of the mean product of the
    16 pairs on their antidiagonal."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    strides = int(stop) // 16
    found = np.zeros((len(q) // 128, len(k) // 128))
    for first in range(16, len(q), 32):
        pairs = [[q[first + 15 - i] @ k[16 * j + i] for i in range(16)] for j in range(strides)]
        weights = np.exp(logits_by_hand(np.mean(pairs, axis=1), logits))
        for j, weight in enumerate(weights / weights.sum()):
            if 16 * j // 128 < found.shape[1]:
                found[first // 128, 16 * j // 128] += weight
    return found


@pytest.mark.parametrize("logits", CAPS.values(), ids=CAPS)
def test_the_estimate_is_that_of_the_text(chunk, logits):
    q, k, _, stop = chunk
    found = np.asarray(estimated_mass(q, k, stop, logits=logits))
    for b, head, g in ((0, 1, 0), (1, 0, 1)):
        want = mass_by_hand(q[b, head, g], k[b, head], stop[b], logits)
        whole = want[:, : int(stop[b]) // 128]
        # The strides of a last part of a block are left out on both sides of the comparison.
        np.testing.assert_allclose(
            found[b, head, g] / found[b, head, g].sum(), want / want.sum(), atol=2e-4
        )
        assert whole.shape[1] <= found.shape[-1]


def test_lists_have_the_blocks_of_most_mass_and_the_ends_in_order(chunk):
    q, k, _, stop = chunk
    mass = np.asarray(estimated_mass(q, k, stop, logits=Logits(SCALE)))
    blocks, counts = map(np.asarray, choose_blocks(q, k, stop, share=0.6, logits=Logits(SCALE)))
    for row in np.ndindex(B, K, G, T // 128):
        stored = -(-int(stop[row[0]]) // 128)
        n = counts[row]
        assert n == list_length(stored, 0.6) == max(-(-stored * 6 // 10), 16)
        own = blocks[row][:n]
        assert np.all(np.diff(own) > 0)
        assert own[0] == 0
        assert own[-1] == stored - 1
        left = np.setdiff1d(np.arange(stored), own)
        padded = np.append(mass[row], 0)
        assert padded[left].max() <= padded[own[1:-1]].min()


def test_all_blocks_are_dense_attention(chunk):
    q, k, v, stop = chunk
    n = -(-S // 128)
    blocks = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (B, K, G, T // 128, n))
    counts = jnp.broadcast_to(-(-stop // 128)[:, None, None, None], blocks.shape[:-1])
    found = ops.attend_key_blocks(q, k, v, blocks, counts, stop, logits=Logits(SCALE))
    want = attend_zone(q, k, v, None, stop, logits=Logits(SCALE))
    np.testing.assert_allclose(found.out, want.out, atol=2e-6)
    np.testing.assert_allclose(found.lse, want.lse, atol=2e-5)


def test_a_soft_cap_changes_the_blocks_of_a_prompt(chunk):
    q, k, _, stop = chunk
    capped = CAPS["a cap"]
    plain = Logits(capped.scale)
    lists = [choose_blocks(q, k, stop, share=0.5, logits=x)[0] for x in (capped, plain)]
    assert np.any(np.asarray(lists[0]) != np.asarray(lists[1]))


@pytest.mark.parametrize("logits", CAPS.values(), ids=CAPS)
def test_attention_is_that_of_the_tokens_in_the_listed_blocks(chunk, logits):
    q, k, v, stop = chunk
    with sparse_prompts(0.5):
        found = attend_zone(q, k, v, None, stop, logits=logits)
    blocks, counts = choose_blocks(q, k, stop, share=0.5, logits=logits)
    for row in np.ndindex(B, K, G, T // 128):
        b, head, g, block = row
        listed = np.asarray(blocks)[row][: counts[row]]
        slots = (128 * listed[:, None] + np.arange(128)).ravel()
        slots = slots[slots < stop[b]]
        queries = slice(128 * block, 128 * block + 128)
        products = (
            np.asarray(q[b, head, g, queries], np.float64)
            @ np.asarray(k[b, head, slots], np.float64).T
        )
        weights = np.exp(logits_by_hand(products, logits))
        want = (
            weights @ np.asarray(v[b, head, slots], np.float64) / weights.sum(1, keepdims=True)
        )
        got = np.asarray(found.out[b, head]).reshape(G, T, D)[g, queries]
        np.testing.assert_allclose(got, want, atol=1e-4)
        lse = np.asarray(found.lse[b, head]).reshape(G, T)[g, queries]
        np.testing.assert_allclose(lse, np.log(weights.sum(1)), atol=1e-4)


def test_a_row_and_a_head_ignore_others(chunk):
    q, k, v, stop = chunk
    with sparse_prompts(0.5):
        whole = attend_zone(q, k, v, None, stop, logits=Logits(SCALE))
        alone = attend_zone(
            q[1:, 1:], k[1:, 1:], v[1:, 1:], None, stop[1:], logits=Logits(SCALE)
        )
    np.testing.assert_allclose(whole.out[1:, 1:], alone.out, atol=1e-6)


def test_queries_need_not_fill_their_last_block(chunk):
    q, k, v, stop = chunk
    with sparse_prompts(0.5):
        whole = attend_zone(q, k, v, None, stop, logits=Logits(SCALE))
        part = attend_zone(q[:, :, :, :128], k, v, None, stop, logits=Logits(SCALE))
        odd = attend_zone(q[:, :, :, :130], k, v, None, stop, logits=Logits(SCALE))
    first = whole.out.reshape(B, K, G, T, D)[:, :, :, :128]
    np.testing.assert_allclose(first, part.out.reshape(first.shape), atol=1e-6)
    np.testing.assert_allclose(
        first, odd.out.reshape(B, K, G, 130, D)[:, :, :, :128], atol=1e-6
    )


@pytest.mark.parametrize("stop", [0, 1, 127, 128, 2048, 2049])
def test_few_tokens_are_all_attended_to(chunk, stop):
    q, k, v, _ = chunk
    stops = jnp.full(B, stop, jnp.int32)
    clean = jnp.nan_to_num(k), jnp.where(v == 1e4, 0, v)
    with sparse_prompts(0.1):
        found = attend_sparse(q, *clean, stops, logits=Logits(SCALE))
    want = attend_zone(q, *clean, None, stops, logits=Logits(SCALE))
    if stop <= 2048:
        np.testing.assert_allclose(found.out, want.out, atol=1e-5)
    assert np.all(np.isneginf(found.lse)) == (stop == 0)
    assert np.all(np.isfinite(found.out))


def test_the_derivative_is_that_of_attention_to_the_chosen_blocks(chunk):
    q, k, v, stop = chunk
    k, v = jnp.nan_to_num(k), jnp.where(v == 1e4, 0, v)
    along = jnp.asarray(normal(5, *q.shape))

    def total(q):
        with sparse_prompts(0.5):
            return jnp.sum(attend_zone(q, k, v, None, stop, logits=Logits(SCALE)).out ** 2)

    slope = jnp.vdot(jax.grad(total)(q), along)
    step = 1e-3
    by_hand = (total(q + step * along) - total(q - step * along)) / (2 * step)
    np.testing.assert_allclose(slope, by_hand, rtol=0.05)


def test_a_share_is_a_part_of_the_keys_of_a_program(chunk):
    q, k, v, stop = chunk
    run = jax.jit(partial(attend_zone, logits=Logits(SCALE)))
    dense = run(q, k, v, None, stop)
    with sparse_prompts(0.5):
        sparse = run(q, k, v, None, stop)
    assert float(jnp.max(jnp.abs(dense.out - sparse.out))) > 1e-3
    np.testing.assert_array_equal(run(q, k, v, None, stop).out, dense.out)
    with sparse_prompts(1.0):
        np.testing.assert_array_equal(run(q, k, v, None, stop).out, dense.out)


def test_keys_that_are_read_by_the_block_are_refused(chunk):
    q, k, _, stop = chunk
    with (
        sparse_prompts(0.5),
        pytest.raises(ValueError, match="sparse_prompt reads stored keys in place"),
    ):
        prompts.attend_blocks(
            q, k, None, stop, read=lambda *a: (k, k), slots=S, unit=1, logits=Logits(SCALE)
        )


def test_sizes_that_are_no_blocks_are_refused(chunk):
    q, k, v, stop = chunk
    one = jnp.zeros((B, K, G, 1, 1), jnp.int32)
    with pytest.raises(
        ValueError, match="multiples of 128 queries and at least 128 slots; got 100, 5000"
    ):
        ops.attend_key_blocks(
            q[:, :, :, :100], k, v, one, one[..., 0], stop, logits=Logits(SCALE)
        )
