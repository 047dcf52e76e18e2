"""RaaS against numpy written from its paper, and PyramidKV's budgets."""

import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, LastUse, presets
from kvjax.contrib.raas import BesidePrompt
from kvjax.testing import _drive as drive
from kvjax.testing._expect import held_positions
from tests.test_oracles import data

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=100, dtype="float32")


@pytest.mark.parametrize("keys", ["random", pytest.param("live", marks=pytest.mark.thorough)])
def test_the_token_without_attention_for_longest_is_evicted_and_the_prompt_stays(
    keys: str, checkpoint: str | None
) -> None:
    """A threshold of 1/20 is passed now and then, so stamps differ from ages."""
    threshold, budget, prompt = 0.05, 24, 12
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    B, K, D = spec.batch, spec.kv_heads, spec.head_dim
    cache = kvjax.init_layer(
        Evicting(evictor=LastUse(threshold=threshold), budget=budget), spec
    )
    cache, _ = drive.fill(cache, tokens, np.full(B, prompt))
    held = {
        at: {p: np.inf for p in range(prompt)} for at in np.ndindex(B, K)
    }  # stamp of each position
    by_age = 0
    for n in range(prompt, 80):
        _, cache, _ = drive.step(cache, tokens, np.full(B, n))
        ours = held_positions(cache)
        for (row, head), stamps in held.items():
            if len(stamps) == budget:
                oldest = min(stamps, key=lambda p: (stamps[p], p))
                by_age += oldest != min(p for p in stamps if p >= prompt)
                del stamps[oldest]
            stamps[n] = n
            at = sorted(stamps)
            q = tokens.q[row, n].reshape(K, -1, D)[head].astype(np.float64)
            logits = q @ tokens.k[row, at, head].astype(np.float64).T / np.sqrt(D)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            for p, weight in zip(at, weights.max(axis=0), strict=True):
                if weight > threshold and p >= prompt:
                    stamps[p] = n
            assert sorted(ours[row][head]) == at, (row, head, n)
    assert by_age > 10, "stamps and ages choose alike"


@pytest.mark.parametrize("page", [4, 1])
def test_generated_tokens_have_a_budget_beside_the_prompt_and_are_stamped_by_pages(
    page: int,
) -> None:
    """Prompts differ in length, so rows reach the budget at different steps."""
    threshold, budget, prompts = 0.12 if page > 1 else 0.05, 16, np.array([20, 9])
    tokens = drive.random_tokens(SPEC)
    B, K, D = SPEC.batch, SPEC.kv_heads, SPEC.head_dim
    policy = presets.raas(budget, threshold=threshold, prompt=24, page=page).rest
    cache = kvjax.init_layer(policy, SPEC)
    cache, _ = drive.fill(cache, tokens, prompts)
    stamps: dict[tuple[int, int], dict[int, int]] = {at: {} for at in np.ndindex(B, K)}
    by_age = 0
    for i in range(70):
        _, cache, info = drive.step(cache, tokens, prompts + i)
        ours = held_positions(cache)
        for (row, head), held in stamps.items():
            n = int(prompts[row]) + i
            if len(held) == budget:
                oldest = min(held, key=lambda p: (held[p], p))
                by_age += oldest != min(held)
                del held[oldest]
            held[n] = n
            at = [*range(prompts[row]), *sorted(held)]
            assert sorted(ours[row][head]) == at, (row, head, n)
            q = tokens.q[row, n].reshape(K, -1, D)[head].astype(np.float64)
            logits = q @ tokens.k[row, at, head].astype(np.float64).T / np.sqrt(D)
            for one in logits:
                best: dict[int, float] = {}
                for p, logit in zip(at, one, strict=True):
                    best[p // page] = max(best.get(p // page, -np.inf), logit)
                total = sum(np.exp(x) for x in best.values())
                for p in held:
                    if np.exp(best[p // page]) / total > threshold:
                        held[p] = n
    assert by_age > 10, "stamps and ages choose alike"
    assert np.asarray(info.attended).max() == 20 + budget


def test_budgets_of_a_pyramid_fall_linearly_and_keep_their_mean() -> None:
    policies = presets.pyramidkv(budget=256, layers=16, beta=20, window=16)
    budgets = np.array([policies.policy(i).budget for i in range(16)])
    assert abs(budgets.mean() - 256) < 1
    assert budgets[-1] == 16 + (256 - 16) // 20
    assert (np.abs(np.diff(budgets) - np.diff(budgets).mean()) <= 1).all()
    assert (np.diff(budgets) < 0).all()
    assert presets.pyramidkv(budget=64, layers=1).policy(0).budget == 64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: LastUse(threshold=1.0),
            r"threshold=1.0\) must be a softmax weight, at least 0 and below 1",
        ),
        (
            lambda: BesidePrompt(evictor=kvjax.Sliding(), page=4),
            r"BesidePrompt\(page=4\) stamps pages for kvjax.LastUse\(\); got .*use page=1",
        ),
        (
            lambda: presets.raas(prompt=-1),
            r"BesidePrompt\(prompt=...\) must be at least 0, got -1",
        ),
        (lambda: presets.pyramidkv(beta=0.5), r"beta=0.5.*at least 1"),
        (lambda: presets.pyramidkv(budget=1, layers=2), r"budget=1.*needs at least 2"),
        (
            lambda: presets.check_reaches(presets.pyramidkv(layers=8), 30, "pyramidkv"),
            r"pyramidkv\(layers=8\) shares its budget among 8 layers and the model has 30; set layers=30",
        ),
        (
            lambda: presets.check_reaches(presets.pyramidkv(), 8, "pyramidkv"),
            r"among 32 layers.* has 8; set layers=8",
        ),
        (
            lambda: kvjax.init(presets.pyramidkv(64), SPEC, layers=4),
            r"among 32 layers and the model has 4; set layers=4",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
