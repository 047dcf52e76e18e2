"""Text in and out of a checkpoint: what `generate` and `stream` know by themselves, and what
they refuse.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers

import kvjax
from kvjax import models, presets
from tests.checkpoint import EOS, LAYERS, POSITIONS, write_checkpoint

TEXT = "Call me Ishmael. " * 3
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> models.Checkpoint:
    return models.load(write_checkpoint(tmp_path_factory.mktemp("text")), dtype=jnp.float32)


def by_hand(
    checkpoint: models.Checkpoint, rows: list[list[int]], policy: Any, **settings: Any
) -> list[list[int]]:
    spec = checkpoint.model.spec(batch=len(rows), capacity=256)
    cache = kvjax.init(policy, spec, layers=LAYERS)
    return kvjax.generate(checkpoint.model, cache, rows, stop_tokens=EOS, **settings).rows


def test_a_text_is_continued_as_the_parts_put_together_by_hand_do(
    checkpoint: models.Checkpoint,
) -> None:
    done = checkpoint.generate(TEXT, cache="fier:budget=16", max_new_tokens=12)
    ids = checkpoint.tokenizer(TEXT)["input_ids"]
    assert [done.tokens] == by_hand(checkpoint, [ids], presets.fier(16), max_new_tokens=12)
    assert done.text == checkpoint.tokenizer.decode(done.tokens, skip_special_tokens=True)
    assert done.texts == [done.text]
    assert done.prompt_lengths == [len(ids)]
    assert done.cache.length.tolist() == [len(ids) + len(done.tokens)]
    assert done.cache.spec.capacity == 512
    np.testing.assert_allclose(done.attended[2], 16)
    assert "12 new tokens" in repr(done)
    assert len(repr(done)) < 200


@pytest.mark.parametrize("cache", ["fier:budget=16", presets.fier(16)], ids=["text", "policy"])
def test_a_cache_is_a_policy_or_its_text(checkpoint: models.Checkpoint, cache: Any) -> None:
    assert (
        checkpoint.generate(TEXT, cache=cache, max_new_tokens=4).cache.layers[2].policy
        == presets.fier(16).rest
    )


def test_chat_messages_go_through_the_template(checkpoint: models.Checkpoint) -> None:
    wanted = checkpoint.generate("[user]hello[reply]", max_new_tokens=6)
    assert checkpoint.generate(TALK, max_new_tokens=6).tokens == wanted.tokens


def test_a_list_has_an_answer_for_each(checkpoint: models.Checkpoint) -> None:
    prompts = [TEXT, "abc", TALK]
    done = checkpoint.generate(prompts, max_new_tokens=6)
    assert len(done.texts) == 3
    for row, prompt in zip(done.rows, prompts, strict=True):
        assert row == checkpoint.generate(prompt, max_new_tokens=6).tokens
    with pytest.raises(ValueError, match=r"there were 3 prompts; use \.texts"):
        _ = done.text
    with pytest.raises(ValueError, match=r"use \.rows"):
        _ = done.tokens


@pytest.mark.parametrize(
    "draws",
    [
        {},
        pytest.param({"temperature": 1.0, "top_k": 9, "seed": 3}, marks=pytest.mark.thorough),
        {"temperature": [0.0, 1.0, 2.0]},  # of each row, one of them greedy
    ],
)
def test_more_prompts_than_slots_take_turns(
    checkpoint: models.Checkpoint, draws: dict[str, Any]
) -> None:
    texts = [TEXT, "A", "Some years ago"]
    whole = checkpoint.generate(texts, cache="fier:budget=16", max_new_tokens=8, **draws)
    turns = checkpoint.generate(
        texts, cache="fier:budget=16", max_new_tokens=8, slots=2, **draws
    )
    assert (turns.texts, turns.rows, turns.prompt_lengths) == (
        whole.texts,
        whole.rows,
        whole.prompt_lengths,
    )
    assert "new tokens)" in repr(turns)
    with pytest.raises(
        ValueError, match="took turns in fewer slots, so no cache holds them all"
    ):
        turns.cache  # noqa: B018
    with pytest.raises(ValueError, match="slots and speculate"):
        checkpoint.generate(texts, slots=2, speculate="prompt-lookup")


def test_prompts_take_turns_if_a_device_has_too_little_memory(
    checkpoint: models.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT, "A", "Some years ago"]
    whole = checkpoint.generate(texts, max_new_tokens=8)
    one = whole.cache.nbytes.device // 3
    monkeypatch.setattr(models.checkpoint, "free_bytes", lambda: 4 * one)
    assert checkpoint.generate(texts, max_new_tokens=8).rows == whole.rows
    with pytest.raises(ValueError, match="took turns"):
        checkpoint.generate(texts, max_new_tokens=8).cache  # noqa: B018


def test_streamed_pieces_join_to_the_text(checkpoint: models.Checkpoint) -> None:
    run = checkpoint.stream(TEXT, max_new_tokens=12)
    text = "".join(run)
    done = checkpoint.generate(TEXT, max_new_tokens=12)
    assert (text, run.rows[0]) == (done.text, done.tokens)
    assert run.cache.length.tolist() == done.cache.length.tolist()


def test_draws_follow_seed_or_key(checkpoint: models.Checkpoint) -> None:
    def run(**settings: Any) -> list[int]:
        return checkpoint.generate("abc", max_new_tokens=12, temperature=1.0, **settings).tokens

    assert run() == run(seed=0) == run(key=jax.random.key(0))
    assert run(seed=1) != run(seed=2)
    assert run(top_k=1) == checkpoint.generate("abc", max_new_tokens=12).tokens


def test_stop_tokens_and_new_tokens_are_known(checkpoint: models.Checkpoint) -> None:
    free = checkpoint.generate(TEXT, max_new_tokens=12, stop_tokens=()).tokens
    assert (
        checkpoint.generate(TEXT, max_new_tokens=12, stop_tokens=[free[3]]).tokens
        == free[: free.index(free[3]) + 1]
    )
    left = checkpoint.generate("x" * (POSITIONS - 3))
    assert 1 <= len(left.tokens) <= 3


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "or a list of either; got an empty list"),
        ([1, 2], {}, "got a list that begins with 1; for token ids call kvjax.generate"),
        (7, {}, "got 7; for token ids"),
        ([{"text": "a"}], {}, "got a list that begins with a dict"),
        ("a", {"cache": "fire"}, "unknown cache 'fire'; did you mean 'fier'?"),
        ("a", {"cache": "fier:grup=1"}, "'grup=1' is not a setting of fier"),
        ("a", {"cache": "shadowkv:host=maybe"}, "host must be true or false, got 'maybe'"),
        ("a", {"cache": "fier:group=8,group=16"}, "group is given twice"),
        ("a", {"cache": presets.fier}, "got the function fier; call it"),
        (
            "a",
            {"cache": "fier:dense_layers=3"},
            "keeps the first 3 layers full and the model has 3, so no layer uses",
        ),
        (
            "a",
            {"top_p": 0.9},
            "top_p=0.9 filters draws, but without a temperature nothing is drawn",
        ),
        ("a", {"temperature": 1.0, "seed": 1, "key": jax.random.key(1)}, "seed and key both"),
        ("a", {"temperature": 1.0, "seed": 0.5}, "seed must be an integer, got 0.5"),
        ("a" * 512, {}, "512 prompt + 1 new tokens do not fit in the model's 512 positions"),
        ("abc", {"capacity": 4, "max_new_tokens": 2}, "make the cache with capacity=5"),
        ("abc", {"capacity": "4"}, "capacity must be an integer, got '4'"),
        ("abc", {"capacity": 0}, "capacity must be at least 1, got 0"),
        ("abc", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value))[:40],
)
def test_first_mistakes_are_answered(
    checkpoint: models.Checkpoint, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint.generate(prompt, **settings)


def test_a_stream_takes_one_prompt(checkpoint: models.Checkpoint) -> None:
    with pytest.raises(
        ValueError, match="stream takes one prompt, got 2; call generate for several"
    ):
        checkpoint.stream(["a", "b"])  # type: ignore[list-item]


@pytest.mark.parametrize("word", ["no", "false", "0", "off", "False"])
def test_a_setting_that_is_false_is_false(word: str) -> None:
    assert presets.parse(f"shadowkv:host={word}") == presets.shadowkv(host=False)
    assert presets.parse(f"pariskv:correct={word}") == presets.pariskv(
        selector=kvjax.Paris(correct=False)
    )
    assert presets.parse("shadowkv:host=yes") == presets.shadowkv()
    assert (
        presets.parse("fier:store=host")
        == presets.fier(store="host")
        == presets.fier(store=kvjax.HostOffload())
    )


def test_the_loaded_checkpoint_is_shown_short(checkpoint: models.Checkpoint) -> None:
    assert (
        repr(checkpoint)
        == f"Checkpoint({str(checkpoint.directory)!r}; 3 layers, 512 positions)"
    )


# ----------------------------------------------------------------------------------------- code of the checkpoint's own


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_python_of_a_checkpoint_is_refused_without_a_question(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path)
    (directory / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n"
    )
    file = directory / name
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = models.load(directory)
        with pytest.raises(
            ValueError, match=r"the checkpoint's own Python code .*which kvjax never runs"
        ) as error:
            checkpoint.generate("a", max_new_tokens=1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_fails_on_a_text_is_one_line(tmp_path: Path) -> None:
    """The library `tokenizers` raises a BaseException when an expression of a normaliser gives
    up.
    """
    directory = write_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace(Regex("(a|a)*b|(a+)+c"), "x")
    tokenizer.save(str(directory / "tokenizer.json"))
    checkpoint = models.load(directory)
    for prompt in ("a" * 40 + "!!!", [{"role": "user", "content": "a" * 40 + "!!!"}]):
        with pytest.raises(
            ValueError, match=r"the tokenizer in .* fails on the text: "
        ) as error:
            checkpoint.encode(prompt)
        assert "\n" not in str(error.value)
