"""The protocol of tasks: a task makes examples from seeds or files, and scores what a model answers.

A task knows nothing of caches and models, and the runner nothing of where examples come from, so generated needles,
LongBench and a task of one's own go through the same loop, tables and plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """One question. Its prompt is text, or token ids where a length is to be met exactly. Nothing is added to ids; to
    text what the tokenizer adds (as BOS), or the chat template if the task asks for it. The prompt is prefilled; the
    tokens of `question` follow it one decode step at a time, through the cache."""

    id: str  # unique and stable within the task
    prompt: str | tuple[int, ...]
    answers: tuple[str, ...]  # what is right, in the task's own sense
    fields: Mapping[str, Any] = field(default_factory=dict)  # depth, length, subject ...: results are grouped by them
    question: tuple[int, ...] = ()  # token ids that are fed after the prompt, one step each


class Task(Protocol):
    """A set of examples and the rule by which an answer counts."""

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
        """Texts that end an answer, beside the model's stop tokens; what follows the first of them is dropped."""
        ...

    @property
    def chat(self) -> bool:
        """Whether prompts of text go through the model's chat template, where it has one."""
        ...

    def key(self) -> Mapping[str, Any]:
        """Everything that decides the examples and the score, as JSON: sizes, seed, files with their digests."""
        ...

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """All examples, the same for the same key and tokenizer.

        Raises:
          FileNotFoundError: data that is not there; says what to download and where to put it.
        """
        ...

    def score(self, example: Example, answer: str) -> float:
        """In [0, 1]; `answer` is the generated text, cut at `stop`."""
        ...
