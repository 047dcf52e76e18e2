"""Questions whose answer lies hidden in a long text, made from a seed: what retrieval is tested on, and trained on.

A *form* makes the hidden lines, the question and its answers from a `random.Random`; `weave` puts the lines into
running text, so that the prompt has exactly the tokens asked for and ends with the question on a line of its own. The
two know nothing of each other, so a form of one's own needs no more than a function that returns `Hidden`.

Everything follows from the generator that is passed in, and nothing from `hash`, so seeds hold across processes.

**Source:** the pass key is that of Mohtashami and Jaggi (2023); needles, variables, frequent and common words are tasks
of RULER (Hsieh et al. 2024), made anew from their description; key-value look-up is from Liu et al. (2023).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.spec import require_int


@dataclass(frozen=True)
class Hidden:
    """What a form made. The lines are hidden at random places, in this order; the question comes last."""

    lines: tuple[str, ...]
    question: str  # ends where the answer begins
    answers: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)  # what results are grouped by
    holding: tuple[int, ...] = ()  # the lines that hold the answers; none where it takes all of them


@dataclass(frozen=True)
class Woven:
    """A prompt. An answer, in training, follows `ids` at once."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]  # index in ids of the first token of each hidden line, its line break
    question: int  # index in ids of the first token of the question, its line break

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each line begins, as a share of what comes before the question."""
        return tuple(start / self.question for start in self.starts)


# ---------------------------------------------------------------------------------------------------------------- forms


def pass_key(rng: random.Random) -> Hidden:
    """A number of five digits.

    >>> pass_key(random.Random(0)).lines
    ('The pass key is 60494. Remember it.',)
    """
    (key,) = _numbers(rng, 1)
    return Hidden((f"The pass key is {key}. Remember it.",), "What is the pass key? The pass key is ", (key,), {}, (0,))


def needles(rng: random.Random, *, hidden: int = 8, asked: int = 1) -> Hidden:
    """`hidden` numbers, each of a word, of which `asked` are asked for in one question.

    >>> made = needles(random.Random(0), hidden=3, asked=2)
    >>> made.question
    'What are the special magic numbers for rocket and book? The special magic numbers for rocket and book are: '
    >>> made.lines[0], made.answers
    ('The special magic number for plate is: 43936.', ('77013', '73691'))
    """
    _at_most("needles(hidden=...)", hidden, len(WORDS))
    _at_most("needles(asked=...)", asked, hidden)
    words, values = rng.sample(WORDS, hidden), _numbers(rng, hidden)
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
    _at_most("key_value(pairs=...)", pairs, len(WORDS))
    words, values = rng.sample(WORDS, pairs), _numbers(rng, pairs)
    line = "{ " + ", ".join(f'"{w}": "{v}"' for w, v in zip(words, values, strict=True)) + ",}"
    at = rng.randrange(pairs)
    return Hidden((line,), f'Key: "{words[at]}" Value: "', (values[at],), {"pairs": pairs}, (0,))


def variables(rng: random.Random, *, chains: int = 1, hops: int = 2) -> Hidden:
    """`chains` numbers, each handed on `hops` times from variable to variable; the last of one chain is asked for.

    **Differs:** RULER asks for all variables of a value; here one value is asked for, so that an answer is one number
    whatever the number of hops.

    >>> made = variables(random.Random(0), chains=1, hops=1)
    >>> made.lines, made.question, made.answers
    (('VAR plate = 15306', 'VAR rocket = plate'), 'The value of rocket is ', ('15306',))
    """
    require_int("variables(chains=...)", chains, at_least=1)
    require_int("variables(hops=...)", hops, at_least=0)
    _at_most("variables(chains * (hops + 1))", chains * (hops + 1), len(WORDS))
    names, values = rng.sample(WORDS, chains * (hops + 1)), _numbers(rng, chains)
    pending = []
    for i, value in enumerate(values):
        own = names[i * (hops + 1) : (i + 1) * (hops + 1)]
        pending.append([f"VAR {name} = {of}" for name, of in zip(own, (value, *own), strict=False)])
    order = [i for i, chain in enumerate(pending) for _ in chain]
    rng.shuffle(order)  # chains mix, and each keeps its order
    lines = tuple(pending[i].pop(0) for i in order)
    asked = rng.randrange(chains)
    question = f"The value of {names[asked * (hops + 1) + hops]} is "
    holding = tuple(line for line, chain in enumerate(order) if chain == asked)
    return Hidden(lines, question, (values[asked],), {"chains": chains, "hops": hops}, holding)


def frequent_words(rng: random.Random, *, words: int = 1000, alpha: float = 2.0, asked: int = 3) -> Hidden:
    """Lines of `words` coded words, ever rarer by Zipf's law of exponent `alpha`; the `asked` most frequent win.

    The i-th word is drawn in proportion to i^-alpha. The lines are whole texts: fill up with DOTS.

    **Differs:** from RULER, by the wording, and by drawing again until the winners are clear (no tie at the border).
    """
    require_int("frequent_words(words=...)", words, at_least=1)
    require_int("frequent_words(asked=...)", asked, at_least=1)
    if not alpha > 1:
        raise ValueError(f"frequent_words(alpha=...) must be more than 1, for the weights to have a sum; got {alpha}")
    vocabulary = list(itertools.islice(_coded_words(rng), max(200, 2 * asked)))
    weights = list(itertools.accumulate((i + 1) ** -alpha for i in range(len(vocabulary))))
    for _ in range(1000):
        drawn = rng.choices(range(len(vocabulary)), cum_weights=weights, k=words)
        counts = np.bincount(drawn, minlength=len(vocabulary))
        order = np.argsort(-counts, kind="stable")
        if counts[order[asked - 1]] > counts[order[asked]]:
            break
    else:
        raise ValueError(f"{words} words have no {asked} clearly most frequent ones; ask for fewer, or make more words")
    text = [vocabulary[i] for i in drawn]
    question = f"Question: which {asked} coded words are the most frequent in the text? Answer: the most frequent are:"
    answers = tuple(vocabulary[i] for i in order[:asked])
    return Hidden(_in_lines(text), question, answers, {"words": words, "asked": asked})


def common_words(rng: random.Random, *, words: int = 1000, asked: int = 10, often: int = 30, rarely: int = 3) -> Hidden:
    """A numbered list of about `words` coded words: `asked` of them stand in it `often` times, the others `rarely`.

    The list is a whole text: fill up with DOTS.

    **Differs:** from RULER, by the wording, and by coded words where RULER draws English ones.
    """
    require_int("common_words(rarely=...)", rarely, at_least=1)
    require_int("common_words(often=...)", often, at_least=rarely + 1)
    require_int("common_words(asked=...)", asked, at_least=1)
    least = asked * often + rarely
    require_int("common_words(words=...), to hold the common ones and a rare one,", words, at_least=least)
    coded = _coded_words(rng)
    answers = tuple(itertools.islice(coded, asked))
    others = list(itertools.islice(coded, (words - asked * often) // rarely))
    listed = [*answers] * often + others * rarely
    rng.shuffle(listed)
    numbered = [f"{i}. {word}" for i, word in enumerate(listed, 1)]
    question = f"Question: which {asked} words are the most common in the list? Answer: the most common words are:"
    return Hidden(_in_lines(numbered), question, answers, {"words": len(listed), "asked": asked})


FORMS: dict[str, Callable[..., Hidden]] = {
    form.__name__: form for form in (pass_key, needles, key_value, variables, frequent_words, common_words)
}


def _numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(n) for n in rng.sample(range(10000, 100000), count)]


def _coded_words(rng: random.Random) -> Iterator[str]:
    """Different words of six letters, which no text has: consonants and vowels in turn, so that they are few tokens."""
    seen: set[str] = set()
    while True:
        word = "".join(rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 3)
        if word not in seen:
            seen.add(word)
            yield word


def _in_lines(words: Sequence[str], each: int = 10) -> tuple[str, ...]:
    return tuple(" ".join(words[i : i + each]) for i in range(0, len(words), each))


def _at_most(what: str, got: int, most: int) -> None:
    require_int(what, got, at_least=1)
    if got > most:
        raise ValueError(f"{what} must be at most {most}, got {got}")


# -------------------------------------------------------------------------------------------------------------- weaving

DOTS = " ...." * 64  # the text to weave into for forms whose lines are the whole text


def weave(
    tokenizer: Any,
    text: str | Sequence[int] | np.ndarray,
    length: int,
    hidden: Hidden,
    rng: random.Random,
    depths: Sequence[float] | None = None,
) -> Woven:
    """A prompt of exactly `length` tokens: an excerpt of `text`, the hidden lines in it, and the question at its end.

    The excerpt begins anywhere in `text`, and goes on at its start where its end comes first. Each line stands between
    line breaks, after the share `depths` of the excerpt, or at random. BOS comes first if the tokenizer adds it. With
    `text` as token ids, only the lines and the question are tokenized.

    Raises:
      ValueError: `length` has no room for lines and question, `depths` that do not fit, a text without tokens.
    """
    require_int("weave(length=...)", length, at_least=1)
    parts = [*(f"\n{line}\n" for line in hidden.lines), f"\n{hidden.question}"]
    *lines, end = tokenizer(parts, add_special_tokens=False)["input_ids"]
    out = first_tokens(tokenizer)
    room = length - len(out) - len(end) - sum(map(len, lines))
    if room < 0:
        raise ValueError(f"length={length} has no room for what is hidden and asked; use at least {length - room}")
    if depths is None:
        places = sorted(rng.randint(0, room) for _ in lines)
    else:
        if len(depths) != len(lines) or list(depths) != sorted(depths) or not all(0 <= d <= 1 for d in depths):
            raise ValueError(f"depths must be {len(lines)} rising shares in [0, 1], one for each line, got {depths}")
        places = [round(depth * room) for depth in depths]
    body = _excerpt(tokenizer, text, room, rng)
    starts, at = [], 0
    for place, line in zip(places, lines, strict=True):
        out += body[at:place]
        starts.append(len(out))
        out += line
        at = place
    out += body[at:]
    return Woven((*out, *end), tuple(starts), len(out))


def first_tokens(tokenizer: Any) -> list[int]:
    """BOS, for a tokenizer that puts it before a text; else nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and bos in tokenizer("")["input_ids"] else []


