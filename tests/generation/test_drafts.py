"""Drafts change the speed of a text, never the text; and how they are refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import DraftModel, Fifo, PromptLookup, Retrieval
from kvjax.generation.drafts import (
    Round,
    Speculation,
    _LookupDrafter,
    accepted,
    check_known,
    check_tokenizers,
    parse,
)
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, layers=1, q_heads=4, kv_heads=2, head_dim=8,
    initializer_range=0.3,
)  # fmt: skip
POLICY = Retrieval(
    selector=kvjax.Fier(group=8), budget=20, sink=2, local=4, demote=Fifo(leave=16)
)
PROMPT = [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], [9, 9, 9, 9, 9]]
NEW = 40


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def generate(
    model: Decoder, policy: Any, draft: Any = None, **settings: Any
) -> kvjax.generation.Generation:
    cache = kvjax.init(policy, model.spec(2, 64), layers=CONFIG.layers)
    return kvjax.generate(model, cache, PROMPT, max_new_tokens=NEW, draft=draft, **settings)


@pytest.mark.parametrize(
    "draw",
    [None, pytest.param(sampling(0.8, top_k=10), marks=pytest.mark.thorough)],
    ids=["greedy", "drawn"],
)
def test_drafts_do_not_change_the_text(model: Decoder, draw: Any) -> None:
    """By prompt lookup over a selecting cache, whose block is flushed meanwhile; the cache then
    continues alike.
    """
    settings = {} if draw is None else {"sampling": draw, "key": jax.random.key(5)}
    stop = 11  # a token that a row writes may end it
    plain = generate(model, POLICY, measure=True, stop_tokens=stop, **settings)
    fast = generate(
        model,
        POLICY,
        PromptLookup(ngram=2, tokens=3),
        measure=True,
        stop_tokens=stop,
        **settings,
    )
    assert fast.rows == plain.rows
    np.testing.assert_allclose(fast.logits, plain.logits, atol=1e-4)
    np.testing.assert_allclose(fast.attended, plain.attended, rtol=1e-5)
    np.testing.assert_array_equal(fast.cache.length, plain.cache.length)
    told = fast.speculation
    assert told is not None
    assert told.steps + told.accepted == sum(map(len, plain.rows))
    assert told.drafted > 0


def test_a_model_that_drafts_itself_is_always_right(model: Decoder) -> None:
    plain, fast = (
        generate(model, kvjax.Full()),
        generate(model, kvjax.Full(), DraftModel(model, tokens=3)),
    )
    assert fast.rows == plain.rows
    told = fast.speculation
    assert told is not None
    assert told.acceptance == 1
    assert told.tokens_per_step == NEW / -(-NEW // 4)


@pytest.mark.parametrize("leave", [4, 8])
def test_a_drafting_cache_holds_what_was_accepted(model: Decoder, leave: int) -> None:
    """Its recent block is flushed between drafts, never within one, which could not be taken
    back.
    """
    own = kvjax.Compressed(store=kvjax.Dense(), demote=Fifo(leave=leave))
    cache = kvjax.init(kvjax.Full(), model.spec(2, 64), layers=CONFIG.layers)
    draft = DraftModel(Decoder(CONFIG, rngs=nnx.Rngs(4)), tokens=3, cache=own)
    run = kvjax.stream(model, cache, PROMPT, max_new_tokens=NEW, draft=draft)
    for _ in run:
        pass
    assert run.rows == generate(model, kvjax.Full()).rows
    drafter = run._now.drafter
    np.testing.assert_array_equal(drafter.cache.length, drafter.length)
    kvjax.raise_on_overflow(drafter.cache)


@pytest.mark.parametrize(
    "draft", [PromptLookup(ngram=2, tokens=3), "model"], ids=["lookup", "model"]
)
def test_drafts_with_64_bit_types_give_the_same_tokens(model: Decoder, draft: Any) -> None:
    plain = generate(model, kvjax.Full())
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        fast = generate(
            model, kvjax.Full(), DraftModel(model, tokens=3) if draft == "model" else draft
        )
    assert fast.rows == plain.rows


@pytest.mark.parametrize("draws", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("size", [39, 64])  # of fewer tokens and of more
def test_a_draft_model_may_pad_its_vocabulary_to_another_size(
    model: Decoder, size: int, draws: bool
) -> None:
    """Two models of one tokenizer of 32 tokens, whose padding comes as often as other ids."""
    small = Decoder(dataclasses.replace(CONFIG, vocab_size=size), rngs=nnx.Rngs(3))
    how = {"sampling": sampling(1.0), "key": jax.random.key(1)} if draws else {}
    prompt = [[min(token, 31) for token in row] for row in PROMPT]

    def run(draft: Any) -> Any:
        cache = kvjax.init(kvjax.Full(), model.spec(2, 64), layers=CONFIG.layers)
        return kvjax.generate(model, cache, prompt, max_new_tokens=NEW, draft=draft, **how)

    fast = run(DraftModel(small, tokens=3))
    assert fast.rows == run(None).rows
    assert fast.speculation.drafted > 0


def test_a_draft_model_that_is_the_model_but_for_padding_is_always_right(
    model: Decoder,
) -> None:
    wide = Decoder(dataclasses.replace(CONFIG, vocab_size=41), rngs=nnx.Rngs(3))

    def padded(old: jax.Array, new: jax.Array) -> jax.Array:
        return new.at[tuple(map(slice, old.shape))].set(old)

    nnx.update(wide, jax.tree.map(padded, nnx.state(model), nnx.state(wide)))
    fast = generate(model, kvjax.Full(), DraftModel(wide, tokens=3))
    assert fast.rows == generate(model, kvjax.Full()).rows
    assert fast.speculation is not None
    assert fast.speculation.acceptance == 1


def test_tokenizers_are_compared_by_the_ids_of_their_tokens() -> None:
    @dataclasses.dataclass
    class Words:
        vocabulary: dict[str, int]

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    model = Words({"a": 0, "b": 1, "<pad>": 2})
    check_tokenizers(Words({"a": 0, "b": 1}), model)
    check_tokenizers(Words({"a": 0, "b": 1, "<tool>": 7}), model)
    with pytest.raises(ValueError, match="gives 'b' the id 2 and the model's 1"):
        check_tokenizers(Words({"a": 0, "b": 2}), model)


def test_what_pads_a_prompt_is_none_of_its_tokens(model: Decoder) -> None:
    """A draft model must know the tokens of each row, one before its end, at it, and after."""
    prompt = np.array([[1, 2, 39, 40, 41], [39, 38, 40, 0, 0]])
    check_known(model, prompt, np.array([3, 2]))
    for lengths in ([4, 2], [3, 3]):
        with pytest.raises(ValueError, match="the token id 40, and the draft model has a voc"):
            check_known(model, prompt, np.array(lengths))
    check_known(model, prompt, np.array([0, 0]))
    one = Decoder(dataclasses.replace(CONFIG, vocab_size=1))
    check_known(one, np.zeros((1, 3), int), np.array([3]))


def test_a_stream_with_drafts_gives_the_same_tokens(model: Decoder) -> None:
    plain = generate(model, kvjax.Full())
    cache = kvjax.init(kvjax.Full(), model.spec(2, 64), layers=CONFIG.layers)
    run = kvjax.stream(
        model, cache, PROMPT, max_new_tokens=NEW, draft=PromptLookup(ngram=2, tokens=3)
    )
    pieces = list(run)
    assert run.rows == plain.rows
    assert all(piece.shape[1] <= 4 for piece in pieces)
    assert run.speculation is not None


def test_drafts_keep_the_distribution() -> None:
    """For 4 tokens at temperature 1, whatever is drafted, pairs of tokens are as likely as the
    model says.
    """
    logits = np.log(
        np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    )

    @dataclasses.dataclass(frozen=True)
    class Chain:
        """The next token depends on the last alone."""

        def __call__(
            self, tokens: Any, cache: Any, *, lengths: Any = None, active: Any = None, last_logits: bool = False,
            first_chunk: bool = False, steps: bool = False, info: bool = False,
        ) -> Any:  # fmt: skip
            out = jnp.asarray(logits, jnp.float32)[tokens]
            count = (
                jnp.full(len(tokens), tokens.shape[1], jnp.int32)
                if lengths is None
                else lengths
            )
            state = dataclasses.replace(cache.layers[0].state, tokens=dataclasses.replace(
                cache.layers[0].state.tokens, count=cache.length + jnp.where(
                    True if active is None else active, count, 0)))  # fmt: skip
            cache = dataclasses.replace(
                cache, layers=(dataclasses.replace(cache.layers[0], state=state),)
            )
            return (
                out[jnp.arange(len(out)), jnp.maximum(count - 1, 0)] if last_logits else out
            ), cache

    rows, n = 4000, 3
    spec = kvjax.CacheSpec(
        batch=rows, q_heads=1, kv_heads=1, head_dim=1, capacity=32, dtype="float32"
    )
    cache = kvjax.init(kvjax.Full(), spec, layers=1)
    prompt = np.tile([[0, 1, 2, 0, 1, 0]], (rows, 1))
    made = kvjax.generate(
        jax.tree_util.Partial(Chain()), cache, prompt, max_new_tokens=n, sampling=sampling(1.0), key=jax.random.key(0),
        draft=PromptLookup(ngram=1, tokens=2),
    )  # fmt: skip
    assert made.speculation is not None
    assert 0.1 < made.speculation.acceptance < 0.9
    p = np.exp(logits)
    found = Counter(map(tuple, made.tokens.tolist()))
    for text in np.ndindex(4, 4, 4):
        want = p[0, text[0]] * p[text[0], text[1]] * p[text[1], text[2]]
        assert abs(found[text] / rows - want) < 5 * np.sqrt(want * (1 - want) / rows), text


def test_prompt_lookup_finds_the_last_place_of_the_longest_run() -> None:
    texts = [
        [1, 2, 3, 7, 2, 3, 8, 5, 2],
        [4, 4, 4],
        [1, 2, 3],
        [2, 3, 8, 5, 3, 9, 1, 6, 2],
        [6, 7, 8],
    ]
    text = np.zeros((5, 16), np.int32)
    for row, known in zip(text, texts, strict=True):
        row[: len(known)] = known
    drafter = _LookupDrafter(jnp.asarray(text), jnp.array([9, 3, 3, 9, 3]), 2, 4)
    token, active = jnp.array([3, 4, 9, 3, 6]), jnp.ones(5, bool)
    now = Round(None, None, token, active, jnp.full(5, 4), None)  # type: ignore[arg-type]
    draft, count, *_ = drafter.propose(now)
    assert [
        row[:n].tolist() for row, n in zip(np.asarray(draft), count.tolist(), strict=True)
    ] == [
        [8, 5, 2, 3],
        [4],
        [],
        [8, 5, 3, 9],  # after (2, 3), though a 3 came later
        [7, 8, 6],
    ]
    tokens, taken = jnp.array([[3, 8, 5, 2, 3]] * 5), jnp.array([2, 0, 1, 0, 0])
    after = drafter.accept(tokens, taken, count)
    assert after.length.tolist() == [11, 3, 4, 9, 3]
    assert after.text[0, 9:12].tolist() == [3, 8, 0]


def test_acceptance_stops_at_the_first_difference_and_at_an_end() -> None:
    drawn, draft = (
        jnp.array([[1, 2, 3], [1, 9, 3], [1, 2, 3], [1, 2, 3]]),
        jnp.array([[1, 2, 3]] * 4),
    )
    ended = jnp.array([[False] * 3, [False] * 3, [False] * 3, [False, True, False]])
    assert accepted(drawn, draft, jnp.array([3, 3, 1, 3]), ended).tolist() == [3, 1, 1, 1]
    assert Speculation(10, 20, 5).acceptance == 0.25
    assert Speculation(10, 20, 5).tokens_per_step == 1.5


def test_drafts_that_cannot_work_are_refused_before_the_prompt(model: Decoder) -> None:
    with pytest.raises(
        ValueError,
        match=r"drafts need a cache that can take back tokens, which layer 0 with Evicting",
    ):
        generate(model, kvjax.presets.tova(32).rest, PromptLookup())
    with pytest.raises(
        ValueError, match=r"draft of 8 tokens .* more than the 8 that .* draft at most 7"
    ):
        generate(
            model, dataclasses.replace(POLICY, demote=Fifo(leave=8)), PromptLookup(tokens=8)
        )
    other = Decoder(dataclasses.replace(CONFIG, vocab_size=9))
    with pytest.raises(
        ValueError, match=r"token id \d+, and the draft model has a vocabulary of 9 tokens"
    ):
        generate(model, kvjax.Full(), DraftModel(other))
    for tokens in (0, 16):
        with pytest.raises(ValueError, match=r"PromptLookup\(tokens=\.\.\.\) must be at"):
            PromptLookup(tokens=tokens)
    with pytest.raises(
        ValueError,
        match=r"a SelfDraft, a PromptLookup or a DraftModel, got the class PromptLookup; make an inst",
    ):
        generate(model, kvjax.Full(), PromptLookup)
    with pytest.raises(
        ValueError,
        match=r"got the string 'prompt-lookup'; write it as code, .* kvjax\..*\.PromptLookup\(\)",
    ):
        generate(model, kvjax.Full(), "prompt-lookup")
    with pytest.raises(
        ValueError,
        match=r"got a Decoder; to draft with it, write kvjax\..*\.DraftModel\(model\)",
    ):
        generate(model, kvjax.Full(), model)
    assert parse("prompt-lookup") == PromptLookup()
    with pytest.raises(
        ValueError,
        match=r"speculate='lookup' must be self or self:TOKENS .*, prompt-lookup, or prompt-lookup:NGRAM,TOKENS",
    ):
        parse("lookup")


@pytest.mark.parametrize("run", [kvjax.generate, kvjax.stream], ids=["generate", "stream"])
def test_a_refused_draft_leaves_the_conversation_as_it_was(model: Decoder, run: Any) -> None:
    """The cache of the last turn is donated only when the draft has been accepted."""
    first = generate(model, kvjax.Full())
    for draft, message in (
        (
            DraftModel(model),
            "holds 52 tokens before this prompt, which the draft model has not read",
        ),
        (
            DraftModel(Decoder(dataclasses.replace(CONFIG, vocab_size=3))),
            "has a vocabulary of 3 tokens",
        ),
        (PromptLookup, "got the class PromptLookup"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, first.cache, [[3], [4]], max_new_tokens=2, draft=draft)
        np.testing.assert_array_equal(first.cache.length, np.add(first.lengths, [12, 5]))
