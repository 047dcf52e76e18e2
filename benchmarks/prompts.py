"""The prompts of our tasks beside those of lm-evaluation-harness, token for token.

    python benchmarks/prompts.py [MODEL_DIR] [--text book.txt] [--length 8192] [--out FILE]

The harness's definitions of RULER's synthetic tasks and of GSM8K are run from its files as they
are, without its imports, since these download data. What a download would bring is given
instead: the text is `--text` where the harness hides needles in essays, and the English words of
the package `wonderwords` are read if it is installed, and else replaced by our own.

Each part of a prompt but the text is compared: what stands before the text, the line of a needle,
the question, the beginning of the answer. Keys and values are replaced by KEY and VALUE, so that
what differs is the wording. Answers are scored by both rules.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import contextlib
import difflib
import io
import itertools
import json
import random
import re
import string
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.gsm8k import Gsm8k
from kvjax import models
from kvjax.evaluate.provenance import digest, json_text, provenance, replace_file
from kvjax.evaluate.tasks import Example, make_tasks
from kvjax.evaluate.tasks.generated import FILLING, RULER, TASKS, made_text
from kvjax.evaluate.tasks.haystack import WORDS

RESULTS = Path(__file__).parent / "results" / "prompts.json"
OF_HARNESS = dict(
    zip(
        RULER,
        (
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multikey_2",
            "niah_multikey_3",
            "niah_multivalue",
            "niah_multiquery",
            "ruler_vt",
            "ruler_cwe",
            "ruler_fwe",
        ),
        strict=True,
    )
)
FILES = {"ruler_vt": "vt_utils.py", "ruler_cwe": "cwe_utils.py", "ruler_fwe": "fwe_utils.py"}


# ------------------------------------------------------------- the harness's own definitions


def harness_folder() -> Path:
    """The folder of the harness's tasks.

    Raises:
      ValueError: lm-evaluation-harness is not installed.
    """
    found = find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "lm-evaluation-harness is not installed: pip install 'kvjax[harness]' installs it"
        )
    return Path(next(iter(found.submodule_search_locations))) / "tasks"


def definitions(file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The functions and literal constants of a Python file, without its imports and what they
    make, which `given` stands for. Decorators go: they would cache between calls.
    """
    made: dict[str, Any] = {}
    kept: list[ast.stmt] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            kept.append(node)
        elif isinstance(node, ast.Assign) and _is_constant(node):
            kept.append(node)
    code = compile(
        ast.Module(body=kept, type_ignores=[]),
        str(file),
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    made.update(given)
    exec(code, made)  # the file of an installed package, as an import would run it
    made.update(given)  # instead of constants of the same name
    return made


def _is_constant(node: ast.Assign) -> bool:
    """True for NAME = literals, and for templates that are joined of earlier constants."""
    if not all(isinstance(target, ast.Name) and target.id.isupper() for target in node.targets):
        return False
    return not any(isinstance(part, ast.Call | ast.Attribute) for part in ast.walk(node.value))


def english_words() -> dict[str, list[str]] | None:
    """Nouns, adjectives and verbs as the harness draws them; None without wonderwords."""
    if find_spec("wonderwords") is None:
        return None
    import wonderwords

    kinds = wonderwords.RandomWord()._categories
    return {kind: list(kinds[kind]) for kind in ("noun", "adjective", "verb")}


@dataclass(frozen=True)
class Prompt:
    """One question: what the model reads, in parts, and what it should answer."""

    before: str  # the instruction, before the text
    line: str  # a line that holds an answer, with KEY and VALUE
    question: str
    begun: str  # the beginning of the answer, that the model continues
    answers: tuple[str, ...]
    hidden: int  # lines that are hidden, or words of a list
    tokens: int  # of the whole prompt


class Harness:
    """RULER's synthetic tasks as the harness makes them."""

    def __init__(self, tokenizer: Any, text: str, length: int, samples: int, seed: int = 0):
        self.tokenizer, self.text, self.length, self.samples = tokenizer, text, length, samples
        self.folder = harness_folder() / "ruler"
        self.random = random.Random(seed)
        self.numpy = np.random.RandomState(seed)
        self.words = english_words()
        self.keys = self._keys()

    def prompts(self, task: str) -> list[Prompt]:
        """The prompts of a task."""
        with contextlib.redirect_stdout(io.StringIO()):  # the harness prints as it searches
            if task not in FILES:
                return self._needles(task)
            if task == "ruler_vt":
                return self._variables()
            return self._words(task)

    def allowed(self, task: str) -> int:
        """How many tokens an answer may have."""
        name = f"{task.removeprefix('ruler_')}.yaml"
        found = re.search(r"max_gen_toks: (\d+)", (self.folder / name).read_text())
        if found is None:  # a file that includes another one
            found = re.search(
                r"max_gen_toks: (\d+)", (self.folder / "niah_single_1.yaml").read_text()
            )
        assert found is not None
        return int(found[1])

    def _given(self) -> dict[str, Any]:
        """What the files import, and what they would download."""
        return {
            "np": _Numpy(self.numpy),
            "random": _Random(self.random),
            "re": re,
            "uuid": uuid,
            "string": string,
            "itertools": itertools,
            "zeta": lambda alpha: sum(i**-alpha for i in range(1, 200_000)),
            "tqdm": lambda steps, **_: steps,
            "DEFAULT_SEQ_LENGTHS": [self.length],
            "cached_sent_tokenize": lambda text: re.split(r"(?<=[.!?]) ", text),
        }

    def _needles(self, task: str) -> list[Prompt]:
        made = definitions(
            self.folder / "prepare_niah.py",
            self._given()
            | {"DEPTHS": list(np.round(np.linspace(0, 100, num=40)).astype(int))}
            | {"WORDS": self.keys},
        )
        tasks = definitions(
            self.folder / "niah_utils.py",
            {
                **self._given(),
                "get_tokenizer": lambda name: self.tokenizer,
                "resolve_tokenizer_name": lambda given: None,
                "get_haystack": lambda type_haystack: (
                    re.sub(r"\s+", " ", self.text).split(" ")
                    if type_haystack == "essay"
                    else made["NEEDLE"]
                ),
                "generate_samples": lambda haystack, **settings: made["generate_samples"](
                    haystack, **{**settings, "num_samples": self.samples}
                ),
                "download_dataset": lambda parts: [doc for part in parts for doc in part],
            },
        )
        docs = tasks[task](max_seq_lengths=[self.length])
        return [self._needle(doc, made["NEEDLE"]) for doc in docs]

    def _needle(self, doc: Mapping[str, Any], needle: str) -> Prompt:
        """A prompt of needles, in its parts."""
        before, _, rest = doc["input"].partition("\n")
        text, _, question = rest.rpartition("\n")
        kind = "uuids" if "uuid" in before else "numbers"
        line = needle.format(type_needle_v=kind, key="KEY", value="VALUE")
        pattern = re.escape(line).replace("KEY", r"(\S+)").replace("VALUE", r"(\S+?)")
        found = re.findall(pattern, text)
        assert {value for _, value in found} >= set(doc["outputs"])
        asked_for = {key: "KEY" for key, value in found if value in doc["outputs"]}
        return Prompt(
            before,
            line,
            _without(question, asked_for),
            _without(doc["gen_prefix"], asked_for),
            tuple(doc["outputs"]),
            len(found),
            self._count(f"{doc['input']} {doc['gen_prefix']}"),
        )

    def _variables(self) -> list[Prompt]:
        made = definitions(self.folder / "vt_utils.py", self._given())
        (example,) = made["sys_vartrack_w_noise_random"](
            tokenizer=self.tokenizer, num_samples=1, max_seq_length=500, incremental=5
        )
        docs = made["sys_vartrack_w_noise_random"](
            tokenizer=self.tokenizer,
            num_samples=self.samples,
            max_seq_length=self.length,
            icl_example=example,
        )
        prompts = []
        for doc in docs:
            _, solved, own = doc["input"].split("Memorize and track")
            instruction, _, text = f"Memorize and track{own}".partition("\n\n")
            question = text.rpartition("\n")[2]
            value = re.search(r"\d+", question)
            assert value is not None
            prompts.append(
                Prompt(
                    f"Memorize and track{solved}{instruction}",
                    "VAR KEY = VAR KEY",
                    question.replace(value[0], "VALUE").strip(),
                    doc["gen_prefix"].replace(value[0], "VALUE"),
                    tuple(doc["outputs"]),
                    len(re.findall(r"VAR [A-Z]{5} =", text)),
                    self._count(doc["input"] + doc["gen_prefix"]),
                )
            )
        return prompts

    def _words(self, task: str) -> list[Prompt]:
        given = {**self._given(), "RNG": self.random, "WORDS": self._listed()}
        made = definitions(self.folder / FILES[task], given)
        made["TEMPLATE"] = made["CONFIG"]["template"] + made["CONFIG"]["answer_prefix"]
        make = made["sys_word_pair_random" if task == "ruler_cwe" else "sys_kwext"]
        docs = make(
            tokenizer=self.tokenizer, num_samples=self.samples, max_seq_length=self.length
        )
        before, _, question = made["CONFIG"]["template"].partition("{context}")
        return [
            Prompt(
                before.strip(),
                "1. KEY" if task == "ruler_cwe" else "KEY",
                question.strip(),
                doc["gen_prefix"],
                tuple(doc["outputs"]),
                len(doc["input"][len(before) :].rpartition("\n")[0].split())
                // (2 if task == "ruler_cwe" else 1),
                self._count(f"{doc['input']} {doc['gen_prefix']}"),
            )
            for doc in docs
        ]

    def _keys(self) -> list[str]:
        words = self.words
        if words is None:
            return [f"{one}-{other}" for one in WORDS[:50] for other in WORDS]
        return sorted({f"{one}-{two}" for one in words["adjective"] for two in words["noun"]})

    def _listed(self) -> list[str]:
        words = self.words
        return sorted({*itertools.chain(*words.values())}) if words else list(WORDS)

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])


