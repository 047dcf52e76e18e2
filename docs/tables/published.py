"""The tables of docs/real_models.md: accuracy and speed of published models, and the methods to
take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from docs.tables.commands import as_title, titled, with_text
from docs.tables.reading import (
    load_file,
    load_results,
    load_rows,
    load_scores,
    method_of,
    score_of,
)
from docs.tables.writing import markdown, mean_of, named, perplexity_change, short

MAIN = (
    "full",
    "fier",
    "pariskv",
    "quest",
    "freekv",
    "logquant",
    "kivi",
    "streaming_llm",
    "snapkv",
)
BUDGETS = (32, 64, 128, 256, 512, 1024, 2048)
OWN_BUDGET = ("razorattention", "duoattention")  # whose heads decide how much is kept
# Titles of the tasks of RULER that are generated, in its order, and its own names.
RULER = {
    "needle": "niah_single_2",
    "needle, UUIDs": "niah_single_3",
    "1 of 4 needles": "niah_multikey_1",
    "1 of needles only": "niah_multikey_2",
    "1 of needles only, UUIDs": "niah_multikey_3",
    "1 of 4 needles, 4 values each": "niah_multivalue",
    "4 of 4 needles": "niah_multiquery",
    "all variables of 1 of 1 chains, 4 hops": "vt",
    "10 common words": "cwe",
    "3 most frequent words": "fwe",
}


NEEDLES = "1 of 8 needles at 16384, question decoded"
PASS_KEYS = "pass key at 16384, question decoded"


def real_needles() -> str:
    table = _by_budget(_main(load_scores("eval_qwen")[NEEDLES]), BUDGETS)
    return with_text(table, "eval_qwen")


def _main(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: score for name, score in scores.items() if method_of(name) in MAIN}


def real_others() -> str:
    """Needles and pass keys that the other presets find by budget, and the tokens they read;
    most needles first.
    """
    needles, keys = (load_scores("eval_qwen")[task] for task in (NEEDLES, PASS_KEYS))
    found: dict[str, dict[int | None, str]] = {}
    for name in needles:
        if (method := method_of(name)) not in MAIN:
            budget = None if method in OWN_BUDGET else needles[name]["budget"]
            found.setdefault(name.partition("@")[0], {})[budget] = name
    budgets = sorted({budget for by in found.values() for budget in by if budget is not None})

    def told(name: str | None) -> str:
        return (
            ""
            if name is None
            else " / ".join(one_of(scores.get(name)) for scores in (needles, keys))
        )

    def one_of(score: dict[str, Any] | None) -> str:
        few = "" if score is None or score["n"] >= 100 else f" ({score['n']})"
        return f"{mean_of(score)}{few}"

    def one(by: dict[int | None, str]) -> dict[str, Any]:
        return needles[by.get(None) or by[1024]]

    rows = [
        [
            named(cache),
            *(told(by.get(budget)) for budget in (None, *budgets)),
            f"{one(by)['tokens_read']:.0f}",
        ]
        for cache, by in sorted(found.items(), key=lambda item: -one(item[1])["mean"])
    ]
    table = markdown(["cache", "its own", *map(str, budgets), "tokens read"], rows)
    return with_text(table, "eval_qwen")


def real_papers() -> str:
    """Needles and pass keys at the papers' own settings, at two budgets, and the tokens that a
    step reads at 1024.
    """
    needles, keys = (load_scores("eval_qwen_papers")[task] for task in (NEEDLES, PASS_KEYS))

    def one(score: dict[str, Any]) -> str:
        return f"{mean_of(score)} ± {short((score['high'] - score['low']) / 2)}"

    def told(name: str) -> str:
        return " / ".join(one(scores[name]) for scores in (needles, keys) if name in scores)

    rows = []
    for cache in dict.fromkeys(name.partition("@")[0] for name in needles):
        first = cache if cache in needles else f"{cache}@1024"
        rows.append(
            [
                named(cache),
                told(first),
                told(f"{cache}@2048"),
                f"{needles[first]['tokens_read']:.0f}",
            ]
        )
    table = markdown(["cache", "1024", "2048", "tokens read"], rows)
    return with_text(table, "eval_qwen_papers")


def real_known() -> str:
    """Needles and pass keys at two budgets if the question is part of the prompt, and if it
    comes later.
    """
    found = load_scores("eval_qwen")
    tasks = {"needles": NEEDLES, "pass keys": PASS_KEYS}
    columns = [(what, budget) for what in tasks for budget in (256, 1024)]

    def both(cache: str, what: str, budget: int) -> list[str]:
        known, later = (
            found[task] for task in (tasks[what].replace("decoded", "prefilled"), tasks[what])
        )
        name = cache if cache in known else f"{cache}@{budget}"
        return [mean_of(scores.get(name)) for scores in (known, later)]

    caches = dict.fromkeys(
        name.partition("@")[0] for name in found[NEEDLES.replace("decoded", "prefilled")]
    )
    rows = [
        [named(cache), *(cell for column in columns for cell in both(cache, *column))]
        for cache in caches
    ]
    head = (cell for what, budget in columns for cell in (f"{what}, {budget}", "later"))
    return with_text(markdown(["cache", *head], rows), "eval_qwen")


def real_gsm8k() -> str:
    scores = load_scores("eval_qwen_gsm8k")["gsm8k"]
    full = scores["full"]
    return (
        f"{_by_budget(scores, (64, 128, 256, 512))}\nAll {full['n']} questions. A step of `full` reads "
        f"{full['tokens_read']:.0f} tokens on average.\n"
    )


def _by_budget(scores: dict[str, Any], budgets: Sequence[int]) -> str:
    """Scores of a task by method and budget, and the mean tokens read at each budget."""
    rows, read = [], {}
    for method in dict.fromkeys(cache.partition("@")[0] for cache in scores):
        cells = [named(method), mean_of(scores.get(method))]
        for budget in budgets:
            score = scores.get(f"{method}@{budget}")
            cells.append(mean_of(score))
            if score is not None and method == "fier":
                read[budget] = score["tokens_read"]
        rows.append(cells)
    rows.append(
        [
            "tokens read by `fier`",
            "",
            *(f"{read[budget]:.0f}" if budget in read else "" for budget in budgets),
        ]
    )
    return markdown(["cache", "all", *map(str, budgets)], rows)


def real_ruler() -> str:
    """RULER's synthetic tasks at one length, and their means at all: a column a cache that has
    all lengths.
    """
    found = _ruler()
    names = [
        name
        for name in next(iter(found.values()))
        if all(name in caches for caches in found.values())
    ]
    lengths = sorted({length for _, length in found})
    rows = [
        [f"`{own}`", "16384", *(short(found[title, 16384][name]["mean"]) for name in names)]
        for title, own in RULER.items()
    ]
    for length in lengths:
        means = ruler_means(length)
        rows.append(["mean of all ten", str(length), *(short(means[name]) for name in names)])
    heads = (named(name).replace(name.partition("@")[0], method_of(name)) for name in names)
    return with_text(markdown(["task", "tokens", *heads], rows), "eval_qwen_ruler")


def real_ruler_codes() -> str:
    """RULER's tasks through TurboQuant's codes and what it is compared with, as far as they
    were run.
    """
    found = {
        task.partition(" at ")[0]: caches
        for task, caches in load_scores("eval_qwen_ruler_codes").items()
    }
    names = list(dict.fromkeys(name for caches in found.values() for name in caches))
    rows = [
        [f"`{own}`", *(mean_of(found[title].get(name)) for name in names)]
        for title, own in RULER.items()
    ]
    table = markdown(["task", *(f"`{name.partition('@')[0]}`" for name in names)], rows)
    return with_text(table, "eval_qwen_ruler_codes")


def _ruler() -> dict[tuple[str, int], dict[str, Any]]:
    """Scores of caches by the title of a task and the length of its prompts."""
    return {
        (task.partition(" at ")[0], result["task"]["length"]): result["caches"]
        for task, result in load_results("eval_qwen_ruler").items()
    }


def ruler_means(length: int) -> dict[str, float]:
    """The mean of RULER's ten tasks at a length, of each cache that has them all."""
    tasks = [caches for (_, own), caches in _ruler().items() if own == length]
    assert len(tasks) == len(RULER)
    return {
        name: sum(caches[name]["mean"] for caches in tasks) / len(tasks)
        for name in tasks[0]
        if all(name in caches for caches in tasks)
    }


