"""Policies that decide by attention weights see those of the model: with its scale, its soft
cap, its sinks and its window.

The oracle computes weights in float64 with loops over queries, from the formulas alone. All
policies take weights from `Step.weights`, and meet all parts of a model at once: without any of
them, sums would differ and other tokens would stay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, HeavyHitter, LastQuery, Observation
from kvjax.contrib.adakv import HeadBudgets
from kvjax.contrib.mikv import Mixed
from kvjax.contrib.raas import BesidePrompt
from kvjax.evictors import LastUse, ValueWeighted
from kvjax.policies import PerHead, evicting
from kvjax.testing import _drive as drive
from kvjax.testing._expect import held_positions

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=96, dtype=jnp.float32)
PROMPT = 40
STEPS = 6
SINKS = np.array([3.0, -3.0, 1.0, 6.0], np.float32)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"scale": 1.0, "soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
    "all": {"sinks": SINKS, "scale": 0.7, "soft_cap": 2.0, "window": 25},
}


def weights_of(tokens: drive.Tokens, row: int, t: int, seen: list[int], **model: Any) -> Any:
    """f64[N, seen]: the weights of the query at t over the keys `seen` of each head."""
    q = tokens.q[row, t].astype(np.float64)
    k = np.repeat(tokens.k[row, seen].astype(np.float64), SPEC.group, axis=1)
    logits = np.einsum("nd,snd->ns", q, k) * model.get("scale", SPEC.head_dim**-0.5)
    if cap := model.get("soft_cap"):
        logits = cap * np.tanh(logits / cap)
    if window := model.get("window"):
        logits = np.where(np.array(seen)[None] > t - window, logits, -np.inf)
    grown = np.exp(logits)
    total = grown.sum(axis=1)
    if "sinks" in model:
        total = total + np.exp(model["sinks"].astype(np.float64))
    return grown / total[:, None]


def by_group(weights: np.ndarray) -> np.ndarray:
    return weights.reshape(SPEC.kv_heads, SPEC.group, -1)


def run(policy: Any, tokens: drive.Tokens, model: dict[str, Any], steps: int = STEPS) -> Any:
    """The layer's cache after a prompt of PROMPT tokens and some steps."""
    cache = kvjax.init_layer(policy, SPEC)
    prompt = (a[:, :PROMPT] for a in (tokens.q, tokens.k, tokens.v))
    _, cache = kvjax.attention(cache, *prompt, **model)
    for t in range(PROMPT, PROMPT + steps):
        token = (a[:, t : t + 1] for a in (tokens.q, tokens.k, tokens.v))
        _, cache = kvjax.attention(cache, *token, **model)
    return cache


# ------------------------------------------------------------------- sums, where nothing leaves

HITTER = HeavyHitter(recent=0.0)
SUMMING: dict[str, Any] = {
    "h2o": Evicting(evictor=HITTER, budget=80),
    "vatp": Evicting(evictor=ValueWeighted(evictor=HITTER), budget=80),
    "raas beside the prompt": BesidePrompt(evictor=HITTER, budget=80, prompt=0),
    "adakv": HeadBudgets(evictor=HITTER, budget=80),
    "mikv": Mixed(evictor=HITTER, budget=80, store=kvjax.stores.Quantized(bits=8), chunk=32),
    "some heads": PerHead(
        heads=(1,),
        selected=Evicting(evictor=HITTER, budget=80),
        others=Evicting(evictor=HITTER, budget=80),
    ),
}


def evidence(cache: Any, row: int) -> np.ndarray:
    """f32[K, tokens] in order of position."""
    states = [cache.state]
    if hasattr(cache.state, "others"):  # head 0 is among the others
        states = [cache.state.others, cache.state.selected]
    heads = []
    for state in states:
        order = np.argsort(state.position[row, :, : PROMPT + STEPS], axis=-1)
        seen = np.asarray(state.evidence[row, :, : PROMPT + STEPS])
        heads.append(np.take_along_axis(seen, order, axis=-1))
    return np.concatenate(heads)


@pytest.mark.parametrize(
    ("name", "model"),
    [("h2o", "plain"), *((name, "all") for name in SUMMING)],
)
def test_sums_are_those_of_the_models_weights(name: str, model: str) -> None:
    tokens, how = drive.random_tokens(SPEC), MODELS[model].copy()
    if name == "mikv":  # it takes no window, and says so
        del how["window"]
    cache = run(SUMMING[name], tokens, how)
    for row in range(SPEC.batch):
        expected = np.zeros((SPEC.kv_heads, PROMPT + STEPS))
        for t in range(PROMPT + STEPS):
            got = by_group(weights_of(tokens, row, t, list(range(t + 1)), **how))
            expected[:, : t + 1] += got.sum(axis=1)
        np.testing.assert_allclose(evidence(cache, row), expected, atol=1e-5)


