"""docs/claims: every table and figure of a paper is there, and a rule gives the verdicts."""

import copy
import dataclasses
import itertools
import json
import re

import jax
import pytest
import typer

import kvjax
from docs.tables import claims, deciding, reading
from docs.tables.reading import ROOT, load_results
from kvjax import presets
from kvjax.cli import app

PAPERS = {name: claims.load_claims(name) for name in claims.PAPERS}
ROWS = [(name, row) for name, paper in PAPERS.items() for row in paper["rows"]]
SPEC = kvjax.CacheSpec(batch=1, q_heads=8, kv_heads=2, head_dim=128, capacity=4096)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# Counted in the papers themselves.
TABLES = {
    "fier": "1234567",
    "pariskv": "123",
    "freekv": "123",
    "logquant": ("1", "2", "3", "4", "B5", "C6", "D7"),
}
FIGURES = {"fier": 9, "pariskv": 10, "freekv": 8, "logquant": 8}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_of_a_paper_has_a_whole_row_or_claims_nothing(
    paper: str,
) -> None:
    assert claims.faults(PAPERS[paper], TABLES[paper], FIGURES[paper]) == []
    assert {claims.verdict(row) for row in PAPERS[paper]["rows"]} <= set(claims.VERDICTS)


def _without_place(paper: dict, place: str) -> None:
    for row in paper["rows"]:
        row["place"] = [one for one in row["place"] if one != place] or ["Section 1"]


def _with_command(paper: dict, name: str, typed: str) -> None:
    """The command of a row of pass keys, with something typed that its file has."""
    row = paper["rows"][6]
    row["command"] = row["command"].replace(name, typed)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda paper: _without_place(paper, "Figure 8"), "Figure 8 has no row"),
        (lambda paper: paper["without_claim"].pop("Table 5"), "Table 5 has no row"),
        (
            lambda paper: paper["without_claim"].update({"Figure 8": "a drawing"}),
            "has a row and claims nothing",
        ),
        (lambda paper: paper["rows"][0]["place"].append("Table 8"), "the paper has no Table 8"),
        (lambda paper: paper["rows"][0].update(figures=""), "no figures"),
        (lambda paper: paper["rows"][0].pop("command"), "no command"),
        (lambda paper: paper["rows"][0].update(place=[]), "no place"),
        (lambda paper: paper["rows"][0].update(verdict="reproduced"), "verdict is unknown"),
        (
            lambda paper: paper["rows"][0].update(claim="FIER is better: reproduced"),
            "types a verdict",
        ),
        (lambda paper: paper["rows"][0].pop("expect"), "does not say why nothing is compared"),
        (
            lambda paper: paper["rows"][1].pop("decides"),
            "is open and names no run that decides it",
        ),
        (
            lambda paper: paper["rows"][0].update(decides=paper["rows"][1]["decides"]),
            "names a run that decides it, and its own numbers do",
        ),
        (
            lambda paper: paper["rows"][1]["decides"].pop("setting"),
            "decides has or lacks setting",
        ),
        (
            lambda paper: paper["rows"][1]["decides"].update(expect=[["above", 0, 7]]),
            "decides compares cells that it does not have",
        ),
        (
            lambda paper: paper["rows"][4]["decides"].update(
                cells=paper["rows"][1]["decides"]["cells"],
                run="claims",
                expect=[["above", 0, 0.5]],
            ),
            "decides is about answers and judged by attention",
        ),
        (
            lambda paper: paper["rows"][0].update(expect=[["above", 0, 9]]),
            "cells that it does not have",
        ),
        (
            lambda paper: paper["rows"][4].update(expect=[["near", 6, 1.0, 0.02]]),
            "is about answers and judged by perplexity",
        ),
        (
            lambda paper: _with_command(paper, "{text}", "middlemarch.txt"),
            "types --text, which its file has",
        ),
        (
            lambda paper: _with_command(paper, "{text}", "vanity-fair.txt"),
            "--text vanity-fair.txt, and eval_qwen has middlemarch.txt",
        ),
        (
            lambda paper: _with_command(paper, "{length}", "8K"),
            "--length 8K, and eval_qwen has 16384",
        ),
        (
            lambda paper: _with_command(paper, "{samples}", "128"),
            "--samples 128, and eval_qwen has 100",
        ),
    ],
)
def test_a_planted_fault_is_found(plant, found: str) -> None:
    paper = copy.deepcopy(PAPERS["fier"])
    plant(paper)
    assert any(found in one for one in claims.faults(paper, TABLES["fier"], FIGURES["fier"]))


