"""What evictors say of tokens, against numpy loops written from the papers, on random keys and
on a model's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, models
from kvjax.contrib.adakv import HeadBudgets
from kvjax.contrib.raas import BesidePrompt
from kvjax.evictors import (
    Critical,
    Evictor,
    ExpectedAttention,
    HeavyHitter,
    KeyDiff,
    KeyNorm,
    Lag,
    LastUse,
    LogSpaced,
    Observation,
    Random,
    Redundancy,
    Sliding,
    Tokens,
    Trigonometric,
    ValueWeighted,
)
from kvjax.models.rope import Default
from kvjax.numerics.partial import Logits
from kvjax.policies import Step
from kvjax.testing import _drive as drive
from tests.test_oracles import live_tokens

ROPE = Default(theta=10000.0)
L = 90
SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=100, dtype=jnp.float32)


@functools.cache
def tokens(kind: str) -> tuple[np.ndarray, ...]:
    """q [T, K, G, D], k and v [T, K, D] of 100 tokens: random ones, or those of a layer of the
    shipped model.
    """
    if kind == "random":
        drawn = drive.random_tokens(SPEC)
    else:
        loaded = models.load(str(models.shipped()), dtype="float32")
        drawn = live_tokens(
            loaded.model,
            np.array(loaded.tokenizer("A quick brown fox. 42 = 6 * 7! " * 9)["input_ids"]),
        )
    q, k, v = (np.asarray(a[1, :100], np.float64) for a in (drawn.q, drawn.k, drawn.v))
    assert len(k) == 100
    return q.reshape(100, k.shape[1], -1, k.shape[2]), k, v


def turned(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """x [..., D] at a position that is `by` higher, as complex numbers."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * by[..., None] * 10000.0 ** (-np.arange(half) / half)
    )
    return np.concatenate([z.real, z.imag], axis=-1)


def soft(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, score: np.ndarray
) -> np.ndarray:
    worth, dim = np.zeros(len(at)), k.shape[-1]
    R = np.mean([turned(np.eye(dim), np.full(dim, 100.0 + t)).T for t in range(512)], axis=0)
    for g in range(q.shape[1]):
        plain = turned(q[4:, g], -np.arange(4.0, 100))
        mu, sigma = R @ plain.mean(axis=0), R @ np.cov(plain.T, bias=True) @ R.T
        z = k @ mu / dim**0.5 + np.einsum("ti,ij,tj->t", k, sigma, k) / (2 * dim)
        worth += soft(np.where(at < 4, -np.inf, z)) / q.shape[1]
    return np.where(at < 4, np.inf, worth * np.linalg.norm(v, axis=-1))


def rkv(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, score: np.ndarray
) -> np.ndarray:
    logits = np.einsum("wgd,td->wgt", q[-8:], k).max(axis=1) / k.shape[-1] ** 0.5
    older = at < 92
    votes = soft(np.where(older, logits, -np.inf)).mean(axis=0)
    votes = np.array([votes[max(j - 3, 0) : j + 4].max() for j in range(len(at))])
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    C = unit @ unit.T
    np.fill_diagonal(C, 0)
    for row in C:
        if (row > 0.5).any():
            row[np.flatnonzero(row > 0.5)[-1]] = 0
    return np.where(older, 0.07 * votes - 0.93 * soft(C.mean(axis=0)), np.inf)


def triattention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, score: np.ndarray
) -> np.ndarray:
    """By the published sum over distances and frequencies, with keys before their rotation."""
    half = k.shape[-1] // 2
    omega = 10000.0 ** (-np.arange(half) / half)

    def plain(x: np.ndarray, position: np.ndarray) -> np.ndarray:
        x = turned(x, -position)
        return x[..., :half] + 1j * x[..., half:]

    keys, best = plain(k, at.astype(float)), []
    for g in range(q.shape[1]):
        queries = plain(q[:, g], np.arange(100.0))
        mean, length = queries.mean(axis=0), np.abs(queries).mean(axis=0)
        total = np.zeros(len(at))
        for delta in 2.0 ** np.arange(17):
            phase = omega * (99 - at[:, None] + delta) + np.angle(mean * keys.conj())
            total += (
                np.abs(mean) * np.abs(keys) * np.cos(phase)
                + (length - np.abs(mean)) * np.abs(keys)
            ).sum(axis=1)
        best.append((total - total.mean()) / total.std())
    return np.max(best, axis=0)


