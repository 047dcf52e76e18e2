"""Counting words: the answer depends on the whole text, so a cache that drops tokens changes
the counts.

**Source:** frequent and common words of RULER (Hsieh et al. 2024), written from their
description.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax.evaluate.tasks.haystack import Hidden
from kvjax.spec import require_int


def frequent_words(
    rng: random.Random, *, words: int = 1000, alpha: float = 2.0, asked: int = 3
) -> Hidden:
    """Lines of `words` coded words, ever rarer by Zipf's law of exponent `alpha`; the `asked`
    most frequent win.

    The i-th word is drawn in proportion to i^-alpha. The lines are the whole text; pad it with
    DOTS.

    **Differs:** the wording is not RULER's, and words are drawn again until the winners are
    clear (no tie at the border).
    """
    require_int("frequent_words(words=...)", words, at_least=1)
    require_int("frequent_words(asked=...)", asked, at_least=1)
    if not alpha > 1:
        raise ValueError(
            f"frequent_words(alpha=...) must be more than 1, for the weights to have a sum; got {alpha}"
        )
    vocabulary = list(itertools.islice(_coded_words(rng), max(200, 2 * asked)))
    weights = list(itertools.accumulate((i + 1) ** -alpha for i in range(len(vocabulary))))
    for _ in range(1000):
        drawn = rng.choices(range(len(vocabulary)), cum_weights=weights, k=words)
        counts = np.bincount(drawn, minlength=len(vocabulary))
        order = np.argsort(-counts, kind="stable")
        if counts[order[asked - 1]] > counts[order[asked]]:
            break
    else:
        raise ValueError(
            f"{words} words have no {asked} clearly most frequent ones; ask for fewer, or make more words"
        )
    text = [vocabulary[i] for i in drawn]
    question = f"Question: which {asked} coded words are the most frequent in the text? Answer: the most frequent are:"
    answers = tuple(vocabulary[i] for i in order[:asked])
    return Hidden(_in_lines(text), question, answers, {"words": words, "asked": asked})


def common_words(
    rng: random.Random, *, words: int = 1000, asked: int = 10, often: int = 30, rarely: int = 3
) -> Hidden:
    """A numbered list of about `words` coded words: `asked` of them stand in it `often` times,
    the others `rarely`.

    The list is the whole text; pad it with DOTS.

    **Differs:** the wording is not RULER's, and the words are coded where RULER draws English
    ones.
    """
    require_int("common_words(rarely=...)", rarely, at_least=1)
    require_int("common_words(often=...)", often, at_least=rarely + 1)
    require_int("common_words(asked=...)", asked, at_least=1)
    least = asked * often + rarely
    require_int(
        "common_words(words=...), to hold the common ones and a rare one,",
        words,
        at_least=least,
    )
    coded = _coded_words(rng)
    answers = tuple(itertools.islice(coded, asked))
    others = list(itertools.islice(coded, (words - asked * often) // rarely))
    listed = [*answers] * often + others * rarely
    rng.shuffle(listed)
    numbered = [f"{i}. {word}" for i, word in enumerate(listed, 1)]
    question = f"Question: which {asked} words are the most common in the list? Answer: the most common words are:"
    return Hidden(
        _in_lines(numbered), question, answers, {"words": len(listed), "asked": asked}
    )


def _coded_words(rng: random.Random) -> Iterator[str]:
    """Different words of six letters, which no text has: consonants and vowels in turn, so that
    they are few tokens.
    """
    seen: set[str] = set()
    while True:
        word = "".join(rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 3)
        if word not in seen:
            seen.add(word)
            yield word


def _in_lines(words: Sequence[str], each: int = 10) -> tuple[str, ...]:
    return tuple(" ".join(words[i : i + each]) for i in range(0, len(words), each))
