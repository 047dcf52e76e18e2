"""The oracle selector against true scores in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Exact, Fifo, Retrieval
from kvjax.numerics.selection import GROUP_REDUCES
from kvjax.testing import _drive as drive
from tests.oracles import agrees, pooled
from tests.selectors.test_fier import picks

SPEC = CacheSpec(batch=2, q_heads=8, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)


@pytest.mark.parametrize(
    "group_reduce",
    [
        "mean_softmax",
        *(
            pytest.param(p, marks=pytest.mark.thorough)
            for p in GROUP_REDUCES
            if p != "mean_softmax"
        ),
    ],
)
def test_picks_the_best_true_scores(group_reduce: str) -> None:
    policy = Retrieval(
        selector=Exact(group_reduce=group_reduce),
        budget=20,
        sink=0,
        local=1,
        demote=Fifo(leave=16),
        dense_below=0,
    )
    tokens, lengths = drive.random_tokens(SPEC), np.array([150, 12])
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, lengths)
    for i in range(18):
        _, cache, info = drive.step(cache, tokens, lengths + i)
        for row, n in enumerate(lengths + i + 1):
            q = tokens.q[:, n - 1]
            found = picks(info, row, 0, n - 1)
            for head in range(2):
                queries, keys = q[row, head * 4 : head * 4 + 4], tokens.k[row, : n - 1, head]
                ranks = pooled(
                    queries.astype(np.float64) @ keys.astype(np.float64).T / 4, group_reduce
                )
                for choice, mine in enumerate(found[head]):
                    assert agrees(mine, ranks[choice], min(19, n - 1)), (row, head, choice, i)


def test_index_is_a_copy_of_the_keys() -> None:
    policy = kvjax.presets.exact(budget=64).policy(2)
    spec = CacheSpec(batch=1, q_heads=8, kv_heads=2, head_dim=128, capacity=4096)
    layer = kvjax.init_layer(policy, spec)
    assert layer.state.index.nbytes == layer.state.store.k.nbytes
    assert policy.selector.bytes_per_token(spec) == 2 * 128 * 2
    assert kvjax.presets.exact().policy(1) == kvjax.Full()
