"""Ten published rules of eviction under one name, one budget and one set of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvjax.contrib.raas import BesidePrompt
from kvjax.evictors import (
    Critical,
    Evictor,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Lag,
    Random,
    Redundancy,
    Trigonometric,
    ValueWeighted,
)
from kvjax.policies import Evicting, PerLayer
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers, plain_rope
from kvjax.spec import require_int
from kvjax.validation import check_one_of

__all__ = ["RULES", "evict"]

RULES: dict[str, Evictor] = {
    "random": Random(),
    "random_afresh": Random(afresh=True),
    "knorm": KeyNorm(),
    "keydiff": KeyDiff(),
    "lagkv": Lag(),
    "vatp": ValueWeighted(),
    "criticalkv": Critical(),
    "expected": ExpectedAttention(rope=None),
    "rkv": Redundancy(),
    "triattention": Trigonometric(rope=None),
}


@published(
    "tokens by one of ten rules: by chance, by keys, by values or by remembered queries",
    paper="2024 to 2026",
)
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

    **Source:** see `Random`, `KeyNorm`, `KeyDiff`, `Lag`, `ValueWeighted` (VATP), `Critical`, `ExpectedAttention`,
    `Redundancy` (R-KV) and `Trigonometric` (TriAttention). **Differs:** as there: `criticalkv`
    measures values before the output projection, `expected` counts queries of generated tokens,
    `rkv` forgives no key where none is alike, and `triattention` is calibrated on its own text.
    Every KV head evicts on its own. The authors of "random" and "triattention" keep the prompt
    beside the budget; here `prompt` does.

    **Checklist:** unit: tokens that are evicted, for each KV head; besides: all kept tokens;
    zones: no sink, no window; budget: kept tokens, the prompt's too unless `prompt` sets room
    for them; generated: evicted by the rule.
    """
    require_int("evict(budget=...)", budget, at_least=1)
    check_one_of("evict", RULES, rule=rule)
    evictor = RULES[rule]
    rope = plain_rope("evict", rope_theta)
    if rope is None and (close_up or hasattr(evictor, "rope")):
        raise ValueError(
            f"evict(rule={rule!r}, close_up={close_up}) must know the model's RoPE; set rope_theta"
        )
    settings: dict[str, Any] = {
        "evictor": replace(evictor, rope=rope) if hasattr(evictor, "rope") else evictor,  # type: ignore[type-var]
        "budget": budget,
        "every": (max(budget // 16, 1) if evictor.compares or close_up else 1)
        if every is None
        else every,
        "rope": rope if close_up else None,
    }
    policy = Evicting(**settings) if prompt is None else BesidePrompt(**settings, prompt=prompt)
    return over_layers("evict", layers, policy)
