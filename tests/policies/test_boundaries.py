"""What holds one token below a limit, at it, and one above it, for each policy that keeps all
tokens.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Compressed, Dense, Fier, Fifo, Full, LogSparse, Policy, Retrieval

SPEC = CacheSpec(batch=1, q_heads=2, kv_heads=1, head_dim=16, capacity=64, dtype=jnp.float32)
ZONES = Retrieval(
    selector=Fier(group=16), budget=32, sink=4, local=8, demote=Fifo(leave=16), dense_below=0
)
POLICIES: dict[str, Policy] = {
    "full": Full(),
    "retrieval": ZONES,
    "log sparse": Compressed(store=Dense(), sink=0, local=8, demote=LogSparse(window=8)),
}


def holds(policy: Any) -> int:
    """Tokens that fit in all zones of a row together."""
    state = policy.init(SPEC)
    if isinstance(policy, Full):
        return state.tokens.slots
    return (
        state.recent.slots + state.store.slots + (0 if state.sink is None else state.sink.slots)
    )


LONGEST = 160
attend = jax.jit(kvjax.attention, static_argnames="first_chunk")
attend_info = jax.jit(kvjax.attention_info)


def tokens(length: int) -> list[jnp.ndarray]:
    rng = np.random.default_rng(length)
    return [
        jnp.asarray(rng.normal(size=(1, length, heads, 16)), jnp.float32) for heads in (2, 1, 1)
    ]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("excess", [-1, 0, 1])
@pytest.mark.parametrize("how", ["prompt", "prompt and steps"])
def test_a_token_without_room_is_reported_and_no_other(
    name: str, excess: int, how: str
) -> None:
    policy = POLICIES[name]
    length = holds(policy) + excess
    new = [np.asarray(x) for x in tokens(LONGEST)]
    cut = length if how == "prompt" else holds(policy) - 2
    _, cache = attend(
        kvjax.init_layer(policy, SPEC), *new, lengths=np.array([cut]), first_chunk=True
    )
    for i in range(cut, length):
        _, cache = attend(cache, *(x[:, i : i + 1] for x in new))
    assert bool(cache.state.overflow[0]) == (excess > 0)
    assert int(cache.length[0]) == min(length, holds(policy))


@pytest.mark.parametrize("name", ["full", "retrieval"])
def test_lengths_at_the_ends_are_taken_and_those_beyond_refused(name: str) -> None:
    policy: Any = POLICIES[name]
    q, k, v = tokens(30)
    _, cache = kvjax.prefill(kvjax.init_layer(policy, SPEC), q, k, v)
    for good in (0, 1, 29, 30):
        assert int(kvjax.truncate(cache, [good]).length[0]) == good
    for bad in (-1, 31):
        with pytest.raises(ValueError, match=f"to {bad} tokens"):
            kvjax.truncate(cache, [bad])
    earliest = int(policy.earliest(cache.state)[0])
    assert int(kvjax.rollback(cache, [earliest]).length[0]) == earliest
    for bad in (earliest - 1, 31):
        with pytest.raises(ValueError, match=f"to {bad} tokens"):
            kvjax.rollback(cache, [bad])


def test_the_smallest_budget_is_that_of_sink_and_local_window() -> None:
    for budget in (12, 13):
        assert replace(ZONES, budget=budget).budget == budget
    with pytest.raises(ValueError, match="is below sink"):
        replace(ZONES, budget=11)


SPARSE: dict[str, Policy] = {  # one that selects single tokens has rows in test_bounds.py
    "by pages": replace(
        ZONES,
        selector=kvjax.selectors.MinMaxPages(page=8),
        demote=Fifo(leave=8),
        dense_below=50,
    ),
    "a step late": kvjax.Speculative(replace(ZONES, dense_below=50), tau=0.5),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_rows_of_fewer_than_dense_below_tokens_attend_to_all(name: str, excess: int) -> None:
    length = 50 + excess
    new = [np.asarray(x) for x in tokens(51)]
    cache = kvjax.init_layer(SPARSE[name], SPEC)
    # one shape for all lengths
    _, cache = attend(
        cache, *(x[:, :50] for x in new), lengths=np.array([length - 1]), first_chunk=True
    )
    _, _, info = attend_info(cache, *(x[:, length - 1 : length] for x in new))
    assert info is not None
    attended = float(info.attended[0, 0])
    assert attended == length if excess < 0 else attended < length