class _Random:
    """`random` for a file that also seeds generators of its own."""

    def __init__(self, own: random.Random):
        self._own = own

    Random = random.Random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _Numpy:
    """`numpy` whose random numbers are those of a seed."""

    def __init__(self, own: np.random.RandomState):
        self.random = own

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _without(text: str, words: Mapping[str, str]) -> str:
    """A text with other words for some of its words."""
    for word, instead in words.items():
        text = text.replace(word, instead)
    return text


# --------------------------------------------------------------------------------- our own


def own_prompts(
    tokenizer: Any, task: str, length: int, samples: int, text: Path | None
) -> list[Prompt]:
    """The prompts of one of our tasks."""
    fills = TASKS[task.partition(":")[0]][0] in FILLING  # its lines are the whole text
    text = None if fills else text
    (made,) = make_tasks([task], lengths=[length], samples=samples, text=text)
    prompts = []
    for example in made.examples(tokenizer):
        whole = tokenizer.decode(example.prompt, skip_special_tokens=True)
        asked = tokenizer.decode(example.question).strip("\n")
        line, hidden, asked_for = _lines(task, whole, example.answers)
        question, begun = _parted(_without(asked, asked_for))
        prompts.append(
            Prompt(
                "",
                line,
                question,
                begun,
                tuple(example.answers),
                hidden,
                len(example.prompt) + len(example.question),
            )
        )
    return prompts


