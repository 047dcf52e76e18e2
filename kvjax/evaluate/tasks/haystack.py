"""Prompts that hide lines in a long text and end with a question; everything follows from a
seed.

A *form* (`needles.py`, `variables.py`, `words.py`) is a function that makes the hidden lines,
the question and its answers from a `random.Random`; `weave` puts the lines into running text,
so that the prompt has exactly the tokens asked for and ends with the question on a line of its
own.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.spec import require_int


@dataclass(frozen=True)
class Hidden:
    """The lines and the question that a form made. The lines are hidden at random places, in
    this order; the question comes last."""

    lines: tuple[str, ...]
    question: str  # ends where the answer begins
    answers: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)  # what results are grouped by
    holding: tuple[
        int, ...
    ] = ()  # the lines that hold the answers; empty if all lines are needed


@dataclass(frozen=True)
class Woven:
    """A prompt. In training, the answer directly follows `ids`."""

    ids: tuple[int, ...]
    # Index in ids of the first token of each hidden line, its line break.
    starts: tuple[int, ...]
    question: int  # index in ids of the first token of the question, its line break

    @property
    def depths(self) -> tuple[float, ...]:
        """Where each line begins, as a share of what comes before the question."""
        return tuple(start / self.question for start in self.starts)


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(n) for n in rng.sample(range(10000, 100000), count)]


def draw_uuids(rng: random.Random, count: int) -> list[str]:
    """Random UUIDs, as 32 hexadecimal digits in five groups."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


DOTS = " ...." * 64  # the text to weave into for forms whose lines are the whole text


class TooShortError(ValueError):
    """A prompt of `length` tokens has no room for what it must hold, which takes `least`."""

    def __init__(self, length: int, least: int):
        super().__init__(
            f"length={length} has no room for the hidden lines and the question; use at least {least}"
        )
        self.least = least


def weave(
    tokenizer: Any,
    text: str | Sequence[int] | np.ndarray,
    length: int,
    hidden: Hidden,
    rng: random.Random,
    depths: Sequence[float] | None = None,
) -> Woven:
    """A prompt of exactly `length` tokens: an excerpt of `text`, the hidden lines in it, and
    the question at its end.

    The excerpt begins at a random place of `text` and wraps around at its end. Each line stands
    between line breaks, after the share `depths` of the excerpt, or at random. BOS comes first
    if the tokenizer adds it. With `text` as token ids, only the lines and the question are
    tokenized.

    Raises:
      ValueError: `length` has no room for lines and question, `depths` that do not fit, a text
        without tokens.
    """
    require_int("weave(length=...)", length, at_least=1)
    parts = [*(f"\n{line}\n" for line in hidden.lines), f"\n{hidden.question}"]
    *lines, end = tokenizer(parts, add_special_tokens=False)["input_ids"]
    out = first_tokens(tokenizer)
    room = length - len(out) - len(end) - sum(map(len, lines))
    if room < 0:
        raise TooShortError(length, length - room)
    if depths is None:
        places = sorted(rng.randint(0, room) for _ in lines)
    else:
        if (
            len(depths) != len(lines)
            or list(depths) != sorted(depths)
            or not all(0 <= d <= 1 for d in depths)
        ):
            raise ValueError(
                f"depths must be {len(lines)} rising shares in [0, 1], one for each line, got {depths}"
            )
        places = [round(depth * room) for depth in depths]
    body = excerpt(tokenizer, text, room, rng)
    starts = []
    at = 0
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


def excerpt(
    tokenizer: Any, text: str | Sequence[int] | np.ndarray, count: int, rng: random.Random
) -> list[int]:
    """`count` token ids from a random place on; the text wraps around at its end."""
    if isinstance(text, str):
        start = rng.randrange(max(1, len(text)))
        letters = min(8 * count, len(text))  # tokens have fewer than 8 on average
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
