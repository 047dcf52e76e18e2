"""What the TPU's compiler says of a step, for docs/support.md."""

from typing import Any

from docs.tables.reading import load_file
from docs.tables.writing import markdown

DENSE = "dense by hand"


def tpus() -> str:
    """Steps by chip and size: bytes and derived time beside dense attention by hand, copies,
    temporary memory."""
    rows = [row for run in load_file("tpu")["runs"] for row in run["rows"]]
    steps = [row for row in rows if row["program"] == "step"]
    dense = {place(row): row for row in steps if row["preset"] == DENSE}

    def of_dense(row: dict[str, Any], name: str) -> str:
        return f"{row[name] / dense[place(row)][name]:.2f}"

    found = [
        [
            row["chip"],
            f"{row['capacity']} x {row['rows']}",
            row["preset"] if row["preset"] == DENSE else f"`{row['preset']}`",
            f"{row['bytes'] / 1e6:,.0f}",
            of_dense(row, "bytes"),
            f"{row['dmas']:,}",
            f"{row['us']:,.0f}",
            of_dense(row, "us"),
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
        "DMAs",
        "µs, derived",
        "of dense",
        "copies",
        "MB temporary",
        "s to compile",
    ]
    return markdown(header, found)


def tpu_kernels() -> str:
    """Kernels by chip: their bundles, and the time of these and of their bytes alone."""
    found = [
        [
            row["chip"],
            f"`{row['name']}`",
            row["shapes"],
            f"{row['bundles']:,} x {row['steps']:,}",
            "" if row["us"] is None else f"{row['us']:,.0f}",
            f"{row['us_of_bytes']:,.0f}",
        ]
        for row in load_file("tpu")["kernels"]["rows"]
    ]
    return markdown(["chip", "kernel", "sizes", "bundles", "µs of bundles", "of bytes"], found)


def place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["chip"], row["capacity"], row["rows"]
