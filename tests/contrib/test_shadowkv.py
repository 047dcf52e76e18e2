"""ShadowKV against numpy written from its paper: factors of low rank, outliers, landmarks and a
step.
"""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Dense, Fifo, HostOffload, models, presets
from kvjax.contrib.shadowkv import LowRank, MeanPages, OutlierRetrieval
from kvjax.testing import _drive as drive
from tests import oracles
from tests.test_oracles import data, steps

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=160, dtype="float32")
RANK, PAGE, OUTLIERS, LEARN, SINK, LOCAL, PAGES = 12, 4, 3, 32, 3, 6, 5
THETA = 50.0


def turned(k: np.ndarray, positions: np.ndarray, sign: int) -> np.ndarray:
    """f64 keys [n, K, D], channels i and i + D/2 turned by position * THETA^(-2i/D)."""
    D = k.shape[2]
    angle = sign * positions[:, None] * THETA ** (-2 * np.arange(D // 2) / D)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = k[..., : D // 2].astype(np.float64), k[..., D // 2 :].astype(np.float64)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def rebuilt(k: np.ndarray, end: int, rope: bool) -> np.ndarray:
    """f64 keys [n, K, D] as a row's factors give them back, of positions [SINK, end)."""
    positions = np.arange(SINK, end)
    plain = turned(k[SINK:end], positions if rope else 0 * positions, -1)
    flat = plain.reshape(len(plain), -1)
    basis = np.linalg.svd(flat[:LEARN], full_matrices=False)[2][:RANK]
    return turned(
        (flat @ basis.T @ basis).reshape(plain.shape), positions if rope else 0 * positions, 1
    )


def straying(page: np.ndarray) -> float:
    """The smallest cosine of a key of a page [Z, D] to its mean."""
    page = page.astype(np.float64)
    mean = page.mean(axis=0)
    return (page @ mean / np.linalg.norm(page, axis=1) / np.linalg.norm(mean)).min()


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ("random", True),
        pytest.param("random", False, marks=pytest.mark.thorough),
        pytest.param("live", True, marks=pytest.mark.thorough),
    ],
)
def test_a_step_attends_as_the_oracle(keys: str, rope: bool, checkpoint: str | None) -> None:
    turning = models.rope.Default(theta=THETA) if rope else None
    values = HostOffload(page=PAGE) if rope else Dense()
    policy = OutlierRetrieval(
        selector=MeanPages(page=PAGE),
        store=LowRank(
            rank=RANK, page=PAGE, outliers=OUTLIERS, learn=LEARN, rope=turning, values=values
        ),
        budget=SINK + LOCAL + (OUTLIERS + PAGES) * PAGE,
        sink=SINK,
        local=LOCAL,
        demote=Fifo(leave=LEARN),
    )
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    same = total = 0
    for at in steps(policy, spec, tokens):
        end, stop = oracles.history_end(at.held, SINK, LOCAL, LEARN), at.held - LOCAL
        k = at.k.astype(np.float64)
        k[SINK:end] = rebuilt(tokens.k[at.row], end, rope)[:, at.head]
        stored = [list(range(p, p + PAGE)) for p in range(SINK, end, PAGE)]
        kept = sorted(sorted(stored, key=lambda page: straying(at.k[page]))[:OUTLIERS])
        for page in kept:
            k[page] = at.k[page]
        pending = [list(range(p, min(p + PAGE, stop))) for p in range(end, stop, PAGE)]
        others = [page for page in stored if page not in kept] + pending
        exact = at.q.astype(np.float64) @ at.k.astype(np.float64).T * spec.head_dim**-0.5
        scores = np.array(
            [
                exact[:, p].mean(axis=1) if p[0] < end else exact[:, p].max(axis=1)
                for p in others
            ]
        ).T
        best = np.argsort(-oracles.pooled(scores, "max_softmax")[0], kind="stable")[:PAGES]
        chosen = [t for page in [*kept, *(others[i] for i in best)] for t in page]
        chosen = sorted({*range(SINK), *chosen, *range(stop, at.held)})
        want, _ = oracles.attention(at.q, k[chosen], at.v[chosen], spec.head_dim**-0.5)
        same += bool(np.abs(at.out - want).max() <= 5e-5 * max(1.0, np.abs(want).max()))
        total += 1
    assert same >= 0.97 * total, (same, total)


