"""docs/claims: every table and figure of a paper is there, and a rule gives the verdicts."""

import copy
import dataclasses
import itertools
import shlex

import jax
import pytest
import typer

import kvjax
from docs.tables import claims
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
        beside = None if got.beside_full is None else (-got.beside_full[0], got.beside_full[1])
        return dataclasses.replace(
            got, value=-got.value, samples=tuple(-x for x in got.samples), beside_full=beside
        )

    monkeypatch.setattr(claims, "read_cell", turned)
    for row, verdict in zip(rows, before, strict=True):
        if verdict == "reproduced":
            assert claims.verdict(row) == "contradicted", row["claim"]


@pytest.mark.parametrize(
    ("paper", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else x["claim"][:30]
)
def test_a_command_has_options_and_caches_that_exist(paper: str, row: dict) -> None:
    lines = [*claims.command_of(row).split("; "), row.get("decides", "")]
    for line in filter(None, lines):
        words = shlex.split(line)
        for option, value in itertools.pairwise(words):
            if option == "--cache":
                policies = presets.parse(value)
                jax.eval_shape(
                    lambda policies=policies: policies.rest.init(SPEC)
                )  # what a model would refuse
        if words[0] == "kvjax":
            known = {name for one in COMMANDS[words[1]].params for name in one.opts}
            assert {word for word in words if word.startswith("--")} <= known
        scripts = [word for word in words if word.startswith("benchmarks")]
        assert all(
            (ROOT / (word if "/" in word else word.replace(".", "/"))).exists()
            or (ROOT / f"{word.replace('.', '/')}.py").exists()
            for word in scripts
        )


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
    full = claims.Cell("full", 0.6, 0.1)
    assert claims.difference(claims.Cell("a", 0.5, 0.1, beside_full=(-0.1, 0.02)), full) == (
        -0.1,
        0.02,
    )


def test_a_row_is_contradicted_by_one_comparison_and_open_if_one_is_open() -> None:
    index = {"name": "FIER", "index": "fier"}
    row = {"cells": [index, index]}
    assert claims.verdict(row) == "not judged"
    assert claims.verdict(row | {"decides": "kvjax eval MODEL"}) == "open"
    assert claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001]]}) == "reproduced"
    assert (
        claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001], ["above", 0, 0.2]]})
        == "contradicted"
    )
    assert (
        claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001], ["above", 0, 1]]}) == "open"
    )
    assert claims.verdict({"takes": "a model"}) == "not measured"
