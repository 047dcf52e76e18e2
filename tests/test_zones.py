"""Zones: where tokens lie, and which of them a step reads."""

import functools

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvjax import Demotion, Fifo, LogSparse


def filled(demote: Demotion, local: int, flushes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By number of flushes: places in the order of arrival of the tokens that leave next, and of the full block."""
    block, left, blocks = np.arange(demote.slots(local)), [], []
    for flush in range(flushes + 1):
        blocks.append(block)
        left.append(block[demote.leaving(local)])
        new = demote.slots(local) + flush * demote.leave + np.arange(demote.leave)
        block = np.concatenate([block[demote.staying(local)], new])
    return left, blocks


@given(st.integers(1, 50), st.integers(1, 50), st.booleans(), st.integers(0, 300))
def test_place_is_that_of_a_block_filled_token_by_token(size: int, local: int, sparse: bool, flushes: int) -> None:
    demote: Demotion = LogSparse(window=size) if sparse else Fifo(leave=size)
    local = min(local, size) if sparse else local
    left, blocks = filled(demote, local, flushes)
    place = functools.partial(jnp.asarray, dtype=jnp.int32)
    for n in {0, min(1, flushes), flushes // 2, flushes}:
        slots = np.arange(demote.slots(local), dtype=np.int32)
        np.testing.assert_array_equal(demote.place(place(n), place(slots)), blocks[n])
        np.testing.assert_array_equal(demote.place(place(n), place(demote.leaving(local))), left[n])
