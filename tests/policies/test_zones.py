"""Zones: where tokens lie, and which of them a step reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax import (
    Buffer,
    CacheSpec,
    Compressed,
    Demotion,
    Dense,
    Fier,
    Fifo,
    HostOffload,
    LogSparse,
    MinMaxPages,
    Policy,
    Retrieval,
    Speculative,
)
from kvjax.testing import _drive as drive
from kvjax.testing._expect import dense


def filled(
    demote: Demotion, local: int, flushes: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By number of flushes: places in the order of arrival of the tokens that leave next, and
    of the full block.
    """
    block, left, blocks = np.arange(demote.slots(local)), [], []
    for flush in range(flushes + 1):
        blocks.append(block)
        left.append(block[demote.leaving(local)])
        new = demote.slots(local) + flush * demote.leave + np.arange(demote.leave)
        block = np.concatenate([block[demote.staying(local)], new])
    return left, blocks


@pytest.mark.thorough
@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from(["all", "sparse", "buffer"]),
    st.integers(0, 300),
)
def test_place_is_that_of_a_block_filled_token_by_token(
    size: int, local: int, which: str, flushes: int
) -> None:
    demote: Demotion
    if which == "sparse":
        demote, local = LogSparse(window=size), min(local, size)
    elif which == "buffer":
        demote, local = Buffer(leave=size), local + size
    else:
        demote = Fifo(leave=size)
    left, blocks = filled(demote, local, flushes)
    place = functools.partial(jnp.asarray, dtype=jnp.int32)
    for n in {0, min(1, flushes), flushes // 2, flushes}:
        slots = np.arange(demote.slots(local), dtype=np.int32)
        np.testing.assert_array_equal(demote.place(place(n), place(slots)), blocks[n])
        np.testing.assert_array_equal(
            demote.place(place(n), place(demote.leaving(local))), left[n]
        )


SPEC = CacheSpec(batch=3, q_heads=8, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)
BASE = Retrieval(
    selector=Fier(group=16), budget=64, sink=4, local=24, demote=Fifo(leave=32), dense_below=0
)
SPARSE = dataclasses.replace(BASE, demote=LogSparse(window=32))
POLICIES: dict[str, Policy] = {
    "full": kvjax.Full(),
    "fier": BASE,
    "log-sparse": SPARSE,
    "log-sparse, a step late": Speculative(SPARSE, tau=-1.0),
    "pages, a step late": Speculative(
        dataclasses.replace(BASE, selector=MinMaxPages(page=8)), tau=0.0
    ),
    "per head, over host": dataclasses.replace(
        BASE,
        selector=Fier(group=16, group_reduce="per_head"),
        store=HostOffload(),
        dense_below=90,
    ),
    "compressed": Compressed(store=Dense(), sink=3, local=5, demote=Fifo(leave=16)),
    "compressed, log-sparse": Compressed(store=Dense(), local=8, demote=LogSparse(window=8)),
    "streaming_llm": kvjax.presets.streaming_llm(budget=40).rest,
    "h2o": kvjax.presets.h2o(budget=40).rest,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_is_attention_over_its_positions(name: str, window: int | None) -> None:
    """Each token counts once: no position is missing, wrong or repeated, after prompts, flushes
    and reuse.
    """
    policy, tokens, lengths = POLICIES[name], drive.random_tokens(SPEC), np.array([150, 61, 2])
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, lengths)
    if window is not None and "log-sparse" in name:
        with pytest.raises(ValueError, match="forgets the order of tokens"):
            drive.step(cache, tokens, lengths, window=window)
        return
    for i in range(40):
        out, cache, info = drive.step(cache, tokens, lengths + i, window=window)
        if i % 3:
            continue
        positions = np.asarray(info.positions)
        assert positions.shape[:2] == (SPEC.batch, SPEC.kv_heads)
        for b, k, g in np.ndindex(SPEC.batch, SPEC.kv_heads, SPEC.group):
            own = positions[b, k, g % positions.shape[2]]
            own = own[own >= 0]
            q = tokens.q[b, lengths[b] + i, k * SPEC.group + g]
            want = dense(q[None], tokens.k[b, own, k, None], tokens.v[b, own, k, None])
            np.testing.assert_allclose(
                out[b, k * SPEC.group + g], want[0], atol=2e-5, err_msg=f"{i} {b} {k} {g}"
            )
        counts = (positions >= 0).sum(axis=-1).mean(axis=-1)
        np.testing.assert_allclose(info.attended, counts, rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy", [kvjax.Full(), kvjax.presets.quest(64, page=8).rest], ids=["full", "quest"]
)
def test_steps_that_find_no_room_attend_to_what_is_stored(policy):
    """Without flushes, tokens past a full block are dropped and reported; what attends stays
    inside the arrays.
    """
    spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=96)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, 92, h, 16)) for i, h in enumerate((4, 2, 2))
    )
    _, cache = kvjax.attention(kvjax.init_layer(policy, spec), q, k, v)
    room = int(kvjax.room(cache)[0])
    steps = (a[:, : room + 4] for a in (q, k, v))
    out, after, info = kvjax.decode_info(cache, *steps, flush=False)
    assert int(after.length[0]) == 92 + room
    assert np.isfinite(out).all()
    assert int(info.positions.max()) < 92 + room
    with pytest.raises(RuntimeError, match="dropped"):
        kvjax.raise_on_overflow(after)
