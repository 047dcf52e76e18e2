"""Every notebook runs from top to bottom, cell by cell, with nothing but the package, and its file
has what it shows.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
# The others compile more, and most ask the model that ships; CI's stage `site` runs them all.
ALWAYS = ("8_many_devices",)
NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in ALWAYS else pytest.mark.thorough)
    for path in sorted(FOLDER.glob("*.ipynb"))
]


@pytest.fixture
def plain_figures() -> Iterator[None]:
    """Draws without a window, and keeps no figure."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebook_runs_and_prints_what_its_file_has(
    notebook: Path, plain_figures: None, capsys: pytest.CaptureFixture
) -> None:
    cells = code_cells(notebook)
    names: dict = {"__name__": "__notebook__"}
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):  # as a reader's own session is
        for cell in cells:
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    outputs = [output for cell in cells for output in cell["outputs"]]
    shown = "".join("".join(o["text"]) for o in outputs if o.get("name") == "stdout")
    assert words(capsys.readouterr().out) == words(shown) != [], (
        f"run python -m docs.notebooks {notebook.stem}"
    )


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def words(text: str) -> list[str]:
    """The words of a text; times and the last digits of numbers differ from run to run."""
    return re.findall(r"[a-z]+", re.sub(r"\d\S*", "", text.lower()))


@pytest.mark.parametrize("notebook", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_has_the_outputs_of_one_run_from_top_to_bottom(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        f"run python -m docs.notebooks {notebook.stem}"
    )
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert "stream" in kinds
    assert "error" not in kinds
    assert not [o for o in outputs if o.get("name") == "stderr"], "a reader sees warnings, too"
    assert not re.search(r"(/tmp|/root|/home|/work)/", json.dumps(outputs)), (
        "a path of a machine"
    )
