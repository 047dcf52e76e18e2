"""LongBench in small files of the published form: prompts, metrics and errors."""

import json

import pytest

from kvjax.evaluate.tasks.longbench import METRICS, LongBench, LongBenchV2, answer_letter

PROMPTS = {name: "{context}\n\nQuestion: {input}\nAnswer:" for name in METRICS} | {"gov_report": "Sum up: {context}"}


def record(**changes):
    return {
        "input": "Who wrote {it}?",
        "context": "A book by Ann. {input}",
        "answers": ["Ann", "Ann B."],
        "length": 8,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
        **changes,
    }


def write(directory, dataset, *records):
    (directory / "dataset2prompt.json").write_text(json.dumps(PROMPTS))
    (directory / "dataset2maxlen.json").write_text(json.dumps({name: 10 + i for i, name in enumerate(METRICS)}))
    (directory / f"{dataset}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return LongBench(directory, dataset)


def score(directory, dataset, answer, **changes):
    task = write(directory, dataset, record(**changes))
    (example,) = task.examples(None)
    return task.score(example, answer)


def test_examples_have_the_prompt_of_the_configuration(tmp_path):
    task = write(tmp_path, "hotpotqa", record(), record(_id="a2", length=9))
    first, second = task.examples(None)
    # braces in the data are no places to fill
    assert first.prompt == "A book by Ann. {input}\n\nQuestion: Who wrote {it}?\nAnswer:"
    assert (first.id, first.answers, first.fields) == ("a1", ("Ann", "Ann B."), {"length": 8})
    assert (second.id, second.fields) == ("a2", {"length": 9})
    assert (task.name, task.metric, task.max_new_tokens) == ("longbench/hotpotqa", "F1", 14)
    assert (task.chat, task.truncate, task.stop) == (True, True, ())


def test_every_data_set_has_a_metric_that_gives_the_truth_full_marks(tmp_path):
    truths = {
        "passage_count": "7",
        "passage_retrieval_en": "Paragraph 7",
        "passage_retrieval_zh": "段落7",
        "trec": "Date",
        "lsht": "Date",
    }
    assert len(METRICS) == 21
    for dataset in METRICS:
        truth = truths.get(dataset, "北京是中国的首都")
        for answer, wanted in ((truth, 1), ("", 0)):
            found = score(
                tmp_path, dataset, answer, answers=["another 9 段落9 Paragraph 9", truth], all_classes=["Date"]
            )
            assert found == pytest.approx(wanted, abs=1e-6), dataset


@pytest.mark.parametrize("dataset", ["trec", "triviaqa", "samsum", "lsht"])
def test_few_shot_answers_count_by_their_first_line(tmp_path, dataset):
    changes = {"answers": ["Date"], "all_classes": ["Date", "Place"]}
    assert score(tmp_path, dataset, "\n\nDate\nQuestion: Place", **changes) == pytest.approx(1, abs=1e-6)
    assert score(tmp_path, dataset, "Place\nDate", **changes) == 0
    assert not write(tmp_path, dataset, record()).chat


def test_chat_wraps_all_but_few_shot_and_code(tmp_path):
    plain = {name for name in METRICS if not LongBench(tmp_path, name).chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_longbench_e_uses_the_prompt_and_metric_of_its_data_set(tmp_path):
    task = write(tmp_path, "gov_report_e", record())
    assert (task.examples(None)[0].prompt, task.metric) == ("Sum up: A book by Ann. {input}", "ROUGE-L")


def test_numbers_among_the_answers_are_taken_as_written(tmp_path):
    assert score(tmp_path, "passage_count", "12", answers=[12]) == 1


def test_key_follows_the_files(tmp_path):
    task = write(tmp_path, "hotpotqa", record())
    key = task.key()
    assert json.loads(json.dumps(key)) == key
    assert write(tmp_path, "hotpotqa", record()).key() == key
    (tmp_path / "dataset2maxlen.json").write_text(json.dumps({"hotpotqa": 5}))
    assert task.key() != key


def test_unknown_data_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no data set 'nq'; it has narrativeqa, qasper"):
        LongBench(tmp_path, "nq")


@pytest.mark.parametrize(
    ("missing", "source"),
    [
        ("hotpotqa.jsonl", "huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"),
        ("dataset2prompt.json", "github.com/THUDM/LongBench"),
        ("dataset2maxlen.json", "github.com/THUDM/LongBench"),
    ],
)
def test_a_missing_file_says_what_to_download_and_where_to_put_it(tmp_path, missing, source):
    task = write(tmp_path, "hotpotqa", record())
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError) as error:
        task.key()
    assert str(error.value).startswith(f"{tmp_path / missing} is not there; download")
    assert source in str(error.value)
    assert f"into {tmp_path}" in str(error.value)
    with pytest.raises(FileNotFoundError, match=missing):
        task.max_new_tokens, task.examples(None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": ', "line 2, is not JSON"),
        ("[1]", "line 2, must be a JSON object, not an array"),
        (json.dumps({k: v for k, v in record().items() if k != "context"}), "line 2, lacks 'context'"),
        (json.dumps(record(answers=[])), r"line 2, has answers = \[\], which is not a list of one or more strings"),
        (json.dumps(record(input=3)), "line 2, has input = 3, which is not a string"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, said):
    task = write(tmp_path, "hotpotqa", record())
    with task._data.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=said) as error:
        task.examples(None)
    assert str(task._data) in str(error.value)


def test_classes_are_needed_where_the_score_needs_them(tmp_path):
    with pytest.raises(ValueError, match="all_classes = None"):
        write(tmp_path, "trec", record()).examples(None)


def test_a_prompt_that_is_no_template_is_named(tmp_path):
    task = write(tmp_path, "hotpotqa", record())
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "{question}"}))
    with pytest.raises(ValueError, match=r"dataset2prompt.json: the prompt of hotpotqa .*KeyError\('question'\)"):
        task.examples(None)
    (tmp_path / "dataset2prompt.json").write_text("{}")
    with pytest.raises(ValueError, match=r"dataset2prompt.json has no 'hotpotqa'"):
        task.examples(None)


