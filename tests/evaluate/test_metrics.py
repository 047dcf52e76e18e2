"""Each metric against scores worked by hand."""

import sys
from decimal import Decimal

import pytest

from kvjax.evaluate.tasks import metrics


def test_f1_counts_repeated_words_once_each():
    # the answer has 4 words, the truth 3; in common are: red, red
    assert metrics.f1("red red red ball", "red, red cars") == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [("The U.S.A.", "usa", 1.0), ("an apple", "Apple!", 1.0), ("", "apple", 0.0), ("pear", "apple", 0.0)],
)
def test_f1_ignores_case_articles_and_punctuation(answer, truth, score):
    assert metrics.f1(answer, truth) == score


def test_chinese_f1_is_over_words():
    # 北京 / 是 / 中国 / 的 / 首都 against 北京 / 是 / 中国 / 首都: 4 in common of 5 and of 4
    assert metrics.f1_zh("《北京》是中国的首都。", "北京是中国首都") == pytest.approx(8 / 9)
    assert metrics.f1_zh("ＡＢＣ，北京！", "abc 北京") < 1  # letters of full width stay what they are
    assert metrics.f1_zh("北京＋", "北京") == 1
    assert metrics.f1_zh("。", "北京") == 0


def test_rouge_l_is_the_f_of_the_longest_common_subsequence():
    # the cat sat ... mat: "the cat mat" of 4 and of 5 words, each once
    assert metrics.rouge_l("the cat ate mat", "the cat sat near mat") == pytest.approx(2 * 3 / (4 + 5), abs=1e-6)
    assert metrics.rouge_l("mat cat the", "the cat mat") == pytest.approx(1 / 3, abs=1e-6)


def test_rouge_l_takes_sentences_one_by_one():
    # Each sentence of the truth is matched with all of the answer: order across sentences does not matter.
    assert metrics.rouge_l("sat down. the cat", "the cat. sat down") == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("answer", ["", " ", "...", "。"])
def test_rouge_l_of_no_words_is_zero(answer):
    assert metrics.rouge_l(answer, "the cat") == metrics.rouge_l_zh(answer, "一只猫") == 0


def test_rouge_l_takes_long_sentences():
    # The package walks back through both by recursion, a word at a time: 1099 deep, past Python's limit of 1000.
    answer, truth = (" ".join(["start", *(f"{kind}{i}" for i in range(549))]) for kind in "ab")
    before = sys.getrecursionlimit()
    assert metrics.rouge_l(answer, truth) == pytest.approx(1 / 550, abs=1e-6)
    assert sys.getrecursionlimit() == before


def test_chinese_rouge_l_is_over_words():
    assert metrics.rouge_l_zh("北京是中国的首都", "北京是中国首都") == pytest.approx(8 / 9, abs=1e-6)


def test_classification_shares_its_point_among_the_classes_named():
    classes = ["Number of something", "Other number", "Date", "number"]
    assert metrics.classification("It is a Date.", "Date", classes) == 1
    assert metrics.classification("Date or Number of something", "Date", classes) == 1 / 2
    assert metrics.classification("Date", "Other number", classes) == 0
    assert metrics.classification("Other number", "Other number", classes) == 1  # "number" is a part of it
    assert metrics.classification("no idea", "Date", classes) == 0


def test_edit_similarity_is_of_the_first_line_of_code():
    # x = 1 (5 letters) against x = 12 (6): one insertion over 11
    assert metrics.edit_similarity("```python\n# sets x\n// too\nx = 1\ny = 2", "x = 12") == pytest.approx(10 / 11)
    assert metrics.edit_similarity("\n\nx = 12", "x = 12") == 1
    assert metrics.edit_similarity("# nothing", "x = 12") == metrics.edit_similarity("", "x = 12") == 0


def test_count_is_the_share_of_right_numbers():
    assert metrics.count("There are 5 of them, no, 6; so 5", "5") == pytest.approx(2 / 3)
    assert metrics.count("five", "5") == 0


def test_retrieval_is_the_share_of_the_paragraph_s_number():
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1
    assert metrics.retrieval("Paragraph 12 or 13", "Paragraph 12") == 1 / 2
    assert metrics.retrieval("Paragraph 1", "Paragraph 12") == 0
    assert metrics.retrieval("段落3", "段落3") == 1
    with pytest.raises(ValueError, match=r'"Paragraph N" or "段落N", got \'twelve\''):
        metrics.retrieval("12", "twelve")


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
def test_final_number(text, number):
    assert metrics.final_number(text) == Decimal(number)


def test_same_number_compares_values():
    assert metrics.same_number("The answer is 18.0", "#### 18") == 1
    assert metrics.same_number("The answer is 19", "#### 18") == 0
    assert metrics.same_number("none", "#### 18") == 0


def test_string_match_looks_for_all_or_for_one():
    assert metrics.match_all("they are 123 and ABC", ["123", "abc", "456"]) == pytest.approx(2 / 3)
    assert metrics.match_part("they are 123 and ABC", ["456", "abc"]) == 1
    assert metrics.match_part("none", ["456", "abc"]) == 0


def test_the_best_of_several_truths_counts():
    assert metrics.best(metrics.f1, "red", ["blue", "red cars", "red"]) == 1


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)  # importing it fails
    with pytest.raises(ImportError, match=r"needs the package rouge: pip install 'kvjax\[eval\]'"):
        metrics.rouge_l("a", "a")
