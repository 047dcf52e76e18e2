"""Tokens of a draft that are accepted, as a task: caches follow the text that full attention
writes after excerpts of a text, and each step says what it would have drafted.

The excerpts, the exact text and each cache's agreement are kept in files, so a killed run
continues where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

import kvjax
from kvjax.cache.cache import Cache, raise_on_overflow
from kvjax.evaluate.accuracy import question_columns
from kvjax.evaluate.drafting import DRAFT, count_accepted
from kvjax.evaluate.plan import Plan, feed
from kvjax.evaluate.provenance import digest_json, json_text, read_text, replace_file
from kvjax.evaluate.tasks import Example
from kvjax.evaluate.tasks.generated import LETTERS, made_text
from kvjax.evaluate.tasks.haystack import excerpt, first_tokens
from kvjax.generation import generate
from kvjax.models import Checkpoint
from kvjax.received import read_object
from kvjax.spec import round_capacity

Ids = tuple[int, ...]
NEW_TOKENS = 128  # that full attention writes after an excerpt


@dataclass(frozen=True)
class Continued:
    """A task: prompts, and the text of full attention that follows each, all of one length."""

    prompts: tuple[Ids, ...]
    texts: tuple[Ids, ...]
    draft: int = DRAFT  # tokens of a draft

    max_new_tokens = 0
    stop = ()
    chat = False

    @property
    def metric(self) -> str:
        return f"tokens accepted of {self.draft}"

    @property
    def length(self) -> int:
        """Tokens of a prompt and its text."""
        return len(self.prompts[0]) + len(self.texts[0])

    @property
    def name(self) -> str:
        return f"drafts of {self.draft} at {self.length}"

    def key(self) -> Mapping[str, Any]:
        return {
            "title": f"drafts of {self.draft}",
            "length": self.length,
            "draft": self.draft,
            "samples": len(self.prompts),
            "tokens": digest_json([self.prompts, self.texts]),
        }

    def examples(self, tokenizer: Any) -> list[Example]:
        """The first token of a text follows from the prompt alone, and its last is not fed."""
        pairs = zip(self.prompts, self.texts, strict=True)
        return [
            Example(str(i), prompt, (), {}, text[:-1]) for i, (prompt, text) in enumerate(pairs)
        ]

    def score(self, example: Example, answer: str) -> float:
        raise NotImplementedError("`follow` scores the steps of a text")


def excerpts(
    tokenizer: Any, text: str | np.ndarray, tokens: int, *, count: int, seed: int = 0
) -> tuple[Ids, ...]:
    """`count` excerpts of `tokens` tokens from random places of a text, which wraps around at
    its end; BOS comes first if the tokenizer adds it.
    """
    begin = first_tokens(tokenizer)
    return tuple(
        (
            *begin,
            *excerpt(
                tokenizer,
                text,
                tokens - len(begin),
                random.Random(f"continued {tokens} {seed} {number}"),
            ),
        )
        for number in range(count)
    )


def exact_texts(checkpoint: Checkpoint, prompts: Sequence[Ids], new_tokens: int) -> list[Ids]:
    """The greedy text of full attention after each prompt, which goes on past the end of an
    answer. One prompt at a time, as full caches of long prompts are large.
    """
    layers = checkpoint.config.layers
    texts = []
    for prompt in prompts:
        spec = checkpoint.model.spec(batch=1, capacity=round_capacity(len(prompt) + new_tokens))
        cache = kvjax.init(kvjax.Full(), spec, layers=layers)
        written = generate(checkpoint.model, cache, [list(prompt)], max_new_tokens=new_tokens)
        texts.append(tuple(int(token) for token in written.rows[0]))
    return texts


def make_task(
    checkpoint: Checkpoint,
    load: Callable[[], Checkpoint],
    length: int,
    *,
    folder: Path,
    text: str | Path | None = None,
    samples: int = 8,
    seed: int = 0,
    key: Mapping[str, Any] | None = None,
) -> Continued:
    """Makes the task of one length: excerpts of a text, and what full attention writes after
    them.

    Args:
      checkpoint: without weights.
      load: returns the checkpoint with its weights; called if `folder` lacks the texts.
      length: tokens of an excerpt and its text.
      folder: keeps the texts.
      text: a UTF-8 file; None takes generated sentences.
      key: what else decides the texts, such as the digest of the model, as JSON.
    """
    new_tokens = min(NEW_TOKENS, length // 4)
    source = made_text() if text is None else read_text(Path(text), what="give a UTF-8 file")
    prompts = excerpts(
        checkpoint.tokenizer,
        source[:LETTERS],
        length - new_tokens,
        count=samples,
        seed=seed,
    )
    digest = digest_json([prompts, new_tokens, dict(key or {})])
    path = folder / f"exact-texts-{length}.json"
    texts = read_texts(path, digest)
    if texts is None:
        texts = exact_texts(load(), prompts, new_tokens)
        keep_texts(path, digest, texts)
    return Continued(prompts, tuple(texts))


def read_texts(path: Path, key: str) -> list[Ids] | None:
    """The texts that `keep_texts` wrote for `key`; None if there are none."""
    if not path.is_file():
        return None
    kept = read_object(path, cure="delete it")
    if kept.get("key") != key:
        return None
    return [tuple(text) for text in kept["texts"]]


def keep_texts(path: Path, key: str, texts: Sequence[Ids]) -> None:
    """Writes the texts that follow from what `key` is the digest of."""
    replace_file(path, json_text({"key": key, "texts": [list(text) for text in texts]}))


def follow(
    checkpoint: Checkpoint, cache: Cache, logits: Array, plan: Plan, asked: Sequence[str | None]
) -> tuple[Mapping[str, dict[str, Any]], list[float], int]:
    """Feeds each row the exact text; tokens of a draft that are accepted, by example id, mean
    tokens read by layer, and the row steps of that mean.
    """
    task = plan.task
    assert isinstance(task, Continued)
    fed = [() if i is None else plan.fed[i] for i in asked]
    wanted = [() if i is None else task.texts[int(i)][1:] for i in asked]
    done = feed(
        checkpoint, cache, logits, fed, wanted, room=question_columns(max(map(len, fed)))
    )
    raise_on_overflow(done.cache)
    greedy = np.asarray(done.greedy)
    found = {}
    for row, i in enumerate(asked):
        if i is None:
            continue
        right = greedy[row : row + 1, : len(wanted[row])]
        seen = count_accepted(right, np.ones_like(right), task.draft)
        found[i] = {
            "score": seen.accepted,
            "agreement": seen.agreement,
            "by_position": list(seen.by_position),
        }
    return found, np.asarray(done.attended).tolist(), int(done.steps)