# ------------------------------------------------------------------------------------------------------------ version 2


def question(**changes):
    return {
        "_id": "q1",
        "domain": "Single-Document QA",
        "sub_domain": "Academic",
        "difficulty": "easy",
        "length": "short",
        "question": " Which one? ",
        **{f"choice_{letter}": f"choice {letter}" for letter in "ABCD"},
        "answer": "C",
        "context": "Text with $Q$ and $C_A$ in it.\n",
        **changes,
    }


def write_v2(directory, *questions):
    (directory / "data.json").write_text(json.dumps(list(questions)))
    (directory / "0shot.txt").write_text("<text>\n$DOC$\n</text>\n$Q$\n(A) $C_A$ (B) $C_B$ (C) $C_C$ (D) $C_D$")
    return LongBenchV2(directory / "data.json")


def test_v2_fills_the_prompt_once(tmp_path):
    task = write_v2(tmp_path, question())
    (example,) = task.examples(None)
    choices = "(A) choice A (B) choice B (C) choice C (D) choice D"
    assert example.prompt == f"<text>\nText with $Q$ and $C_A$ in it.\n</text>\nWhich one?\n{choices}"
    assert example.fields == {"length": "short", "difficulty": "easy", "domain": "Single-Document QA"}
    assert (task.name, task.metric, task.chat, task.truncate) == ("longbench-v2", "accuracy", True, True)
    assert (task.score(example, "The correct answer is (C)."), task.score(example, "C")) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("I think: The correct answer is **D**, for", "D"),
        ("The correct answer is A? No. The correct answer is (B)", "B"),
        ("the answer: (B)", None),
        ("The correct answer is (E)", None),
    ],
)
def test_v2_finds_the_letter(answer, letter):
    assert answer_letter(answer) == letter


def test_v2_names_what_is_missing_or_damaged(tmp_path):
    task = write_v2(tmp_path, question(), {"_id": "q2"})
    with pytest.raises(ValueError, match=r"data.json, record 2, lacks 'domain'"):
        task.examples(None)
    (tmp_path / "0shot.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"0shot.txt is not there; download 0shot.txt from https://github.com"):
        task.key()
    (tmp_path / "data.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"data.json is not there; download .*THUDM/LongBench-v2 to"):
        task.key()
