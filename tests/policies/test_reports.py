"""What a step tells of the tokens that it read, where zones are empty, short of one token, or
just full.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Compressed, Dense, Exact, Fifo, PerHead, Policy, Retrieval
from kvjax.contrib.magicpig import Sampled, SimHash

SINK, T, WINDOW = 4, 2, 6
SPEC = CacheSpec(batch=5, q_heads=4, kv_heads=2, head_dim=8, capacity=48, dtype=jnp.float32)
LENGTHS = np.array([0, SINK - 2, SINK - 1, SINK, 29], np.int32)
ZONES = {"sink": SINK, "local": 4, "demote": Fifo(leave=8)}
BY_HEAD = Retrieval(selector=Exact(group_reduce="per_head"), budget=48, **ZONES)
POLICIES: dict[str, Policy] = {
    "by hashes": Sampled(hashing=SimHash(bits=2, tables=4, learn=8), budget=48, **ZONES),
    # Lists of positions of different number and length; one head reads all tokens.
    "by head": PerHead(heads=(1,), selected=BY_HEAD, others=Compressed(store=Dense(), **ZONES)),
}
fill = jax.jit(kvjax.prefill)
decode = jax.jit(kvjax.decode_info, static_argnames="window")


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_tells_the_positions_of_all_that_it_read_and_their_number(name: str) -> None:
    rng = np.random.default_rng(0)

    def tokens(length: int) -> list[np.ndarray]:
        return [
            rng.normal(size=(5, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2)
        ]

    _, cache = fill(kvjax.init_layer(POLICIES[name], SPEC), *tokens(29), lengths=LENGTHS)
    new = tokens(T)
    for window in (None, WINDOW):
        _, _, info = decode(cache, *new, window=window)
        positions, attended = np.asarray(info.positions), np.asarray(info.attended)
        for t, b, head, choice in np.ndindex(positions.shape[:4]):
            held = LENGTHS[b] + t + 1
            read = positions[t, b, head, choice]
            want = range(0 if window is None else max(held - window, 0), held)
            assert sorted(read[read >= 0].tolist()) == list(want), (window, t, b, head, choice)
            assert attended[t, b, head] == len(want)
