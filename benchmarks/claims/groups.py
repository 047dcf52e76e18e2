"""FIER's recall by the size of its groups, beside Quest's pages (FIER, Fig. 6 and Table 4)."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.caches import Policy
from kvjax.evaluate.recall import retrieval
from kvjax.selectors import Fier, MinMaxPages


def groups(budget: int, sizes: Sequence[int] = (32, 64, 128, 256)) -> dict[str, Policy]:
    """FIER by group size beside Quest, each query head choosing for itself as in the papers (FIER, Fig. 6, Table 4).

    Chunks of FIER have the size of the largest group.
    """
    fier = {f"Fier g={g}": retrieval(Fier(group=g, group_reduce="per_head"), budget, leave=max(sizes)) for g in sizes}
    return {**fier, "Quest": retrieval(MinMaxPages(page=16, group_reduce="per_head"), budget)}
