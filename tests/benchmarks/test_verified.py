"""Drafts by what the last verification selected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from benchmarks.verified import Verified, verified
from kvjax import Exact, Fier, Fifo, MinMaxPages, Retrieval, SelfDraft
from kvjax.generation import Stream, prefill
from kvjax.generation.drafts import Speculation
from kvjax.generation.prompt_inputs import pad_prompt
from kvjax.models import Decoder
from tests.generation.test_self_draft import CONFIG, PROMPT

NEW = 60
BY_SCORES = Retrieval(selector=Exact(), budget=12, sink=2, local=4, demote=Fifo(leave=16))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def run(model: Decoder, policy: Any, draft: bool) -> tuple[list[list[int]], Speculation | None]:
    """New tokens of each row, with drafts of 4 however often they are right, or without."""
    cache = kvjax.init(policy, model.spec(3, 128), layers=CONFIG.layers)
    drafter = None
    if draft:
        nothing = np.zeros((3, 1), np.int32), np.zeros(3, np.int32)
        drafter = replace(
            SelfDraft(4).start(model, cache, *nothing, NEW), price=jax.numpy.float32(0)
        )
    logits, cache = prefill(model, cache, *pad_prompt(PROMPT, None, rows=3))
    made = Stream(model, cache, logits, NEW, drafter=drafter)
    made.advance(NEW)
    kvjax.raise_on_overflow(made.cache)
    return made.rows, made.speculation


@pytest.fixture(scope="module")
def want(model: Decoder) -> list[list[int]]:
    """The text of full attention."""
    rows, _ = run(model, kvjax.Full(), False)
    return rows


@pytest.fixture(scope="module")
def blind(model: Decoder) -> float:
    """The share of right drafts by sink and local window alone, to which no selector adds."""
    window = replace(BY_SCORES, budget=BY_SCORES.sink + BY_SCORES.local)
    _, told = run(model, window, True)
    assert told is not None
    return told.acceptance


@pytest.mark.parametrize(
    "policy",
    [
        BY_SCORES,
        replace(BY_SCORES, selector=MinMaxPages(page=4), budget=18),
    ],
    ids=["scores", "pages"],
)
def test_the_text_is_that_of_full_attention(
    model: Decoder, policy: Retrieval, want: list[list[int]], blind: float
) -> None:
    """Over flushes, in rows of several lengths; and the selection helps."""
    found, told = run(model, Verified(policy), True)
    assert found == want
    assert told is not None
    assert told.acceptance > blind


def test_with_a_budget_for_all_tokens_each_draft_is_right(model: Decoder) -> None:
    """But those of the first round, before which nothing was verified. So no token is read twice
    or missed: one that was drafted and not accepted, or that left the local window."""
    _, told = run(model, Verified(replace(BY_SCORES, budget=128)), True)
    assert told is not None
    assert told.drafted - told.accepted <= 3 * 4


def test_methods_become_verified_ones_layer_by_layer() -> None:
    made = verified(kvjax.presets.parse("fier:budget=64"))
    assert [type(made.policy(i)).__name__ for i in range(3)] == ["Full", "Full", "Verified"]
    assert made.policy(2).budget == 64


def test_a_selection_for_each_query_head_is_refused() -> None:
    with pytest.raises(ValueError, match="selects for a group"):
        Verified(replace(BY_SCORES, selector=Fier(group=8, group_reduce="per_head")))
