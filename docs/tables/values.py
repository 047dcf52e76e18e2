"""Measured figures inside of sentences of README and docs/, from the files that hold them.

A figure stands between `<!-- value: NAME -->` and `<!-- /value -->`; NAME is one of VALUES, which
`python -m docs.tables` fills. `docs.tables.figures` finds those that are typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from docs.tables import guides, hybrid, performance, scaling
from docs.tables.claims import load_claims, read_cell
from docs.tables.reading import load_file, load_measured, load_results, load_rows, load_scores
from docs.tables.tpus import of_dense, steps_of
from docs.tables.writing import points, short, span

VALUE = re.compile(r"(<!-- value: (\w+) -->).*?(<!-- /value -->)")


def fill(text: str) -> str:
    """`text` with each figure from its file."""
    return VALUE.sub(lambda found: found[1] + VALUES[found[2]]() + found[3], text)


# ------------------------------------------------------------------------------------------------------------- README


def short_row() -> str:
    """The most tokens of one row at which no step of FIER is faster than one of `full`."""
    rows = {
        (row["cache"], row["length"]): row["tpot_ms"]
        for row in load_rows("end_to_end")
        if row["batch"] == 1 and row.get("status", "ok") == "ok"
    }
    lengths = sorted(length for cache, length in rows if cache == "fier")
    as_fast = [n for n in lengths if rows["full", n] <= rows["fier", n]]
    return f"{max(as_fast) // 1024}K"


# -------------------------------------------------------------------------------------------------------------- claims


def paris_gain(case: str, without: str) -> str:
    """Points of recall that ParisKV loses without a part of it."""
    found = load_measured("measure_paris_smollm2")
    return points(found[case]["recall"] - found[without]["recall"])


def page_recall(cell: str) -> str:
    """The recall of a row about pages that answers judge: of single tokens, pages or boxes."""
    rows = load_claims("fier")["rows"]
    (row,) = [row for row in rows if row["claim"].startswith("Pages scored by the mean")]
    (found,) = [read_cell(one) for one in row["cells"] if one["name"] == cell]
    return short(found.value, 3)


# ------------------------------------------------------------------------------------------------------------- methods


def mean_cosine(which: Callable[[list[float]], float]) -> str:
    """Of the layers' means of the cosine of adjacent queries, in the model of this package."""
    found = load_results("measure_queries")["cosine of adjacent queries"]
    return short(which(found["mean_by_layer"]))


def waiting(file: str) -> str:
    """Heads that wait for their own recall at tau = 0.8, of a hundred."""
    found = load_results(file)["cosine of adjacent queries"]
    return points(found["corrected_heads"]["0.8"])


def low_rank_loss(keys: str, which: Callable[[list[float]], float]) -> str:
    """How much larger the error with a basis of the first tokens is than with one of all."""
    found: dict[float, dict[str, float]] = {}
    for row in load_rows("low_rank"):
        if row["keys"] == keys:
            found.setdefault(row["share"], {})[row["basis"]] = row["error"]
    losses = [by["the first 1024 tokens"] - by["all tokens"] for by in found.values()]
    return short(which(losses))


def _coded_blocks() -> tuple[float, float, int]:
    """Milliseconds a token of the two blocks of FIER over codes, of which one had a flush, and
    their steps.
    """
    (row,) = [
        row
        for row in load_rows("turbo_end_to_end")
        if (row["cache"], row["length"], row["batch"]) == ("fier:turbo4", 32768, 8)
    ]
    return row["tpot_ms_min"], row["tpot_ms_max"], row["block"]


def flush_steps() -> str:
    """Steps that take as long as the flush of a block did."""
    without, with_flush, steps = _coded_blocks()
    return f"{(with_flush - without) * steps / without:.0f}"


def coded_questions() -> str:
    """Questions of GSM8K that were asked through caches of codes."""
    return f"{load_scores('eval_qwen_gsm8k_codes')['gsm8k']['full']['n']}"


def needles_found(cache: str) -> str:
    """How many of the needles a cache finds, in the model of this package."""
    (scores,) = load_scores("eval_decoded").values()
    return f"{scores[cache]['mean'] * scores[cache]['n']:.0f}"


