"""Accuracy: a cache decodes its own greedy answers to a batch of prompts of a plan, which are
scored.

If the task feeds its question one step at a time, these steps go through the cache too, before
the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from kvjax.cache.cache import Cache, attending
from kvjax.evaluate.plan import Plan, feed
from kvjax.evaluate.tasks import Task
from kvjax.evaluate.tasks.checking import score_of
from kvjax.generation import decode
from kvjax.models import Checkpoint

PIECE = 32  # tokens decoded between two checks for the end of an answer, at most
QUESTION_STEP = 16  # questions are padded to a multiple of it


def answer(
    checkpoint: Checkpoint,
    cache: Cache,
    logits: Array,
    plan: Plan,
    asked: Sequence[str | None],
    *,
    room: int = 0,
) -> tuple[Mapping[str, dict[str, Any]], list[float], int]:
    """Results by example id; mean tokens read by layer, and the row steps of that mean.

    Plans whose questions have the same `room`, in tokens, share the program that feeds them;
    see `question_columns`.
    """
    fed = [() if i is None else plan.fed[i] for i in asked]
    longest = max(map(len, plan.fed.values()))
    seen = np.zeros(len(attending(cache)))
    before = 0
    if longest:
        done = feed(checkpoint, cache, logits, fed, room=max(room, question_columns(longest)))
        cache = done.cache
        logits = done.logits
        before = int(done.steps)
        seen = np.asarray(done.attended, np.float64) * before
    active = np.array([i is not None for i in asked])
    answers, attended, steps = _decode(checkpoint, cache, logits, plan.task, active)
    found = {}
    for i, (text, new_tokens) in zip(asked, answers, strict=True):
        if i is not None:
            example = plan.examples[i]
            found[i] = {
                "fields": dict(example.fields),
                "answers": list(example.answers),
                "answer": text,
                "new_tokens": new_tokens,
                "score": score_of(plan.task, example, text),
            }
    mean = (seen + np.asarray(attended) * steps) / max(before + steps, 1)
    return found, mean.tolist(), before + steps


def question_columns(longest: int) -> int:
    """Columns that questions of at most `longest` tokens are padded to, so that few programs
    are compiled.
    """
    return -(-longest // QUESTION_STEP) * QUESTION_STEP


def _decode(
    checkpoint: Checkpoint, cache: Cache, logits: Array, task: Task, active: np.ndarray
) -> tuple[list[tuple[str, int]], list[float], int]:
    """Answer and number of tokens of each row; mean tokens read per step by layer, and the row
    steps of that mean.
    """
    tokenizer = checkpoint.tokenizer
    stop_tokens = set(checkpoint.stop_tokens)
    found: list[list[int]] = [[] for _ in active]
    texts = [""] * len(found)
    attended = np.zeros(len(attending(cache)))
    steps = 0
    left = task.max_new_tokens
    even = -(-left // -(-left // PIECE))  # one program for all pieces
    while left and active.any():
        piece = min(left, even)
        done = decode(
            checkpoint.model,
            cache,
            logits,
            max_new_tokens=piece,
            active=active,
            stop_tokens=stop_tokens,
            measure=True,
        )
        cache = done.cache
        logits = done.logits
        left = left - piece
        new = int(done.lengths.sum())
        assert done.attended is not None
        attended = attended + done.attended * new
        steps = steps + new
        active = active.copy()
        for row in np.flatnonzero(active):
            found[row] += done.rows[row]
            texts[row], ended = cut(
                tokenizer.decode(found[row], skip_special_tokens=True), task.stop
            )
            active[row] = not (ended or found[row][-1] in stop_tokens)
    return (
        list(zip(texts, map(len, found), strict=True)),
        (attended / max(steps, 1)).tolist(),
        steps,
    )


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first occurrence of a text of `stop`, and whether there was one.

    >>> cut("42. So", ["\\n", "."])
    ('42', True)
    """
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