def lag(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, score: np.ndarray
) -> np.ndarray:
    worth, size = np.full(len(at), np.inf), 16
    for first in range(4, len(at) - 2 * size + 1, size):
        here, after = slice(first, first + size), slice(first + size, first + 2 * size)
        both = [
            soft(
                ((x[here] - x[after].min(axis=0)) / np.ptp(x[after], axis=0)).std(
                    axis=1, ddof=1
                )
            )
            for x in (k, v)
        ]
        worth[here] = np.argsort(np.argsort(np.mean(both, axis=0))) / size
    return worth


def critical(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, score: np.ndarray
) -> np.ndarray:
    """Half of the 60 slots that no sink has go by attention alone, the others by values too."""
    worth = (score + 1e-4) * np.abs(v).sum(axis=-1)
    stays = at < 20
    competing = np.flatnonzero(~stays)
    best = competing[np.argsort(-score[competing], kind="stable")]
    worth[best[: int(0.5 * (60 - stays.sum()))]] = np.inf
    worth[stays] = np.inf
    return worth


def keydiff(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, at: np.ndarray, score: np.ndarray
) -> np.ndarray:
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    mean = unit.mean(axis=0)
    return -unit @ mean / np.linalg.norm(mean)


RULES: dict[str, tuple[Evictor, Any]] = {
    "knorm": (KeyNorm(), lambda q, k, v, at, score: -np.linalg.norm(k, axis=-1)),
    "keydiff": (KeyDiff(), keydiff),
    "vatp": (
        ValueWeighted(evictor=HeavyHitter(recent=0)),
        lambda q, k, v, at, s: np.where(at < 20, np.inf, s * np.abs(v).sum(axis=-1)),
    ),
    "criticalkv": (
        Critical(evictor=HeavyHitter(recent=0), sink=20),
        critical,
    ),
    "lagkv": (Lag(partition=16), lag),
    "expected": (ExpectedAttention(rope=ROPE), expected),
    "rkv": (Redundancy(), rkv),
    "triattention": (Trigonometric(rope=ROPE), triattention),
}


@pytest.mark.parametrize("kind", ["random", "live"])
@pytest.mark.parametrize("rule", RULES)
def test_worth_is_that_of_the_paper(rule: str, kind: str) -> None:
    """Slots are in any order, and some are empty."""
    (evictor, oracle), (q, k, v) = RULES[rule], tokens(kind)
    rng, heads = np.random.default_rng(0), k.shape[1]
    held = np.stack([np.sort(rng.permutation(100)[:L]) for _ in range(heads)])
    held[:, -8:] = np.arange(92, 100)
    held = np.stack([np.concatenate([np.unique(h), np.full(L, -1)])[:L] for h in held])
    if rule == "rkv":  # its code takes the window to be held
        held = np.stack([np.arange(100 - L, 100)] * heads)
    slot = rng.permutation(L)
    position = held[:, slot]
    score = rng.random((heads, L)).astype(np.float32)
    keys, values = (
        np.stack([a[np.maximum(position[h], 0), h] for h in range(heads)]) for a in (k, v)
    )

    @jax.jit
    def run(*args: Any) -> Any:
        queries, position, *rest = args
        memory = jnp.zeros(
            (*queries.shape[:3], evictor.remembers(queries.shape[-1]), queries.shape[-1]),
            jnp.float32,
        )
        for part in (slice(0, 60), slice(60, 100)):
            memory = evictor.see_queries(
                memory, queries[:, :, :, part], jnp.arange(100)[None, part]
            )
        evidence = evictor.see_tokens(*rest[1:])
        evidence = rest[0] if evidence is None else evidence
        return evictor.score_all(
            Tokens(evidence, position, jnp.array([100]), 60, *rest[1:], memory, step)
        )

    step = Step(Logits(q.shape[-1] ** -0.5))
    batch = (np.moveaxis(q, 0, 2), position, score, keys, values)
    got = np.asarray(
        run(*(a[None].astype(np.int32 if a.dtype.kind == "i" else np.float32) for a in batch))
    )
    for h in range(heads):
        there = position[h] >= 0
        order = np.flatnonzero(there)[np.argsort(position[h][there])]
        at = position[h][order]
        want = oracle(q[:, h], k[at, h], v[at, h], at, score[h][order].astype(np.float64))
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isposinf(got[0, h, order]), ~finite)
        scale = np.abs(want[finite]).max() if finite.any() else 1.0
        np.testing.assert_allclose(
            got[0, h, order][finite] / scale, want[finite] / scale, atol=2e-4
        )


