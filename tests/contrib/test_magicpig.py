"""MagicPIG against numpy written from its paper: hashes, probabilities and the estimate of
attention.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import kvjax
from kvjax import CacheSpec, Fifo, HostOffload
from kvjax.contrib import magicpig as hashing
from kvjax.contrib.magicpig import HashIndex, Sampled, SimHash, _directions
from kvjax.testing import _drive as drive
from tests import oracles
from tests.test_oracles import data, steps

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=180, dtype="float32")
SINK, LOCAL, CHUNK, BITS, TABLES = 3, 5, 16, 3, 40
BESIDE = SINK + LOCAL + CHUNK - 1


def tables_of(x: np.ndarray) -> np.ndarray:
    """i[n, TABLES] hashes of vectors [n, D]; direction j of table t is column 32 (j W + t //
    32) + t % 32.
    """
    directions = (
        _directions(0, x.shape[1], BITS * 64)
        .astype(np.float64)
        .reshape(-1, BITS, 64)[:, :, :TABLES]
    )
    signs = np.einsum("nd,djt->njt", x, directions) >= 0
    return (signs * 2 ** np.arange(BITS)[:, None]).sum(axis=1)


def centres(k: np.ndarray, learn: int) -> np.ndarray:
    """The centre of each of the first keys [n, D] of a history: the mean of 1, 1, 2, 2, 4, 4,
    4, 4, 8, ... blocks.
    """
    found = []
    for i in range(len(k)):
        blocks = 1
        while 2 * blocks <= i // learn:
            blocks *= 2
        found.append(k[: blocks * learn].astype(np.float64).mean(axis=0))
    return np.array(found)


def inclusion(cosine: float, least: int) -> float:
    x = (1 - math.acos(cosine) / math.pi) ** BITS
    return 1 - sum(math.comb(TABLES, i) * x**i * (1 - x) ** (TABLES - i) for i in range(least))


def estimate(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, room: int, least: int
) -> tuple[np.ndarray, int]:
    """Attention [D] of a query [D] over k, v [n, D], whose last tokens from the history's end
    on are exact.
    """
    n = len(k)
    end = oracles.history_end(
        n - 1, SINK, LOCAL - 1, CHUNK
    )  # a step flushes before its token comes
    q, k = q.astype(np.float64), k.astype(np.float64)
    logits, history = k @ q / math.sqrt(len(q)), np.arange(SINK, end)
    exact = [*range(SINK), *range(end, n)]
    if len(history) > room:
        centred = k[history] - centres(k[history], CHUNK)
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
def test_a_step_gives_the_estimate_of_the_oracle(
    least: int, room: int, keys: str, checkpoint: str | None
) -> None:
    method = SimHash(bits=BITS, tables=TABLES, least=least, learn=CHUNK)
    policy = Sampled(
        hashing=method, budget=BESIDE + room, sink=SINK, local=LOCAL, demote=Fifo(leave=CHUNK)
    )
    same, total, sampled = 0, 0, 0
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    for at in steps(policy, spec, tokens):
        for g in range(spec.group):
            want, read = estimate(at.q[g], at.k, at.v, room, least)
            same += bool(np.abs(at.out[g] - want).max() <= 1e-4 * max(1.0, np.abs(want).max()))
            sampled += read < at.held
            total += 1
    assert sampled > total / 2, "most steps read everything"
    assert same >= 0.98 * total, (
        same,
        total,
    )  # a product near 0 may be rounded to the other sign


def test_probability_of_a_sample_is_that_of_its_hashes() -> None:
    """Over many draws of directions, keys are sampled as often as `inclusion` says, and at
    small values accurately.
    """
    method, rng = SimHash(bits=3, tables=8, least=2), np.random.default_rng(0)
    cosines = np.array([-0.5, 0.0, 0.4, 0.8, 0.97])
    told = np.asarray(
        method.inclusion(jnp.asarray(1 - np.arccos(cosines) / np.pi, jnp.float32))
    )
    draws = rng.normal(size=(20_000, 24, 2))
    same = [
        ((draws @ [1, 0] >= 0) == (draws @ [c, math.sqrt(1 - c * c)] >= 0))
        .reshape(-1, 8, 3)
        .all(axis=2)
        .sum(axis=1)
        >= 2
        for c in cosines
    ]
    np.testing.assert_allclose(told, np.mean(same, axis=1), atol=0.015)
    for many in (
        SimHash(bits=4, tables=150, least=20),
        SimHash(bits=1, tables=4096, least=2100),
    ):
        alike = np.linspace(0.4, 0.9, 11)
        exact = scipy.stats.binom.sf(many.least - 1, many.tables, alike**many.bits)
        often = exact > 1e-6
        told = np.asarray(many.inclusion(jnp.asarray(alike, jnp.float32)))
        np.testing.assert_allclose(told[often], exact[often], rtol=0.02)
    paper, x = SimHash(), 0.05**10  # far apart: a sum from above would cancel
    want = math.comb(150, 2) * x**2
    np.testing.assert_allclose(float(paper.inclusion(jnp.float32(0.05))), want, rtol=1e-3)


def append(
    method: SimHash, ix: HashIndex, k: np.ndarray, parts: list[list[int]], at: list[int]
) -> HashIndex:
    """The index after keys [B, K, T, D], of which row b gets parts[i][b] in call i; NaN past
    its count.
    """
    at_row = np.array(at, np.int32)
    for part in np.array(parts, np.int32):
        T = max(part.max(), method.learn)
        given = np.full((*k.shape[:2], T, k.shape[3]), np.nan, np.float32)
        for row, (start, count) in enumerate(zip(at_row, part, strict=True)):
            given[row, :, :count] = k[row, :, start : start + count]
        ix = append_jit(method, ix, given, at_row, part)
        at_row = at_row + part
    return ix


append_jit = jax.jit(SimHash.append, static_argnums=0)
BLOCKS = [11, 6, 2]  # of three rows
RAGGED = {
    "at once": [BLOCKS],
    "a block at a time": [[int(i < n) for n in BLOCKS] for i in range(11)],
    "some rows wait": [[1, 0, 2], [0, 5, 0], [3, 1, 0], [7, 0, 0]],
}


@pytest.mark.parametrize("learn", [1, 6, 16])
def test_key_is_centred_by_the_mean_of_the_blocks_before_it(learn: int) -> None:
    method, rng = SimHash(bits=BITS, tables=TABLES, learn=learn), np.random.default_rng(0)
    spec = CacheSpec(
        batch=3, q_heads=4, kv_heads=2, head_dim=16, capacity=11 * learn, dtype="float32"
    )
    k = (rng.normal(size=(3, 2, 11 * learn, 16)) + 5).astype(np.float32)
    q = rng.normal(size=(3, 2, 2, 16)).astype(np.float32)
    counts = learn * np.array(BLOCKS)
    ix = append(method, method.init(spec, 11 * learn), k, [counts.tolist()], [0, 0, 0])
    place = np.broadcast_to(np.arange(11 * learn, dtype=np.int32), (3, 2, 2, 11 * learn))
    keys = np.broadcast_to(k[:, :, None], (3, 2, 2, *k.shape[2:]))
    found = np.exp(jax.jit(method.log_probability)(ix, q, keys, place))
    hits = np.asarray(jax.jit(method.hits)(ix, q))
    for b, h, g in np.ndindex(3, 2, 2):
        centred = k[b, h, : counts[b]] - centres(k[b, h, : counts[b]], learn)
        norms = np.linalg.norm(centred, axis=1) * np.linalg.norm(q[b, h, g])
        cosines = centred @ q[b, h, g] / np.maximum(norms, 1e-30)
        far = norms > 1e-3  # a block of one key is its own centre
        want = [inclusion(min(c, 1.0), 2) for c in cosines[far]]
        np.testing.assert_allclose(found[b, h, g, : counts[b]][far], want, rtol=1e-3, atol=1e-6)
        same = (tables_of(centred[far]) == tables_of(q[b, h, g][None])).sum(axis=1)
        assert (
            np.mean(hits[b, h, g, : counts[b]][far] == (same >= 2)) > 0.98
        )  # a product near 0 may be rounded


def test_hits_of_a_head_do_not_depend_on_its_group() -> None:
    """Nor on its place in a group of more heads than a word has bits."""
    method, rng = SimHash(bits=BITS, tables=TABLES, learn=CHUNK), np.random.default_rng(0)
    spec = CacheSpec(
        batch=2, q_heads=140, kv_heads=2, head_dim=16, capacity=4 * CHUNK, dtype="float32"
    )
    k = rng.normal(size=(2, 2, 4 * CHUNK, 16)).astype(np.float32)
    q = rng.normal(size=(2, 2, 70, 16)).astype(np.float32)
    ix = append(method, method.init(spec, 4 * CHUNK), k, [[4 * CHUNK] * 2], [0, 0])
    hits_of = jax.jit(method.hits)
    hits = np.asarray(hits_of(ix, q))
    for g in range(70):
        np.testing.assert_array_equal(
            hits[:, :, g], np.asarray(hits_of(ix, q[:, :, g : g + 1]))[:, :, 0]
        )
    assert 0.05 < hits.mean() < 0.95


@pytest.mark.parametrize("split", list(RAGGED)[1:])
@pytest.mark.parametrize("learn", [6, 16])
def test_index_does_not_depend_on_how_rows_are_split(split: str, learn: int) -> None:
    """To the bit. Other rows, padding and what a row held before do not matter either."""
    method, rng = SimHash(bits=BITS, tables=TABLES, learn=learn), np.random.default_rng(0)
    spec = CacheSpec(
        batch=3, q_heads=4, kv_heads=2, head_dim=16, capacity=11 * learn, dtype="float32"
    )
    k, other = (rng.normal(size=(3, 2, 11 * learn, 16)).astype(np.float32) for _ in range(2))
    empty = method.init(spec, 11 * learn)
    used = append(method, empty, other, [[11 * learn] * 3], [0, 0, 0])
    counts = learn * np.array(BLOCKS)
    whole = append(method, empty, k, [counts.tolist()], [0, 0, 0])
    for start in (empty, used):
        ix = append(
            method, start, k, [[learn * n for n in part] for part in RAGGED[split]], [0, 0, 0]
        )
        np.testing.assert_array_equal(ix.total, whole.total)
        np.testing.assert_array_equal(ix.centres, whole.centres)
        for row, count in enumerate(counts):
            tiles = count // method.tile
            np.testing.assert_array_equal(ix.words[row, :, :tiles], whole.words[row, :, :tiles])
    assert np.isfinite(whole.total).all()
    assert np.isfinite(whole.centres).all()


def test_estimates_of_drifting_keys_average_to_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean of the keys moves by four times their spread. Over directions the estimate is
    unbiased, and has a smaller error than with the first block's mean as the only centre."""
    method, rng, n, draws = (
        SimHash(bits=4, tables=32, least=2, learn=16),
        np.random.default_rng(1),
        512,
        400,
    )
    spec = CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=16, capacity=n, dtype="float32")
    drift, q = rng.normal(size=(2, 16))
    drift /= np.linalg.norm(drift)
    q -= (q @ drift + 2) * drift  # newer keys lie away from the query
    k = rng.normal(size=(n, 16)) + np.linspace(0, 16, n)[:, None] * drift
    v, q, k = rng.normal(size=(n, 16)), q.astype(np.float32), k.astype(np.float32)
    weights = np.exp(k @ q / 4)
    weights /= weights.sum()

    def sampled(key):
        monkeypatch.setattr(
            hashing, "_directions", lambda seed, *shape: jax.random.normal(key, shape)
        )
        ix = method.init(spec, n)
        ix = method.append(
            ix, k[None, None], jnp.zeros(1, jnp.int32), jnp.full(1, n, jnp.int32)
        )
        place = jnp.arange(n, dtype=jnp.int32)[None, None, None]
        hits = method.hits(ix, q[None, None, None])
        inverse = jnp.exp(
            -method.log_probability(ix, q[None, None, None], k[None, None, None], place)
        )
        return jnp.where(hits, inverse, 0.0)[0, 0, 0]

    spread, error = {}, {}
    for count in (1, hashing.CENTRES):
        monkeypatch.setattr(hashing, "CENTRES", count)
        estimates = weights * np.asarray(
            jax.jit(jax.vmap(sampled))(jax.random.split(jax.random.key(0), draws))
        )
        sums, totals = estimates @ v, estimates.sum(axis=1)
        for parts, want in ((sums, weights @ v), (totals[:, None], np.ones(1))):
            assert (
                np.abs(parts.mean(axis=0) - want) < 4 * parts.std(axis=0) / math.sqrt(draws)
            ).all()
        spread[count] = totals.std()
        error[count] = np.sqrt(np.mean((sums / totals[:, None] - weights @ v) ** 2))
    assert spread[hashing.CENTRES] < 0.75 * spread[1]
    assert error[hashing.CENTRES] < 0.9 * error[1]


