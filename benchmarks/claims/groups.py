"""Policies to compare on live queries: all selectors, rules by which a group shares a
selection, and FIER's groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvjax.evaluate.capture import Live
from kvjax.evaluate.recall import Reads, reads, retrieval
from kvjax.evaluate.store import Progress
from kvjax.numerics.selection import GROUP_REDUCES
from kvjax.policies import PerLayer, Policy
from kvjax.selectors import CentrePages, Exact, Fier, MinMaxPages, Paris
from kvjax.stores.demotion import Fifo


def groups(budget: int, sizes: Sequence[int] = (32, 64, 128, 256)) -> dict[str, Policy]:
    """FIER by group size, by pages and by tokens, and Quest (FIER, Fig. 6 and Table 4).

    Each query head selects for itself, as in the papers.

    The cases of one comparison index tokens in equal chunks, so that as many are pending in
    each. Groups of all sizes have chunks of the largest one. Pages of 16 have chunks of 32:
    Quest's, and FIER's by the mean of their 1-bit scores as in the paper and by the best of
    them, beside single tokens.
    """
    own: dict[str, Any] = {"group_reduce": "per_head"}
    fier = {
        f"Fier g={g}": retrieval(Fier(group=g, **own), budget, leave=max(sizes)) for g in sizes
    }
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


def selectors(budget: int) -> dict[str, Policy]:
    """All selectors of kvjax, and exact selection, at one budget in every layer, with a sink of
    4 tokens and a local window of 16.

    Tokens are indexed in chunks of 32 or as pages, so that nearly all of a selection comes from
    the index.
    """
    return {
        "exact": retrieval(Exact(), budget),
        "fier": retrieval(Fier(), budget),
        "pariskv": retrieval(Paris(), budget),
        "quest": retrieval(MinMaxPages(page=16, pending="box"), budget),
        "quest:page=32": retrieval(MinMaxPages(page=32, pending="box"), budget),
        "centre_pages:page=32": retrieval(CentrePages(page=32), budget),
    }


def group_reduces(budget: int) -> dict[str, Policy]:
    """FIER and Quest under each `group_reduce` rule, including "per_head", a selection for each
    query head.
    """
    policies: dict[str, Policy] = {}
    for group_reduce in GROUP_REDUCES:
        rule: Any = group_reduce
        policies[f"fier:group_reduce={group_reduce}"] = retrieval(
            Fier(group_reduce=rule), budget
        )
        pages = MinMaxPages(page=16, group_reduce=rule, pending="box")
        policies[f"quest:group_reduce={group_reduce}"] = retrieval(pages, budget)
    return policies


def compare(
    live: Live,
    policies: Mapping[str, Policy | PerLayer],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[str, Reads]:
    """`reads` of each policy by name. `progress` gets the policies done, their number, and the
    next one's name.
    """
    found = {}
    for done, (name, policy) in enumerate(policies.items()):
        if progress is not None:
            progress(done, len(policies), name)
        found[name] = reads(live, policy, **settings)
    return found
