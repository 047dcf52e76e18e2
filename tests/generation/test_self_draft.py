"""The text of full attention from a cache that selects: drafts by its selection, verified on
the same cache.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import Fifo, Retrieval, SelfDraft
from kvjax.generation import draft_length, drafts
from kvjax.generation.drafts import _SelfDrafter, check_drafts_itself
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, layers=2, q_heads=4, kv_heads=2, head_dim=8,
    initializer_range=0.3,
)  # fmt: skip
POLICY = Retrieval(
    selector=kvjax.Fier(group=8), budget=12, sink=2, local=4, demote=Fifo(leave=16)
)
rng = np.random.default_rng(0)
PROMPT = [rng.integers(0, 40, n).tolist() for n in (45, 17, 31)]
NEW = 40


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


TEXT = 96  # tokens that hold each prompt with its new ones


@jax.jit
def whole_text(model: Decoder, tokens: np.ndarray) -> jax.Array:
    logits, _ = model(tokens)
    return logits


def of_whole_text(
    model: Decoder, prompt: list[int], new: list[int], temperature: float = 1.0
) -> np.ndarray:
    """By one pass of the model over the text without a cache: f32[n].

    Texts of all lengths are padded to one, as later tokens change nothing, and so share a
    program.
    """
    text = prompt + new
    padded = np.zeros((1, TEXT), np.int32)
    padded[0, : len(text)] = text
    logits = np.asarray(whole_text(model, padded)[0, len(prompt) - 1 : len(text) - 1])
    logits = logits.astype(np.float64) / temperature
    every = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return every[np.arange(len(new)), new]


def generate(
    model: Decoder, policy: Any, draft: Any = None, **settings: Any
) -> kvjax.generation.Generation:
    cache = kvjax.init(policy, model.spec(3, 96), layers=CONFIG.layers)
    return kvjax.generate(model, cache, PROMPT, max_new_tokens=NEW, draft=draft, **settings)


@pytest.mark.parametrize("draw", [None, sampling(0.8, top_k=10)], ids=["greedy", "drawn"])
def test_the_text_is_that_of_full_attention(model: Decoder, draw: Any) -> None:
    """With the log-probabilities of a pass over the whole text, up to a stop token."""
    settings = {} if draw is None else {"sampling": draw, "key": jax.random.key(5)}
    want = generate(model, kvjax.Full(), stop_tokens=11, **settings)
    sparse = generate(model, POLICY, stop_tokens=11, **settings)
    settings |= {"stop_tokens": 11, "log_probabilities": True}
    found = generate(model, POLICY, SelfDraft(tokens=3), **settings)
    assert sparse.rows != want.rows, "the selection misses nothing, so this shows nothing"
    assert found.rows == want.rows
    np.testing.assert_allclose(found.logits, want.logits, atol=1e-4)
    np.testing.assert_array_equal(found.cache.length, want.cache.length)
    told = found.speculation
    assert told is not None
    assert told.idle is None
    assert told.steps + told.accepted == sum(map(len, want.rows))
    assert told.accepted > 0
    kvjax.raise_on_overflow(found.cache)
    assert found.log_probabilities is not None
    temperature = 1.0 if draw is None else 0.8
    for prompt, new, told_of in zip(PROMPT, found.rows, found.log_probabilities, strict=True):
        likely = of_whole_text(model, prompt, new, temperature)
        np.testing.assert_allclose(told_of[: len(new)], likely, atol=1e-4)
        np.testing.assert_array_equal(told_of[len(new) :], 0)


def test_a_stream_has_log_probabilities_so_far(model: Decoder) -> None:
    """Of tokens by blocks, as of a whole generation; the same as `decode` from the logits."""
    want = generate(
        model, POLICY, SelfDraft(tokens=3), log_probabilities=True
    ).log_probabilities
    assert want is not None
    cache = kvjax.init(POLICY, model.spec(3, 96), layers=CONFIG.layers)
    run = kvjax.stream(
        model,
        cache,
        PROMPT,
        max_new_tokens=NEW,
        block=7,
        draft=SelfDraft(tokens=3),
        log_probabilities=True,
    )
    next(run)
    assert run.log_probabilities is not None
    for row, tokens in zip(run.log_probabilities, run.rows, strict=True):
        assert 0 < len(row) == len(tokens) < NEW
    list(run)
    np.testing.assert_allclose(run.log_probabilities, want, atol=1e-5)


WINDOW = kvjax.Evicting(evictor=kvjax.Sliding(sink=2), budget=24)


@pytest.mark.parametrize(
    "policy",
    [
        WINDOW,
        kvjax.PerLayer(first=(POLICY,), rest=WINDOW),
        kvjax.Speculative(POLICY),
        Retrieval(selector=kvjax.Fier(group=8), store=kvjax.HostOffload(), budget=12, local=4, demote=Fifo(leave=16)),
    ],
    ids=["evicting", "one layer evicts", "freekv", "host"],
)  # fmt: skip
def test_caches_that_do_not_keep_all_tokens_at_hand_are_refused(
    model: Decoder, policy: Any
) -> None:
    cache = jax.eval_shape(lambda: kvjax.init(policy, model.spec(1, 96), layers=CONFIG.layers))
    with pytest.raises(ValueError, match=r"on a cache that keeps every token on the device .*"):
        check_drafts_itself(cache)


@pytest.mark.parametrize("policy", [kvjax.Full(), kvjax.Compressed()], ids=["full", "codes"])
def test_caches_that_select_nothing_are_refused(model: Decoder, policy: Any) -> None:
    cache = jax.eval_shape(lambda: kvjax.init(policy, model.spec(1, 96), layers=CONFIG.layers))
    with pytest.raises(ValueError, match=r"by a selection, and with .* would read as much"):
        check_drafts_itself(cache)


def test_a_short_cache_drafts_nothing_and_says_so(model: Decoder) -> None:
    """It still gives the text of full attention, by steps of one token."""
    short = dataclasses.replace(POLICY, dense_capacity=128)
    want = generate(model, kvjax.Full())
    found = generate(model, short, SelfDraft(tokens=3), measure=True)
    assert found.rows == want.rows
    told = found.speculation
    assert told is not None
    assert (told.steps, told.drafted) == (sum(map(len, want.rows)), 0)
    assert told.idle is not None
    assert "attention to all of them is as fast as a selection" in told.idle


def drafter(right: Any, compared: Any, price: float) -> _SelfDrafter:
    """One of rows that were right in so many of the tokens compared, with drafts of up to 6."""
    return _SelfDrafter(
        jnp.asarray(compared, jnp.float32),
        jnp.asarray(right, jnp.float32),
        jnp.float32(price),
        6,
    )


def test_a_row_whose_drafts_are_wrong_drafts_less() -> None:
    """The length follows the acceptance, and the price of a step."""

    def length(right: float, price: float) -> int:
        found = drafter(np.full(2, right), np.full(2, 15.0), price)
        return int(found.best_length(jnp.ones(2, bool)))

    assert length(0.0, 0.25) == 0
    assert 0 < length(10.0, 0.25) < length(14.9, 0.25) == 6
    assert length(14.9, 0.9) < 6


@pytest.mark.parametrize("drafted", [0, 1, 2, 6])
def test_a_round_counts_its_draft_up_to_the_first_wrong_token(drafted: int) -> None:
    """What was counted before fades, and slowly if nothing was drafted."""
    fades = draft_length.MEMORY if drafted else draft_length.IDLE_MEMORY
    for right in range(drafted + 1):
        after = drafter([8.0], [10.0], 0.25).accept(
            jnp.zeros((1, 7), jnp.int32), jnp.array([1 + right]), jnp.array([drafted])
        )
        compared = min(right + 1, drafted)
        np.testing.assert_allclose(after.right, [8 * fades + right], rtol=1e-6)
        np.testing.assert_allclose(after.compared, [10 * fades + compared], rtol=1e-6)


@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6),
    price=st.floats(0.02, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_the_row_that_is_right_least_often_never_lengthens_a_draft(
    rates: list[float], price: float
) -> None:
    """All rows draft the same number of tokens: with it, no more than without it."""
    found = drafter(20 * np.array(rates), np.full(len(rates), 20.0), price)
    others = np.arange(len(rates)) != int(np.argmin(rates))
    alone = int(found.best_length(jnp.asarray(others)))
    together = int(found.best_length(jnp.ones(len(rates), bool)))
    # where two lengths pay equally, rounding decides
    assert together <= alone or min(rates) > sorted(rates)[1] - 1e-3


@pytest.mark.parametrize("price", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.95])
def test_drafts_are_never_much_slower_than_full_attention(rate: float, price: float) -> None:
    """However often drafts are right: the time of 1000 tokens, in full steps, by the rule that
    chooses lengths; and nearly the best of fixed lengths.
    """
    chance = jnp.asarray(np.random.default_rng(5).random((1000, 6)) < rate)
    active = jnp.ones(1, bool)

    @jax.jit
    def speed(start: _SelfDrafter) -> jax.Array:
        def round_of(carry: Any, right: jax.Array) -> tuple[Any, None]:
            state, tokens, time = carry
            now = start.with_state(state)
            length = now.best_length(active)
            good = jnp.cumprod(right & (jnp.arange(6) < length)).sum()
            after = now.accept(jnp.zeros((1, 7), jnp.int32), 1 + good[None], length[None])
            drafting = draft_length.VERIFICATION * (1 + length.astype(jnp.float32) * price)
            full = jnp.where(length > 0, drafting, 1.0)
            more = tokens < 1000
            tokens += jnp.where(more, 1 + good, 0)
            time += jnp.where(more, full, 0.0)
            return (after.state, tokens, time), None

        zero = jnp.zeros((), jnp.int32), jnp.zeros(())
        (_, tokens, time), _ = jax.lax.scan(round_of, (start.state, *zero), chance)
        return tokens.astype(jnp.float32) / time

    found = float(speed(drafter(np.zeros(1), np.zeros(1), price)))
    costs = draft_length.StepCosts(full=1.0, draft=price * draft_length.VERIFICATION)
    best = max(1.0, *(costs.gain(n, rate) for n in range(1, 7)))
    assert found > 0.95
    assert found > 0.92 * best


def test_a_round_that_drafts_nothing_feeds_one_token(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts do not pay, and where one token is left: counted as the program runs."""
    verified = Counter[int]()

    def counting(tokens: Any, cache: Any, **how: Any) -> Any:
        if how.get("exact"):
            jax.debug.callback(lambda: verified.update([tokens.shape[1]]))
        return model(tokens, cache, **how)

    def tokens_fed(new: int) -> tuple[Counter[int], Any]:
        """Of exact steps, their tokens, and what the run says of its drafts."""
        cache = kvjax.init(POLICY, model.spec(3, 96), layers=CONFIG.layers)
        verified.clear()
        made = kvjax.generate(
            counting, cache, PROMPT, max_new_tokens=new, draft=SelfDraft(tokens=3)
        )
        jax.effects_barrier()
        return Counter(verified), made.speculation

    counts, told = tokens_fed(1)
    assert counts == {1: 1}
    assert told.steps == 3
    counts, told = tokens_fed(20)
    assert counts[4] > 0
    monkeypatch.setattr(drafts, "PRICE", 2.0)
    counts, told = tokens_fed(20)
    assert counts == {1: 20}
    assert (told.steps, told.drafted) == (60, 0)


