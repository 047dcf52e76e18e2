"""What the model of a step on several GPUs assumes is what was measured."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Imports the benchmark as a script does, with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("scaling")
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture
def steps(scaling: ModuleType) -> list[dict[str, Any]]:
    """Measured steps over several H200s."""
    rows = json.loads((FOLDER / "results" / "devices.json").read_text())["rows"]
    return [
        row
        for row in rows
        if (row["device"], row["part"]) == (scaling.H200, "times") and scaling.axes(row)
    ]


def test_a_column_of_zeros_has_the_factor_zero(scaling: ModuleType) -> None:
    columns = [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0], [0.0, 1.0, 5.0]]
    assert scaling.solved(columns, [7.0, 9.0, 13.0]) == pytest.approx([0.0, 3.0, 2.0])


def test_the_bytes_of_weights_are_those_of_a_device(
    scaling: ModuleType, steps: list[dict[str, Any]]
) -> None:
    for row in steps:
        sizes = scaling.axes(row)
        found = scaling.weight_bytes(
            row["shape"], row["layers"], sizes.get("model", 1), sizes.get("ctx", 1)
        )
        assert found == pytest.approx(row["weight_bytes"], rel=1e-3), row["placement"]


def test_the_collectives_are_those_of_the_compiled_loop(
    scaling: ModuleType, steps: list[dict[str, Any]]
) -> None:
    for row in steps:
        sizes = scaling.axes(row)
        form = None
        if sizes.get("ctx", 1) > 1:
            form = "share" if row["placement"].endswith("+share") else "exact"
        model = sizes.get("model", 1)
        found = scaling.collective_counts(row["method"], row["layers"], model, form)
        assert found == row["collectives"], (row["method"], row["placement"])
