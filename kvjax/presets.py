"""Presets: the methods of the papers, as parts put together with the paper's defaults, and the table of them.

A preset returns the policies of all layers of a model. Its docstring says where it differs from the paper.

Presets that select tokens take `share` and `anchors`: every `share`-th layer past the dense ones selects, or the layers
whose numbers `anchors` has, and the layers after it attend to the same slots (`Shared`). As text, anchors are
separated by "+": "fier:budget=256,anchors=2+5+9", or the name of a file that `kvjax calibrate --out` wrote.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from kvjax.budgets import pyramid
from kvjax.caches import (
    Compensated,
    Compressed,
    Evicting,
    Full,
    HeadBudgets,
    Mixed,
    OutlierRetrieval,
    PerLayer,
    Policy,
    Retrieval,
    Sampled,
    Speculative,
    share_selections,
)
from kvjax.caches.short import DenseCapacity
from kvjax.demotion import Buffer, Fifo, LogSparse
from kvjax.evictors import Evictor, HeavyHitter, LastQuery, LogSpaced, Observation, Pooling, Sliding
from kvjax.hashing import SimHash
from kvjax.heads import Heads
from kvjax.selection import GroupReduce
from kvjax.selectors import BallPages, CentrePages, Exact, Fier, MeanPages, MinMaxPages, Nucleus, Paris, ProductCodes
from kvjax.selectors.paris import Votes
from kvjax.settings import read_settings
from kvjax.spec import require_int
from kvjax.stores import Dense, HostOffload, HotSet, LowRank, Quantized, Store
from kvjax.stores.quantized import KeyAxis
from kvjax.timestamps import LastUse
from kvjax.validation import finite_number, nearest, shown

Anchors = Sequence[int] | int | str | None

PARISKV_BUDGET = 4 + 128 + 100  # the paper's sink and local window, and the k tokens that it selects beside them

# FreeKV's settings by the kind of task.
FREEKV: dict[str, dict[str, Any]] = {
    "long_input": {"sink": 128, "local": 128, "tau": 0.8},
    "long_generation": {"sink": 512, "local": 512, "tau": 0.9},
}


def full() -> PerLayer:
    """Every token, attended by every query."""
    return PerLayer((), Full())


def fier(
    budget: int = 1024,
    *,
    group: int = 32,
    page: int = 1,
    group_reduce: GroupReduce = "mean_softmax",
    sink: int = 0,
    local: int = 1,
    chunk: int = 256,
    host: bool = False,
    hot: int = 0,
    dense_capacity: DenseCapacity = "auto",
    dense_layers: int = 2,
    share: int = 1,
    anchors: Anchors = None,
) -> PerLayer:
    """FIER: every token is kept, and a step attends to the `budget` whose 1-bit keys score best.

    Tokens of the history are indexed by 1-bit keys, and pending ones are scored by their exact keys. The paper attends
    to no token in any case, so `sink` is 0 and `local` is the new token alone.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      group: tokens that share a scale and a zero of the 1-bit keys.
      page: tokens that are selected together, by the best score of one of them. Above 1: an ablation, in plain JAX.
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not, as in the paper.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      chunk: tokens that are indexed together; at most so many are pending.
      host: the history's keys and values lie in host memory, and the device holds the 1-bit keys.
      hot: tokens of each row and KV head, those selected last, that the device holds too (`HotSet`); needs `host`.
      dense_capacity: a cache of at most so many tokens becomes `Full`; "auto": where that was measured to be faster
        (`Retrieval`). Not with `host`, `share` or `anchors`.
      dense_layers: first layers of the model that attend to everything.
      share: every so many layers past the dense ones, one selects, and the layers after it attend to the same slots.
      anchors: numbers of the layers that select, in place of `share`; or a file of `kvjax calibrate`.

    **Source:** FIER (2025), Algorithm 1; g = 32. **Differs:** a GQA group shares a selection (`group_reduce`;
    "per_head" is the paper's rule). A group is indexed with its chunk, and with chunk=group as soon as it is full, as
    in the paper.
    """
    require_int("fier(budget=...)", budget, at_least=1)
    require_int("fier(page=...)", page, at_least=1)
    if page > 1:
        _require_page("fier", budget, page, sink, local)
    policy = Retrieval(
        selector=Fier(group=group, group_reduce=group_reduce, page=page),
        store=_history("fier", host, hot, page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
        dense_below=0,
        dense_capacity=_dense_capacity("fier", dense_capacity, host, share, anchors),
    )
    return _past_dense("fier", dense_layers, policy, share, anchors)


def pariskv(
    budget: int = PARISKV_BUDGET,
    *,
    k: int | None = None,
    sink: int = 4,
    local: int = 128,
    chunk: int = 256,
    buffer: Literal["select", "attend"] = "select",
    votes: Votes = "tiers",
    correct: bool = True,
    candidates: int | None = None,
    seed: int | None = 0,
    subspace: int = 8,
    radius_bits: int = 16,
    p: float | None = None,
    group_reduce: GroupReduce = "mean_query",
    dense_below: int = 1024,
    host: bool = False,
    hot: int = 0,
    dense_capacity: DenseCapacity = "auto",
    dense_layers: int = 0,
    share: int = 1,
    anchors: Anchors = None,
) -> PerLayer:
    """ParisKV: every token is kept, and a step attends to sink, local window and the best keys of a rotated index.

    The paper selects k = 100 tokens beside sink and local window. The budget counts all of them, so its default is
    larger. The paper's ranges are sink 4..64, local 128..512, `chunk` (its update buffer) 256..512 and full attention
    below 1K..2K tokens; no layer is skipped. A budget beyond the candidates goes on by votes. A GQA group retrieves
    once, by the mean of its queries.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      k: tokens selected beside sink and local window, in place of a budget.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      chunk: tokens that are indexed together; at most so many are pending.
      buffer: "select": pending tokens compete with the history by exact scores, within the budget. "attend", as in the
        paper: a step attends to all of them, beside the budget.
      votes: how keys are voted for: "tiers", or "plain".
      correct: the estimate of a key is corrected for its rounding.
      candidates: keys with most votes that are ranked; None: a tenth to a half of the history.
      seed: of the rotation of keys; None: they are not rotated, the paper's ablation.
      subspace: channels of a block of the codes, 8 or 4; 4 takes plain JAX in place of the kernels (`Paris`).
      radius_bits: bits of the length of a block, 16 or 4; 4 takes plain JAX in place of the kernels (`Paris`).
      p: of the k best a step attends to the fewest that hold this share of the attention, by the candidates' estimates
        (`Nucleus`); None: to all k.
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not.
      dense_below: rows of fewer tokens attend to all of them.
      host: the history's keys and values lie in host memory.
      hot: tokens of each row and KV head, those selected last, that the device holds too (`HotSet`); needs `host`.
      dense_capacity: a cache of at most so many tokens becomes `Full`; "auto": where that was measured to be faster
        (`Retrieval`). Not with `host`, `share` or `anchors`.
      dense_layers: first layers of the model that attend to everything.
      share: every so many layers past the dense ones, one selects, and the layers after it attend to the same slots.
      anchors: numbers of the layers that select, in place of `share`; or a file of `kvjax calibrate`.

    **Source:** ParisKV (Qi et al. 2026). **Differs:** the default of `buffer`. The paper moves the history's keys and
    values to host memory: so does `host`, to select the same tokens; without it they stay on the device. `p` and
    radius_bits=4 are not of the paper. `hot` and `dense_capacity` are as in `fier`.
    """
    require_int("pariskv(budget=...)", budget, at_least=1)
    if k is not None:
        require_int("pariskv(k=...)", k, at_least=1)
        if budget not in (PARISKV_BUDGET, sink + local + k):
            raise ValueError(
                f"pariskv(budget={budget}, k={k}): with sink={sink} and local={local} that k is a budget of "
                f"{sink + local + k}; give one of the two"
            )
        budget = sink + local + k
    if buffer not in ("select", "attend"):
        raise ValueError(f"pariskv(buffer={buffer!r}) must be 'select' or 'attend'")
    beside = chunk if buffer == "attend" else 0
    selector = Paris(
        votes=votes,
        correct=correct,
        candidates=candidates,
        group_reduce=group_reduce,
        seed=seed,
        subspace=subspace,
        radius_bits=radius_bits,
    )
    policy = Retrieval(
        selector=selector if p is None else Nucleus(selector=selector, p=p),
        store=_history("pariskv", host, hot),
        budget=budget + beside,
        sink=sink,
        local=local + beside,
        demote=Buffer(leave=chunk) if beside else Fifo(leave=chunk),
        dense_below=dense_below,
        dense_capacity=_dense_capacity("pariskv", dense_capacity, host, share, anchors),
    )
    return _past_dense("pariskv", dense_layers, policy, share, anchors)


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
    host: bool = False,
    hot: int = 0,
    dense_capacity: DenseCapacity = "auto",
    dense_layers: int = 2,
    share: int = 1,
    anchors: Anchors = None,
) -> PerLayer:
    """Quest: every token is kept, and a step attends to the pages whose box of smallest and largest keys scores best.

    The budget is whole pages. With newest="attend", as in the CUDA kernels of the released code, the `local` newest
    tokens are always attended and count. With "select", as in its evaluation, the newest page competes by the box of
    the tokens that it has; only the newest token is attended in any case, beside the budget if its page is not
    selected.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      page: tokens of a page.
      least_pages: pages that a step reads at least.
      newest: whether the newest tokens are always attended ("attend"), or their page competes ("select").
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not, as in the paper.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended; default: one page, or none with newest="select".
      chunk: tokens that are indexed together; default: one page.
      host: the history's keys and values lie in host memory.
      hot: tokens of each row and KV head, those selected last, that the device holds too (`HotSet`); needs `host`.
      dense_capacity: a cache of at most so many tokens becomes `Full`; "auto": where that was measured to be faster
        (`Retrieval`). Not with `host`, `share` or `anchors`.
      dense_layers: first layers of the model that attend to everything.
      share: every so many layers past the dense ones, one selects, and the layers after it attend to the same slots.
      anchors: numbers of the layers that select, in place of `share`; or a file of `kvjax calibrate`.

    **Source:** Quest (Tang et al. 2024), Algorithm 1; pages of 16, at least 3. **Differs:** a GQA group shares a
    selection (`group_reduce`; "per_head" is the paper's rule). The released code raises smaller budgets to 3 pages,
    here they are refused. With newest="attend" the newest tokens are those of a window, not of a page, and a page that
    is not full competes by the exact scores of its other tokens.
    """
    require_int("quest(budget=...)", budget, at_least=1)
    require_int("quest(page=...)", page, at_least=1)
    require_int("quest(least_pages=...)", least_pages, at_least=1)
    if newest not in ("attend", "select"):
        raise ValueError(f"quest(newest={newest!r}) must be 'attend' or 'select'")
    selects = newest == "select"
    counted = local if local is not None else 0 if selects else page
    pages, always = (budget - sink - counted) // page, counted // page
    needed = max(least_pages - always, 1)
    if pages < needed:
        raise ValueError(
            f"quest(budget={budget}) has room for {max(pages, 0)} pages of {page} tokens beside sink + local = {sink} "
            f"+ {counted}, and Quest reads at least {needed} there; use at least {sink + counted + needed * page}, or "
            "another least_pages"
        )
    beside = 1 if selects and local is None else 0
    policy = Retrieval(
        selector=MinMaxPages(page=page, group_reduce=group_reduce, pending="box" if selects else "exact"),
        store=_history("quest", host, hot, page),
        budget=sink + counted + pages * page + beside if selects else budget,
        sink=sink,
        local=counted + beside,
        demote=Fifo(leave=page if chunk is None else chunk),
        dense_below=0,
        dense_capacity=_dense_capacity("quest", dense_capacity, host, share, anchors),
    )
    return _past_dense("quest", dense_layers, policy, share, anchors)


def logquant(
    window: int = 42,
    *,
    bits: int = 2,
    value_bits: int | None = None,
    key_axis: KeyAxis = "channel",
    group: int = 64,
    value_window: int | None = None,
    sink: int = 0,
    dense_layers: int = 0,
) -> PerLayer:
    """LogQuant: everything is attended; 2W to 3W tokens are exact, ever sparser with age, and the rest has 2 bits.

    W = `window`; 42 is a third of the 128 exact tokens that the paper gives (R). The paper sets no sink apart, though
    the first token of all never leaves its window. A prompt attends to itself exactly, or if it comes in several
    chunks, to the earlier ones as they are stored.

    Args:
      window: W: 2W to 3W tokens are exact.
      bits: bits of a key's number.
      value_bits: bits of a value's number; None: those of keys.
      key_axis: keys are quantised by "channel", in groups of W tokens, the whole of what leaves at once; or by "token",
        as the values are.
      group: channels of a value that share a scale and a zero; of a key too with key_axis="token".
      value_window: newest values that are exact, at most W; the spaced tokens then keep exact keys alone. None: as many
        as keys.
      sink: first tokens of a row, always exact.
      dense_layers: first layers of the model that attend to everything.

    **Source:** LogQuant (2025), Algorithm 1, section 2.4. **Differs:** groups of keys have W = 42 tokens, not 64: the
    tokens that leave together are quantised together, once, and 42 is the largest group that divides them. The released
    code quantises keys by token too (key_axis="token", group=64), quantises the whole history anew at each flush, and
    holds exact tokens twice. A scale and a zero are bfloat16.
    """
    demote = LogSparse(window=window)
    key_group = window if key_axis == "channel" else group
    store = Quantized(bits=bits, key_axis=key_axis, key_group=key_group, value_bits=value_bits, value_group=group)
    policy = Compressed(store=store, sink=sink, local=window, demote=demote, value_window=value_window)
    return _past_dense("logquant", dense_layers, policy)


def kivi(
    bits: int = 2,
    *,
    value_bits: int | None = None,
    residual: int = 128,
    value_window: int | None = None,
    group: int = 32,
    sink: int = 0,
    dense_layers: int = 0,
) -> PerLayer:
    """KIVI: everything is attended; the newest tokens, `residual` at most, are exact, and the rest has 2 bits.

    The paper sets no sink apart.

    Args:
      bits: bits of a key's number.
      value_bits: bits of a value's number; None: those of keys.
      residual: tokens that are quantised together; at most so many are exact.
      value_window: newest values that are exact; None: as many as keys.
      group: tokens of a key's channel, and channels of a value, that share a scale and a zero.
      sink: first tokens of a row, always exact.
      dense_layers: first layers of the model that attend to everything.

    **Source:** KIVI (Liu et al. 2024), section 3; g = 32, R = 128. **Differs:** keys and values leave the recent block
    together by the paper's rule for keys: all R at once when there are R, so 1 to R tokens are exact. The paper keeps
    the newest R values exact, of which one leaves a step: so does value_window=R, for a recent block of up to 2 R
    tokens. A prompt that comes in several chunks reads the earlier ones as stored. A scale and a zero are bfloat16.
    """
    require_int("kivi(residual=...)", residual, at_least=1)
    if value_window is not None:
        require_int("kivi(value_window=...)", value_window, at_least=1)
    policy = Compressed(
        store=Quantized(bits=bits, key_group=group, value_bits=value_bits),
        sink=sink,
        local=value_window or 1,
        demote=Fifo(leave=residual),
        value_window=value_window,
    )
    return _past_dense("kivi", dense_layers, policy)


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
    a page that is not yet full competes by the exact scores of its tokens. FreeKV's CUDA code sums pages up as
    summary="centre" does, and pools raw scores by group_reduce="mean_score".
    """
    if task not in FREEKV:
        raise ValueError(f"freekv(task={task!r}) must be one of {', '.join(FREEKV)}")
    if summary not in ("min_max", "centre"):
        raise ValueError(f"freekv(summary={summary!r}) must be 'min_max' or 'centre'")
    sink = FREEKV[task]["sink"] if sink is None else sink
    local = FREEKV[task]["local"] if local is None else local
    tau = FREEKV[task]["tau"] if tau is None else tau
    require_int("freekv(budget=...)", budget, at_least=1)
    _require_page("freekv", budget, page, sink, local)
    pages: type[MinMaxPages] | type[CentrePages] = MinMaxPages if summary == "min_max" else CentrePages
    policy = Retrieval(
        selector=pages(page=page, group_reduce=group_reduce),
        store=_history("freekv", True, hot, page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=page if chunk is None else chunk),
        dense_below=0,
    )
    late = Speculative(policy, tau=tau, selection_scale=selection_scale, reuse=reuse)
    return _past_dense("freekv", dense_layers, late, share, anchors)


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
    full competes by the exact scores of its tokens.
    """
    require_int("arkvale(budget=...)", budget, at_least=1)
    if digest not in ("cuboid", "sphere"):
        raise ValueError(f"arkvale(digest={digest!r}) must be 'cuboid' or 'sphere'")
    _require_page("arkvale", budget, page, sink, local)
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
    return _past_dense("arkvale", dense_layers, Speculative(policy, tau=2.0))  # no cosine reaches 2: never a step late


def pqcache(
    budget: int = 1024,
    *,
    parts: int = 2,
    bits: int = 6,
    learn: int = 1024,
    group_reduce: GroupReduce = "sum_softmax",
    sink: int = 4,
    local: int = 64,
    host: bool = False,
    dense_layers: int = 0,
) -> PerLayer:
    """PQCache: every token is kept, and a step attends to the `budget` whose product-quantised keys score best.

    A code is the nearest of the centroids that k-means found among the first `learn` tokens. Until tokens are encoded
    they compete by their exact scores.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      parts: parts of a key, each with a code.
      bits: bits of a part's code.
      learn: first tokens, from which the centroids are learnt; also the tokens that are encoded together.
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      host: the history's keys and values lie in host memory.
      dense_layers: first layers of the model that attend to everything.

    **Source:** PQCache (Zhang et al. 2024, arXiv 2407.12820). **Differs:** see `ProductCodes`: centroids are learnt
    from the first `learn` tokens, not from the whole prompt. The paper keeps keys and values in host memory with a
    cache of blocks on the device; here that is `host`, without the cache.
    """
    require_int("pqcache(budget=...)", budget, at_least=1)
    policy = Retrieval(
        selector=ProductCodes(parts=parts, bits=bits, learn=learn, group_reduce=group_reduce),
        store=HostOffload() if host else Dense(),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=learn),
        dense_below=0,
    )
    return _past_dense("pqcache", dense_layers, policy)


def magicpig(
    budget: int = 2048,
    *,
    bits: int = 10,
    tables: int = 150,
    least: int = 2,
    sink: int = 4,
    local: int = 64,
    chunk: int = 256,
    seed: int = 0,
    host: bool = False,
    dense_layers: int = 1,
) -> PerLayer:
    """MagicPIG: every token is kept; a step estimates attention from tokens whose hashes collide with the query's.

    Each query head samples the keys that share its hash in enough tables, and weighs them by the inverse of the
    probability of that. The sink and the recent block of up to `local` + `chunk` tokens are attended exactly; the
    budget counts them.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      bits: bits of a hash.
      tables: hash tables.
      least: tables in which a key must collide with the query.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      chunk: tokens that are hashed together; at most so many are pending.
      seed: of the random directions.
      host: the history's keys and values lie in host memory.
      dense_layers: first layers of the model that attend to everything.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179): 10 bits, 150 tables, 2 collisions, sink 4, local 64.
    **Differs:** see `Sampled` and `SimHash`. The paper keeps layers 0 and 16 of 32 dense; here the first
    `dense_layers`. Hashes lie on the device; the paper's are in host memory.
    """
    require_int("magicpig(budget=...)", budget, at_least=1)
    policy = Sampled(
        hashing=SimHash(bits=bits, tables=tables, least=least, learn=chunk, seed=seed),
        store=HostOffload() if host else Dense(),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
    )
    return _past_dense("magicpig", dense_layers, policy)


def shadowkv(
    budget: int = 2048,
    *,
    rank: int = 160,
    page: int = 8,
    outliers: int = 48,
    rope_theta: float | None = None,
    learn: int = 1024,
    group_reduce: GroupReduce = "max_softmax",
    sink: int = 4,
    local: int = 32,
    host: bool = True,
    dense_layers: int = 0,
) -> PerLayer:
    """ShadowKV: keys as factors of low rank, values in host memory, and a step reads the pages of the best landmarks.

    The landmark of a page is the mean of its keys. Keys of selected pages are rebuilt from their factors, and their
    values come from host memory. The budget counts the outliers. Rotated keys are not of low rank, and lose much more:
    give `rope_theta`.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      rank: coefficients of a token's keys, for all heads together.
      page: tokens of a page.
      outliers: pages whose keys stray farthest from their landmark: exact, on the device, read by every step.
      rope_theta: that of a model with plain RoPE: keys are factored before their rotation, as in the paper. For other
        kinds of RoPE see `LowRank(rope=...)`.
      learn: first tokens, from which the basis is learnt; also the tokens that are factored together.
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      host: values lie in host memory; False: on the device.
      dense_layers: first layers of the model that attend to everything.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465): rank 160, pages of 8, 48 outliers. **Differs:** see
    `LowRank`: the basis is learnt from the first `learn` tokens, not from the whole prompt, and tokens are factored
    `learn` at a time; until then they compete by their exact scores.
    """
    require_int("shadowkv(budget=...)", budget, at_least=1)
    values = HostOffload(page=page) if host else Dense()
    policy = OutlierRetrieval(
        selector=MeanPages(page=page, group_reduce=group_reduce),
        store=LowRank(
            rank=rank,
            page=page,
            outliers=outliers,
            learn=learn,
            rope=_plain_rope("shadowkv", rope_theta),
            values=values,
        ),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=learn),
        dense_below=0,
    )
    return _past_dense("shadowkv", dense_layers, policy)


def exact(
    budget: int = 1024,
    *,
    group_reduce: GroupReduce = "mean_softmax",
    sink: int = 0,
    local: int = 1,
    chunk: int = 256,
    dense_layers: int = 2,
    share: int = 1,
    anchors: Anchors = None,
) -> PerLayer:
    """The oracle: every token is kept, and a step attends to the `budget` whose true scores are best.

    The ceiling of `fier` and of every other selector, with the settings of `fier`. It stores the keys twice and reads
    all of them, so it saves nothing; see `Exact` for what `group_reduce` makes of it.

    Args:
      budget: tokens that a step reads in a layer and KV head, all zones included.
      group_reduce: the rule by which a GQA group shares a selection; "per_head": it does not.
      sink: first tokens of a row, always attended.
      local: newest tokens of a row, always attended.
      chunk: tokens that are indexed together; at most so many are pending.
      dense_layers: first layers of the model that attend to everything.
      share: every so many layers past the dense ones, one selects, and the layers after it attend to the same slots.
      anchors: numbers of the layers that select, in place of `share`; or a file of `kvjax calibrate`.
    """
    require_int("exact(budget=...)", budget, at_least=1)
    policy = Retrieval(
        selector=Exact(group_reduce=group_reduce),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
        dense_below=0,
    )
    return _past_dense("exact", dense_layers, policy, share, anchors)


def streaming_llm(
    budget: int = 1024, *, sink: int = 4, rope_theta: float | None = None, dense_layers: int = 0
) -> PerLayer:
    """StreamingLLM: the first `sink` tokens and the newest are kept and attended, `budget` in all.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them.
      sink: first tokens of a row, never evicted.
      rope_theta: that of a model with plain RoPE: positions are numbered within the cache, as in the paper. For other
        kinds of RoPE see `Sliding(rope=...)`. None: keys keep the positions with which they came.
      dense_layers: first layers of the model that attend to everything.

    **Source:** StreamingLLM (Xiao et al. 2023), section 3.2. **Differs:** without `rope_theta` keys keep the positions
    with which they came.
    """
    return _evicting(
        "streaming_llm", Sliding(sink=sink, rope=_plain_rope("streaming_llm", rope_theta)), budget, dense_layers
    )


def logevict(budget: int = 126, *, dense_layers: int = 0) -> PerLayer:
    """LogQuant without its quantised tokens: `budget` tokens are held, the sparser the older, and the rest is evicted.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them.
      dense_layers: first layers of the model that attend to everything.

    **Source:** LogQuant (2025), Algorithm 1, the variant that evicts, which it compares with. **Differs:** see
    `LogSpaced`: tokens are evicted one at a time.
    """
    return _evicting("logevict", LogSpaced(), budget, dense_layers)


def h2o(budget: int = 1024, *, recent: float = 0.5, dense_layers: int = 0) -> PerLayer:
    """H2O: the newest tokens, a share of `recent` of the budget, and the others by the attention they have gathered.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them.
      recent: share of the budget that the newest tokens take.
      dense_layers: first layers of the model that attend to everything.

    **Source:** H2O (Zhang et al. 2023), Algorithm 1. **Differs:** see `HeavyHitter`: a GQA group shares a selection;
    the budget counts the new token; see `Evicting` for prompts in several chunks.
    """
    return _evicting("h2o", HeavyHitter(recent=recent), budget, dense_layers)


def tova(budget: int = 1024, *, dense_layers: int = 0) -> PerLayer:
    """TOVA: the token to which the newest query attends least is dropped, in all heads of a layer the same.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them.
      dense_layers: first layers of the model that attend to everything.

    **Source:** TOVA (Oren et al. 2024). **Differs:** see `LastQuery`: a prompt is cut down once, by its last query; the
    budget counts the new token; see `Evicting` for prompts in several chunks.
    """
    return _evicting("tova", LastQuery(), budget, dense_layers)


def snapkv(
    budget: int = 1024,
    *,
    window: int = 32,
    kernel_size: int = 7,
    pooling: Pooling = "max",
    dense_layers: int = 0,
) -> PerLayer:
    """SnapKV: of a prompt, the last `window` tokens and those to which their queries attend most, `budget` in all.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them.
      window: last tokens of the prompt, kept themselves; their queries vote for the others.
      kernel_size: neighbouring votes that are pooled into a token's.
      pooling: "max" or "mean" of those votes.
      dense_layers: first layers of the model that attend to everything.

    **Source:** SnapKV (Li et al. 2024), section 4. **Differs:** see `Observation`: a GQA group shares a selection, and
    generated tokens take slots of the budget; see `Evicting` for prompts in several chunks.
    """
    evictor = Observation(window=window, kernel_size=kernel_size, pooling=pooling)
    return _evicting("snapkv", evictor, budget, dense_layers)


def raas(budget: int = 1024, *, threshold: float = 1e-4, dense_layers: int = 0) -> PerLayer:
    """RaaS: a prompt stays, and the generated token that has gone longest without attention is dropped.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them.
      threshold: share of the attention from which a token counts as attended.
      dense_layers: first layers of the model that attend to everything.

    **Source:** RaaS (Hu et al. 2025, arXiv 2502.11147). **Differs:** see `LastUse`: tokens, not pages of 16, by exact
    weights, and the budget counts the prompt.
    """
    return _evicting("raas", LastUse(threshold=threshold), budget, dense_layers)


def pyramidkv(
    budget: int = 1024, *, layers: int = 32, beta: float = 20.0, window: int = 8, kernel_size: int = 7
) -> PerLayer:
    """PyramidKV: SnapKV with a budget that falls linearly from the first layer to the last, `budget` on average.

    Beside `window` tokens in every layer, the last layer has 1/beta of an equal share of the rest, and the first has
    what makes the mean come out.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them; the mean of all layers.
      layers: layers of the model.
      beta: how steeply budgets fall from the first layer to the last; at least 1.
      window: last tokens of the prompt, kept themselves; their queries vote for the others.
      kernel_size: neighbouring votes that are pooled into a token's.

    **Source:** PyramidKV (Cai et al. 2024, arXiv 2406.02069): beta 20. **Differs:** as `snapkv`; budgets are rounded to
    whole tokens, so the mean may differ from `budget` by less than one.
    """
    require_int("pyramidkv(budget=...)", budget, at_least=1)
    require_int("pyramidkv(layers=...)", layers, at_least=1)
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 1 <= beta < float("inf"):
        raise ValueError(f"pyramidkv(beta={beta!r}) must be a number, at least 1")
    evictor = Observation(window=window, kernel_size=kernel_size)
    beside = min(evictor.window, budget)
    budgets = [beside + share for share in pyramid(budget - beside, layers, beta)]
    if budgets[-1] < 2:
        raise ValueError(
            f"pyramidkv(budget={budget}) leaves the last of {layers} layers {budgets[-1]} tokens and it needs 2; raise "
            "the budget or the window"
        )
    *first, last = [Evicting(evictor=evictor, budget=tokens) for tokens in budgets]
    return _Pyramid(tuple(first), last)


@dataclass(frozen=True)
class _Pyramid(PerLayer):
    """Policies whose budgets have their mean over this number of layers, which more layers would lower."""

    def check(self, layers: int, kv_heads: int | None = None) -> None:
        if layers > (own := len(self.first) + 1):
            raise ValueError(
                f"pyramidkv(layers={own}) shares its budget among {own} layers and the model has {layers}; set "
                f"layers={layers}"
            )


def adakv(
    budget: int = 1024,
    *,
    floor: float = 0.2,
    ceiling: float = 2.0,
    window: int = 32,
    kernel_size: int = 7,
    pooling: Pooling = "max",
    dense_layers: int = 0,
) -> PerLayer:
    """AdaKV: SnapKV with one budget for all KV heads of a layer, `budget` a head on average.

    All tokens of a prompt compete in all heads for the slots of the layer, so heads that attend widely keep more.

    Args:
      budget: tokens that a layer and KV head keeps; a step attends to all of them; the mean of a layer's heads.
      floor: share of the budget that a KV head keeps at least.
      ceiling: multiple of the budget that a KV head keeps at most, and has room for.
      window: last tokens of the prompt, kept themselves; their queries vote for the others.
      kernel_size: neighbouring votes that are pooled into a token's.
      pooling: "max" or "mean" of those votes.
      dense_layers: first layers of the model that attend to everything.

    **Source:** AdaKV (Feng et al. 2024, arXiv 2407.11550): floor 0.2, over SnapKV. **Differs:** see `HeadBudgets` and
    `Observation`.
    """
    require_int("adakv(budget=...)", budget, at_least=1)
    evictor = Observation(window=window, kernel_size=kernel_size, pooling=pooling)
    policy = HeadBudgets(evictor=evictor, budget=budget, floor=floor, ceiling=ceiling)
    return _past_dense("adakv", dense_layers, policy)


def mikv(
    budget: int = 1024,
    *,
    bits: int = 2,
    value_bits: int | None = None,
    group: int = 32,
    chunk: int = 128,
    recent: float = 0.5,
    dense_layers: int = 0,
) -> PerLayer:
    """MiKV: everything is attended; the `budget` tokens that matter are exact, and all others have `bits` bits.

    The exact tokens are the newest ones, and those that have gathered most attention, as in `h2o`. Tokens that `h2o`
    would evict are stored in few bits: keys by channel, values by token.

    Args:
      budget: tokens that a layer and KV head keeps exactly.
      bits: bits of a key's number.
      value_bits: bits of a value's number; None: those of keys.
      group: tokens of a key's channel, and channels of a value, that share a scale and a zero.
      chunk: tokens that are quantised together.
      recent: share of the budget that the newest tokens take.
      dense_layers: first layers of the model that attend to everything.

    **Source:** MiKV (Yang et al. 2024, arXiv 2402.18096). **Differs:** see `Mixed`: keys are quantised by channel in
    place of the paper's channel balancer.
    """
    require_int("mikv(budget=...)", budget, at_least=1)
    store = Quantized(bits=bits, key_group=group, value_bits=value_bits, value_group=group)
    policy = Mixed(evictor=HeavyHitter(recent=recent), budget=budget, store=store, chunk=chunk)
    return _past_dense("mikv", dense_layers, policy)


def razorattention(budget: int = 4096, *, sink: int = 4, heads: str | Heads | None = None) -> PerLayer:
    """RazorAttention: retrieval heads keep everything; others keep `budget` tokens and the mean of the rest.

    Other heads keep the `sink` first tokens, the newest ones, and a compensation token.

    Args:
      budget: tokens that other heads keep.
      sink: first tokens of a row that other heads keep.
      heads: the retrieval heads, or a file of them: `kvjax.evaluate.heads.retrieval_heads` finds them for a model by
        the paper's rule, and `save` writes them. None: no head keeps everything.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891). **Differs:** see `Compensated` and
    `kvjax.evaluate.heads.retrieval_heads`. The paper's window grows with the prompt, to a fifth; here it is `budget`.
    """
    return _by_head("razorattention", Compensated, budget, sink, heads)


def duoattention(budget: int = 256, *, sink: int = 64, heads: str | Heads | None = None) -> PerLayer:
    """DuoAttention: retrieval heads keep everything; others keep the first `sink` tokens and the newest.

    Args:
      budget: tokens that other heads keep.
      sink: first tokens of a row that other heads keep.
      heads: the retrieval heads, or a file of them, as in `razorattention`. None: all heads keep `budget`.

    **Source:** DuoAttention (Xiao et al. 2024, arXiv 2410.10819). **Differs:** the paper learns which heads retrieve,
    by training gates on synthetic texts; here the heads are given, or found by the rule of RazorAttention.
    """
    return _by_head("duoattention", None, budget, sink, heads)


# ---------------------------------------------------------------------------------------------- parts of the presets


def _past_dense(name: str, dense_layers: int, policy: Policy, share: int = 1, anchors: Anchors = None) -> PerLayer:
    """The first layers attend to everything, and the others have `policy`; some of these select for others."""
    dense_layers = require_int(f"{name}(dense_layers=...)", dense_layers, at_least=0)
    return share_selections(PerLayer((Full(),) * dense_layers, policy), share=share, anchors=anchors)


def _dense_capacity(
    name: str, dense_capacity: DenseCapacity, host: bool, share: int, anchors: Anchors
) -> DenseCapacity:
    """The setting, of which "auto" is 0 for a preset that keeps its history on the host or shares selections."""
    shares = share != 1 or anchors is not None
    if dense_capacity == "auto":
        return 0 if host or shares else "auto"
    dense_capacity = require_int(f"{name}(dense_capacity=...)", dense_capacity, at_least=0)
    if dense_capacity and shares:
        raise ValueError(
            f"{name}(dense_capacity={dense_capacity}) makes short caches select nothing, but layers that share a "
            "selection need one; use dense_capacity=0, or neither share nor anchors"
        )
    return dense_capacity


def _history(name: str, host: bool, hot: int, page: int = 1) -> Store:
    """Where a preset keeps its history: on the device, in host memory, or there with a hot set of `hot` tokens."""
    require_int(f"{name}(hot=...)", hot, at_least=0)
    if hot and not host:
        raise ValueError(f"{name}(hot={hot}) keeps tokens of a host store on the device; set host=True too")
    if not host:
        return Dense()
    return HotSet(tokens=hot, store=HostOffload(page=page)) if hot else HostOffload(page=page)


def _require_page(name: str, budget: int, page: int, sink: int, local: int) -> None:
    """Raises ValueError where the budget leaves no room for a page beside sink and local window."""
    if sink + local <= budget < sink + local + page:
        raise ValueError(
            f"{name}(budget={budget}) leaves no room for a page of {page} tokens beside sink + local = {sink} + "
            f"{local}; use at least {sink + local + page}, or smaller pages"
        )


def _plain_rope(name: str, theta: float | None) -> Any:
    """The plain RoPE of that theta; None without one."""
    if theta is None:
        return None
    return import_module("kvjax.models.rope").Default(theta=finite_number(f"{name}(rope_theta=...)", theta))


def _by_head(
    name: str, wrap: Callable[[Evicting], Policy] | None, budget: int, sink: int, heads: str | Heads | None
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
            f"{name}(heads=...) takes a kvjax.heads.Heads or a file of them, got {shown(heads)}; "
            "kvjax.evaluate.heads.retrieval_heads finds those of a model"
        )
    return heads.policies(others)


def _evicting(name: str, evictor: Evictor, budget: int, dense_layers: int) -> PerLayer:
    require_int(f"{name}(budget=...)", budget, at_least=1)
    return _past_dense(name, dense_layers, Evicting(evictor=evictor, budget=budget))


# ------------------------------------------------------------------------------------------------ the table of presets


@dataclass(frozen=True)
class Preset:
    """A row of the table of methods."""

    name: str
    make: Callable[..., PerLayer]
    keeps: str  # what it keeps and attends to
    paper: str
    has_budget: bool = True

    def policy(self) -> Policy:
        """The policy that this preset uses for a compressed layer, with its defaults."""
        return self.make().rest


REGISTRY: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset("full", full, "all tokens; attends to all", "-", has_budget=False),
        Preset("fier", fier, "all tokens, and keys in 1 bit; attends to the budget", "FIER 2025"),
        Preset(
            "pariskv",
            pariskv,
            "all tokens, and rotated keys in 4 bits; attends to the budget",
            "ParisKV 2026",
        ),
        Preset(
            "quest",
            quest,
            "all tokens, and a box around the keys of each page; attends to the budget",
            "Quest 2024",
        ),
        Preset(
            "freekv",
            freekv,
            "all tokens in host memory; attends to the pages that the step before recalled",
            "FreeKV 2025",
        ),
        Preset(
            "arkvale",
            arkvale,
            "all tokens in host memory; attends to the pages with the best digests",
            "ArkVale 2024",
        ),
        Preset("magicpig", magicpig, "all tokens, and key hashes; attends to a weighted sample", "MagicPIG 2024"),
        Preset("pqcache", pqcache, "all tokens, and keys in 2 bytes; attends to the budget", "PQCache 2024"),
        Preset(
            "shadowkv",
            shadowkv,
            "keys of low rank, values in host memory; attends to outliers and the best pages",
            "ShadowKV 2024",
        ),
        Preset(
            "logquant",
            logquant,
            "84 to 126 tokens in full precision, log-spaced, the rest in 2 bits; reads all",
            "LogQuant 2025",
            has_budget=False,
        ),
        Preset(
            "kivi",
            kivi,
            "up to 128 recent tokens in full precision, the rest in 2 bits; reads all",
            "KIVI 2024",
            has_budget=False,
        ),
        Preset("exact", exact, "all tokens; attends to the budget by exact scores, for comparison", "-"),
        Preset(
            "streaming_llm",
            streaming_llm,
            "the first 4 tokens and the most recent, up to the budget",
            "StreamingLLM 2023",
        ),
        Preset("logevict", logevict, "tokens spaced by logarithm of their age, up to the budget", "LogQuant 2025"),
        Preset("h2o", h2o, "the most recent tokens and the most attended so far, half of the budget each", "H2O 2023"),
        Preset("tova", tova, "the tokens that the newest query attends to most, up to the budget", "TOVA 2024"),
        Preset(
            "snapkv",
            snapkv,
            "the prompt's tokens that its last 32 queries attend to most, and later tokens",
            "SnapKV 2024",
        ),
        Preset(
            "pyramidkv",
            pyramidkv,
            "as snapkv, with budgets that fall from the first layer to the last",
            "PyramidKV 2024",
        ),
        Preset("adakv", adakv, "as snapkv, with more tokens in KV heads that attend widely", "AdaKV 2024"),
        Preset(
            "mikv",
            mikv,
            "the most recent and most attended tokens exactly, the rest in 2 bits; reads all",
            "MiKV 2024",
        ),
        Preset("raas", raas, "the prompt, and generated tokens that were attended to lately", "RaaS 2025"),
        Preset(
            "razorattention",
            razorattention,
            "all tokens in retrieval heads; in others the newest, and the mean of the rest",
            "RazorAttention 2024",
        ),
        Preset(
            "duoattention",
            duoattention,
            "all tokens in retrieval heads; in others the first and the newest",
            "DuoAttention 2024",
        ),
    )
}


def find(name: str) -> Preset:
    """The preset of that name, or an error with the nearest one."""
    if name in REGISTRY:
        return REGISTRY[name]
    first, *more = re.split(r"[:@,]", name)
    near = nearest(first, REGISTRY)
    if near and "@" in name:  # as rows of a comparison are called
        near = f"{near}:budget={more[0]}"
    hint = f"did you mean {near!r}? There" if near else "there"
    if "," in name:
        hint = "give one cache at a time; there"
    raise ValueError(f"unknown cache {shown(name)}; {hint} are {', '.join(REGISTRY)}")


def parse(text: str) -> PerLayer:
    """The policies that a text names: a preset, and settings of it if need be.

    >>> parse("fier:budget=256,group=16") == fier(256, group=16)
    True

    Raises:
      ValueError: an unknown preset, with the nearest one; a setting that the preset does not have.
    """
    return parse_with_budget(text)[0]


def parse_with_budget(
    text: str, budget: int | None = None, *, where: str = "cache", budget_where: str = "budget="
) -> tuple[PerLayer, int | None]:
    """`parse`, and the budget of the preset if it has one. `budget` is one that was given beside the text.

    `where` and `budget_where` name the two in error messages.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where} must be text such as 'fier:budget=256', got {shown(text)}")
    preset = find(text.partition(":")[0].strip())
    settings = read_settings(text, preset.make, where=where)
    if budget is not None:
        if not preset.has_budget:
            have = ", ".join(p.name for p in REGISTRY.values() if p.has_budget)
            raise ValueError(
                f"{budget_where} {budget}: the cache {preset.name!r} has no budget; leave it out, or use one of {have}"
            )
        if settings.get("budget", budget) != budget:
            raise ValueError(f"{where} {text} and {budget_where} {budget} set two budgets; give one")
        settings["budget"] = budget
    policies = preset.make(**settings)
    if not preset.has_budget:
        return policies, None
    return policies, settings.get("budget", inspect.signature(preset.make).parameters["budget"].default)


def check_reaches(policies: PerLayer, layers: int, name: str) -> None:
    """Raises ValueError where the dense layers of a preset are all the layers of the model, or it is for another model.

    >>> check_reaches(fier(64, dense_layers=2), 2, "fier")
    Traceback (most recent call last):
        ...
    ValueError: fier keeps the first 2 layers full and the model has 2, so no layer uses it; set dense_layers below 2
    """
    policies.check(layers)
    if len(policies.first) >= layers and policies.rest not in policies.first[:layers]:
        if set(policies.first) != {Full()}:
            raise ValueError(
                f"{name} has policies for {len(policies.first) + 1} layers and the model has {layers}; set "
                f"layers={layers}"
            )
        raise ValueError(
            f"{name} keeps the first {len(policies.first)} layers full and the model has {layers}, so no layer uses "
            f"it; set dense_layers below {layers}"
        )
