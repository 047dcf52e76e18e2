"""Every notebook runs from top to bottom, cell by cell, with nothing but the package."""

import json
from collections.abc import Iterator
from pathlib import Path

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
def test_notebook_runs(
    notebook: Path, plain_figures: None, capsys: pytest.CaptureFixture
) -> None:
    names: dict = {"__name__": "__notebook__"}
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):  # as a reader's own session is
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    assert capsys.readouterr().out


@pytest.mark.parametrize("notebook", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs"), "commit notebooks without outputs"
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), notebook.name, "exec")