@pytest.mark.parametrize(
    "evictor", [*(rule for rule, _ in RULES.values()), LogSpaced(), LastUse(), Observation()]
)
def test_evictors_are_values_whose_settings_have_names(evictor: Evictor) -> None:
    """Equal ones share a program, so they are hashed, and cannot change afterwards."""
    fields: Any = dataclasses.fields(evictor)  # type: ignore[arg-type]
    assert all(field.kw_only for field in fields)
    same = type(evictor)(**{field.name: getattr(evictor, field.name) for field in fields})
    assert (same, hash(same)) == (evictor, hash(evictor))
    with pytest.raises(dataclasses.FrozenInstanceError):
        same.sink = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("head", [0, 1])
def test_votes_are_pooled_within_a_head(head: int) -> None:
    votes = jnp.zeros((1, 2, 1, 20)).at[0, head, 0, 8].set(1.0)
    position = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (1, 2, 20))
    rule = Observation(window=4, kernel_size=3)
    got = rule.see_prompt(jnp.zeros((1, 2, 20)), votes, position, jnp.array([20]), 16)
    np.testing.assert_array_equal(np.flatnonzero(got[0, head, :16]), [7, 8, 9])
    np.testing.assert_array_equal(got[0, 1 - head, :16], 0)


@pytest.mark.parametrize("count", [9, 10, 13, 14, 15])
def test_lag_scores_tokens_alike_beside_empty_slots(count: int) -> None:
    """The last whole partition has none after it, however many slots are empty."""
    lag = Lag(sink=2, partition=4)
    rng = np.random.default_rng(count)
    k, v = (rng.standard_normal((1, 1, 30, 8)).astype(np.float32) for _ in range(2))

    @jax.jit
    def scored(position: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        held = Tokens(None, position, jnp.array([count]), k.shape[2], k, v, None)
        return lag.score_all(held)

    def scores(slots: int) -> np.ndarray:
        position = np.where(np.arange(slots) < count, np.arange(slots), -1)[None, None]
        held = scored(position.astype(np.int32), k[:, :, :slots], v[:, :, :slots])
        return np.asarray(held)[0, 0, :count]

    compared = 2 + (count - 2) // 4 * 4 - 4
    np.testing.assert_array_equal(
        np.isinf(scores(30)), [at < 2 or at >= compared for at in range(count)]
    )
    np.testing.assert_allclose(scores(30), scores(count), atol=1e-6)


def test_criticalkv_differs_from_vatp_where_a_token_has_much_attention_and_a_small_value() -> (
    None
):
    """Half of the slots go by attention alone; for values of one size the two rank alike."""
    score, sizes = (
        jnp.array([[[9.0, 8.0, 7.0, 3.0, 2.0, 1.0]]]),
        jnp.array([1.0, 0.01, 1.0, 1.0, 1.0, 1.0]),
    )
    v = jnp.broadcast_to(sizes[None, None, :, None], (1, 1, 6, 4))
    held = Tokens(score, 20 + jnp.arange(6)[None, None], jnp.array([26]), 5, v, v, None)

    def evicted(held: Tokens) -> tuple[int, ...]:
        return tuple(
            int(jnp.argmin(RULES[rule][0].score_all(held))) for rule in ("vatp", "criticalkv")
        )

    assert evicted(held) == (1, 5)
    assert evicted(held._replace(v=jnp.ones_like(v))) == (5, 5)


def test_random_keeps_a_uniform_sample_of_all_tokens_or_of_the_held_ones() -> None:
    """By a number of its own a token stays with probability m/n; drawn afresh with (1 -
    1/(m+1))^age.
    """
    heads, slots, steps = 400, 8, 24

    @functools.partial(jax.jit, static_argnums=0)
    def run(evictor: Random) -> jax.Array:
        def step(held: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
            line = jnp.concatenate([held, jnp.broadcast_to(t, (1, heads, 1))], axis=2)
            worth = jnp.where(line < 0, -1.0, evictor.score(None, line, t[None], slots))
            gone = jnp.argmin(worth, axis=-1, keepdims=True)
            keep = jnp.argsort(jnp.arange(slots + 1)[None, None] == gone, axis=-1, stable=True)[
                ..., :slots
            ]
            return jnp.take_along_axis(line, keep, axis=2), None

        return jax.lax.scan(
            step, jnp.full((1, heads, slots), -1, jnp.int32), jnp.arange(steps, dtype=jnp.int32)
        )[0]

    for evictor, want in (
        (Random(), np.full(steps, slots / steps)),
        (
            Random(afresh=True, seed=1),
            (1 - 1 / (slots + 1)) ** np.minimum(steps - np.arange(steps), steps - slots),
        ),
    ):
        held = np.asarray(run(evictor))[0]
        shares = np.array([(held == t).any(axis=1).mean() for t in range(steps)])
        np.testing.assert_allclose(shares, want, atol=4.5 * np.sqrt(0.25 / heads))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Evicting(evictor=Lag(), budget=259),
            r"needs a budget of at least 260, got 259; raise it",
        ),
        (
            lambda: Evicting(evictor=Redundancy(), budget=8),
            r"always keeps 8 tokens, got a budget of 8",
        ),
        (
            lambda: Evicting(evictor=Random(), budget=8, every=8),
            r"every=8\) must be below budget=8",
        ),
        (
            lambda: Evicting(evictor=Random(), budget=8, rope=ROPE),
            r"use every=64 and an evictor without rope",
        ),
        (
            lambda: HeadBudgets(evictor=Redundancy(), budget=64),
            r"evicts one token at a time, by evidence",
        ),
        (
            lambda: ValueWeighted(evictor=Random()),
            r"no attention guides; use kvjax.HeavyHitter\(\)",
        ),
        (
            lambda: Critical(first=1.0),
            r"first=1.0\) must be a share of the slots, at least 0 and below 1",
        ),
        (lambda: Redundancy(balance="x"), r"balance=...\) must be a finite number, got 'x'"),
        (lambda: Redundancy(alike=np.nan), r"alike=...\) must be a finite number, got nan"),
        (lambda: Redundancy(window=0), r"window=...\) must be at least 1, got 0"),
        (lambda: Observation(window=0), r"window=...\) must be at least 1, got 0"),
        (lambda: Observation(kernel_size=2), r"kernel_size=2\) must be odd; use 1 or 3"),
        (lambda: kvjax.presets.evict(rule="newest"), r"rule='newest'\) must be one of random"),
        (
            lambda: kvjax.presets.evict(rule="expected"),
            r"must know the model's RoPE; set rope_theta",
        ),
    ],
)
def test_what_a_rule_cannot_do_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("slots", [3, 4, 5, 6, 8, 9, 12, 30])
def test_logarithmic_spacing_is_that_of_blocks_that_are_thinned(slots: int) -> None:
    """A full block of 3W tokens keeps every other one of its first 2W, and its newest W."""
    W = slots // 3
    held, thinnings, leaves = list[int](), 0, dict[int, int]()
    for token in range(40 * W):
        held.append(token)
        if len(held) == 3 * W:
            leaves |= dict.fromkeys(held[1 : 2 * W : 2], thinnings)
            held[: 2 * W] = held[: 2 * W : 2]
            thinnings += 1
    position = np.array(sorted(leaves), np.int32)[None, None]
    score = jax.jit(lambda at, length: LogSpaced().score(None, at, length, slots))
    length = np.array([40 * W], np.int32)
    assert score(position, length)[0, 0].tolist() == [leaves[token] for token in sorted(leaves)]
    assert np.isposinf(score(0 * position, length)).all()


