"""ArkVale: keys and values in host memory, and a step recalls the pages whose digests score best.

It is `Speculative` over `CentrePages` that always recalls before it attends. `LayerWide` selects
once for all KV heads of a layer, as the released code does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Candidates, GroupReduce, PackedSelection, Selection
from kvjax.policies import PerLayer, Retrieval, Speculative
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers, require_page
from kvjax.selectors import CentrePages
from kvjax.selectors.selector import LAST, Selector, Wrapper
from kvjax.sharding.context import Stripes
from kvjax.sharding.context.selectors import split_selector
from kvjax.spec import require_int
from kvjax.stores import HostOffload
from kvjax.stores.demotion import Fifo
from kvjax.validation import check_one_of, check_verbs

__all__ = ["LayerWide", "arkvale"]


@published(
    "all tokens in host memory; attends to the pages with the best digests",
    paper="ArkVale 2024",
    released="budget=4096,per=layer,topk=1056",
)
def arkvale(
    budget: int = 1024,
    *,
    page: int = 32,
    group_reduce: GroupReduce = "mean_score",
    sink: int = 64,
    local: int = 64,
    per: Literal["head", "layer"] = "head",
    topk: int | None = None,
    layers: Layers = Layers(dense=2),
) -> PerLayer:
    """ArkVale: keys and values in host memory, and a step recalls the pages whose digests
    (`CentrePages`) score best.

    Pages take the budget that sink and local window leave. Those that the previous step
    recalled are not moved again.

    Args:
      sink: first tokens of a row, always attended; the default is two pages.
      local: newest tokens of a row, always attended; the default is two pages.
      per: whether each KV head selects for itself ("head"), or a layer selects once for all of
        its heads ("layer").
      topk: tokens that a step selects among all pages, sink and local window included; the
        others of the budget stay from the step before. None: the whole budget.

    **Source:** ArkVale (Chen et al. 2024). **Differs:** the defaults of `per` and `topk`. The
    released code selects once for all KV heads of a layer (per="layer"). It keeps a cache of
    4096 tokens on the device, in which the best 29 of all pages replace those with the lowest
    scores, and attends to all that the cache holds (budget=4096, topk=1056). A page that is not
    yet full competes by the digest of its tokens so far.

    **Checklist:** unit: pages of 32, for each KV head or, with per='layer', for the layer;
    besides: sink and window, with `topk` what the device holds; zones: sink 64, window 64;
    budget: every token that a step reads; generated: paged and moved to the host as the prompt
    is.
    """
    require_int("arkvale(budget=...)", budget, at_least=1)
    check_one_of("arkvale", ("head", "layer"), per=per)
    require_page("arkvale", budget, page, sink, local)
    selector: Selector = CentrePages(page=page, group_reduce=group_reduce)
    policy = Retrieval(
        selector=LayerWide(selector=selector) if per == "layer" else selector,
        store=HostOffload(page=page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=page),
    )
    # No cosine: always recalls.
    return over_layers("arkvale", layers, Speculative(policy, tau=2.0, topk=topk))


@dataclass(frozen=True, kw_only=True)
class LayerWide(Wrapper):
    """Selects the same units for all KV heads of a layer: all query heads of the layer rank
    them as one group.

    `selector` scores, and its `group_reduce` reduces the scores of all query heads to one.
    Scores are computed in f32 and sorted in plain JAX.

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=LayerWide(selector=kvjax.CentrePages()), demote=kvjax.Fifo(leave=32))
    """

    selector: Selector

    def __post_init__(self) -> None:
        check_verbs(
            "LayerWide(selector=...)",
            self.selector,
            "a selector",
            ("init", "score"),
            "kvjax.CentrePages()",
        )
        if self.group_reduce == "per_head":
            raise ValueError(
                "LayerWide(selector=...) shares one selection in a layer, so its selector cannot have "
                "group_reduce='per_head'; use 'mean_score', or the selector without LayerWide"
            )

    @property
    def joins_heads(self) -> bool:
        """True: the heads of a layer select together, so none can be computed without the
        others.
        """
        return True

    def select(
        self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        B, K = q.shape[:2]
        scores = self.score_visible(ix, q, candidates, logits=logits)
        if candidates.last is not None:
            scores = jnp.where(candidates.last[:, :, None], LAST, scores)
        scored = self.with_pending(candidates, q)
        pending = scored.pending_units(q, logits, self.unit)
        parts = (
            (scores, candidates.inside(*candidates.span, scores.shape[3], self.unit)),
            pending,
        )
        layer = [(part.reshape(B, 1, -1, part.shape[3]), valid) for part, valid in parts]
        best = ops.top_k_grouped(layer, self.group_reduce, candidates.k_max)
        valid = best.valid & (
            jnp.arange(candidates.k_max, dtype=jnp.int32)[None, None, None]
            < candidates.of_groups(candidates.k)
        )
        shape = (B, K, 1, candidates.k_max)
        units = Selection(jnp.broadcast_to(best.slots, shape), jnp.broadcast_to(valid, shape))
        return candidates.tokens(units, scores.shape[3], self.unit)


@split_selector.register
def _(selector: LayerWide, stripes: Stripes) -> Selector:
    """This selector, whole: every device holds the index of the whole history."""
    return selector
