"""What is written of planted faults: counts by module, reasons that stay, and code that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants import Reach, record

DIFF = "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x < 1\n+x <= 1"


def mutant(occurrence: int, outcome: str, module: str = "m.py") -> dict[str, Any]:
    return {
        "module": module,
        "line": 7,
        "operator": "core/NumberReplacer",
        "occurrence": occurrence,
        "outcome": outcome,
        "diff": DIFF,
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("m.py", "n.py"):
        (tmp_path / name).write_text("x < 1")
    return tmp_path


def counts(results: Path, module: str = "m.py") -> tuple[int, ...]:
    told = json.loads(results.read_text())["modules"][module]
    return told["tried"], told["found"], told["lived_before"], told["equivalent"]


def test_results_keep_reasons_and_say_which_faults_got_a_test(tree: Path) -> None:
    results = tree / "mutants.json"
    record(
        [mutant(0, "killed"), mutant(1, "survived"), mutant(2, "survived")], results, 5, tree
    )
    assert counts(results) == (3, 1, 0, 0)
    told = json.loads(results.read_text())
    assert told["mutants"][1]["change"] == ["-x < 1", "+x <= 1"]
    told["mutants"][1]["equivalent"] = "x is whole"
    results.write_text(json.dumps(told))
    record([mutant(2, "killed"), mutant(1, "survived")], results, 6, tree)
    assert counts(results) == (3, 2, 1, 1)
    again = json.loads(results.read_text())["mutants"]
    assert [one["seed"] for one in again] == [5, 5, 5]
    record([mutant(2, "killed")], results, 6, tree)
    assert json.loads(results.read_text())["mutants"] == again


def test_results_of_a_module_end_with_its_next_version(tree: Path) -> None:
    results = tree / "mutants.json"
    record([mutant(0, "killed"), mutant(0, "killed", "n.py")], results, 5, tree)
    (tree / "m.py").write_text("x < 2")
    record([mutant(4, "survived")], results, 5, tree)
    assert counts(results) == (1, 0, 0, 0)
    assert counts(results, "n.py") == (1, 1, 0, 0)


def test_a_line_is_tried_by_the_fastest_tests_that_reach_it() -> None:
    reach = Reach({"a": 30.0, "b": 1.0, "c": 20.0}, {3: ["a", "b", "c"]})
    assert reach.of(3, most=21) == ["b", "c"]
    assert reach.of(3, most=20) == ["b"]
    assert reach.of(3, most=0) == ["b"]
    assert reach.of(4, most=100) == []
