"""FreeKV and ArkVale: pages in host memory, of which those that a step recalled serve the next step too.

Both are `Speculative` over a selection of pages. FreeKV attends with the recall of the step before while a head's query
has not turned. ArkVale recalls before it attends, and moves only the pages that are not yet on the device.
"""

from __future__ import annotations

from typing import Any, Literal

from kvjax.caches import PerLayer, Retrieval, Speculative
from kvjax.demotion import Fifo
from kvjax.presets.settings import Anchors, history, past_dense, require_page
from kvjax.selection import GroupReduce
from kvjax.selectors import BallPages, CentrePages, MinMaxPages
from kvjax.spec import require_int
from kvjax.stores import HostOffload

# FreeKV's settings by the kind of task.
FREEKV: dict[str, dict[str, Any]] = {
    "long_input": {"sink": 128, "local": 128, "tau": 0.8},
    "long_generation": {"sink": 512, "local": 512, "tau": 0.9},
}


def freekv(
    budget: int = 2048,
    *,
    task: Literal["long_input", "long_generation"] = "long_input",
    tau: float | None = None,
    reuse: int = 1,
    page: int = 32,
    summary: Literal["min_max", "centre"] = "min_max",
    group_reduce: GroupReduce = "mean_softmax",
    selection_scale: float | None = None,
    sink: int | None = None,
    local: int | None = None,
    chunk: int | None = None,
    hot: int = 0,
    dense_layers: int = 1,
    share: int = 1,
    anchors: Anchors = None,
) -> PerLayer:
    """FreeKV: keys and values in host memory, and a step attends with the pages that the step before recalled.

    Heads whose query has turned recall before they attend. The rest of the budget is pages, by the box of their
    smallest and largest keys, or with summary="centre" by that of `CentrePages`. The paper's settings are `task`:
    "long_input" has sink and local of 128 and tau of 0.8, "long_generation" 512, 512 and 0.9; each can be given by
    itself too.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      task: the paper's defaults of sink, local and tau: "long_input" or "long_generation".
      tau: heads whose query's cosine to the last is below it recall before they attend.
      reuse: steps that a recall serves, while its head does not turn.
      page: tokens of a page.
      summary: what sums up the keys of a page: "min_max" or "centre".
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not.
      selection_scale: factor of the scores in the selection; None: that of attention. With 1.0 `group_reduce` takes the
        softmax of unscaled products, one of the paper's poolings; "max_score" is another.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      chunk: tokens that are stored together; default: one page.
      hot: tokens of each row and KV head, those selected last, that the device holds too (`HotSet`).
      dense_layers: first layers of the model that attend to everything, on the device.
      share: every so many layers past the dense ones, one selects, and the layers after it attend to the same slots.
      anchors: numbers of the layers that select, in place of `share`; or a file of `kvjax calibrate`.

    **Source:** FreeKV (2025). **Differs:** see `Speculative` and `HostOffload` for who decides and what stays resident;
    a page that is not yet full competes by the summary of the tokens that it has. FreeKV's CUDA code sums pages up
    as summary="centre" does, and pools raw scores by group_reduce="mean_score".
    """
    if task not in FREEKV:
        raise ValueError(f"freekv(task={task!r}) must be one of {', '.join(FREEKV)}")
    if summary not in ("min_max", "centre"):
        raise ValueError(f"freekv(summary={summary!r}) must be 'min_max' or 'centre'")
    sink = FREEKV[task]["sink"] if sink is None else sink
    local = FREEKV[task]["local"] if local is None else local
    tau = FREEKV[task]["tau"] if tau is None else tau
    require_int("freekv(budget=...)", budget, at_least=1)
    require_page("freekv", budget, page, sink, local)
    pages: type[MinMaxPages] | type[CentrePages] = MinMaxPages if summary == "min_max" else CentrePages
    policy = Retrieval(
        selector=pages(page=page, group_reduce=group_reduce),
        store=history("freekv", True, hot, page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=page if chunk is None else chunk),
        dense_below=0,
    )
    late = Speculative(policy, tau=tau, selection_scale=selection_scale, reuse=reuse)
    return past_dense("freekv", dense_layers, late, share, anchors)


def arkvale(
    budget: int = 1024,
    *,
    digest: Literal["cuboid", "sphere"] = "cuboid",
    page: int = 32,
    group_reduce: GroupReduce = "mean_score",
    sink: int = 64,
    local: int = 64,
    dense_layers: int = 2,
) -> PerLayer:
    """ArkVale: keys and values in host memory, and each step recalls the pages whose digest scores best.

    The rest of the budget is pages. Pages that the step before recalled are still on the device and are not moved
    again.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      digest: what sums up the keys of a page: "cuboid", a box around the typical keys (`CentrePages`), or "sphere", a
        ball (`BallPages`).
      page: tokens of a page.
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not.
      sink: first tokens of a row, always attended; the default is two pages.
      local: newest tokens of a row, always attended; the default is two pages.
      dense_layers: first layers of the model that attend to everything, on the device.

    **Source:** ArkVale (Chen et al. 2024). **Differs:** resident are the pages of the last step alone, where the paper
    keeps a cache of pages and replaces the one that scores least; both attend to the same pages. A page that is not yet
    full competes by the digest of the tokens that it has.
    """
    require_int("arkvale(budget=...)", budget, at_least=1)
    if digest not in ("cuboid", "sphere"):
        raise ValueError(f"arkvale(digest={digest!r}) must be 'cuboid' or 'sphere'")
    require_page("arkvale", budget, page, sink, local)
    digests = CentrePages if digest == "cuboid" else BallPages
    policy = Retrieval(
        selector=digests(page=page, group_reduce=group_reduce),
        store=HostOffload(page=page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=page),
        dense_below=0,
    )
    return past_dense("arkvale", dense_layers, Speculative(policy, tau=2.0))  # no cosine reaches 2: never a step late
