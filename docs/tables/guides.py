"""The tables of docs/guides/: decoding several tokens, offload to the host, and layers that
share a selection.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from docs.tables.reading import RESULTS, load_file, load_rows, load_scores
from docs.tables.writing import markdown, perplexity_change, short
from kvjax.presets.settings import HOSTS
from kvjax.spec import CacheSpec


def several_tokens() -> str:
    """Time of an attention layer for T tokens of a row in one call, and over the time of one."""
    rows = {
        (row["method"], row["tokens"]): row
        for row in load_rows("decode_tokens")
        if not row.get("alike")
    }
    names = [
        method
        for method in ("full", "fier", "quest", "pariskv", "logquant")
        if (method, 8) in rows
    ]

    def cell(method: str, tokens: int) -> str:
        return f"{rows[method, tokens]['us']:.0f} ({rows[method, tokens]['times_one']:.1f})"

    return markdown(
        ["cache", "1", "8"], [[f"`{m}`", *(cell(m, t) for t in (1, 8))] for m in names]
    )


def lossless() -> str:
    """Speed of drafts by a model itself over full attention, by text; and where texts differ."""
    rows = _lossless("speed")
    if not rows:
        return "Not measured yet: `python benchmarks/lossless.py`.\n"
    same = {(row["text"], row["method"]): row for row in _lossless("same")}

    def until(row: dict[str, Any], which: str) -> str:
        counts = (
            same.get((row["text"], row["method"]), {}).get("until_difference", {}).get(which)
        )
        return "" if not counts else f"{np.mean(counts):.0f} of {row['new']}"

    others = ("self_draft", "full with prompt look-up", "full with half of the rows")
    body = [
        [
            row["text"],
            f"`{row['method']}`",
            f"{row['length']} x {row['batch']}",
            f"{row['full']['tokens_per_second']:.0f}",
            f"{row['self_draft']['tokens_per_second']:.0f}",
            f"{row['times_full']:.2f}",
            f"{row['self_draft']['tokens_per_step']:.2f}",
            *(until(row, which) for which in others),
        ]
        for row in rows
    ]
    titles = [
        "text",
        "draft by",
        "tokens x rows",
        "`full`, tokens/s",
        "`SelfDraft`, tokens/s",
        "times",
        "tokens a step",
        "same tokens: `SelfDraft`",
        "`full` with look-up",
        "`full`, half of the rows",
    ]
    return markdown(titles, body)


def lossless_same() -> str:
    """Where texts in bfloat16 differ from that of full attention first, and by how much its best
    logit exceeds the second there.
    """
    body = []
    for row in _lossless("same"):
        for which, counts in row["until_difference"].items():
            margins = [margin for margin in row["margins"][which] if margin is not None]
            alike = len(counts) - len(margins)
            body.append(
                [
                    row["text"],
                    "`SelfDraft`" if which == "self_draft" else which.replace("full", "`full`"),
                    f"{alike} of {len(counts)}",
                    f"{np.median(counts):.0f} of {row['new']}",
                    short(float(np.median(margins)), 3) if margins else "",
                    short(max(margins), 3) if margins else "",
                ]
            )
    titles = [
        "text",
        "beside `full`",
        "rows alike to the end",
        "tokens until a difference, median",
    ]
    return markdown([*titles, "margin there, median", "largest"], body)


def lossless_line() -> str:
    """Two sentences for README and the FAQ: the least of the speeds of the method whose least is
    highest, what is the same in bfloat16, and their condition.
    """
    rows = _lossless("speed")
    if not rows:
        return "How much faster is not measured yet (`python benchmarks/lossless.py`).\n"
    found = load_file("lossless")
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)

    def times(row: dict[str, Any]) -> float:
        return float(row["times_full"])

    least = max((min(texts, key=times) for texts in by_method.values()), key=times)
    line = (
        f"{found['model']['name']} on one {found['device']}, {least['batch']} rows of {least['length']} tokens, "
        f"`{least['method']}`: at least {_down(least['times_full'])} times the tokens a second of `full`."
    )
    same = _lossless("same")
    if same:
        by = (
            ""
            if same[0]["method"] == least["method"]
            else f", drafted by `{same[0]['method']}`,"
        )
        line += (
            f" In bfloat16 texts{by} part where two tokens are nearly as likely: after {_until('self_draft', same)} of "
            f"{same[0]['new']} new tokens, and those of `full` in a batch of half the rows after "
            f"{_until('full with half of the rows', same)} (means by text)."
        )
    return line + "\n"


def _down(times: float) -> str:
    """A number with two decimals that it is at least."""
    return f"{math.floor(100 * times) / 100:.2f}"


def _until(which: str, rows: list[dict[str, Any]]) -> str:
    """The least and the most new tokens before a difference, of the means of the texts."""
    means = [np.mean(row["until_difference"][which]) for row in rows]
    return f"{min(means):.0f} to {max(means):.0f}"


def _derived(row: dict[str, Any]) -> str:
    """The least and the most speed of three texts that is derived from the steps of `row`."""
    times = row["derived"]["times_full"]
    measured = [times[name] for name in times if not name.startswith("each token")]
    return f"{min(measured):.2f} to {max(measured):.2f}" if measured else ""


def lossless_one_row() -> str:
    """The derived speed of an 8B with one row of 131072 tokens."""
    (row,) = (row for row in _lossless("steps") if (row["length"], row["batch"]) == (131072, 1))
    return _derived(row)


def lossless_steps() -> str:
    """Steps of whole layers of the 8B shape, and the speed that is derived from them."""
    body = [
        [
            f"{row['length']} x {row['batch']}",
            f"{row['full_ms'] / row['layers']:.2f}",
            f"{row['draft_ms'] / row['layers']:.2f}",
            f"{row['verify_5_over_full']:.2f}",
            f"{row['verify_8_over_full']:.2f}",
            _derived(row),
        ]
        for row in _lossless("steps")
    ]
    titles = [
        "tokens x rows",
        "`full`, ms a layer",
        "draft, ms a layer",
        "verify 5, times `full`",
        "verify 8, times `full`",
        "derived: times `full`",
    ]
    return markdown(titles, body)


def accepted_means() -> tuple[dict[tuple[str, int], float], int]:
    """Tokens of a draft of 8 that are right, by method and length: the mean over texts, where all
    were measured; and the number of texts.
    """
    rows = _acceptance()
    texts = {row["text"] for row in rows}
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["method"], row["length"]), []).append(row["accepted"])
    whole = {key: float(np.mean(one)) for key, one in found.items() if len(one) == len(texts)}
    return whole, len(texts)


def accepted() -> str:
    """Tokens of a draft of 8 that are right, the mean over texts, by method, budget and length."""
    whole, _ = accepted_means()
    rows = [{"method": m, "length": n, "accepted": mean} for (m, n), mean in whole.items()]
    return _by_length(rows)


def accepted_by_position(budget: int = 1024) -> str:
    """The share of drafts whose first 1, 2, ... tokens are right at the longest length, the mean
    over texts, of methods at one budget and of codes.
    """
    rows = _acceptance()
    texts = {row["text"] for row in rows}
    wanted = [row for row in rows if _by_budget(row["method"])[0] in (0, budget)]
    found: dict[tuple[int, str], list[Any]] = {}
    for row in wanted:
        found.setdefault((row["length"], row["method"]), []).append(row["by_position"])
    whole = {key: np.mean(one, axis=0) for key, one in found.items() if len(one) == len(texts)}
    longest = max(length for length, _ in whole)
    methods = sorted({m for length, m in whole if length == longest}, key=_by_budget)
    places = range(1, 1 + len(whole[longest, methods[0]]))
    body = [[f"`{m}`", *(short(share) for share in whole[longest, m])] for m in methods]
    return markdown([f"draft, {longest} tokens", *map(str, places)], body)


def accepted_by_text(budget: int = 1024) -> str:
    """Tokens of a draft of 8 that are right by text, at each length in turn."""
    rows = _acceptance()
    texts = list(dict.fromkeys(row["text"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    found = {(row["method"], row["text"], row["length"]): row["accepted"] for row in rows}
    methods = sorted({m for m, *_ in found if _by_budget(m)[0] in (0, budget)}, key=_by_budget)

    def cell(method: str, text: str) -> str:
        return " / ".join(_mean(found.get((method, text, n))) or "-" for n in lengths)

    body = [[f"`{m}`", *(cell(m, text) for text in texts)] for m in methods]
    return markdown([f"draft, {' / '.join(map(str, lengths))} tokens", *texts], body)


def accepted_prose() -> str:
    """Tokens of a draft of 8 that are right in prose, by method, budget and length; and how they
    change from the shortest length to the longest.
    """
    return _by_length([row for row in _acceptance() if row["text"] == "prose"])


def accepted_smollm2() -> str:
    """`accepted_prose` of the smaller model."""
    rows = load_rows("lossless_acceptance_smollm2")
    return _by_length([row for row in rows if row["text"] == "prose"])


def _acceptance() -> list[dict[str, Any]]:
    """The rows of the part `acceptance` of `benchmarks/lossless.py`, over all of its runs."""
    files = [
        f"lossless_acceptance{run}"
        for run in ("", "_31744", "_31744_more", "_31744_gsm8k", "_more")
    ]
    return [
        row for file in files if (RESULTS / f"{file}.json").is_file() for row in load_rows(file)
    ]


def _by_length(rows: list[dict[str, Any]]) -> str:
    """Tokens of a draft of 8 that are right in one text."""
    found = {(row["method"], row["length"]): row["accepted"] for row in rows}
    lengths = sorted({length for _, length in found})
    methods = sorted({method for method, _ in found}, key=_by_budget)
    body = []
    for method in methods:
        line = [found.get((method, length)) for length in lengths]
        cells = [f"`{method}`", *map(_mean, line)]
        if len(lengths) > 1:
            first, last = line[0], line[-1]
            both = first is not None and last is not None
            cells.append(f"{last - first:+.2f}" if both else "")
        body.append(cells)
    change = ["change"] if len(lengths) > 1 else []
    return markdown(["draft", *(f"{length} tokens" for length in lengths), *change], body)


def _by_budget(method: str) -> tuple[int, str]:
    """The order of methods in tables: codes, which have no budget, and then by budget."""
    return int(method.partition("budget=")[2] or 0), method


def _mean(tokens: float | None) -> str:
    return "" if tokens is None else f"{tokens:.2f}"


def _lossless(part: str) -> list[dict[str, Any]]:
    """The rows of a part of `benchmarks/lossless.py`; none before it has run."""
    if not (RESULTS / "lossless.json").is_file():
        return []
    return [row for row in load_rows("lossless") if row["part"] == part]


def hit_rates(file: str = "hit_rates") -> str:
    """Share of the selected pages that a hot set has, along the text, by its size."""
    found = load_file(file)
    rows = {row["method"]: row for row in found["rows"] if row["along"] == "text"}
    names = ("fier", "pariskv", "quest", "freekv")
    sizes = [key for key in rows["fier"] if key.endswith(" x")]  # in budgets
    body = [
        [
            f"{int(size.split()[0]) * found['budget']} tokens",
            *(short(rows[name][size]) for name in names),
        ]
        for size in sizes
    ]
    return markdown(["hot set", *(f"`{name}`" for name in names)], body)


def host_steps() -> str:
    """Time of an attention layer with the history on the device, on the host, or there with a
    hot set of 8192.
    """
    alike = (1.0, 0.97, 0.9, 0.0)
    rows: dict[tuple[str, int, int], dict[Any, str]] = {}
    for row in (row for row in load_rows("host_steps") if row["where"] in ("device", "host")):
        what = (
            row["correlation"]
            if row["hot"] == 8192
            else row["where"]
            if not row["hot"]
            else None
        )
        read = f" ({row['read']:.0f})" if row["where"] == "host" else ""
        rows.setdefault((row["method"], row["length"], row["kv_heads"]), {})[what] = (
            f"{row['us']:.0f}{read}"
        )
    head = [
        "cache",
        "tokens",
        "KV heads",
        "device",
        "host",
        *(f"hot set, {share}" for share in alike),
    ]
    cells = [[f"`{m}`", str(n), str(K), *(c.get(w, "") for w in ("device", "host", *alike))]
             for (m, n, K), c in rows.items()]  # fmt: skip
    return markdown(head, cells)


def host_codes() -> str:
    """Bytes of a token by the codes of a history in host memory, and the effect on two models'
    perplexity.
    """
    spec = CacheSpec(
        batch=1, q_heads=1, kv_heads=1, head_dim=128, capacity=256, dtype="bfloat16"
    )
    biased = {kept_as(row): row for row in load_rows("perplexity_host_codes_qwen")[1:]}
    rows = []
    for row in load_rows("perplexity_host_codes")[1:]:
        if (kept := kept_as(row) or "host") in HOSTS:
            size, other = f"{HOSTS[kept]().bytes_per_token(spec):.0f}", biased[kept_as(row)]
            rows.append([kept, size, perplexity_change(row), perplexity_change(other)])
    return markdown(
        ["kept as", "bytes a token and KV head", "SmolLM2-135M", "Qwen2.5-Coder-1.5B"], rows
    )


def kept_as(row: dict[str, Any]) -> str:
    """The codes that a cache's setting names, or nothing."""
    return row["cache"].rpartition("=")[2] if "=" in row["cache"] else ""


