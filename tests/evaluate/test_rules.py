"""Answers that are measured obey the rules of generation_config.json, as all others do."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from kvjax import models
from kvjax.evaluate import answers
from kvjax.generation.processors import Processors
from kvjax.models import Checkpoint
from tests.checkpoint import write_checkpoint

PROMPT = "abcabcabc"
NEW = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = write_checkpoint(tmp_path_factory.mktemp("rules"))
    rules = {"repetition_penalty": 20.0, "no_repeat_ngram_size": 2, "eos_token_id": 1}
    (directory / "generation_config.json").write_text(json.dumps(rules))
    return models.load(directory)


@pytest.fixture(scope="module")
def wanted(checkpoint: Checkpoint) -> str:
    """The text by `Checkpoint.generate`, which has other tokens without the rules."""
    text = checkpoint.generate(PROMPT, max_new_tokens=NEW).text
    free = dataclasses.replace(checkpoint, processors=Processors())
    assert free.generate(PROMPT, max_new_tokens=NEW).text != text
    return text


def test_compared_answers_obey_the_rules(checkpoint: Checkpoint, wanted: str) -> None:
    found = answers.side_by_side(checkpoint, PROMPT, ["full"], max_new_tokens=NEW)
    assert [answer.text for answer in found] == [wanted]


def test_answers_of_the_harness_obey_the_rules(checkpoint: Checkpoint, wanted: str) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'kvjax[harness]'")
    from kvjax.evaluate.harness import KvjaxLM

    settings = {"until": [], "max_gen_toks": NEW}
    request = SimpleNamespace(args=(PROMPT, settings))
    assert KvjaxLM(checkpoint).generate_until([request]) == [wanted]
