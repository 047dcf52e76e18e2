"""Tasks of generated questions, by name: a form with a length, a number of samples and a seed.

`length` counts prompt and answer, so a task of 16384 is for a model of 16384 positions. Each
sample draws from its own generator, seeded by form, length, seed and number, so the first
samples stay the same when more are asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import kvjax.evaluate.tasks.needles as needles_file
import kvjax.evaluate.tasks.variables as variables_file
import kvjax.evaluate.tasks.words as words_file
from kvjax.evaluate.provenance import digest, read_text
from kvjax.evaluate.tasks.haystack import DOTS, Hidden, TooShortError, Woven, weave
from kvjax.evaluate.tasks.protocol import Example
from kvjax.presets.parsing import settings_of
from kvjax.spec import require_int
from kvjax.validation import check_one_of

FORMS: dict[str, Callable[..., Hidden]] = {
    form.__name__: form
    for form in (
        needles_file.pass_key,
        needles_file.needles,
        needles_file.needle_lines,
        needles_file.key_value,
        variables_file.variables,
        variables_file.assigned_variables,
        words_file.frequent_words,
        words_file.common_words,
    )
}
Question = Literal["decoded", "prefilled"]
TITLES = {
    "pass_key": "pass key",
    "needles": "{asked} of {hidden} needles",
    "needle_lines": "1 of needles only",
    "key_value": "1 of {pairs} pairs",
    "variables": "1 of {chains} variable chains, {hops} hops",
    "assigned_variables": "all variables of 1 of {chains} chains, {hops} hops",
    "frequent_words": "{asked} most frequent words",
    "common_words": "{asked} common words",
}
# Forms whose lines are the whole text: the setting for their number, and the least number of
# tokens of one.
FILLING = {
    "frequent_words": ("words", 2),
    "common_words": ("words", 2),
    "needle_lines": ("lines", 8),
}
# A UUID, a number or a word.
WORD = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+|[^\W\d]+")
UNASKED = {name for name, _ in FILLING.values()}
LETTERS = 1_000_000  # excerpts come from so many first letters of a text, at most


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Questions of one form, scored by the share of right answers given: one must come first,
    several may be anywhere.

    Numbers have five digits, and digits after the fifth are ignored: not every model knows
    where to stop.

    `settings` are those of the form, as pairs. `depths` is the number of depths, evenly spaced
    from the beginning to the end, that samples cycle through, for forms of one line; None hides
    lines at random. `text` is a UTF-8 file; lines are hidden in excerpts of it. None takes
    generated sentences, so that nothing need be downloaded. The lines of frequent_words,
    common_words and needle_lines fill the prompt themselves.

    `question` says how the question reaches the model. "prefilled": as the end of the prompt,
    so that a cache that evicts tokens of a prompt selects them with the question in view.
    "decoded": one step at a time through the cache, after the prompt is stored, as in the
    pass-key script of Quest, which FIER's Table 3 follows.
    """

    form: str
    settings: tuple[tuple[str, Any], ...] = ()
    length: int = 4096  # tokens of prompt and answer
    samples: int = 64
    seed: int = 0
    depths: int | None = None
    text: str | Path | None = None
    question: Question = "decoded"

    def __post_init__(self) -> None:
        check_one_of("Synthetic", FORMS, form=self.form)
        check_one_of(self.form, get_args(Question), question=self.question)
        for name in ("length", "samples"):
            require_int(f"{self.form}({name}=...)", getattr(self, name), at_least=1)
        if self.depths is not None:
            require_int(f"{self.form}(depths=...)", self.depths, at_least=1)
            if self._fills:
                raise ValueError(
                    f"{self.form}(depths={self.depths}): its lines fill the prompt; leave depths out"
                )
        if self.length <= self.max_new_tokens:
            raise ValueError(
                f"{self.form}(length={self.length}) leaves no room for a prompt before its "
                f"{self.max_new_tokens} new tokens"
            )

    @property
    def title(self) -> str:
        """The kind of question, without the length: "1 of 8 needles"."""
        known = self._all
        title = "needle" if known.get("hidden") == 1 else TITLES[self.form].format(**known)
        values = known.get("values", 1)
        kind = known.get("kind", "number")
        return (
            title
            + (f", {values} values each" if values > 1 else "")
            + (", UUIDs" if kind == "uuid" else "")
        )

    @property
    def name(self) -> str:
        return f"{self.title} at {self.length}, question {self.question}"

    @property
    def metric(self) -> str:
        return "exact match" if self._asked == 1 else "share of answers"

    @property
    def max_new_tokens(self) -> int:
        """A number has five tokens at most, a coded word six, a UUID 36; some more are for
        separators.
        """
        if self._all.get("kind") == "uuid":
            return 40 * self._asked
        return 8 if self._asked == 1 else 12 * self._asked

    @property
    def stop(self) -> tuple[str, ...]:
        return ("\n",) if self._asked == 1 else ()

    @property
    def chat(self) -> bool:
        return False

    def key(self) -> Mapping[str, Any]:
        own = {
            name: getattr(self, name)
            for name in ("form", "length", "samples", "seed", "depths", "question")
        }
        return {
            **own,
            "title": self.title,
            "settings": self._all,
            "text": None if self.text is None else digest(self.text),
        }

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        text = DOTS if self._fills else _tokens(tokenizer, self._text()[:LETTERS])
        return [self._example(tokenizer, text, number) for number in range(self.samples)]

    def score(self, example: Example, answer: str) -> float:
        words = WORD.findall(answer.lower())  # a model may go on without a space
        if len(example.answers) == 1:
            words = words[:1]
        asked = [
            (right.lower(), len(right.lower()) if right.isdigit() else None)
            for right in example.answers
        ]
        # No further digits count.
        found = [any(word[:digits] == right for word in words) for right, digits in asked]
        return sum(found) / len(found)

    @property
    def _asked(self) -> int:
        """How many answers an example has."""
        known = self._all
        return (
            known["hops"] + 1
            if self.form == "assigned_variables"
            else known.get("asked", 1) * known.get("values", 1)
        )

    @property
    def _all(self) -> dict[str, Any]:
        """The settings, with the form's defaults for those that are not given."""
        return settings_of(FORMS[self.form]) | dict(self.settings)

    @property
    def _fills(self) -> bool:
        return self.form in FILLING

    def _text(self) -> str:
        return (
            made_text()
            if self.text is None
            else read_text(Path(self.text), what="give a UTF-8 file")
        )

    def _example(self, tokenizer: Any, text: str | np.ndarray, number: int) -> Example:
        rng = random.Random(f"{self.form} {self.length} {self.seed} {number}")
        depths = None
        if self._fills:
            hidden, woven = self._filled(tokenizer, rng)
        else:
            hidden = FORMS[self.form](rng, **dict(self.settings))
            if self.depths is not None:
                if len(hidden.lines) != 1:
                    raise ValueError(
                        f"depths={self.depths} is for one line; {self.name} hides {len(hidden.lines)}"
                    )
                depths = [number % self.depths / max(1, self.depths - 1)]
            woven = self._weave(tokenizer, text, hidden, rng, depths)
        fields = {"length": self.length, **hidden.fields}
        if len(hidden.holding) == 1:
            fields["depth"] = round(
                woven.depths[hidden.holding[0]] if depths is None else depths[0], 3
            )
        at = woven.question if self.question == "decoded" else len(woven.ids)
        return Example(str(number), woven.ids[:at], hidden.answers, fields, woven.ids[at:])

    def _weave(
        self,
        tokenizer: Any,
        text: str | np.ndarray,
        hidden: Hidden,
        rng: random.Random,
        depths: list[float] | None,
    ) -> Woven:
        try:
            return weave(
                tokenizer, text, self.length - self.max_new_tokens, hidden, rng, depths
            )
        except TooShortError as error:
            raise ValueError(
                f"{self.name} has no room for the hidden lines, the question and {self.max_new_tokens} tokens of the "
                f"answer; use a length of at least {error.least + self.max_new_tokens}"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{self.name}, of which {self.max_new_tokens} are for the answer: {error}"
            ) from None

    def _filled(self, tokenizer: Any, rng: random.Random) -> tuple[Hidden, Woven]:
        """As many words or lines as the prompt has room for; dots fill the rest."""
        prompt = self.length - self.max_new_tokens
        state = rng.getstate()
        given = dict(self.settings)
        name, least = FILLING[self.form]
        count = prompt // least
        while True:
            rng.setstate(state)
            try:
                hidden = FORMS[self.form](rng, **{name: count, **given})
            except ValueError as error:
                if name in given:
                    raise
                raise ValueError(f"{self.name}: {error}; ask for longer prompts") from None
            taken = sum(
                map(len, tokenizer([f"\n{line}\n" for line in hidden.lines])["input_ids"])
            )
            room = prompt - len(tokenizer(hidden.question)["input_ids"]) - 16
            if taken <= room or name in given:
                return hidden, self._weave(tokenizer, DOTS, hidden, rng, None)
            count = min(count - 1, int(0.99 * count * room / taken))