# -------------------------------------------------------------------------------------------------------------- guides


def unlike_queries() -> str:
    """Per cent that a hot set adds to a step from the host, with independent queries."""
    rows = [row for row in load_rows("host_steps") if row["length"] == 131072]

    def us(method: str, **where: Any) -> float:
        own = [row for row in rows if row["method"] == method]
        (found,) = [row for row in own if all(row[k] == v for k, v in where.items())]
        return float(found["us"])

    added = [
        us(method, hot=8192, correlation=0.0) / us(method, where="host", hot=0) - 1
        for method in ("fier", "pariskv")
    ]
    return span(100 * min(added), 100 * max(added))


def shared_loss() -> str:
    """Per cent of perplexity that FIER loses with shared selections that nothing calibrated."""
    rows = load_rows("perplexity_shared_qwen")
    lost = [row["ratio"] - 1 for row in rows if row["cache"].startswith("fier:share=")]
    return span(100 * min(lost), 100 * max(lost))


def shared_score(file: str, cache: str) -> str:
    """The score of a small model with shared selections."""
    (scores,) = load_scores(file).values()
    return short(scores[cache]["mean"])


def alike_gain() -> str:
    """Per cent less that eight tokens take with queries as alike as those of a model."""
    rows = {
        (row["method"], row["alike"]): row["us"]
        for row in load_rows("decode_tokens")
        if row["tokens"] == 8
    }
    alike = [method for method, how in rows if how == 0.9]
    gains = [1 - rows[method, 0.9] / rows[method, 0.0] for method in alike]
    return span(100 * min(gains), 100 * max(gains))


# ------------------------------------------------------------------------------------------------------------- support

DMA_US = 0.03  # as `benchmarks/tpu_moves.py` prices one


def of_groups(preset: str, name: str) -> str:
    """The time of a step on a v5e that reads groups with a selected token, as a share of dense
    attention: "us" with those that a model touches, "us_least" or "us_most"."""
    (row,) = steps_of("v5e", (preset,))
    return short(row[name] / row["us"] * of_dense(row, "us"))


def tokens_alone() -> str:
    """The DMAs of a step's single tokens, keys and values, over dense attention's time."""
    (row,) = steps_of("v5e", ("fier",))
    dense_us = row["us"] / of_dense(row, "us")
    return f"{2 * 8 * 2048 * DMA_US / dense_us:.1f}"


def groups_touched(file: str, method: str) -> str:
    """Percent of groups of 128 tokens that hold one of the fewest selected tokens measured."""
    rows = [row for row in load_rows(file) if (row["method"], row["size"]) == (method, 128)]
    fewest = min(rows, key=lambda row: row["selected"])
    return f"{100 * fewest['touched'] / fewest['groups']:.0f}"


def groups_for_half() -> str:
    """Percent of groups that a step of FIER could touch in half of dense attention's time."""
    (row,) = steps_of("v5e", ("fier",))
    half = row["us"] / of_dense(row, "us") / 2
    least, most = 16, 1024  # groups, of 2048 selected tokens among 131072
    more = (half - row["us_least"]) / (row["us_most"] - row["us_least"])
    return f"{100 * (least + more * (most - least)) / most:.0f}"


def quest_on_tpu7x() -> str:
    """The time of a step of `quest` with one row, as a share of dense attention."""
    (row,) = steps_of("tpu7x", ("quest",))
    return short(of_dense(row, "us"))


def score_bundles(chip: str) -> str:
    """Thousands of bundles that FIER's scores take on a chip."""
    kernels = load_file("tpu")["kernels"]["rows"]
    (row,) = [row for row in kernels if (row["chip"], row["name"]) == (chip, "score_1bit")]
    return f"{round(row['bundles'] * row['steps'], -3):,}"


def pages_of_dense(chips: tuple[str, ...], which: Callable[[list[float]], float]) -> str:
    """The time of steps that read pages, of one row, as a share of dense attention."""
    rows = [row for chip in chips for row in steps_of(chip, ("fier:page=32", "quest"))]
    return short(which([of_dense(row, "us") for row in rows]))