@pytest.mark.parametrize(
    ("weight", "stamped"),
    [(0.25, False), (float(np.nextafter(np.float32(0.25), np.float32(1))), True)],
)
def test_a_token_is_used_by_a_weight_above_the_threshold(weight: float, stamped: bool) -> None:
    weights = jnp.asarray([[[[0.1, weight]]]], jnp.float32)
    evidence = LastUse(threshold=0.25).see_step(jnp.full((1, 1, 2), -3.0), weights)
    assert evidence.tolist() == [[[-4.0, 0.0 if stamped else -4.0]]]


def test_a_window_of_one_query_is_the_last_one() -> None:
    assert [Observation(window=1).voters(slots) for slots in (2, 3, 9)] == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------ the policy


def _held(cache: kvjax.LayerCache) -> list[list[np.ndarray]]:
    count, position = np.asarray(cache.state.tokens.count), np.asarray(cache.state.position)
    return [[np.sort(position[b, h, : count[b]]) for h in range(2)] for b in range(2)]


def test_the_prompt_stays_beside_the_budget() -> None:
    policy = BesidePrompt(evictor=Random(), budget=10, prompt=30)
    given, lengths = drive.random_tokens(SPEC), np.array([30, 12])
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), given, lengths)
    for i in range(25):
        _, cache, info = drive.step(cache, given, lengths + i)
        want = lengths + np.minimum(i + 1, 10)
        np.testing.assert_array_equal(info.attended, np.stack([want] * 2, axis=1))
    for b, h in np.ndindex(2, 2):
        mine = _held(cache)[b][h]
        assert set(range(lengths[b])) <= set(mine)
        assert lengths[b] + 24 in mine
    assert any((a != b).any() for a, b in _held(cache))  # heads draw on their own


