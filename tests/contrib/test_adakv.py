"""AdaKV against numpy written from its paper: which tokens each KV head keeps."""

import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, Observation, Sliding, presets
from kvjax.contrib.adakv import HeadBudgets
from kvjax.testing import _drive as drive
from kvjax.testing._expect import held_positions
from tests.test_oracles import data

SPEC = CacheSpec(batch=2, q_heads=6, kv_heads=3, head_dim=16, capacity=100, dtype="float32")
BUDGET, WINDOW, KERNEL = 12, 3, 3


def votes(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """f64[n] of a KV head: votes of the last queries, q [WINDOW, G, D], for keys [n, D]; inf
    for their own tokens.
    """
    n, total = len(k), np.zeros(len(k))
    for i, queries in enumerate(q.astype(np.float64)):
        seen = n - WINDOW + i + 1
        for query in queries:
            logits = k[:seen].astype(np.float64) @ query / np.sqrt(len(query))
            weights = np.exp(logits - logits.max())
            total[:seen] += weights / weights.sum()
    total[-WINDOW:] = -np.inf
    side = KERNEL // 2
    pooled = np.array([total[max(i - side, 0) : i + side + 1].max() for i in range(n)])
    pooled[-WINDOW:] = np.inf
    return pooled


def allotted(worth: np.ndarray, floor: float, most: float) -> list[list[int]]:
    """Positions that each head keeps, for worth [K, n]: its best for certain, then the best of
    all heads.
    """
    ranked = [
        sorted(range(len(w)), key=lambda p, w=w: (-w[p], -p))[: int(most * BUDGET)]
        for w in worth
    ]
    certain, kept, rest = WINDOW + int(floor * (BUDGET - WINDOW)), [], []
    for head, (own, order) in enumerate(zip(worth, ranked, strict=True)):
        kept.append([p for i, p in enumerate(order) if i < certain or own[p] == np.inf])
        rest += [(-own[p], i, head, p) for i, p in enumerate(order) if p not in kept[head]]
    for _, _, head, position in sorted(rest)[: len(worth) * BUDGET - sum(map(len, kept))]:
        kept[head].append(position)
    return [sorted(positions) for positions in kept]


def sharp_and_wide() -> drive.Tokens:
    """Random tokens, whose heads attend from widely to sharply."""
    drawn = drive.random_tokens(SPEC, 2)
    q = drawn.q.reshape(2, 100, 3, 2, 16) * np.array([0.1, 0.8, 2.0])[None, None, :, None, None]
    return drive.Tokens(q.reshape(drawn.q.shape).astype(np.float32), drawn.k, drawn.v)


@pytest.mark.parametrize(
    ("floor", "most", "keys"),
    [
        (0.5, 1.5, "random"),
        pytest.param(0.0, 3.0, "random", marks=pytest.mark.thorough),
        pytest.param(0.2, 2.0, "live", marks=pytest.mark.thorough),
    ],
)
def test_heads_keep_what_the_oracle_allots_them(
    floor: float, most: float, keys: str, checkpoint: str | None
) -> None:
    evictor = Observation(window=WINDOW, kernel_size=KERNEL)
    policy = HeadBudgets(evictor=evictor, budget=BUDGET, floor=floor, ceiling=most)
    spec, tokens = (SPEC, sharp_and_wide()) if keys == "random" else data(checkpoint)["live"]
    B, K, G, D = spec.batch, spec.kv_heads, spec.group, spec.head_dim
    lengths = np.resize([33, 40], B)  # within one call of `fill`
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    worth, kept = [], []
    for row, n in enumerate(lengths):
        asked = tokens.q[row, n - WINDOW : n].reshape(WINDOW, K, G, D)
        worth.append(np.array([votes(asked[:, h], tokens.k[row, :n, h]) for h in range(K)]))
        kept.append(allotted(worth[-1], floor, most))
    assert [[sorted(head) for head in row] for row in held_positions(cache)] == kept
    counts = {len(head) for row in kept for head in row}
    assert min(counts) < BUDGET < max(counts), "heads keep equally many"

    for i in range(
        20
    ):  # a head evicts its own tokens, and generated ones once none of the prompt's are left
        _, cache, info = drive.step(cache, tokens, lengths + i)
        for row, head in np.ndindex(B, K):
            mine = kept[row][head]
            value = np.append(worth[row][head], np.full(20, np.inf))
            mine.remove(min(mine, key=lambda p, value=value: (value[p], p)))
            mine.append(int(lengths[row]) + i)
        assert [[sorted(head) for head in row] for row in held_positions(cache)] == kept
        np.testing.assert_array_equal(
            info.attended, [[len(head) for head in row] for row in kept]
        )


def test_short_prompts_leave_room_and_later_ones_divide_it() -> None:
    policy, tokens = presets.adakv(budget=BUDGET, window=WINDOW).rest, drive.random_tokens(SPEC)
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, np.array([5, 12]))
    assert np.asarray(cache.state.head_counts).tolist() == [[5] * 3, [12] * 3]
    assert (np.asarray(cache.state.limit) == BUDGET).all()
    cache, _ = drive.fill(cache, tokens, np.array([12, 40]), start=np.array([5, 12]))
    counts = np.asarray(cache.state.head_counts)
    assert counts.sum(axis=1).tolist() == [36, 36]
    assert (counts[0] == 12).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: presets.adakv(floor=1.5), r"floor=1.5.*at least 0 and at most 1"),
        (lambda: presets.adakv(ceiling=0.5), r"ceiling=0.5.*at least 1 and at most"),
        (lambda: HeadBudgets(evictor=Sliding()), r"Sliding.*ranks tokens by position alone"),
        (lambda: Evicting(evictor=Observation(), budget=1), r"at least 2, got 1"),
    ],
)
def test_what_cannot_work_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
