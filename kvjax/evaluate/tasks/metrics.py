"""Scores of answers by the rules of the benchmarks: each function takes texts and returns a number in [0, 1].

They are written from the published descriptions (LongBench, RULER, GSM8K), on the libraries that the field uses where
there are any: `rouge` for ROUGE-L, `rapidfuzz` for edit similarity, `jieba` for Chinese words. Departures from the
benchmarks' own scripts are named at each function, with their effects.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from typing import Any

_NUMBER = re.compile(r"(?<!\d)-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)  # 18, -3, 1,234.50, .5; the 4 of 10-4


# ------------------------------------------------------------------------------------------------------ words in common


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words, which count as often as they occur.

    Lower case, without ASCII punctuation and the articles a, an, the.

    **Source:** SQuAD (Rajpurkar et al. 2016), section 6.1; LongBench's F1.

    >>> f1("The cat, on a mat!", "a cat on the red mat")  # cat on mat: 3 of 3 and 3 of 4
    0.8571428571428571
    """
    return _overlap(_words(answer), _words(truth))


def f1_zh(answer: str, truth: str) -> float:
    """`f1` over the Chinese words that jieba finds, without punctuation.

    **Source:** LongBench's F1 for Chinese. **Differs:** punctuation is what Unicode calls so, and the full-width forms
    of ASCII's; LongBench lists characters, and its list lacks a few such as 《.
    """
    return _overlap(_words_zh(answer), _words_zh(truth))


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(?:a|an|the)\b", " ", plain).split()


def _words_zh(text: str) -> list[str]:
    words = ("".join(c for c in word if not _is_mark(c) and not c.isspace()) for word in _cut(text.lower()))
    return [word for word in words if word]


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "P" or unicodedata.normalize("NFKC", character) in string.punctuation


def _overlap(answer: list[str], truth: list[str]) -> float:
    common = sum((Counter(answer) & Counter(truth)).values())
    return 2 * common / (len(answer) + len(truth)) if common else 0.0


# -------------------------------------------------------------------------------------------------------------- ROUGE-L


def rouge_l(answer: str, truth: str) -> float:
    """F of ROUGE-L over words split at white space: the longest common subsequences of sentences. 0 without a word.

    **Source:** Lin (2004), summary level, as the package `rouge` computes it (a word of a sentence counts once);
    LongBench's ROUGE-L. **Differs:** LongBench's script scores 0 if the package exceeds Python's recursion limit, as
    with sentences of some 500 words; here the limit is raised.
    """
    with _eval_extra():
        from rouge import Rouge
    with _recursion(len(answer.split()) + len(truth.split())):
        try:
            return float(Rouge(metrics=["rouge-l"]).get_scores(answer, truth)[0]["rouge-l"]["f"])
        except ValueError:  # raised by the package for a text without a sentence
            return 0.0


def rouge_l_zh(answer: str, truth: str) -> float:
    """`rouge_l` over the Chinese words that jieba finds."""
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(truth)))


@contextmanager
def _recursion(words: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 2 * words)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _cut(text: str) -> list[str]:
    return list(_tokenizer().cut(text))


@cache
def _tokenizer() -> Any:
    with _eval_extra():
        import jieba
    jieba.setLogLevel("WARNING")  # it logs about its dictionary to stderr
    return jieba.Tokenizer()


# ---------------------------------------------------------------------------------------------------------------- names


def classification(answer: str, truth: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the true one is among them; else 0.

    A class whose name is a part of the true one's does not count.

    **Source:** LongBench's classification score. **Differs:** LongBench's script overlooks the second of two such
    parts of names in a row.
    """
    named = [name for name in classes if name in answer and (name == truth or name not in truth)]
    return 1.0 / len(named) if truth in named else 0.0


def match_all(answer: str, truths: Sequence[str]) -> float:
    """The share of the truths that occur in the answer, whatever their case.

    **Source:** RULER (Hsieh et al. 2024), recall-based accuracy ("string match, all").
    """
    return sum(truth.lower() in answer.lower() for truth in truths) / len(truths)


def match_part(answer: str, truths: Sequence[str]) -> float:
    """1 if one of the truths occurs in the answer, whatever its case.

    **Source:** RULER, for its question answering tasks ("string match, part").
    """
    return float(any(truth.lower() in answer.lower() for truth in truths))


def edit_similarity(answer: str, truth: str) -> float:
    """1 minus the insertions and deletions between the first line of code and the truth, over both lengths.

    The first line is the first one without `, # and //: fences and comments are skipped.

    **Source:** LongBench's code similarity. **Differs:** LongBench's library rounds each score to a percent.
    """
    with _eval_extra():
        from rapidfuzz.distance import Indel
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return Indel.normalized_similarity(line, truth) if line else 0.0


# -------------------------------------------------------------------------------------------------------------- numbers


def count(answer: str, truth: str) -> float:
    """The share of the whole numbers in the answer that are the true one; 0 without a number.

    **Source:** LongBench's count score.
    """
    numbers = re.findall(r"\d+", answer)
    return numbers.count(truth) / len(numbers) if numbers else 0.0


def retrieval(answer: str, truth: str) -> float:
    """`count` of a paragraph's number; the truth is "Paragraph 3" or "段落3".

    **Source:** LongBench's retrieval scores, English and Chinese.

    Raises:
      ValueError: a truth of another form.
    """
    found = re.search(r"(?:Paragraph |段落)(\d+)", truth)
    if found is None:
        raise ValueError(f'the true answer of a retrieval must be "Paragraph N" or "段落N", got {truth!r}')
    return count(answer, found[1])


def final_number(text: str) -> Decimal | None:
    """The number after the first `####`, as GSM8K writes its answers; without one, the last number of the text.

    >>> final_number("She has 3 * 4 = 12 eggs.\\n#### 1,012"), final_number("so it costs $12.50."), final_number("none")
    (Decimal('1012'), Decimal('12.50'), None)
    """
    marked = _NUMBER.findall(text.partition("####")[2].partition("\n")[0])
    found = marked[:1] or _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "")) if found else None


def same_number(answer: str, truth: str) -> float:
    """1 if both end in the same number (`final_number`).

    **Source:** GSM8K (Cobbe et al. 2021): the final number is compared. **Differs:** an answer without `####` counts by
    its last number, as the flexible match of lm-evaluation-harness does; 18.0 equals 18.
    """
    number = final_number(answer)
    return float(number is not None and number == final_number(truth))


def best(metric: Callable[[str, str], float], answer: str, truths: Sequence[str]) -> float:
    """The best score of the answer against any of the truths."""
    return max(metric(answer, truth) for truth in truths)


@contextmanager
def _eval_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f"this metric needs the package {error.name}: pip install 'kvjax[eval]'") from error
