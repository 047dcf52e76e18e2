"""Checks a task from outside of kvjax where it is called: what its examples, its key and its
score are.

So a mistake in a task of one's own is one sentence with class, verb, got and wanted, before any
weights are read, where it can be known then. Some would be silent otherwise: a text where
several are wanted counts its letters, and a score of NaN makes a mean NaN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from kvjax.evaluate.tasks.protocol import Example, Task
from kvjax.validation import check_verbs, cut, short_repr

FIELDS = ("name", "metric", "max_new_tokens", "stop", "chat")


def check_task(where: str, task: Any) -> Task:
    """The task, if it has what a `Task` has.

    Raises:
      ValueError: it does not, or a field is not what `Task` says.
    """
    check_verbs(
        where,
        task,
        "a task",
        ("key", "examples", "score"),
        "kvjax.evaluate.tasks.make_tasks(['needles'])",
        fields=FIELDS,
        protocol="kvjax.evaluate.Task",
    )
    _check_fields(task)
    return task


def _check_fields(task: Task) -> None:
    """Raises ValueError unless the fields of a task are what `Task` says."""
    for name in ("name", "metric"):
        value = getattr(task, name)
        if not isinstance(value, str) or not value:
            raise _wrong(task, name, value, "a text", verb="is")
    if not _is_int(task.max_new_tokens) or task.max_new_tokens < 0:
        raise _wrong(
            task, "max_new_tokens", task.max_new_tokens, "a number of tokens", verb="is"
        )
    if not _are_texts(task.stop):
        raise _wrong(task, "stop", task.stop, 'texts in a tuple, such as ("\\n",)', verb="is")
    if not isinstance(task.chat, bool):
        raise _wrong(task, "chat", task.chat, "True or False", verb="is")


def examples_of(task: Task, tokenizer: Any, *, vocabulary: int) -> list[Example]:
    """The examples of a task for a model with so many token ids.

    Raises:
      ValueError: something else than examples, or an example whose fields are not what
        `Example` says.
    """
    found = task.examples(tokenizer)
    if found is None or isinstance(found, str | Mapping):
        raise _wrong(task, "examples", found, "a list of kvjax.evaluate.Example")
    examples = list(found)
    for number, example in enumerate(examples):
        if not isinstance(example, Example):
            raise _wrong(task, "examples", example, f"a kvjax.evaluate.Example at {number}")
        _check_example(task, example, vocabulary)
    return examples


def _check_example(task: Task, example: Example, vocabulary: int) -> None:
    """Raises ValueError unless the fields of an example are what `Example` says."""

    def wrong(field: str, wanted: str) -> ValueError:
        got = getattr(example, field)
        return _wrong(task, "examples", got, wanted, of=f"an Example with {field}=")

    if not isinstance(example.id, str):
        raise wrong("id", "a text that no other example has")
    if not isinstance(example.prompt, str) and not _are_ids(example.prompt, vocabulary):
        raise wrong("prompt", f"a text, or token ids below {vocabulary}")
    if not _are_texts(example.answers):
        raise wrong("answers", 'texts in a tuple, such as ("42",)')
    if not isinstance(example.fields, Mapping):
        raise wrong("fields", "a dict")
    if not _are_ids(example.question, vocabulary):
        raise wrong("question", f"token ids below {vocabulary}, or ()")


def key_of(task: Task) -> dict[str, Any]:
    """The key of a task, by which its results are kept.

    Raises:
      ValueError: something else than JSON.
    """
    found = task.key()
    wanted = "a dict of JSON: what decides the examples and the score"
    if not isinstance(found, Mapping):
        raise _wrong(task, "key", found, wanted)
    try:
        json.dumps(dict(found))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{type(task).__name__}.key returned no JSON ({error}), wanted {wanted}"
        ) from error
    return dict(found)


def score_of(task: Task, example: Example, answer: str) -> float:
    """The score of an answer.

    Raises:
      ValueError: something else than a number from 0 to 1, or an error of `score`.
    """
    try:
        found = task.score(example, answer)
    except Exception as error:
        given = f"for the answer {short_repr(answer)} to example {example.id}"
        raise ValueError(
            f"{type(task).__name__}.score raised {type(error).__name__}: {error}, {given}; it must take every answer"
        ) from error
    number: Any = found
    if hasattr(number, "item") and np.ndim(number) == 0:
        number = number.item()
    if not isinstance(number, int | float) or not 0 <= number <= 1:
        raise _wrong(
            task, "score", found, f"a number from 0 to 1, for the answer {short_repr(answer)}"
        )
    return float(number)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    """True for a tuple or list of texts; a text itself would be taken letter by letter."""
    return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


def _are_ids(value: Any, vocabulary: int) -> bool:
    """True for token ids of a model with so many, or for none."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return False
    if len(value) == 0:
        return True
    try:
        ids = np.asarray(value)
    except ValueError:  # rows of several lengths
        return False
    return ids.ndim == 1 and ids.dtype.kind in "iu" and 0 <= ids.min() <= ids.max() < vocabulary


def _wrong(
    task: Task, member: str, got: Any, wanted: str, *, verb: str = "returned", of: str = ""
) -> ValueError:
    name = f"{type(task).__name__}.{member}"
    return ValueError(f"{name} {verb} {of}{cut(short_repr(got))}, wanted {wanted}")
