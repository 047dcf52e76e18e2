"""The tables of README.md: times of a few sizes, and accuracy of a published model."""

from __future__ import annotations

from typing import Any

from docs.tables.commands import as_title, titled
from docs.tables.published import NEEDLES, ruler_means
from docs.tables.reading import (
    load_file,
    load_rows,
    load_scores,
    method_of,
    of_its_paper,
    score_of,
)
from docs.tables.speed import default_steps
from docs.tables.writing import markdown, mean_of
from kvjax.kernels_pallas import simt

METHODS = ("full", "fier", "quest", "pariskv", "logquant")
QUALITY = ("full", "fier", "pariskv", "quest", "freekv", "logquant", "snapkv")


def headline() -> str:
    """What a selection saves at one size, in a sentence."""
    steps = default_steps()
    size = (131072, 1)
    fier, full, cudnn = (steps[*size, name]["us"] for name in ("fier", "full", "cudnn"))
    return (
        f"Attention in a decode step over {size[0]} cached tokens is **{full / fier:.1f} times as fast** with\n"
        f"FIER as over all of them: {fier:.0f} µs instead of {full:.0f} (cuDNN: {cudnn:.0f}), in a layer of\n"
        "Llama-3.1-8B in bf16 on one H200. FIER finds 2048 tokens by a 1-bit index and reads those.\n"
    )


def speed() -> str:
    """Decode steps by card and size, and the cards on which nothing was measured."""
    file, rows, days = load_file("targets"), [], set()

    def add(what: str, found: list[dict[str, Any]]) -> None:
        days.update(row.get("date", file["date"])[:10] for row in found)
        rows.append([what, *(f"{row['us']:.0f}" for row in found)])

    steps = default_steps()
    for length, batch in ((32768, 1), (131072, 1), (131072, 8)):
        add(f"H200, {length} x {batch}", [steps[length, batch, name] for name in METHODS])
    found = {
        (row["form"], row["what"]): row
        for row in file["rows"]
        if (row["length"], row["batch"]) == (131072, 1)
    }
    for form, card in (
        ("here", "H100"),
        ("8.9", "H100 by the kernels for 8.9"),
    ):
        add(f"{card}, 131072 x 1", [found[form, f"step {name}"] for name in METHODS])
    others = ", ".join(one for one in simt.ARCHITECTURES if one != "9.0")
    table = markdown(["GPU, tokens x rows", *(f"`{name}`" for name in METHODS)], rows)
    return (
        f"{table}\nMeasured from {min(days)} to {max(days)}. Compute capabilities {others}: compiled and simulated, "
        "not measured.\n"
    )


def quality() -> str:
    """Needles, RULER, GSM8K and perplexity of a published model."""
    needles, papers = (
        load_scores("eval_qwen")[NEEDLES],
        load_scores("eval_qwen_papers")[NEEDLES],
    )
    problems = load_scores("eval_qwen_gsm8k")["gsm8k"]
    texts = {
        (row["text"], row["length"], method_of(row["cache"])): row
        for row in load_rows("perplexity_qwen")
    }
    ruler: dict[str, Any] = {name: {"mean": mean} for name, mean in ruler_means(16384).items()}

    def right(scores: dict[str, Any], method: str, budget: int) -> str:
        return mean_of(score_of(scores, method, budget))

    rows = []
    for method in QUALITY:
        row = texts["book", 16384, method]
        change = (
            f"{row['perplexity']:.2f}"
            if method == "full"
            else f"{100 * (row['ratio'] - 1):+.1f} %"
        )
        of_paper = {name: score for name, score in papers.items() if of_its_paper(name)}
        found = (
            right(needles, method, 1024),
            right(of_paper, method, 1024),
            right(ruler, method, 1024),
        )
        rows.append([f"`{method}`", *found, right(problems, method, 128), change])
    head = ["cache", "needles", "paper's settings", "RULER", "GSM8K, 128", "perplexity"]
    book = load_file("perplexity_qwen")["texts"]["book"]
    return (
        f"{markdown(head, rows)}\nNeedles are in {titled('eval_qwen')}, those at papers' settings in "
        f"{titled('eval_qwen_papers')}, so\nonly `full` compares the two; RULER is in "
        f"{titled('eval_qwen_ruler')}, perplexity of {as_title(book)}.\n"
    )
