"""Every notebook runs from top to bottom, cell by cell, with nothing but the package."""

import json
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, capsys: pytest.CaptureFixture) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    names: dict = {"__name__": "__notebook__"}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as a reader's own session is
        for cell in cells:
            assert not cell.get("outputs"), "commit notebooks without outputs"
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    assert capsys.readouterr().out
