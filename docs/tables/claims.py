"""The tables of docs/claims.md: what a paper claims, what was measured here, and a verdict that
a rule gives.

A file of docs/claims has a paper's claims: for each its place and figures, our command and
setting, cells of files of results, and what these must be like for the claim to hold. Nothing
else decides on a verdict:

A claim is judged by what its paper measures: `measure` says whether that are answers,
perplexity, attention, speed or memory, and a comparison of other numbers is a fault.

reproduced: every comparison comes out as claimed, by more than two standard errors.
contradicted: one comes out the other way, by more than two. open: all others, and rows that
another measurement would decide, whose command `decides` is. not judged: rows without a
comparison that say why. A row with `takes` is not measured.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    samples: tuple[float, ...] = ()  # of layers, if the value is their mean
    # difference from full attention on the same questions, its error
    beside_full: tuple[float, float] | None = None
    source: str = ""

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
    if "task" in cell:
        score = load_results(file)[cell["task"]]["caches"][cell["cache"]]
        beside = (
            (score["difference"], score["difference_stderr"]) if "difference" in score else None
        )
        return Cell(
            name,
            score["mean"],
            _stderr(score),
            beside_full=beside,
            source=file,
        )
    if "mean_of_tasks" in cell:
        return _mean_of_tasks(cell)
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


def _mean_of_tasks(cell: dict[str, Any]) -> Cell:
    """The mean score of a cache over all tasks of a file at one length; prompts of a task are
    the sample of its error.
    """
    file, length = cell["file"], cell["mean_of_tasks"]
    scores = [
        result["caches"][cell["cache"]]
        for result in load_results(file).values()
        if result["task"]["length"] == length
    ]
    errors = [_stderr(score) for score in scores]
    mean = statistics.fmean(score["mean"] for score in scores)
    return Cell(cell["name"], mean, math.hypot(*errors) / len(errors), source=file)


def _stderr(score: dict[str, Any]) -> float:
    """The standard error of a score that has a 95 % interval."""
    return (score["high"] - score["low"]) / 3.92


def measure_of(cell: dict[str, Any]) -> str:
    """What the number that a cell names measures."""
    if "index" in cell or cell.get("value") == "batch":
        return "memory"
    file = cell["file"]
    return next((kind for name, kind in MEASURES.items() if file.startswith(name)), "speed")


def _of_case(cell: dict[str, Any]) -> Cell:
    """A mean over layers, which are the sample of its error, or one of them, which has none."""
    name, file, value = cell["name"], cell["file"], cell["value"]
    if "pick" in cell:
        values = sorted(load_results(file)[cell["case"]][value])
        picked = {
            "least": values[0],
            "second least": values[1],
            "median": statistics.median(values),
        }[cell["pick"]]
        return Cell(name, picked, None, source=file)
    layers = load_results(file)[cell["case"]].get("by_layer", {}).get(value, ())
    stderr = statistics.stdev(layers) / math.sqrt(len(layers)) if layers else None
    return Cell(
        name, load_measured(file)[cell["case"]][value], stderr, tuple(layers), source=file
    )


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
    if one.beside_full is not None and other.name == "full":
        return one.beside_full
    if one.stderr is None or other.stderr is None:
        return value, None
    return value, math.hypot(one.stderr, other.stderr)


def compare(expectation: Sequence[Any], cells: Sequence[Cell]) -> str:
    """The verdict on one comparison: ["above" | "below", cell, cell or number], or ["near",
    ..., allowed distance].
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
        value = value if kind == "above" else -value
        holds, fails = value > 2 * stderr, value < -2 * stderr
    return "reproduced" if holds else "contradicted" if fails else "open"


def verdict(row: dict[str, Any]) -> str:
    """The verdict on a row of docs/claims: see the module."""
    if "takes" in row:
        return "not measured"
    if "expect" not in row:
        return "open" if "decides" in row else "not judged"
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
        if "cells" in row:
            found += [f"{row.get('claim')}: {fault}" for fault in _faults_of_cells(row)]
    return found


def _faults_of_cells(row: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers of a measured row, and with their command."""
    found, cells = [], row["cells"]
    if "expect" not in row and not re.search("[Nn]ot judged: |Open: ", row.get("setting", "")):
        found.append("does not say why nothing is compared")
    used = {at for one in row.get("expect", ()) for at in one[1:3] if isinstance(at, int)}
    if not used <= set(range(len(cells))):
        return [*found, "compares cells that it does not have"]
    other = {measure_of(cells[at]) for at in used} - set(row.get("measure", "").split(" and "))
    found += [f"is about {row.get('measure')} and judged by {kind}" for kind in sorted(other)]
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
    return list(dict.fromkeys(cell["file"] for cell in row.get("cells", ()) if "file" in cell))


def tasks_of(row: dict[str, Any]) -> list[str]:
    """The tasks of which a row has scores."""
    return list(dict.fromkeys(cell["task"] for cell in row["cells"] if "task" in cell))


def command_of(row: dict[str, Any]) -> str:
    """The command of a row, with what its files say of text, length and samples."""
    command = row.get("command", "")
    files = files_of(row)
    return filled(command, files, tasks_of(row)) if files else command


def _line(row: dict[str, Any]) -> list[str]:
    cells = [read_cell(cell) for cell in row.get("cells", ())]
    files = dict.fromkeys(f"`{cell.source}.json`" for cell in cells if cell.source)
    command = command_of(row)
    if command.startswith(("kvjax ", "python ", "XLA_")):
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
        _told_verdict(row),
    ]


def _told_verdict(row: dict[str, Any]) -> str:
    """The verdict on a row, and what another one would take."""
    if "takes" in row:
        return f"not measured: takes {row['takes']}"
    found = verdict(row)
    return f"{found}: `{row['decides']}` decides" if "decides" in row else found


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
