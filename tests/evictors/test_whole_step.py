"""Evictors weigh tokens as the model does: with its scale, soft cap, sink logits and window.

Those that see weights are tried in `tests/policies/test_own_weights.py`. Here are those that
remember queries, whole runs of which are compared with loops in float64, and those whose scores
have no softmax, which no part of a model may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, evictors
from kvjax.contrib.raas import BesidePrompt
from kvjax.evictors import Evictor, ExpectedAttention, Redundancy, Tokens
from kvjax.models.rope import Default
from kvjax.numerics.partial import Logits
from kvjax.policies import Full, PerHead, Policy, Step
from kvjax.testing import _drive as drive
from kvjax.testing._expect import held_positions
from tests.evictors.test_judging import turned

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=96, dtype=jnp.float32)
ROPE = Default(theta=10000.0)
PROMPT = 40
STEPS = 13
SINKS = np.array([5.0, -3.0, 1.0, 4.0], np.float32)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"sinks": SINKS, "scale": 0.7, "soft_cap": 2.0, "window": 30},
}
WITHOUT_SOFTMAX: dict[str, tuple[Evictor, str]] = {
    "KeyDiff": (evictors.KeyDiff(), "angles of keys"),
    "KeyNorm": (evictors.KeyNorm(), "lengths of keys"),
    "Lag": (evictors.Lag(sink=2, partition=4), "deviations of keys and values"),
    "LogSpaced": (evictors.LogSpaced(), "ages"),
    "Random": (evictors.Random(), "chance"),
    "Sliding": (evictors.Sliding(), "ages"),
    "Trigonometric": (
        evictors.Trigonometric(rope=ROPE),
        "products of keys with mean queries, by their deviation: a factor cancels",
    ),
}
BY_WEIGHTS = {  # by `Step.weights`, in tests/policies/test_own_weights.py
    "Critical",
    "HeavyHitter",
    "LastQuery",
    "LastUse",
    "Observation",
    "ValueWeighted",
}
BY_QUERIES = {"ExpectedAttention", "Redundancy"}

Scores = Callable[..., np.ndarray]  # of tokens at positions, by queries up to `asked`


def test_each_evictor_has_its_law() -> None:
    named = {name for name in evictors.__all__ if name not in ("Evictor", "Pooling", "Tokens")}
    assert named == {*WITHOUT_SOFTMAX, *BY_WEIGHTS, *BY_QUERIES}


# ------------------------------------------------------------------------- the scores, in float64


def capped(logits: np.ndarray, cap: float | None) -> np.ndarray:
    return logits if cap is None else cap * np.tanh(logits / cap)


def shares(logits: np.ndarray, seen: np.ndarray, sink: float | None) -> np.ndarray:
    """Weights over the tokens that are `seen`, beside a sink logit."""
    grown = np.where(seen, np.exp(logits), 0.0)
    total = grown.sum() + (0 if sink is None else np.exp(np.float64(sink)))
    return grown / total if total else grown


def redundancy(
    rule: Redundancy,
    q: np.ndarray,  # [T, G, D] of a KV head
    k: np.ndarray,  # [L, D] of the tokens that compete
    v: np.ndarray,
    at: np.ndarray,  # their positions
    end: int,
    asked: int,
    sinks: np.ndarray | None,
    scale: float = SPEC.head_dim**-0.5,
    soft_cap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    older = at < end - rule.window
    votes = np.zeros(len(at))
    for t in range(asked - rule.window, asked):
        logits = capped(q[t] @ k.T * scale, soft_cap).max(axis=0)
        seen = older & ((at > t - window) if window else True)
        sink = None if sinks is None else sinks.max()
        votes += shares(logits, seen, sink) / rule.window
    half = rule.pool // 2
    votes = np.array([votes[max(j - half, 0) : j + half + 1].max() for j in range(len(at))])
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0)
    for row in cosine:
        if (row > rule.alike).any():
            row[np.flatnonzero(row > rule.alike)[-1]] = 0
    alike = np.exp(cosine.mean(axis=0))
    score = rule.balance * votes - (1 - rule.balance) * alike / alike.sum()
    return np.where(older, score, np.inf)


def expected(
    rule: ExpectedAttention,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    at: np.ndarray,
    end: int,
    asked: int,
    sinks: np.ndarray | None,
    scale: float = SPEC.head_dim**-0.5,
    soft_cap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    D = k.shape[-1]
    identity = np.eye(D)
    ahead = np.mean(
        [turned(identity, np.full(D, float(end + j))).T for j in range(rule.future)], axis=0
    )
    seen = (at >= rule.sink) & ((at > end - window) if window else True)
    z = np.linspace(-12, 16, 4001)
    density = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    worth = np.zeros(len(at))
    for g in range(q.shape[1]):
        plain = turned(q[rule.sink : asked, g], -np.arange(float(rule.sink), asked))
        mean = k @ (ahead @ plain.mean(axis=0)) * scale
        if rule.covariance:
            spread = ahead @ np.cov(plain.T, bias=True) @ ahead.T
            deviation = np.sqrt(np.einsum("ti,ij,tj->t", k, spread, k)) * scale
            logits = capped(mean[:, None] + deviation[:, None] * z, soft_cap)
            logits = np.log((np.exp(logits) * density).sum(axis=1))
        else:
            logits = capped(mean, soft_cap)
        worth += shares(logits, seen, None if sinks is None else sinks[g]) / q.shape[1]
    return np.where(at < rule.sink, np.inf, (worth + rule.epsilon) * np.linalg.norm(v, axis=-1))


def held_by_loops(
    policy: Any,
    scores: Scores,
    tokens: drive.Tokens,
    row: int,
    head: int,
    model: dict[str, Any],
) -> set[int]:
    """The positions that a head holds after a prompt and steps."""
    G = SPEC.group
    parts = dict(model)
    sinks = parts.pop("sinks", None)
    of_head = None if sinks is None else sinks.reshape(-1, G)[head]
    q = tokens.q[row].astype(np.float64).reshape(len(tokens.q[row]), -1, G, SPEC.head_dim)
    k, v = (a[row, :, head].astype(np.float64) for a in (tokens.k, tokens.v))

    def lowest(held: list[int], count: int, end: int, asked: int) -> list[int]:
        """The positions of lowest score, the oldest of equals."""
        at = np.array(held)
        keys = k[at]
        if policy.rope is not None:  # closed up, with the newest where it came
            keys = turned(keys, np.arange(len(at)) + asked - len(at) - at.astype(float))
        if len(held) == PROMPT:
            keys = k[at]
        score = scores(q[:, head], keys, v[at], at, end, asked, of_head, **parts)
        if isinstance(policy, BesidePrompt) and end > PROMPT:
            score = np.where(at < PROMPT, np.inf, score)
        return at[np.lexsort((at, score))[:count]].tolist()

    most = policy.budget + (PROMPT if isinstance(policy, BesidePrompt) else 0)
    held = list(range(PROMPT))
    leaving = lowest(held, max(PROMPT - most, 0), PROMPT, PROMPT)
    held = [p for p in held if p not in leaving]
    for t in range(PROMPT, PROMPT + STEPS):
        if len(held) == most:
            # One token alone leaves as the new one comes, several before that.
            end = t + 1 if policy.every == 1 else t
            leaving = lowest(held, policy.every, end, asked=t)
            held = [p for p in held if p not in leaving]
        held.append(t)
    return set(held)


# ------------------------------------------------------------------------------------------- laws

RKV = Redundancy(window=4, balance=0.95, pool=3)
EXPECTED = ExpectedAttention(rope=ROPE, future=8)
EXPECTED_MEAN = dataclasses.replace(EXPECTED, covariance=False)
EXPECTED_LONG = dataclasses.replace(EXPECTED_MEAN, epsilon=0.02)  # values count for more
POLICIES: dict[str, tuple[Any, Scores]] = {
    "rkv": (Evicting(evictor=RKV, budget=20, every=5), partial(redundancy, RKV)),
    "rkv, one at a time": (Evicting(evictor=RKV, budget=20), partial(redundancy, RKV)),
    "rkv beside the prompt": (
        BesidePrompt(evictor=RKV, budget=8, every=3, prompt=PROMPT),
        partial(redundancy, RKV),
    ),
    "rkv that closes up": (
        Evicting(evictor=RKV, budget=20, every=5, rope=ROPE),
        partial(redundancy, RKV),
    ),
    "expected": (Evicting(evictor=EXPECTED, budget=20, every=5), partial(expected, EXPECTED)),
    "expected, of means": (
        Evicting(evictor=EXPECTED_MEAN, budget=20, every=5),
        partial(expected, EXPECTED_MEAN),
    ),
    "expected, by long values": (
        Evicting(evictor=EXPECTED_LONG, budget=20, every=5),
        partial(expected, EXPECTED_LONG),
    ),
}
BOTH = ("rkv", "expected")  # where each part of a model decides what stays
EACH = [*((name, "plain") for name in BOTH), *((name, "all") for name in POLICIES)]


def run(policy: Policy, tokens: drive.Tokens, model: dict[str, Any], *, apart: bool) -> Any:
    """The positions that a layer holds after a prompt and steps; `apart`, in three calls each."""
    cache = kvjax.init_layer(policy, SPEC)
    prompt = (a[:, :PROMPT] for a in (tokens.q, tokens.k, tokens.v))
    _, cache = kvjax.attention(cache, *prompt, **model)
    for t in range(PROMPT, PROMPT + STEPS):
        q, k, v = (a[:, t : t + 1] for a in (tokens.q, tokens.k, tokens.v))
        if apart:
            cache = kvjax.update(cache, k, v, **model)
            _, cache = kvjax.attend(cache, q, **model)
        else:
            _, cache = kvjax.attention(cache, q, k, v, **model)
    return held_positions(cache)


@pytest.mark.parametrize(("name", "model"), EACH)
def test_remembered_queries_weigh_tokens_as_the_model_does(name: str, model: str) -> None:
    policy, scores = POLICIES[name]
    tokens, how = drive.random_tokens(SPEC, 1), MODELS[model]
    heads = list(np.ndindex(SPEC.batch, SPEC.kv_heads))

    def by_loops(how: dict[str, Any]) -> list[set[int]]:
        return [held_by_loops(policy, scores, tokens, *head, how) for head in heads]

    found = run(policy, tokens, how, apart=name == "rkv, one at a time")
    held = by_loops(how)
    assert [set(found[row][head]) for row, head in heads] == held
    if model == "all":  # in a plain model others would stay
        assert held != by_loops({})
    for part in how if name in BOTH else ():  # and without that part alone
        assert held != by_loops({other: how[other] for other in how if other != part}), part


def test_heads_that_evict_on_their_own_have_their_own_sinks() -> None:
    policy, scores = POLICIES["rkv"]
    heads = PerHead(heads=(1,), selected=policy, others=Full())
    tokens, how = drive.random_tokens(SPEC, 1), MODELS["all"]
    cache = kvjax.init_layer(heads, SPEC)
    arrays = (tokens.q, tokens.k, tokens.v)
    _, cache = kvjax.attention(cache, *(a[:, :PROMPT] for a in arrays), **how)
    for t in range(PROMPT, PROMPT + STEPS):
        _, cache = kvjax.attention(cache, *(a[:, t : t + 1] for a in arrays), **how)
    state = cache.state.selected
    for row in range(SPEC.batch):
        held = np.asarray(state.position[row, 0, : int(state.tokens.count[row])])
        assert set(held.tolist()) == held_by_loops(policy, scores, tokens, row, 1, how)


@pytest.mark.parametrize("name", WITHOUT_SOFTMAX)
def test_scores_without_a_softmax_are_those_of_any_model(name: str) -> None:
    evictor, _ = WITHOUT_SOFTMAX[name]
    if evictor.arrival is None and not evictor.remembers(SPEC.head_dim):
        return  # it gets no query and no step
    policy = Evicting(evictor=evictor, budget=20, every=5)
    tokens = drive.random_tokens(SPEC, 1)
    plain = run(policy, tokens, {}, apart=False)
    assert run(policy, tokens, MODELS["all"], apart=False) == plain


# ------------------------------------------------------------------- evictors and policies of users


@dataclasses.dataclass(frozen=True)
class LatestQuery(Evictor):
    """As one would write it by the docstrings: remembers the last query, with no step."""

    def remembers(self, head_dim: int) -> int:
        return 1

    def see_queries(self, memory: Any, q: Any, position: Any) -> Any:
        return q[:, :, :, -1:].astype(jnp.float32)

    def score_all(self, tokens: Tokens) -> Any:
        logits = jnp.einsum("bkgnd,bkld->bkgnl", tokens.memory, tokens.k)
        return jnp.max(logits, axis=(2, 3))


def test_an_evictor_that_does_not_know_of_the_step_runs() -> None:
    tokens = drive.random_tokens(SPEC, 1)
    policy = Evicting(evictor=LatestQuery(), budget=20, every=5)
    held = run(policy, tokens, MODELS["all"], apart=False)
    assert [len(head) for row in held for head in row] == [18] * 4


@dataclasses.dataclass(frozen=True)
class Fading(Evictor):
    """Evidence that steps alone give, and that fades; `voters` is left at its default."""

    arrival = 0.0

    def see_step(self, evidence: Any, weights: Any) -> Any:
        return evidence * 0.5 + jnp.sum(weights, axis=2)

    def see_prompt(self, evidence: Any, votes: Any, *_: Any) -> Any:
        return evidence * 0.5 + jnp.sum(votes, axis=2)


def test_a_prompt_without_voters_gives_no_evidence() -> None:
    """No query of it votes; its length divided by the size of no block, before."""
    cache = kvjax.init_layer(Evicting(evictor=Fading(), budget=8), SPEC)
    tokens = drive.random_tokens(SPEC, 3)
    q, k, v = (x[:, :6] for x in (tokens.q, tokens.k, tokens.v))
    _, cache = kvjax.prefill(cache, q, k, v)
    assert not jnp.any(cache.state.evidence)
    _, cache = kvjax.decode(cache, q[:, :1], k[:, :1], v[:, :1])
    before = np.asarray(cache.state.evidence)
    assert before.sum() == pytest.approx(2 * 4)  # the weights of a query are 1 in all
    _, cache = kvjax.prefill(cache, q[:, :1], k[:, :1], v[:, :1])
    assert np.asarray(cache.state.evidence).sum() == pytest.approx(2 * 4 / 2)


def test_what_has_no_step_for_remembered_queries_says_so() -> None:
    policy = Evicting(evictor=RKV, budget=20, every=5)
    state = policy.init(SPEC)
    one = jnp.zeros((2, 2, 1, 16))
    words = r"Redundancy\(.*\) evicts by how queries attend; call kvjax.attention, kvjax.update"
    with pytest.raises(ValueError, match=words):
        policy.update(state, one, one, jnp.ones(2, bool))
    position = jnp.zeros((2, 2, 4), jnp.int32)
    held = Tokens(None, position, jnp.full(2, 4), 4, one, one, jnp.zeros((2, 2, 2, 4, 16)))
    with pytest.raises(
        ValueError, match=r"Tokens.step, which is None; give the kvjax.policies"
    ):
        RKV.score_all(held)

    class Counting(Evicting):
        def update(self, st: Any, k: Any, v: Any, active: Any) -> Any:
            return super().update(st, k, v, active)

    Counting(evictor=evictors.KeyNorm(), budget=20)
    with pytest.raises(ValueError, match=r"Counting changes update, .* change update_for_step"):
        Counting(evictor=RKV, budget=20)


@pytest.mark.parametrize("window", [3, 4, 5, None])
def test_each_remembered_query_sees_its_window(window: int | None) -> None:
    """Of 10 tokens, of whose queries 9 have come, by the last 3 of these."""
    position = jnp.array([[[0, 7, -1, 5, 9, 4, 8, 6]]], jnp.int32)
    one = jnp.zeros((1, 1, 8, 2))
    step = Step(Logits(1.0), window)
    asked = jnp.array([9])
    tokens = Tokens(None, position, jnp.array([10]), 8, one, one, None, step, asked)
    reach = window or 99
    seen = np.asarray(tokens.seen_by_last(3))[0, 0]
    for query, by_query in zip((6, 7, 8), seen, strict=True):
        expected = [0 <= p <= query and p > query - reach for p in position[0, 0].tolist()]
        assert by_query.tolist() == expected
    coming = [p >= 0 and p > 10 - reach for p in position[0, 0].tolist()]
    assert np.asarray(tokens.seen_next())[0, 0].tolist() == coming


@pytest.mark.parametrize(("queries", "tokens"), [(1, 8), (2, 4), (4, 2), (16, 1)])
def test_few_keys_at_a_time_are_weighed(
    monkeypatch: pytest.MonkeyPatch, queries: int, tokens: int
) -> None:
    """So few that their products with all queries are at most BLOCK numbers, or one."""
    monkeypatch.setattr(evictors.queries, "BLOCK", 64)
    k = jnp.arange(2 * 11 * 4, dtype=jnp.float32).reshape(1, 2, 11, 4)
    weighed = list[int]()

    def score(part: Any) -> Any:
        weighed.append(part.shape[2])
        return jnp.tile(jnp.sum(part, axis=-1)[:, :, None], (1, 1, queries, 1))

    found = evictors.queries._by_blocks(score, k, queries)
    assert set(weighed) == {tokens}
    np.testing.assert_array_equal(found, score(k))