def test_a_model_that_reports_nothing_can_draft(model: Decoder) -> None:
    """One without `info`, which only `measure` needs."""

    def silent(
        tokens: Any,
        cache: Any,
        *,
        lengths: Any = None,
        active: Any = None,
        last_logits: bool = False,
        first_chunk: bool = False,
        steps: bool = False,
        exact: bool = False,
    ) -> Any:
        how: dict[str, Any] = {"lengths": lengths, "active": active, "last_logits": last_logits}
        how |= {"first_chunk": first_chunk, "steps": steps, "exact": exact}
        return model(tokens, cache, **how)

    cache = kvjax.init(POLICY, model.spec(3, 96), layers=CONFIG.layers)
    drafted = kvjax.generate(
        silent, cache, PROMPT, max_new_tokens=NEW, draft=SelfDraft(tokens=3)
    )
    assert drafted.rows == generate(model, kvjax.Full()).rows


def test_where_drafts_do_not_pay_the_text_is_that_of_full_attention(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps of one token, which are measured too."""
    monkeypatch.setattr(drafts, "PRICE", 2.0)
    want = generate(model, kvjax.Full(), measure=True)
    found = generate(model, POLICY, SelfDraft(tokens=3), measure=True)
    assert found.rows == want.rows
    np.testing.assert_allclose(found.attended, want.attended, rtol=1e-6)


def test_drafts_pay_where_the_cache_outweighs_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By step times that are known for an H200."""
    monkeypatch.setattr(draft_length, "_known", lambda: frozenset({"Fier"}))
    policy = Retrieval(selector=kvjax.Fier(), budget=1024)
    weights = 3.1e9

    def idle(length: int, batch: int) -> str | None:
        spec = kvjax.CacheSpec(
            batch=batch, q_heads=12, kv_heads=2, head_dim=128, capacity=length
        )
        cache = jax.eval_shape(lambda: kvjax.init(policy, spec, layers=28))
        costs = draft_length.step_costs(cache, weights, length, 1)
        assert costs is not None
        return draft_length.why_idle(cache, costs, 4)

    assert idle(32768, 24) is None
    for length, batch in ((2048, 1), (8192, 24), (32768, 8)):
        assert "the cache is so short" in (idle(length, batch) or "")
