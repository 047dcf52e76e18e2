"""Settings of a chat template reach it through every command that has one, and wrong ones are one
sentence.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvjax import models
from kvjax.cli import main
from kvjax.models.template import parse_settings
from kvjax.models.weights import read_settings
from tests.checkpoint import write_checkpoint

# As templates of models that think have it, with what transformers alone can read.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<quiet>{% endif %}"
    "{% if effort == 'high' %}<high>{% endif %}"
    "{% for i in range(2) %}{% if i %}{% break %}{% endif %}{% endfor %}"
    "{% generation %}{% endgeneration %}[reply]"
)
QUIET = ["--template", "enable_thinking=false"]
HELLO = [{"role": "user", "content": "Hello"}]


class Stop(ValueError):
    """Ends a command where the test has seen what it looks for."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("chat"))
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return directory


def quiet(directory: Path) -> list[int]:
    """The prompt of HELLO without thinking."""
    checkpoint = read_settings(directory)[0]
    prompt = checkpoint.apply_chat(HELLO, template={"enable_thinking": False})
    assert prompt != checkpoint.apply_chat(HELLO)
    return prompt


def test_generate_passes_settings_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []

    def run_job(job: Any, *given: Any, **how: Any) -> None:
        prompts.append(job.tokens)
        raise Stop

    monkeypatch.setattr("kvjax.cli.generate.run_job", run_job)
    main(["generate", str(directory), "--prompt", "Hello", "--chat", *QUIET])
    assert prompts == [quiet(directory)]


def test_many_prompts_pass_settings_on(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []

    def capacity(checkpoint: Any, fitted: Any, *given: Any) -> None:
        prompts.extend(one.tokens for one in fitted)
        raise Stop

    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": HELLO}) + '\n"a text"\n')
    monkeypatch.setattr("kvjax.cli.many._capacity", capacity)
    main(["generate", str(directory), "--prompts", str(file), *QUIET])
    assert prompts[0] == quiet(directory)
    assert len(prompts) == 2


def test_compare_passes_settings_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []

    def answer(checkpoint: Any, row: Any, tokens: list[int], *given: Any) -> None:
        prompts.append(tokens)
        raise Stop

    monkeypatch.setattr("kvjax.evaluate.answers._answer", answer)
    ask = ["compare", str(directory), "--prompt", "Hello", "--cache", "full"]
    main([*ask, "--chat", *QUIET])
    main(ask)
    assert prompts == [quiet(directory), read_settings(directory)[0].encode("Hello")]


def test_chat_passes_settings_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    wanted = quiet(directory)
    apply_chat = models.Checkpoint.apply_chat

    def watch(
        self: models.Checkpoint, messages: Any, *, template: Mapping[str, Any] | None = None
    ) -> list[int]:
        prompts.append(apply_chat(self, messages, template=template))
        raise Stop

    monkeypatch.setattr(models.Checkpoint, "apply_chat", watch)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(directory), *QUIET]) == 0
    assert prompts == [wanted]


WRONG = {
    "enable_thinkin=false": "does not use it; did you mean 'enable_thinking'?",
    "zzz=1": "does not use it; it takes effort, enable_thinking; leave it out",
    "messages=[]": "template sets messages, which kvjax sets itself; leave it out",
    "tokenize=true": "template sets tokenize, which kvjax sets itself; leave it out",
    "chat_template=x": "does not use it; it takes effort, enable_thinking; leave it out",
    "enable_thinking": "takes NAME=VALUE such as enable_thinking=false, or a JSON object",
    "=false": "takes NAME=VALUE such as enable_thinking=false, or a JSON object",
    "": "takes NAME=VALUE such as enable_thinking=false, or a JSON object",
    "{": "takes NAME=VALUE such as enable_thinking=false, or a JSON object",
    '{"effort": NaN}': "NaN is not JSON",
    "effort=caf\udce9": "is not UTF-8; set a UTF-8 locale",
}


@pytest.mark.parametrize("command", ["generate", "compare", "chat"])
def test_a_wrong_setting_is_the_same_sentence(
    command: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*given: Any, **how: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr("kvjax.models.load", fail)
    needed = [] if command == "chat" else ["--prompt", "Hello", "--chat"]
    for text, message in WRONG.items():
        assert main([command, str(directory), *needed, "--template", text]) == 2, text
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: "), line
        assert message in line
    twice = ["--template", "effort=low", "--template", '{"effort": "high"}']
    assert main([command, str(directory), *needed, *twice]) == 2
    assert "--template: effort is given twice; give it once" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_settings_without_a_template_are_refused(
    command: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(directory), "--prompt", "Hello", *QUIET]) == 2
    assert "--template is for the model's chat template; add --chat" in capsys.readouterr().err


def test_settings_that_no_prompt_of_a_file_uses_are_refused(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a text"\n')
    assert main(["generate", str(directory), "--prompts", str(file), *QUIET]) == 2
    assert "no prompt has chat messages; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("x=false", {"x": False}),
        ("x=False", {"x": False}),
        ("x=None", {"x": None}),
        ("x=5", {"x": 5}),
        ('x="5"', {"x": "5"}),
        ("x=low effort", {"x": "low effort"}),
        ("x=a=b", {"x": "a=b"}),
        ("x=", {"x": ""}),
        ("x=NaN", {"x": "NaN"}),
        ('x={"y": [1]}', {"x": {"y": [1]}}),
        (' {"x": 1, "y": null}', {"x": 1, "y": None}),
    ],
)
def test_a_value_is_json_or_text(text: str, settings: dict[str, Any]) -> None:
    assert parse_settings([text], where="template") == settings


def test_a_template_that_cannot_be_read_takes_every_setting(directory: Path) -> None:
    checkpoint = read_settings(directory)[0]
    checkpoint.tokenizer.chat_template = "{% nothing %}"
    checkpoint.chat_template.check_used({"x": 1}, where="template")
