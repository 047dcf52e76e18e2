"""LongBench, versions 1 and 2, from the files in which they are published.

Version 1 has 21 data sets of questions on long documents, English, Chinese and code. Prompts and output lengths are
those of its own configuration files, which are read from the same folder as the data. Version 2 has one file of
multiple-choice questions, and its prompt in a file too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvjax.evaluate.tasks import metrics
from kvjax.evaluate.tasks.files import STRINGS, Fields, check_records, digests, read_json, read_jsonl, read_text
from kvjax.evaluate.tasks.protocol import Example

# Which metric LongBench gives each data set: its name in tables, and the function.
_F1 = ("F1", metrics.f1)
_ROUGE = ("ROUGE-L", metrics.rouge_l)
_ROUGE_ZH = ("ROUGE-L", metrics.rouge_l_zh)
_RETRIEVAL = ("accuracy", metrics.retrieval)
_CODE = ("edit similarity", metrics.edit_similarity)
_CLASSES = ("accuracy", None)  # needs the classes of the example

METRICS: dict[str, tuple[str, Callable[[str, str], float] | None]] = {
    "narrativeqa": _F1,
    "qasper": _F1,
    "multifieldqa_en": _F1,
    "multifieldqa_zh": ("F1", metrics.f1_zh),
    "hotpotqa": _F1,
    "2wikimqa": _F1,
    "musique": _F1,
    "dureader": _ROUGE_ZH,
    "gov_report": _ROUGE,
    "qmsum": _ROUGE,
    "multi_news": _ROUGE,
    "vcsum": _ROUGE_ZH,
    "trec": _CLASSES,
    "triviaqa": _F1,
    "samsum": _ROUGE,
    "lsht": _CLASSES,
    "passage_count": ("accuracy", metrics.count),
    "passage_retrieval_en": _RETRIEVAL,
    "passage_retrieval_zh": _RETRIEVAL,
    "lcc": _CODE,
    "repobench-p": _CODE,
}
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")  # examples in the prompt teach an answer of one line
CODE = ("lcc", "repobench-p")
PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"

_FIELDS: Fields = {
    "input": str,
    "context": str,
    "answers": STRINGS,
    "length": int,
    "all_classes": list | None,
    "_id": str,
}


@dataclass(frozen=True)
class LongBench:
    """One data set of LongBench v1, such as "hotpotqa", or of LongBench-E, such as "hotpotqa_e".

    `directory` holds `<dataset>.jsonl`, dataset2prompt.json and dataset2maxlen.json, all as published. Few-shot data
    sets are scored by the first non-empty line of the answer. Neither these nor code use a chat template, which
    LongBench found to hurt. A prompt that is too long for the model loses its middle.

    **Source:** Bai et al. (2024); data https://huggingface.co/datasets/THUDM/LongBench (data.zip), configuration
    https://github.com/THUDM/LongBench (LongBench/config). **Differs:** decoding of samsum does not stop at a line
    break: its score reads one line anyway.
    """

    directory: str | Path
    dataset: str

    def __post_init__(self) -> None:
        if self._base not in METRICS:
            raise ValueError(f"LongBench has no data set {self.dataset!r}; it has {', '.join(METRICS)}")

    @property
    def name(self) -> str:
        return f"longbench/{self.dataset}"

    @property
    def metric(self) -> str:
        return METRICS[self._base][0]

    @cached_property
    def max_new_tokens(self) -> int:
        limit = self._config(LENGTHS)
        if not isinstance(limit, int) or limit < 1:
            raise ValueError(f"{Path(self.directory) / LENGTHS} gives {self._base} {limit!r} tokens; it must be >= 1")
        return limit

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def chat(self) -> bool:
        return self._base not in (*FEW_SHOT, *CODE)

    @property
    def truncate(self) -> bool:
        """Whether a prompt that is too long loses its middle; it is an error otherwise."""
        return True

    def key(self) -> Mapping[str, Any]:
        configuration = dict.fromkeys((Path(self.directory) / name for name in (PROMPTS, LENGTHS)), self._configure)
        return {"task": self.name, "files": digests({self._data: self._download, **configuration})}

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """All examples of the file, with `length` (words, or characters of Chinese) in their fields."""
        template = self._config(PROMPTS)
        fields = {**_FIELDS, "all_classes": STRINGS} if METRICS[self._base] is _CLASSES else _FIELDS
        examples = []
        for record in read_jsonl(self._data, fields, download=self._download):
            try:
                prompt = template.format(**record)
            except (AttributeError, IndexError, KeyError, ValueError) as error:
                raise ValueError(
                    f"{Path(self.directory) / PROMPTS}: the prompt of {self._base} is no template of {{context}} and "
                    f"{{input}} ({error!r}); {self._configure}"
                ) from None
            known = {"length": record["length"]}
            if record["all_classes"]:
                known["classes"] = record["all_classes"]
            examples.append(Example(record["_id"], prompt, record["answers"], known))
        return examples

    def score(self, example: Example, answer: str) -> float:
        """The best of the metric against any of the true answers."""
        if self._base in FEW_SHOT:
            answer = answer.lstrip("\n").partition("\n")[0]
        metric = METRICS[self._base][1]
        if metric is None:
            return max(metrics.classification(answer, truth, example.fields["classes"]) for truth in example.answers)
        return metrics.best(metric, answer, example.answers)

    @property
    def _base(self) -> str:
        return self.dataset.removesuffix("_e")

    @property
    def _data(self) -> Path:
        return Path(self.directory) / f"{self.dataset}.jsonl"

    @property
    def _download(self) -> str:
        return (
            "download https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip and put its "
            f"{self.dataset}.jsonl into {self.directory}"
        )

    def _config(self, name: str) -> Any:
        path = Path(self.directory) / name
        values = read_json(path, dict, download=self._configure)
        if self._base not in values:
            raise ValueError(f"{path} has no {self._base!r}; {self._configure}")
        return values[self._base]

    @property
    def _configure(self) -> str:
        return (
            f"download {PROMPTS} and {LENGTHS} from https://github.com/THUDM/LongBench (folder LongBench/config) and "
            f"put them into {self.directory}"
        )


_V2_FIELDS = {
    **dict.fromkeys(("_id", "domain", "difficulty", "length", "question", "answer", "context"), str),
    **{f"choice_{letter}": str for letter in "ABCD"},
}
V2_PROMPT = "0shot.txt"


@dataclass(frozen=True)
class LongBenchV2:
    """LongBench v2: 503 questions with four choices on contexts of 8K to 2M words.

    `path` is data.json as published; 0shot.txt, the prompt, is in the same folder. The letter after "The correct answer
    is", in parentheses or not, counts as the answer; without one it is wrong. A prompt that is too long for the model
    loses its middle.

    **Source:** Bai et al. (2025); data https://huggingface.co/datasets/THUDM/LongBench-v2, prompt
    https://github.com/THUDM/LongBench (prompts). **Differs:** the runner decides how to decode, greedily by default;
    LongBench's script draws at temperature 0.1.
    """

    path: str | Path
    max_new_tokens: int = 128

    @property
    def name(self) -> str:
        return "longbench-v2"

    @property
    def metric(self) -> str:
        return "accuracy"

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def chat(self) -> bool:
        return True

    @property
    def truncate(self) -> bool:
        """Whether a prompt that is too long loses its middle; it is an error otherwise."""
        return True

    def key(self) -> Mapping[str, Any]:
        files = digests({Path(self.path): self._download, self._prompt: self._download_prompt})
        return {"task": self.name, "max_new_tokens": self.max_new_tokens, "files": files}

    def examples(self, tokenizer: Any) -> Sequence[Example]:
        """All examples, with `length` (short, medium, long), `difficulty` and `domain` in their fields."""
        path, download = Path(self.path), self._download
        records = check_records(read_json(path, list, download=download), _V2_FIELDS, path, download=download)
        prompt = read_text(self._prompt, download=self._download_prompt)
        return [
            Example(
                record["_id"],
                _fill(prompt, record),
                (record["answer"],),
                {name: record[name] for name in ("length", "difficulty", "domain")},
            )
            for record in records
        ]

    def score(self, example: Example, answer: str) -> float:
        return float(answer_letter(answer) == example.answers[0])

    @property
    def _prompt(self) -> Path:
        return Path(self.path).parent / V2_PROMPT

    @property
    def _download(self) -> str:
        return f"download data.json of https://huggingface.co/datasets/THUDM/LongBench-v2 to {self.path}"

    @property
    def _download_prompt(self) -> str:
        return f"download {V2_PROMPT} from https://github.com/THUDM/LongBench (folder prompts) to {self._prompt}"


def answer_letter(answer: str) -> str | None:
    """The letter of an answer in the form that LongBench v2 asks for; None without one.

    >>> answer_letter("The correct answer is **(B)**, for A is not."), answer_letter("B")
    ('B', None)
    """
    plain = answer.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return None if found is None else found[1]


def _fill(prompt: str, record: Mapping[str, str]) -> str:
    """The prompt's $NAME$ replaced at once, so that a context that holds a $NAME$ stays as it is."""
    values = {"DOC": record["context"], "Q": record["question"], **{f"C_{c}": record[f"choice_{c}"] for c in "ABCD"}}
    return re.sub(r"\$(DOC|Q|C_[A-D])\$", lambda found: values[found[1]].strip(), prompt)