# The tasks by name: their form, and settings in place of the form's defaults.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "pass_key": ("pass_key", {"depths": 10}),
    "needle": ("needles", {"hidden": 1, "depths": 10}),
    **{form: (form, {}) for form in FORMS if form != "pass_key"},
}


def make_task(name: str, **given: Any) -> Synthetic:
    """A task by its name; `given` are settings of its form, and other fields of `Synthetic`.

    A form that fills the prompt has as many lines as there is room for, unless their number is
    given.
    """
    form, instead = TASKS[name]
    given = instead | given
    own = {
        key: value
        for key, value in settings_of(FORMS[form]).items()
        if key in given or key not in UNASKED
    }
    settings = tuple((key, given.pop(key, value)) for key, value in own.items())
    return Synthetic(form=form, settings=settings, **given)


# The synthetic tasks of RULER (Hsieh et al. 2024, Table 2) by their settings: retrieval from a
# text with numbers and UUIDs, of one key among others, from needles alone, of several values
# and several keys, tracing, and aggregation.
RULER = (
    "needle",
    "needle:kind=uuid",
    "needles:hidden=4",
    "needle_lines",
    "needle_lines:kind=uuid",
    "needles:hidden=4,values=4",
    "needles:hidden=4,asked=4",
    "assigned_variables",
    "common_words",
    "frequent_words",
)


