"""FIER, ParisKV and Quest: every token is kept, and a step attends to those that a small index
scores best.
"""

from __future__ import annotations

from typing import Literal

from kvjax.numerics.selection import GroupReduce
from kvjax.policies import PerLayer, Retrieval
from kvjax.policies.short import DenseCapacity
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, capacity_of, history, over_layers, require_page
from kvjax.selectors import Fier, MinMaxPages, Paris
from kvjax.selectors.fier import PageReduce
from kvjax.spec import require_int
from kvjax.stores import Store
from kvjax.stores.demotion import Buffer, Fifo
from kvjax.validation import check_one_of

# the paper's sink and local window, and the k tokens that it selects besides them
PARISKV_BUDGET = 4 + 128 + 100


@published(
    "all tokens, and keys in 1 bit; attends to the budget",
    paper="FIER 2025",
    paper_setting="group_reduce=per_head,chunk=32",
)
def fier(
    budget: int = 1024,
    *,
    group: int = 32,
    page: int = 1,
    page_reduce: PageReduce = "max",
    group_reduce: GroupReduce = "mean_softmax",
    sink: int = 0,
    local: int = 1,
    chunk: int = 256,
    store: Store | str = "device",
    dense_capacity: DenseCapacity = "auto",
    layers: Layers = Layers(dense=2),
) -> PerLayer:
    """FIER: every token is kept, and a step attends to the `budget` tokens whose 1-bit keys
    score best.

    Tokens of the history are scored by 1-bit keys (`kvjax.Fier` has the formulas), and pending
    ones by their exact keys. The paper has no tokens that are always attended, so `sink` is 0
    and `local` is only the new token.

    Args:
      group: tokens that share a scale and a zero point of the 1-bit keys.
      page: tokens that are selected together. Above 1: an ablation, in plain JAX.
      page_reduce: the score of a page: "max" of its tokens' scores, or "mean", as in the
        paper's ablation.

    **Source:** FIER (2025), Algorithm 1; g = 32. **Differs:** a GQA group shares a selection
    (`group_reduce`; "per_head" is the paper's rule). A group is indexed with its chunk; with
    chunk=group that is as soon as it is full, as in the paper.

    **Checklist:** unit: tokens, for each KV head; besides: the new token; zones: sink 0, window
    1; budget: every token that a step reads; generated: compete by exact scores until a chunk
    of 256 is indexed.
    """
    require_int("fier(budget=...)", budget, at_least=1)
    require_int("fier(page=...)", page, at_least=1)
    if page > 1:
        require_page("fier", budget, page, sink, local)
    policy = Retrieval(
        selector=Fier(
            group=group, group_reduce=group_reduce, page=page, page_reduce=page_reduce
        ),
        store=history("fier", store, page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
        dense_capacity=capacity_of(dense_capacity, store, layers),
    )
    return over_layers("fier", layers, policy)


@published(
    "all tokens, and rotated keys in 4 bits; attends to the budget",
    paper="ParisKV 2026",
    paper_setting="budget=360,local=256,chunk=512,buffer=attend,dense_below=2048,store=host",
)
def pariskv(
    budget: int = PARISKV_BUDGET,
    *,
    selector: Paris = Paris(),
    sink: int = 4,
    local: int = 128,
    chunk: int = 256,
    buffer: Literal["select", "attend"] = "select",
    dense_below: int = 1024,
    store: Store | str = "device",
    dense_capacity: DenseCapacity = "auto",
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """ParisKV: every token is kept, and a step attends to sink, local window and the best keys
    of a rotated index.

    The paper selects k = 100 tokens besides sink and local window. The budget counts all of
    them, so its default is larger. The paper's ranges are sink 4..64, local 128..512, `chunk`
    (its update buffer) 256..512 and full attention below 1K..2K tokens; no layer is skipped.

    Args:
      selector: the index, and how keys are voted for and estimated. In text its fields are
        settings: `candidates=200`.
      buffer: "select": pending tokens compete with the history by exact scores, within the
        budget. "attend", as in the paper: a step attends to all of them, in addition to the
        budget.
      dense_below: rows with fewer tokens attend to all of them.

    **Source:** ParisKV (Qi et al. 2026). **Differs:** the default of `buffer`. The paper keeps
    the history's keys and values in host memory, as store="host" does; on the device the same
    tokens are selected. Coded radii are (Proposition 4.1), in its vote; Paris(radius_bits=4)
    codes those of the estimates. The vote has 2^m centroids per block, not fewer, and one
    radius.

    **Checklist:** unit: tokens, for each KV head; besides: sink and window, with
    buffer='attend' the pending tokens too; zones: sink 4, window 128; budget: sink, window and
    the selected tokens, 100 by default, not the buffer; generated: compete by exact scores
    until a chunk of 256 is indexed.
    """
    require_int("pariskv(budget=...)", budget, at_least=1)
    check_one_of("pariskv", ("select", "attend"), buffer=buffer)
    beside = chunk if buffer == "attend" else 0
    policy = Retrieval(
        selector=selector,
        store=history("pariskv", store),
        budget=budget + beside,
        sink=sink,
        local=local + beside,
        demote=Buffer(leave=chunk) if beside else Fifo(leave=chunk),
        dense_below=dense_below,
        dense_capacity=capacity_of(dense_capacity, store, layers),
    )
    return over_layers("pariskv", layers, policy)


@published(
    "all tokens, and a box around the keys of each page; attends to the budget",
    paper="Quest 2024",
    paper_setting="group_reduce=per_head",
    released="group_reduce=per_head,newest=select",
)
def quest(
    budget: int = 1024,
    *,
    page: int = 16,
    least_pages: int = 3,
    newest: Literal["attend", "select"] = "attend",
    group_reduce: GroupReduce = "mean_softmax",
    sink: int = 0,
    local: int | None = None,
    chunk: int | None = None,
    store: Store | str = "device",
    dense_capacity: DenseCapacity = "auto",
    layers: Layers = Layers(dense=2),
) -> PerLayer:
    """Quest: every token is kept, and a step attends to the pages whose box of smallest and
    largest keys scores best.

    The budget consists of whole pages. With newest="attend", as in the CUDA kernels of the
    released code, the page that is not yet full is always attended, and counts as a whole one.
    With "select", as in the evaluation of the released code, it competes by the box of its
    tokens so far; only the newest token is then always attended, in addition to the budget if
    its page is not selected.

    Args:
      least_pages: the fewest pages that a step reads.
      newest: whether the newest page is always attended ("attend"), or competes ("select").
      local: slots for the newest tokens, always attended; when all are full, `chunk` tokens of
        them are indexed. Default: one chunk, or none with newest="select".
      chunk: tokens that are indexed together; default: one page.

    **Source:** Quest (Tang et al. 2024), Algorithm 1; pages of 16, at least 3. **Differs:** a
    GQA group shares a selection (`group_reduce`; "per_head" is the paper's rule). The released
    code raises smaller budgets to 3 pages; here they are an error.

    **Checklist:** unit: pages of 16, for each KV head; besides: the page that is not full;
    zones: sink 0, window one page; budget: every token that a step reads, at least 3 pages;
    generated: paged as the prompt is.
    """
    require_int("quest(budget=...)", budget, at_least=1)
    require_int("quest(page=...)", page, at_least=1)
    require_int("quest(least_pages=...)", least_pages, at_least=1)
    check_one_of("quest", ("attend", "select"), newest=newest)
    selects = newest == "select"
    chunk = page if chunk is None else require_int("quest(chunk=...)", chunk, at_least=1)
    counted = local if local is not None else 0 if selects else chunk
    if not selects and counted < chunk:
        raise ValueError(
            f"quest(local={counted}) is less than a chunk of {chunk} tokens, which are always attended until they are "
            f"indexed; use at least {chunk}, or newest='select'"
        )
    pages = (budget - sink - counted) // page
    always = counted // page
    needed = max(least_pages - always, 1)
    if pages < needed:
        raise ValueError(
            f"quest(budget={budget}) has room for {max(pages, 0)} pages of {page} tokens besides sink + local = {sink} "
            f"+ {counted}, and needs at least {needed}; use a budget of at least {sink + counted + needed * page}, or "
            "a smaller least_pages"
        )
    beside = 1 if selects and local is None else 0
    policy = Retrieval(
        # With a Buffer no token is pending, so that its page needs no box.
        selector=MinMaxPages(
            page=page, group_reduce=group_reduce, pending="box" if selects else "exact"
        ),
        store=history("quest", store, page),
        budget=sink + counted + pages * page + beside if selects else budget,
        sink=sink,
        local=counted + beside,
        demote=Fifo(leave=chunk) if selects else Buffer(leave=chunk),
        dense_capacity=capacity_of(dense_capacity, store, layers),
    )
    return over_layers("quest", layers, policy)
