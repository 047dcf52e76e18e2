"""Our prompts beside those of lm-evaluation-harness: its own definitions run without a download,
and what benchmarks/prompts.py finds is what both are.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import prompts
from docs.tables.reading import load_rows
from kvjax import models
from kvjax.evaluate.tasks.generated import RULER, made_text

LENGTH = 2048
LONG = {"common_words": 8192}  # the harness puts at least 300 words into a list
needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install 'kvjax[harness]'",
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.shipped())


def harness(tokenizer, task: str) -> prompts.Harness:
    return prompts.Harness(tokenizer, made_text(), LONG.get(task, LENGTH), samples=1)


@needs_harness
@pytest.mark.parametrize("task", RULER)
def test_both_forms_of_a_task_are_made_and_fit(tokenizer, task: str) -> None:
    row = prompts.row(tokenizer, task, harness(tokenizer, task), None)
    asked = LONG.get(task, LENGTH)
    assert all(0 < tokens <= asked for tokens in row["prompt_tokens"])
    assert row["answers"][0] == row["answers"][1]
    assert row["parts"]["before"]["tokens"][0] == 0 < row["parts"]["before"]["tokens"][1]
    assert row["scores"]["the answers"] == [1, 1]
    assert row["scores"]["nothing"] == [0, 0]


@needs_harness
def test_what_is_known_of_a_needle_is_found(tokenizer) -> None:
    row = prompts.row(tokenizer, "needle", harness(tokenizer, "needle"), None)
    assert row["parts"]["line"]["differs"] == [["The", "One of the"], [" number", " numbers"]]
    assert ["", " mentioned in the provided text"] in row["parts"]["question"]["differs"]
    assert row["scores"]["the answers after a sentence"] == [0, 1]
    several = prompts.row(
        tokenizer,
        "needles:hidden=4,values=4",
        harness(tokenizer, "needles"),
        None,
    )
    assert several["hidden"] == [16, 4]
    assert several["parts"]["line"]["differs"] == []


@needs_harness
def test_prompts_of_gsm8k_are_those_of_the_harness(tokenizer) -> None:
    row = prompts.gsm8k_row(tokenizer, shots=2)
    assert row["parts"]["whole"]["differs"] == []
    assert row["scores"]["One more. #### 2"] == [1, 1, 1]
    assert row["scores"]["2.00"] == [1, 0, 0]
    assert row["scores"]["#### 3, or 2"] == [0, 1, 0]


def test_texts_differ_where_their_tokens_do(tokenizer) -> None:
    one, other = "What is the number?", "What is the second number?"
    assert prompts.differing(tokenizer, one, other) == [["", " second"]]
    assert prompts.differing(tokenizer, one, one) == []


def test_definitions_leave_out_imports_and_what_a_file_makes(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(
        "import absent\nLIMIT = 3\nMADE = absent.make()\n\n\n"
        "@absent.cached\ndef drawn(count: absent.Kind = LIMIT):\n    return [MADE] * count\n"
    )
    made = prompts.definitions(file, {"MADE": "word"})
    assert made["drawn"]() == ["word"] * 3


def test_without_the_harness_it_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'kvjax\[harness\]'"):
        prompts.harness_folder()


def test_the_published_comparison_has_every_task() -> None:
    assert [row["task"] for row in load_rows("prompts")] == [*RULER, "gsm8k"]
