"""What the TPU's compiler says of a step, for docs/support.md."""

from typing import Any

from docs.tables.reading import load_file
from docs.tables.writing import markdown

DENSE = "dense by hand"


def tpus() -> str:
    """Steps by chip and size: bytes beside dense attention by hand, copies, temporary memory."""
    rows = [row for run in load_file("tpu")["runs"] for row in run["rows"]]
    steps = [row for row in rows if row["program"] == "step"]
    dense = {place(row): row["bytes"] for row in steps if row["preset"] == DENSE}
    found = [
        [
            row["chip"],
            f"{row['capacity']} x {row['rows']}",
            row["preset"] if row["preset"] == DENSE else f"`{row['preset']}`",
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['bytes'] / dense[place(row)]:.2f}",
            str(len(row["copies"])),
            f"{row['temp'] / 1e6:,.1f}",
            f"{row['compile_s']:.0f}",
        ]
        for row in sorted(steps, key=lambda row: (*place(row), row["preset"] != DENSE))
    ]
    header = [
        "chip",
        "tokens x rows",
        "step",
        "MB",
        "of dense",
        "copies",
        "MB temporary",
        "s to compile",
    ]
    return markdown(header, found)


def place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["chip"], row["capacity"], row["rows"]
