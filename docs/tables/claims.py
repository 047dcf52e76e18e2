"""The tables of docs/claims.md: what a paper claims, what was measured here, and a verdict that
a rule gives.

A file of docs/claims has a paper's claims: for each its place and figures, our command and
setting, cells of files of results, and what these must be like for the claim to hold. Nothing
else decides on a verdict:

A claim is judged by what its paper measures: `measure` says whether that are answers,
perplexity, attention, speed or memory, and a comparison of other numbers is a fault.

reproduced: every comparison comes out as claimed, by more than two standard errors.
contradicted: one comes out the other way, by more than two. open: all others. An open row names
a run that `decides` it (`docs.tables.deciding`), and stays open until the files of that run are
there; then they, and no earlier numbers, judge the row. not judged: rows without a comparison
that say why. A row with `takes` is not measured.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from docs.tables import deciding
from docs.tables.commands import OPTIONS, disagreements, facts, filled
from docs.tables.reading import ROOT, load_measured, load_results, load_rows
from docs.tables.writing import markdown, short

CLAIM = ("claim and its place", "the paper", "here", "setting; command", "verdict")
PAPERS = ("fier", "pariskv", "freekv", "logquant")
VERDICTS = ("contradicted", "open", "reproduced", "not judged", "not measured")
# What a number measures, by the beginning of the name of its file.
MEASURES = {
    "eval_": "answers",
    "perplexity": "perplexity",
    "long_generation": "perplexity",
    "measure_": "attention",
}
SINGLE_TIMING = 0.05  # relative error of a time without an interval


@dataclass(frozen=True)
class Cell:
    """A number of a file of results."""

    name: str
    value: float
    stderr: float | None  # None: the file has no interval
    samples: tuple[float, ...] = ()  # of layers or texts, if the value is their mean
    source: str = ""
    cache: str = ""  # whose score it is
    asked: str = ""  # the file and task of its questions
    # differences from other caches on the same questions, and their errors
    beside: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.stderr:
            return (
                f"{self.name} {short(self.value, 3)}"
                if self.value < 1
                else f"{self.name} {self.value:g}"
            )
        digits = min(max(1 - math.floor(math.log10(self.stderr)), 0), 3)
        return f"{self.name} {short(self.value, digits)} ± {short(self.stderr, digits)}"


def load_claims(paper: str) -> dict[str, Any]:
    """What a file of docs/claims has."""
    return json.loads((ROOT / "docs" / "claims" / f"{paper}.json").read_text())


def read_cell(cell: dict[str, Any]) -> Cell:
    """The number that a cell names, with its standard error."""
    name, file = cell["name"], cell.get("file", "")
    if "index" in cell:
        return Cell(name, _index_share(cell["index"]), 0.0)
    if "files" in cell:
        return _mean_of_files(cell)
    if "task" in cell:
        return _mean_of_results(cell, [load_results(file)[cell["task"]]])
    if "mean_of_tasks" in cell:
        length = cell["mean_of_tasks"]
        results = load_results(file).values()
        return _mean_of_results(
            cell, [one for one in results if one["task"]["length"] == length]
        )
    if "group" in cell:
        return _of_harness(cell)
    if "quarter" in cell:
        (row,) = [row for row in load_results(file) if row["cache"] == cell["cache"]]
        ratio, stderr = (
            row[f"{what}_by_quarter"][cell["quarter"]] for what in ("ratio", "stderr")
        )
        return Cell(name, ratio, stderr, source=file)
    if "at" in cell:
        return Cell(
            name,
            load_results(file)[cell["case"]]["by_length"][cell["at"]][cell["value"]],
            None,
            source=file,
        )
    if "case" in cell:
        return _of_case(cell)
    if "largest" in cell:
        found = max(_rows(file, cell["largest"]), key=lambda row: row["batch"])
        return Cell(name, *_with_error(found, cell["value"]), source=file)
    (found,) = _rows(file, cell["row"])[-1:]
    value, stderr = _with_error(found, cell["value"])
    over = found[cell["over"]] if "over" in cell else 1
    return Cell(name, value / over, None if stderr is None else stderr / over, source=file)


def _mean_of_results(cell: dict[str, Any], results: Sequence[dict[str, Any]]) -> Cell:
    """The mean score of a cache over tasks of a file; prompts of a task are the sample of its
    error.
    """
    cache = cell["cache"]
    scores = [result["caches"][cache] for result in results]
    errors = [_stderr(score) for score in scores]
    mean = statistics.fmean(score["mean"] for score in scores)
    return Cell(
        cell["name"],
        mean,
        math.hypot(*errors) / len(errors),
        source=cell["file"],
        cache=cache,
        asked=f"{cell['file']}, {cell.get('task', cell.get('mean_of_tasks'))}",
        beside=_beside(cache, results),
    )


def _beside(cache: str, results: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """The mean difference of a cache from each other one over tasks, on the same questions."""
    found = [_beside_in(cache, result) for result in results]
    known = set.intersection(*map(set, found))

    def mean(other: str) -> tuple[float, float]:
        values, errors = zip(*(one[other] for one in found), strict=True)
        return statistics.fmean(values), math.hypot(*errors) / len(errors)

    return {other: mean(other) for other in sorted(known)}


def _beside_in(cache: str, result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The same of one task. Files of early runs compare with full attention alone."""
    score, pairs = result["caches"][cache], result.get("differences", {})
    found = {}
    if "difference" in score:
        found["full"] = (score["difference"], score["difference_stderr"])
    for one, others in pairs.items():
        for other, (value, stderr) in others.items():
            if one == cache:
                found[other] = (value, stderr)
            elif other == cache:
                found[one] = (-value, stderr)
    return found


