"""RULER from the JSONL files that its generator writes, to run its own examples.

`kvjax.evaluate.tasks` makes tasks of the same kinds for a model of any vocabulary; these files are made by
RULER's scripts for one tokenizer and one length, and already contain the model's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.evaluate.tasks import metrics
from kvjax.evaluate.tasks.files import STRINGS, Fields, digests, read_jsonl
from kvjax.evaluate.tasks.protocol import Example

# The tokens that RULER lets each kind of task generate. A task's name starts with its kind: niah_multikey_1, qa_2.
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
_FIELDS: Fields = {"index": int, "input": str, "outputs": STRINGS}
_SUBSETS = ("validation", "test")  # RULER's names for the file of a task; its folder has the task's name


@dataclass(frozen=True)
class Ruler:
    """One task of RULER at one length, such as `.../4096/data/niah_single_1/validation.jsonl`.

    The task's name is that of the file, or of its folder if the file is called validation or test; `task` overrides
    it. A record has index, input and outputs; newer generators add answer_prefix, which ends the prompt. The score is
    the share of `outputs` that occur in the answer; for question answering (qa), 1 if any of them occurs.

    **Source:** Hsieh et al. (2024); https://github.com/NVIDIA/RULER. As there, control characters of an answer count
    as line breaks.
    """

    path: str | Path
    task: str | None = None

    def __post_init__(self) -> None:
        if self._kind not in NEW_TOKENS:
            raise ValueError(
                f"RULER has no task {self._task!r} (from {self.path}); give task=..., a name that starts with one of "
                f"{', '.join(NEW_TOKENS)}"
            )

    @property
    def name(self) -> str:
        return f"ruler/{self._task}"

    @property
    def metric(self) -> str:
        return "string match, part" if self._kind == "qa" else "string match, all"

    @property
    def max_new_tokens(self) -> int:
        return NEW_TOKENS[self._kind]

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def chat(self) -> bool:
        return False  # the generator put the template around the input

    def key(self) -> Mapping[str, Any]:
        return {"task": self.name, "files": digests({Path(self.path): self._make})}

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """All examples, with the generator's `length` in their fields, if it wrote one: tokens, answer included."""
        examples = []
        for record in read_jsonl(Path(self.path), _FIELDS, download=self._make):
            prompt = record["input"] + record.get("answer_prefix", "")
            fields = {"length": record["length"]} if "length" in record else {}
            examples.append(Example(str(record["index"]), prompt, record["outputs"], fields))
        return examples

    def score(self, example: Example, answer: str) -> float:
        answer = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()
        match = metrics.match_part if self._kind == "qa" else metrics.match_all
        return match(answer, example.answers)

    @property
    def _task(self) -> str:
        path = Path(self.path)
        return self.task or (path.parent.name if path.stem in _SUBSETS else path.stem)

    @property
    def _make(self) -> str:
        return f"make it with the scripts of https://github.com/NVIDIA/RULER and put it at {self.path}"

    @property
    def _kind(self) -> str:
        return self._task.partition("_")[0]