def shared_quality() -> str:
    """Answers and perplexity of a published model by the layers that select, with the error of
    attention outputs.
    """
    (needles, keys), texts = (
        load_scores("eval_shared_qwen").values(),
        load_rows("perplexity_shared_qwen"),
    )
    changes, rows = {row["cache"]: perplexity_change(row) for row in texts}, []
    for method, shares in (("fier", (2, 4, 8)), ("pariskv", (4,)), ("quest", (4,))):
        plans = {share: load_file(f"calibrate_qwen_{method}_{share}") for share in shares}
        own = [(method, "all 26", plans[4]["error"]["share=1"])]
        for share, plan in plans.items():
            count, error = len(plan["anchors"]), plan["error"]
            own.append(
                (
                    f"{method}:share={share}",
                    f"{-(-26 // share)}, `share={share}`",
                    error[f"share={share}"],
                )
            )
            file = f"{method}:anchors=calibrate_{method}_{share}.json"
            own.append((file, f"{count}, by `--share {share}`", error["anchors, best heads"]))
        for cache, told, error in own:
            scores = (short(found[f"{cache}@1802"]["mean"]) for found in (needles, keys))
            rows.append([f"`{method}`", told, short(error), *scores, changes[cache]])
    return markdown(
        ["cache", "layers that select", "error", "needles", "pass keys", "perplexity"], rows
    )


def shared_steps() -> str:
    """Time of an attention layer, mean over layers of which every n-th selects."""
    found = {
        (row["method"], row["length"], row["batch"], row["share"]): row["us"]
        for row in load_rows("shared")
    }
    shares = sorted({key[3] for key in found})
    rows = []
    for method, length, batch in dict.fromkeys(key[:3] for key in found):
        cells = (found.get((method, length, batch, share)) for share in shares)
        rows.append(
            [
                f"`{method}`",
                f"{batch} x {length}",
                *("" if us is None else f"{us:.1f}" for us in cells),
            ]
        )
    return markdown(["cache", "rows x tokens", *(f"share {share}" for share in shares)], rows)
