"""The protocol of tasks: a task makes examples from seeds or files, and scores what a model
answers.

Generated needles and a task of your own go through the same loop, tables and plots. Published
data sets are read by lm-evaluation-harness, through `kvjax/evaluate/harness.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """One question. Its prompt is text, or token ids if it must have an exact length. Token ids
    are used as they are; text gets the special tokens that the tokenizer adds (such as BOS), or
    the chat template if the task asks for it. The prompt is prefilled; the tokens of `question`
    follow it one decode step at a time, through the cache."""

    id: str  # unique and stable within the task
    prompt: str | tuple[int, ...]
    answers: tuple[str, ...]  # the right answers, as the task defines them
    # Depth, length, subject ...: results are grouped by them.
    fields: Mapping[str, Any] = field(default_factory=dict)
    question: tuple[int, ...] = ()  # token ids that are fed after the prompt, one step each


class Task(Protocol):
    """A set of examples and the rule that scores an answer."""

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> str:
        """The name of the score, for tables: "exact match", "F1", ..."""
        ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer, in addition to the model's stop tokens; the answer is cut
        at the first of them.
        """
        ...

    @property
    def chat(self) -> bool:
        """True if prompts of text go through the model's chat template, where it has one."""
        ...

    def key(self) -> Mapping[str, Any]:
        """Everything that decides the examples and the score, as JSON: sizes, seed, files with
        their digests.
        """
        ...

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """All examples, the same for the same key and tokenizer.

        Raises:
          FileNotFoundError: missing data; says what to download and where to put it.
        """
        ...

    def score(self, example: Example, answer: str) -> float:
        """In [0, 1]; `answer` is the generated text, cut at `stop`."""
        ...
