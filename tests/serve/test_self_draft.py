"""An engine whose rows draft for themselves: each request gets the text of full attention."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import SelfDraft
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder
from tests.fuzz import requests as fuzz_requests
from tests.generation.test_self_draft import CONFIG, POLICY, of_whole_text


def test_requests_that_take_turns_get_the_text_of_full_attention() -> None:
    """Greedy ones and a drawn one, with stop tokens, in fewer slots than there are requests."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    spec = model.spec(2, 96)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 40, n).tolist() for n in (40, 12, 25, 33)]
    draws = [None, sampling(0.8), None, None]

    def answers(policy: object, speculate: object) -> tuple[list[list[int]], kvjax.Engine]:
        engine = kvjax.Engine(
            model,
            kvjax.init(policy, spec, layers=CONFIG.layers),
            block=8,
            chunk=16,
            speculate=speculate,
            log_probabilities=True,  # as below, so that its programs serve here
        )
        requests = []
        for prompt, draw in zip(prompts, draws, strict=True):
            drawn = {} if draw is None else {"sampling": draw, "key": jax.random.key(7)}
            requests += engine.submit(prompt, max_new_tokens=20, stop_tokens=(11,), **drawn)
        engine.run()
        return [request.tokens for request in requests], engine

    want, plain = answers(kvjax.Full(), None)
    found, engine = answers(POLICY, SelfDraft(tokens=3))
    assert found == want
    assert plain.speculation() is None
    told = engine.speculation()
    assert told is not None
    assert 0 < told.accepted < told.drafted


def test_the_acceptance_is_of_the_tokens_that_were_seen() -> None:
    """So that it waits for no block that the device was asked for."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    cache = kvjax.init(POLICY, model.spec(2, 96), layers=CONFIG.layers)
    engine = kvjax.Engine(
        model, cache, block=8, chunk=16, speculate=SelfDraft(tokens=3), log_probabilities=True
    )
    (request,) = engine.submit([1, 2, 3], max_new_tokens=30)
    steps = []
    while not request.done:
        engine.step()
        told = engine.speculation()
        assert told is not None
        assert told.steps + told.accepted == len(request.tokens)
        steps.append(told.steps)
    assert steps[0] == 0
    assert steps == sorted(steps)


def test_drafts_are_judged_by_rows_that_are_half_full(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = SelfDraft.start, list[tuple[list[int], int]]()

    def start(
        self: SelfDraft, model: Any, cache: Any, prompt: Any, lengths: Any, new_tokens: int
    ) -> Any:
        seen.append((lengths.tolist(), new_tokens))
        return real(self, model, cache, prompt, lengths, new_tokens)

    monkeypatch.setattr(SelfDraft, "start", start)
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    cache = kvjax.init(POLICY, model.spec(2, 97), layers=CONFIG.layers)
    kvjax.Engine(model, cache, speculate="self")
    assert seen == [([48, 48], 0)]


@pytest.mark.parametrize("speculate", [None, SelfDraft(tokens=3)], ids=["plain", "self"])
def test_requests_have_the_log_probabilities_of_their_tokens(speculate: object) -> None:
    """Those of one pass over each text, by blocks, with a stop token and a temperature."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    policy = kvjax.Full() if speculate is None else POLICY
    engine = kvjax.Engine(
        model,
        kvjax.init(policy, model.spec(2, 96), layers=CONFIG.layers),
        block=8,
        chunk=16,
        speculate=speculate,
        log_probabilities=True,
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 40, n).tolist() for n in (40, 12, 25)]
    drawn = {"sampling": sampling(0.8), "key": jax.random.key(7)}
    for i, prompt in enumerate(prompts):
        how = drawn if i == 1 else {}
        (request,) = engine.submit(prompt, max_new_tokens=20, stop_tokens=(11,), **how)
        engine.run()
        want = of_whole_text(model, prompt, request.tokens, 0.8 if how else 1.0)
        np.testing.assert_allclose(request.log_probabilities, want, atol=1e-4)


def test_an_engine_refuses_drafts_from_the_text_of_one_run() -> None:
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    cache = kvjax.init(POLICY, model.spec(2, 96), layers=CONFIG.layers)
    with pytest.raises(
        ValueError, match=r"must be 'self' or a kvjax\.SelfDraft, got a PromptLookup"
    ):
        kvjax.Engine(model, cache, speculate="prompt-lookup")


def test_drafts_in_slots_of_several_capacities_are_refused() -> None:
    model = Decoder(CONFIG, rngs=nnx.Rngs(3))
    cache = kvjax.init(POLICY, model.spec(2, 96), layers=CONFIG.layers)
    with pytest.raises(ValueError, match="leave out small_slots, or make another engine"):
        kvjax.Engine(model, cache, speculate="self", small_slots={64: 1})


@pytest.mark.parametrize("seed", [3, 16, 26, 35])
def test_a_row_ends_where_its_logits_are_not_finite(seed: int) -> None:
    """Of drafts after that none is accepted: all of them, and all that follow, would be token 0.
    A draft may name the token whose weights are damaged before it is drawn. So these select in
    each step: few are wrong.
    """
    model = fuzz_requests.model_of("with drafts")

    def answer(policy: Any, speculate: SelfDraft | None) -> kvjax.serve.Request:
        cache = kvjax.init(policy, model.spec(1, 96), layers=fuzz_requests.CONFIG.layers)
        engine = kvjax.Engine(model, cache, chunk=32, block=16, speculate=speculate)
        (request,) = engine.submit(
            list(range(1, 60)),
            max_new_tokens=25,
            sampling=sampling(1.5),
            key=jax.random.key(seed),
        )
        engine.run()
        return request

    policy = kvjax.presets.parse(fuzz_requests.POLICIES["with drafts"])
    plain, drafted = (
        answer(kvjax.Full(), None),
        answer(policy, SelfDraft(steps_per_selection=1)),
    )
    assert (plain.reason, drafted.reason) == ("error", "error")
    assert plain.tokens[-1] == fuzz_requests.NAN
    assert drafted.tokens == plain.tokens[: len(drafted.tokens)]
    assert len(drafted.tokens) >= len(plain.tokens) - 4  # a draft's tokens