def test_a_verdict_follows_the_numbers_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each number turned into its opposite, what was reproduced is contradicted."""
    compared = [row for _, row in ROWS if "expect" in row]
    rows = [
        row
        for row in compared
        if all(one[0] != "near" and isinstance(one[2], int) for one in row["expect"])
    ]
    before, read = [claims.verdict(row) for row in rows], claims.read_cell

    def turned(cell: dict) -> claims.Cell:
        got = read(cell)
        beside = {other: (-value, stderr) for other, (value, stderr) in got.beside.items()}
        return dataclasses.replace(
            got, value=-got.value, samples=tuple(-x for x in got.samples), beside=beside
        )

    monkeypatch.setattr(claims, "read_cell", turned)
    for row, verdict in zip(rows, before, strict=True):
        if verdict == "reproduced":
            assert claims.verdict(row) == "contradicted", row["claim"]


def options_of(script: str) -> set[str]:
    """The options that the source of benchmarks/x.py or of benchmarks.x names; some scripts
    share theirs.
    """
    name = script if script.endswith(".py") else script.replace(".", "/")
    files = [ROOT / name, ROOT / f"{name}.py", ROOT / name / "__main__.py"]
    (source,) = [file for file in files if file.is_file()]
    shared = ROOT / "benchmarks" / "layers.py"
    return set(re.findall(r'"(--[\w-]+)"', source.read_text() + shared.read_text()))


@pytest.mark.parametrize(
    ("paper", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else x["claim"][:30]
)
def test_a_command_has_options_and_caches_that_exist(paper: str, row: dict) -> None:
    commands = [claims.command_of(row)]
    if "decides" in row:
        commands.append(deciding.command_of(row["decides"]))
    for words in filter(None, itertools.chain(*map(deciding.lines_of, commands))):
        for option, value in itertools.pairwise(words):
            if option == "--cache":
                policies = presets.parse(value)
                jax.eval_shape(
                    lambda policies=policies: policies.rest.init(SPEC)
                )  # what a model would refuse
        if words[0] == "kvjax":
            known = {name for one in COMMANDS[words[1]].params for name in one.opts}
            assert {word for word in words if word.startswith("--")} <= known
        for script in (word for word in words if word.startswith("benchmarks")):
            asked = {word for word in words if word.startswith("--")}
            assert asked - {"--quick"} <= options_of(script), script


A, B = (claims.Cell(name, value, 0.01) for name, value in (("a", 0.5), ("b", 0.4)))
WIDE = claims.Cell("wide", 0.45, 0.1)
UNKNOWN = claims.Cell("unknown", 0.9, None)


@pytest.mark.parametrize(
    ("expectation", "cells", "wanted"),
    [
        (["above", 0, 1], (A, B), "reproduced"),
        (["below", 0, 1], (A, B), "contradicted"),
        (["above", 0, 1], (A, WIDE), "open"),
        (["below", 0, 1], (A, WIDE), "open"),
        (["above", 0, 1], (UNKNOWN, B), "open"),
        (["above", 0, 0.4], (A,), "reproduced"),
        (["near", 0, 1, 0.2], (A, B), "reproduced"),
        (["near", 0, 1, 0.05], (A, B), "contradicted"),
        (["near", 0, 1, 0.1], (A, B), "open"),
    ],
)
def test_a_comparison_is_judged_by_sign_and_two_standard_errors(
    expectation, cells, wanted
) -> None:
    assert claims.compare(expectation, cells) == wanted


def test_a_mean_over_tasks_has_the_error_of_its_prompts() -> None:
    cell = {
        "name": "FIER",
        "file": "eval_qwen_ruler",
        "mean_of_tasks": 8192,
        "cache": "fier@1024",
    }
    found = claims.read_cell(cell)
    scores = [
        one["caches"]["fier@1024"]
        for one in load_results("eval_qwen_ruler").values()
        if one["task"]["length"] == 8192
    ]
    assert len(scores) == 10
    assert found.value == pytest.approx(sum(score["mean"] for score in scores) / 10)
    widest = max(score["high"] - score["low"] for score in scores) / 3.92
    assert found.stderr is not None
    assert 0 < found.stderr < widest / 10**0.5


def test_layers_are_compared_by_pairs_and_scores_on_the_same_questions() -> None:
    one, other = (
        claims.Cell(n, v, 0.5, samples)
        for n, v, samples in (("a", 2.0, (1.0, 3.0)), ("b", 1.0, (0.0, 2.0)))
    )
    assert claims.difference(one, other) == (1.0, 0.0)


def test_scores_on_the_same_questions_are_compared_by_their_differences() -> None:
    def cell(cache: str, value: float, asked: str = "a file, a task", **beside) -> claims.Cell:
        return claims.Cell(cache, value, 0.1, cache=cache, asked=asked, beside=beside)

    full = cell("full", 0.6)
    assert claims.difference(cell("a", 0.5, full=(-0.1, 0.02)), full) == (-0.1, 0.02)
    pair = (cell("a", 0.5, b=(0.1, 0.01), full=(-0.1, 0.2)), cell("b", 0.4, full=(-0.2, 0.2)))
    assert claims.difference(*pair) == (0.1, 0.01)
    by_full = claims.difference(
        cell("a", 0.5, full=(-0.1, 0.03)), cell("b", 0.4, full=(-0.2, 0.04))
    )
    assert by_full == pytest.approx((0.1, 0.05))
    other_task = claims.difference(
        cell("a", 0.5, full=(-0.1, 0.02)), cell("full", 0.6, "a task")
    )
    assert other_task == pytest.approx((-0.1, 0.02**0.5))


def test_differences_of_a_file_are_those_of_both_directions() -> None:
    scores = {"mean": 0.5, "low": 0.4, "high": 0.6}
    result = {
        "caches": {"full": scores, "a": scores, "b": scores},
        "differences": {
            "a": {"full": [-0.1, 0.01]},
            "b": {"full": [0.2, 0.02], "a": [0.3, 0.03]},
        },
    }
    found = claims._beside_in("a", result)
    assert found == {"full": (-0.1, 0.01), "b": (-0.3, 0.03)}


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.5, "reproduced"), (0.39, "open"), (0.3, "contradicted")]
)
def test_at_least_allows_to_be_a_little_lower(value: float, wanted: str) -> None:
    cells = (claims.Cell("last", value, 0.01), claims.Cell("first", 0.4, 0.0))
    assert claims.compare(["at least", 0, 1, 0.02], cells) == wanted


def test_a_row_is_contradicted_by_one_comparison_and_open_if_one_is_open() -> None:
    index = {"name": "FIER", "index": "fier"}
    row = {"cells": [index, index]}
    assert claims.verdict(row) == "not judged"
    assert claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001]]}) == "reproduced"
    assert (
        claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001], ["above", 0, 0.2]]})
        == "contradicted"
    )
    assert (
        claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001], ["above", 0, 1]]}) == "open"
    )
    assert claims.verdict({"takes": "a model"}) == "not measured"


# ------------------------------------------------------------------------------------------------------------ deciding

DECIDED = [(name, row) for name, row in ROWS if "decides" in row]


@pytest.fixture
def results(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A folder of results without a file."""
    monkeypatch.setattr(deciding, "RESULTS", tmp_path)
    monkeypatch.setattr(reading, "RESULTS", tmp_path)
    return tmp_path


