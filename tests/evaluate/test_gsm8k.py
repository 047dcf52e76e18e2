"""GSM8K in small files of the published form."""

import json

import pytest

from kvjax.evaluate.tasks.gsm8k import Gsm8k

TRAIN = [{"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(9)]
TEST = [{"question": "What is 600 + 400?", "answer": "It is 1,000.\n#### 1,000"}]


@pytest.fixture
def directory(tmp_path):
    for name, records in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_solved_problems_come_before_the_question(directory):
    task = Gsm8k(directory, shots=2)
    (example,) = task.examples(None)
    assert example.prompt == (
        "Question: What is 0 + 1?\nAnswer: 0+1=<<0+1=1>>1\n#### 1\n\n"
        "Question: What is 1 + 1?\nAnswer: 1+1=<<1+1=2>>2\n#### 2\n\n"
        "Question: What is 600 + 400?\nAnswer:"
    )
    assert (example.id, example.answers) == ("0", ("1000",))
    assert Gsm8k(directory).examples(None)[0].prompt.count("####") == 8
    assert (task.metric, task.stop, task.chat) == ("exact match", ("Question:",), False)


def test_the_final_number_is_compared(directory):
    task = Gsm8k(directory, shots=0)
    (example,) = task.examples(None)
    assert task.score(example, " 600 and 400 is 1,000.\n#### 1,000\n\n") == 1
    assert task.score(example, "So 1000.00") == 1
    assert task.score(example, "1000 - 1 = 999") == 0


def test_train_is_asked_for_only_if_it_is_needed(directory):
    (directory / "train.jsonl").unlink()
    assert Gsm8k(directory, shots=0).examples(None)[0].prompt == "Question: What is 600 + 400?\nAnswer:"
    assert set(Gsm8k(directory, shots=0).key()["files"]) == {"test.jsonl"}
    for ask in (lambda task: task.examples(None), lambda task: task.key()):
        with pytest.raises(FileNotFoundError) as error:
            ask(Gsm8k(directory))
        assert str(error.value) == (
            f"{directory / 'train.jsonl'} is not there; download train.jsonl from "
            "https://github.com/openai/grade-school-math (folder grade_school_math/data) to "
            f"{directory / 'train.jsonl'}, or ask for shots=0"
        )


def test_damage_is_named(directory):
    with pytest.raises(ValueError, match="has 9 problems, fewer than shots=10"):
        Gsm8k(directory, shots=10).examples(None)
    with (directory / "test.jsonl").open("a") as file:
        file.write('\n{"question": "What?"}\n')
    with pytest.raises(ValueError, match=r"test.jsonl, line 3, lacks 'answer'"):
        Gsm8k(directory, shots=0).examples(None)
    (directory / "test.jsonl").write_text(json.dumps({"question": "What?", "answer": "nothing"}))
    with pytest.raises(ValueError, match="record 1, has an answer without a number"):
        Gsm8k(directory, shots=0).examples(None)
    (directory / "test.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"test.jsonl has no records"):
        Gsm8k(directory, shots=0).examples(None)


def test_key_follows_settings_and_files(directory):
    key = Gsm8k(directory).key()
    assert json.loads(json.dumps(key)) == key
    assert Gsm8k(directory, shots=4).key() != key
    assert Gsm8k(directory, chat=True).key() != key
    (directory / "train.jsonl").write_text(json.dumps(TRAIN[0]))
    assert Gsm8k(directory).key() != key


def test_settings_are_checked(directory):
    with pytest.raises(ValueError, match=r"Gsm8k\(shots=...\) must be at least 0"):
        Gsm8k(directory, shots=-1)
