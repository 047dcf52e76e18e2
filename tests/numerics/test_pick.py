"""Selection: ties, masks, pooling by the definition of each rule, and the measures of recall."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import (
    GROUP_REDUCES,
    Candidates,
    Selection,
    mass_recall,
    membership,
    no_kernel_for,
    reduce_scores,
    set_recall,
)
from kvjax.ops import attend_slots, top_k
from tests.numerics.test_partial import whole


def test_ties_go_to_the_lower_unit() -> None:
    scores = jnp.array([[1.0, 3.0, 3.0, 1.0, 3.0, 2.0]])
    assert top_k(scores, jnp.ones((1, 6), bool), 4).slots.tolist() == [[1, 2, 4, 5]]


def test_masked_units_come_last_even_after_minus_infinity() -> None:
    scores = jnp.array([[jnp.nan, -jnp.inf, 5.0, jnp.inf, 7.0]])
    picked = top_k(scores, jnp.array([[True, True, True, True, False]]), 5)
    assert picked.slots.tolist() == [[3, 2, 0, 1, 4]]
    assert picked.valid.tolist() == [[True, True, True, True, False]]


def test_fewer_valid_than_asked_gives_them_all() -> None:
    picked = top_k(jnp.arange(4.0)[None], jnp.array([[False, True, False, True]]), 3)
    assert picked.valid.tolist() == [[True, True, False]]
    assert picked.slots[0, :2].tolist() == [3, 1]


@pytest.mark.parametrize("group_reduce", GROUP_REDUCES)
def test_pooling_ranks_as_its_rule_says(group_reduce: str) -> None:
    rng = np.random.default_rng(0)
    scores, valid = (
        rng.normal(size=(2, 3, 4, 10)).astype(np.float32),
        rng.random((2, 1, 1, 10)) < 0.7,
    )
    masked = np.where(valid, scores, -np.inf)
    shares = np.exp(masked) / np.exp(masked).sum(axis=-1, keepdims=True)
    want = {
        "per_head": masked,
        "mean_query": masked.mean(axis=2, keepdims=True),
        "mean_score": masked.mean(axis=2, keepdims=True),
        "max_score": masked.max(axis=2, keepdims=True),
        "max_softmax": shares.max(axis=2, keepdims=True),
        "sum_softmax": shares.sum(axis=2, keepdims=True),
        "mean_softmax": shares.mean(axis=2, keepdims=True),
    }[group_reduce]
    split = [
        (jnp.asarray(scores[..., a:b]), jnp.asarray(valid[..., a:b]))
        for a, b in ((0, 6), (6, 10))
    ]
    got = np.asarray(reduce_scores(split, group_reduce))  # type: ignore[arg-type]
    np.testing.assert_allclose(
        np.exp(got) if "softmax" in group_reduce else got, want, rtol=1e-5
    )


def test_a_rule_without_a_kernel_says_so() -> None:
    refused = {rule: no_kernel_for(rule) for rule in GROUP_REDUCES}  # type: ignore[arg-type]
    assert [rule for rule, why in refused.items() if why] == ["max_score"]
    assert refused["max_score"] == "the kernels do not reduce a group by max_score"


def test_scores_far_below_the_top_keep_their_order() -> None:
    scores = jnp.array([1000.0, 0.0, -200.0, -100.0, -300.0])[None, None, None]
    ranks = reduce_scores([(scores, jnp.ones((1, 1, 1, 5), bool))], "mean_softmax")
    assert jnp.argsort(-ranks[0, 0, 0]).tolist() == [0, 1, 3, 2, 4]


def test_pages_expand_to_their_tokens() -> None:
    pages = Selection(jnp.array([[[[2, 0]]]]), jnp.array([[[[True, False]]]]))
    pending = jnp.zeros((1, 1, 3, 8)), 0, 0
    tokens = Candidates(
        span=(0, jnp.array([9])), pending=pending, k=2, k_max=2, pending_slots=3
    ).tokens(pages, 3, 3)
    assert tokens.slots.tolist() == [[[[6, 7, 8, 0, 1, 2]]]]
    assert tokens.valid.tolist() == [[[[True] * 3 + [False] * 3]]]


def test_recall_counts_shares_and_mass() -> None:
    got = Selection(jnp.array([[[[0, 1, 5]]]]), jnp.array([[[[True, True, False]]]]))
    want = Selection(jnp.array([[[[1, 2]]]]), jnp.array([[[[True, True]]]]))
    assert membership(got, 6).tolist() == [[[[True, True, False, False, False, False]]]]
    assert set_recall(got, want, 6).tolist() == [[[0.5]]]
    assert set_recall(got, want._replace(valid=jnp.zeros((1, 1, 1, 2), bool)), 6).tolist() == [
        [[1.0]]
    ]
    logits = jnp.log(jnp.array([1.0, 3.0, 4.0, 100.0, 0.5, 0.5]))[None, None, None]
    held = mass_recall(got, logits, jnp.array([[True, True, True, False, False, False]]))
    np.testing.assert_allclose(held, [[[0.5]]], rtol=1e-6)


@pytest.mark.parametrize("choices", [1, 4])
def test_attend_slots_reads_what_was_selected_alone(choices: int) -> None:
    rng = np.random.default_rng(1)
    B, K, G, S, D, M = 2, 3, 4, 20, 8, 5
    q, k, v = (rng.normal(size=(B, K, n, D)).astype(np.float32) for n in (G, S, S))
    slots = np.stack([rng.permutation(S)[:M] for _ in range(B * K * choices)]).reshape(
        B, K, choices, M
    )
    valid = rng.random(slots.shape) < 0.7
    valid[0, 0, 0] = False
    mask = np.zeros((B, K, G, S), bool)
    for b, h, g in np.ndindex(B, K, G):
        c = g % choices if choices > 1 else 0
        mask[b, h, g, slots[b, h, c][valid[b, h, c]]] = True
    unread = ~mask.any(axis=2)[..., None]
    bad_k, bad_v = (jnp.asarray(np.where(unread, np.nan, a)) for a in (k, v))
    part = attend_slots(
        jnp.asarray(q),
        bad_k,
        bad_v,
        Selection(jnp.asarray(slots.astype(np.int32)), jnp.asarray(valid)),
        logits=Logits(0.3),
    )
    out, lse = whole(q, k, v, mask, 0.3)
    np.testing.assert_allclose(part.out, out, atol=2e-6)
    np.testing.assert_allclose(part.lse, lse, atol=2e-5)
