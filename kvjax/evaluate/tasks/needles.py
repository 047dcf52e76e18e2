"""Look-ups: a pass key, needles and key-value pairs. Which of many stored facts does a cache still find?

**Source:** the pass key is that of Mohtashami and Jaggi (2023); needles are a task of RULER (Hsieh et al. 2024), made
anew from its description; key-value look-up is from Liu et al. (2023).
"""

from __future__ import annotations

import random

from kvjax.evaluate.tasks.weaving import WORDS, Hidden, draw_numbers, require_at_most


def pass_key(rng: random.Random) -> Hidden:
    """A number of five digits.

    >>> pass_key(random.Random(0)).lines
    ('The pass key is 60494. Remember it.',)
    """
    (key,) = draw_numbers(rng, 1)
    return Hidden((f"The pass key is {key}. Remember it.",), "What is the pass key? The pass key is ", (key,), {}, (0,))


def needles(rng: random.Random, *, hidden: int = 8, asked: int = 1) -> Hidden:
    """`hidden` numbers, each of a word, of which `asked` are asked for in one question.

    >>> made = needles(random.Random(0), hidden=3, asked=2)
    >>> made.question
    'What are the special magic numbers for rocket and book? The special magic numbers for rocket and book are: '
    >>> made.lines[0], made.answers
    ('The special magic number for plate is: 43936.', ('77013', '73691'))
    """
    require_at_most("needles(hidden=...)", hidden, len(WORDS))
    require_at_most("needles(asked=...)", asked, hidden)
    words, values = rng.sample(WORDS, hidden), draw_numbers(rng, hidden)
    lines = tuple(f"The special magic number for {w} is: {v}." for w, v in zip(words, values, strict=True))
    chosen = rng.sample(range(hidden), asked)
    named = [words[i] for i in chosen]
    if asked == 1:
        what, verb = f"special magic number for {named[0]}", "is"
    else:
        what, verb = f"special magic numbers for {', '.join(named[:-1])} and {named[-1]}", "are"
    question = f"What {verb} the {what}? The {what} {verb}: "
    return Hidden(lines, question, tuple(values[i] for i in chosen), {"hidden": hidden, "asked": asked}, tuple(chosen))


def key_value(rng: random.Random, *, pairs: int = 32) -> Hidden:
    """`pairs` words with a number each, in one line; one is looked up.

    >>> made = key_value(random.Random(0), pairs=2)
    >>> made.lines, made.question, made.answers
    (('{ "plate": "15306", "rocket": "43936",}',), 'Key: "rocket" Value: "', ('43936',))
    """
    require_at_most("key_value(pairs=...)", pairs, len(WORDS))
    words, values = rng.sample(WORDS, pairs), draw_numbers(rng, pairs)
    line = "{ " + ", ".join(f'"{w}": "{v}"' for w, v in zip(words, values, strict=True)) + ",}"
    at = rng.randrange(pairs)
    return Hidden((line,), f'Key: "{words[at]}" Value: "', (values[at],), {"pairs": pairs}, (0,))