def real_perplexities() -> str:
    """Perplexity of full attention by text and length, and the change of the others against it."""
    measured = load_rows("perplexity_qwen")
    places = list(dict.fromkeys((row["text"], row["length"]) for row in measured))
    by_cache: dict[str, dict[Any, dict[str, Any]]] = {}
    for row in measured:
        by_cache.setdefault(row["cache"], {})[row["text"], row["length"]] = row
    rows = []
    for cache, own in by_cache.items():
        cells = []
        for place in places:
            row = own.get(place)
            if row is None:
                cells.append("")
            elif cache == "full":
                cells.append(f"{row['perplexity']:.2f}")
            else:
                cells.append(perplexity_change(row))
        rows.append([named(cache), *cells])
    table = markdown(["cache", *(f"{text}, {length}" for text, length in places)], rows)
    return f"{table}\nThe book is {as_title(load_file('perplexity_qwen')['texts']['book'])}.\n"


def real_long_generation() -> str:
    """Perplexity of a model's own text through each cache against full attention, by quarter of
    it.
    """
    found = load_results("long_generation")
    rows = [
        [named(row["cache"]), *(f"{x:.2f}" for x in row["ratio_by_quarter"])]
        for row in found
        if row["cache"] != "full"
    ]
    table = markdown(["cache", "first quarter", "second", "third", "last"], rows)
    return with_text(table, "long_generation")


