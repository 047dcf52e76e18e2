"""RULER in small files of the form that its generator writes."""

import json

import pytest

from kvjax.evaluate.tasks.ruler import Ruler


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


NEEDLES = {
    "index": 3,
    "input": "One of the special magic numbers ...",
    "outputs": ["1234567", "7654321"],
    "length": 4012,
}


@pytest.mark.parametrize("file", ["4096/data/niah_multivalue/validation.jsonl", "niah_multivalue.jsonl"])
def test_the_task_is_named_by_file_or_folder(tmp_path, file):
    task = Ruler(write(tmp_path / file, NEEDLES))
    (example,) = task.examples(None)
    assert (task.name, task.metric, task.max_new_tokens) == ("ruler/niah_multivalue", "string match, all", 128)
    assert (example.id, example.prompt, example.answers) == ("3", NEEDLES["input"], ("1234567", "7654321"))
    assert example.fields == {"length": 4012}
    assert not task.chat


def test_the_answer_s_prefix_ends_the_prompt(tmp_path):
    path = write(tmp_path / "vt.jsonl", {"index": 0, "input": "VAR X", "outputs": ["X"], "answer_prefix": " Answer: "})
    assert Ruler(path).examples(None)[0].prompt == "VAR X Answer: "


def test_the_score_is_the_share_found_or_whether_one_is(tmp_path):
    path = write(tmp_path / "data.jsonl", NEEDLES)
    for name, answer, wanted in (
        ("niah_multivalue", " 1234567 and others", 1 / 2),
        ("cwe", "7654321\x00\n1234567", 1),
        ("qa_1", "1234567", 1),
        ("qa_1", "none", 0),
    ):
        task = Ruler(path, task=name)
        (example,) = task.examples(None)
        assert task.score(example, answer) == wanted


@pytest.mark.parametrize(("name", "tokens"), [("vt", 30), ("cwe", 120), ("fwe", 50), ("qa_2", 32)])
def test_output_lengths_are_those_of_the_tasks(name, tokens):
    assert Ruler("none.jsonl", task=name).max_new_tokens == tokens


def test_bad_files_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"RULER has no task 'other' .*; give task=..., a name that starts with one of niah"
    ):
        Ruler(tmp_path / "other" / "test.jsonl")
    task = Ruler(tmp_path / "vt.jsonl")
    with pytest.raises(
        FileNotFoundError, match=r"vt.jsonl is not there; make it with the scripts of https://github.com"
    ):
        task.key()
    write(tmp_path / "vt.jsonl", NEEDLES, {**NEEDLES, "outputs": "X"})
    with pytest.raises(
        ValueError, match=r"vt.jsonl, line 2, has outputs = 'X', which is not a list of one or more strings"
    ):
        task.examples(None)


def test_key_follows_the_file_and_the_task(tmp_path):
    path = write(tmp_path / "vt.jsonl", NEEDLES)
    key = Ruler(path).key()
    assert json.loads(json.dumps(key)) == key
    assert Ruler(path, task="cwe").key() != key
    write(path, {**NEEDLES, "index": 4})
    assert Ruler(path).key() != key
