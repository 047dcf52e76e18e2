"""FreeKV: `Speculative` over pages in host memory."""

from __future__ import annotations

from typing import Any, Literal

from kvjax.numerics.selection import GroupReduce
from kvjax.policies import PerLayer, Retrieval, Speculative
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, history, over_layers, require_page
from kvjax.selectors import CentrePages, MinMaxPages
from kvjax.spec import require_int
from kvjax.stores import Store
from kvjax.stores.demotion import Fifo
from kvjax.validation import check_one_of

# FreeKV's settings by the kind of task.
FREEKV: dict[str, dict[str, Any]] = {
    "long_input": {"sink": 128, "local": 128, "tau": 0.8},
    "long_generation": {"sink": 512, "local": 512, "tau": 0.9},
}


@published(
    "all tokens in host memory; attends to the pages that the step before recalled",
    paper="FreeKV 2025",
    released="summary=centre,group_reduce=mean_score",
)
def freekv(
    budget: int = 2048,
    *,
    task: Literal["long_input", "long_generation"] = "long_input",
    tau: float | None = None,
    page: int = 32,
    summary: Literal["min_max", "centre"] = "min_max",
    group_reduce: GroupReduce = "mean_softmax",
    selection_scale: float | None = None,
    sink: int | None = None,
    local: int | None = None,
    chunk: int | None = None,
    store: Store | str = "host",
    layers: Layers = Layers(dense=1),
) -> PerLayer:
    """FreeKV: keys and values in host memory, and a step attends with the pages that the
    previous step recalled.

    Heads whose query has changed direction recall before they attend. Pages take the budget
    that sink and local window leave. `task` sets the paper's defaults: sink 128, local 128 and
    tau 0.8 for "long_input"; 512, 512 and 0.9 for "long_generation". Each of them can also be
    set separately.

    Args:
      task: the paper's defaults of sink, local and tau: "long_input" or "long_generation".
      tau: heads whose query has a cosine with the previous one below tau recall before they
        attend.
      summary: summary of the keys of a page: "min_max" (`MinMaxPages`) or "centre"
        (`CentrePages`).
      selection_scale: factor of the scores in the selection; None: that of attention. With 1.0
        `group_reduce` takes the softmax of unscaled products, one of the paper's poolings;
        "max_score" is another.
      chunk: tokens that are stored together; default: one page.

    **Source:** FreeKV (2025). **Differs:** see `Speculative` for who decides and `HostOffload`
    for what stays on the device; a page that is not yet full competes by the summary of its
    tokens so far. FreeKV's CUDA code summarises pages as summary="centre" does, and pools raw
    scores as group_reduce="mean_score" does.

    **Checklist:** unit: pages of 32, for each KV head; besides: sink and window, and the token
    that left the window since the recall; zones: sink 128, window 128, or 512 and 512 for long
    generation; budget: every token that a step reads; generated: paged and moved to the host as
    the prompt is.
    """
    check_one_of("freekv", FREEKV, task=task)
    check_one_of("freekv", ("min_max", "centre"), summary=summary)
    sink = FREEKV[task]["sink"] if sink is None else sink
    local = FREEKV[task]["local"] if local is None else local
    tau = FREEKV[task]["tau"] if tau is None else tau
    require_int("freekv(budget=...)", budget, at_least=1)
    require_page("freekv", budget, page, sink, local)
    pages: type[MinMaxPages] | type[CentrePages] = (
        MinMaxPages if summary == "min_max" else CentrePages
    )
    policy = Retrieval(
        selector=pages(page=page, group_reduce=group_reduce),
        store=history("freekv", store, page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=page if chunk is None else chunk),
    )
    late = Speculative(policy, tau=tau, selection_scale=selection_scale)
    return over_layers("freekv", layers, late)