def _mean_of_files(cell: dict[str, Any]) -> Cell:
    """The mean of a number over files, one for each text or run, which are its sample."""
    alone = {key: value for key, value in cell.items() if key != "files"}
    values = tuple(read_cell({**alone, "file": file}).value for file in cell["files"])
    stderr = statistics.stdev(values) / math.sqrt(len(values))
    return Cell(
        cell["name"], statistics.fmean(values), stderr, values, ", ".join(cell["files"])
    )


def _of_harness(cell: dict[str, Any]) -> Cell:
    """The score of a group of tasks of lm-evaluation-harness."""
    found = load_results(cell["file"])[cell["group"]]
    score, stderr = found["score,none"], found["score_stderr,none"]
    return Cell(cell["name"], score, stderr, source=cell["file"], cache=cell["cache"])


def _stderr(score: dict[str, Any]) -> float:
    """The standard error of a score that has a 95 % interval."""
    return (score["high"] - score["low"]) / 3.92


def measure_of(cell: dict[str, Any]) -> str:
    """What the number that a cell names measures."""
    if "index" in cell or cell.get("value") == "batch":
        return "memory"
    if "group" in cell:
        return "answers"
    file = deciding.files_of_cell(cell)[0]
    return next((kind for name, kind in MEASURES.items() if file.startswith(name)), "speed")


def _of_case(cell: dict[str, Any]) -> Cell:
    """A mean over layers, which are the sample of its error, or one of them, which has none."""
    name, file, value = cell["name"], cell["file"], cell["value"]
    if "pick" in cell:
        return _picked(cell)
    layers = load_results(file)[cell["case"]].get("by_layer", {}).get(value, ())
    stderr = statistics.stdev(layers) / math.sqrt(len(layers)) if layers else None
    return Cell(
        name, load_measured(file)[cell["case"]][value], stderr, tuple(layers), source=file
    )


def _picked(cell: dict[str, Any]) -> Cell:
    """One of the means of layers or heads, with its error where the file has errors."""
    found = load_results(cell["file"])[cell["case"]]
    value = cell["value"]
    errors = _flat(found.get(f"{value}_stderr") or [])
    values = _flat(found[value])
    if cell["pick"] == "median":
        return Cell(cell["name"], statistics.median(values), None, source=cell["file"])
    order = sorted(range(len(values)), key=values.__getitem__)
    at = order[("least", "second least", "third least").index(cell["pick"])]
    stderr = errors[at] if errors else None
    return Cell(cell["name"], values[at], stderr, source=cell["file"])