def test_estimates_average_to_attention_over_directions() -> None:
    """A weighted sum over the sample is unbiased: over many draws its mean comes near the sum
    over all.
    """
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(1, 1, n, 16)).astype(np.float32) for n in (1, 96))
    spec = CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=16, capacity=128, dtype="float32")
    method = SimHash(bits=2, tables=12, least=2, learn=32)

    @jax.jit
    def log_probability(k, q):
        ix = method.append(
            method.init(spec, 96), k, jnp.zeros(1, jnp.int32), jnp.full(1, 96, jnp.int32)
        )
        place = jnp.arange(96, dtype=jnp.int32)[None, None, None]
        return method.log_probability(ix, q, k[:, :, None], place)[0, 0, 0]

    weights = np.exp(k[0, 0] @ q[0, 0, 0] / 4)
    inverse = np.exp(-np.asarray(log_probability(k, q)))
    centred = k[0, 0] - centres(k[0, 0], 32)
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
        (
            lambda: Sampled(store=HostOffload(page=8)),
            r"HostOffload\(page=8\) moves whole pages",
        ),
        (
            lambda: kvjax.init_layer(Sampled(demote=Fifo(leave=64), budget=512), SPEC),
            r"SimHash\(learn=256\).*chunks of 64; use Fifo\(leave=256\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
