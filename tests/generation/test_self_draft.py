"""The text of full attention from a cache that selects: drafts by its selection, verified on
the same cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import Fifo, Retrieval, SelfDraft
from kvjax.generation import draft_length
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


def generate(
    model: Decoder, policy: Any, draft: Any = None, **settings: Any
) -> kvjax.generation.Generation:
    cache = kvjax.init(policy, model.spec(3, 96), layers=CONFIG.layers)
    return kvjax.generate(model, cache, PROMPT, max_new_tokens=NEW, draft=draft, **settings)


@pytest.mark.parametrize("draw", [None, sampling(0.8, top_k=10)], ids=["greedy", "drawn"])
def test_the_text_is_that_of_full_attention(model: Decoder, draw: Any) -> None:
    settings = {} if draw is None else {"sampling": draw, "key": jax.random.key(5)}
    want = generate(model, kvjax.Full(), stop_tokens=11, **settings)
    sparse = generate(model, POLICY, stop_tokens=11, **settings)
    found = generate(model, POLICY, SelfDraft(tokens=3), stop_tokens=11, **settings)
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


def test_a_row_whose_drafts_are_wrong_drafts_less() -> None:
    """The length follows the acceptance, and the price of a step."""
    rows, compared = jnp.ones(2, bool), jnp.full(2, 30.0)

    def length(right: float, price: float) -> int:
        drafter = _SelfDrafter(compared, jnp.full(2, right), jnp.float32(price), 6)
        return int(drafter.length(rows))

    assert length(0.0, 0.25) == 0
    assert 0 < length(15.0, 0.25) < length(29.0, 0.25) == 6
    assert length(29.0, 0.9) < 6


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
        costs = draft_length.step_costs(cache, weights, length)
        assert costs is not None
        return draft_length.why_idle(cache, costs, 4)

    assert idle(32768, 24) is None
    for length, batch in ((2048, 1), (8192, 24), (32768, 8)):
        assert "the cache is so short" in (idle(length, batch) or "")
