"""Writes the outputs of the notebooks into their files: `python -m docs.notebooks [NAME...]` runs
all of them, or those named, as `1_quickstart`.

A reader on a code host, and every build of the site, sees these outputs. Times of cells and the
version of Python are left out, so that another run changes only what a notebook shows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 1200  # a cell takes less than a minute, and longer on a busy machine


def run(path: Path) -> None:
    """Runs a notebook from top to bottom in its folder, and writes it with its outputs.

    Raises:
      CellExecutionError: a cell raised; the file stays as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources=folder)
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


def main(names: Sequence[str]) -> None:
    unknown = [name for name in names if not (FOLDER / f"{name}.ipynb").exists()]
    if unknown:
        raise SystemExit(f"no notebook {', '.join(unknown)} in {FOLDER}")
    paths = [FOLDER / f"{name}.ipynb" for name in names]
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        run(path)
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