def _excerpt(tokenizer: Any, text: str | Sequence[int] | np.ndarray, count: int, rng: random.Random) -> list[int]:
    """`count` token ids from a random place on; the text begins again where it ends."""
    if isinstance(text, str):
        start = rng.randrange(max(1, len(text)))
        letters = min(8 * count, len(text))  # more than a token has
        part = text[start : start + letters]
        part += text[: letters - len(part)]
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"][:count]
    else:
        start = rng.randrange(max(1, len(text)))
        ids = np.asarray(text[start : start + count]).tolist()
        if len(ids) < count:
            ids += np.asarray(text[:start]).tolist()
    if not ids and count:
        raise ValueError("the text to hide lines in is empty")
    return (ids * -(-count // max(1, len(ids))))[:count]


# Things that one can see or hold, so that no number seems to belong to one of them.
_WORDS = """
    anchor apple apron arrow badge bagel balcony banana banjo barrel basket beach beacon beetle bell bench bicycle
    blanket boat bonnet book bottle bowl branch bread brick bridge broom bucket buffalo butter button cabin cactus
    camel canal candle cannon canoe canyon carpet carrot castle cave cellar cello chain chair cherry chess chimney
    circle clock cloud clover coat cobra coffee coin compass copper coral cottage cotton cradle crane crayon crown
    crystal curtain daisy desert desk diamond dolphin donkey door dragon drawer dress drum duck eagle easel elbow
    engine falcon farm feather fence ferry fiddle field finger flag flame flower flute forest forge fork fossil
    fountain fox garden garlic gate ginger glacier glass globe glove goat gold goose grape guitar hammer harbor harp
    hawk hazel helmet hill honey horse hotel iceberg island ivory jacket jar jelly jewel jungle kettle key kitchen
    kite kitten ladder lake lamp lantern lemon leopard lily lion lizard lobster locket magnet maple marble market
    mask meadow melon meteor milk mill mirror monkey moon mountain mushroom napkin necklace needle nest nickel oak
    ocean olive onion orange orchard otter oven owl paddle palace panda panther paper parrot peach pearl pebble
    pelican pencil pepper piano pigeon pillow pine planet plate pocket pond pony potato prism pumpkin puppet quarry
    quilt rabbit raft rain raven ribbon rice ring river rocket rope rose ruby saddle sail salmon salt sand scarf
    shark sheep shell shield ship shoe shovel silk silver spider spoon squirrel stable star statue stone stove straw
    sugar swan sword table tent thunder tiger timber torch tower trail train tulip tunnel turtle umbrella valley vase
    velvet violin volcano wagon walnut whale wheat wheel whistle willow window wolf wood yacht zebra
"""
WORDS = tuple(_WORDS.split())
