"""MagicPIG against numpy written from its paper: hashes, probabilities and the estimate of attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Fifo, HostOffload, Sampled, SimHash
from kvjax.hashing import _directions
from kvjax.testing import _drive as drive
from tests import oracles
from tests.test_oracles import data, steps

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=180, dtype="float32")
SINK, LOCAL, CHUNK, BITS, TABLES = 3, 5, 16, 3, 40
BESIDE = SINK + LOCAL + CHUNK - 1


def tables_of(x: np.ndarray) -> np.ndarray:
    """i[n, TABLES] hashes of vectors [n, D]; direction j of table t is column 32 (j W + t // 32) + t % 32."""
    directions = _directions(0, x.shape[1], BITS * 64).astype(np.float64).reshape(-1, BITS, 64)[:, :, :TABLES]
    signs = np.einsum("nd,djt->njt", x, directions) >= 0
    return (signs * 2 ** np.arange(BITS)[:, None]).sum(axis=1)


def inclusion(cosine: float, least: int) -> float:
    x = (1 - math.acos(cosine) / math.pi) ** BITS
    return 1 - sum(math.comb(TABLES, i) * x**i * (1 - x) ** (TABLES - i) for i in range(least))


def estimate(q: np.ndarray, k: np.ndarray, v: np.ndarray, room: int, least: int) -> tuple[np.ndarray, int]:
    """Attention [D] of a query [D] over k, v [n, D], whose last tokens from the history's end on are exact."""
    n = len(k)
    end = oracles.history_end(n - 1, SINK, LOCAL - 1, CHUNK)  # a step flushes before its token comes
    q, k = q.astype(np.float64), k.astype(np.float64)
    logits, history = k @ q / math.sqrt(len(q)), np.arange(SINK, end)
    exact = [*range(SINK), *range(end, n)]
    if len(history) > room:
        centred = k[history] - k[SINK : SINK + CHUNK].mean(axis=0)
        hits = (tables_of(centred) == tables_of(q[None])).sum(axis=1) >= least
        found = int(hits.sum())
        order = (np.arange(len(history), dtype=np.uint64) * 2654435769 % 2**32) >> 8
        kept = [i for i in np.argsort(-order.astype(np.int64), kind="stable") if hits[i]][:room]
        cosines = centred @ q / np.linalg.norm(centred, axis=1) / np.linalg.norm(q)
        for i in kept:
            logits[SINK + i] -= math.log(inclusion(cosines[i], least) * min(1, room / found))
        history = history[kept]
    at = [*exact, *history]
    weights = np.exp(logits[at] - logits[at].max())
    return weights @ v[at].astype(np.float64) / weights.sum(), len(at)


@pytest.mark.parametrize(
    ("least", "room", "keys"),
    [
        (5, 60, "random"),
        pytest.param(2, 30, "random", marks=pytest.mark.thorough),
        pytest.param(5, 60, "live", marks=pytest.mark.thorough),
    ],
    ids=["room for all", "too little room", "keys of a model"],
)
def test_a_step_gives_the_estimate_of_the_oracle(least: int, room: int, keys: str, checkpoint: str | None) -> None:
    hashing = SimHash(bits=BITS, tables=TABLES, least=least, learn=CHUNK)
    policy = Sampled(hashing=hashing, budget=BESIDE + room, sink=SINK, local=LOCAL, demote=Fifo(leave=CHUNK))
    same, total, sampled = 0, 0, 0
    spec, tokens = (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    for at in steps(policy, spec, tokens):
        for g in range(spec.group):
            want, read = estimate(at.q[g], at.k, at.v, room, least)
            same += bool(np.abs(at.out[g] - want).max() <= 1e-4 * max(1.0, np.abs(want).max()))
            sampled += read < at.held
            total += 1
    assert sampled > total / 2, "most steps read everything"
    assert same >= 0.98 * total, (same, total)  # a product near 0 may be rounded to the other sign


def test_probability_of_a_sample_is_that_of_its_hashes() -> None:
    """Over many draws of directions, keys are sampled as often as `inclusion` says, and at small values accurately."""
    hashing, rng = SimHash(bits=3, tables=8, least=2), np.random.default_rng(0)
    cosines = np.array([-0.5, 0.0, 0.4, 0.8, 0.97])
    told = np.asarray(hashing.inclusion(jnp.asarray(1 - np.arccos(cosines) / np.pi, jnp.float32)))
    draws = rng.normal(size=(20_000, 24, 2))
    same = [
        ((draws @ [1, 0] >= 0) == (draws @ [c, math.sqrt(1 - c * c)] >= 0)).reshape(-1, 8, 3).all(axis=2).sum(axis=1)
        >= 2
        for c in cosines
    ]
    np.testing.assert_allclose(told, np.mean(same, axis=1), atol=0.015)
    paper, x = SimHash(), 0.05**10  # far apart: a sum from above would cancel
    want = math.comb(150, 2) * x**2
    np.testing.assert_allclose(float(paper.inclusion(jnp.float32(0.05))), want, rtol=1e-3)


def test_estimates_average_to_attention_over_directions() -> None:
    """A weighted sum over the sample is unbiased: over many draws its mean comes near the sum over all."""
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(1, 1, n, 16)).astype(np.float32) for n in (1, 96))
    spec = CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=16, capacity=128, dtype="float32")
    hashing = SimHash(bits=2, tables=12, least=2, learn=32)

    @jax.jit
    def log_probability(k, q):
        ix = hashing.append(hashing.init(spec, 96), k, jnp.zeros(1, jnp.int32), jnp.full(1, 96, jnp.int32))
        return hashing.log_probability(ix, q, k[:, :, None])[0, 0, 0]

    weights = np.exp(k[0, 0] @ q[0, 0, 0] / 4)
    inverse = np.exp(-np.asarray(log_probability(k, q)))
    centred = k[0, 0] - k[0, 0, :32].mean(axis=0)
    directions = rng.normal(size=(400, 16, 24))
    same = (np.einsum("sdt,nd->snt", directions, centred) >= 0) == (q[0, 0] @ directions >= 0)
    hits = same.reshape(400, 96, 12, 2).all(axis=3).sum(axis=2) >= 2
    sums = hits @ (weights * inverse)
    assert abs(sums.mean() / weights.sum() - 1) < 0.03
    assert sums.std() > 0.01 * weights.sum()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SimHash(least=3, tables=2), r"least=3.*tables=2"),
        (lambda: Sampled(budget=300), r"budget=300.*sink=4.*319 tokens; use at least 324"),
        (lambda: Sampled(store=HostOffload(page=8)), r"HostOffload\(page=8\) moves whole pages"),
        (
            lambda: kvjax.init_layer(Sampled(demote=Fifo(leave=64), budget=512), SPEC),
            r"SimHash\(learn=256\).*chunks of 64; use Fifo\(leave=256\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
