"""Tables of docs/beside.md: other libraries' kernels, and kvpress's presses, beside kvjax's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from docs.tables.published import NEEDLES
from docs.tables.reading import RESULTS, load_scores, score_of
from docs.tables.writing import markdown, short
from kvjax.evaluate.curves import Axis, draw, evenly

NOT_MEASURED = "not measured"
WORKS = {  # as `benchmarks/beside/cases.py` names them
    "step of a method": "A decode step that selects",
    "attention to all tokens": "A decode step over all tokens",
    "attention to a selection": "Attention to a selection of 2048 tokens",
    "top-k of scores": "The 2048 largest of all scores",
    "attention in a prompt": "Causal attention of a prompt",
}
LIBRARIES = (
    "kvjax",
    "jax",
    "torch",
    "flashinfer-python",
    "amass-kv",
    "flash-attn3-jax",
    "tokamax",
)
OF_WORK = {
    "step of a method": ("kvjax", "amass-kv"),
    "attention to all tokens": (
        "kvjax",
        "jax",
        "torch",
        "flashinfer-python",
        "flash-attn3-jax",
    ),
    "attention to a selection": ("kvjax", "flashinfer-python", "amass-kv"),
    "top-k of scores": ("kvjax", "jax", "torch", "flashinfer-python"),
    "attention in a prompt": ("kvjax", "jax", "flash-attn3-jax", "tokamax"),
}
BATCHES = (1, 8)


def _load(name: str) -> dict[str, Any]:
    """A file of results; empty before a run has written it."""
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    return found


def peers() -> str:
    """A table for each work: the fastest first, then the libraries without a measurement."""
    rows = _load("peers")["rows"]
    parts = []
    for work, title in WORKS.items():
        own = [row for row in rows if row["work"] == work]
        batches = (1,) if work == "attention in a prompt" else BATCHES
        names = sorted({(row["library"], row["name"]) for row in own}, key=_first_us(own))
        body = [
            [name, *(_us(own, library, name, batch) for batch in batches), f"`{library}`"]
            for library, name in names
        ]
        missing = [one for one in OF_WORK[work] if one not in {row["library"] for row in own}]
        body += [["", *[NOT_MEASURED] * len(batches), f"`{one}`"] for one in missing]
        heads = [f"{batch} row{'s' if batch > 1 else ''}, us" for batch in batches]
        parts.append(f"**{title}**\n\n" + markdown(["", *heads, "package"], body))
    return "\n".join(parts)


def peers_ahead() -> str:
    """Where other libraries are faster than the fastest of kvjax; a line for each such case."""
    lines = [
        line
        for work, title in WORKS.items()
        for batch in BATCHES
        if (line := _ahead(work, title, batch))
    ]
    return "\n".join(lines or ["- Nowhere among the rows below."]) + "\n"


def _ahead(work: str, title: str, batch: int) -> str:
    """Who is faster than kvjax, from the fastest; "" if nobody is."""
    rows = [
        row for row in _load("peers")["rows"] if (row["work"], row["batch"]) == (work, batch)
    ]
    ours = min((row["us"] for row in rows if row["library"] == "kvjax"), default=0.0)
    faster = sorted((row["us"], row["name"]) for row in rows if row["us"] < ours)
    if not faster:
        return ""
    named = ", ".join(f"{name} {us:.1f} us" for us, name in faster)
    return f"- {title}, {batch} row{'s' if batch > 1 else ''}: {named}; kvjax {ours:.1f}."


def _first_us(rows: Sequence[dict[str, Any]]) -> Any:
    def us(named: tuple[str, str]) -> float:
        return min(row["us"] for row in rows if (row["library"], row["name"]) == named)

    return us


def _us(rows: Sequence[dict[str, Any]], library: str, name: str, batch: int) -> str:
    for row in rows:
        if (row["library"], row["name"], row["batch"]) == (library, name, batch):
            graph = row.get("graph_us")
            return f"{row['us']:.1f}" + (f" (graph {graph:.1f})" if graph else "")
    return NOT_MEASURED


def peers_run() -> str:
    """Each library: version, calls and settings; or why it was not run."""
    found = _load("peers")
    body = []
    for library in LIBRARIES:
        own = [row for row in found["rows"] if row["library"] == library]
        versions = {row["packages"][library] for row in own} | {""}
        calls = dict.fromkeys(
            f"`{row['call']}`" + (f": {row['setting']}" if row["setting"] else "")
            for row in own
        )
        why = found.get("not_run", {}).get(library, {}).get("why", "")
        said = "; ".join(calls) or NOT_MEASURED
        body.append(
            [f"`{library}`", max(versions), said + (f". Not run: {why}" if why else "")]
        )
    return markdown(["package", "version", "calls"], body, numbers=False)


def presses() -> str:
    """Scores of the shipped model at equal budgets, the best first."""
    return _scores_at_budgets("presses")


def presses_qwen() -> str:
    """Scores of Qwen2.5-Coder-1.5B at equal budgets, the best first, and tokens a second."""
    return _scores_at_budgets("presses_qwen")


def _scores_at_budgets(file: str) -> str:
    rows = _load(file)["rows"]
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    named = dict.fromkeys((row["library"], row["method"]) for row in rows)
    scores = {(row["library"], row["method"], row["budget"]): row["score"] for row in rows}
    memory = {(row["library"], row["method"]): row["memory"] for row in rows}

    def shown(one: tuple[str, str], budget: int) -> str:
        score = scores.get((*one, budget), scores.get((*one, None)))
        return "" if score is None else short(score)

    order = sorted(named, key=lambda one: [shown(one, budget) for budget in budgets])[::-1]
    body = [
        [f"`{method}`", library, memory[library, method]]
        + [shown((library, method), budget) for budget in budgets]
        for library, method in order
    ]
    if not body:
        body = [["", "kvpress, kvjax", NOT_MEASURED]]
    titles = ["method", "library", "keeps", *(f"budget {budget}" for budget in budgets)]
    speeds = {(row["library"], row["method"]): row["tokens_per_second"] for row in rows}
    if any(speeds.values()):
        titles.append("tokens a second")
        for line, one in zip(body, order, strict=True):
            line.append(f"{speeds[one]:.0f}")
    return markdown(titles, body)


def presses_about() -> str:
    """One sentence: the task, the sample and where it ran."""
    return _about("presses")


def presses_qwen_about() -> str:
    """The same of Qwen2.5-Coder-1.5B."""
    return _about("presses_qwen")


def _about(file: str) -> str:
    rows = _load(file)["rows"]
    if not rows:
        return f"{NOT_MEASURED.capitalize()}: `python benchmarks/presses.py`.\n"
    one = rows[0]
    where = "a CPU" if one["backend"] == "cpu" else f"one {one['device']}"
    versions = {row["library"]: row["version"] for row in rows}
    return (
        f"{one['task']}, n = {one['n']}, `{one['model']}`, kvpress {versions.get('kvpress', '-')}, "
        f"on {where}, {one['date'][:10]}.\n"
    )


def products() -> str:
    """Products of chosen experts by way, in a layer."""
    rows = _load("moe_products")["rows"]
    body = [
        [
            row["shape"],
            f"`{row['product']}`",
            str(row["batch"]),
            f"{row['us']:.1f}" if "us" in row else NOT_MEASURED,
            f"{row['times_floor']:.2f}" if "us" in row else row.get("why", ""),
        ]
        for row in sorted(rows, key=lambda row: (row["shape"], row.get("us", float("inf"))))
    ]
    if not body:
        body = [["qwen3-moe, gpt-oss", "all", "1", NOT_MEASURED, ""]]
    return markdown(["shape", "product", "rows", "us a layer", "times the floor"], body)


# -------------------------------------------------------------------------------------------------------- pictures


def same_text() -> str:
    """Tokens a second of a whole 8B that writes the text of full attention, by text: derived from
    measured steps of a few layers and the share of drafts that was right.
    """
    rows = [row for row in _load("lossless")["rows"] if row["part"] == "steps"]
    curves: dict[str, list[tuple[float, float]]] = {}
    for place, row in enumerate(rows):
        full = 1e3 * row["batch"] / row["derived"]["full_tpot_ms"]
        curves.setdefault("full", []).append((place, full))
        for text, times in row["derived"]["times_full"].items():
            if not text.startswith("each token"):
                curves.setdefault(text, []).append((place, full * times))
    cells = {float(i): f"{row['length']} x {row['batch']}" for i, row in enumerate(rows)}
    return draw(
        curves,
        Axis(-0.3, len(rows) - 0.7, cells),
        evenly(500 * math.ceil(max(y for of in curves.values() for _, y in of) / 500), 5),
        title="Tokens a second of an 8B, the text of full attention",
        x_label=f"tokens x rows; derived from steps on one {_load('lossless')['device']}",
        y_label="tokens a second of all rows",
    )


BUDGET = 2048  # tokens, of the timed steps and of the scores


def needles_by_time() -> str:
    """Share of needles found by microseconds of a step, of each method and library of which both
    were measured. A library that attends to all tokens computes what `full` does, and finds as many.
    """
    scores = load_scores("eval_qwen")[NEEDLES]
    found: dict[str, list[tuple[float, float]]] = {}
    for row in _load("peers")["rows"]:
        if row["batch"] != 1:
            continue
        method = row["name"].removeprefix("kvjax ")
        if row["work"] == "attention to all tokens":
            found[method] = [(row["us"], scores["full"]["mean"])]
        elif row["work"] == "step of a method" and row["library"] == "kvjax":
            found[method] = [(row["us"], score_of(scores, method, BUDGET)["mean"])]
    marks = [0.9, 0.92, 0.94, 0.96, 0.98, 1.0]
    return draw(
        found,
        evenly(150, 6),
        Axis(marks[0], marks[-1], {mark: f"{mark:.2f}" for mark in marks}),
        title=f"Needles at a budget of {BUDGET}, by the time of a step",
        x_label="microseconds of a step over 131072 tokens, NVIDIA H200",
        y_label=f"share found in 16384 tokens, n = {scores['full']['n']}, Qwen2.5-Coder-1.5B",
    )


PICTURES: dict[str, Callable[[], str]] = {
    "beside_needles": needles_by_time,
    "beside_same_text": same_text,
}
