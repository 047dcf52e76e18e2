"""Look-ups: a pass key, needles and key-value pairs. Which of many stored facts does a cache
still find?

**Source:** the pass key is that of Mohtashami and Jaggi (2023); needles are a task of RULER
(Hsieh et al. 2024), written from its description; key-value look-up is from Liu et al. (2023).
"""

from __future__ import annotations

import random
from typing import Literal, get_args

from kvjax.evaluate.tasks.haystack import WORDS, Hidden, draw_numbers, draw_uuids
from kvjax.spec import require_int
from kvjax.validation import check_one_of

Kind = Literal["number", "uuid"]  # what a needle holds


def pass_key(rng: random.Random) -> Hidden:
    """A number of five digits.

    >>> pass_key(random.Random(0)).lines
    ('The pass key is 60494. Remember it.',)
    """
    (key,) = draw_numbers(rng, 1)
    return Hidden(
        (f"The pass key is {key}. Remember it.",),
        "What is the pass key? The pass key is ",
        (key,),
        {},
        (0,),
    )


def needles(
    rng: random.Random,
    *,
    hidden: int = 8,
    asked: int = 1,
    values: int = 1,
    kind: Kind = "number",
) -> Hidden:
    """`hidden` words with `values` numbers or UUIDs each; those of `asked` words are asked for
    in one question.

    >>> made = needles(random.Random(0), hidden=3, asked=2)
    >>> made.question
    'What are the special magic numbers for rocket and book? The special magic numbers for rocket and book are: '
    >>> made.lines[0], made.answers
    ('The special magic number for plate is: 43936.', ('77013', '73691'))
    """
    require_int("needles(hidden=...)", hidden, at_least=1, at_most=len(WORDS))
    require_int("needles(asked=...)", asked, at_least=1, at_most=hidden)
    require_int("needles(values=...)", values, at_least=1)
    words = rng.sample(WORDS, hidden)
    drawn = _draw(rng, kind, hidden * values, where="needles")
    of = [words[i // values] for i in range(len(drawn))]
    order = list(range(len(drawn)))
    if values > 1:
        rng.shuffle(order)  # separates the values of a word
    many = f"One of the special magic {kind}s" if values > 1 else f"The special magic {kind}"
    lines = tuple(f"{many} for {of[i]} is: {drawn[i]}." for i in order)
    chosen = rng.sample(range(hidden), asked)
    named = [words[i] for i in chosen]
    wanted = [i * values + j for i in chosen for j in range(values)]
    question = _ask(kind, named, plural=len(wanted) > 1)
    fields = {"hidden": hidden, "asked": asked} | ({"values": values} if values > 1 else {})
    return Hidden(
        lines,
        question,
        tuple(drawn[i] for i in wanted),
        fields,
        tuple(order.index(i) for i in wanted),
    )


def needle_lines(rng: random.Random, *, lines: int = 100, kind: Kind = "number") -> Hidden:
    """Needles in place of a text: `lines` keys with a value each, of which one is asked for.

    The keys of numbers are pairs of words, those of UUIDs are UUIDs. The lines are the whole
    text; pad it with DOTS.

    >>> made = needle_lines(random.Random(0), lines=2)
    >>> made.lines[0], made.answers
    ('The special magic number for panda-violin is: 15306.', ('43936',))
    """
    require_int("needle_lines(lines=...)", lines, at_least=1, at_most=len(WORDS) ** 2)
    if kind == "uuid":
        keys = draw_uuids(rng, lines)
    else:
        pairs = (divmod(i, len(WORDS)) for i in rng.sample(range(len(WORDS) ** 2), lines))
        keys = [f"{WORDS[i]}-{WORDS[j]}" for i, j in pairs]
    values = _draw(rng, kind, lines, where="needle_lines")
    made = tuple(
        f"The special magic {kind} for {k} is: {v}." for k, v in zip(keys, values, strict=True)
    )
    at = rng.randrange(lines)
    return Hidden(
        made, _ask(kind, [keys[at]], plural=False), (values[at],), {"lines": lines}, (at,)
    )


def _draw(rng: random.Random, kind: Kind, count: int, *, where: str) -> list[str]:
    check_one_of(where, get_args(Kind), kind=kind)
    return draw_uuids(rng, count) if kind == "uuid" else draw_numbers(rng, count)


def _ask(kind: Kind, keys: list[str], *, plural: bool) -> str:
    named = f"{', '.join(keys[:-1])} and {keys[-1]}" if len(keys) > 1 else keys[0]
    what, verb = (
        (f"special magic {kind}s for {named}", "are")
        if plural
        else (f"special magic {kind} for {named}", "is")
    )
    return f"What {verb} the {what}? The {what} {verb}: "


def key_value(rng: random.Random, *, pairs: int = 32) -> Hidden:
    """`pairs` words with a number each, in one line; one is looked up.

    >>> made = key_value(random.Random(0), pairs=2)
    >>> made.lines, made.question, made.answers
    (('{ "plate": "15306", "rocket": "43936",}',), 'Key: "rocket" Value: "', ('43936',))
    """
    require_int("key_value(pairs=...)", pairs, at_least=1, at_most=len(WORDS))
    words = rng.sample(WORDS, pairs)
    values = draw_numbers(rng, pairs)
    line = "{ " + ", ".join(f'"{w}": "{v}"' for w, v in zip(words, values, strict=True)) + ",}"
    at = rng.randrange(pairs)
    return Hidden(
        (line,), f'Key: "{words[at]}" Value: "', (values[at],), {"pairs": pairs}, (0,)
    )
