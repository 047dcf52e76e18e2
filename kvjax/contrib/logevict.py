"""LogQuant's spacing of tokens as a rule of eviction, with which its paper compares."""

from __future__ import annotations

from kvjax.evictors import LogSpaced
from kvjax.policies import PerLayer
from kvjax.presets.evicting import by_evictor
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers

__all__ = ["logevict"]


@published(
    "tokens spaced by logarithm of their age, up to the budget",
    paper="LogQuant 2025",
)
def logevict(budget: int = 126, *, layers: Layers = Layers(dense=0)) -> PerLayer:
    """LogQuant without its quantised tokens: `budget` tokens are kept, sparser with age, and
    the rest are evicted.

    **Source:** LogQuant (2025), Algorithm 1, in the evicting variant that the paper compares
    with. **Differs:** see `LogSpaced`: tokens are evicted one at a time.

    **Checklist:** unit: tokens that are evicted, the same in all heads; besides: all kept
    tokens; zones: no sink, window of a third of the budget; budget: kept tokens; generated:
    evict spaced ones.
    """
    return by_evictor("logevict", LogSpaced(), budget, layers)