def drift() -> str:
    """Recall of the 100 best keys while each of two models writes, by the tokens so far."""
    both = [load_results(name) for name in ("measure_drift_qwen", "measure_drift")]
    lengths = list(both[0]["Paris"]["by_length"])[::2]
    names = {
        "Paris": "ParisKV",
        "Paris, all reranked": "ParisKV, all keys reranked",
        "k-means, prompt": "k-means of the prompt",
        "k-means, anew": "k-means, learnt again",
        "PQCache, prompt": "PQCache",
        "PQCache, anew": "PQCache, learnt again",
        "PQCache, by block": "PQCache, learnt from each 1024",
        "Quest": "Quest",
    }
    rows = [
        [
            name,
            *(short(found[case]["by_length"][n]["recall"]) for found in both for n in lengths),
        ]
        for case, name in names.items()
    ]
    heads = (f"{model}{n}" for model in ("Qwen, ", "SmolLM2, ") for n in lengths)
    return with_text(markdown(["index", *heads], rows), "measure_drift_qwen", "measure_drift")


def real_speed() -> str:
    """TPOT in milliseconds of a published model on a book, by size and method, and the floor of
    full attention.
    """
    measured = load_file("real_speed")
    rate = measured["bytes_per_second"]
    found = {(row["length"], row["batch"], row["method"]): row for row in measured["rows"]}
    names = list(dict.fromkeys(method for _, _, method in found))
    rows = []
    for size in sorted({key[:2] for key in found}):
        floor = (
            1e3
            * (measured["weight_bytes"] + found[(*size, "full")]["cache_bytes_device"])
            / rate
        )
        cells = [found.get((*size, name), {}).get("tpot_ms") for name in names]
        times = ("" if ms is None else f"{ms:.2f}" for ms in cells)
        rows.append([f"{size[0]} x {size[1]}", f"{floor:.2f}", *times])
    heads = ("cuDNN" if name == "cudnn" else named(name) for name in names)
    return with_text(markdown(["tokens x rows", "floor, full", *heads], rows), "real_speed")


