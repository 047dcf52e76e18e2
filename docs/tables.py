"""Writes the measured tables and the picture of README.md and docs/ from benchmarks/results: `python -m docs.tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this module, listed in TABLES.
The suite checks that a run would change nothing, so no measured number is typed by hand.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from kvjax.evaluate.plots import COLOURS
from kvjax.kernels_pallas.score import score_pages
from kvjax.kernels_pallas.select import select_4bit
from kvjax.presets import REGISTRY
from kvjax.spec import CacheSpec

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PICTURE = ROOT / "docs" / "decode_step.svg"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

STEP_METHODS = ("cudnn", "full", "fier", "quest", "pariskv", "logquant")
CACHES = {"cudnn": "full attention by cuDNN"} | {
    name: f"`{name}`" for name in ("full", "fier", "quest", "pariskv", "freekv", "freekv:tau=-1", "logquant")
}
ONE_CALL = "floor: one cuDNN call"


def load_rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def load_scores(name: str) -> dict[str, dict[str, Any]]:
    """Task -> cache -> score."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return {task: result["caches"] for task, result in found.items()}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table whose first column is text, and the others numbers unless said otherwise."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def short(share: float, digits: int = 2) -> str:
    """A share as README shows it: .95, 1.00."""
    return f"{share:.{digits}f}".removeprefix("0")


# --------------------------------------------------------------------------------------------------------------- README


def speed() -> str:
    """Decode steps and times to the first token of a few sizes."""
    steps, first = _default_steps(), _first_tokens()
    columns = ("cudnn", "fier", "quest", "pariskv", "logquant")
    rows = []
    for length, batch in ((8192, 1), (131072, 1), (131072, 8)):
        times = [steps[length, batch, method]["us"] for method in columns]
        rows.append([f"decode step, {length} tokens, batch {batch}, us", *(f"{us:.0f}" for us in times)])
    for tokens in (65536, 131072):
        times = [first[ONE_CALL if method == "cudnn" else method, "prompt", tokens] for method in columns]
        rows.append([f"first token, prompt of {tokens}, s", *(f"{seconds:.2f}" for seconds in times)])
    return markdown(["", "full, cuDNN", *(f"`{name}`" for name in columns[1:])], rows)


def quality() -> str:
    """Needles, GSM8K and perplexity of a published model."""
    needles = load_scores("eval_qwen")["1 of 8 needles at 16384, question decoded"]
    problems = load_scores("eval_qwen_gsm8k")["gsm8k"]
    book = {_method_of(row["cache"]): row for row in load_rows("perplexity_qwen") if row["text"] == "book"}

    def right(scores: dict[str, Any], method: str, budget: int) -> str:
        score = _score_of(scores, method, budget)
        return short(score["mean"]) if score else ""

    rows = []
    for method in ("full", "fier", "pariskv", "quest", "freekv", "logquant", "snapkv", "streaming_llm"):
        row = book[method]
        change = f"{row['perplexity']:.2f}" if method == "full" else f"{100 * (row['ratio'] - 1):+.1f} %"
        solved = "" if method == "pariskv" else right(problems, method, 128)  # it attends to all of so short a prompt
        rows.append([f"`{method}`", right(needles, method, 256), right(needles, method, 1024), solved, change])
    return markdown(["cache", "needles, budget 256", "needles, 1024", "GSM8K, 128", "perplexity, 1024"], rows)


def _method_of(cache: str) -> str:
    """quest of quest:page=32@256."""
    return cache.partition("@")[0].partition(":")[0]


def _score_of(scores: dict[str, Any], method: str, budget: int) -> dict[str, Any] | None:
    """The score of a method at a budget, or of one that has no budget, whatever its settings."""
    found = {name.partition("@")[2]: score for name, score in scores.items() if _method_of(name) == method}
    return found.get(str(budget), found.get(""))


def decoded_needles() -> str:
    """Needles found in 2048 tokens by the budget, the question fed through the cache, with what a step read."""
    (scores,) = load_scores("eval_decoded").values()
    budgets, rows = (64, 256), []
    for name in dict.fromkeys(cache.partition("@")[0] for cache in scores):
        found = [scores.get(f"{name}@{budget}") for budget in budgets]
        if name in scores:  # without a budget
            found = [scores[name]] * len(budgets)
        right = (short(score["mean"]) if score else "" for score in found)
        read = (f"{score['tokens_read']:.0f}" if score else "" for score in found)
        dense = next(score for score in found if score)["dense_layers"]
        cells = [cell for pair in zip(right, read, strict=True) for cell in pair]
        method = name.removesuffix(":dense_layers=0")
        rows.append([f"`{method}`", "" if dense is None else str(dense), *cells])
    head = (f"{what} {n}" for n in budgets for what in ("budget", "tokens read at"))
    return markdown(["cache", "dense layers", *head], rows)


def methods() -> str:
    """The registry, with the bytes that a stored token takes in a layer of Llama-3.1-8B."""
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072)
    rows = [
        [f"[`{p.name}`](methods.md#{p.name})", p.keeps, f"{p.policy().bytes_per_token(spec):,.0f}", p.paper]
        for p in REGISTRY.values()
    ]
    return markdown(["name", "what it keeps", "bytes a token", "paper"], rows, numbers=False)


# ---------------------------------------------------------------------------------------------------------------- speed


def _default_steps() -> dict[tuple[int, int, str], dict[str, Any]]:
    rows = (row for row in load_rows("decode_step") if row["implementation"] == "default")
    return {(row["length"], row["batch"], row["method"]): row for row in rows}


def _first_tokens() -> dict[tuple[str, str, int], float]:
    return {(row["method"], row["what"], row["tokens"]): row["seconds"] for row in load_rows("ttft")}


def steps() -> str:
    found, rows = _default_steps(), []
    for length, batch in sorted({key[:2] for key in found}):
        cells = [f"{length} x {batch}"]
        for method in STEP_METHODS:
            row = found[length, batch, method]
            times = "" if method == "cudnn" else f", {row['times_faster_than_cudnn']:.2f}x"
            cells.append(f"{row['us']:.1f} ({row['floor_us']:.1f}){times}")
        rows.append(cells)
    return markdown(["tokens x rows", "cuDNN", *(f"`{name}`" for name in STEP_METHODS[1:])], rows)


