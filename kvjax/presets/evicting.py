"""StreamingLLM, H2O, TOVA and SnapKV: a fixed number of tokens is kept and attended, and the rest
is evicted. The presets differ in the rule by which they evict.
"""

from __future__ import annotations

from kvjax.evictors import Evictor, HeavyHitter, LastQuery, Observation, Pooling, Sliding
from kvjax.policies import Evicting, PerLayer
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers, plain_rope
from kvjax.spec import require_int


@published(
    "the first 4 tokens and the most recent, up to the budget",
    paper="StreamingLLM 2023",
)
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
    return by_evictor(
        "streaming_llm",
        Sliding(sink=sink, rope=plain_rope("streaming_llm", rope_theta)),
        budget,
        layers,
    )


@published(
    "the most recent tokens and the most attended so far, half of the budget each",
    paper="H2O 2023",
)
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
    return by_evictor("h2o", HeavyHitter(recent=recent, queries=queries), budget, layers)


@published(
    "the tokens that the newest query attends to most, up to the budget",
    paper="TOVA 2024",
)
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
    return by_evictor("tova", LastQuery(), budget, layers)


@published(
    "the prompt's tokens that its last 32 queries attend to most, and later tokens",
    paper="SnapKV 2024",
)
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
    return by_evictor("snapkv", evictor, budget, layers)


def by_evictor(name: str, evictor: Evictor, budget: int, layers: Layers) -> PerLayer:
    """A preset that keeps `budget` tokens by the rule of an evictor; `name` is for errors."""
    require_int(f"{name}(budget=...)", budget, at_least=1)
    return over_layers(name, layers, Evicting(evictor=evictor, budget=budget))