@lru_cache(maxsize=2)  # lengths and tasks share a text
def _tokens(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32
    )


@lru_cache(maxsize=1)
def made_text() -> str:
    """Plain English sentences without numbers, some 150 000 letters, the same everywhere."""
    rng = random.Random("kvjax")
    who, did, what, where = (part.split(" | ") for part in (_WHO, _DID, _WHAT, _WHERE))
    paragraphs = []
    for _ in range(300):
        sentences = []
        for _ in range(rng.randint(4, 9)):
            parts = [rng.choice(who), rng.choice(did), rng.choice(what)]
            place = rng.choice(where)
            line = " ".join((place + ",", *parts) if rng.random() < 0.3 else (*parts, place))
            sentences.append(line[0].upper() + line[1:] + ".")
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)


_WHO = (
    "the old gardener | my eldest sister | a tired clerk | the captain | our neighbour | the schoolmaster | a young "
    "painter | the widow next door | her uncle | the baker's son | a quiet stranger | the doctor | the miller | their "
    "cousin | the night watchman | an honest lawyer | the postman | his mother | the choir | every child in the street"
)
_DID = (
    "carried | had forgotten | was looking for | never mentioned | at last found | once admired | could not describe | "
    "wished to sell | had borrowed | kept | laughed about | was afraid of losing | talked at length about | mended | "
    "had promised to bring | thought little of | gave away | was proud of | wrote home about | hid"
)
_WHAT = (
    "a letter with a broken seal | the smallest of the chairs | two loaves of bread | the map of the coast | a coat of "
    "grey wool | the story of the flood | some apples and a knife | the key of the barn | a song about the harvest | "
    "the picture over the stairs | a basket of wet linen | the rules of the game | a lamp without oil | the long way "
    "home | an answer to the question | the sound of the bells | a book without a cover | the news from the city | "
    "a promise made in spring | the last of the tea"
)
_WHERE = (
    "in the morning | before the rain came | behind the church | on the road to the sea | when nobody was listening | "
    "at the end of the summer | under the old bridge | after supper | in the empty house | while the kettle boiled | "
    "near the window | on the day of the fair | for most of the winter | beyond the last field | without a word | as "
    "the light was fading | at the top of the stairs | during the sermon | between two trains | with a kind of smile"
)
