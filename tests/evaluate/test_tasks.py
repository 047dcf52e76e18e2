"""Tasks of generated questions: sizes, depths, seeds and the rule of the score."""

import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from kvjax.evaluate.provenance import digest_json
from kvjax.evaluate.tasks import make_tasks
from kvjax.evaluate.tasks.generated import TASKS, Synthetic, made_text, make_task
from tests.checkpoint import write_checkpoint

LENGTH = 1200
SMALL = {"key_value": {"pairs": 4}, "common_words": {"asked": 3, "often": 8, "rarely": 2}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(
        write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    )


def make(name, **changes):
    return make_task(
        name,
        **{
            "length": LENGTH,
            "samples": 3,
            "question": "prefilled",
            **SMALL.get(name, {}),
            **changes,
        },
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_and_its_answer_have_the_length_and_a_right_answer_counts_in_full(
    tokenizer, name
):
    task = make(name)
    for example in task.examples(tokenizer):
        assert len(example.prompt) + task.max_new_tokens == LENGTH
        assert example.fields["length"] == LENGTH
        assert task.score(example, ", ".join(example.answers) + ".") == 1
        assert task.score(example, "nothing") == 0
        text = tokenizer.decode(example.prompt)
        assert all(re.search(rf"\b{answer}\b", text) for answer in example.answers)


@pytest.mark.parametrize("name", TASKS)
def test_a_decoded_question_is_the_end_of_the_same_prompt(tokenizer, name):
    early, late = make(name), make(name, question="decoded")
    assert make_task(name, length=LENGTH).question == "decoded"
    for whole, cut in zip(early.examples(tokenizer), late.examples(tokenizer), strict=True):
        assert cut.prompt + cut.question == whole.prompt
        assert (whole.question, cut.answers, cut.fields) == ((), whole.answers, whole.fields)
        asked = tokenizer.decode(cut.question)
        assert asked.startswith("\n")
        assert "?" in asked or name in ("key_value", "variables")
        assert not any(answer in asked for answer in cut.answers)


@pytest.mark.parametrize("name", ["needles", "common_words"])
def test_examples_are_the_same_again_and_more_samples_add_to_fewer(tokenizer, name):
    few, again, more = (make(name, samples=n).examples(tokenizer) for n in (2, 2, 4))
    assert few == again == more[:2]
    assert make(name, samples=2, seed=1).examples(tokenizer) != few
    assert (
        make(name, samples=2, length=LENGTH + 50).examples(tokenizer)[0].answers
        != few[0].answers
    )


def test_ruler_stands_for_its_ten_synthetic_tasks_with_names_of_their_own(tokenizer):
    tasks = make_tasks(["ruler-synthetic", "pass_key"], lengths=[6000], samples=1)
    assert len({task.title for task in tasks}) == 11
    counts = [len(task.examples(tokenizer)[0].answers) for task in tasks]
    assert counts == [1, 1, 1, 1, 1, 4, 4, 5, 10, 3, 1]


def test_a_uuid_must_come_first_and_be_whole(tokenizer):
    task = make("needle", kind="uuid", samples=1)
    (example,) = task.examples(tokenizer)
    (right,) = example.answers
    assert [
        task.score(example, answer) for answer in (f" {right}.", right[:-1], f"it is {right}")
    ] == [1, 0, 0]
    assert task.max_new_tokens >= len(right)


def test_depths_take_turns_from_the_beginning_to_the_end(tokenizer):
    examples = make("needle", depths=3, samples=6).examples(tokenizer)
    assert [example.fields["depth"] for example in examples] == [0, 0.5, 1, 0, 0.5, 1]
    at = [tokenizer.decode(example.prompt).index("special") / LENGTH for example in examples]
    assert at[0] < 0.05
    assert 0.35 < at[1] < 0.55
    assert 0.7 < at[2] < 0.95
    assert at[:3] == pytest.approx(at[3:], abs=0.02)


def test_the_depth_of_the_line_that_is_asked_for_is_told(tokenizer):
    for example in make("needles", hidden=4, samples=5).examples(tokenizer):
        line = tokenizer.decode(example.prompt).index(f"is: {example.answers[0]}.")
        assert abs(line / LENGTH - example.fields["depth"]) < 0.15


def test_depths_of_lines_that_fill_the_prompt_are_refused():
    with pytest.raises(
        ValueError,
        match=r"common_words\(depths=3\): its lines fill the prompt; leave depths out",
    ):
        Synthetic(form="common_words", depths=3)


def test_words_fill_the_prompt(tokenizer):
    for name in ("frequent_words", "common_words", "needle_lines"):
        for example in make(name).examples(tokenizer):
            assert tokenizer.decode(example.prompt).count(".... ") * 5 < LENGTH / 10
    text = tokenizer.decode(make("common_words").examples(tokenizer)[0].prompt)
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", text))
    assert sorted(counts.values(), reverse=True)[:4] == [8, 8, 8, 2]


def test_a_prompt_with_no_room_for_its_words_is_refused_by_its_length(tokenizer):
    with pytest.raises(
        ValueError,
        match=r"3 common words at 256, .* at least 26, got 10; ask for longer prompts",
    ):
        make("common_words", length=256).examples(tokenizer)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("12345", 1),
        (" 12345There is", 1),
        ('12345",', 1),
        ("123456", 1),
        ("1234", 0),
        ("it is 12345", 0),
        ("", 0),
    ],
)
def test_one_number_must_come_first_with_all_its_digits(tokenizer, answer, score):
    task = make("pass_key", samples=1)
    (example,) = task.examples(tokenizer)
    assert task.score(example, answer.replace("12345", example.answers[0])) == score