def test_tokens_that_close_up_are_read_as_a_text_of_these_alone() -> None:
    """After evictions a step is attention over the held keys at positions 0, 1, 2, ... by the
    query after them.
    """
    policy = Evicting(evictor=Sliding(sink=2), budget=24, every=8, rope=ROPE)
    given, lengths = drive.random_tokens(SPEC), np.array([40, 20])
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), given, lengths)
    for i in range(30):
        out, cache, _ = drive.step(cache, given, lengths + i)
        for b, h in np.ndindex(2, 2):
            at, now = _held(cache)[b][h], lengths[b] + i
            place = np.arange(len(at))
            keys = turned(given.k[b, at, h].astype(np.float64), place - at)
            queries = turned(
                given.q[b, now, 2 * h : 2 * h + 2].astype(np.float64),
                np.full(2, place[-1] - now),
            )
            weights = soft(queries @ keys.T / 4)
            np.testing.assert_allclose(
                out[b, 2 * h : 2 * h + 2], weights @ given.v[b, at, h], atol=2e-4
            )


CLOSING = {
    "norm, one at least": (KeyNorm(), 24, 2),
    "norm, many": (KeyNorm(), 64, 63),
    "heavy hitter": (HeavyHitter(), 24, 8),
}


@pytest.mark.parametrize("case", CLOSING)
def test_keys_that_close_up_often_are_rounded_once(case: str) -> None:
    """In bfloat16, after a text of many times the budget, each held key is that of one turn."""
    evictor, budget, every = CLOSING[case]
    policy = Evicting(evictor=evictor, budget=budget, every=every, rope=ROPE)
    spec = CacheSpec(batch=2, q_heads=2, kv_heads=2, head_dim=16, capacity=100)
    total, prompts = 1200, np.array([70, 7])
    drawn = np.random.default_rng(2).standard_normal((3, 2, total, 2, 16), np.float32)
    q, k, v = drawn.astype(jnp.bfloat16)
    cache = kvjax.init_layer(policy, spec)
    first = (a[:, :70] for a in (q, k, v))
    _, cache = kvjax.attention(cache, *first, lengths=prompts)

    def step(cache: Any, token: Any) -> Any:
        return kvjax.attention(cache, *(a[:, None] for a in token))[1], None

    rest = tuple(np.moveaxis(a[:, 70:], 1, 0) for a in (q, k, v))
    cache, _ = jax.lax.scan(step, cache, rest)
    _, cache = kvjax.attention(cache, *(a[:, 50:60] for a in (q, k, v)))  # a further prompt
    tokens, positions = cache.state.tokens, np.asarray(cache.state.position)
    keys, counts = np.asarray(tokens.k), np.asarray(tokens.count)
    came = k.astype(np.float64)
    for row, prompt in enumerate(prompts):
        text = np.concatenate([came[row, :prompt], came[row, 70:], came[row, 50:60]])
        for head in range(2):
            at = positions[row, head, : counts[row]]
            assert (np.diff(at) > 0).all()
            expected = turned(text[at, head], np.arange(len(at)) - at)
            found = keys[row, head, : len(at)].astype(np.float64)
            error = np.linalg.norm(found - expected, axis=-1)
            assert (error / np.linalg.norm(expected, axis=-1)).max() < 2**-8


def test_held_tokens_leave_before_empty_slots_whatever_their_position():
    """Of tokens that must all stay, the oldest leave if there is no other; an empty slot, whose
    score is infinite too, is none of them.
    """
    policy = BesidePrompt(evictor=KeyNorm(), budget=6, prompt=6, every=4)
    spec = CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=8, capacity=64, dtype="float32")
    st = policy.init(spec)
    position = jnp.arange(20, 32, dtype=jnp.int32)[None, None]
    st = dataclasses.replace(
        st,
        tokens=dataclasses.replace(st.tokens, count=jnp.array([8], jnp.int32)),
        position=position,
        length=jnp.array([28], jnp.int32),
        pinned=jnp.ones((1, 1, 12), bool),
    )
    assert policy._lowest_scores(st).tolist() == [[[0, 1, 2, 3]]]


def test_several_tokens_are_evicted_at_once() -> None:
    policy = Evicting(evictor=Sliding(sink=2), budget=16, every=5)
    given, lengths = drive.random_tokens(SPEC), np.array([16, 9])
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), given, lengths)
    for i in range(20):
        _, cache, _ = drive.step(cache, given, lengths + i)
        for b in range(2):
            n = lengths[b] + i + 1
            count = n if n <= 16 else 12 + (n - 17) % 5
            want = np.concatenate([np.arange(2), np.arange(n - count + 2, n)])
            np.testing.assert_array_equal(_held(cache)[b][0], want)