def of_many(chips: tuple[str, ...], presets: tuple[str, ...]) -> str:
    """The longest time of steps of eight rows, as a share of dense attention."""
    rows = [row for chip in chips for row in steps_of(chip, presets, rows=8)]
    return short(max(of_dense(row, "us") for row in rows))


def idle_drafts() -> str:
    """The least speed of drafts beside `full` where the cache is too short for them."""
    rows = [row for row in load_rows("lossless_8192") if row["self_draft"]["idle"]]
    return short(min(row["times_full"] for row in rows))


VALUES: dict[str, Callable[[], str]] = {
    **performance.VALUES,
    **scaling.VALUES,
    "short_row": short_row,
    "tiers_gain": partial(paris_gain, "as published", "plain votes"),
    "alpha_gain": partial(paris_gain, "as published", "no alpha-correction"),
    "single_tokens": partial(page_recall, "FIER"),
    "pages_by_mean": partial(page_recall, "pages by mean 1-bit score"),
    "pages_by_box": partial(page_recall, "Quest"),
    "rotation_gain": partial(paris_gain, "as published", "not rotated"),
    "reranked_rotation_gain": partial(paris_gain, "candidates 1", "all reranked, not rotated"),
    "least_cosine": partial(mean_cosine, min),
    "largest_cosine": partial(mean_cosine, max),
    "heads_waiting": partial(waiting, "measure_queries"),
    "heads_waiting_qwen": partial(waiting, "measure_queries_qwen"),
    "basis_loss_before_rope": partial(low_rank_loss, "before RoPE", max),
    "least_basis_loss": partial(low_rank_loss, "as the cache gets them", min),
    "largest_basis_loss": partial(low_rank_loss, "as the cache gets them", max),
    "flush_steps": flush_steps,
    "block_without_flush": lambda: f"{_coded_blocks()[0]:.1f}",
    "block_with_flush": lambda: f"{_coded_blocks()[1]:.1f}",
    "coded_questions": coded_questions,
    "fier_needles": partial(needles_found, "fier@64"),
    "tova_needles": partial(needles_found, "tova@256"),
    "unlike_queries": unlike_queries,
    "shared_loss": shared_loss,
    "smollm2_selecting": partial(shared_score, "eval_shared", "fier@225"),
    "smollm2_calibrated": partial(shared_score, "eval_shared", "fier:anchors=fier4.json@225"),
    "small_sharing": partial(shared_score, "eval_shared_small", "fier:share=4@64"),
    "small_selecting": partial(shared_score, "eval_shared_small", "fier@64"),
    "alike_gain": alike_gain,
    "tokens_alone": tokens_alone,
    "groups_of_fier": partial(groups_touched, "touched", "fier"),
    "groups_of_pariskv": partial(groups_touched, "touched", "pariskv"),
    "groups_of_smollm2": partial(groups_touched, "touched_smollm2", "fier"),
    "fier_on_v5e": partial(of_groups, "fier", "us"),
    "pariskv_on_v5e": partial(of_groups, "pariskv", "us"),
    "fier_side_by_side": partial(of_groups, "fier", "us_least"),
    "fier_everywhere": partial(of_groups, "fier", "us_most"),
    "groups_for_half": groups_for_half,
    "pages_of_many": partial(of_many, ("v5e",), ("fier:page=32", "quest")),
    "fier_of_many": partial(of_many, ("v5e",), ("fier",)),
    "fier_of_many_on_tpu7x": partial(of_many, ("tpu7x",), ("fier",)),
    "quest_of_many_on_v6e": partial(of_many, ("v6e",), ("quest",)),
    "quest_of_many_on_tpu7x": partial(of_many, ("tpu7x",), ("quest",)),
    "pages_at_most": partial(pages_of_dense, ("v5e", "v6e"), max),
    "quest_on_tpu7x": quest_on_tpu7x,
    "score_bundles_v6e": partial(score_bundles, "v6e"),
    "idle_drafts": idle_drafts,
    "lossless_one_row": guides.lossless_one_row,
    "hybrid_commands": hybrid.commands,
    "score_bundles_tpu7x": partial(score_bundles, "tpu7x"),
}