def compared() -> str:
    """Decode steps of methods that papers compare with: time, launches, and the floor of their bytes."""
    found = {(row["method"], row["length"]): row for row in load_rows("compared")}
    lengths = sorted({length for _, length in found})
    rows = []
    for method in dict.fromkeys(method for method, _ in found):
        cells = []
        for length in lengths:
            row = found.get((method, length))
            times = None if row is None else row["times_faster_than_cudnn"]
            cells += ["" if row is None else f"{row['us']:.0f}", "" if times is None else f"{times:.2f}x"]
        last = found[method, lengths[-1]]
        name = "full, cuDNN" if method == "cudnn" else f"`{method}`"
        rows.append([name, *cells, f"{last['kernels']:.0f}", f"{last['floor_us']:.0f}"])
    head = [part for length in lengths for part in (f"{length} tokens, us", "against cuDNN")]
    return markdown(["cache", *head, "launches", f"floor at {lengths[-1]}, us"], rows)


def steps_in_plain_jax() -> str:
    found = {}
    for row in load_rows("decode_step"):
        if row["batch"] == 1 and (row["implementation"] == "xla" or row["method"] == "by hand"):
            found[row["method"], row["length"]] = f"{row['us']:.0f}"
    columns = ("by hand", "fier", "quest", "pariskv", "logquant")
    lengths = sorted({length for method, length in found if method != "by hand"})
    rows = [[str(n), *(found.get((method, n), "") for method in columns)] for n in lengths]
    return markdown(["tokens", columns[0], *(f"`{name}`" for name in columns[1:])], rows)


KERNELS = {
    "score_1bit": "score all keys by 1 bit",
    "select_1bit": "score by 1 bit, reduce over the group, select 2048",
    "score_pages": "score all pages of 16 tokens by their boxes",
    "select_pages": "score pages and 16 pending pages, reduce over the group, select 126",
    "top_k_grouped": "reduce scores over the group, select 2048",
    "top_k": "select 2048",
    "attend_zones": "attend to 2048 selected and recent tokens",
    "attend_slots": "attend to 2048 selected tokens",
    "attend_span": "attend to all",
    "attend_quantized": "attend to all, stored in 2 bits",
    "collide": "ParisKV's votes for all keys",
    "most_voted": "the 13108 keys with most votes",
    "rerank": "score 6554 candidates by 4 bits",
    "select_4bit": "score 13108 candidates by 4 bits, select 1916",
    "put_token": "write the key and value of one token",
    "host_rows": "read 2 MiB of pinned host memory",
    "host_append": "write 8 x 32 rows to pinned host memory",
}
# Kernels that by default take other block sizes than those of the benchmark's first entry.
DEFAULTS = {
    name: "x".join(str(size) for size in astuple(config))
    for name, config in (("score_pages", score_pages.Config()), ("select_4bit", select_4bit.config_for(8, 13108, 256)))
}


def kernels() -> str:
    others = {"plain_score_pages", "host_rows_footprint"}
    files = {path.stem for path in RESULTS.glob("*.json") if '"kernel": ' in path.read_text()} - others
    if files != set(KERNELS):
        raise ValueError(f"KERNELS and benchmarks/results disagree about {sorted(files ^ set(KERNELS))}")
    rows = []
    for name, what in KERNELS.items():
        row = load_rows(name)[0]
        us, floor = row["kernel"], row["floor"]
        if name in DEFAULTS:  # a file may be older than a config's last fields
            us = next(time for label, time in row["all"].items() if f"{DEFAULTS[name]}x".startswith(f"{label}x"))
        rows.append([f"`{name}`: {what}", *(f"{x:.1f}" for x in (us, floor, row["xla"]))])
    return markdown(["operation", "kernel, us", "floor of its bytes, us", "plain JAX, us"], rows)


def tokens() -> str:
    """Time per output token of a whole model."""
    measured = [row for row in load_rows("end_to_end") if not row.get("largest_batch")]
    took = {(row["cache"], row["batch"], row["length"]): f"{row['tpot_ms']:.2f}" for row in measured}
    sizes = sorted({key[1:] for key in took}, key=lambda size: size[::-1])
    rows = [[shown, *(took.get((cache, *size), "") for size in sizes)] for cache, shown in CACHES.items()]
    return markdown(["cache", *(f"{batch} x {length}" for batch, length in sizes)], rows)


def largest_batches() -> str:
    found: dict[str, dict[int, list[str]]] = {}
    for row in load_rows("end_to_end"):
        if row.get("largest_batch"):
            cells = [str(row["batch"]), f"{row['tokens_per_second']:.0f}"]
            found.setdefault(row["cache"], {})[row["length"]] = cells
    rows = []
    for cache in (name for name in CACHES if name in found):
        rows.append([CACHES[cache], *(cell for n in (32768, 131072) for cell in found[cache].get(n, ["", ""]))])
    header = ["cache", "rows of 32768", "tokens a second", "rows of 131072", "tokens a second"]
    return markdown(header, rows)


def host_batches() -> str:
    """Tokens a second of more rows than device memory holds, by the hit rate of the hot set."""
    rows = []
    for row in load_rows("host_batch"):
        layers, hot = (str(row[name]) for name in ("layers_on_host", "hot"))
        rate, speed = short(row["hit_rate"], 3), f"{row['tokens_per_second']:.0f}"
        stored = {"HostOffload": "bf16", "HostFloat8": "float8"}[row["store"]]
        rows.append([f"`{row['method']}`", str(row["rows"]), layers, stored, hot, rate, speed])
    head = ["cache", "rows", "layers on the host", "stored there in", "hot set", "hit rate", "tokens a second"]
    return markdown(head, rows)


def million() -> str:
    """A prompt of a million tokens: its rate, the whole of it at that rate, and a token after it."""
    rows = []
    for row in load_rows("million"):
        rate, whole = f"{row['tflops']:.0f}", f"{row['prompt_seconds_at_rate']:.0f}"
        cells = str(row["length"]), str(row["chunk"]), rate, whole, f"{row['tpot_ms']:.2f}"
        rows.append([f"`{row['method']}`", *cells])
    return markdown(["cache", "tokens", "chunk", "TFLOP/s", "s at that rate", "ms a token after it"], rows)


def first_tokens() -> str:
    found = _first_tokens()
    columns = [("prompt", 65536), ("prompt", 131072), ("turn", 32768), ("turn", 131072)]
    rows = []
    for method in dict.fromkeys(method for method, *_ in found):
        cells = (found.get((method, *column)) for column in columns)
        shown = "one cuDNN call" if method == ONE_CALL else f"`{method}`"
        rows.append([shown, *("" if seconds is None else f"{seconds:.2f}" for seconds in cells)])
    return markdown(
        ["cache", "prompt of 65536", "prompt of 131072", "1024 more after 32768", "1024 more after 131072"], rows
    )


def indexing() -> str:
    rows = []
    for row in load_rows("prefill"):
        if row["method"] != "full":
            shares = (f"{100 * row[name]:+.1f} %" for name in ("added", "seal_added"))
            rows.append([f"`{row['method']}`", str(row["length"]), *shares])
    return markdown(["cache", "tokens", "added to a prompt", "added to a token by flushes"], rows)


