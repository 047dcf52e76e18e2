"""Accuracy of the methods on docs/performance.md: needles of the package's own model, and
perplexity of texts.
"""

from __future__ import annotations

from docs.tables.commands import with_text
from docs.tables.reading import load_results, load_rows, load_scores
from docs.tables.writing import markdown, mean_of, named, perplexity_change, short
from kvjax import CacheSpec
from kvjax.policies import PerLayer
from kvjax.presets import parse


def decoded_needles() -> str:
    """Needles found in 2048 tokens by the budget, with the question fed through the cache, and
    the tokens read.
    """
    (scores,) = load_scores("eval_decoded").values()
    budgets, rows = (64, 256), []
    for name in dict.fromkeys(cache.partition("@")[0] for cache in scores):
        found = [scores.get(f"{name}@{budget}") for budget in budgets]
        if name in scores:  # without a budget
            found = [scores[name]] * len(budgets)
        right = map(mean_of, found)
        read = (f"{score['tokens_read']:.0f}" if score else "" for score in found)
        dense = next(score for score in found if score)["dense_layers"]
        cells = [cell for pair in zip(right, read, strict=True) for cell in pair]
        method = name.removesuffix(":dense_layers=0")
        rows.append([named(method), "" if dense is None else str(dense), *cells])
    head = (f"{what} {n}" for n in budgets for what in ("budget", "tokens read at"))
    table = markdown(["cache", "dense layers", *head], rows)
    one = scores["tova@256"]
    return (
        f"{table}\nWith {one['n']} samples, {mean_of(one)} means between {short(one['low'])} and "
        f"{short(one['high'])}.\n"
    )


def needles() -> str:
    lengths, budgets = (4096, 8192, 16384), (None, 16, 32, 64, 128, 256, 512)
    scores = load_scores("eval")
    rows = []
    for method in dict.fromkeys(
        cache.partition("@")[0] for cache in scores["1 of 8 needles at 8192"]
    ):
        cells = [named(method)]
        for budget in budgets:
            name = method if budget is None else f"{method}@{budget}"
            found = [scores[f"1 of 8 needles at {n}"].get(name) for n in lengths]
            cells.append(" ".join(short(score["mean"]) for score in found if score))
        rows.append(cells)
    return with_text(markdown(["cache", "all", *map(str, budgets[1:])], rows), "eval")


def papers() -> str:
    scores = load_scores("eval_papers")["1 of 8 needles at 8192"]
    budgets = (16, 32, 64, 128, 256)
    rows = []
    for cache in ("pariskv:sink=4,local=8", "freekv:sink=0,local=32"):
        found = (scores.get(f"{cache}@{budget}") for budget in budgets)
        rows.append([named(cache), "", *map(mean_of, found)])
    for cache in ("logquant:bits=2", "kivi:bits=2"):
        rows.append([named(cache), short(scores[cache]["mean"]), *[""] * len(budgets)])
    return with_text(markdown(["cache", "all", *map(str, budgets)], rows), "eval_papers")


def group_rules() -> str:
    scores = load_scores("eval_pools")
    tasks = ("1 of 8 needles at 8192", "pass key at 8192")
    rows = []
    for rule in ("per_head", "max_softmax", "mean_softmax", "mean_query", "mean_score"):
        cells = [
            short(scores[task][f"{name}:group_reduce={rule}@64"]["mean"])
            for name in ("fier", "quest")
            for task in tasks
        ]
        rows.append([f"`{rule}`", *cells])
    head = ("`fier`, needles", "`fier`, pass key", "`quest`, needles", "`quest`, pass key")
    return with_text(markdown(["rule", *head], rows), "eval_pools")


def equal_perplexities() -> str:
    """Rows at equal dense layers: change of the perplexity with its standard error, and mean
    tokens read.
    """
    measured = load_rows("perplexity_equal")
    lengths = list(dict.fromkeys(row["length"] for row in measured))
    found = {(row["dense_layers"], row["cache"], row["length"]): row for row in measured}
    rows = []
    for dense, cache in dict.fromkeys((row["dense_layers"], row["cache"]) for row in measured):
        cells = []
        for length in lengths:
            row = found.get((dense, cache, length))
            if row is None:
                cells += ["", ""]
                continue
            change = perplexity_change(row)
            cells += [
                f"{row['perplexity']:.2f}" if cache == "full" else change,
                f"{row['tokens_read']:.0f}",
            ]
        rows.append([named(cache), "all" if cache == "full" else str(dense), *cells])
    head = [part for length in lengths for part in (str(length), "read")]
    return markdown(["cache", "dense layers", *head], rows)


