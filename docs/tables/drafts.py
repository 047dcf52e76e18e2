"""The tables of docs/performance.md on where the time of drafts by a selection goes, from the files
of `benchmarks/draft_rounds.py` and of the part `selections` of `benchmarks/lossless.py`.
"""

from __future__ import annotations

from typing import Any

from docs.tables.reading import RESULTS, load_rows
from docs.tables.writing import markdown

STEPS = {
    "full": "`full`",
    "draft": "draft step",
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


def round_parts() -> str:
    """Milliseconds of each step of a whole model by kind of kernel, and in brackets those that the
    bytes take which it must read.
    """
    rows = _rows("draft_rounds", "rounds")
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


def loop_parts() -> str:
    """Device time of a whole loop of drafts by kind of kernel, and the time of the bytes that its
    steps must read.
    """
    rows = _rows("draft_rounds", "rounds")
    if "rounds" not in rows.get("loop", {}):
        return _not_measured("draft_rounds.py MODEL --text prose=book.txt --parts rounds")
    loop = rows["loop"]
    counts = {"verify 5": loop["rounds"], "draft": loop["draft_steps"]}

    def of_bytes(kind: str) -> float:
        return sum(n * rows[name]["floor_us"].get(kind, 0.0) for name, n in counts.items())

    body = [
        [kind, _ms(us), _ms(of_bytes(kind)) if of_bytes(kind) else ""]
        for kind, us in loop["kernels_us"].items()
    ]
    least = sum(map(of_bytes, loop["kernels_us"]))
    body.append(["all kernels", _ms(sum(loop["kernels_us"].values())), _ms(least)])
    body.append(["**the loop**, in which kernels overlap", _ms(loop["us"]), ""])
    full = loop["new"] * sum(rows["full"]["floor_us"].values())
    body.append([f"{loop['new']} steps of `full`", "", _ms(full)])
    return markdown(["kernels", "ms", "ms of the bytes"], body)


def loop_value(name: str) -> str:
    """A count of the loop: its `rounds` or its `draft_steps`."""
    return f"{_rows('draft_rounds', 'rounds')['loop'][name]:.0f}"


def active_rows() -> str:
    """Rows that take part in a round of a loop, per cent: the others have ended."""
    loop = _rows("draft_rounds", "rounds")["loop"]
    return f"{100 * loop['steps'] / (loop['rounds'] * loop['batch']):.0f}"


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
