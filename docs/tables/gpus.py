"""The tables of docs/support.md: what kernels depend on by architecture, and times that users of cards have sent."""

from __future__ import annotations

from docs.tables.reading import load_rows
from docs.tables.writing import markdown
from kvjax.kernels_pallas import simt

STEPS = "full", "fier", "quest", "pariskv", "logquant"


def gpus() -> str:
    rows = [
        [capability, f"{smem // 1024} KB", *("yes" if has else "no" for has in (clusters, float8))]
        for capability, (smem, clusters, float8) in simt.ARCHITECTURES.items()
    ]
    return markdown(
        ["compute capability", "shared memory", "clusters of blocks", "conversion of e4m3"], rows, numbers=False
    )


def cards() -> str:
    times = {(row["card"]["kind"], row["what"]): f"{row['us']:.1f}" for row in load_rows("cards") if "us" in row}
    rows = [
        [kind.removeprefix("NVIDIA "), capability, *(times.get((kind, f"step {name}"), "") for name in STEPS)]
        for kind, (capability, *_) in simt.CARDS.items()
    ]
    return markdown(["card", "compute capability", *STEPS], rows)