def score(value: float, n: int = 100) -> dict:
    return {"mean": value, "low": value - 0.02, "high": value + 0.02, "n": n}


def answers(caches: dict, samples: int = 100, length: int = 8192) -> str:
    task = {"form": "needles", "length": length, "samples": samples, "text": "vanity-fair.txt"}
    return json.dumps({"results": {"a task": {"task": task, "caches": caches}}})


OF_ANSWERS = {
    "claim": "one is better",
    "measure": "answers",
    "cells": [{"name": "FIER", "index": "fier"}],
    "expect": [["near", 0, 0.125, 0.001]],
    "setting": "an earlier measurement",
    "decides": {
        "run": "eval",
        "options": {
            "task": "needles",
            "length": 8192,
            "samples": 100,
            "text": "vanity-fair.txt",
        },
        "cells": [
            {"name": "one", "file": "new", "mean_of_tasks": 8192, "cache": "fier@512"},
            {
                "name": "other",
                "file": "new",
                "mean_of_tasks": 8192,
                "cache": "quest:page=8@2048",
            },
        ],
        "expect": [["above", 0, 1]],
        "setting": "of the run",
    },
}


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [(0.9, 0.8, "reproduced"), (0.8, 0.9, "contradicted"), (0.9, 0.9, "open")],
)
def test_a_run_that_is_there_decides(results, one: float, other: float, wanted: str) -> None:
    assert claims.verdict(OF_ANSWERS) == "open"  # whatever earlier numbers say
    assert claims.command_of(claims.judged_by(OF_ANSWERS)) == ""
    caches = {"fier@512": score(one), "quest:page=8@2048": score(other)}
    (results / "new.json").write_text(answers(caches))
    assert claims.verdict(OF_ANSWERS) == wanted
    judged = claims.judged_by(OF_ANSWERS)
    assert judged["setting"] == "of the run"
    assert judged["command"].startswith("kvjax eval MODEL --task needles --length 8192")
    assert deciding.faults(OF_ANSWERS["decides"]) == []
    another = "is open after the run that it names; name another"
    found = claims._faults_of_deciding(OF_ANSWERS | {"measure": "speed"})  # by its file's name
    assert (another in found) == (wanted == "open")


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (answers({"fier@512": score(0.9)}), "new lacks quest:page=8@2048"),
        (
            answers({"fier@512": score(0.9), "quest:page=8@2048": score(0.8, 40)}),
            "new has a part of the questions of quest:page=8@2048",
        ),
    ],
)
def test_a_run_that_was_cut_decides_nothing(results, found: str, missing: str) -> None:
    assert deciding.missing(OF_ANSWERS["decides"]) == ["no new"]
    (results / "new.json").write_text(found)
    assert deciding.missing(OF_ANSWERS["decides"]) == [missing]
    assert claims.verdict(OF_ANSWERS) == "open"


