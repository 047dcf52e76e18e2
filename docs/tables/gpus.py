"""The tables of docs/support.md: what kernels depend on by architecture, and times by card."""

from __future__ import annotations

from docs.tables.reading import load_file, load_rows
from docs.tables.speed import default_steps
from docs.tables.writing import markdown
from kvjax.kernels_pallas import simt

STEPS = "full", "fier", "quest", "pariskv", "logquant"


def gpus() -> str:
    rows = [
        [
            capability,
            f"{smem // 1024} KB",
            *("yes" if has else "no" for has in (clusters, float8)),
        ]
        for capability, (smem, clusters, float8) in simt.ARCHITECTURES.items()
    ]
    return markdown(
        ["compute capability", "shared memory", "clusters of blocks", "conversion of e4m3"],
        rows,
        numbers=False,
    )


def cards() -> str:
    """Steps after 131072 tokens by card: times that users sent, those of the scripts, and
    blanks.
    """
    sent = {
        (row["card"]["kind"], row["what"]): row["us"]
        for row in load_rows("cards")
        if "us" in row
    }
    file = load_file("targets")
    own = [
        (file["device"], row["what"], row) for row in file["rows"] if row.get("form") == "here"
    ]
    own += [(row["device"], f"step {row['method']}", row) for row in default_steps().values()]
    times = {
        (card, what): row["us"]
        for card, what, row in own
        if (row["length"], row["batch"]) == (131072, 1)
    } | sent
    rows = []
    for kind, (capability, *_) in simt.CARDS.items():
        found = [times.get((kind, f"step {name}")) for name in STEPS]
        rows.append(
            [
                kind.removeprefix("NVIDIA "),
                capability,
                *("" if us is None else f"{us:.1f}" for us in found),
            ]
        )
    return markdown(["card", "compute capability", *STEPS], rows)
