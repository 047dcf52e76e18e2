"""StreamingLLM, H2O, SnapKV and others: a fixed number of tokens is kept and attended, and the
rest is evicted.

The presets differ in the eviction rule and in how they divide the budget. PyramidKV divides it
among the layers, and AdaKV among the KV heads of a layer; with the others every layer and head
has the same budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvjax.evictors import (
    Evictor,
    ExpectedAttention,
    HeavyHitter,
    KeyDiff,
    KeyNorm,
    Lag,
    LastQuery,
    LastUse,
    LogSpaced,
    Observation,
    Pooling,
    Random,
    Redundancy,
    Sliding,
    Trigonometric,
    ValueWeighted,
)
from kvjax.policies import BesidePrompt, Evicting, HeadBudgets, PerLayer
from kvjax.presets.settings import Layers, over_layers, plain_rope
from kvjax.spec import require_int
from kvjax.validation import check_one_of, finite_number


def streaming_llm(
    budget: int = 1024,
    *,
    sink: int = 4,
    rope_theta: float | None = None,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """StreamingLLM: the first `sink` tokens and the newest are kept and attended, `budget` in
    all.

    Args:
      sink: first tokens of a row, never evicted.
      rope_theta: theta of a model with plain RoPE: positions are then counted within the cache,
        as in the paper. For other kinds of RoPE see `Sliding(rope=...)`. None: keys keep their
        original positions.

    **Source:** StreamingLLM (Xiao et al. 2023), section 3.2. **Differs:** without `rope_theta`
    keys keep their original positions.

    **Checklist:** unit: tokens that are evicted, the same in all heads; besides: all kept
    tokens; zones: sink 4, window the rest of the budget; budget: kept tokens; generated: evict
    the oldest of the window.
    """
    return _evicting(
        "streaming_llm",
        Sliding(sink=sink, rope=plain_rope("streaming_llm", rope_theta)),
        budget,
        layers,
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
    return _evicting("logevict", LogSpaced(), budget, layers)


def h2o(
    budget: int = 1024,
    *,
    recent: float = 0.5,
    queries: int | None = 1024,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """H2O: keeps the newest tokens, a share `recent` of the budget, and those with the most
    accumulated attention.

    Args:
      recent: share of the budget that the newest tokens take.
      queries: how many queries of a longer prompt vote, evenly spread; None: all, as in the
        paper, which is slow.

    **Source:** H2O (Zhang et al. 2023), Algorithm 1. **Differs:** see `HeavyHitter`: a GQA
    group shares a selection; the budget counts the new token; see `Evicting` for prompts in
    several chunks.

    **Checklist:** unit: tokens that are evicted, for each KV head; besides: all kept tokens;
    zones: no sink, window of half of the budget; budget: kept tokens, prompt and answer;
    generated: evict the least attended, of the prompt too.
    """
    return _evicting("h2o", HeavyHitter(recent=recent, queries=queries), budget, layers)


def tova(budget: int = 1024, *, layers: Layers = Layers(dense=0)) -> PerLayer:
    """TOVA: evicts the token to which the newest query attends least, the same one in all heads
    of a layer.

    **Source:** TOVA (Oren et al. 2024). **Differs:** see `LastQuery`: a prompt is cut down
    once, by its last query; the budget counts the new token; see `Evicting` for prompts in
    several chunks.

    **Checklist:** unit: tokens that are evicted, for the layer; besides: all kept tokens;
    zones: no sink, no window; budget: kept tokens, prompt and answer; generated: evict the
    least attended, of the prompt too.
    """
    return _evicting("tova", LastQuery(), budget, layers)


def snapkv(
    budget: int = 1024,
    *,
    window: int = 32,
    kernel_size: int = 7,
    pooling: Pooling = "max",
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """SnapKV: keeps a prompt's last `window` tokens and those that their queries attend to
    most, `budget` in all.

    **Source:** SnapKV (Li et al. 2024), section 4. **Differs:** see `Observation`: a GQA group
    shares a selection, and generated tokens count against the budget; see `Evicting` for
    prompts in several chunks.

    **Checklist:** unit: tokens of the prompt, once, for each KV head; besides: all kept tokens;
    zones: no sink, the prompt's last 32 tokens; budget: kept tokens, prompt and answer;
    generated: kept, and evict those of the prompt with the fewest votes.
    """
    evictor = Observation(window=window, kernel_size=kernel_size, pooling=pooling)
    return _evicting("snapkv", evictor, budget, layers)


def raas(
    budget: int = 1024,
    *,
    threshold: float = 1e-4,
    prompt: int = 0,
    page: int = 1,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """RaaS: keeps the prompt, and evicts the generated token that has gone longest without
    attention.

    Args:
      budget: tokens that a layer and KV head keeps, those of `prompt` not counted; a step
        attends to all of them.
      threshold: softmax weight above which a token counts as attended.
      prompt: tokens of prompts that are kept beside the budget, as in the paper; memory is
        allocated for them.
      page: tokens that are stamped together: a page is attended if its share of a softmax over
        pages is large enough.

    **Source:** RaaS (Hu et al. 2025, arXiv 2502.11147); FreeKV's comparison, for the maximum
    over a group. **Differs:** see `LastUse` and `BesidePrompt`: the default stamps single
    tokens, and counts the prompt. With page=16 and a `prompt` it stamps by pages and keeps the
    prompt beside the budget, as the paper does.

    **Checklist:** unit: tokens or pages that are evicted, for each KV head; besides: all kept
    tokens; zones: no sink, no window; budget: kept tokens, the prompt's too unless `prompt`
    sets room for them; generated: evicted when they are not attended for longest.
    """
    require_int("raas(budget=...)", budget, at_least=1)
    evictor = LastUse(threshold=threshold)
    if prompt == 0 and page == 1:
        return _evicting("raas", evictor, budget, layers)
    return over_layers(
        "raas", layers, BesidePrompt(evictor=evictor, budget=budget, prompt=prompt, page=page)
    )


RULES: dict[str, Evictor] = {
    "random": Random(),
    "random_afresh": Random(afresh=True),
    "knorm": KeyNorm(),
    "keydiff": KeyDiff(),
    "lagkv": Lag(),
    "vatp": ValueWeighted(),
    "criticalkv": ValueWeighted(first=0.5, epsilon=1e-4),
    "expected": ExpectedAttention(rope=None),
    "rkv": Redundancy(),
    "triattention": Trigonometric(rope=None),
}


def evict(
    budget: int = 1024,
    *,
    rule: str = "random",
    every: int | None = None,
    prompt: int | None = None,
    rope_theta: float | None = None,
    close_up: bool = False,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """Keeps `budget` tokens by one of ten published rules: by chance, by keys, by values, or by
    remembered queries.

    Args:
      rule: "random", "random_afresh", "knorm", "keydiff", "lagkv", "vatp", "criticalkv",
        "expected", "rkv" or "triattention".
      every: tokens that are evicted at once. None: 1, or with a rule that compares tokens a
        sixteenth of the budget.
      prompt: tokens of prompts that stay beside the budget (`BesidePrompt`). None: all tokens
        compete.
      rope_theta: theta of a model with plain RoPE, which "expected" and "triattention" must
        know; for other kinds of RoPE give `Evicting` an evictor.
      close_up: whether tokens that are left close up, with their keys rotated to their new
        places (`rope_theta`).

    **Source:** see `Random`, `KeyNorm`, `KeyDiff`, `Lag`, `ValueWeighted`, `ExpectedAttention`,
    `Redundancy` (R-KV) and `Trigonometric` (TriAttention). **Differs:** as there; every KV head
    evicts on its own.

    **Checklist:** unit: tokens that are evicted, for each KV head; besides: all kept tokens;
    zones: no sink, no window; budget: kept tokens, the prompt's too unless `prompt` sets room
    for them; generated: evicted by the rule.
    """
    require_int("evict(budget=...)", budget, at_least=1)
    check_one_of("evict", RULES, rule=rule)
    evictor, rope = RULES[rule], plain_rope("evict", rope_theta)
    if rope is None and (close_up or hasattr(evictor, "rope")):
        raise ValueError(
            f"evict(rule={rule!r}, close_up={close_up}) must know the model's RoPE; set rope_theta"
        )
    compares = type(evictor).judge is not Evictor.judge and not isinstance(
        evictor, ValueWeighted
    )
    settings: dict[str, Any] = {
        "evictor": replace(evictor, rope=rope) if hasattr(evictor, "rope") else evictor,  # type: ignore[type-var]
        "budget": budget,
        "every": (max(budget // 16, 1) if compares or close_up else 1)
        if every is None
        else every,
        "rope": rope if close_up else None,
    }
    policy = Evicting(**settings) if prompt is None else BesidePrompt(**settings, prompt=prompt)
    return over_layers("evict", layers, policy)


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


def adakv(
    budget: int = 1024,
    *,
    floor: float = 0.2,
    ceiling: float = 2.0,
    window: int = 32,
    kernel_size: int = 7,
    pooling: Pooling = "max",
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """AdaKV: SnapKV with one budget for all KV heads of a layer, `budget` per head on average.

    The tokens of a prompt compete across all heads for the slots of the layer, so heads that
    attend widely keep more.

    Args:
      budget: tokens that a layer and KV head keeps, as the mean over the heads; a step attends
        to all of them.
      floor: share of the budget besides the window that every KV head keeps at least, besides
        the window.
      ceiling: multiple of the budget that a KV head keeps at most; memory is allocated for it.

    **Source:** AdaKV (Feng et al. 2024, arXiv 2407.11550): floor 0.2, over SnapKV. **Differs:**
    see `HeadBudgets` and `Observation`. The budget counts the window and generated tokens; the
    original keeps all generated tokens.

    **Checklist:** unit: tokens of the prompt, once, for the layer's KV heads together; besides:
    all kept tokens; zones: no sink, the prompt's last 32 tokens; budget: kept tokens, as the
    mean over KV heads, prompt and answer; generated: kept, and evict those of the prompt with
    the fewest votes.
    """
    require_int("adakv(budget=...)", budget, at_least=1)
    evictor = Observation(window=window, kernel_size=kernel_size, pooling=pooling)
    policy = HeadBudgets(evictor=evictor, budget=budget, floor=floor, ceiling=ceiling)
    return over_layers("adakv", layers, policy)


def _evicting(name: str, evictor: Evictor, budget: int, layers: Layers) -> PerLayer:
    require_int(f"{name}(budget=...)", budget, at_least=1)
    return over_layers(name, layers, Evicting(evictor=evictor, budget=budget))