# -------------------------------------------------------------------------------------------------------------- quality


def needles() -> str:
    lengths, budgets = (4096, 8192, 16384), (None, 16, 32, 64, 128, 256, 512)
    scores = load_scores("eval")
    rows = []
    for method in dict.fromkeys(cache.partition("@")[0] for cache in scores["1 of 8 needles at 8192"]):
        cells = [f"`{method}`"]
        for budget in budgets:
            name = method if budget is None else f"{method}@{budget}"
            found = [scores[f"1 of 8 needles at {n}"].get(name) for n in lengths]
            cells.append(" ".join(short(score["mean"]) for score in found if score))
        rows.append(cells)
    return markdown(["cache", "all", *map(str, budgets[1:])], rows)


def equal_perplexities() -> str:
    """Rows at equal dense layers: change of the perplexity with its standard error, and mean tokens read."""
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
            change = _change(row)
            cells += [f"{row['perplexity']:.2f}" if cache == "full" else change, f"{row['tokens_read']:.0f}"]
        rows.append([f"`{cache}`", "all" if cache == "full" else str(dense), *cells])
    head = [part for length in lengths for part in (str(length), "read")]
    return markdown(["cache", "dense layers", *head], rows)


def method_perplexities() -> str:
    """Methods at one budget, some at another, without dense layers: change of the perplexity and mean tokens read."""
    full, *measured = load_rows("perplexity_methods") + load_rows("perplexity_bytes")
    rows = [["`full`", "", f"{full['perplexity']:.2f}", f"{full['tokens_read']:.0f}"]]
    for row in sorted((row for row in measured if row["cache"] != "full"), key=lambda row: row["ratio"]):
        change = _change(row)
        if row["ratio"] > 10:
            change = f"{row['ratio']:.0f} times"
        budget = "" if row["budget"] is None else str(row["budget"])
        rows.append([f"`{row['cache']}`", budget, change, f"{row['tokens_read']:.0f}"])
    return markdown(["cache", "budget", "perplexity", "tokens read"], rows)


def coverage() -> str:
    """Attention that exact tokens hold by which tokens are exact, and the error with the rest in 2 bits."""
    found = json.loads((RESULTS / "measure_logquant_smollm2.json").read_text())["results"]
    rows = []
    for title, kept, rounded in (
        ("log-spaced (LogQuant)", "log-sparse, drop", "log-sparse, 2 bits"),
        ("the newest", "window, drop", "window, 2 bits"),
        ("sink and the newest", "sink and window, drop", None),
        ("the newest, KIVI's groups", "KIVI, 2 bits", "KIVI, 2 bits"),
    ):
        mean = found[kept]["mean"]
        error = "" if rounded is None else short(found[rounded]["mean"]["error"], 3)
        rows.append([title, short(mean["mass"], 3), short(mean["mass_past_sinks"], 3), error])
    head = ["exact tokens", "share of attention", "past the first two tokens", "error of the output, rest in 2 bits"]
    return markdown(head, rows)


def low_rank() -> str:
    """Error of keys as factors of low rank, before and after RoPE."""
    cells = {(row["keys"], row["basis"], row["share"]): row["error"] for row in load_rows("low_rank")}
    shares = sorted({share for *_, share in cells})
    rows = [
        [kind, basis, *(short(cells[kind, basis, share]) for share in shares)]
        for kind, basis in dict.fromkeys((kind, basis) for kind, basis, _ in cells)
    ]
    return markdown(["keys", "basis of", *(f"rank {100 * share:.0f} % of K D" for share in shares)], rows)


def perplexities() -> str:
    measured = load_rows("perplexity")
    rows = []
    for cache in dict.fromkeys(row["cache"] for row in measured):
        own = [row for row in measured if row["cache"] == cache]
        told = (f"{x['perplexity']:.2f}" if cache == "full" else f"{100 * (x['ratio'] - 1):+.1f} %" for x in own)
        rows.append([f"`{cache}`", *told])
    lengths = dict.fromkeys(row["length"] for row in measured)
    return markdown(["cache", *map(str, lengths)], rows)


def tokens_read() -> str:
    """Mean tokens read of the table of perplexities: the dense layers count too."""
    measured = load_rows("perplexity")
    rows = []
    for cache in dict.fromkeys(row["cache"] for row in measured):
        own = [row for row in measured if row["cache"] == cache]
        rows.append([f"`{cache}`", *(f"{row['attended']:.0f}" for row in own)])
    return markdown(["cache", *map(str, dict.fromkeys(row["length"] for row in measured))], rows)


def group_rules() -> str:
    scores = load_scores("eval_pools")
    tasks = ("1 of 8 needles at 8192", "pass key at 8192")
    rows = []
    for rule in ("per_head", "max_softmax", "mean_softmax", "mean_query", "mean_score"):
        cells = [
            short(scores[task][f"{name}:group_reduce={rule}@32"]["mean"])
            for name in ("fier", "quest")
            for task in tasks
        ]
        rows.append([f"`{rule}`", *cells])
    return markdown(["rule", "`fier`, needles", "`fier`, pass key", "`quest`, needles", "`quest`, pass key"], rows)


def papers() -> str:
    scores = load_scores("eval_papers")["1 of 8 needles at 8192"]
    budgets = (16, 32, 64, 128, 256)
    rows = []
    for cache in ("pariskv:sink=4,local=8", "freekv:sink=0,local=32"):
        found = (scores.get(f"{cache}@{budget}") for budget in budgets)
        rows.append([f"`{cache}`", "", *("" if score is None else short(score["mean"]) for score in found)])
    for cache in ("logquant:bits=2", "kivi:bits=2"):
        rows.append([f"`{cache}`", short(scores[cache]["mean"]), *[""] * len(budgets)])
    return markdown(["cache", "all", *map(str, budgets)], rows)


def _by_budget(scores: dict[str, Any], budgets: Sequence[int]) -> str:
    """Scores of a task by method and budget, and the mean tokens read at each budget."""
    rows, read = [], {}
    for method in dict.fromkeys(cache.partition("@")[0] for cache in scores):
        cells = [f"`{method}`", *(short(scores[method]["mean"]) for _ in [0] if method in scores)]
        cells += [""] * (2 - len(cells))
        for budget in budgets:
            score = scores.get(f"{method}@{budget}")
            cells.append("" if score is None else short(score["mean"]))
            if score is not None and method == "fier":
                read[budget] = score["tokens_read"]
        rows.append(cells)
    rows.append(["tokens read by `fier`", "", *(f"{read[budget]:.0f}" for budget in budgets)])
    return markdown(["cache", "all", *map(str, budgets)], rows)