def which_method() -> str:
    """The methods to take or to leave, by task, budget, length and batch, from the tables of
    the published model.
    """
    needles = load_scores("eval_qwen")[NEEDLES]
    lines = load_scores("eval_qwen_ruler")["1 of needles only at 16384, question decoded"]
    problems = load_scores("eval_qwen_gsm8k")["gsm8k"]
    speed = {
        (row["length"], row["batch"], row["method"]): row["tpot_ms"]
        for row in load_rows("real_speed")
    }
    texts = {
        (row["text"], row["length"], method_of(row["cache"])): row["ratio"]
        for row in load_rows("perplexity_qwen")
    }
    own = load_results("long_generation")
    by_quarter = {method_of(row["cache"]): row["ratio_by_quarter"] for row in own}

    def right(scores: dict[str, Any], budget: int, *methods: str) -> str:
        found = [score_of(scores, method, budget) for method in methods]
        return _listed(
            methods, [score["mean"] for score in found if score], short, highest_first=True
        )

    def loss(text: str, length: int, *methods: str) -> str:
        return _listed(
            methods,
            [texts[text, length, m] for m in methods],
            lambda x: f"{100 * (x - 1):+.1f} %",
        )

    def drifts(*methods: str) -> str:
        ends = [(min(by_quarter[m]), max(by_quarter[m])) for m in methods]
        return _listed(
            methods, ends, lambda x: f"{100 * (x[0] - 1):+.0f} to {100 * (x[1] - 1):.0f} %"
        )

    def times(length: int, batch: int, *methods: str) -> str:
        return _listed(
            methods, [speed[length, batch, m] for m in methods], lambda x: f"{x:.2f} ms"
        )

    evicting, selecting = ("snapkv", "streaming_llm"), ("fier", "quest", "pariskv", "freekv")
    rows = [
        ("single tokens far back, 256 of 16384 tokens", right(needles, 256, "pariskv", "fier"),
         right(needles, 256, "quest", "freekv", "streaming_llm")),
        ("the same, 64 tokens", right(needles, 64, "pariskv", "fier"), right(needles, 64, "quest", "freekv")),
        ("one of many lines alike, 1024 of 16384", right(lines, 1024, "full"),
         right(lines, 1024, "fier", "pariskv", "quest")),
        ("single tokens far back, in less memory", right(needles, 0, "kivi", "logquant"),
         right(needles, 1024, *evicting)),
        ("reasoning after a short prompt, 64 tokens", right(problems, 64, "full", "fier", "pariskv"),
         right(problems, 64, "quest", "freekv", "streaming_llm")),
        ("the same, 128 tokens", right(problems, 128, "full", "fier", "quest", "freekv", "pariskv"),
         right(problems, 128, "streaming_llm")),
        ("code, 1024 of 4096 tokens", loss("code", 4096, "pariskv", "fier", "quest", "freekv", "kivi", "logquant"),
         loss("code", 4096, *evicting)),
        ("code, 1024 of 16384 tokens", loss("code", 16384, "fier", "pariskv", "freekv", "quest", "kivi", "logquant"),
         loss("code", 16384, *evicting)),
        ("a book, 1024 of 4096 tokens", loss("book", 4096, "fier", "freekv", "pariskv", "quest", "snapkv"),
         loss("book", 4096, "logquant", "kivi", "streaming_llm")),
        ("a book, 1024 of 16384 tokens",
         loss("book", 16384, "fier", "pariskv", "freekv", "kivi", "quest", "logquant"),
         loss("book", 16384, *evicting)),
        ("its own text, 256 of 2048 to 5120 tokens", drifts("pariskv", "fier", "logquant", "kivi"),
         drifts("quest", "freekv", "streaming_llm")),
        ("speed, one row of 4096", times(4096, 1, "full", "logquant", "kivi"), times(4096, 1, *selecting)),
        ("speed, one row of 32768", times(32768, 1, "full", "kivi"), times(32768, 1, *selecting)),
        ("speed, 8 rows of 4096", times(4096, 8, "full", "kivi", "logquant"), times(4096, 8, *selecting)),
        ("speed, 32 rows of 4096", times(4096, 32, "logquant", "kivi", "snapkv", "quest", "fier"),
         times(4096, 32, "full", "pariskv", "freekv")),
        ("speed, 8 rows of 16384", times(16384, 8, "snapkv", "quest", "logquant", "kivi", "fier"),
         times(16384, 8, "full", "pariskv", "freekv")),
        ("speed, 8 rows of 32768",
         times(32768, 8, "snapkv", "quest", "logquant", "kivi", "fier", "pariskv", "freekv"),
         times(32768, 8, "full")),
        ("speed, 32 rows of 16384", times(16384, 32, "snapkv", "quest", "logquant", "kivi", "fier", "pariskv"),
         times(16384, 32, "freekv", "full")),
        ("speed, 32 rows of 32768",
         times(32768, 32, "snapkv", "quest", "pariskv", "fier", "logquant", "kivi", "freekv"),
         times(32768, 32, "full")),
    ]  # fmt: skip
    table = markdown(["what matters", "choose", "avoid"], rows, numbers=False)
    book = as_title(load_file("perplexity_qwen")["texts"]["book"])
    return (
        f"{table}\nSingle tokens are in {titled('eval_qwen')}; the book is {book}; the model's own text "
        f"goes on from {titled('long_generation')}.\n"
    )


def _listed(
    methods: Sequence[str],
    numbers: Sequence[Any],
    told: Callable[[Any], str],
    *,
    highest_first: bool = False,
) -> str:
    """The methods with their numbers, in the order of these."""
    pairs = sorted(
        zip(methods, numbers, strict=True), key=lambda pair: pair[1], reverse=highest_first
    )
    return ", ".join(f"`{method}` {told(number)}" for method, number in pairs)
