"""docs/claims: every table and figure of a paper is there, and a rule gives the verdicts."""

import itertools
import json
import shlex

import pytest
import typer

from docs.tables import claims
from docs.tables.reading import ROOT
from kvjax import presets
from kvjax.cli import app

PAPERS = {name: claims.load_claims(name) for name in claims.PAPERS}
ROWS = [(name, row) for name, paper in PAPERS.items() for row in paper["rows"]]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FIELDS = {"place", "claim", "figures", "command"}
MEASURED = {"own", "setting", "cells"}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_of_a_paper_has_a_row_or_claims_nothing(paper: str) -> None:
    found = PAPERS[paper]
    wanted = {f"Table {n}" for n in found["tables"]} | {f"Figure {n}" for n in found["figures"]}
    in_rows = {place for row in found["rows"] for place in row["place"]}
    assert wanted <= in_rows | set(found["without_claim"])
    assert not in_rows & set(found["without_claim"])
    assert {place for place in in_rows if place.startswith(("Table", "Figure"))} <= wanted


@pytest.mark.parametrize(("paper", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else x["claim"][:30])
def test_a_row_has_its_place_and_figures_and_no_typed_verdict(paper: str, row: dict) -> None:
    assert set(row) >= FIELDS
    assert all(row[field] for field in FIELDS)
    assert set(row) - FIELDS - {"expect"} == ({"takes"} if "takes" in row else MEASURED)
    if "cells" in row and "expect" not in row:
        assert "ot judged: " in row["setting"] or "No interval" in row["setting"], "say why nothing is compared"
    words = [word for word in claims.VERDICTS if word in json.dumps(row)]
    assert words in ([], ["not measured"]), "the rule gives verdicts"
    assert claims.verdict(row) in claims.VERDICTS


@pytest.mark.parametrize(("paper", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else x["claim"][:30])
def test_a_command_has_options_and_caches_that_exist(paper: str, row: dict) -> None:
    for line in row["command"].split("; "):
        words = shlex.split(line)
        for option, value in itertools.pairwise(words):
            if option == "--cache":
                presets.parse(value)
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
def test_a_comparison_is_judged_by_sign_and_two_standard_errors(expectation, cells, wanted) -> None:
    assert claims.compare(expectation, cells) == wanted


def test_layers_are_compared_by_pairs_and_scores_on_the_same_questions() -> None:
    one, other = (claims.Cell(n, v, 0.5, samples) for n, v, samples in (("a", 2.0, (1.0, 3.0)), ("b", 1.0, (0.0, 2.0))))
    assert claims.difference(one, other) == (1.0, 0.0)
    full = claims.Cell("full", 0.6, 0.1)
    assert claims.difference(claims.Cell("a", 0.5, 0.1, beside_full=(-0.1, 0.02)), full) == (-0.1, 0.02)


def test_a_row_is_contradicted_by_one_comparison_and_open_if_one_is_open() -> None:
    index = {"name": "FIER", "index": "fier"}
    row = {"cells": [index, index]}
    assert claims.verdict(row) == "open"
    assert claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001]]}) == "reproduced"
    assert claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001], ["above", 0, 0.2]]}) == "contradicted"
    assert claims.verdict(row | {"expect": [["near", 0, 0.125, 0.001], ["above", 0, 1]]}) == "open"
    assert claims.verdict({"takes": "a model"}) == "not measured"
