"""The table of docs/note.md of faults that were planted, and what tests find of them."""

from __future__ import annotations

from docs.tables.reading import load_file
from docs.tables.writing import markdown


def mutants() -> str:
    """Mutants by module: tried, found, found by a test written for one, and equivalent."""
    columns = ("tried", "found", "lived_before", "equivalent")
    rows = [
        [f"`{module}`", *(str(counts[column]) for column in columns)]
        for module, counts in load_file("mutants")["modules"].items()
    ]
    titles = [
        "module",
        "faults tried",
        "found",
        "of them by a test written for it",
        "change nothing",
    ]
    return markdown(titles, rows)