def real_needles() -> str:
    return _by_budget(load_scores("eval_qwen")["1 of 8 needles at 16384, question decoded"], (64, 256, 1024))


def real_pass_keys() -> str:
    return _by_budget(load_scores("eval_qwen")["pass key at 16384, question decoded"], (64, 256, 1024))


def real_gsm8k() -> str:
    return _by_budget(load_scores("eval_qwen_gsm8k")["gsm8k"], (64, 128, 256))


def real_ruler() -> str:
    """RULER's synthetic tasks by length: a row a task, a column a cache."""
    found = json.loads((RESULTS / "eval_qwen_ruler.json").read_text())["results"]
    names = list(dict.fromkeys(name for one in found.values() for name, c in one["caches"].items() if c["n"] == 100))
    rows = []
    for task, result in sorted(found.items(), key=lambda one: (one[1]["task"]["length"], one[0])):
        caches = result["caches"]
        cells = [short(caches[name]["mean"]) if name in caches and caches[name]["n"] == 100 else "" for name in names]
        if any(cells):
            rows.append([task.partition(" at ")[0], str(result["task"]["length"]), *cells])
    return markdown(["task", "tokens", *(f"`{name}`" for name in names)], rows)


def real_perplexities() -> str:
    return _perplexities_by_text("perplexity_qwen")


def small_perplexities() -> str:
    return _perplexities_by_text("perplexity_smollm2")


def _perplexities_by_text(name: str) -> str:
    """Perplexity of full attention by text and length, and the change of the others against it."""
    measured = load_rows(name)
    places = list(dict.fromkeys((row["text"], row["length"]) for row in measured))
    rows = []
    for cache in dict.fromkeys(row["cache"] for row in measured):
        own = {(row["text"], row["length"]): row for row in measured if row["cache"] == cache}
        cells = []
        for place in places:
            row = own.get(place)
            if row is None:
                cells.append("")
            elif cache == "full":
                cells.append(f"{row['perplexity']:.2f}")
            else:
                cells.append(_change(row))
        rows.append([f"`{cache}`", *cells])
    return markdown(["cache", *(f"{text}, {length}" for text, length in places)], rows)


def _change(row: dict[str, Any]) -> str:
    """Change of perplexity against full attention, with its standard error."""
    return f"{100 * (row['ratio'] - 1):+.1f} ± {100 * row['ratio_stderr']:.1f} %"


def real_speed() -> str:
    """TPOT in milliseconds of a published model on a book, by size and method."""
    found = {(row["length"], row["batch"], row["method"]): row for row in load_rows("real_speed")}
    names = list(dict.fromkeys(method for _, _, method in found))
    rows = []
    for size in sorted({key[:2] for key in found}):
        cells = [found.get((*size, name), {}).get("tpot_ms") for name in names]
        rows.append([f"{size[0]} x {size[1]}", *("" if ms is None else f"{ms:.2f}" for ms in cells)])
    return markdown(["tokens x rows", *(name if name == "cudnn" else f"`{name}`" for name in names)], rows)


def real_first_tokens() -> str:
    """Seconds to the first token of one prompt, by its length."""
    found = {(r["length"], r["method"]): r["ttft_seconds"] for r in load_rows("real_speed") if r.get("ttft_seconds")}
    names = list(dict.fromkeys(method for _, method in found))
    rows = []
    for length in sorted({length for length, _ in found}):
        cells = (found.get((length, name)) for name in names)
        rows.append([str(length), *("" if seconds is None else f"{seconds:.3f}" for seconds in cells)])
    return markdown(["tokens", *(name if name == "cudnn" else f"`{name}`" for name in names)], rows)


def real_long_generation() -> str:
    """Perplexity of a model's own text through each cache against full attention, by quarter of it."""
    found = json.loads((RESULTS / "long_generation.json").read_text())["results"]
    rows = [
        [f"`{row['cache']}`", *(f"{x:.2f}" for x in row["ratio_by_quarter"])] for row in found if row["cache"] != "full"
    ]
    return markdown(["cache", "first quarter", "second", "third", "last"], rows)


def which_method() -> str:
    """What to take for which task, budget, length and batch, from the tables of the published model."""
    needles = load_scores("eval_qwen")["1 of 8 needles at 16384, question decoded"]
    problems = load_scores("eval_qwen_gsm8k")["gsm8k"]
    speed = {(row["length"], row["batch"], row["method"]): row["tpot_ms"] for row in load_rows("real_speed")}
    texts: dict[str, dict[str, float]] = {text: {} for text in ("code", "book")}
    for row in load_rows("perplexity_qwen"):
        texts[row["text"]][_method_of(row["cache"])] = row["ratio"]
    own = json.loads((RESULTS / "long_generation.json").read_text())["results"]
    by_quarter = {_method_of(row["cache"]): row["ratio_by_quarter"] for row in own}

    def right(scores: dict[str, Any], budget: int, *methods: str) -> str:
        found = [_score_of(scores, method, budget) for method in methods]
        return _listed(methods, [short(score["mean"]) for score in found if score])

    def loss(text: str, *methods: str) -> str:
        return _listed(methods, [f"{100 * (texts[text][m] - 1):+.1f} %" for m in methods])

    def drifts(*methods: str) -> str:
        ends = [(min(by_quarter[m]), max(by_quarter[m])) for m in methods]
        return _listed(methods, [f"{100 * (low - 1):+.0f} to {100 * (high - 1):.0f} %" for low, high in ends])

    def times(length: int, batch: int, *methods: str) -> str:
        return _listed(methods, [f"{speed[length, batch, m]:.2f} ms" for m in methods])

    evicting, selecting = ("snapkv", "streaming_llm"), ("fier", "quest", "pariskv", "freekv")
    rows = [
        ("single tokens far back, 256 of 16384 tokens", right(needles, 256, "pariskv", "fier"),
         right(needles, 256, "quest", "freekv", "streaming_llm")),
        ("the same, 64 tokens", right(needles, 64, "pariskv", "fier"), right(needles, 64, "quest", "freekv")),
        ("the same, in less memory", right(needles, 0, "kivi", "logquant"), right(needles, 1024, *evicting)),
        ("reasoning after a short prompt, 64 tokens", right(problems, 64, "full", "fier"),
         right(problems, 64, "quest", "freekv", "streaming_llm")),
        ("code, 1024 of 4096 tokens", loss("code", "pariskv", "fier", "freekv"), loss("code", "quest", *evicting)),
        ("a book, 1024 of 4096 tokens", loss("book", "fier", "pariskv", "logquant", "freekv", "kivi"),
         loss("book", "snapkv", "quest", "streaming_llm")),
        ("its own text, 256 of 2048 to 5120 tokens", drifts("fier", "logquant"),
         drifts("freekv", "quest", "streaming_llm")),
        ("speed, one row of 32768", times(32768, 1, "full", "kivi"), times(32768, 1, *selecting)),
        ("speed, 8 rows of 16384", times(16384, 8, "snapkv", "kivi", "logquant", "quest", "fier"),
         times(16384, 8, "full", "pariskv", "freekv")),
    ]  # fmt: skip
    return markdown(["what matters", "take", "rather not"], rows, numbers=False)


