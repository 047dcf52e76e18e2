"""Logits after each rule are those of transformers' processors, and greedy text is that of its
generate.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation import stream
from kvjax.generation.loops import decode_loop
from kvjax.generation.processors import History, Processors, process

V, S = 40, 48
STOP = np.array([7, 9], np.int32)


def theirs(
    settings: dict[str, Any], tokens: np.ndarray, logits: np.ndarray, prompt: int
) -> np.ndarray:
    """The logits of one row after transformers' processors."""
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    asked = GenerationConfig(**settings, eos_token_id=STOP.tolist())
    asked._eos_token_tensor = torch.tensor(STOP)
    processors = LlamaForCausalLM(config)._get_logits_processor(
        asked, input_ids_seq_length=prompt, device="cpu"
    )
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
        start = processors.start(
            tokens[None, :prompt], np.array([prompt]), capacity=S, vocabulary=V
        )
        assert start is not None
        rules, history = start
        history, other = (
            history.with_rows([tokens[prompt:]]),
            history.with_new(np.pad(tokens[None, prompt:], ((0, 0), (0, 5))), new),
        )
        jax.tree.map(np.testing.assert_array_equal, history, other)
        found = run(rules, history, jnp.asarray(logits[None]), jnp.int32(new), STOP)
        np.testing.assert_allclose(
            found[0], theirs(settings, tokens, logits, prompt), rtol=1e-6
        )
    assert len(traces) == 1  # another value of a setting, or another length, compiles nothing


def test_a_row_ignores_the_others_and_what_is_past_its_count() -> None:
    rng = np.random.default_rng(1)
    processors = Processors(repetition_penalty=1.3, no_repeat_ngram_size=2)
    tokens, lengths = rng.integers(0, 5, (3, 12)).astype(np.int32), np.array([12, 3, 7])
    logits = rng.normal(size=(3, V)).astype(np.float32)
    rules, history = processors.start(tokens, lengths, capacity=S, vocabulary=V)
    run = jax.jit(process)
    whole = run(rules, history, jnp.asarray(logits), jnp.int32(1), STOP)
    for row in range(3):
        rules, alone = processors.start(
            tokens[row : row + 1], lengths[row : row + 1], capacity=S, vocabulary=V
        )
        poisoned = History(
            np.where(np.arange(S) < alone.count[:, None], alone.tokens, 3), alone.count
        )
        one = run(rules, poisoned, jnp.asarray(logits[row : row + 1]), jnp.int32(1), STOP)
        np.testing.assert_array_equal(one[0], whole[row])


def test_history_counts_as_a_prompt_does() -> None:
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    prompt = np.array([[4, 5, 6, 4]], np.int32)
    one = Processors(**settings).start(prompt, np.array([4]), capacity=S, vocabulary=V)
    two = Processors(**settings, history=((4, 5),)).start(
        prompt[:, 2:], np.array([2]), capacity=S, vocabulary=V
    )
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


# ------------------------------------------------------------------------------------------------ through the loops


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama of transformers, and the directory that it is saved to."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=STOP.tolist(),
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, folder


GREEDY = {
    name: settings
    for name, settings in SETTINGS.items()
    if name not in ("unigrams", "penalty below 1")
}
GREEDY["suppress"] = {"suppress_tokens": list(range(1, V, 2))}
GREEDY["suppress at the beginning"] = {"begin_suppress_tokens": list(range(1, V, 2))}
GREEDY["a prompt's own n-grams"] = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.5}


