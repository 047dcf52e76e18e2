"""`take_rows`: rows taken, repeated, reordered and dropped, wherever the arrays lie."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

SPEC = kvjax.CacheSpec(
    batch=3, q_heads=4, kv_heads=2, head_dim=16, capacity=96, dtype="float32"
)


def tokens(count, seed=0):
    return [
        jax.random.normal(jax.random.key(seed + i), (3, count, heads, 16))
        for i, heads in enumerate((SPEC.q_heads, SPEC.kv_heads, SPEC.kv_heads))
    ]


attend = jax.jit(kvjax.attention)


@cache
def filled(policy):
    cache = kvjax.init_layer(policy, SPEC)
    return attend(cache, *tokens(60), lengths=jnp.array([60, 41, 7]))[1]


HOSTED = kvjax.Retrieval(
    selector=kvjax.Fier(group=8),
    store=kvjax.HostOffload(),
    budget=24,
    sink=2,
    local=8,
    demote=kvjax.Fifo(leave=16),
)
KIVI = kvjax.Compressed(
    store=kvjax.Quantized(bits=2, key_group=8), local=8, demote=kvjax.Fifo(leave=16)
)


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        pytest.param(policy, rows, marks=() if number in (0, 3, 4, 8) else pytest.mark.thorough)
        for number, (policy, rows) in enumerate(
            itertools.product([kvjax.Full(), HOSTED, KIVI], [[2, 0, 0, 1, 2], [1], [1, 2]])
        )
    ],
)
def test_a_taken_row_continues_as_the_row_that_it_was(policy, rows):
    cache, (q, k, v) = filled(policy), tokens(1, 9)
    index = np.array(rows)
    out, _ = attend(cache, q, k, v)
    taken = kvjax.take_rows(cache, rows)
    assert taken.spec == dataclasses.replace(SPEC, batch=len(rows))
    assert taken.length.tolist() == np.array([60, 41, 7])[index].tolist()
    got, _ = attend(taken, q[index], k[index], v[index])
    np.testing.assert_array_equal(got, out[index])
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(taken), strict=True):
        assert jax.typeof(old).memory_space == jax.typeof(new).memory_space
        assert old.sharding.memory_kind == new.sharding.memory_kind


def test_a_row_taken_out_can_be_inserted_again():
    cache = kvjax.init(HOSTED, SPEC, layers=2)
    cache = dataclasses.replace(cache, layers=(filled(HOSTED),) * 2)
    moved = kvjax.insert(cache, kvjax.take_rows(cache, [1]), 2)
    for a, b in zip(
        jax.tree.leaves(moved), jax.tree.leaves(kvjax.take_rows(cache, [0, 1, 1])), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", [kvjax.Full(), HOSTED], ids=["full", "hosted"])
def test_rows_that_are_traced_and_do_not_exist_are_empty(policy):
    cache, empty = filled(policy), kvjax.init_layer(policy, SPEC)
    taken = jax.jit(kvjax.take_rows)(cache, jnp.array([1, 3, -1]))
    assert taken.length.tolist() == [41, 0, 0]
    for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(empty), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[1:], np.asarray(b)[1:])


def test_take_rows_serves_beams_under_jit_with_a_donated_cache():
    step = jax.jit(
        lambda cache, parents, q, k, v: kvjax.attention(
            kvjax.take_rows(cache, parents), q, k, v
        ),
        donate_argnums=0,
    )
    cache, (q, k, v) = jax.tree.map(jnp.copy, filled(kvjax.Full())), tokens(1, 9)
    parents = np.array([2, 2, 1])
    want = kvjax.attention(kvjax.take_rows(cache, parents), q, k, v)[0]
    out, cache = step(cache, parents, q, k, v)
    np.testing.assert_allclose(out, want, atol=1e-6)
    assert cache.length.tolist() == [8, 8, 42]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "one or more integers"),
        (1, "one or more integers"),
        ([0.0], "one or more integers"),
        ([[0, 1]], "one or more integers"),
        ([0, 3], r"\[1\] is 3; the cache has rows 0 to 2"),
        ([-1], r"\[0\] is -1"),
        (np.array([2**32], np.int64), "got 4294967296"),
    ],
)
def test_take_rows_refuses_rows_that_do_not_exist(rows, message):
    with pytest.raises(ValueError, match=message):
        kvjax.take_rows(filled(kvjax.Full()), rows)
