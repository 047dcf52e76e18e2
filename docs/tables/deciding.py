"""Runs that decide a claim which is open.

`decides` of a row names the numbers that such a run gives (`cells`), how they judge the claim
(`expect`, `setting`), the script (`run`) and what it measures on (`options`). The command is made
of them, so it measures what is judged; caches, lengths and methods are those of the cells. Once
the files of the cells are in benchmarks/results, they decide the row.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from docs.tables.commands import disagreements
from docs.tables.reading import RESULTS, load_file

TOKENS_AT_ONCE = 163840  # of the prompts that decode together on one H200
DECODED_AT_ONCE = 132  # short prompts

Decides = Mapping[str, Any]


def files_of(decides: Decides) -> list[str]:
    """The files that the runs write, each once."""
    found = (file for cell in decides["cells"] for file in files_of_cell(cell))
    return list(dict.fromkeys(found))


def files_of_cell(cell: Mapping[str, Any]) -> list[str]:
    """The file of a number, or those of which it is the mean."""
    return cell["files"] if "files" in cell else [cell["file"]] if "file" in cell else []


def command_of(decides: Decides) -> str:
    """The commands that write the files, one for each."""
    made = RUNS[decides["run"]]
    return "; ".join(made(_for_file(decides, file), file) for file in files_of(decides))


def missing(decides: Decides) -> list[str]:
    """What the result files lack of the runs: a file, a cache, or a part of the questions."""
    files = files_of(decides)
    absent = [file for file in files if not (RESULTS / f"{file}.json").exists()]
    if absent:
        return [f"no {file}" for file in absent]
    return [fault for file in files for fault in _missing_of(_for_file(decides, file), file)]


def faults(decides: Decides) -> list[str]:
    """What files that are there say of their runs that the command does not."""
    files = [file for file in files_of(decides) if (RESULTS / f"{file}.json").exists()]
    return [
        fault
        for file in files
        for part in RUNS[decides["run"]](_for_file(decides, file), file).split("; ")
        for fault in disagreements(part, [file])
    ]


def _for_file(decides: Decides, file: str) -> Decides:
    """The part of runs that writes one file. Of several texts each file has its own."""
    options = dict(decides["options"])
    if isinstance(options.get("text"), list):
        options["text"] = options["text"][files_of(decides).index(file)]
    cells = [cell for cell in decides["cells"] if file in files_of_cell(cell)]
    return {**decides, "options": options, "cells": cells}


def _missing_of(decides: Decides, file: str) -> Iterator[str]:
    found = load_file(file).get("results", {})
    scores = [one["caches"] for one in found.values() if "caches" in one]
    for name in _caches(decides["cells"]):
        if not all(name in caches for caches in scores):
            yield f"{file} lacks {name}"
        elif any(caches[name]["n"] < decides["options"].get("samples", 0) for caches in scores):
            yield f"{file} has a part of the questions of {name}"


def _caches(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The caches of scores, as files name them: fier:page=16@512."""
    return list(dict.fromkeys(cell["cache"] for cell in cells if "cache" in cell))


def as_argument(cache: str) -> str:
    """A cache as a command line names it: fier:page=16,budget=512 of fier:page=16@512."""
    name, _, budget = cache.partition("@")
    return f"{name}{',' if ':' in name else ':'}budget={budget}" if budget else name


def _options(decides: Decides) -> list[str]:
    return [f"--{name} {value}" for name, value in decides["options"].items()]


def _with_caches(decides: Decides, batch: int) -> list[str]:
    """Caches that decode side by side after the same prompts."""
    caches = _caches(decides["cells"])
    shown = [f"--cache {as_argument(cache)}" for cache in caches]
    return [*shown, f"--batch {batch} --parallel {len(caches)}"]


def _eval(decides: Decides, file: str) -> str:
    batch = TOKENS_AT_ONCE // decides["options"]["length"]
    parts = [*_options(decides), *_with_caches(decides, batch), f"--out {file}"]
    return " ".join(["kvjax eval MODEL", *parts])


def _gsm8k(decides: Decides, file: str) -> str:
    """The solved problems are the last of the test set, of which the first are asked."""
    solved = f"tail -n {decides['options']['shots']} gsm8k/test.jsonl > gsm8k/train.jsonl"
    parts = [*_options(decides), *_with_caches(decides, DECODED_AT_ONCE), f"--out {file}"]
    command = " ".join(["python -m benchmarks.gsm8k MODEL --data gsm8k --chat", *parts])
    return f"{solved}; {command}"


def _claims(decides: Decides, file: str) -> str:
    return " ".join(["python -m benchmarks.claims MODEL", *_options(decides), f"--out {file}"])


def _timed(script: str, axes: Mapping[str, str], first: Sequence[str] = ()) -> Any:
    """A command of a script that times rows: `axes` are its options by keys of a row, and
    `first` are methods that come before those of the cells.
    """

    def made(decides: Decides, file: str) -> str:
        parts = [f"python benchmarks/{script}.py"]
        for key, option in axes.items():
            of_cells = [cell["row"][key] for cell in decides["cells"]]
            values = [*(first if option == "methods" else ()), *of_cells]
            parts.append(f"--{option} {','.join(map(str, dict.fromkeys(values)))}")
        return " ".join([*parts, *_options(decides), f"--out {file}.json"])

    return made


def _harness(decides: Decides, file: str) -> str:
    (cache,) = _caches(decides["cells"])
    model = f"--model kvjax --model_args pretrained=MODEL,cache={as_argument(cache)}"
    return " ".join(
        [
            f"python -m kvjax.evaluate.harness run {model}",
            *_options(decides),
            f"--output_path {file}",
        ]
    )


RUNS: dict[str, Callable[[Decides, str], str]] = {
    "eval": _eval,
    "gsm8k": _gsm8k,
    "claims": _claims,
    "end_to_end": _timed(
        "end_to_end", {"batch": "batches", "length": "lengths", "cache": "methods"}
    ),
    "prefill": _timed("prefill", {"length": "lengths", "method": "methods"}, ("full",)),
    "harness": _harness,
}


def lines_of(command: str) -> list[list[str]]:
    """The words of each of several commands."""
    return [shlex.split(line) for line in command.split("; ")]
