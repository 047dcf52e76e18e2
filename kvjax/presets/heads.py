"""RazorAttention and DuoAttention: retrieval heads keep every token, and all other KV heads
keep a window.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.evictors import Sliding
from kvjax.policies import Compensated, Evicting, PerLayer, Policy
from kvjax.presets.head_files import Heads
from kvjax.spec import require_int
from kvjax.validation import shown


def razorattention(
    budget: int = 4096, *, sink: int = 4, heads: str | Heads | None = None
) -> PerLayer:
    """RazorAttention: retrieval heads keep every token; others keep `budget` tokens and the
    mean of the rest.

    Other heads keep the first `sink` tokens, the newest ones, and a compensation token.

    Args:
      budget: tokens that other heads keep.
      sink: first tokens of a row that other heads keep.
      heads: the retrieval heads, or a file of them: `kvjax.evaluate.heads.retrieval_heads`
        finds them for a model by the paper's rule, and `save` writes them. None: no head keeps
        every token.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891). **Differs:** see
    `Compensated` and `kvjax.evaluate.heads.retrieval_heads`. The paper's window grows to a
    fifth of the prompt; here it is `budget`.

    **Checklist:** unit: KV heads, chosen before; besides: in retrieval heads every token, in
    others a mean of the evicted ones; zones: sink 4, window the rest of the budget; budget:
    kept tokens of the other heads; generated: evict the oldest of the window in other heads.
    """
    return _by_head("razorattention", Compensated, budget, sink, heads)


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
    return _by_head("duoattention", None, budget, sink, heads)


def _by_head(
    name: str,
    wrap: Callable[[Evicting], Policy] | None,
    budget: int,
    sink: int,
    heads: str | Heads | None,
) -> PerLayer:
    require_int(f"{name}(budget=...)", budget, at_least=1)
    window = Evicting(evictor=Sliding(sink=sink), budget=budget)
    others: Policy = window if wrap is None else wrap(window)
    if heads is None:
        return PerLayer((), others)
    if isinstance(heads, str):
        heads = Heads.load(heads)
    if not hasattr(heads, "policies"):
        raise ValueError(
            f"{name}(heads=...) takes a kvjax.presets.Heads or a file of them, got {shown(heads)}; "
            "kvjax.evaluate.heads.retrieval_heads finds those of a model"
        )
    return heads.policies(others)
