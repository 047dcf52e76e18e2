"""Baselines for comparison: attention to everything, and a selection by exact scores."""

from __future__ import annotations

from kvjax.numerics.selection import GroupReduce
from kvjax.policies import Full, PerLayer, Retrieval
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers
from kvjax.selectors import Exact
from kvjax.spec import require_int
from kvjax.stores.demotion import Fifo


@published(
    "all tokens; attends to all",
)
def full() -> PerLayer:
    """Full attention: every token is kept, and every query attends to all of them."""
    return PerLayer((), Full())


@published(
    "all tokens; attends to the budget by exact scores, for comparison",
)
def exact(
    budget: int = 1024,
    *,
    group_reduce: GroupReduce = "mean_softmax",
    sink: int = 0,
    local: int = 1,
    chunk: int = 256,
    layers: Layers = Layers(dense=2),
) -> PerLayer:
    """The oracle: every token is kept, and a step attends to the `budget` tokens whose true
    scores are best.

    An upper bound for `fier` and every other selector, with the settings of `fier`. It stores
    the keys twice and reads all of them, so it saves nothing. See `Exact` for the effect of
    `group_reduce`.

    **Checklist:** unit: tokens, for each KV head; besides: the new token; zones: sink 0, window
    1; budget: every token that a step reads; generated: compete as the prompt's do.
    """
    require_int("exact(budget=...)", budget, at_least=1)
    policy = Retrieval(
        selector=Exact(group_reduce=group_reduce),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
    )
    return over_layers("exact", layers, policy)
