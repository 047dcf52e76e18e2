"""Training data: corpora as token ids, and rows of a stated length made from them, the same for
the same seed and step.

A corpus is a directory that `prepare` makes once: a tokenizer, one array of ids for each kind
of text, and a card that lists the source files. A row is running text, a text that repeats a
passage, or a text with hidden lines and questions, made by the forms and haystack of
kvjax.evaluate.tasks, so a row with one question is like a prompt of an evaluation. Most rows
ask many: a row of 16K tokens costs the same with one answer or with fifty. In a program, the
questions about variables are between their assignments.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvjax.evaluate.provenance import digest, digest_json
from kvjax.evaluate.tasks.generated import FORMS
from kvjax.evaluate.tasks.haystack import DOTS, WORDS, Hidden, weave

NONE, TEXT, ANSWER, CHAIN, REPEAT = range(
    5
)  # kinds of token, which the loss weights differently

BOS, EOS = "<s>", "</s>"
LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
}  # folders of Python's library
# times that the tokenizer sees the words of the forms: enough for a token each
WORDS_AGAIN = 1000

# ----------------------------------------------------------------------------------------------------------- the corpus


@dataclass(frozen=True)
class Corpus:
    """A directory that `prepare` made."""

    directory: Path

    @cached_property
    def card(self) -> dict[str, Any]:
        """The source files, tokens of each kind, and names for hidden things."""
        return json.loads((self.directory / "corpus.json").read_text(encoding="utf-8"))

    @cached_property
    def tokenizer(self) -> Encoder:
        return Encoder(Tokenizer.from_file(str(self.directory / "tokenizer.json")))

    def tokens(self, kind: str) -> np.ndarray:
        """u16[tokens] of "books", "code" or "held_out": the texts one after another, EOS after
        each.
        """
        return np.load(self.directory / f"{kind}.npy", mmap_mode="r")


class Encoder:
    """A `tokenizers.Tokenizer` that is called like those of transformers, which take long to
    import.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner = tokenizer
        self.bos_token_id = tokenizer.token_to_id(BOS)
        self.eos_token_id = tokenizer.token_to_id(EOS)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True
    ) -> dict[str, list[Any]]:
        if isinstance(text, str):
            return {
                "input_ids": self.inner.encode(text, add_special_tokens=add_special_tokens).ids
            }
        found = self.inner.encode_batch_fast(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in found]}


