"""The tables of docs/performance.md on where the time of drafts by a selection goes, from the files
of `benchmarks/draft_rounds.py` and of the part `selections` of `benchmarks/lossless.py`.
"""

from __future__ import annotations

from typing import Any

from docs.tables.reading import RESULTS, load_rows
from docs.tables.writing import markdown

LATER = "later draft"  # one that attends to what the first of its draft selected
STEPS = {
    "full": "`full`",
    "draft": "draft step that selects",
    LATER: "one after it",
    "verify 5": "verify 5",
    "verify 8": "verify 8",
}


def _rows(file: str, part: str) -> dict[str, dict[str, Any]]:
    """The rows of a part by what they measured; none before it has run."""
    if not (RESULTS / f"{file}.json").is_file():
        return {}
    return {row["method"]: row for row in load_rows(file) if row["part"] == part}


def _not_measured(command: str) -> str:
    return f"Not measured yet: `python benchmarks/{command}`.\n"


def _ms(us: float | None, floor: float | None = None) -> str:
    """Milliseconds, and those of the bytes."""
    if us is None:
        return ""
    return f"{us / 1e3:.2f}" + ("" if floor is None else f" ({floor / 1e3:.2f})")


# ------------------------------------------------------------------------------------ rounds


def _steps() -> dict[str, dict[str, Any]]:
    """The rows of the part `rounds`, and the mean of the draft steps that do not select: those of
    a selection, but the first.
    """
    rows = _rows("draft_rounds", "rounds")
    if "drafts" not in rows:
        return {}
    first = rows["draft"]
    together = rows["drafts"]

    def rest(whole: float, one: float) -> float:
        return max(whole - one, 0.0) / (together["together"] - 1)

    later = {
        kinds: {name: rest(us, first[kinds][name]) for name, us in together[kinds].items()}
        for kinds in ("kernels_us", "floor_us")
    }
    return rows | {LATER: {**later, "us": rest(together["us"], first["us"]), "tokens": 1}}


def round_parts() -> str:
    """Milliseconds of each step of a whole model by kind of kernel, and in brackets those that the
    bytes take which it must read.
    """
    rows = _steps()
    if not rows:
        return _not_measured("draft_rounds.py MODEL --text prose=book.txt --parts rounds")
    steps = [rows[name] for name in STEPS]
    body = []
    for kind in ("attention", "selection"):
        body.append(
            [kind, *(_ms(row["kernels_us"][kind], row["floor_us"][kind]) for row in steps)]
        )
    logits = [rows[f"logits of {row['tokens']}"] for row in steps]
    products = [
        _ms(
            row["kernels_us"]["products"] - head["us"],
            row["floor_us"]["products"] - head["floor_us"]["products"],
        )
        for row, head in zip(steps, logits, strict=True)
    ]
    body.append(["products of layers", *products])
    body.append(
        [
            "product of logits",
            *(_ms(head["us"], head["floor_us"]["products"]) for head in logits),
        ]
    )
    body.append(["other kernels", *(_ms(row["kernels_us"]["other kernels"]) for row in steps)])
    body.append(
        ["no kernel runs", *(_ms(row["us"] - sum(row["kernels_us"].values())) for row in steps)]
    )
    body.append(
        ["**whole**", *(_ms(row["us"], sum(row["floor_us"].values())) for row in steps)]
    )
    return markdown(["ms (of the bytes)", *STEPS.values()], body)


# ------------------------------------------------------------------------------------ forms


def forms() -> str:
    """The whole loop by methods and by the draft steps that attend to one selection."""
    rows = _rows("draft_forms", "forms")
    if not rows:
        return _not_measured("draft_rounds.py MODEL --text prose=book.txt --parts forms")
    by_method: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        if "times_full" in row:
            by_method.setdefault(name.partition(" x ")[2], []).append(row)
    body = []
    for method, found in by_method.items():
        cells = [f"{row['times_full']:.2f} ({row['tokens_per_step']:.2f})" for row in found]
        body.append([f"`{method}`", *cells])
    steps = [row["steps_per_selection"] for row in next(iter(by_method.values()))]
    titles = [f"{n} step{'s' if n > 1 else ''} a selection" for n in steps]
    return markdown(["draft", *titles], body)


# ------------------------------------------------------------------------------------ selections


def selections() -> str:
    """Drafts that select in each step beside those that read what the last verification selected."""
    rows = load_rows("lossless_selections")
    body = [
        [
            f"`{row['method']}`",
            f"{row['length']}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['acceptance']:.2f}".removeprefix("0"),
            f"{(row['index_bytes'] + row['selected_bytes']) / 1e6:.0f}",
            _ms(row.get("draft_us")),
            _ms(row.get("verify_us")),
        ]
        for row in rows
    ]
    titles = ["draft", "tokens", "tokens a step", "right", "MB of a draft step"]
    return markdown([*titles, "draft step, ms", "verification, ms"], body)
