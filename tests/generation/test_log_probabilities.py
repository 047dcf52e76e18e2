"""The log-probabilities of new tokens: those of the model for the whole text, and with
drafts those of the steps that verify. Those of a self-draft are in test_self_draft.py.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import PromptLookup
from kvjax.generation.drafts import DraftModel
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder
from tests.generation.test_self_draft import CONFIG, NEW, POLICY, PROMPT, of_whole_text


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def generate(model: Decoder, policy: Any, **settings: Any) -> kvjax.generation.Generation:
    cache = kvjax.init(policy, model.spec(3, 96), layers=CONFIG.layers)
    settings = {"max_new_tokens": NEW, "log_probabilities": True} | settings
    return kvjax.generate(model, cache, PROMPT, **settings)


DRAWN: dict[str, Any] = {"sampling": sampling(0.8, top_k=10), "key": jax.random.key(5)}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (kvjax.Full(), {}),
    "plain, drawn": (kvjax.Full(), DRAWN),
    "plain, with rules": (kvjax.Full(), {"processors": Processors(repetition_penalty=1.3)}),
    "prompt look-up": (kvjax.Full(), {"draft": PromptLookup(ngram=2, tokens=4)}),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_a_pass_over_the_whole_text(model: Decoder, name: str) -> None:
    """In rows that end at a stop token, and in others."""
    policy, how = CASES[name]
    found = generate(model, policy, stop_tokens=11, **how)
    assert found.log_probabilities is not None
    assert found.log_probabilities.shape == found.tokens.shape
    for prompt, new, log_probabilities in zip(
        PROMPT, found.rows, found.log_probabilities, strict=True
    ):
        want = of_whole_text(model, prompt, new, 0.8 if "sampling" in how else 1.0)
        np.testing.assert_allclose(log_probabilities[: len(new)], want, atol=1e-4)
        np.testing.assert_array_equal(log_probabilities[len(new) :], 0)


def test_a_selection_alone_has_others(model: Decoder) -> None:
    """So those of a self-draft are not the draft's."""
    found = generate(model, POLICY)
    assert found.log_probabilities is not None
    want = [of_whole_text(model, *row) for row in zip(PROMPT, found.rows, strict=True)]
    assert np.abs(found.log_probabilities - np.stack(want)).max() > 0.1


def test_a_draft_model_does_not_change_them(model: Decoder) -> None:
    draft = DraftModel(Decoder(CONFIG, rngs=nnx.Rngs(4)), tokens=3)
    found, want = generate(model, kvjax.Full(), draft=draft), generate(model, kvjax.Full())
    assert found.rows == want.rows
    np.testing.assert_allclose(found.log_probabilities, want.log_probabilities, atol=1e-4)


def test_decode_gives_them_too(model: Decoder) -> None:
    read = generate(model, kvjax.Full(), max_new_tokens=1, log_probabilities=False)
    assert read.log_probabilities is None
    found = kvjax.generation.decode(
        model, read.cache, read.logits, max_new_tokens=5, log_probabilities=True
    )
    for prompt, first, new, log_probabilities in zip(
        PROMPT, read.rows, found.rows, found.log_probabilities, strict=True
    ):
        want = of_whole_text(model, prompt + first, new)
        np.testing.assert_allclose(log_probabilities, want, atol=1e-4)
