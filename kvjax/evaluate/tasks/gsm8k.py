"""GSM8K: word problems of grade-school mathematics, scored by the final number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.evaluate.tasks import metrics
from kvjax.evaluate.tasks.files import digests, read_jsonl
from kvjax.evaluate.tasks.protocol import Example
from kvjax.spec import require_int

_FIELDS = {"question": str, "answer": str}


@dataclass(frozen=True)
class Gsm8k:
    """The test set of GSM8K after `shots` solved problems, by exact match of the final number.

    `directory` holds test.jsonl and, unless `shots` is 0, train.jsonl, as published. The solved problems are the first
    of train.jsonl, the same for each question, in the form "Question: ... Answer: ..." that lm-evaluation-harness
    gives them; an answer ends where the model goes on to another "Question:". `chat` puts the prompt in the model's
    chat template.

    **Source:** Cobbe et al. (2021); data https://github.com/openai/grade-school-math. The score is
    `metrics.same_number`. **Differs:** lm-evaluation-harness draws the solved problems at random.
    """

    directory: str | Path
    shots: int = 8
    max_new_tokens: int = 256
    chat: bool = False

    def __post_init__(self) -> None:
        require_int("Gsm8k(shots=...)", self.shots, at_least=0)
        require_int("Gsm8k(max_new_tokens=...)", self.max_new_tokens, at_least=1)

    @property
    def name(self) -> str:
        return "gsm8k"

    @property
    def metric(self) -> str:
        return "exact match"

    @property
    def stop(self) -> tuple[str, ...]:
        return ("Question:",)

    def key(self) -> Mapping[str, Any]:
        files = ("test", "train") if self.shots else ("test",)
        return {
            "task": self.name,
            "shots": self.shots,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "files": digests({self._file(name): self._download(name) for name in files}),
        }

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """The questions in the order of the file; an id is the number of its record, from 0."""
        solved = self._read("train")[: self.shots] if self.shots else []
        if len(solved) < self.shots:
            raise ValueError(f"{self._file('train')} has {len(solved)} problems, fewer than shots={self.shots}")
        shown = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in solved)
        examples = []
        for number, record in enumerate(self._read("test")):
            truth = metrics.final_number(record["answer"])
            if truth is None:
                raise ValueError(f"{self._file('test')}, record {number + 1}, has an answer without a number")
            prompt = f"{shown}Question: {record['question']}\nAnswer:"
            examples.append(Example(str(number), prompt, (str(truth),)))
        return examples

    def score(self, example: Example, answer: str) -> float:
        return metrics.same_number(answer, example.answers[0])

    def _file(self, name: str) -> Path:
        return Path(self.directory) / f"{name}.jsonl"

    def _read(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self._file(name), _FIELDS, download=self._download(name))

    def _download(self, name: str) -> str:
        source = "https://github.com/openai/grade-school-math (folder grade_school_math/data)"
        instead = ", or ask for shots=0" if name == "train" else ""
        return f"download {name}.jsonl from {source} to {self._file(name)}{instead}"