def test_keys_of_low_rank_come_back_and_a_full_rank_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    low = (rng.normal(size=(96, 5)) @ rng.normal(size=(5, 32))).reshape(96, 2, 16)
    for rank, plain, rope in ((5, low, True), (40, rng.normal(size=(96, 2, 16)), False)):
        k = turned(plain, np.arange(96), 1) if rope else plain
        k = np.moveaxis(k, 1, 0)[None].astype(np.float32)
        turning = models.rope.Default(theta=THETA) if rope else None
        store = LowRank(rank=rank, page=8, outliers=0, learn=48, rope=turning, values=Dense())
        got, v = jax.jit(store.decoded)(k, k)
        np.testing.assert_allclose(got, k, atol=2e-4)
        np.testing.assert_array_equal(v, k)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("size", [1.0, 2e4, 6e4])
def test_keys_of_float16_come_back_up_to_the_largest(size: float, rope: bool) -> None:
    rng = np.random.default_rng(0)
    low = np.sign(rng.normal(size=(96, 1))) * np.sign(rng.normal(size=(1, 64)))
    plain = (size * low).reshape(96, 4, 16)
    if rope:  # turning may make one of a pair larger than both
        plain = turned(plain / 1.5, np.arange(96), 1)
    k = plain.swapaxes(0, 1)[None].astype(np.float16)
    turning = models.rope.Default(theta=THETA) if rope else None
    store = LowRank(rank=40, page=8, outliers=0, learn=48, rope=turning, values=Dense())
    got, _ = jax.jit(store.decoded)(k, k)
    error = np.abs(np.asarray(got, np.float64) - k.astype(np.float64))
    assert error.max() < 0.005 * size


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: LowRank(learn=100),
            r"learn=100.*whole pages of 8.*rank=160; use a multiple of 8 from 160 on",
        ),
        (lambda: LowRank(page=4), r"page=4.*HostOffload\(page=8\); use HostOffload\(page=4\)"),
        (
            lambda: presets.shadowkv(budget=300),
            r"budget=300 is below sink \+ local \+ outliers.*at least",
        ),
        (lambda: OutlierRetrieval(store=Dense()), r"a store of exact pages"),
        (
            lambda: OutlierRetrieval(selector=MeanPages(page=16)),
            r"units of 16.*pages of 8; use pages of one size",
        ),
        (
            lambda: kvjax.init_layer(OutlierRetrieval(demote=Fifo(leave=96)), SPEC),
            r"learn=1024.*chunks of 96",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("budget", "group_reduce"), [(64, "mean_query"), (4 + 8 + 8, "max_softmax")]
)
def test_a_step_and_several_take_every_group_rule_and_a_budget_of_what_is_read_anyway(
    budget: int, group_reduce: str
) -> None:
    policy = OutlierRetrieval(
        selector=MeanPages(page=4, group_reduce=group_reduce),
        store=LowRank(rank=8, page=4, outliers=2, learn=16, values=kvjax.Dense()),
        budget=budget,
        local=8,
        demote=kvjax.Fifo(leave=16),
    )
    q, k, v = (jax.ShapeDtypeStruct((2, 3, heads, 16), "float32") for heads in (4, 2, 2))
    _, _, info = jax.eval_shape(kvjax.decode_info, kvjax.init_layer(policy, SPEC), q, k, v)
    assert info.attended.shape == (3, 2, 2)
    plain = kvjax.Retrieval(
        selector=MeanPages(page=8),
        budget=12,
        sink=4,
        local=8,
        demote=kvjax.Fifo(leave=16),
    )
    _, _, info = jax.eval_shape(kvjax.decode_info, kvjax.init_layer(plain, SPEC), q, k, v)
    assert info.attended.shape == (3, 2, 2)