def test_one_word_must_come_first_and_be_whole(tokenizer):
    task = make("frequent_words", asked=1, samples=1)
    (example,) = task.examples(tokenizer)
    (word,) = example.answers
    assert [
        task.score(example, answer) for answer in (f" {word}, ", f"{word}s", word[:-1])
    ] == [1, 0, 0]


def test_of_several_answers_each_counts_wherever_it_stands(tokenizer):
    task = make("needles", hidden=4, asked=4, samples=1)
    (example,) = task.examples(tokenizer)
    assert task.metric == "share of answers"
    assert (
        task.score(example, f"first {example.answers[3]} and then {example.answers[0]}") == 0.5
    )
    assert (
        task.score(example, " and ".join(f"{right}7" for right in example.answers)) == 1
    )  # digits after the fifth


def test_a_text_of_ones_own_is_used_and_told_by_its_digest(tokenizer, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("Whales. " * 500)
    task = make("pass_key", text=file)
    assert "Whales. Whales." in tokenizer.decode(task.examples(tokenizer)[0].prompt)
    before = digest_json(task.key())
    file.write_text("Sharks. " * 500)
    assert digest_json(task.key()) != before
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="is not UTF-8"):
        task.examples(tokenizer)
    with pytest.raises(FileNotFoundError, match="none"):
        make("pass_key", text=tmp_path / "none.txt").key()


def test_every_setting_is_in_the_key():
    base = make("needle")
    changed = [make("needle", **{name: 7}) for name in ("samples", "seed", "depths")]
    changed += [
        make("needle", length=900),
        make("pass_key"),
        make("needles"),
        make("needles", hidden=9),
    ]
    changed += [make("needle", question="decoded")]
    assert len({digest_json(task.key()) for task in (base, *changed)}) == len(changed) + 1


def test_names_say_what_is_asked_and_how_long():
    assert make("needles", hidden=9).name == "1 of 9 needles at 1200, question prefilled"
    assert make("common_words").title == "3 common words"
    names = {make(name).name for name in TASKS}
    assert len(names) == len(TASKS)


def test_the_text_made_here_has_no_numbers_and_is_the_same_everywhere():
    text = made_text()
    assert not re.search(r"\d", text)
    assert len(text) > 140_000
    assert digest_json(text)[:12] == "ea24851aeaf2"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: make("pass_key", length=8),
            "leaves no room for a prompt before its 8 new tokens",
        ),
        (lambda: make("pass_key", samples=0), "pass_key(samples=...) must be at least 1"),
        (lambda: make("needle", depths=0), "needles(depths=...) must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(ask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ask()


def test_depths_of_several_lines_are_refused(tokenizer):
    with pytest.raises(ValueError, match="depths=5 is for one line"):
        make("needles", depths=5).examples(tokenizer)
    with pytest.raises(ValueError, match="common_words"):
        make("common_words", length=300, often=30).examples(tokenizer)