def method_perplexities() -> str:
    """Methods at one budget, some at another, without dense layers: change of the perplexity
    and mean tokens read.
    """
    full, *measured = load_rows("perplexity_methods") + load_rows("perplexity_bytes")
    rows = [["`full`", "", f"{full['perplexity']:.2f}", f"{full['tokens_read']:.0f}"]]
    for row in sorted(
        (row for row in measured if row["cache"] != "full"), key=lambda row: row["ratio"]
    ):
        change = perplexity_change(row)
        if row["ratio"] > 10:
            change = f"{row['ratio']:.0f} times"
        budget = "" if row["budget"] is None else str(row["budget"])
        rows.append([named(row["cache"]), budget, change, f"{row['tokens_read']:.0f}"])
    return markdown(["cache", "budget", "perplexity", "tokens read"], rows)


def turbo_codes() -> str:
    """Selections of one budget by selector and store, with the bytes of a token in a layer."""
    rows = []
    for row in load_rows("turbo_codes"):
        shares = [short(row[key], 3) for key in ("head_recall", "mass", "error")]
        rows.append(
            [
                f"`{row['selector']}`",
                f"`{row['store']}`",
                f"{row['held']:.0f}",
                f"{row['index']:.0f}",
                *shares,
            ]
        )
    return markdown(
        ["selector", "store", "bytes held", "of them scored", "recall", "mass", "error"], rows
    )


def coded_quality() -> str:
    """Perplexity, answers and needles over codes of a few bits against `full`, and the bytes of
    a token in a KV head, with its index."""
    (sums,), (needles,) = (
        load_results(name).values()
        for name in ("eval_qwen_gsm8k_codes", "eval_qwen_codes_needles")
    )
    spec = CacheSpec(batch=1, q_heads=6, kv_heads=1, head_dim=128, capacity=16768)
    rows = []
    for row in load_rows("perplexity_codes_qwen"):
        policy = parse(row["cache"])
        size = (policy.rest if isinstance(policy, PerLayer) else policy).bytes_per_token(spec)
        change = (
            ""
            if row["cache"] == "full"
            else f"{100 * (row['ratio'] - 1):+.1f} ± {100 * row['ratio_stderr']:.1f} %"
        )
        line = [f"`{row['cache']}`", f"{size:.0f}", change, f"{row['tokens_read']:.0f}"]
        for found in (sums, needles):
            score = found["caches"].get(row["cache"]) or next(
                (
                    r
                    for name, r in found["caches"].items()
                    if name.partition("@")[0] == row["cache"]
                ),
                None,
            )
            line.append("" if score is None else short(score["mean"]) if "difference" not in score else
                        f"{100 * score['difference']:+.1f} ± {100 * score['difference_stderr']:.1f}")  # fmt: skip
        rows.append(line)
    return markdown(
        ["cache", "bytes", "perplexity", "tokens read", "GSM8K, points", "needles, points"],
        rows,
    )


def evictors() -> str:
    """Caches by the perplexity of the model's own answers: its change by quarter of the answer,
    bytes and needles.
    """
    full, *measured = {
        row["cache"]: row for name in ("evictors", "evictors_values") for row in load_rows(name)
    }.values()
    rows = [
        [
            "`full`",
            f"{full['held'] / 1e3:.0f}",
            f"{full['perplexity']:.2f}",
            "",
            short(full["needles"]),
        ]
    ]
    for row in sorted(measured, key=lambda row: row["perplexity"]):
        first, *_, last = (f"{100 * (ratio - 1):+.0f} %" for ratio in row["ratio_by_quarter"])
        rows.append(
            [
                f"`{row['cache']}`",
                f"{row['held'] / 1e3:.0f}",
                first,
                last,
                short(row["needles"]),
            ]
        )
    return markdown(["cache", "kB held", "first quarter", "last quarter", "needles"], rows)


def perplexities() -> str:
    measured = load_rows("perplexity")
    rows = []
    for cache in dict.fromkeys(row["cache"] for row in measured):
        own = [row for row in measured if row["cache"] == cache]
        told = (
            f"{x['perplexity']:.2f}" if cache == "full" else f"{100 * (x['ratio'] - 1):+.1f} %"
            for x in own
        )
        rows.append([named(cache), *told])
    lengths = dict.fromkeys(row["length"] for row in measured)
    return markdown(["cache", *map(str, lengths)], rows)


def tokens_read() -> str:
    """Mean tokens read of the table of perplexities: the dense layers count too."""
    measured = load_rows("perplexity")
    rows = []
    for cache in dict.fromkeys(row["cache"] for row in measured):
        own = [row for row in measured if row["cache"] == cache]
        rows.append([named(cache), *(f"{row['attended']:.0f}" for row in own)])
    return markdown(
        ["cache", *map(str, dict.fromkeys(row["length"] for row in measured))], rows
    )
