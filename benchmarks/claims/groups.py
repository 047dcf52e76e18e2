"""FIER's recall by the size of its groups and by tokens or pages, compared with Quest (FIER, Fig. 6 and Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvjax.evaluate.recall import retrieval
from kvjax.policies import Policy
from kvjax.selectors import Fier, MinMaxPages
from kvjax.stores.demotion import Fifo


def groups(budget: int, sizes: Sequence[int] = (32, 64, 128, 256)) -> dict[str, Policy]:
    """FIER by group size, by pages and by tokens, and Quest; each query head selects for itself, as in the papers.

    The cases of one comparison index tokens in equal chunks, so that as many are pending in each. Groups of all sizes
    have chunks of the largest one. Pages of 16 have chunks of 32: Quest's, and FIER's by the mean of their 1-bit scores
    as in the paper and by the best of them, beside single tokens.
    """
    own: dict[str, Any] = {"group_reduce": "per_head"}
    fier = {f"Fier g={g}": retrieval(Fier(group=g, **own), budget, leave=max(sizes)) for g in sizes}
    by_page = {
        "Fier g=32": Fier(group=32, **own),
        "Fier g=32, pages by mean": Fier(group=32, page=16, page_reduce="mean", **own),
        "Fier g=32, pages by best": Fier(group=32, page=16, page_reduce="max", **own),
        "Quest": MinMaxPages(page=16, pending="exact", **own),
    }
    pages = {
        f"{name}, chunks of 32": replace(retrieval(selector, budget), demote=Fifo(leave=32))
        for name, selector in by_page.items()
    }
    return {**fier, **pages, "Quest": retrieval(MinMaxPages(page=16, **own), budget)}
