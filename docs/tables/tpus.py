"""What the TPU's compiler says of a step, for docs/support.md."""

from typing import Any

from docs.tables.reading import load_file
from docs.tables.writing import markdown

DENSE = "dense by hand"


def _steps() -> list[dict[str, Any]]:
    """The rows of all runs that are of a decode step."""
    rows = [row for run in load_file("tpu")["runs"] for row in run["rows"]]
    return [row for row in rows if row["program"] == "step"]


def steps_of(chip: str, presets: tuple[str, ...], rows: int = 1) -> list[dict[str, Any]]:
    """The steps of presets with so many rows of the longest history on a chip."""
    own = [row for row in _steps() if row["chip"] == chip and row["rows"] == rows]
    longest = max(row["capacity"] for row in own)
    return [row for row in own if row["capacity"] == longest and row["preset"] in presets]


def of_dense(row: dict[str, Any], name: str) -> float:
    """A number of a step, as a share of that of dense attention by hand at the same place."""
    (dense,) = [
        other for other in _steps() if other["preset"] == DENSE and place(other) == place(row)
    ]
    return float(row[name] / dense[name])


def tpus() -> str:
    """Steps by chip and size: bytes and derived time beside dense attention by hand, copies,
    temporary memory."""
    steps = _steps()
    found = [
        [
            row["chip"],
            f"{row['capacity']} x {row['rows']}",
            row["preset"] if row["preset"] == DENSE else f"`{row['preset']}`",
            f"{row['cache'] / 1e6:,.0f}",
            f"{row['bytes'] / 1e6:,.0f}",
            f"{of_dense(row, 'bytes'):.2f}",
            f"{row['dmas']:,}",
            f"{row['sparsecore_dmas']:,}",
            f"{row['us']:,.0f}",
            f"{of_dense(row, 'us'):.2f}",
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
        "MB of cache",
        "MB moved",
        "of dense",
        "DMAs",
        "by SparseCores",
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
