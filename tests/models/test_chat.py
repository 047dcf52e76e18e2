"""A conversation feeds each token once: its turns equal one prompt that spells the whole conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from tests.checkpoint import BOS, EOS, POSITIONS, write_checkpoint

# As real templates write it: a first token and the system prompt once, each answer ended by the stop token.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def load(directory: Path, template: str = TEMPLATE) -> models.Checkpoint:
    file = write_checkpoint(directory) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return models.load(directory, dtype=jnp.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> models.Checkpoint:
    return load(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids of each prompt that a chat feeds."""
    seen: list[list[int]] = []
    real = models.chat.stream

    def watch(model: Any, cache: Any, prompt: Any, **settings: Any) -> Any:
        seen.append(list(prompt[0]))
        return real(model, cache, prompt, **settings)

    monkeypatch.setattr(models.chat, "stream", watch)
    return seen


def bytes_of(text: str, checkpoint: models.Checkpoint) -> list[int]:
    return checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_later_turn_feeds_its_own_tokens_alone(checkpoint: models.Checkpoint, fed: list[list[int]]) -> None:
    chat = checkpoint.chat(system="be brief", max_new_tokens=5)
    chat.say("hello")
    chat.say("more")
    assert fed[0] == [BOS, *bytes_of("[system]be brief[user]hello[assistant]", checkpoint)]
    end = [] if EOS in fed_and_emitted(chat)[1][-1:] else [EOS]
    assert fed[1] == [*end, *bytes_of("[user]more[assistant]", checkpoint)]
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]


def fed_and_emitted(chat: models.Chat) -> tuple[int, list[list[int]]]:
    assert chat._run is not None
    return int(np.asarray(chat.cache.length)[0]), chat._run.rows  # type: ignore[union-attr]


def test_a_turn_that_ended_by_a_stop_token_does_not_feed_it_again(
    checkpoint: models.Checkpoint, fed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = checkpoint.chat(max_new_tokens=5)
    chat.say("hello")
    assert chat._run is not None
    chat._run.rows[0][-1] = EOS  # as if the model had ended by itself
    chat.say("more")
    assert fed[1] == bytes_of("[user]more[assistant]", checkpoint)


@pytest.mark.sample(2)
@pytest.mark.parametrize("cache", ["full", "fier:budget=512,chunk=32", "kivi:residual=32,group=8"])
def test_turns_equal_one_prompt_of_the_whole_conversation(
    checkpoint: models.Checkpoint, fed: list[list[int]], cache: str
) -> None:
    chat = checkpoint.chat(cache=cache, max_new_tokens=6)
    fed_tokens: list[int] = []
    for message in ("hello there", "and then?", "why " * 30):  # the third outgrows the first capacity
        chat.say(message)
        assert chat._run is not None
        fed_tokens += [*fed[-1], *chat._run.rows[0]]
    assert chat.cache is not None
    assert chat.cache.length.tolist() == [len(fed_tokens)]
    assert chat.cache.spec.capacity > 128
    if cache == "full":
        n = len(chat._run.rows[0])
        again = kvjax.generate(
            checkpoint.model,
            checkpoint.init_cache(cache, capacity=512),
            [fed_tokens[:-n]],
            max_new_tokens=6,
            stop_tokens=checkpoint.stop_tokens,
        )
        assert again.rows[0] == chat._run.rows[0]


def test_pieces_join_the_messages_as_they_come(checkpoint: models.Checkpoint) -> None:
    chat = checkpoint.chat(max_new_tokens=8)
    run = chat.stream("hello")
    assert chat.messages[-1] == {"role": "assistant", "content": ""}
    first = next(run)
    assert chat.messages[-1]["content"] == first
    whole = first + "".join(run)
    assert chat.messages[-1]["content"] == whole
    assert checkpoint.chat(max_new_tokens=8).say("hello") == whole
    assert repr(chat).startswith("Chat(2 messages, ")


def test_a_refused_turn_leaves_the_conversation_as_it_was(checkpoint: models.Checkpoint) -> None:
    chat = checkpoint.chat(max_new_tokens=4)
    chat.say("hello")
    before = (list(chat.messages), repr(chat))
    for bad, message in (
        ("x" * POSITIONS, "do not fit in the model's 512 positions"),
        ("", "the message is empty"),
        (7, "a message must be text"),
    ):
        with pytest.raises(ValueError, match=message):
            chat.say(bad)  # type: ignore[arg-type]
    assert (chat.messages, repr(chat)) == before
    chat.say("more")


def test_draws_of_a_turn_differ_and_repeat(checkpoint: models.Checkpoint) -> None:
    def talk(seed: int) -> list[str]:
        chat = checkpoint.chat(max_new_tokens=12, temperature=1.0, seed=seed)
        return [chat.say("hello"), chat.say("hello")]

    assert talk(1) == talk(1)
    assert talk(1) != talk(2)


def test_what_cannot_talk_says_so(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, template="{{ messages[-1]['content'] }}")
    chat = checkpoint.chat(max_new_tokens=2)
    chat.say("hello")
    with pytest.raises(ValueError, match="does not render a turn after the answer before it"):
        chat.say("more")
    with pytest.raises(ValueError, match="unknown cache 'fire'; did you mean 'fier'"):
        checkpoint.chat(cache="fire")
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        checkpoint.chat(max_new_tokens=0)
    with pytest.raises(ValueError, match="capacity must be an integer, got '4K'"):
        checkpoint.chat(capacity="4K")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no chat template, so this is not a chat model"):
        models.load(models.shipped()).chat()
