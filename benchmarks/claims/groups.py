"""FIER's recall by the size of its groups and by tokens or pages, compared with Quest (FIER, Fig. 6 and Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvjax.evaluate.recall import retrieval
from kvjax.policies import Policy
from kvjax.selectors import Fier, MinMaxPages
from kvjax.stores.demotion import Fifo


def groups(budget: int, sizes: Sequence[int] = (32, 64, 128, 256)) -> dict[str, Policy]:
    """FIER by group size, and Quest; each query head selects for itself, as in the papers (FIER, Fig. 6, Table 4).

    Chunks of FIER have the size of the largest group. In between is FIER with whole pages of 16: its gain over Quest is
    due to the scores, and its loss against FIER is due to pages in place of single tokens.
    """
    fier = {f"Fier g={g}": retrieval(Fier(group=g, group_reduce="per_head"), budget, leave=max(sizes)) for g in sizes}
    pages = retrieval(Fier(group=sizes[0], page=16, group_reduce="per_head"), budget)
    pages = replace(pages, demote=Fifo(leave=max(sizes)))
    quest = retrieval(MinMaxPages(page=16, group_reduce="per_head"), budget)
    return {**fier, f"Fier g={sizes[0]}, pages of 16": pages, "Quest": quest}