def test_a_file_of_another_length_is_a_fault(results) -> None:
    caches = {"fier@512": score(0.9), "quest:page=8@2048": score(0.8)}
    (results / "new.json").write_text(answers(caches, samples=50))
    assert deciding.faults(OF_ANSWERS["decides"]) == ["--samples 100, and new has 50"]


def test_a_mean_of_files_has_the_error_of_their_spread(results) -> None:
    for name, recall in (("one", 0.5), ("two", 0.7)):
        found = {"results": {"Paris": {"by_length": {"96": {"recall": recall}}}}}
        (results / f"{name}.json").write_text(json.dumps(found))
    cell = {
        "name": "last",
        "files": ["one", "two"],
        "case": "Paris",
        "at": "96",
        "value": "recall",
    }
    found = claims.read_cell(cell)
    assert (found.value, found.stderr) == pytest.approx((0.6, 0.1))
    assert found.samples == (0.5, 0.7)


def test_the_least_head_has_its_own_error(results) -> None:
    found = {"mean_by_head": [[0.9, 0.7], [0.8, 0.95]], "mean_by_head_stderr": [[1, 2], [3, 4]]}
    (results / "queries.json").write_text(json.dumps({"results": {"cosine": found}}))
    cell = {"name": "least", "file": "queries", "case": "cosine", "value": "mean_by_head"}
    least = claims.read_cell(cell | {"pick": "least"})
    assert (least.value, least.stderr) == (0.7, 2)
    second = claims.read_cell(cell | {"pick": "second least"})
    assert (second.value, second.stderr) == (0.8, 3)


def test_a_group_of_the_harness_has_its_score_and_error(results) -> None:
    found = {"results": {"longbench": {"score,none": 0.3, "score_stderr,none": 0.01}}}
    (results / "long.json").write_text(json.dumps(found))
    cell = {"name": "KIVI", "file": "long", "group": "longbench", "cache": "kivi"}
    read = claims.read_cell(cell)
    assert (read.value, read.stderr) == (0.3, 0.01)
    assert claims.measure_of(cell) == "answers"


@pytest.mark.parametrize(
    ("paper", "row"), DECIDED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_command_runs_what_its_cells_compare(paper: str, row: dict) -> None:
    decides = row["decides"]
    words = list(itertools.chain(*deciding.lines_of(deciding.command_of(decides))))
    for cell in decides["cells"]:
        assert all(file in " ".join(words) for file in deciding.files_of_cell(cell))
        if "cache" in cell:
            assert deciding.as_argument(cell["cache"]) in " ".join(words)
        for value in cell.get("row", {}).values():
            assert any(str(value) in word.split(",") for word in words)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_page_shows_the_command_of_each_open_row(paper: str) -> None:
    table = getattr(claims, f"claims_{paper}")()
    for row in PAPERS[paper]["rows"]:
        if claims.is_open(row):
            assert f"open: `{deciding.command_of(row['decides'])}` decides" in table


def test_a_cache_is_named_as_a_command_takes_it() -> None:
    assert deciding.as_argument("full") == "full"
    assert deciding.as_argument("fier@512") == "fier:budget=512"
    assert deciding.as_argument("quest:page=8@512") == "quest:page=8,budget=512"
    assert deciding.as_argument("kivi:sink=2") == "kivi:sink=2"