def _listed(methods: Sequence[str], values: Sequence[str]) -> str:
    return ", ".join(f"`{method}` {value}" for method, value in zip(methods, values, strict=True))


def drift() -> str:
    """Recall of the 100 best keys while a model writes, by the tokens so far."""
    found = json.loads((RESULTS / "measure_drift.json").read_text())["results"]
    lengths = list(found["Paris"]["by_length"])[::2]
    names = {
        "Paris": "ParisKV",
        "Paris, all reranked": "ParisKV, all keys reranked",
        "k-means, prompt": "k-means of the prompt",
        "k-means, anew": "k-means, learnt anew",
        "PQCache, prompt": "PQCache",
        "PQCache, anew": "PQCache, learnt anew",
        "Quest": "Quest",
    }
    rows = [[name, *(short(found[case]["by_length"][n]["recall"]) for n in lengths)] for case, name in names.items()]
    return markdown(["index", *lengths], rows)


def real_drafts() -> str:
    """Tokens a second with and without drafts."""
    rows = []
    for row in load_rows("speculation"):
        if "refused" not in row:
            rates = (f"{row[name]:.0f}" for name in ("tokens_per_second", "tokens_per_second_drafted"))
            same = f"{row['same_tokens']} of {row['prompts']}"
            rows.append(
                [f"`{row['cache']}`", row["kind"], *rates, f"{row['times']:.2f}", short(row["acceptance"]), same]
            )
    head = ["cache", "text", "tokens/s", "with drafts", "times", "acceptance", "same answers"]
    return markdown(head, rows)


# --------------------------------------------------------------------------------------------------------------- claims

CLAIM = ("claim", "the paper", "here", "command, file", "verdict")