def _flat(numbers: Sequence[Any]) -> list[float]:
    """Numbers of layers, or of the heads of layers, one after the other."""
    return [number for one in numbers for number in (one if isinstance(one, list) else [one])]


def _rows(file: str, where: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [row for row in load_rows(file) if row.get("status", "ok") == "ok"]
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def _with_error(row: dict[str, Any], value: str) -> tuple[float, float | None]:
    """A number of a row, and its standard error: of the file, or from the range of its blocks."""
    number = row[value]
    if value == "batch":
        return number, 0.0
    if value == "added":  # the ratio of two times, less 1
        return number, (1 + number) * math.sqrt(2) * SINGLE_TIMING / 2
    if f"{value}_stderr" in row:
        return number, row[f"{value}_stderr"]
    low, high, middle = (row.get(f"tpot_ms{end}") for end in ("_min", "_max", ""))
    return number, number * ((high - low) / 4 / middle if middle else SINGLE_TIMING / 2)


def _index_share(preset: str) -> float:
    """Bytes of the index that a selection reads, over those of the keys."""
    import kvjax

    spec = kvjax.CacheSpec(
        batch=1, q_heads=1, kv_heads=1, head_dim=128, capacity=4096, dtype="bfloat16"
    )
    policy: Any = kvjax.presets.parse(preset).rest
    return policy.selector.bytes_per_token(spec) / (2 * spec.head_dim)


def difference(one: Cell, other: Cell) -> tuple[float, float | None]:
    """one - other and its standard error, by pairs where the files have them."""
    value = one.value - other.value
    if one.samples and len(one.samples) == len(other.samples):
        pairs = [a - b for a, b in zip(one.samples, other.samples, strict=True)]
        return value, statistics.stdev(pairs) / math.sqrt(len(pairs))
    if one.asked and one.asked == other.asked:
        if other.cache in one.beside:
            return one.beside[other.cache]
        if "full" in one.beside and "full" in other.beside:
            # Methods err in much the same questions, so the error of their difference is at
            # most that of independent differences from full.
            (_, first), (_, second) = one.beside["full"], other.beside["full"]
            return value, math.hypot(first, second)
    if one.stderr is None or other.stderr is None:
        return value, None
    return value, math.hypot(one.stderr, other.stderr)


def compare(expectation: Sequence[Any], cells: Sequence[Cell]) -> str:
    """The verdict on one comparison: ["above" | "below", cell, cell or number], or with an allowed
    distance ["near", ...], and ["at least", ...] of which the first may be that much lower.
    """
    kind, at, other, *allowed = expectation
    target = cells[other] if isinstance(other, int) else Cell("", other, 0.0)
    value, stderr = difference(cells[at], target)
    if stderr is None:
        return "open"
    if kind == "near":
        holds, fails = (
            abs(value) + 2 * stderr <= allowed[0],
            abs(value) - 2 * stderr > allowed[0],
        )
    else:
        value = -value if kind == "below" else value + sum(allowed)
        holds, fails = value > 2 * stderr, value < -2 * stderr
    return "reproduced" if holds else "contradicted" if fails else "open"


def verdict(row: dict[str, Any]) -> str:
    """The verdict on a row of docs/claims: see the module."""
    if "takes" in row:
        return "not measured"
    if is_open(row):
        return "open"
    judged = judged_by(row)
    return judge(judged) if "expect" in judged else "not judged"


def is_open(row: dict[str, Any]) -> bool:
    """True if a run would decide a row and its files are not there."""
    return "decides" in row and bool(deciding.missing(row["decides"]))


def judged_by(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the numbers that judge it: those of the run that decides it, once they are
    there.
    """
    if "decides" not in row or is_open(row):
        return row
    decides = row["decides"]
    told = {name: decides[name] for name in ("cells", "expect", "setting")}
    return row | told | {"command": deciding.command_of(decides)}


def judge(row: dict[str, Any]) -> str:
    """The verdict of numbers on what they are expected to be."""
    cells = [read_cell(cell) for cell in row["cells"]]
    found = {compare(one, cells) for one in row["expect"]}
    return (
        "contradicted"
        if "contradicted" in found
        else "open"
        if "open" in found
        else "reproduced"
    )


FIELDS = {"place", "claim", "figures", "command"}
MEASURED = {"own", "setting", "cells", "measure"}


def faults(paper: dict[str, Any], tables: Sequence[str], figures: int) -> list[str]:
    """What is wrong with a paper's claims: tables and figures of it without a row, and rows
    without what they need.
    """
    wanted = {
        *(f"Table {name}" for name in tables),
        *(f"Figure {n + 1}" for n in range(figures)),
    }
    in_rows = {place for row in paper["rows"] for place in row["place"]}
    nothing = set(paper["without_claim"])
    found = [f"{place} has no row" for place in sorted(wanted - in_rows - nothing)]
    found += [f"{place} has a row and claims nothing" for place in sorted(in_rows & nothing)]
    numbered = {place for place in in_rows | nothing if place.startswith(("Table", "Figure"))}
    found += [f"the paper has no {place}" for place in sorted(numbered - wanted)]
    for row in paper["rows"]:
        own = FIELDS | ({"takes"} if "takes" in row else MEASURED)
        found += [
            f"{row.get('claim')}: no {field}"
            for field in sorted(own)
            if row.get(field) in (None, "", [])
        ]
        found += [
            f"{row.get('claim')}: {field} is unknown"
            for field in sorted(set(row) - own - {"expect", "decides"})
        ]
        words = json.dumps(row)
        if any(word in words.replace("not measured", "") for word in VERDICTS):
            found.append(f"{row.get('claim')}: types a verdict, which the rule gives")
        own_faults = _faults_of_cells(row) if "cells" in row else []
        # Numbers that cannot be compared have no verdict.
        own_faults = own_faults or _faults_of_deciding(row)
        found += [f"{row.get('claim')}: {fault}" for fault in own_faults]
    return found


DECIDES = {"run", "options", "cells", "expect", "setting"}


def _faults_of_deciding(row: dict[str, Any]) -> list[str]:
    """What is wrong with the run that decides a row, or that none does."""
    if "decides" not in row:
        open_for_ever = "cells" in row and verdict(row) == "open"
        return ["is open and names no run that decides it"] if open_for_ever else []
    decides = row["decides"]
    if unlike := DECIDES ^ set(decides):
        return [f"decides has or lacks {', '.join(sorted(unlike))}"]
    found = [
        f"decides {fault}"
        for fault in _faults_of_expected(decides | {"measure": row["measure"]})
    ]
    comparable = not found
    if "expect" in row and judge(row) != "open":
        found.append("names a run that decides it, and its own numbers do")
    if comparable and not deciding.missing(decides) and judge(judged_by(row)) == "open":
        found.append("is open after the run that it names; name another")
    return found + deciding.faults(decides)


def _faults_of_expected(row: dict[str, Any]) -> list[str]:
    """What is wrong with the comparisons of a row: cells that it lacks, or of another measure."""
    cells = row["cells"]
    used = {at for one in row.get("expect", ()) for at in one[1:3] if isinstance(at, int)}
    if not used <= set(range(len(cells))):
        return ["compares cells that it does not have"]
    other = {measure_of(cells[at]) for at in used} - set(row.get("measure", "").split(" and "))
    return [f"is about {row.get('measure')} and judged by {kind}" for kind in sorted(other)]


def _faults_of_cells(row: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers of a measured row, and with their command."""
    found = []
    if "expect" not in row and not re.search("[Nn]ot judged: |Open: ", row.get("setting", "")):
        found.append("does not say why nothing is compared")
    found += _faults_of_expected(row)
    typed = re.findall(r"(--[\w-]+) (?!\{)", row.get("command", ""))
    known = {name for file in files_of(row) for name in facts(file, tasks_of(row))}
    found += [
        f"types {option}, which its file has"
        for option in typed
        if OPTIONS.get(option) in known and option != "--length"
    ]
    return found + disagreements(command_of(row), files_of(row), tasks_of(row))


def files_of(row: dict[str, Any]) -> list[str]:
    """The files of results of a row."""
    return deciding.files_of(row) if "cells" in row else []


def tasks_of(row: dict[str, Any]) -> list[str]:
    """The tasks of which a row has scores."""
    return list(dict.fromkeys(cell["task"] for cell in row["cells"] if "task" in cell))


def command_of(row: dict[str, Any]) -> str:
    """The command of a row, with what its files say of text, length and samples."""
    command = row.get("command", "")
    files = files_of(row)
    return filled(command, files, tasks_of(row)) if files else command


def _line(row: dict[str, Any]) -> list[str]:
    verdict_told, row = _told_verdict(row), judged_by(row)
    cells = [read_cell(cell) for cell in row.get("cells", ())]
    files = [f"`{file}.json`" for file in files_of(row)]
    command = command_of(row)
    if command.startswith(("kvjax ", "python ", "XLA_", "tail ")):
        command = f"`{command}`"
    own = (
        "" if "takes" in row else "the paper's setting: " if row["own"] else "another setting: "
    )
    setting = "" if "takes" in row else f"{own}{row['setting']}. "
    return [
        f"{row['claim']} ({', '.join(row['place'])})",
        row["figures"],
        "; ".join(map(str, cells)),
        f"{setting}{command}{', ' if files else ''}{', '.join(files)}",
        verdict_told,
    ]


def _told_verdict(row: dict[str, Any]) -> str:
    """The verdict on a row, and what another one would take."""
    if "takes" in row:
        return f"not measured: takes {row['takes']}"
    found = verdict(row)
    return (
        f"{found}: `{deciding.command_of(row['decides'])}` decides" if is_open(row) else found
    )


def _table(paper: str) -> str:
    """A paper's claims, the contradicted ones first."""
    rows = sorted(load_claims(paper)["rows"], key=lambda row: VERDICTS.index(verdict(row)))
    return markdown(CLAIM, map(_line, rows), numbers=False)


def claims_fier() -> str:
    return _table("fier")


def claims_pariskv() -> str:
    return _table("pariskv")


def claims_freekv() -> str:
    return _table("freekv")


def claims_logquant() -> str:
    return _table("logquant")


def claims_counted() -> str:
    """Rows by paper and verdict."""
    found = {
        load_claims(paper)["paper"]: [verdict(row) for row in load_claims(paper)["rows"]]
        for paper in PAPERS
    }
    rows = [[name, *(str(own.count(one)) for one in VERDICTS)] for name, own in found.items()]
    return markdown(("paper", *VERDICTS), rows)


def claims_nothing() -> str:
    """Tables and figures of the papers without a claim."""
    rows = [
        [
            found["paper"],
            "; ".join(f"{place}: {why}" for place, why in found["without_claim"].items()),
        ]
        for found in map(load_claims, PAPERS)
    ]
    return markdown(("paper", "tables and figures"), rows, numbers=False)


def paris_parts() -> str:
    """ParisKV with one part left out or changed at a time, on live queries of a published
    model.
    """
    rows = []
    for case, mean in load_measured("measure_paris_smollm2").items():
        shares = (short(mean[name], 3) for name in ("recall", "mass", "error"))
        rows.append([case, *shares, f"{mean['attended']:.0f}", f"{mean['bytes'] / 1024:.0f}"])
    head = (
        "ParisKV",
        "recall@100",
        "share of attention",
        "error of the output",
        "tokens read",
        "KiB read",
    )
    return markdown(head, rows)
