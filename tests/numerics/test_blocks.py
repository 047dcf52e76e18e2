"""Writes go to each row's own place, and what has no room is dropped."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from kvjax.numerics.blocks import empty_block, put, take_rows, write
from kvjax.spec import CacheSpec

write_at = jax.jit(write)


@given(
    rows=st.sampled_from([1, 3]),
    length=st.sampled_from([1, 4]),
    starts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    counts=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_write_equals_a_loop_over_tokens(
    rows: int, length: int, starts: list[int], counts: list[int]
) -> None:
    rng = np.random.default_rng(0)
    buffer = rng.normal(size=(rows, 2, 8, 3)).astype(np.float32)
    new = rng.normal(size=(rows, 2, length, 3)).astype(np.float32)
    want = buffer.copy()
    for b in range(rows):
        for i in range(min(counts[b], length)):
            if starts[b] + i < 8:
                want[b, :, starts[b] + i] = new[b, :, i]
    at = np.array(starts[:rows], np.int32)
    count = np.minimum(np.array(counts[:rows], np.int32), length)
    np.testing.assert_array_equal(write_at(buffer, new, at, count), want)


def test_put_counts_what_fits() -> None:
    spec = CacheSpec(batch=3, q_heads=1, kv_heads=1, head_dim=8, capacity=8, dtype=jnp.float32)
    k = jnp.ones((3, 1, 4, 8))
    block = put(
        put(empty_block(spec, 6), k, k, jnp.array([4, 0, 3])), k, 2 * k, jnp.array([4, 4, 3])
    )
    assert block.count.tolist() == [6, 4, 6]
    assert block.v[:, 0, :, 0].tolist() == [
        [1, 1, 1, 1, 2, 2],
        [2, 2, 2, 2, 0, 0],
        [1, 1, 1, 2, 2, 2],
    ]


def test_take_rows_reads_each_row_at_its_own_slots() -> None:
    tokens = jnp.arange(2 * 1 * 4 * 1, dtype=jnp.float32).reshape(2, 1, 4, 1)
    assert take_rows(tokens, jnp.array([[3, 0], [1, 9]]))[..., 0].tolist() == [
        [[3, 0]],
        [[5, 7]],
    ]
