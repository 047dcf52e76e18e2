"""Generated questions: hidden lines are in their places, in a prompt of the length asked for."""

import itertools
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from kvjax.evaluate.tasks.generated import FORMS
from kvjax.evaluate.tasks.haystack import DOTS, WORDS, Hidden, weave
from tests.checkpoint import BOS, write_checkpoint

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
SMALL = {
    "needles": {"hidden": 4, "asked": 2},
    "key_value": {"pairs": 4},
    "needle_lines": {"lines": 8},
    "variables": {"chains": 2, "hops": 2},
    "assigned_variables": {"chains": 2, "hops": 3},
    "frequent_words": {"words": 60},
    "common_words": {"words": 40, "asked": 3, "often": 8, "rarely": 2},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, with BOS before a text."""
    made = AutoTokenizer.from_pretrained(
        write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    )
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return made


def make(form, seed):
    return FORMS[form](random.Random(seed), **SMALL.get(form, {}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_has_its_length_its_lines_in_order_and_its_question_last(
    tokenizer, form, as_ids
):
    text = tokenizer(TEXT, add_special_tokens=False)["input_ids"] if as_ids else TEXT
    for seed in range(5):
        hidden = make(form, seed)
        length = 1500 + 37 * seed
        woven = weave(
            tokenizer, np.array(text) if as_ids else text, length, hidden, random.Random(seed)
        )
        assert len(woven.ids) == length
        assert woven.ids[0] == BOS
        assert BOS not in woven.ids[1:]
        shown = tokenizer.decode(woven.ids)
        assert shown.endswith("\n" + hidden.question)
        assert tokenizer.decode(woven.ids[woven.question :]) == "\n" + hidden.question
        for line, start in zip(hidden.lines, woven.starts, strict=True):
            assert tokenizer.decode(woven.ids[start:]).startswith(f"\n{line}\n")
        assert list(woven.starts) == sorted(woven.starts)


@pytest.mark.parametrize("form", FORMS)
def test_the_answer_stands_in_the_lines_and_not_in_the_question(form):
    for seed in range(20):
        hidden = make(form, seed)
        assert len(set(hidden.answers)) == len(hidden.answers)
        for answer in hidden.answers:
            assert re.search(rf"\b{answer}\b", "\n".join(hidden.lines))
            assert answer not in hidden.question
        if hidden.holding:
            held = "\n".join(hidden.lines[i] for i in hidden.holding)
            assert all(answer in held for answer in hidden.answers)
            others = [line for i, line in enumerate(hidden.lines) if i not in hidden.holding]
            assert not any(answer in line for answer in hidden.answers for line in others)


def solve(hidden):
    """The answers, by reading the lines alone."""
    text, question = "\n".join(hidden.lines), hidden.question
    if "pass key" in question:
        return re.findall(r"The pass key is (\d+)\.", text)
    if "magic" in question:
        keys = re.findall(
            r"[\w-]+",
            re.search(r"(?:number|uuid)s? for (.*)\?", question)[1].replace(" and ", " "),
        )
        return [
            value
            for key in keys
            for value in re.findall(rf"magic \w+ for {key} is: ([\w-]+)\.", text)
        ]
    if question.startswith("Key"):
        return re.findall(rf'"{question.split(chr(34))[1]}": "(\d+)"', text)
    if question.startswith("The value"):
        known = {}
        for name, value in re.findall(r"VAR (\w+) = (\w+)", text):
            known[name] = known.get(value, value)
        return [known[question.split()[3]]]
    if question.startswith("Which variables"):
        known = {}
        for name, value in re.findall(r"VAR (\w+) = (\w+)", text):
            known[name] = known.get(value, value)
        return [
            name for name, value in known.items() if value == re.search(r"\d+", question)[0]
        ]
    words = re.findall(r"[a-z]+", text)
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    asked = int(re.search(r"which (\d+)", question)[1])
    assert counts[asked - 1][0] > counts[asked][0]
    return [word for _, word in counts[:asked]]


@pytest.mark.parametrize("form", FORMS)
def test_who_reads_the_lines_finds_the_answers_and_no_others(form):
    for seed in range(20):
        hidden = make(form, seed)
        assert sorted(solve(hidden)) == sorted(hidden.answers)


@pytest.mark.parametrize(
    "settings", [{"values": 3}, {"values": 2, "asked": 2}, {"kind": "uuid"}]
)
def test_needles_of_several_values_and_uuids_are_found_by_reading(settings):
    for seed in range(20):
        hidden = FORMS["needles"](random.Random(seed), **{"hidden": 4, "asked": 1, **settings})
        assert sorted(solve(hidden)) == sorted(hidden.answers)
        assert all(
            hidden.lines[i].endswith(f"{a}.")
            for i, a in zip(hidden.holding, hidden.answers, strict=True)
        )
    hidden = FORMS["needle_lines"](random.Random(0), lines=5, kind="uuid")
    assert solve(hidden) == list(hidden.answers)


@given(seed=st.integers(0, 999), depth=st.floats(0, 1), length=st.integers(400, 1200))
def test_a_line_lies_at_the_depth_asked_for(tokenizer, seed, depth, length):
    woven = weave(
        tokenizer, TEXT, length, make("pass_key", seed), random.Random(seed), depths=[depth]
    )
    line = len("\nThe pass key is 12345. Remember it.\n")
    room = length - 1 - line - (length - woven.question)
    assert woven.starts[0] == 1 + round(depth * room)


def test_no_bos_where_the_tokenizer_puts_none(tmp_path):
    plain = AutoTokenizer.from_pretrained(write_checkpoint(tmp_path))
    assert BOS not in weave(plain, TEXT, 300, make("pass_key", 0), random.Random(0)).ids


def test_depths_are_spread_over_the_whole_text(tokenizer):
    found = [
        weave(tokenizer, TEXT, 600, make("pass_key", i), random.Random(i)).depths[0]
        for i in range(200)
    ]
    assert min(found) < 0.05
    assert max(found) > 0.85  # the line itself stands after it
    assert 0.35 < np.mean(found) < 0.6


def test_the_excerpt_is_the_text_read_on_from_some_place_and_round_again(tokenizer):
    ids = list(range(50))
    nothing = Hidden((), "?", ())
    woven = weave(tokenizer, ids, 203, nothing, random.Random(3))
    body = woven.ids[1 : woven.question]
    assert all(after == (before + 1) % 50 for before, after in itertools.pairwise(body))
    starts = {weave(tokenizer, ids, 20, nothing, random.Random(i)).ids[1] for i in range(50)}
    assert len(starts) > 20
    text = weave(tokenizer, TEXT, 2000, nothing, random.Random(1))
    assert tokenizer.decode(text.ids[1 : text.question]) in TEXT * 40


def test_seeds_hold_across_processes():
    code = (
        "import random; from kvjax.evaluate.tasks.generated import FORMS\n"
        f"small = {SMALL!r}\n"
        "for f in FORMS.values(): print(f(random.Random('a 7'), **small.get(f.__name__, {})))"
    )
    ask = {"capture_output": True, "text": True, "check": True, "env": {"PYTHONHASHSEED": "1"}}
    there = subprocess.run([sys.executable, "-c", code], **ask).stdout
    here = "".join(f"{make(form, 'a 7')}\n" for form in FORMS)
    assert there == here
    assert make("pass_key", "a 7") != make("pass_key", "a 8")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda rng: FORMS["needles"](rng, hidden=len(WORDS) + 1),
            "hidden=...) must be at most",
        ),
        (
            lambda rng: FORMS["needles"](rng, hidden=3, asked=4),
            "asked=...) must be at most 3, got 4",
        ),
        (lambda rng: FORMS["needles"](rng, values=0), "values=...) must be at least 1"),
        (
            lambda rng: FORMS["needles"](rng, kind="word"),
            "kind='word') must be one of number, uuid",
        ),
        (lambda rng: FORMS["needle_lines"](rng, lines=0), "lines=...) must be at least 1"),
        (lambda rng: FORMS["key_value"](rng, pairs=0), "pairs=...) must be at least 1"),
        (lambda rng: FORMS["variables"](rng, chains=100, hops=4), "must be at most"),
        (lambda rng: FORMS["frequent_words"](rng, words=2), "clearly most frequent"),
        (lambda rng: FORMS["frequent_words"](rng, alpha=1.0), "alpha=...) must be more than 1"),
        (lambda rng: FORMS["common_words"](rng, words=100), "must be at least 303, got 100"),
    ],
)
def test_sizes_that_cannot_be_are_refused(ask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ask(random.Random(0))


def test_a_prompt_that_is_too_short_names_the_length_that_is_enough(tokenizer):
    hidden = make("needles", 0)
    with pytest.raises(ValueError, match="use at least") as caught:
        weave(tokenizer, TEXT, 50, hidden, random.Random(0))
    least = int(re.findall(r"\d+", str(caught.value))[-1])
    assert len(weave(tokenizer, TEXT, least, hidden, random.Random(0)).ids) == least
    with pytest.raises(ValueError, match="use at least"):
        weave(tokenizer, TEXT, least - 1, hidden, random.Random(0))


@pytest.mark.parametrize("depths", [(0.5, 0.1, 0.2, 0.3), (0.1,), (0.1, 0.2, 0.3, 1.5)])
def test_depths_that_do_not_fit_are_refused(tokenizer, depths):
    with pytest.raises(ValueError, match="4 rising shares"):
        weave(tokenizer, TEXT, 2000, make("needles", 0), random.Random(0), depths=depths)


def test_an_empty_text_is_refused_and_dots_fill_up(tokenizer):
    with pytest.raises(ValueError, match="empty"):
        weave(tokenizer, "", 500, make("pass_key", 0), random.Random(0))
    woven = weave(tokenizer, DOTS, 900, make("frequent_words", 0), random.Random(0))
    assert " .... ...." in tokenizer.decode(woven.ids)
