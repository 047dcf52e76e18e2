"""DuoAttention: retrieval heads keep every token, and all other KV heads keep the first and the
newest.
"""

from __future__ import annotations

from kvjax.evictors import Sliding
from kvjax.policies import Evicting, PerLayer
from kvjax.presets.head_files import Heads, by_heads
from kvjax.presets.preset import published
from kvjax.spec import require_int

__all__ = ["duoattention"]


@published(
    "retrieval heads keep all tokens; other heads the first and the newest",
    paper="DuoAttention 2024",
    released="budget=320",
)
def duoattention(
    budget: int = 256, *, sink: int = 64, heads: str | Heads | None = None
) -> PerLayer:
    """DuoAttention: retrieval heads keep every token; others keep the first `sink` tokens and
    the newest.

    Args:
      budget: tokens that other heads keep.
      sink: first tokens of a row that other heads keep.
      heads: the retrieval heads, or a file of them, as in `razorattention`. None: all heads
        keep `budget`.

    **Source:** DuoAttention (Xiao et al. 2024, arXiv 2410.10819). **Differs:** the paper learns
    which heads retrieve, by training gates on synthetic texts; here the heads are given, or
    found by the rule of RazorAttention. The budget counts the sink: 192 newest tokens by
    default, and budget=320 for the 256 of the released code.

    **Checklist:** unit: KV heads, chosen before; besides: in retrieval heads every token;
    zones: sink 64, window the rest of the budget; budget: kept tokens of the other heads;
    generated: evict the oldest of the window in other heads.
    """
    require_int("duoattention(budget=...)", budget, at_least=1)
    window = Evicting(evictor=Sliding(sink=sink), budget=budget)
    return by_heads("duoattention", window, heads)