def test_each_part_of_a_model_changes_the_weights() -> None:
    tokens, how, t = drive.random_tokens(SPEC), MODELS["all"], PROMPT
    whole = weights_of(tokens, 0, t, list(range(t + 1)), **how)
    for part in how:
        others = {other: how[other] for other in how if other != part}
        without = weights_of(tokens, 0, t, list(range(t + 1)), **others)
        assert np.abs(without - whole).max() > 1e-2, part


@pytest.mark.parametrize("model", ["sinks", "soft cap"])
def test_sums_by_the_sums_of_attention_are_those_of_the_models_weights(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a prompt takes the sums of its softmaxes from attention."""
    monkeypatch.setattr(evicting, "takes_cudnn", lambda *_: True)
    monkeypatch.setattr(evicting, "QUERIES", 4)
    jax.clear_caches()
    test_sums_are_those_of_the_models_weights("h2o", model)
    jax.clear_caches()


# -------------------------------------------------------------------------- the tokens that stay

BUDGET = 20


def test_last_query_keeps_those_of_the_models_weights() -> None:
    tokens, how = drive.random_tokens(SPEC, 3), MODELS["all"]
    cache = run(Evicting(evictor=LastQuery(), budget=BUDGET), tokens, how)
    for row in range(SPEC.batch):
        kept = list(range(PROMPT))
        score = weights_of(tokens, row, PROMPT - 1, kept, **how).mean(axis=0)
        kept = sorted(np.array(kept)[np.lexsort((kept, score))][-BUDGET:].tolist())
        score = weights_of(tokens, row, PROMPT - 1, list(range(PROMPT)), **how).mean(axis=0)
        worth = {p: score[p] for p in kept}
        for t in range(PROMPT, PROMPT + STEPS):
            del worth[min(worth, key=lambda p: (worth[p], p))]
            seen = [*worth, t]
            score = weights_of(tokens, row, t, seen, **how).mean(axis=0)
            worth = dict(zip(seen, score.tolist(), strict=True))
        for head in held_positions(cache)[row]:
            assert set(head) == set(worth)


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_observation_keeps_those_of_the_models_weights(name: str) -> None:
    tokens, how = drive.random_tokens(SPEC, 4), MODELS["all"]
    rule = Observation(window=5, kernel_size=1)
    policy: Any = Evicting(evictor=rule, budget=BUDGET)
    if name == "adakv":
        policy = HeadBudgets(evictor=rule, budget=BUDGET, floor=0.0)
    cache = run(policy, tokens, how, steps=0)
    for row in range(SPEC.batch):
        votes = np.zeros((SPEC.kv_heads, PROMPT))
        for t in range(PROMPT - 5, PROMPT):
            got = by_group(weights_of(tokens, row, t, list(range(t + 1)), **how))
            votes[:, : t + 1] += got.sum(axis=1)
        votes[:, -5:] = np.inf
        if name == "adakv":  # one competition of all heads
            line = np.sort(votes.ravel())[-BUDGET * SPEC.kv_heads]
            expected = [set(np.flatnonzero(head >= line).tolist()) for head in votes]
        else:
            expected = [
                set(np.argsort(head, kind="stable")[-BUDGET:].tolist()) for head in votes
            ]
        assert [set(head) for head in held_positions(cache)[row]] == expected


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("model", ["plain", "all"])
def test_tokens_are_stamped_by_the_models_weights(model: str, page: int) -> None:
    tokens, how = drive.random_tokens(SPEC, 5), MODELS[model]
    threshold = 0.06 if page == 1 else 0.14
    policy = BesidePrompt(evictor=LastUse(threshold=threshold), budget=80, page=page)
    cache = run(policy, tokens, how)
    for row in range(SPEC.batch):
        stamps = np.ones((SPEC.kv_heads, PROMPT + STEPS))
        for t in range(PROMPT, PROMPT + STEPS):
            own = weights_of(tokens, row, t, list(range(t + 1)), **how)
            if page > 1:  # the largest of each page, as shares of all pages and the sink
                number = np.arange(t + 1) // page
                best = np.stack([own[:, number == i].max(axis=1) for i in range(t // page + 1)])
                sink = 1 - own.sum(axis=1) if "sinks" in how else 0
                own = (best / (best.sum(axis=0) + sink))[number].T
            used = (by_group(own) > threshold).any(axis=1)
            stamps[:, : t + 1] = np.where(used, 0, stamps[:, : t + 1] - 1)
        order = np.argsort(cache.state.position[row, :, : PROMPT + STEPS], axis=-1)
        seen = np.asarray(cache.state.evidence[row, :, : PROMPT + STEPS])
        found = np.take_along_axis(seen, order, axis=-1)
        generated = slice(PROMPT, None)
        np.testing.assert_array_equal(found[:, generated], stamps[:, generated])
