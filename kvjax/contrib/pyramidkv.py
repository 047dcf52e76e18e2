"""PyramidKV: SnapKV with budgets that fall from the first layer to the last."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.evictors import Observation
from kvjax.policies import Evicting, PerLayer
from kvjax.presets.preset import published
from kvjax.spec import require_int
from kvjax.validation import finite_number

__all__ = ["pyramid", "pyramidkv"]


@published(
    "as snapkv, with budgets that fall from the first layer to the last",
    paper="PyramidKV 2024",
)
def pyramidkv(
    budget: int = 1024,
    *,
    layers: int = 32,
    beta: float = 20.0,
    window: int = 8,
    kernel_size: int = 7,
) -> PerLayer:
    """PyramidKV: SnapKV with a budget that falls linearly from the first layer to the last,
    `budget` on average.

    Every layer keeps `window` tokens. Besides them, the last layer gets 1/beta of an equal
    share of the rest, and the first layer as much as makes the mean `budget`.

    Args:
      budget: tokens that a layer and KV head keeps, as the mean over layers; a step attends to
        all of them.
      layers: layers of the model.
      beta: how steeply budgets fall from the first layer to the last; at least 1.

    **Source:** PyramidKV (Cai et al. 2024, arXiv 2406.02069): beta 20. **Differs:** as
    `snapkv`. Budgets do not depend on the prompt: the original gives what a short prompt leaves
    of the first layers' budgets to later layers.

    **Checklist:** unit: tokens of the prompt, once, for each KV head; besides: all kept tokens;
    zones: no sink, the prompt's last 8 tokens; budget: kept tokens, as the mean over layers,
    prompt and answer; generated: kept, and evict those of the prompt with the fewest votes.
    """
    require_int("pyramidkv(budget=...)", budget, at_least=1)
    require_int("pyramidkv(layers=...)", layers, at_least=1)
    if (beta := finite_number("pyramidkv(beta=...)", beta)) < 1:
        raise ValueError(f"pyramidkv(beta={beta}) must be at least 1")
    evictor = Observation(window=window, kernel_size=kernel_size)
    beside = min(evictor.window, budget)
    budgets = [beside + share for share in pyramid(budget - beside, layers, beta)]
    if budgets[-1] < 2:
        raise ValueError(
            f"pyramidkv(budget={budget}) leaves {budgets[-1]} tokens to the last of {layers} layers, which needs at "
            "least 2; raise the budget or the window"
        )
    *first, last = [Evicting(evictor=evictor, budget=tokens) for tokens in budgets]
    return _Pyramid(tuple(first), last)


def pyramid(budget: int, layers: int, beta: float) -> list[int]:
    """Tokens of each layer, falling linearly to budget/beta in the last one, with a mean of
    about `budget`.

    **Source:** PyramidKV (Cai et al. 2024, arXiv 2406.02069), section 4: with L layers, the
    last has total / (beta L) and the first 2 total / L minus that.

    >>> pyramid(100, 5, 20)
    [195, 148, 100, 52, 5]
    """
    last = budget / beta
    first = 2 * budget - last
    step = (first - last) / max(layers - 1, 1)
    return [round(first - step * i) for i in range(layers)] if layers > 1 else [budget]


@dataclass(frozen=True)
class _Pyramid(PerLayer):
    """Policies whose mean budget holds for this number of layers only."""

    def check(self, layers: int, kv_heads: int | None = None) -> None:
        if layers != (own := len(self.first) + 1):
            raise ValueError(
                f"pyramidkv(layers={own}) shares its budget among {own} layers and the model has {layers}; set "
                f"layers={layers}"
            )
