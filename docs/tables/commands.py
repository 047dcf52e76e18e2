"""The commands of README and docs that stand beside data: text, length, samples and the like come
from the file of results that the command wrote.

A command is written with names in braces, such as `--text {text} --length {length}`, which are
filled from a file; `{text:measure_logquant}` names another one. `disagreements` compares a
command with a file, for commands that are typed anyway.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.tables.reading import load_file

BOOKS: dict[str, str] = json.loads(Path(__file__).with_name("books.json").read_text())
"""Names of texts by the digest of the file, which is all that some results have."""

NAME = re.compile(r"\{(\w+)(?::(\w+))?\}")
# Options that say on what a command measured, and the facts of a file that they must equal.
OPTIONS = {
    "--text": "text",
    "--length": "length",
    "--samples": "samples",
    "--steps": "steps",
    "--new-tokens": "new_tokens",
    "--shots": "shots",
}


def facts(file: str, tasks: Sequence[str] = ()) -> dict[str, str]:
    """What a file of results says of its run, as a command writes it; of some of its `tasks`, or
    of all.
    """
    found = load_file(file)
    told: dict[str, set[Any]] = {}

    def tell(name: str, value: Any) -> None:
        if value is not None:
            told.setdefault(name, set()).add(value)

    tell("text", _book(found.get("text")))
    for name in ("steps", "new_tokens"):
        tell(name, found.get(name))
    for length in found.get("lengths", ()):
        tell("length", length)
    tell("model", _name(found.get("model")))

    results = found.get("results", {})
    for name, one in results.items() if isinstance(results, dict) else ():
        task = one.get("task") if isinstance(one, dict) else None
        if task is not None and (not tasks or name in tasks):
            tell("text", _book(task.get("text")))
            for fact in ("length", "samples", "shots"):
                tell(fact, task.get(fact))
            tell("samples", task.get("first"))  # of GSM8K, which is asked whole otherwise
    rows = found.get("rows", ())
    for row in rows if isinstance(rows, list) else ():
        tell("text", _book(row.get("text")))
        tell("length", row.get("length"))
    return {name: ",".join(map(str, sorted(values))) for name, values in told.items()}


def _book(text: Any) -> str | None:
    """The name of a text that a file has by name, by digest or by both."""
    if isinstance(text, dict):
        return str(text["name"])
    return None if text is None else BOOKS.get(text, text)


def _name(model: Any) -> str | None:
    return model.get("name") if isinstance(model, dict) else model


def filled(command: str, files: Sequence[str], tasks: Sequence[str] = ()) -> str:
    """`command` with the facts of the first of its files, or of the one that a name tells."""

    def fact(found: re.Match[str]) -> str:
        name, file = found[1], found[2] or files[0]
        return facts(file, tasks)[name]

    return NAME.sub(fact, command)


def disagreements(command: str, files: Iterable[str], tasks: Sequence[str] = ()) -> list[str]:
    """The options of a command that none of its files agrees with."""
    known = {file: facts(file, tasks) for file in files}
    wrong = []
    for part in command.split("; "):
        words = shlex.split(part)
        for option, value in pairwise(words):
            fact = OPTIONS.get(option)
            told = [one[fact] for one in known.values() if fact in one] if fact else []
            if told and not any(_agrees(option, value, one) for one in told):
                wrong.append(
                    f"{option} {value}, and {', '.join(known)} has {' or '.join(told)}"
                )
    return wrong


def _agrees(option: str, value: str, told: str) -> bool:
    """Whether an option is what a file tells. A command may run a part of the lengths."""
    if option != "--length":
        return value == told
    return set(map(_tokens, value.split(","))) <= set(told.split(","))


def _tokens(length: str) -> str:
    """A length in tokens: 16384 of 16K."""
    return str(int(length[:-1]) * 1024) if length.endswith("K") else length


def titled(*files: str) -> str:
    """The texts of files, as a title: Vanity Fair."""
    return ", ".join(dict.fromkeys(as_title(facts(file)["text"]) for file in files))


def as_title(text: str) -> str:
    """The name of a file with a book, as its title."""
    first, *rest = text.removesuffix(".txt").split("-")
    words = (word if word in ("and", "the", "of") else word.capitalize() for word in rest)
    return " ".join((first.capitalize(), *words))


def with_text(table: str, *files: str) -> str:
    """A table with the text on which its files were measured below it."""
    return f"{table}\nText: {titled(*files)}.\n"


# The commands of pages, by name: the file that each wrote, and its lines.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "command_groups": (
        "measure_groups",
        (
            "tail -c +200001 war-and-peace.txt | head -c 200000 > {text}",
            "python -m benchmarks.claims --text {text} --what groups --length {length} "
            "--steps {steps} --out claims",
        ),
    ),
    "command_paris": (
        "measure_paris_smollm2",
        (
            "python -m benchmarks.claims SMOLLM2 --text {text} --what paris --length {length} "
            "--steps {steps} --new-tokens {new_tokens} --out claims",
        ),
    ),
    "command_codes": (
        "perplexity_codes_qwen",
        (
            "kvjax perplexity MODEL --text {text} --length {length} --steps 256 --passages 8 "
            "--budget 1024 --cache full --cache turboquant",
        ),
    ),
    "command_host_codes": (
        "perplexity_host_codes",
        (
            "kvjax perplexity SMOLLM2 --text {text} --length {length} --steps 128 --passages 8 "
            "--batch 4 --budget 512 --dtype float32 \\\n"
            "    --cache full --cache fier --cache fier:store=float8 --json",
        ),
    ),
    "command_decoded": (
        "eval_decoded",
        (
            "kvjax eval --task needles --length {length} --samples {samples} --question decoded "
            "--budget 64,256 --dtype float32 --out decoded \\\n"
            "    --cache full --cache fier --cache fier:dense_layers=0 --cache quest "
            "--cache quest:dense_layers=0 --cache exact:dense_layers=0 \\\n"
            "    --cache pariskv --cache pariskv:dense_layers=0 --cache tova --cache snapkv "
            "--cache streaming_llm",
        ),
    ),
    "command_needles": (
        "eval",
        (
            "kvjax eval --task needles --task pass_key --length {length} --samples {samples} "
            "--budget 16,32,64,128,256,512 --text {text} \\\n"
            "    --question prefilled --out needles --cache full --cache fier "
            "--cache snapkv:kernel_size=13,dense_layers=2",
        ),
    ),
    "command_evictors": (
        "evictors_values",
        (
            "python benchmarks/evictors.py --text {text} --rows 2 --prompt {length} "
            "--new-tokens {steps} --budget 264 --needles 8 --out evictors.json",
        ),
    ),
    "command_turbo": ("turbo_codes", ("python benchmarks/turbo_codes.py --text {text}",)),
    "command_equal": (
        "perplexity_equal",
        (
            "kvjax perplexity --text {text:perplexity_methods} --share 0.11 --length {length} "
            "--steps 128 --passages 8 --batch 8 --dtype float32 \\\n"
            "    --dense-layers 0 --cache full --cache exact --cache fier "
            "--cache quest:newest=select --cache logquant:window=64,group=64 \\\n"
            "    --cache kivi:residual=320,group=64",
        ),
    ),
}


def block(name: str) -> str:
    """A command of a page, as a console shows it."""
    file, lines = PAGES[name]
    shown = "\n".join(f"$ {filled(line, [file])}" for line in lines)
    return f"```console\n{shown}\n```\n"
