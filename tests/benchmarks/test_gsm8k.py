"""GSM8K in small files of the published form."""

import json
from decimal import Decimal

import pytest

from benchmarks import gsm8k
from benchmarks.gsm8k import Gsm8k, final_number
from tests.checkpoint import write_checkpoint

TRAIN = [
    {"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
    for i in range(9)
]
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
    assert (
        Gsm8k(directory, shots=0).examples(None)[0].prompt
        == "Question: What is 600 + 400?\nAnswer:"
    )
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
    (directory / "test.jsonl").write_text(
        json.dumps({"question": "What?", "answer": "nothing"})
    )
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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
        ("#### $1,250.50.\n#### 3", "1250.50"),
        ("#### no number\nbut 7", "7"),
        ("so 10-4 is what is left: 6.", "6"),
        ("10-4", "4"),
        ("it fell to -3", "-3"),
        ("half, .5", ".5"),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == Decimal(number)


def test_the_first_questions_alone_are_another_task(directory):
    assert [e.id for e in Gsm8k(directory, samples=1).examples(None)] == ["0"]
    assert Gsm8k(directory, samples=1).key() != Gsm8k(directory).key()


def test_the_command_writes_the_folder_of_an_evaluation(directory, tmp_path):
    model, out = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "model").mkdir(exist_ok=True)
    ask = [
        str(model),
        "--data",
        str(directory),
        "--shots",
        "0",
        "--max-new-tokens",
        "2",
        "--cache",
        "full",
    ]
    gsm8k.main([*ask, "--dtype", "float32", "--out", str(out)])
    assert "gsm8k" in (out / "table.md").read_text()
    assert len(list((out / "results").glob("*.json"))) == 1