def _lines(task: str, text: str, answers: Sequence[str]) -> tuple[str, int, dict[str, str]]:
    """The line that holds an answer with KEY and VALUE, how many such lines there are, and KEY or
    VALUE by what the question asks for.
    """
    if task == "assigned_variables":
        names = re.findall(r"VAR (\w+) = \w+", text)
        value = re.search(r"VAR \w+ = (\d+)", text)
        assert value is not None
        return "VAR KEY = KEY", len(names), {value[1]: "VALUE"}
    if task == "common_words":
        return "1. KEY", len(re.findall(r"\d+\. [a-z]+", text)), {}
    if task == "frequent_words":
        return "KEY", len(re.findall(r"\b[a-z]+\b", text)), {}
    found = re.findall(r"((?:One of the|The) special magic \w+ for )(\S+) is: (\S+?)\.", text)
    asked_for = {key: "KEY" for _, key, value in found if value in answers}
    return f"{found[0][0]}KEY is: VALUE.", len(found), asked_for


def _parted(asked: str) -> tuple[str, str]:
    """A question and the beginning of its answer."""
    mark = " Answer:" if " Answer:" in asked else "?"
    question, _, begun = asked.partition(mark)
    return (question, f"Answer:{begun}") if mark != "?" else (f"{question}?", begun.strip())


