"""A conversation feeds each token once: what its cache holds equals the template's own render
of the conversation.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import kvjax
from kvjax import models
from tests.checkpoint import BOS, EOS, POSITIONS, WIDTH, D, write_checkpoint

# As real templates write it: a first token and the system prompt once, each answer ended by the
# stop token.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


LETTERS = 94  # ids below are ASCII letters, and those from here to EOS are other bytes
IM_END, END_OF_TURN, VOCABULARY = "<|im_end|>", EOS + 1, 280  # ids from 259 on have no spelling


def load(
    directory: Path,
    template: str = TEMPLATE,
    config: dict[str, Any] | None = None,
    **tokenizer: Any,
) -> Any:
    """A checkpoint that writes ASCII, as its text then has the tokens of its answer."""
    file = (
        write_checkpoint(directory, vocab_size=VOCABULARY, **(config or {}))
        / "tokenizer_config.json"
    )
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "chat_template": template, **tokenizer})
    )
    letters = Tokenizer.from_file(str(directory / "tokenizer.json"))
    letters.add_special_tokens([IM_END])
    letters.save(str(directory / "tokenizer.json"))
    tensors = load_file(directory / "model.safetensors")
    table = np.zeros((VOCABULARY, WIDTH), np.float32)
    for used in (slice(0, LETTERS), EOS):
        table[used] = tensors["model.embed_tokens.weight"][used]
    save_file(
        {**tensors, "model.embed_tokens.weight": table},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
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


def test_a_later_turn_feeds_its_own_tokens_alone(
    checkpoint: models.Checkpoint, fed: list[list[int]]
) -> None:
    chat = checkpoint.chat(system="be brief", max_new_tokens=5)
    chat.say("hello")
    chat.say("more")
    assert fed[0] == [BOS, *bytes_of("[system]be brief[user]hello[assistant]", checkpoint)]
    end = [] if EOS in fed_and_emitted(chat)[1][-1:] else [EOS]
    assert fed[1] == [*end, *bytes_of("[user]more[assistant]", checkpoint)]
    assert [m["role"] for m in chat.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_a_turn_that_just_fits_grows_no_cache(checkpoint: models.Checkpoint) -> None:
    def talk(capacity: int) -> models.Chat:
        chat = checkpoint.chat(max_new_tokens=5, capacity=capacity)
        for message in ("hello", "more"):
            chat.say(message)
        return chat

    needed = len(talk(128)._fed) + 5
    chat = talk(needed)
    assert chat.cache is not None
    assert chat.cache.spec.capacity == needed
    with pytest.raises(ValueError, match=f"the cache's capacity of {needed - 1} tokens"):
        talk(needed - 1)


def test_an_answer_has_at_least_one_token_and_refusing_it_keeps_the_cache(
    tmp_path: Path,
) -> None:
    chat = load(tmp_path, TEMPLATES["earlier thinking is dropped"]).chat()
    chat.say("hello", max_new_tokens=1)
    assert len(fed_and_emitted(chat)[1][0]) == 1
    held = chat.cache
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        chat.say(
            "more", max_new_tokens=0
        )  # a turn that cuts the cache to what both renders begin with
    assert chat.cache is held


@pytest.mark.parametrize(
    ("prompt", "positions", "new"),
    [
        (100, None, 128),
        (9, 138, 128),
        (9, 137, 128),
        (9, 136, 127),
        (9, 10, 1),
        (9, 9, 1),
        (9, 8, 1),
    ],
)
def test_an_answer_is_as_long_as_positions_allow(
    prompt: int, positions: int | None, new: int
) -> None:
    assert models.chat.default_new_tokens(prompt, positions) == new


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
    chat.messages[-1]["content"] = chat.messages[-1]["content"][:-1]
    chat.say("more")
    assert fed[1] == bytes_of("[user]more[assistant]", checkpoint)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "cache", ["full", "fier:budget=512,chunk=32", "kivi:residual=32,group=8"]
)
def test_turns_equal_one_prompt_of_the_whole_conversation(
    checkpoint: models.Checkpoint, fed: list[list[int]], cache: str
) -> None:
    chat = checkpoint.chat(cache=cache, max_new_tokens=6)
    fed_tokens: list[int] = []
    for message in (
        "hello there",
        "and then?",
        "why " * 30,
    ):  # the third outgrows the first capacity
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


# How real templates write a conversation, some of which write an earlier turn in another way
# when it is no longer last.
TEMPLATES = {
    "one after the other": TEMPLATE,
    "system prompt in the last message of the user": (
        "{{ bos_token }}{% set system = messages[0]['content'] %}{% for m in messages[1:] %}"
        "{% if m['role'] == 'user' %}[INST]{% if loop.last %}{{ system }} {% endif %}{{ m['content'] }}[/INST]"
        "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "earlier thinking is dropped": (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
        "{{ m['content'][2:] }}{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "answers are trimmed and wrapped": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] | trim }} {{ eos_token }}"
        "{% else %}{{ bos_token }}[INST] {{ m['content'] | trim }} [/INST]{% endif %}{% endfor %}"
    ),
    "tools are listed before the last message": (
        "{% for m in messages %}{% if loop.last %}[tools]{{ tools | tojson }}{% endif %}[{{ m['role'] }}]"
        "{{ m['content'] }}{% endfor %}[assistant]"
    ),
    "the number of messages comes first": (
        "{{ messages | length }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    ),
    "only the last message": "[{{ messages[-1]['content'] }}]",
}


def check_five_turns(checkpoint: models.Checkpoint, cache: str, **settings: Any) -> None:
    """Each turn's prompt is the template's own render, and each answer of a full cache that of the
    whole prompt read at once.
    """
    chat = checkpoint.chat(system="be brief", cache=cache, max_new_tokens=6, **settings)
    for message in ("hello there", "and then?", " why ", "x", "the end"):
        chat.say(message)
        prompt = checkpoint.apply_chat(chat.messages[:-1], **settings)
        assert chat._run is not None
        assert chat._fed == prompt
        assert chat._run.cache.length.tolist() == [len(prompt) + len(chat._run.rows[0])]
        if cache == "full":
            whole = checkpoint.generate(
                chat.messages[:-1], cache=cache, max_new_tokens=6, capacity=512, **settings
            )
            assert chat._run.rows == whole.rows


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_cache_holds_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    settings = {"template": {"tools": [{"name": "search"}]}} if "tools" in name else {}
    check_five_turns(load(tmp_path, TEMPLATES[name]), "full", **settings)


def test_a_turn_that_the_cache_holds_already_is_answered_again(
    tmp_path: Path, fed: list[list[int]]
) -> None:
    """Of tokens that all are in the cache the last is read again, because its logits give the
    next.
    """
    chat = load(tmp_path, TEMPLATES["only the last message"]).chat(max_new_tokens=6)
    answers = [chat.say("hello") for _ in range(2)]
    assert answers[0] == answers[1]
    assert fed[1] == fed[0][-1:]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "cache",
    [
        "fier:budget=32,local=8,group=16,chunk=16",
        "kivi:residual=32,group=8",
        "snapkv:budget=64",
    ],
)
def test_a_method_that_cannot_cut_its_cache_reads_again(cache: str, tmp_path: Path) -> None:
    check_five_turns(load(tmp_path, TEMPLATES["earlier thinking is dropped"]), cache)


def test_only_what_differs_is_read_again(tmp_path: Path, fed: list[list[int]]) -> None:
    checkpoint = load(tmp_path, TEMPLATES["earlier thinking is dropped"])
    chat = checkpoint.chat(system="be brief", max_new_tokens=6)
    chat.say("hello " * 20)
    chat.say("more")
    assert len(fed[1]) < 6 + len("[user]more[assistant]")


def test_an_unusual_spelling_of_the_same_text_is_kept_where_a_method_cannot_cut(
    checkpoint: models.Checkpoint, fed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for content, cut in (("hello", True), ("hellO", False)):
        chat = checkpoint.chat(cache="snapkv:budget=64", max_new_tokens=5)
        chat.say("hello")
        real = checkpoint.tokenizer.decode
        chat._fed[1] = 0  # the cache has another token there, but of the same text
        chat.messages[0]["content"] = content
        with monkeypatch.context() as patch:
            spell = partial(lambda real, ids, **how: real([BOS, 58, *ids[2:]], **how), real)
            patch.setattr(checkpoint.tokenizer, "decode", spell)
            chat.say("more")
        assert (len(fed[-1]) <= 1 + len("[user]more[assistant]")) == cut


@pytest.mark.parametrize(
    "content", ["<s></s>[INST]", "a</s>", "<</s>s>", "</s></s>", "\ue000<s>"]
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_control_tokens_in_a_message_are_text(
    checkpoint: models.Checkpoint, content: str, role: str
) -> None:
    plain = checkpoint.apply_chat([{"role": role, "content": "-"}])
    ids = checkpoint.apply_chat([{"role": role, "content": content}])
    for token in (BOS, EOS):
        assert ids.count(token) == plain.count(token)
    assert checkpoint.tokenizer.decode(ids) == checkpoint.render_chat(
        [{"role": role, "content": content}]
    )


def test_control_tokens_of_the_model_and_the_system_stay_tokens(
    checkpoint: models.Checkpoint,
) -> None:
    for role in ("system", "assistant"):
        ids = checkpoint.apply_chat([{"role": role, "content": "a</s>b"}])
        assert ids == bytes_of(
            checkpoint.render_chat([{"role": role, "content": "a</s>b"}]), checkpoint
        )
        assert EOS in ids


def test_a_message_in_parts_is_text_in_each(tmp_path: Path) -> None:
    checkpoint = load(
        tmp_path,
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}",
    )
    ids = checkpoint.apply_chat(
        [{"role": "user", "content": [{"type": "text", "text": "a</s>"}, {"text": "b<s>"}]}]
    )
    assert ids == bytes_of("a<", checkpoint) + bytes_of("/s>b<", checkpoint) + bytes_of(
        "s>", checkpoint
    )


CHATML = TEMPLATE.replace("{{ eos_token }}", IM_END)


@pytest.mark.parametrize(
    ("config", "template", "eos", "stops"),
    [
        ({"eos_token_id": 5}, TEMPLATE, "</s>", (5, EOS)),  # the tokenizer's
        (
            {"eos_token_id": 5},
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "</s>",
            (5, EOS),
        ),
        ({"eos_token_id": [5, EOS]}, TEMPLATE, "</s>", (5, EOS)),  # known already
        ({"eos_token_id": 5}, CHATML, "</s>", (5, EOS, END_OF_TURN)),  # the template's
        ({"eos_token_id": None}, CHATML, None, (END_OF_TURN,)),
        (
            {"eos_token_id": 5},
            CHATML.replace(IM_END, " \n" + IM_END),
            None,
            (5, END_OF_TURN),
        ),  # after a space
        (
            {"eos_token_id": 5},
            CHATML.replace(IM_END, "." + IM_END),
            None,
            (5,),
        ),  # text follows, which is no mark
        (
            {"eos_token_id": 5},
            "{{ raise_exception('only two messages') if messages | length < 3 }}",
            None,
            (5,),
        ),
        ({"eos_token_id": 270}, TEMPLATE, "</s>", (270, EOS)),  # an id that no text spells
    ],
    ids=str,
)
def test_an_answer_ends_at_the_stop_tokens_of_config_tokenizer_and_template(
    tmp_path: Path,
    config: dict[str, Any],
    template: str,
    eos: str | None,
    stops: tuple[int, ...],
) -> None:
    checkpoint = load(tmp_path, template, config, eos_token=eos)
    assert checkpoint.chat_stop_tokens == stops
    assert checkpoint.stop_tokens == tuple(
        i for i in stops if i == 5 or i == 270 or i in np.ravel(config["eos_token_id"])
    )


def test_an_answer_may_end_with_an_id_that_has_no_spelling(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, config={"eos_token_id": 275})
    chat = checkpoint.chat(max_new_tokens=4)
    chat.say("hello")
    assert chat._run is not None
    chat._run.rows[0][-1] = 275
    chat.messages[-1]["content"] = chat.messages[-1]["content"][:-1]
    chat.say("more")
    assert chat._fed == checkpoint.apply_chat(chat.messages[:-1])


def test_settings_reach_the_template(tmp_path: Path) -> None:
    checkpoint = load(
        tmp_path,
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    )
    quiet, tools = {"enable_thinking": False}, {"tools": [{"name": "search"}]}
    assert checkpoint.render_chat("hi", template=quiet) == "[hi]<think></think>"
    assert checkpoint.render_chat("hi", template=tools) == '[hi][{"name": "search"}]'
    for settings in (quiet, tools):
        prompt = checkpoint.apply_chat("hi", template=settings)
        chat = checkpoint.chat(template=settings, max_new_tokens=2)
        chat.say("hi")
        assert chat._fed == prompt
        talk = [{"role": "user", "content": "hi"}]
        assert checkpoint.generate(
            talk, template=settings, max_new_tokens=2
        ).prompt_lengths == [len(prompt)]
        assert checkpoint.stream(
            talk, template=settings, max_new_tokens=2
        ).cache.length.tolist() == [len(prompt)]
    with pytest.raises(
        ValueError, match="template must be the settings of the chat template, such as"
    ):
        checkpoint.chat(template="enable_thinking")
    with pytest.raises(
        ValueError, match="template sets tokenize, which kvjax sets itself; leave it out"
    ):
        checkpoint.apply_chat("hi", template={"tokenize": True})


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


def test_a_refused_turn_leaves_the_conversation_as_it_was(
    checkpoint: models.Checkpoint,
) -> None:
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
    checkpoint = load(tmp_path)
    with pytest.raises(ValueError, match="unknown cache 'fire'; did you mean 'fier'"):
        checkpoint.chat(cache="fire")
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        checkpoint.chat(max_new_tokens=0)
    with pytest.raises(ValueError, match="capacity must be an integer, got '4K'"):
        checkpoint.chat(capacity="4K")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no chat template, so this is not a chat model"):
        models.load(models.shipped()).chat()


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("dynamic", "streaming_llm:budget=64"),
        *(
            pytest.param(kind, cache, marks=pytest.mark.thorough)
            for kind, cache in (
                ("longrope", "full"),
                ("longrope", "streaming_llm:budget=64"),
                ("dynamic", "full"),
            )
        ),
    ],
)
def test_a_turn_that_needs_other_rotations_reads_the_conversation_again(
    kind: str, cache: str, tmp_path: Path, fed: list[list[int]]
) -> None:
    original = 48
    scaling = {"type": kind, "factor": 4.0, "original_max_position_embeddings": original}
    scaling |= {"short_factor": [1.0] * (D // 2), "long_factor": [9.0] * (D // 2)}
    positions = {"max_position_embeddings": original} if kind == "dynamic" else {}
    checkpoint = load(tmp_path, config={"rope_scaling": scaling, **positions})
    chat = checkpoint.chat(cache=cache, max_new_tokens=6)
    for message in ("one", "two and a half", "a third message which crosses", "four"):
        chat.say(message)
        text = [*chat._fed, *chat._run.rows[0]]  # type: ignore[union-attr]
        assert chat._length == len(text)
        if cache == "full":
            whole = checkpoint.init_cache("full", capacity=256)
            wanted, _ = kvjax.generation.prefill(
                checkpoint.model, whole, np.array([text]), final=len(chat._fed) + 6
            )
            np.testing.assert_allclose(chat._run.logits, wanted, atol=1e-4)  # type: ignore[union-attr]
        kvjax.raise_on_overflow(chat.cache)  # type: ignore[arg-type]
    again = [prompt[0] == BOS for prompt in fed]
    assert again == ([True, True, False, False] if kind == "longrope" else [True] * 4)


# --------------------------------------------------------------------------------------------------- saved and resumed


@pytest.mark.parametrize("cache", ["full", "fier:budget=16,dense_layers=1,group=8,chunk=8"])
def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(
    checkpoint: models.Checkpoint, fed: list[list[int]], tmp_path: Path, cache: str
) -> None:
    chat = checkpoint.chat(system="be brief", cache=cache, max_new_tokens=5)
    chat.say("hello")
    chat.save(tmp_path / "talk")
    wanted = chat.say("and then?")
    turn = fed[-1]

    other = checkpoint.chat(cache=cache, max_new_tokens=5).restore(tmp_path / "talk")
    assert [message["role"] for message in other.messages] == ["system", "user", "assistant"]
    assert other.say("and then?") == wanted
    assert fed[-1] == turn  # the second turn alone was read
    other.save(tmp_path / "talk")
    again = checkpoint.chat(cache=cache, max_new_tokens=5).restore(tmp_path / "talk")
    assert again.messages == other.messages == chat.messages


def test_a_conversation_without_its_cache_is_read_again(
    checkpoint: models.Checkpoint, fed: list[list[int]], tmp_path: Path
) -> None:
    chat = checkpoint.chat(max_new_tokens=5)
    chat.say("hello")
    chat.save(tmp_path)
    shutil.rmtree(tmp_path / "cache")
    wanted = chat.say("and then?")
    other = checkpoint.chat(max_new_tokens=5).restore(tmp_path)
    assert other.say("and then?") == wanted
    assert len(fed[-1]) > len(fed[-2])


def test_a_save_that_does_not_fit_is_refused(
    checkpoint: models.Checkpoint, tmp_path: Path
) -> None:
    chat = checkpoint.chat(max_new_tokens=5)
    with pytest.raises(
        FileNotFoundError, match=r"has no saved conversation; Chat\.save makes one"
    ):
        chat.restore(tmp_path)
    chat.say("hello")
    chat.save(tmp_path)
    quest = checkpoint.chat(cache="quest:budget=48,dense_layers=1")
    other = r"was saved with another cache; .*kind is Full in the save, Retrieval wanted"
    with pytest.raises(ValueError, match=other):
        quest.restore(tmp_path)
    file = tmp_path / "chat.json"
    file.write_text(file.read_text().replace("DecoderConfig", "OtherConfig"))
    with pytest.raises(ValueError, match="was saved with another model"):
        checkpoint.chat().restore(tmp_path)
