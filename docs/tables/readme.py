"""The tables of README.md: times of a few sizes, and accuracy of a published model."""

from __future__ import annotations

from typing import Any

from docs.tables.published import NEEDLES, ruler_means
from docs.tables.reading import load_rows, load_scores, method_of, score_of
from docs.tables.speed import ONE_CALL, default_steps, seconds_to_first_token
from docs.tables.writing import markdown, mean_of, named


def speed() -> str:
    """Decode steps and times to the first token of a few sizes."""
    steps, first = default_steps(), seconds_to_first_token()
    columns = ("cudnn", "fier", "quest", "pariskv", "logquant")
    rows = []
    for length, batch in ((8192, 1), (131072, 1), (131072, 8)):
        times = [steps[length, batch, method]["us"] for method in columns]
        rows.append([f"decode step, {length} tokens, batch {batch}, us", *(f"{us:.0f}" for us in times)])
    times = [first[ONE_CALL if method == "cudnn" else method, "prompt", 131072] for method in columns]
    rows.append(["first token, prompt of 131072, s", *(f"{seconds:.2f}" for seconds in times)])
    return markdown(["", "full, cuDNN", *(f"`{name}`" for name in columns[1:])], rows)


def quality() -> str:
    """Needles, RULER, GSM8K and perplexity of a published model."""
    needles = load_scores("eval_qwen")[NEEDLES]
    problems = load_scores("eval_qwen_gsm8k")["gsm8k"]
    texts = {(row["text"], row["length"], method_of(row["cache"])): row for row in load_rows("perplexity_qwen")}
    ruler: dict[str, Any] = {name: {"mean": mean} for name, mean in ruler_means(16384).items()}

    def right(scores: dict[str, Any], method: str, budget: int) -> str:
        return mean_of(score_of(scores, method, budget))

    rows = []
    for method in ("full", "fier", "pariskv", "quest", "freekv", "logquant", "snapkv"):
        row = texts["book", 16384, method]
        change = f"{row['perplexity']:.2f}" if method == "full" else f"{100 * (row['ratio'] - 1):+.1f} %"
        found = (right(needles, method, 256), right(ruler, method, 1024), right(problems, method, 128))
        cache = next(name for name in needles if method_of(name) == method)
        rows.append([named(cache).replace(f"`{cache.partition('@')[0]}`", f"`{method}`"), *found, change])
    head = ["cache", "needles, budget 256", "RULER, 1024", "GSM8K, 128", "perplexity, 1024"]
    return markdown(head, rows)
