"""Logits after each rule are those of transformers' processors, and greedy text is that of its generate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.generation.processors import History, Processors, process

V, S = 40, 48
STOP = np.array([7, 9], np.int32)


def theirs(settings: dict[str, Any], tokens: np.ndarray, logits: np.ndarray, prompt: int) -> np.ndarray:
    """The logits of one row after transformers' processors."""
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    asked = GenerationConfig(**settings, eos_token_id=STOP.tolist())
    asked._eos_token_tensor = torch.tensor(STOP)
    processors = LlamaForCausalLM(config)._get_logits_processor(asked, input_ids_seq_length=prompt, device="cpu")
    return processors(torch.tensor(tokens[None]).long(), torch.tensor(logits[None])).numpy()[0]


SETTINGS = {
    "penalty 1.05": {"repetition_penalty": 1.05},
    "penalty 1.3": {"repetition_penalty": 1.3},
    "penalty below 1": {"repetition_penalty": 0.8},
    "unigrams": {"no_repeat_ngram_size": 1},
    "bigrams": {"no_repeat_ngram_size": 2},
    "trigrams": {"no_repeat_ngram_size": 3},
    "five": {"no_repeat_ngram_size": 5},
    "suppress": {"suppress_tokens": [0, 3, 39]},
    "suppress at the beginning": {"begin_suppress_tokens": [1, 2]},
    "least": {"min_new_tokens": 4},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [5],
        "begin_suppress_tokens": [1, 2],
        "min_new_tokens": 2,
    },
}


@pytest.mark.torch
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_transformers(name: str) -> None:
    settings, rng = SETTINGS[name], np.random.default_rng(0)
    rows, traces = [], []

    @jax.jit
    def run(*args: Any) -> jax.Array:
        traces.append(args)
        return process(*args)

    for prompt, new in ((1, 0), (1, 1), (2, 0), (3, 1), (5, 3), (5, 4), (20, 20), (48, 0)):
        tokens = rng.integers(0, 6 if prompt + new > 4 else V, prompt + new).astype(np.int32)
        rows.append((tokens, prompt, new, rng.normal(size=V).astype(np.float32) * 4))
    processors = Processors(**settings)
    for tokens, prompt, new, logits in rows:
        start = processors.start(tokens[None, :prompt], np.array([prompt]), capacity=S, vocabulary=V)
        assert start is not None
        rules, history = start
        for token in tokens[prompt:]:
            history = history.push(jnp.array([token]), jnp.array([True]))
        found = run(rules, history, jnp.asarray(logits[None]), jnp.int32(new), STOP)
        np.testing.assert_allclose(found[0], theirs(settings, tokens, logits, prompt), rtol=1e-6)
    assert len(traces) == 1  # another value of a setting, or another length, compiles nothing


def test_a_row_ignores_the_others_and_what_is_past_its_count() -> None:
    rng = np.random.default_rng(1)
    processors = Processors(repetition_penalty=1.3, no_repeat_ngram_size=2)
    tokens, lengths = rng.integers(0, 5, (3, 12)).astype(np.int32), np.array([12, 3, 7])
    logits = rng.normal(size=(3, V)).astype(np.float32)
    rules, history = processors.start(tokens, lengths, capacity=S, vocabulary=V)
    whole = process(rules, history, jnp.asarray(logits), jnp.int32(1), STOP)
    for row in range(3):
        rules, alone = processors.start(tokens[row : row + 1], lengths[row : row + 1], capacity=S, vocabulary=V)
        poisoned = History(np.where(np.arange(S) < alone.count[:, None], alone.tokens, 3), alone.count)
        one = process(rules, poisoned, jnp.asarray(logits[row : row + 1]), jnp.int32(1), STOP)
        np.testing.assert_array_equal(one[0], whole[row])


def test_history_counts_as_a_prompt_does() -> None:
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    prompt = np.array([[4, 5, 6, 4]], np.int32)
    one = Processors(**settings).start(prompt, np.array([4]), capacity=S, vocabulary=V)
    two = Processors(**settings, history=((4, 5),)).start(prompt[:, 2:], np.array([2]), capacity=S, vocabulary=V)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_nothing_to_do_costs_nothing() -> None:
    assert Processors().idle
    assert Processors(history=((1,),)).idle
    assert Processors().start(None, np.zeros(1, int), capacity=S, vocabulary=V) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0}, "must be above 0, got 0; 1 changes nothing"),
        ({"repetition_penalty": -1.0}, "must be above 0, got -1.0"),
        ({"repetition_penalty": float("nan")}, "must be a finite number, got nan"),
        ({"repetition_penalty": "1.1"}, "must be a finite number, got '1.1'"),
        ({"no_repeat_ngram_size": -1}, "must be at least 0, got -1"),
        ({"no_repeat_ngram_size": 2.0}, "must be an integer, got 2.0"),
        ({"min_new_tokens": True}, "must be an integer, got True"),
        ({"min_new_tokens": 2**32 + 5}, "must be at most 2147483647"),
        ({"suppress_tokens": (-1,)}, "must be at least 0, got -1"),
        ({"begin_suppress_tokens": (1.5,)}, "must be an integer, got 1.5"),
    ],
)
def test_settings_refuse_what_means_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Processors(**settings)