def prepare(
    directory: Path,
    books: Path | None,
    code: Path | None,
    *,
    held_out: Sequence[str],
    vocab_size: int,
    books_pattern: str = "*.txt",
) -> Corpus:
    """The corpus in `directory`, made from the texts below `books` and *.py below `code` if it
    does not exist yet.

    Texts of `books` named in `held_out` are not trained on. Without `books` and `code` the
    directory must hold a corpus. The tokenizer is byte-level BPE with a token per digit,
    trained on all texts that are not held out.

    Raises:
      FileNotFoundError: no corpus and no directories to make it from; a directory without
        texts; no text held out.
      ValueError: the existing corpus was made from other texts or in another way.
    """
    made = directory / "corpus.json"
    if books is None or code is None:
        if not made.is_file():
            raise FileNotFoundError(
                f"{directory} has no corpus yet; give --books and --code, directories of texts"
            )
        return Corpus(directory)
    texts_there = sorted(books.rglob(books_pattern))
    files = {
        "books": [p for p in texts_there if p.name not in held_out],
        "code": [
            p
            for p in sorted(code.rglob("*.py"))
            if not LEFT_OUT & set(p.relative_to(code).parts)
        ],
        "held_out": [p for p in texts_there if p.name in held_out],
    }
    for kind, wanted, place in (
        ("books", books_pattern, books),
        ("code", "*.py", code),
        ("held_out", held_out, books),
    ):
        if not files[kind]:
            raise FileNotFoundError(f"there are no texts for {kind} in {place}: no {wanted}")
    source = {
        "vocab_size": vocab_size,
        "files": {
            kind: [
                {"name": p.name, "bytes": p.stat().st_size, "sha256": digest(p)} for p in found
            ]
            for kind, found in files.items()
        },
    }
    if made.is_file():
        if Corpus(directory).card["source"] != digest_json(source):
            raise ValueError(
                f"{directory} holds a corpus of other texts or another vocabulary; give a new --out"
            )
        return Corpus(directory)

    texts = {
        kind: [p.read_text(encoding="utf-8", errors="replace") for p in found]
        for kind, found in files.items()
    }
    temporary = directory.with_name(directory.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer = train_tokenizer([*texts["books"], *texts["code"]], vocab_size)
    tokenizer.save(str(temporary / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
    }
    (temporary / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1), encoding="utf-8"
    )
    end, counts = tokenizer.token_to_id(EOS), {}
    for kind, found in texts.items():
        parts = [
            [*one.ids, end]
            for one in tokenizer.encode_batch_fast(found, add_special_tokens=False)
        ]
        ids = np.concatenate([np.asarray(part, np.uint16) for part in parts])
        np.save(temporary / f"{kind}.npy", ids)
        counts[kind] = len(ids)
    seen = Counter(
        word for text in texts["books"] for word in re.findall(r"\b[a-z]{4,9}\b", text)
    )
    card = {
        "source": digest_json(source),
        **source,
        "tokens": counts,
        "names": [word for word, _ in seen.most_common(4000)],
    }
    (temporary / "corpus.json").write_text(json.dumps(card, indent=1), encoding="utf-8")
    temporary.rename(directory)
    return Corpus(directory)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; each digit is a token, and so is each word that the forms use as a key,
    after a space.

    In the large vocabularies of real models those common nouns are single tokens too. This
    costs 1 % of the letters per token elsewhere (measured: 20 books, vocabulary 4096), and a
    look-up need not match words of two to four tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    times = max(
        1, min(WORDS_AGAIN, sum(map(len, texts)) // 40_000)
    )  # in proportion, if there is little text
    tokenizer.train_from_iterator([*texts, *([f" {' '.join(WORDS)}"] * times)], trainer)
    first = f"{BOS} $A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=first, pair=f"{first} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


# ------------------------------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The composition of rows. Shares are in [0, 1]; `forms` are weights."""

    synthetic: float  # rows that are not plain text
    code: float  # of running text
    repeat: float  # of synthetic rows: text that repeats a passage
    words: float  # of synthetic rows: frequent or common words
    programs: float  # of synthetic rows: assignments of variables, with questions among them
    single: float  # of the others: one question, as in an evaluation
    forms: Mapping[str, float]  # pass_key, needles, key_value, variables
    seed: int = 0


def make_batch(
    corpus: Corpus, mixture: Mixture, length: int, rows: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids u16[rows, length] and their kinds u8[rows, length]; each row depends on seed,
    step and its number.
    """
    made = [
        make_row(
            corpus, mixture, length, random.Random(f"{mixture.seed} {step} {length} {row}")
        )
        for row in range(rows)
    ]
    tokens, kinds = zip(*made, strict=True)
    return np.stack(tokens), np.stack(kinds)


def make_row(
    corpus: Corpus, mixture: Mixture, length: int, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids u16[length] and kinds u8[length] of one row."""
    text = _tokens(corpus, "code" if rng.random() < mixture.code else "books")
    if rng.random() >= mixture.synthetic:
        return plain(corpus, text, length, rng)
    draw = rng.random()
    if draw < mixture.repeat:
        return _repeating(corpus, text, length, rng)
    if draw < mixture.repeat + mixture.programs:
        return program(corpus, text, length, rng)
    if draw < mixture.repeat + mixture.programs + mixture.words and length >= 1024:
        return asking(corpus, _tokens(corpus, "dots"), length, [_words(length, rng)], rng)
    return asking(corpus, text, length, _hide(corpus, mixture, length, rng), rng)


def asking(
    corpus: Corpus, text: np.ndarray, length: int, hidden: Sequence[Hidden], rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """A row with the lines of all `hidden` in it, and all questions with their answers at its
    end, a line each.

    Lines of different things mix, and those of one keep their order. The row ends with the last
    answer. Only answers count in the loss: otherwise the model would see the text around them
    many times, and memorise it.
    """
    order = [i for i, one in enumerate(hidden) for _ in one.lines]
    rng.shuffle(order)
    pending = [deque(one.lines) for one in hidden]
    lines = tuple(pending[i].popleft() for i in order)
    asked = rng.sample(list(hidden), len(hidden))
    encode = corpus.tokenizer
    answers = encode([reply(one) for one in asked], add_special_tokens=False)["input_ids"]
    further = encode([f"\n{one.question}" for one in asked[1:]], add_special_tokens=False)[
        "input_ids"
    ]
    tail = sum(map(len, answers)) + sum(map(len, further))
    prompt = weave(encode, text, length - tail, Hidden(lines, asked[0].question, ()), rng)

    tokens = np.empty(length, np.uint16)
    kinds = np.full(length, NONE, np.uint8)
    at = length - tail
    tokens[:at] = prompt.ids
    for question, answer, one in zip([[], *further], answers, asked, strict=True):
        tokens[at : at + len(question)] = question
        at += len(question)
        tokens[at : at + len(answer)] = answer
        kinds[at : at + len(answer)] = CHAIN if one.fields.get("hops") else ANSWER
        at += len(answer)
    return tokens, kinds


def reply(hidden: Hidden) -> str:
    """The answers as they follow the question."""
    return (" " if hidden.question.endswith(":") else "") + ", ".join(hidden.answers)


def _hide(corpus: Corpus, mixture: Mixture, length: int, rng: random.Random) -> list[Hidden]:
    """One thing to ask for, as large as an evaluation's; or as many small ones as fit in a
    share of the row.
    """
    limit = _MOST_NAMES + length // 16  # more than fit
    names = rng.sample(
        corpus.card["names"], min(limit, len(corpus.card["names"]))
    )  # popped from the end
    if rng.random() < 0.75:  # the words that evaluations use first
        names = [
            *(name for name in names if name not in _DRAWN),
            *rng.sample(WORDS, len(WORDS)),
        ]
    forms = dict(mixture.forms)
    single = rng.random() < mixture.single
    if not single and rng.random() < 0.5:  # all of a form, or a mixture of them
        forms = dict.fromkeys(rng.choices(list(forms), list(forms.values())), 1.0)
    room = length * (0.9 if single or length < 1024 else rng.uniform(0.1, 0.6))
    made: list[Hidden] = []
    for _ in range(1000):
        if not forms or len(names) < _MOST_NAMES or (single and made):
            break
        form = rng.choices(list(forms), list(forms.values()))[0]
        hidden = _one(form, length, rng) if single else _small(form, rng)
        if form == "pass_key":
            del forms[form]  # there is one in a text
        else:
            hidden = _renamed(hidden, names)
        cost = _cost(corpus, hidden)
        if cost <= room:
            made.append(hidden)
            room -= cost
        elif made:
            break
    return made or [FORMS["pass_key"](rng)]


def _one(form: str, length: int, rng: random.Random) -> Hidden:
    """A thing of the sizes that evaluations use."""
    if form == "needles":
        hidden = rng.choice((1, 4, 8, 16))
        return FORMS[form](
            rng,
            hidden=hidden,
            asked=1 if rng.random() < 0.7 else rng.randint(1, min(4, hidden)),
        )
    if form == "key_value":
        return FORMS[form](
            rng, pairs=_log_uniform(rng, 2, min(_MOST_NAMES, max(2, length // 24)))
        )
    if form == "variables":
        hops = _hops(rng)
        return FORMS[form](
            rng,
            chains=_log_uniform(rng, 1, max(1, min(32, length // 64) // (hops + 1))),
            hops=hops,
        )
    return FORMS[form](rng)


def _small(form: str, rng: random.Random) -> Hidden:
    """A thing of which many fit into a row."""
    if form == "needles":
        return FORMS[form](rng, hidden=1)
    if form == "key_value":
        return FORMS[form](rng, pairs=_log_uniform(rng, 1, 32))
    if form == "variables":
        return FORMS[form](rng, chains=1, hops=_hops(rng))
    return FORMS[form](rng)


def _words(length: int, rng: random.Random) -> Hidden:
    """The most frequent coded words, or the common ones of a list; 5 tokens a word, 11 with its
    number.
    """
    if length >= 4096 and rng.random() < 0.5:
        return FORMS["common_words"](
            rng, words=rng.randint(303, length // 13)
        )  # 303: the least that it takes
    return FORMS["frequent_words"](rng, words=rng.randint(length // 24, length // 7))


def _hops(rng: random.Random) -> int:
    return rng.choices(range(6), (2, 4, 4, 3, 3, 1))[0]


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _cost(corpus: Corpus, hidden: Hidden) -> int:
    """Tokens of the lines, the question and the answers."""
    parts = [*(f"\n{line}\n" for line in hidden.lines), f"\n{hidden.question}", reply(hidden)]
    return sum(map(len, corpus.tokenizer(parts, add_special_tokens=False)["input_ids"]))


def _renamed(hidden: Hidden, names: list[str]) -> Hidden:
    """`hidden` with names from the list in place of the form's words, so that no two things of
    a row share one.
    """
    given: dict[str, str] = {}
    for word in (w for line in hidden.lines for w in _WORD.findall(line)):
        if word in _DRAWN and word not in given:
            given[word] = names.pop()

    def rename(text: str) -> str:
        return _WORD.sub(lambda found: given.get(found[0], found[0]), text)

    return Hidden(
        tuple(map(rename, hidden.lines)), rename(hidden.question), hidden.answers, hidden.fields
    )


_WORD = re.compile(r"\b[a-z]+\b")
_DRAWN = frozenset(WORDS)
_MOST_NAMES = 128  # names that a thing takes, at most


def program(
    corpus: Corpus, text: np.ndarray, length: int, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Assignments to variables in the wording of the form, questions among them at any place,
    and text between some.

    A variable can be asked for as soon as it has a value, so many look-ups reach back only a
    few lines, and there is an answer every 30 tokens. The model learns chains from that, but
    not from questions at the end alone (README.md).
    """
    names = rng.sample(
        corpus.card["names"], min(1000, len(corpus.card["names"]))
    )  # popped from the end
    if rng.random() < 0.75:
        names += rng.sample(WORDS, len(WORDS))
    questions, between = rng.uniform(0.3, 0.6), rng.choice((0.0, 0.0, 0.05, 0.2))
    longest = rng.choice((1, 1, 2, 3, 5))
    known: dict[
        str, tuple[str, int]
    ] = {}  # a variable's value, and the look-ups to it beyond the first
    parts: list[str | np.ndarray] = []
    kinds: list[int] = []
    room = length
    while room > 0:
        if rng.random() < between:
            parts.append(_excerpt(text, _log_uniform(rng, 4, max(4, length // 16)), rng))
            kinds.append(NONE)
            room -= len(parts[-1])
            continue
        recent = list(known)[-4 if rng.random() < 0.5 else 0 :]
        if recent and (rng.random() < questions or not names):
            name = rng.choice(recent)
            value, hops = known[name]
            parts += [f"\nThe value of {name} is ", value]
            kinds += [NONE, CHAIN if hops else ANSWER]
            room -= 10
            continue
        name = names.pop()
        handed_on = [other for other in recent if known[other][1] < longest]
        if handed_on and rng.random() < 0.6:
            of = rng.choice(handed_on)
            known[name] = known[of][0], known[of][1] + 1
        else:
            of = str(rng.randrange(10000, 100000))
            known[name] = of, 0
        parts.append(f"\nVAR {name} = {of}\n")
        kinds.append(NONE)
        room -= 6  # at least
    told = iter(
        corpus.tokenizer([p for p in parts if isinstance(p, str)], add_special_tokens=False)[
            "input_ids"
        ]
    )
    pieces = [next(told) if isinstance(part, str) else part for part in parts]
    pieces, kinds = (
        [[corpus.tokenizer.bos_token_id], *pieces, _excerpt(text, length, rng)],
        [NONE, *kinds, NONE],
    )
    each = np.repeat(kinds, [len(piece) for piece in pieces])
    return np.concatenate(pieces)[:length].astype(np.uint16), each[:length].astype(np.uint8)


def plain(
    corpus: Corpus, text: np.ndarray, length: int, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.concatenate(
        [[corpus.tokenizer.bos_token_id], _excerpt(text, length - 1, rng)]
    ).astype(np.uint16)
    return tokens, np.full(length, TEXT, np.uint8)


def _repeating(
    corpus: Corpus, text: np.ndarray, length: int, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """A text in which a passage occurs twice. The first tokens of the repeat cannot be
    predicted and count as text.
    """
    size = _log_uniform(rng, min(32, length // 4), length // 3)
    body = _excerpt(text, length - 1 - size, rng)
    first = rng.randint(0, len(body) - size)
    second = rng.randint(first + size, len(body))
    passage = body[first : first + size]
    tokens = np.concatenate(
        [[corpus.tokenizer.bos_token_id], body[:second], passage, body[second:]]
    ).astype(np.uint16)
    kinds = np.full(length, TEXT, np.uint8)
    kinds[1 + second + 4 : 1 + second + size] = REPEAT
    return tokens, kinds


def _excerpt(text: np.ndarray, count: int, rng: random.Random) -> np.ndarray:
    """`count` ids from a random place on; the text wraps around at its end."""
    start = rng.randrange(len(text))
    part = text[start : start + count]
    return (
        part if len(part) == count else np.resize(np.concatenate([part, text[:start]]), count)
    )


@cache
def _tokens(corpus: Corpus, kind: str) -> np.ndarray:
    if kind == "dots":
        return np.asarray(
            corpus.tokenizer(DOTS, add_special_tokens=False)["input_ids"], np.uint16
        )
    return corpus.tokens(kind)


@cache
def _opened(directory: Path) -> Corpus:
    return Corpus(directory)


def _make(directory: Path, mixture: Mixture, *what: int) -> tuple[np.ndarray, np.ndarray]:
    """`make_batch` in a worker, which opens the corpus once."""
    return make_batch(_opened(directory), mixture, *what)


# ------------------------------------------------------------------------------------------------------- ahead of time


class Batches:
    """Batches of consecutive steps, made ahead by `workers` processes (0: by a thread of this
    one).

    `plan` gives the length of the rows of a step, or None for no more; it is called when a
    step's batch is begun, which is up to `ahead` steps before it is used.
    """

    def __init__(
        self,
        corpus: Corpus,
        mixture: Mixture,
        plan: Callable[[int], int | None],
        *,
        tokens: int,
        first: int = 0,
        workers: int = 0,
        ahead: int = 8,
    ) -> None:
        self._arguments = corpus.directory, mixture
        self._plan, self._size, self._next = plan, tokens, first
        self._pool: Executor = ThreadPoolExecutor(1)
        if workers:
            os.environ["TOKENIZERS_PARALLELISM"] = (
                "false"  # for the workers: there is one per core
            )
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        self._pending: deque[tuple[int, Future[Any]]] = deque()
        for _ in range(ahead):
            self._begin()

    def _begin(self) -> None:
        length = self._plan(self._next)
        if length is not None:
            rows = max(1, self._size // length)
            self._pending.append(
                (length, self._pool.submit(_make, *self._arguments, length, rows, self._next))
            )
            self._next += 1

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Length, token ids and kinds of the next step."""
        while self._pending:
            length, batch = self._pending.popleft()
            tokens, kinds = batch.result()
            self._begin()
            yield length, tokens, kinds

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