def load_measured(name: str) -> dict[str, dict[str, Any]]:
    """Case -> means of a measurement on live queries."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return {case: one.get("mean", one) for case, one in found.items()}


def _scores_by_budget(scores: dict[str, Any], method: str, budgets: Sequence[int]) -> str:
    return " / ".join(short(scores[f"{method}@{budget}"]["mean"]) for budget in budgets)


def _times_faster(method: str, length: int, batch: int) -> str:
    """Than full attention by cuDNN, in a whole decode step of a Llama-3.1-8B shape."""
    found = {
        (row["cache"], row["length"], row["batch"]): row for row in load_rows("end_to_end") if row["status"] == "ok"
    }
    return f"{found['cudnn', length, batch]['tpot_ms'] / found[method, length, batch]['tpot_ms']:.2f}x"


def _largest(method: str, length: int) -> dict[str, Any]:
    """The largest batch that fitted."""
    rows = [r for r in load_rows("end_to_end") if (r["cache"], r["length"], r["status"]) == (method, length, "ok")]
    return max(rows, key=lambda row: row["batch"])


def claims_fier() -> str:
    keys = load_scores("eval_qwen")["pass key at 16384, question decoded"]
    groups = load_measured("measure_groups")
    recall = {case: short(mean["head_recall"]) for case, mean in groups.items()}
    sizes = [name for name in groups if name.startswith("Fier") and "," not in name]
    by_size = ", ".join(f"{name.partition('=')[2]}: {recall[name]}" for name in sizes)
    larger = load_measured("measure_groups_qwen")
    beside = load_measured("measure_recall")
    book = {
        (row["cache"], row["length"]): row for row in load_rows("perplexity_equal") if row["dense_layers"] in (0, None)
    }
    fier = book["fier", 4096]
    rows = [
        [
            "Pass key by budget; Quest needs more (Table 3)",
            "10K, LLaMA3-1B, budgets 32 to 512: 63, 87, 97, 100, 100 %; Quest 36, 60, 92, 99, 99 %",
            f"16K, Qwen2.5-Coder-1.5B, 64 / 256 / 1024: {_scores_by_budget(keys, 'fier', (64, 256, 1024))}; "
            f"Quest {_scores_by_budget(keys, 'quest', (64, 256, 1024))}",
            "`kvjax eval`, `eval_qwen.json`",
            "reproduced in order",
        ],
        [
            "Evicting methods find no pass key (Table 3)",
            "H2O, StreamingLLM, TOVA: under 8 %",
            f"StreamingLLM, SnapKV at 1024: {short(keys['streaming_llm@1024']['mean'])}, "
            f"{short(keys['snapkv@1024']['mean'])}",
            "the same",
            "reproduced; 1 key of 10 lies in the window",
        ],
        [
            "Selects more of each head's best tokens than Quest (Fig. 6)",
            "by layer and head",
            f"recall of each head's own best at a budget of 256: {short(beside['Fier']['head_recall'])}; Quest "
            f"{short(beside['MinMaxPages 16']['head_recall'])}",
            "`kvjax measure`, `measure_recall.json`",
            "reproduced",
        ],
        [
            "Small groups select better (Table 4)",
            "groups of 32, 128 and 256 compared",
            f"recall by group {by_size}; Qwen2.5-Coder-1.5B, 4K and 16K: "
            f"{', '.join(short(larger[name]['head_recall']) for name in sizes)}, Quest "
            f"{short(larger['Quest']['head_recall'])}",
            "`benchmarks.claims --what groups`, `measure_groups.json`, `measure_groups_qwen.json`",
            "reproduced",
        ],
        [
            "The gain is of single tokens, not of 1-bit scores (Table 4)",
            "pages by quantised scores compared",
            f"recall of single tokens {recall['Fier g=32']}, of pages of 16 by their best token "
            f"{recall['Fier g=32, pages of 16']}, Quest {recall['Quest']}",
            "the same",
            "so here: at pages 1-bit scores do worse than Quest's boxes",
        ],
        [
            "11 % of the cache is enough",
            "LongBench, as good as all",
            f"perplexity of a book, 4096 tokens, 11 %: {_change(fier)}",
            "`kvjax perplexity`, `perplexity_equal.json`",
            "reproduced as perplexity",
        ],
        [
            "Decodes faster than full attention",
            "1.2x to 1.5x up to 32K, LLaMA-2-7B, RTX 4090",
            f"32K, 1 row: {_times_faster('fier', 32768, 1)}; 8 rows: {_times_faster('fier', 32768, 8)}; 128K, 1 row: "
            f"{_times_faster('fier', 131072, 1)}, a Llama-3.1-8B shape, H200",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced from 32K on, on another GPU",
        ],
        [
            "Times of the stages of a layer",
            "estimate 16, recall 41, attention 68 us, RTX 4090",
            "",
            "",
            "not here: it takes that GPU and the released code",
        ],
        [
            "LongBench by task",
            "",
            "",
            "`kvjax eval --task longbench --data DIR`",
            "not here: it takes the data set and a 7B model",
        ],
    ]
    return markdown(CLAIM, rows, numbers=False)


def claims_pariskv() -> str:
    found = json.loads((RESULTS / "measure_drift.json").read_text())["results"]

    def ends(case: str) -> str:
        by_length = [short(one["recall"]) for one in found[case]["by_length"].values()]
        return f"{by_length[0]} to {by_length[-1]}"

    parts, of_package = load_measured("measure_paris_smollm2"), load_measured("measure_paris")

    def recalls(of: dict[str, dict[str, Any]], *cases: str) -> list[str]:
        return [short(of[case]["recall"], 3) for case in cases]

    reranked = recalls(parts, "all reranked, no alpha-correction", "candidates 1")
    as_published = recalls(parts, "as published", "no alpha-correction", "not rotated")
    not_rotated = recalls(of_package, "as published", "not rotated")
    full, paris = _largest("full", 32768), _largest("pariskv", 32768)
    at_once = {(r["cache"], r["length"], r["batch"]): r for r in load_rows("end_to_end") if r["status"] == "ok"}
    one, four = at_once["pariskv", 131072, 1], at_once["pariskv", 131072, 4]
    million = {row["method"]: row for row in load_rows("million") if row["length"] == 1 << 20}
    rows = [
        [
            "Recall does not fall as a text goes on, that of learnt centroids does",
            "figures of the keys' drift",
            f"recall@100 while SmolLM2-135M writes 4000 tokens: ParisKV {ends('Paris')}; k-means of the prompt "
            f"{ends('k-means, prompt')}, learnt anew {ends('k-means, anew')}",
            "`benchmarks.claims --what drift`, `measure_drift.json`",
            "reproduced: the centroids of the prompt fall most",
        ],
        [
            "Alpha-correction raises recall",
            "by 1.5 to 2.4 points",
            f"recall@100 of SmolLM2-135M at 4096 tokens: {as_published[1]} without, {as_published[0]} with; all "
            f"reranked {reranked[0]}, {reranked[1]}",
            "`benchmarks.claims --what paris`, `measure_paris_smollm2.json`",
            "reproduced, by one point",
        ],
        [
            "Rotated keys are found better (Fig. 10)",
            "ablation of the rotation",
            f"the same: rotated {as_published[0]}, not rotated {as_published[2]}; the package's small model "
            f"{not_rotated[0]}, {not_rotated[1]}",
            "the same, `measure_paris.json`",
            "reproduced on a published model; the small one's keys do not need it",
        ],
        [
            "Recall@100 of 100K keys with a tenth of them as candidates",
            "83.8 %",
            "",
            "`benchmarks.claims --what paris`",
            "not here yet: it takes a text of 100K tokens",
        ],
        [
            "Throughput over full attention",
            "up to 2.8x",
            f"32K, largest batches: {paris['tokens_per_second'] / full['tokens_per_second']:.1f}x; 128K, 4 rows: "
            f"{_times_faster('pariskv', 131072, 4)}",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced",
        ],
        [
            "Milliseconds a token at 128K",
            "24.3 at 1 row, 58.9 at 8, Qwen3-8B",
            f"{one['tpot_ms']:.1f} at 1 row, {four['tpot_ms']:.1f} at 4, a Llama-3.1-8B shape of random weights, H200",
            "the same",
            "faster here; another model and keys on the device",
        ],
        [
            "Milliseconds a token at 1M tokens",
            "49, Llama-3.1-8B",
            f"{million['pariskv']['tpot_ms']:.1f}, `full` {million['full']['tpot_ms']:.1f}, a Qwen2.5-7B shape of "
            "random weights, H200",
            "`benchmarks/million.py`, `million.json`",
            "faster here; another model and keys on the device",
        ],
        [
            "17x and 44x faster than MagicPIG and PQCache at 1M",
            "their released code",
            "",
            "",
            "not here: it takes those programs on one machine",
        ],
        [
            "LongBench v2, AIME, MATH500, GPQA",
            "as good as full attention",
            "",
            "",
            "not here: it takes the data sets and 8B models",
        ],
    ]
    return markdown(CLAIM, rows, numbers=False)


def claims_freekv() -> str:
    (turned,) = load_measured("measure_queries").values()
    (alike,) = load_measured("measure_queries_qwen").values()
    needles = load_scores("eval_qwen")["1 of 8 needles at 16384, question decoded"]
    name = "freekv:sink=0,local=32,page=16"
    at_once = {
        (r["cache"], r["length"], r["batch"]): r["tpot_ms"] for r in load_rows("end_to_end") if r["status"] == "ok"
    }
    ahead, behind = at_once["freekv:tau=-1", 32768, 1], at_once["freekv", 32768, 1]
    corrected = [
        ", ".join(f"{short(one['corrected_steps'][tau])} at {tau}" for tau in ("0.8", "0.9")) for one in (alike, turned)
    ]
    rows = [
        [
            "Adjacent queries are alike, so few steps are corrected",
            "43 to 52 % of steps on hard reasoning",
            f"share of layers and steps by tau, books: Qwen2.5-Coder-1.5B {corrected[0]}; the package's small model "
            f"{corrected[1]}",
            "`benchmarks.claims --what queries`, `measure_queries_qwen.json`, `measure_queries.json`",
            "reproduced on a published model, not on the small one: its queries turn",
        ],
        [
            "Accuracy near that of full attention",
            "LongBench v2 within .6 points, budget 2048",
            f"needles in 16K, 64 / 256 / 1024: {_scores_by_budget(needles, name, (64, 256, 1024))}; full 1.00",
            "`kvjax eval`, `eval_qwen.json`",
            "not at small budgets; 2048 is not measured",
        ],
        [
            "The recall hides behind the step",
            "overlap 1.9x, layout 10.5x, double buffering 1.2x",
            f"32K, 1 row: {ahead:.1f} ms where no head waits, {behind:.1f} where all do",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced in part: the overlap",
        ],
        [
            "13.7x over ArkVale, 8.4x over ShadowKV",
            "A100, PCIe 4",
            "",
            "",
            "not here: it takes their programs on one machine",
        ],
    ]
    return markdown(CLAIM, rows, numbers=False)


def claims_logquant() -> str:
    gsm8k = load_scores("eval_qwen_gsm8k")["gsm8k"]
    full, log = _largest("full", 32768), _largest("logquant", 32768)
    held, off = [], []
    for kept in (load_measured("measure_logquant_smollm2"), load_measured("measure_logquant")):
        dropped = [kept[f"{name}, drop"] for name in ("log-sparse", "window")]
        mass, later = (" against ".join(short(x[what], 3) for x in dropped) for what in ("mass", "mass_past_sinks"))
        held.append(f"{mass}, past the first two tokens {later}")
        off.append([short(kept[f"{name}, 2 bits"]["weights"], 3) for name in ("log-sparse", "window", "KIVI")])
    rows = [
        [
            "GSM8K at 2 bits, ahead of KIVI",
            "Llama-3.1-8B: 40.4, KIVI by token 18.0, 16 bits 71.4",
            f"Qwen2.5-Coder-1.5B: {short(gsm8k['logquant']['mean'])}, KIVI by channel {short(gsm8k['kivi']['mean'])}, "
            f"16 bits {short(gsm8k['full']['mean'])}, n = {gsm8k['full']['n']}",
            "`kvjax eval`, `eval_qwen_gsm8k.json`",
            "not repeated: no gap beyond the interval of .05",
        ],
        [
            "Log-spaced tokens hold more attention (Fig. 4)",
            "than the newest",
            f"SmolLM2-135M {held[0]}; the package's small model {held[1]}",
            "`benchmarks.claims --what logquant`, `measure_logquant_smollm2.json`, `measure_logquant.json`",
            "reproduced; contradicted past the first tokens, which a sink keeps as well",
        ],
        [
            "Least error of attention (Table 2)",
            "L1 432.5; KIVI 556.1; eviction 1076.7 and 1612.6",
            f"L1 of the weights at 2 bits, LogQuant, newest tokens, KIVI: SmolLM2-135M {', '.join(off[0])}; "
            f"the package's small model {', '.join(off[1])}",
            "the same",
            "reproduced on a published model, by less; not on the small one. Dropping is far worse, as there",
        ],
        [
            "Throughput and batch in equal memory",
            "25 % and 60 % more",
            f"32K, largest batches: {log['batch']} rows against {full['batch']}, "
            f"{log['tokens_per_second'] / full['tokens_per_second']:.1f}x the tokens a second",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced, and more: the codes are read directly",
        ],
        ["LongBench by task, other models", "", "", "", "not here: it takes the data set and those models"],
    ]
    return markdown(CLAIM, rows, numbers=False)


def paris_parts() -> str:
    """ParisKV with one part left out or changed at a time, on live queries of a published model."""
    rows = []
    for case, mean in load_measured("measure_paris_smollm2").items():
        shares = (short(mean[name], 3) for name in ("recall", "mass", "error"))
        rows.append([case, *shares, f"{mean['attended']:.0f}", f"{mean['bytes'] / 1024:.0f}"])
    head = ("ParisKV", "recall@100", "share of attention", "error of the output", "tokens read", "KiB read")
    return markdown(head, rows)


def devices() -> str:
    """TPOT on one GPU and on two, by placement, and what `benchmarks/scaling.py` makes of it."""
    rows = {(row["method"], row["placement"]): row for row in load_rows("devices") if row["part"] == "times"}
    names = ("none", "mesh of 1", "data=2", "model=2", "ctx=2")

    def cell(method: str, name: str) -> str:
        return f"{rows[method, name]['tpot_ms']:.2f}" if (method, name) in rows else ""

    check = json.loads((RESULTS / "scaling.json").read_text())["check"]
    predicted = {(row["method"], row["placement"]): f"{row['tpot_ms']:.2f}" for row in check}
    body = []
    for method in ("full", "fier"):
        body.append([f"`{method}`", *(cell(method, name) for name in names)])
        body.append([f"`{method}`, predicted", *(predicted.get((method, name), "") for name in names)])
    header = ("cache", "one GPU", "a mesh of one GPU", "rows over two", "heads over two", "tokens over two")
    return markdown(header, body)


def several_tokens() -> str:
    """Time of an attention layer for T tokens of a row in one call, and over the time of one."""
    rows = {(row["method"], row["tokens"]): row for row in load_rows("decode_tokens") if not row.get("alike")}
    names = [method for method in ("full", "fier", "quest", "pariskv", "logquant") if (method, 8) in rows]

    def cell(method: str, tokens: int) -> str:
        return f"{rows[method, tokens]['us']:.0f} ({rows[method, tokens]['times_one']:.1f})"

    return markdown(["cache", "1", "8"], [[f"`{m}`", *(cell(m, t) for t in (1, 8))] for m in names])


def scaling() -> str:
    header = ("model", "tokens a row", "GPUs", "rows", "cache `full`, GB", "traffic `full`, ms", "TPOT `full`, ms",
              "traffic `fier`, ms", "TPOT `fier`, ms")  # fmt: skip

    def cells(row: dict[str, Any]) -> list[str]:
        times = []
        for method in ("full", "fier"):
            time = row[f"{method}_tpot_ms"]
            times += [
                f"{row['traffic_ms'] + row[f'{method}_context_ms']:.2f}",
                "does not fit" if time is None else time,
            ]
        return [row["model"], *(str(row[n]) for n in ("tokens", "gpus", "rows", "full_cache_gb")), *map(str, times)]

    return markdown(header, map(cells, load_rows("scaling")))


def anchors() -> str:
    """Error of attention outputs, and perplexity, by the layers that select for the others."""
    plans = {share: json.loads((RESULTS / f"calibrate_{share}.json").read_text()) for share in (2, 4)}
    texts = {row["cache"]: row for row in load_rows("perplexity_shared")}
    (keys,) = load_scores("eval_shared").values()

    def found(*names: str) -> list[str]:
        scores = [keys.get(f"{name}@225") for name in names]
        return [short(score["mean"]) if score else "" for score in scores]

    rows = [["all 28", short(plans[4]["error"]["share=1"], 3), *_changes(texts, ("fier", _PARIS)), *found("fier", "")]]
    for share, plan in plans.items():
        count, error = len(plan["anchors"]), plan["error"]
        even = (f"fier:share={share}", f"{_PARIS},share={share}")
        share_keys = found(even[0], "")
        rows.append(
            [f"{count}, `share={share}`", short(error[f"share={share}"], 3), *_changes(texts, even), *share_keys]
        )
        files = (f"fier:anchors=fier{share}.json", f"{_PARIS},anchors=paris{share}.json")
        told = f"{count}, with their heads, by `kvjax calibrate --share {share} --out`"
        own_keys = found(files[0], f"pariskv:sink=4,local=16,dense_layers=2,anchors=paris{share}.json")
        rows.append([told, short(error["anchors, best heads"], 3), *_changes(texts, files), *own_keys])
    rows.append(["4, `share=8`", "", *_changes(texts, ("fier:share=8", f"{_PARIS},share=8")), "", ""])
    head = [f"{what}, `{name}`" for what in ("perplexity", "pass keys") for name in ("fier", "pariskv")]
    return markdown(["layers that select", "error, `fier`", *head], rows)


_PARIS = "pariskv:sink=4,local=16,dense_below=0"


def _changes(rows: dict[str, dict[str, Any]], caches: Sequence[str]) -> list[str]:
    """`_change` of each; blank where it was not measured."""
    return [_change(rows[cache]) if cache in rows else "" for cache in caches]


def hit_rates(file: Path = RESULTS / "hit_rates.json") -> str:
    """Share of the selected pages that a hot set has, along the text, by its size."""
    found = json.loads(file.read_text())
    rows = {row["method"]: row for row in found["rows"] if row["along"] == "text"}
    names = ("fier", "pariskv", "quest", "freekv")
    sizes = [key for key in rows["fier"] if key.endswith(" x")]  # in budgets
    body = [
        [f"{int(size.split()[0]) * found['budget']} tokens", *(short(rows[name][size]) for name in names)]
        for size in sizes
    ]
    return markdown(["hot set", *(f"`{name}`" for name in names)], body)


def shared_steps() -> str:
    """Time of an attention layer, mean over layers of which every n-th selects."""
    found = {(row["method"], row["length"], row["batch"], row["share"]): row["us"] for row in load_rows("shared")}
    shares = sorted({key[3] for key in found})
    rows = []
    for method, length, batch in dict.fromkeys(key[:3] for key in found):
        cells = (found.get((method, length, batch, share)) for share in shares)
        rows.append([f"`{method}`", f"{batch} x {length}", *("" if us is None else f"{us:.1f}" for us in cells)])
    return markdown(["cache", "rows x tokens", *(f"share {share}" for share in shares)], rows)


def host_steps() -> str:
    """Time of an attention layer with the history on the device, on the host, and there with a hot set of 8192."""
    alike = (1.0, 0.97, 0.9, 0.0)
    rows: dict[tuple[str, int, int], dict[Any, str]] = {}
    for row in load_rows("host_steps"):
        what = row["correlation"] if row["hot"] == 8192 else row["where"] if not row["hot"] else None
        read = f" ({row['read']:.0f})" if row["where"] == "host" else ""
        rows.setdefault((row["method"], row["length"], row["kv_heads"]), {})[what] = f"{row['us']:.0f}{read}"
    head = ["cache", "tokens", "KV heads", "device", "host", *(f"hot set, {share}" for share in alike)]
    cells = [[f"`{m}`", str(n), str(K), *(c.get(w, "") for w in ("device", "host", *alike))]
             for (m, n, K), c in rows.items()]  # fmt: skip
    return markdown(head, cells)


def real_hit_rates() -> str:
    """Share of the selected pages that a hot set has, along text of a published model, by its size."""
    return hit_rates(RESULTS / "hit_rates_qwen.json")


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        speed, quality, decoded_needles, methods, steps, compared, steps_in_plain_jax, kernels, tokens, largest_batches,
        host_batches, million, first_tokens, indexing, needles, coverage, low_rank,
        method_perplexities, equal_perplexities, perplexities,
        tokens_read, group_rules,
        papers, scaling, hit_rates, anchors, real_needles, real_pass_keys, real_gsm8k,
        real_ruler, real_perplexities, small_perplexities, real_speed, real_first_tokens, real_drafts,
        real_long_generation, drift, which_method,
        devices, several_tokens, shared_steps, host_steps, real_hit_rates,
        claims_fier, claims_pariskv, paris_parts, claims_freekv, claims_logquant,
    )
}  # fmt: skip


def fill(text: str) -> str:
    """`text` with each table written anew."""
    return PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


# -------------------------------------------------------------------------------------------------------------- picture

PICTURED = ("cudnn", "logquant", "pariskv", "fier", "quest")


def picture(batch: int = 1) -> str:
    """SVG: time of a decode step by tokens in the cache, both on logarithmic axes."""
    found = _default_steps()
    lengths = sorted({length for length, rows, _ in found if rows == batch})
    left, top, width, height = 70, 50, 510, 290
    low, high = 8.0, 1300.0

    def x(tokens: float) -> float:
        return left + width * math.log(tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y(us: float) -> float:
        return top + height * (1 - math.log(us / low) / math.log(high / low))

    def text(at: tuple[float, float], words: str, anchor: str, colour: str = "#333333") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="400" viewBox="0 0 720 400" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="720" height="400" fill="white"/>',
        text((left, 24), "Attention of one decode step in one layer, microseconds (NVIDIA H200)", "start"),
    ]
    for us in (10, 30, 100, 300, 1000):
        lines.append(f'<path d="M{left} {y(us):.1f}H{left + width}" stroke="#dddddd"/>')
        lines.append(text((left - 8, y(us) + 4), str(us), "end"))
    for tokens in lengths:
        lines.append(f'<path d="M{x(tokens):.1f} {top}V{top + height}" stroke="#dddddd"/>')
        lines.append(text((x(tokens), top + height + 20), f"{tokens // 1024}K", "middle"))
    lines.append(text((left + width / 2, top + height + 42), f"tokens in the cache, batch {batch}", "middle"))
    ends = {method: y(found[lengths[-1], batch, method]["us"]) for method in PICTURED}
    place = 0.0
    for method in sorted(ends, key=lambda method: ends[method]):
        place = max(ends[method], place + 16)  # labels must not cover each other
        times = [found[n, batch, method]["us"] for n in lengths]
        points = " ".join(f"{x(n):.1f},{y(us):.1f}" for n, us in zip(lengths, times, strict=True))
        name, preset = ("full, cuDNN", "full") if method == "cudnn" else (method, method)
        colour = COLOURS[preset]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        lines += [
            f'<circle cx="{x(n):.1f}" cy="{y(us):.1f}" r="3.5" fill="{colour}"/>'
            for n, us in zip(lengths, times, strict=True)
        ]
        lines.append(text((left + width + 10, place + 4), f"{name} {times[-1]:.0f}", "start", colour))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    PICTURE.write_text(picture())