# ------------------------------------------------------------------------------ comparison


def differing(tokenizer: Any, ours: str, theirs: str) -> list[list[str]]:
    """The runs of tokens in which two texts differ, each as [ours, theirs]."""
    one, two = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (ours, theirs)
    )
    matcher = difflib.SequenceMatcher(None, one, two, autojunk=False)
    return [
        [tokenizer.decode(one[a:b]), tokenizer.decode(two[c:d])]
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def part(tokenizer: Any, ours: str, theirs: str) -> dict[str, Any]:
    """A part of a prompt in both wordings: its tokens, and where they differ if both have it."""
    counts = [len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (ours, theirs)]
    differs = differing(tokenizer, ours, theirs) if all(counts) else []
    return {"tokens": counts, "differs": differs}


PROBES: dict[str, Callable[[Sequence[str]], str]] = {
    "the answers": lambda answers: " ".join(answers),
    "the answers after a sentence": lambda answers: f"Sure, here it is: {', '.join(answers)}.",
    "the answers, then more": lambda answers: f"{' '.join(answers)}\n\nQuestion: 12345",
    "in capital letters": lambda answers: " ".join(answers).upper(),
    "another digit or letter at the end": lambda answers: " ".join(f"{a}7" for a in answers),
    "the first answer alone": lambda answers: answers[0],
    "nothing": lambda answers: "",
}


def scores(
    task: str, answers: Sequence[str], theirs: Mapping[str, Any]
) -> dict[str, list[float]]:
    """By the form of an answer, what our rule and the harness's give it."""
    (made,) = make_tasks([task])
    example = Example("0", (), tuple(answers), {}, ())
    found = {}
    for name, write in PROBES.items():
        said = write(answers)
        # An answer of ours ends where a stop string begins.
        stopped = said
        for end in made.stop:
            stopped = stopped.partition(end)[0]
        (clean,) = theirs["postprocess_pred"]([said])
        given = theirs["string_match_all"]([clean], [list(answers)])
        found[name] = [made.score(example, stopped), float(given)]
    return found


def row(tokenizer: Any, task: str, harness: Harness, text: Path | None) -> dict[str, Any]:
    """One task in both forms."""
    own = own_prompts(tokenizer, task, harness.length, harness.samples, text)
    other = harness.prompts(OF_HARNESS[task])
    (made,) = make_tasks([task], lengths=[harness.length])
    rules = definitions(harness.folder / "common_utils.py", harness._given())

    def answer_tokens(prompts: Sequence[Prompt]) -> float:
        counts = [
            len(tokenizer(f" {answer}", add_special_tokens=False)["input_ids"])
            for prompt in prompts
            for answer in prompt.answers
        ]
        return round(sum(counts) / len(counts), 2)

    first, second = own[0], other[0]
    if not second.answers:
        raise ValueError(
            f"the harness has no room for {OF_HARNESS[task]} in {harness.length} tokens of this "
            "tokenizer; ask for a longer --length"
        )
    return {
        "task": task,
        "harness": OF_HARNESS[task],
        "parts": {
            name: part(tokenizer, getattr(first, name), getattr(second, name))
            for name in ("before", "line", "question", "begun")
        },
        "hidden": [_mean(prompt.hidden for prompt in p) for p in (own, other)],
        "answers": [len(first.answers), len(second.answers)],
        "answer_tokens": [answer_tokens(own), answer_tokens(other)],
        "allowed": [made.max_new_tokens, harness.allowed(OF_HARNESS[task])],
        "prompt_tokens": [_mean(prompt.tokens for prompt in p) for p in (own, other)],
        "scores": scores(task, first.answers, rules),
    }


def _mean(numbers: Iterator[int]) -> float:
    found = list(numbers)
    return round(sum(found) / len(found), 1)


def gsm8k_row(tokenizer: Any, shots: int = 1) -> dict[str, Any]:
    """GSM8K after solved problems in both forms, and both rules of scoring."""
    import jinja2  # with the harness
    import yaml

    config = yaml.safe_load((harness_folder() / "gsm8k" / "gsm8k.yaml").read_text())
    solved = [
        {"question": f"How much is {n} + 1?", "answer": f"One more.\n#### {n + 1}"}
        for n in range(shots + 1, 0, -1)  # the last answer is 2
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, records in (("train", solved[:-1]), ("test", solved[-1:])):
            lines = "".join(f"{json.dumps(record)}\n" for record in records)
            (Path(folder) / f"{name}.jsonl").write_text(lines)
        task = Gsm8k(folder, shots)
        (example,) = task.examples(tokenizer)
        own_scores = [task.score(example, said) for said in GSM8K_PROBES]

    def shown(record: Mapping[str, str], template: str) -> str:
        return jinja2.Template(config[template]).render(record)

    # The harness joins question and answer by a space, and problems by an empty line.
    theirs = "".join(
        f"{shown(one, 'doc_to_text')} {shown(one, 'doc_to_target')}\n\n" for one in solved[:-1]
    ) + shown(solved[-1], "doc_to_text")
    filters = {one["name"]: one["filter"][0] for one in config["filter_list"]}
    return {
        "task": "gsm8k",
        "harness": "gsm8k",
        "parts": {"whole": part(tokenizer, str(example.prompt), theirs)},
        "stop": [list(task.stop), config["generation_kwargs"]["until"]],
        "scores": {
            said: [own, *(_matches(said, filters[name], config) for name in GSM8K_RULES)]
            for said, own in zip(GSM8K_PROBES, own_scores, strict=True)
        },
    }


GSM8K_RULES = ("flexible-extract", "strict-match")
GSM8K_PROBES = (  # where 2 is right
    "One more. #### 2",
    "The answer is 2.",
    "2.00",
    "$2",
    "2 apples, not 3",
    "#### 3, or 2",
)


def _matches(said: str, rule: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """The harness's score of an answer to which 2 is right, by one of its two rules."""
    found = re.findall(rule["regex_pattern"], said)
    if not found:
        return 0.0
    match = found[rule.get("group_select", 0)]
    text = next(filter(None, match), "") if isinstance(match, tuple) else match
    for ignored in config["metric_list"][0]["regexes_to_ignore"]:
        text = re.sub(ignored, "", text)
    return float(text.strip() == "2")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, help="whose tokenizer; default: the shipped model's"
    )
    parser.add_argument("--text", type=Path, help="UTF-8 file; default: generated sentences")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(args)
    directory = given.model_dir or models.shipped()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = made_text() if given.text is None else given.text.read_text()
    harness = Harness(tokenizer, text, given.length, given.samples)
    rows = [row(tokenizer, task, harness, given.text) for task in RULER]
    rows.append(gsm8k_row(tokenizer))
    for one in rows:
        print(one["task"], "|", one["harness"])
        for name, found in one["parts"].items():
            print(f"  {name}: {found['tokens'][0]} and {found['tokens'][1]} tokens", end="")
            print("".join(f"\n    {ours!r} | {theirs!r}" for ours, theirs in found["differs"]))
    about = {
        **provenance(),
        "what": "prompts of our tasks beside lm-evaluation-harness; each pair: ours, theirs",
        "lm_eval": version("lm_eval"),
        "words": "our own" if harness.words is None else "wonderwords",
        "tokenizer": directory.resolve().name,
        "text": None
        if given.text is None
        else {"name": given.text.name, "digest": digest(given.text)},
        "lengths": [given.length],
        "samples": given.samples,
        "rows": rows,
    }
    replace_file(given.out, json_text(about))
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
