"""The tables of docs/methods.md: the registry, and measurements that explain a method."""

from __future__ import annotations

from docs.tables.reading import load_measured, load_rows
from docs.tables.writing import markdown, short
from kvjax.presets import REGISTRY
from kvjax.spec import CacheSpec


def methods() -> str:
    """The registry, with the bytes that a stored token takes in a layer of Llama-3.1-8B."""
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072)
    rows = [
        [
            f"[`{p.name}`](methods.md#{p.name})",
            p.keeps,
            f"{p.policy().bytes_per_token(spec):,.0f}",
            p.paper,
        ]
        for p in REGISTRY.values()
    ]
    return markdown(["name", "what it keeps", "bytes a token", "paper"], rows, numbers=False)


def comparators() -> str:
    """What differs between methods of one budget, from their docstrings, and the settings of
    their papers.
    """
    rows = []
    for preset in REGISTRY.values():
        if preset.checklist:
            papers = dict.fromkeys(preset.setting(released) for released in (False, True))
            told = "" if preset.paper == "-" else "; ".join(f"`{text}`" for text in papers)
            least = str(preset.least_budget or "")
            rows.append([f"`{preset.name}`", *preset.checklist.values(), least, told])
    head = (
        "method",
        "selects",
        "attends besides to",
        "sink and window",
        "the budget counts",
        "generated tokens",
    )
    return markdown(
        [*head, "least budget", "the paper's setting; its code's"], rows, numbers=False
    )


def low_rank() -> str:
    """Error of keys as factors of low rank, before and after RoPE."""
    cells = {
        (row["keys"], row["basis"], row["share"]): row["error"] for row in load_rows("low_rank")
    }
    shares = sorted({share for *_, share in cells})
    rows = [
        [kind, basis, *(short(cells[kind, basis, share]) for share in shares)]
        for kind, basis in dict.fromkeys((kind, basis) for kind, basis, _ in cells)
    ]
    return markdown(
        ["keys", "basis of", *(f"rank {100 * share:.0f} % of K D" for share in shares)], rows
    )


def coverage() -> str:
    """Share of attention on the exact tokens, by which tokens are exact, and the error with the
    rest in 2 bits.
    """
    found = load_measured("measure_logquant_smollm2")
    rows = []
    for title, kept, rounded in (
        ("log-spaced (LogQuant)", "log-sparse, drop", "log-sparse, 2 bits"),
        ("the newest", "window, drop", "window, 2 bits"),
        ("sink and the newest", "sink and window, drop", None),
        ("the newest, KIVI's groups", "KIVI, 2 bits", "KIVI, 2 bits"),
    ):
        mean = found[kept]
        error = "" if rounded is None else short(found[rounded]["error"], 3)
        rows.append([title, short(mean["mass"], 3), short(mean["mass_past_sinks"], 3), error])
    head = [
        "exact tokens",
        "share of attention",
        "past the first two tokens",
        "error of the output, rest in 2 bits",
    ]
    return markdown(head, rows)