# Each rule alone is compared by its logits above, and here by the text of a model only with
# --thorough.
@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=()
            if name in ("all", "least", "a prompt's own n-grams")
            else pytest.mark.thorough,
        )
        for name in GREEDY
    ],
)
def test_greedy_text_of_a_checkpoint_is_that_of_transformers(both: Any, name: str) -> None:
    import torch

    theirs, folder = both
    settings, rng = GREEDY[name], np.random.default_rng(3)
    (folder / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": STOP.tolist()})
    )
    checkpoint = kvjax.models.load(folder, dtype=jnp.float32)
    changed = 0
    for length in (1, 4, 17):
        prompt = rng.integers(10, 14 if length > 4 else V, length).tolist()
        wanted = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=STOP.tolist(),
            **settings,
        )[0, length:].tolist()
        plain = generate_rows(checkpoint, [prompt], Processors())[0]
        assert generate_rows(checkpoint, [prompt], checkpoint.processors)[0] == wanted
        blocks = stream(
            checkpoint.model,
            checkpoint.init_cache(capacity=64),
            [prompt],
            max_new_tokens=20,
            stop_tokens=STOP,
            processors=checkpoint.processors,
            block=3,
        )
        assert np.concatenate(list(blocks), axis=1)[0].tolist() == wanted
        drafts = kvjax.PromptLookup(ngram=1, tokens=4)
        assert (
            generate_rows(checkpoint, [prompt], checkpoint.processors, draft=drafts)[0]
            == wanted
        )
        changed += plain != wanted
    assert changed or name in ("least", "five", "penalty 1.05", "suppress at the beginning"), (
        "nothing was compared"
    )


def generate_rows(
    checkpoint: Any, rows: list[list[int]], processors: Processors, **more: Any
) -> list[list[int]]:
    cache = checkpoint.init_cache(capacity=64, batch=len(rows))
    settings = {"max_new_tokens": 20, "stop_tokens": STOP, "processors": processors, **more}
    return kvjax.generate(checkpoint.model, cache, rows, **settings).rows


@pytest.mark.torch
def test_rows_of_a_batch_have_the_text_that_each_has_alone_and_settings_share_a_program(
    both: Any,
) -> None:
    checkpoint = kvjax.models.load(both[1], dtype=jnp.float32)
    rows = [[10, 11, 10, 11], [12], [3, 4, 5, 6, 3, 4]]
    first = Processors(repetition_penalty=1.3, no_repeat_ngram_size=2)
    found = generate_rows(checkpoint, rows, first)
    size = decode_loop._cache_size()
    for row, own in zip(rows, found, strict=True):
        assert generate_rows(checkpoint, [row] * 3, first)[0] == own
    generate_rows(
        checkpoint,
        rows,
        Processors(repetition_penalty=1.1, suppress_tokens=(3, 4), min_new_tokens=5),
    )
    assert decode_loop._cache_size() == size


@pytest.mark.torch
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"bad_words_ids": [[3]], "num_beams": 4}, "bad_words_ids, num_beams"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id"),
        ({"min_length": 10}, "min_length"),
        (
            {
                "num_beams": 1,
                "min_length": 0,
                "temperature": 0.7,
                "top_k": 5,
                "penalty_alpha": None,
            },
            None,
        ),
    ],
)
def test_what_is_not_applied_is_told_once(
    both: Any, asked: dict[str, Any], named: str | None
) -> None:
    folder = both[1]
    (folder / "generation_config.json").write_text(json.dumps(asked))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kvjax.models.load(folder)
    told = [str(one.message) for one in seen if "generation_config" in str(one.message)]
    assert len(told) == (named is not None)
    assert named is None or f"asks for {named}, which kvjax does not apply" in told[0]


@pytest.mark.torch
@pytest.mark.parametrize(
    "bad",
    [{"repetition_penalty": 0}, {"repetition_penalty": "1"}, {"no_repeat_ngram_size": -1}],
)
def test_a_rule_that_means_nothing_names_its_field(both: Any, bad: dict[str, Any]) -> None:
    (both[1] / "generation_config.json").write_text(json.dumps(bad))
    with pytest.raises(ValueError, match=f"{next(iter(bad))} in .*generation_config.json"):
        kvjax.models.load(both[1])
    (both[1] / "generation_config.json").write_text("{}")
