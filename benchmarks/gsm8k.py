"""GSM8K through caches: word problems of grade-school mathematics, scored by the final number.

    python -m benchmarks.gsm8k MODEL --data DIR --shots 0 --chat --budget 64,256 \\
        --cache full --cache fier --out gsm8k

DIR holds test.jsonl, and train.jsonl unless --shots is 0, from
https://github.com/openai/grade-school-math. The folder of --out is one of `kvjax eval`: a later
call continues, and `kvjax eval --report-only` reads it. lm-evaluation-harness has this task too
(`kvjax.evaluate.harness`); this one reads a local file, prefills the prompt whole, and runs
several caches at a time.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvjax import models
from kvjax.evaluate import Example, compare, plots
from kvjax.evaluate.provenance import digest, read_text
from kvjax.spec import require_int

_NUMBER = re.compile(
    r"(?<!\d)-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII
)  # 18, -3, 1,234.50, .5; the 4 of 10-4


def final_number(text: str) -> Decimal | None:
    """The number after the first `####`, as GSM8K writes its answers; without one, the last
    number of the text.
    """
    marked = _NUMBER.findall(text.partition("####")[2].partition("\n")[0])
    numbers = marked[:1] or _NUMBER.findall(text)[-1:]
    return Decimal(numbers[0].replace(",", "")) if numbers else None


@dataclass(frozen=True)
class Gsm8k:
    """The test set of GSM8K after `shots` solved problems, by exact match of the final number.

    `directory` holds test.jsonl and, unless `shots` is 0, train.jsonl, as published. The solved
    problems are the first of train.jsonl, the same for each question, in the form "Question:
    ... Answer: ..." that lm-evaluation-harness gives them; an answer ends where the model goes
    on to another "Question:". `chat` puts the prompt in the model's chat template.

    **Source:** Cobbe et al. (2021); data https://github.com/openai/grade-school-math.
    **Differs:** an answer without `####` counts by its last number, as the flexible match of
    lm-evaluation-harness does, and 18.0 equals 18; lm-evaluation-harness draws the solved
    problems at random.
    """

    directory: str | Path
    shots: int = 8
    max_new_tokens: int = 256
    chat: bool = False
    samples: int | None = None  # the first questions alone

    def __post_init__(self) -> None:
        require_int("Gsm8k(shots=...)", self.shots, at_least=0)
        require_int("Gsm8k(max_new_tokens=...)", self.max_new_tokens, at_least=1)
        if self.samples is not None:
            require_int("Gsm8k(samples=...)", self.samples, at_least=1)

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
            "files": {
                f"{name}.jsonl": digest(self._file(name)) for name in files if self._read(name)
            },
        } | ({} if self.samples is None else {"first": self.samples})

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """The questions in the order of the file; an id is the number of its record, from 0."""
        solved = self._read("train")[: self.shots] if self.shots else []
        if len(solved) < self.shots:
            raise ValueError(
                f"{self._file('train')} has {len(solved)} problems, fewer than shots={self.shots}"
            )
        shown = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in solved)
        examples = []
        for number, record in enumerate(self._read("test")[: self.samples]):
            truth = final_number(record["answer"])
            if truth is None:
                raise ValueError(
                    f"{self._file('test')}, record {number + 1}, has an answer without a number"
                )
            prompt = f"{shown}Question: {record['question']}\nAnswer:"
            examples.append(Example(str(number), prompt, (str(truth),)))
        return examples

    def score(self, example: Example, answer: str) -> float:
        number = final_number(answer)
        return float(number is not None and number == Decimal(example.answers[0]))

    def _file(self, name: str) -> Path:
        return Path(self.directory) / f"{name}.jsonl"

    def _read(self, name: str) -> list[dict[str, str]]:
        source = "https://github.com/openai/grade-school-math (folder grade_school_math/data)"
        instead = ", or ask for shots=0" if name == "train" else ""
        what = f"download {name}.jsonl from {source} to {self._file(name)}{instead}"
        records = []
        for number, line in enumerate(
            read_text(self._file(name), what=what).splitlines(), start=1
        ):
            if line.strip():
                record = json.loads(line)
                if missing := {"question", "answer"} - record.keys():
                    raise ValueError(
                        f"{self._file(name)}, line {number}, lacks {sorted(missing)[0]!r}; {what}"
                    )
                records.append(record)
        if not records:
            raise ValueError(f"{self._file(name)} has no records; {what}")
        return records


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="a model in the format of Hugging Face")
    parser.add_argument("--data", type=Path, required=True, help="folder with test.jsonl")
    parser.add_argument(
        "--shots", type=int, default=8, help="solved problems before each question"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--samples", type=int, help="the first questions alone")
    parser.add_argument(
        "--cache",
        action="append",
        required=True,
        help="as in `kvjax eval`; repeat it for several",
    )
    parser.add_argument("--budget", help="several: 64,256")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--dtype", help="of weights and caches")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    task = Gsm8k(given.data, given.shots, given.max_new_tokens, given.chat, given.samples)
    checkpoint = models.load(given.model_dir, **({"dtype": given.dtype} if given.dtype else {}))
    result = compare(
        checkpoint,
        task,
        given.cache,
        budgets=None
        if given.budget is None
        else [int(budget) for budget in given.budget.split(",")],
        batch=given.batch,
        parallel=given.parallel,
        out=given.out,
        progress=lambda done, total, what: print(f"{done} of {total}, {what}", flush=True),
    )
    print(result)
    plots.write(result.cells, given.out)


if __name__ == "__main__":
    main()
