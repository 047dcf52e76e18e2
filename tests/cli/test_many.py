"""`kvjax generate --prompts`, `kvjax chat`: many prompts at a time, and one conversation."""

import io
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax import Engine, models
from kvjax.models.weights import read_settings
from tests.checkpoint import weights, write_checkpoint


def test_each_prompt_gets_the_answer_that_it_gets_alone(kvjax, checkpoint, tmp_path):
    texts = [
        "Call me Ishmael",
        "Some years\u2028ago, never mind how long",
        "A",
    ]  # an end of a line to Python, not to JSON
    lines = [
        {"prompt": texts[0], "id": "x"},
        texts[1],
        {"prompt": texts[2], "max_new_tokens": 3},
    ]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    text = "\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    file.write_text(
        text + "\n", encoding="utf-8-sig"
    )  # which begins with a mark, as Windows writes it
    code, stdout, err = kvjax(
        "generate",
        checkpoint,
        "--prompts",
        file,
        "--out",
        out,
        "--max-new-tokens",
        7,
        "--slots",
        2,
    )
    assert (code, stdout) == (0, ""), err
    found = sorted(
        map(json.loads, out.read_text().strip().split("\n")), key=lambda answer: answer["line"]
    )
    assert [answer["line"] for answer in found] == [1, 3, 5]
    assert found[0]["id"] == "x"
    loaded = models.load(checkpoint)
    for answer, text, most in zip(found, texts, (7, 7, 3), strict=True):
        alone = loaded.generate(text, max_new_tokens=most)
        assert (answer["prompt"], answer["text"], answer["token_ids"]) == (
            text,
            alone.text,
            alone.tokens,
        )
    code, stdout, err = kvjax(
        "generate",
        checkpoint,
        "--prompt",
        texts[0],
        "--prompt",
        texts[1],
        "--max-new-tokens",
        7,
    )
    several = sorted(
        map(json.loads, stdout.strip().split("\n")), key=lambda answer: answer["line"]
    )
    assert [answer["text"] for answer in several] == [answer["text"] for answer in found[:2]], (
        err
    )
    again = kvjax("generate", checkpoint, "--prompts", file, "--out", out)
    assert again[0] == 2
    assert "exists; give another file" in again[2]


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("", (), "holds no prompt"),
        ("not json", (), "line 1 of .* is no JSON"),
        ('"a"\n""', (), 'line 2 of .* needs a "prompt"'),
        ('{"x": 1}', (), 'line 1 of .* needs a "prompt"'),
        ('"a"\n{"prompt": 5}', (), 'line 2 of .* needs a "prompt"'),
        (
            '{"prompt": "a", "max_new_tokens": 0}',
            (),
            "line 1 of .*max_new_tokens must be at least 1",
        ),
        ('"a"', ("--prompt", "b"), "--prompts and --prompt cannot be given together"),
        ('"a"', ("--slots", "0"), "slots"),
        (
            '"a"',
            ("--cache", "streaming_llm:rope_theta=500"),
            "than layer 0 .*: set rope_theta=10000",
        ),
        (
            '"a"',
            ("--cache", "fier:dense_layers=3"),
            "--cache fier:dense_layers=3 keeps the first 3 layers full",
        ),
    ],
)
def test_a_file_of_prompts_that_cannot_be_answered_is_one_line(
    kvjax, checkpoint, tmp_path, monkeypatch, text, more, message
):
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    code, stdout, err = kvjax("generate", checkpoint, "--prompts", file, *more)
    assert (code, stdout) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err), err


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A checkpoint with a chat template."""
    directory = write_checkpoint(tmp_path_factory.mktemp("talker"))
    file = directory / "tokenizer_config.json"
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return directory


def test_chat_answers_each_line(kvjax, talker, monkeypatch):
    talk = models.load(talker).chat(max_new_tokens=6)
    answers = [talk.say(message) for message in ("Hello", "And you?")]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd you?\n/exit\nno"))
    assert (
        "Missing argument 'MODEL_DIR'" in kvjax("chat")[2]
    )  # the small model is none for chats
    assert "give a temperature too" in kvjax("chat", talker, "--top-p=0.5")[2]
    code, stdout, err = kvjax("chat", talker, "--max-new-tokens=6")
    assert (code, stdout) == (0, "".join(f"{answer}\n" for answer in answers)), err


@pytest.mark.parametrize(
    "asked", [{"prompt": "a" * 500, "max_new_tokens": 20}, "a" * 512], ids=["new", "prompt"]
)
def test_a_line_that_does_not_fit_is_named_before_the_weights(
    kvjax, checkpoint, tmp_path, monkeypatch, asked
):
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"a"\n{json.dumps(asked)}\n')
    code, _, err = kvjax("generate", checkpoint, "--prompts", file)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"line 2 of .* new tokens do not fit in the model's 512 positions", err), (
        err
    )


def test_an_answer_that_ends_by_an_error_says_so(kvjax, tmp_path):
    directory = write_checkpoint(tmp_path / "bad")
    save_file(
        {**weights(), "model.norm.weight": np.full(32, np.nan, np.float32)},
        directory / "model.safetensors",
    )
    code, stdout, err = kvjax(
        "generate", directory, "--prompt", "a", "--prompt", "b", "--max-new-tokens", 2
    )
    assert code == 1
    assert [json.loads(line)["error"] for line in stdout.splitlines()] == [
        "the logits of this row are not finite"
    ] * 2
    assert "2 of 2 answers ended by an error" in err


def test_an_answer_is_in_the_file_when_it_is_there(kvjax, checkpoint, tmp_path, monkeypatch):
    out, seen = tmp_path / "answers.jsonl", []
    step = Engine.step

    def look(engine):
        seen.append(out.read_text())
        return step(engine)

    monkeypatch.setattr("kvjax.Engine.step", look)
    ask = ("--prompt", "a", "--prompt", "b", "--slots", 1, "--out", out, "--max-new-tokens", 2)
    assert kvjax("generate", checkpoint, *ask)[0] == 0
    assert any(text.count("\n") == 1 for text in seen)


def test_a_conversation_is_saved_and_gone_on_from(kvjax, talker, tmp_path, monkeypatch):
    talk = models.load(talker).chat(max_new_tokens=6)
    answers = [talk.say(message) for message in ("Hello", "And you?")]
    folder = tmp_path / "talk"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/save\nHello\n/save {folder}\n"))
    code, stdout, err = kvjax("chat", talker, "--max-new-tokens=6")
    assert (code, stdout) == (0, f"{answers[0]}\n"), err
    assert "error: /save needs a folder: /save DIR" in err
    assert f"saved 2 messages; kvjax chat --resume {folder} goes on from them" in err
    ask = ("chat", talker, "--max-new-tokens=6", "--resume", folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("And you?\n/save\n"))
    code, stdout, err = kvjax(*ask)
    assert (code, stdout) == (0, f"{answers[1]}\n"), err
    assert f"going on after 2 messages in {folder}" in err
    assert "saved 4 messages" in err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "going on after 4 messages" in kvjax(*ask)[2]
    code, _, err = kvjax(*ask, "--cache=fier:budget=8,group=8")
    assert code == 2
    assert (
        f"error: the conversation in {folder} was saved with another --cache than fier" in err
    )
    assert f"or remove {folder / 'cache'}, and the conversation is read again" in err
    for file in (folder / "cache").rglob("d/*"):
        file.write_bytes(b"cut")
    code, _, err = kvjax(*ask)
    assert code == 2
    assert "is damaged" in err
    assert "another --cache" not in err
    assert f"; remove {folder / 'cache'}, and the conversation is read again" in err


WRONG_CHATS = [
    (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1, got 0"),
    (("--seed", "-1"), "--seed must be in [0, 2**32), got -1"),
    (("--system", "caf\udce9"), "--system is not UTF-8; set a UTF-8 locale"),
    (("--temperature", "nan"), "temperature must be a finite number of at least 0, got nan"),
    (("--top-p", "0.5"), "give a temperature too"),
    (("--speculate", "x"), "speculate='x' must be self or self:TOKENS"),
    (("--speculate", "self"), "drafts"),
    (("--cache", "fier:dense_layers=3"), "keeps the first 3 layers full and the model has 3"),
    (("--cache", "pqcache:parts=3"), "does not divide head_dim=8"),
    (("--resume", "FILE"), "is a file; give the path of a folder"),
    (("--resume", "TALK", "--system", "Be brief."), "TALK holds one that has begun"),
    (("--resume", "OTHER"), "the conversation in OTHER was saved with another model"),
    (("--resume", "CUT"), "chat.json is damaged: it lacks a part of the conversation"),
    (("--resume", "BAD"), "chat.json is not valid JSON"),
]


@pytest.mark.parametrize(
    ("args", "message"), WRONG_CHATS, ids=lambda value: " ".join(value) if value[0] else ""
)
def test_a_chat_that_cannot_be_is_one_line_before_the_weights(
    kvjax, talker, tmp_path, monkeypatch, args, message
):
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    model = repr(read_settings(talker)[0].config)
    whole = {"model": model, "messages": [], "turns": 0, "tokens": [], "step": None}
    talk = {**whole, "capacity": None}
    contents = {"TALK": talk, "OTHER": {**talk, "model": "m"}, "CUT": whole, "BAD": None}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        text = "{" if content is None else json.dumps(content)
        (tmp_path / name / "chat.json").write_text(text)
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    code, stdout, err = kvjax("chat", talker, *args)
    assert (code, stdout) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_stdin_that_is_not_utf8_ends_a_chat_in_one_line(kvjax, talker, monkeypatch):
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    code, stdout, err = kvjax("chat", talker)
    assert (code, stdout) == (2, "")
    assert "error: stdin is not UTF-8: byte 0xe9; convert it first" in err.splitlines()[-1]
