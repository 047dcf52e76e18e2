"""Every policy that the laws run on, and every combination that must be refused with its error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax import (
    CacheSpec,
    CentrePages,
    Compressed,
    Evicting,
    Exact,
    Fier,
    Fifo,
    Full,
    HeavyHitter,
    HostFloat8,
    HostOffload,
    HostTurboQuant,
    HotSet,
    LastQuery,
    LogSparse,
    MinMaxPages,
    Observation,
    Paris,
    Quantized,
    Retrieval,
    Sliding,
    Speculative,
    presets,
)
from kvjax.contrib.adakv import HeadBudgets
from kvjax.contrib.magicpig import Sampled
from kvjax.contrib.mikv import Mixed
from kvjax.contrib.pqcache import ProductCodes
from kvjax.contrib.razorattention import Compensated
from kvjax.contrib.shadowkv import LowRank, MeanPages, OutlierRetrieval
from kvjax.models import rope as ropes

SPEC = CacheSpec(batch=3, q_heads=8, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)
BASE = Retrieval(
    selector=Fier(group=16), budget=64, sink=4, local=24, demote=Fifo(leave=32), dense_below=0
)


@dataclass(frozen=True)
class Case:
    policy: kvjax.Policy
    spec: CacheSpec = SPEC


def _with(policy: Retrieval = BASE, spec: CacheSpec = SPEC, **changes: Any) -> Case:
    return Case(dataclasses.replace(policy, **changes), spec)


def _late(*, tau: float, spec: CacheSpec = SPEC, **changes: Any) -> Case:
    """With the recall of the step before, for heads whose cosine reaches tau."""
    return Case(Speculative(dataclasses.replace(BASE, **changes), tau=tau), spec)


CASES: dict[str, Case] = {
    "full": Case(Full()),
    "full, 7 query heads on 1, bf16": Case(
        Full(), dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16)
    ),
    "fier with sink and window": _with(),
    "fier, dense below 90 tokens": _with(dense_below=90),
    "fier per query head, 7 on 1": _with(
        selector=Fier(group=16, group_reduce="per_head"),
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1),
    ),
    "fier by pages of 8": _with(selector=Fier(group=16, page=8)),
    "fier, no group, f16": _with(
        spec=dataclasses.replace(SPEC, q_heads=2, kv_heads=2, dtype=jnp.float16)
    ),
    "kivi, values in a window": Case(presets.kivi(residual=16, group=8, value_window=16).rest),
    "quest preset, budget 40": Case(presets.quest(budget=40, page=8).rest),
    "quest, newest page selected": Case(presets.quest(budget=40, page=8, newest="select").rest),
    "pages per query head, 7 on 1, bf16": _with(
        selector=MinMaxPages(page=16, group_reduce="per_head"),
        budget=70,
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16),
    ),
    "pages by centre, dense below 90 tokens": _with(
        selector=CentrePages(page=32), budget=64, dense_below=90
    ),
    "pages in host memory": _with(selector=MinMaxPages(page=16), store=HostOffload(page=8)),
    "fier in host memory, bf16": _with(
        store=HostOffload(), spec=dataclasses.replace(SPEC, dtype=jnp.bfloat16)
    ),
    "fier in host memory, hot set": _with(store=HotSet(tokens=64)),  # smaller than a row
    "fier in host memory, 8-bit floats": _with(store=HostFloat8()),
    "pages in host memory, codes, hot set": _with(
        selector=MinMaxPages(page=16), store=HotSet(tokens=256, store=HostTurboQuant(page=8))
    ),
    "pages per query head a step late, hot set, 7 on 1, bf16": _late(
        selector=MinMaxPages(page=16, group_reduce="per_head"),
        store=HotSet(tokens=7 * 256, store=HostOffload(page=8)),
        budget=70,
        tau=0.0,
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16),
    ),
    "all in host memory": Case(
        Compressed(store=HostOffload(page=32), sink=4, local=24, demote=Fifo(leave=32))
    ),
    "arkvale, budget 72": Case(presets.arkvale(budget=72, page=8, sink=4, local=24).rest),
    "arkvale, one selection in a layer, cache of pages": Case(
        presets.arkvale(budget=72, page=8, sink=4, local=24, per="layer", topk=44).rest
    ),
    "pages by centre, per query head, 7 on 1": _with(
        selector=CentrePages(page=16, group_reduce="per_head"),
        budget=70,
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1),
    ),
    # Tokens with equal codes tie, and the lower slot wins: with a code for every two channels
    # none are equal.
    "pqcache, 8 parts": _with(selector=ProductCodes(parts=8, bits=3, learn=32)),
    "pqcache in host memory, bf16": _with(
        selector=ProductCodes(parts=8, bits=3, learn=32, group_reduce="per_head"),
        store=HostOffload(),
        spec=dataclasses.replace(SPEC, dtype=jnp.bfloat16),
    ),
    "magicpig, budget 110": Case(
        presets.magicpig(
            budget=110, bits=6, tables=40, local=8, chunk=32, layers=presets.Layers(dense=0)
        ).rest
    ),
    "shadowkv, budget 96": Case(
        OutlierRetrieval(
            selector=MeanPages(page=8),
            store=LowRank(rank=24, outliers=4, learn=32, values=HostOffload(page=8)),
            budget=96,
            local=10,
            demote=Fifo(leave=32),
        )
    ),
    "shadowkv, bf16, values on the device": Case(
        OutlierRetrieval(
            selector=MeanPages(page=4, group_reduce="per_head"),
            store=LowRank(rank=16, page=4, outliers=5, learn=32, values=kvjax.Dense()),
            budget=70,
            sink=0,
            local=8,
            demote=Fifo(leave=32),
        ),
        dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16),
    ),
    "freekv preset, budget 72": Case(
        presets.freekv(budget=72, page=8, sink=4, local=24, tau=0.0).rest
    ),
    "fier per query head a step late, 7 on 1": _late(
        selector=Fier(group=16, group_reduce="per_head"),
        tau=-1.0,
        dense_below=90,
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1),
    ),
    "fier a step late, log-sparse": _late(demote=LogSparse(window=32), tau=-1.0),
    # Votes tie at the last place of the candidates, and the lower slot wins: with all of them
    # reranked the laws hold in any order of slots.
    "paris over 2-bit values, heads of 64": _with(
        selector=Paris(candidates=200),
        store=Quantized(bits=4, key_group=16, value_bits=2, value_group=8),
        spec=dataclasses.replace(SPEC, head_dim=64),
    ),
    "paris per query head a step late, 7 on 1, bf16, in host memory": _late(
        selector=Paris(votes="plain", correct=False, candidates=200, group_reduce="per_head"),
        store=HostOffload(),
        tau=-1.0,
        dense_below=90,
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1, head_dim=24, dtype=jnp.bfloat16),
    ),
    "paris, update buffer attended, not rotated": Case(
        presets.pariskv(
            32,
            selector=Paris(candidates=200, seed=None),
            sink=4,
            local=8,
            chunk=16,
            buffer="attend",
            dense_below=0,
        ).rest
    ),
    "paris by blocks of 4, coded radii": Case(
        presets.pariskv(
            64,
            selector=Paris(candidates=200, subspace=4, radius_bits=4),
            sink=4,
            local=24,
            chunk=32,
            dense_below=0,
        ).rest
    ),
    "exact, budget 24": Case(presets.exact(budget=24, chunk=32).rest),
    "exact per query head, 7 on 1, in host memory, bf16": _with(
        selector=Exact(group_reduce="per_head"),
        store=HostOffload(),
        spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16),
    ),
    "streaming_llm, budget 64": Case(presets.streaming_llm(budget=64).rest),
    "h2o preset, budget 64": Case(presets.h2o(budget=64).rest),
    "tova, budget 64": Case(presets.tova(budget=64).rest),
    "snapkv, budget 64": Case(presets.snapkv(budget=64).rest),
    "logevict, budget 42": Case(presets.logevict(budget=42).rest),
    "adakv, budget 40": Case(presets.adakv(budget=40, window=5).rest),
    "mikv, nothing lost": Case(Mixed(budget=40, store=kvjax.Dense(), chunk=16)),
    "razorattention, budget 64": Case(presets.razorattention(budget=64).rest),
    "some heads in full, others in chunks": Case(
        kvjax.PerHead(
            heads=(1,),
            selected=Full(),
            others=Compressed(store=kvjax.Dense(), demote=Fifo(leave=32)),
        )
    ),
    "raas, budget 64": Case(presets.raas(budget=64).rest),
    "raas beside the prompt, by pages": Case(
        presets.raas(budget=24, prompt=40, page=4, threshold=0.05).rest
    ),
    **{
        f"evict by {rule}, budget 60": Case(presets.evict(60, rule=rule, rope_theta=1e4).rest)
        for rule in (
            "random_afresh",
            "knorm",
            "keydiff",
            "vatp",
            "criticalkv",
            "expected",
            "rkv",
            "triattention",
        )
    },
    "evict by lagkv, partitions of 8": Case(
        Evicting(evictor=kvjax.evictors.Lag(partition=8), budget=60, every=7),
    ),
    "evict at random beside the prompt": Case(presets.evict(40, rule="random", prompt=40).rest),
    "window without a sink, 7 on 1, bf16": Case(
        Evicting(evictor=Sliding(sink=0), budget=61),
        dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16),
    ),
    "heavy hitters alone, no group, f16": Case(
        Evicting(evictor=HeavyHitter(recent=0), budget=70),
        dataclasses.replace(SPEC, q_heads=2, kv_heads=2, dtype=jnp.float16),
    ),
    "last query, 7 on 1": Case(
        Evicting(evictor=LastQuery(), budget=55),
        dataclasses.replace(SPEC, q_heads=7, kv_heads=1),
    ),
    "observation of 5, bf16": Case(
        Evicting(evictor=Observation(window=5, kernel_size=3), budget=60),
        dataclasses.replace(SPEC, dtype=jnp.bfloat16),
    ),
    "compressed, nothing lost": Case(
        Compressed(store=kvjax.Dense(), sink=4, local=24, demote=Fifo(leave=32))
    ),
    "logquant preset, window 12": Case(presets.logquant(window=12, group=8).rest),
    "logquant by token, 3 bits, 7 on 1, bf16": Case(
        presets.logquant(window=16, bits=3, key_axis="token").rest,
        dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16),
    ),
    "kivi preset, residual 32": Case(presets.kivi(residual=32, group=8).rest),
    "turboquant preset, 3 and 2 bits": Case(
        presets.turboquant(bits=3, value_bits=2, local=24, chunk=32).rest
    ),
    "signs of turboquant's keys": _with(selector=kvjax.SignPlane(), store=kvjax.TurboQuant()),
    "fier over turboquant": _with(store=kvjax.TurboQuant()),
    "paris over turboquant on the host, bf16": _with(
        selector=Paris(candidates=200),
        store=kvjax.HostTurboQuant(bits=8, value_bits=3),
        spec=dataclasses.replace(SPEC, dtype=jnp.bfloat16),
    ),
    "freekv over turboquant": Case(
        presets.freekv(budget=72, page=8, sink=4, local=24, tau=0.0, store="host-turbo4").rest
    ),
    "freekv over turboquant, in place": Case(
        presets.freekv(budget=72, page=8, sink=4, local=24, tau=0.0, store="turbo4").rest
    ),
    "fier over 2-bit values": _with(
        store=Quantized(bits=4, key_group=16, value_bits=2, value_group=8)
    ),
    "fier, log-sparse, 2 bits": _with(
        selector=Fier(group=8),
        local=16,
        demote=LogSparse(window=16),
        store=Quantized(bits=2, key_group=16),
    ),
}

# Products of the methods' parts, and the methods beside them, at the sizes that models have:
# each meets every group and both head sizes.
_PRODUCTS: dict[str, kvjax.Policy] = {
    "fier, history on the host": dataclasses.replace(BASE, store=HostOffload()),
    "paris, history on the host": dataclasses.replace(
        BASE, selector=Paris(candidates=200), store=HostOffload()
    ),
    "fier, speculative": Speculative(BASE, tau=-1.0),
    "paris, speculative": Speculative(
        dataclasses.replace(BASE, selector=Paris(candidates=200)), tau=0.0
    ),
    "fier, log-sparse window": dataclasses.replace(BASE, demote=LogSparse(window=32)),
    "paris, log-sparse window": dataclasses.replace(
        BASE, selector=Paris(candidates=200), demote=LogSparse(window=32), store=HostOffload()
    ),
    "paris, values of 2 bits": dataclasses.replace(
        BASE,
        selector=Paris(candidates=200),
        store=Quantized(bits=8, key_group=16, value_bits=2, value_group=32),
    ),
    "freekv at scale": presets.freekv(budget=72, page=8, sink=4, local=24, tau=0.0).rest,
    "logquant at scale": presets.logquant(window=12, group=32).rest,
    "kivi at scale": presets.kivi(residual=32, group=16).rest,
}
_GROUPS = ((2, 2), (8, 2), (7, 1))  # query heads on kv heads
CASES |= {
    f"{name}, {q_heads} on {kv_heads}, heads of {head_dim}": Case(
        policy, dataclasses.replace(SPEC, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    )
    for i, (name, policy) in enumerate(_PRODUCTS.items())
    for j, (q_heads, kv_heads) in enumerate(_GROUPS)
    for head_dim in ((64, 128)[(i + j) % 2],)
}

_HISTORY = {"order_of_chunks_does_not_matter"}
_BUDGET = {"recall_grows_with_budget", "outstanding_key_is_read"}
_TRUNCATE = {"truncate_gives_the_shorter_prompt"}
_EXACT = {"exact_steps_attend_to_all_tokens"}
_ROLLBACK = {"rollback_forgets_what_came_after"} | _TRUNCATE
_AS_STORED = {  # compare with tokens that are rounded as they leave the recent block
    "budget_of_all_is_dense_attention",
    "every_token_is_in_one_zone",
    "exact_steps_attend_to_all_tokens",
    "step_attends_to_the_positions_it_tells",
    "gradients_are_those_of_attention",
}
_EVICTION = {"budget_bounds_what_is_held", "step_attends_to_what_is_held"}


def does_not_apply(policy: kvjax.Policy) -> set[str]:
    """The laws that need something that such a policy does not have."""
    return _does_not_apply(policy) | (set() if policy.takes_exact else _EXACT)


def _does_not_apply(policy: kvjax.Policy) -> set[str]:
    if isinstance(policy, Evicting | Compensated) and not isinstance(policy, Mixed):
        told = (
            {"step_attends_to_the_positions_it_tells"}
            if isinstance(policy, Compensated)
            else set()
        )
        return told | _HISTORY | _BUDGET | _ROLLBACK | {"full_cache_drops_and_says_so"}
    if isinstance(policy, Mixed):
        return (
            {"step_attends_to_the_positions_it_tells"}
            | _HISTORY
            | _BUDGET
            | _ROLLBACK
            | _EVICTION
        )
    if isinstance(policy, kvjax.PerHead):
        return _HISTORY | _BUDGET | _EVICTION | _ROLLBACK
    if isinstance(policy, Full):
        return _HISTORY | _BUDGET | _EVICTION
    if isinstance(policy, Speculative):
        rounds = not isinstance(policy.retrieval.store, kvjax.Dense | HostOffload | HotSet)
        late = (
            {"step_attends_to_the_positions_it_tells", "gradients_are_those_of_attention"}
            if rounds
            else set()
        )
        return _EVICTION | _ROLLBACK | late
    lost = isinstance(policy, Sampled) or not policy.demote.ordered
    inner = policy.store.store if isinstance(policy.store, HotSet) else policy.store
    lost |= not isinstance(inner, kvjax.Dense | HostOffload)
    if isinstance(policy, Compressed) and policy.value_window is not None:
        return _EVICTION | _BUDGET | _TRUNCATE | _AS_STORED
    by_place = isinstance(
        policy, Sampled
    )  # slots say how a key was centred, and which of too many hits count
    fixed = isinstance(policy, Compressed) or by_place
    fails = (
        (_BUDGET if fixed else set())
        | (_TRUNCATE if lost else set())
        | (_HISTORY if by_place else set())
    )
    return _EVICTION | fails


# In every run of the suite core cases run all laws, and one preset of each kind these; with
# --thorough, all cases do.
CORE = ("full", "fier with sink and window")
QUICK_LAWS = (
    "budget_of_all_is_dense_attention",
    "prefill_equals_prefill_then_updates",
    "step_attends_to_the_positions_it_tells",
)
QUICK_PRESETS = (
    "freekv preset, budget 72",
    "h2o preset, budget 64",
    "logquant preset, window 12",
)
QUICK_MORE = {  # its schedule keeps what a row recalled
    "freekv preset, budget 72": (
        "inactive_rows_store_nothing",
        "row_ignores_calls_of_other_rows",
    ),
}

# Variants that differ from a case above in the choice alone: they run the laws that a choice
# can break.
GROUP_REDUCES: dict[str, Case] = {
    f"fier, {group_reduce}": _with(selector=Fier(group=16, group_reduce=group_reduce))  # type: ignore[arg-type]
    for group_reduce in ("mean_query", "mean_score", "max_score", "max_softmax", "sum_softmax")
} | {
    "pariskv preset, budget 60": Case(
        presets.pariskv(budget=60, local=24, chunk=32, dense_below=0).rest
    ),
    "paris, plain votes, few candidates": _with(
        selector=Paris(votes="plain", candidates=20, group_reduce="mean_softmax")
    ),
}
QUICK_POOLS = ("pariskv preset, budget 60",)
CHOICE_LAWS = (
    "slots_past_count_do_not_matter",
    "selected_slots_are_valid_and_unique",
    "recall_grows_with_budget",
)

# Combinations that do not work, each with what its error says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "budget 0": (lambda: presets.fier(budget=0), r"budget=.*at least 1, got 0"),
    "negative budget": (lambda: presets.fier(budget=-5), r"budget=.*at least 1, got -5"),
    "budget of a fraction": (
        lambda: presets.fier(budget=0.5),
        r"budget=.*must be an integer, got 0.5",
    ),  # type: ignore[arg-type]
    "budget below sink + local": (
        lambda: presets.fier(budget=16, sink=4, local=64),
        r"budget=16.*4 \+ 64.*at least 68",
    ),
    "no budget": (
        lambda: dataclasses.replace(BASE, budget=None),
        r"Retrieval\(budget=.*must be an integer, got None",
    ),
    "no local window": (
        lambda: dataclasses.replace(BASE, local=0),
        r"local=.*at least 1, got 0",
    ),
    "group that straddles chunks": (
        lambda: kvjax.init(presets.fier(group=48), SPEC, layers=3),
        r"Fier\(group=48\) does not divide the chunk of 256; use a divisor of 256",
    ),
    "pages that straddle chunks": (
        lambda: kvjax.init_layer(
            dataclasses.replace(BASE, selector=MinMaxPages(page=24)), SPEC
        ),
        r"pages of 24 tokens, but Fifo\(leave=32\) has chunks of 32; make it leave a multiple of 24",
    ),
    "host pages that straddle chunks": (
        lambda: kvjax.init_layer(
            Compressed(store=HostOffload(page=24), sink=4, local=24, demote=Fifo(leave=32)),
            SPEC,
        ),
        r"HostOffload\(page=24\) does not divide the chunk of 32; use a divisor of 32",
    ),
    "host pages larger than a choice": (
        lambda: dataclasses.replace(BASE, store=HostOffload(page=8)),
        r"HostOffload\(page=8\) moves whole pages, but Fier.* selects 1 tokens at a time; use HostOffload\(page=1\)",
    ),
    "tau NaN": (
        lambda: Speculative(BASE, tau=float("nan")),
        r"tau=nan\) must be a number to compare cosines with",
    ),
    "scale of 0": (
        lambda: Speculative(BASE, selection_scale=0),
        r"selection_scale=0.0\) must be None for attention's scale, 1 for unscaled products, or above 0",
    ),
    "tau of a word": (lambda: presets.freekv(tau="low"), r"tau='low'\) must be a number"),  # type: ignore[arg-type]
    "speculation without a choice": (
        lambda: Speculative(Compressed()),  # type: ignore[arg-type]
        r"Speculative got Compressed.*give it a kvjax.Retrieval",
    ),
    "heads that do not rotate": (
        lambda: kvjax.init_layer(
            dataclasses.replace(BASE, selector=Paris()), dataclasses.replace(SPEC, head_dim=80)
        ),
        r"head_dim=80 cannot be rotated; it must be one of 8, 16, .*96, 128, 192, 256",
    ),
    "votes by approval": (
        lambda: Paris(votes="approval"),  # type: ignore[arg-type]
        r"votes='approval'\) must be one of tiers, plain",
    ),
    "no candidates": (lambda: Paris(candidates=0), r"candidates=.*at least 1, got 0"),
    "negative seed": (lambda: Paris(seed=-1), r"seed=.*at least 0, got -1"),
    "pariskv's k for its budget": (
        lambda: presets.pariskv(budget=100),
        r"budget=100 is below sink \+ local = 4 \+ 128.*at least 132",
    ),
    "speculation without a budget": (
        lambda: Speculative(dataclasses.replace(BASE, budget=28)),
        r"budget=28 leaves nothing besides sink \+ local = 4 \+ 24.*at least 29",
    ),
    "a low rank of keys turned by their text's length": (
        lambda: LowRank(rope=ropes.Dynamic(factor=2.0, original=64)),
        r"LowRank\(rope=...\) turns all keys by the same.*those of Dynamic depend on the final length.*use None",
    ),
    "a window renumbered by its text's length": (
        lambda: Sliding(
            rope=ropes.LongRope(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original=64),
        ),
        r"Sliding\(rope=...\) turns.*those of LongRope depend.*use None",
    ),
    "a recent block far beyond the capacity": (
        lambda: kvjax.init_layer(
            dataclasses.replace(BASE, local=10**9, budget=2 * 10**9), SPEC
        ),
        r"local=1000000000, .* makes room for 100000\d+ tokens beside the history, in a cache of 200; make",
    ),
    "a recent block far beyond the capacity, a step late": (
        lambda: kvjax.init_layer(presets.freekv(local=10**9, budget=2 * 10**9).rest, SPEC),
        r"makes room for 100000\d+ tokens beside the history",
    ),
    "page of 0": (lambda: CentrePages(page=0), r"page=.*at least 1, got 0"),
    "5 bits of a direction": (
        lambda: presets.turboquant(bits=5),
        r"TurboQuant\(bits=5\) must be one of 2, 3, 4, 8",
    ),
    "5 bits": (lambda: Quantized(bits=5), r"bits=5\) must be one of 2, 3, 4, 8"),
    "values of 1 bit": (
        lambda: Quantized(value_bits=1),
        r"value_bits=1\) must be one of 2, 3, 4, 8",
    ),
    "keys by head": (
        lambda: Quantized(key_axis="head"),
        r"key_axis='head'.*one of channel, token",
    ),  # type: ignore[arg-type]
    "quantised group of 0": (lambda: Quantized(key_group=0), r"key_group=.*at least 1, got 0"),
    "quantised group that straddles chunks": (
        lambda: kvjax.init(presets.kivi(group=48), SPEC, layers=1),
        r"Quantized\(key_group=48\) does not divide the chunk of 128; use a divisor of 128",
    ),
    "quantised group that straddles heads": (
        lambda: kvjax.init(presets.logquant(group=12), SPEC, layers=1),
        r"Quantized\(value_group=12\) does not divide head_dim=16; use a divisor of 16",
    ),
    "codes that do not pack": (
        lambda: kvjax.init(
            presets.kivi(bits=3, group=4), dataclasses.replace(SPEC, head_dim=12), layers=1
        ),
        r"codes of 3 bits by 8 channels.*head_dim=12.*use 2, 4, 8 bits",
    ),
    "local beyond the adjacent window": (
        lambda: kvjax.init_layer(dataclasses.replace(BASE, demote=LogSparse(window=16)), SPEC),
        r"LogSparse\(window=16\).*local=24.*use local <= 16",
    ),
    "negative window": (lambda: presets.logquant(window=-1), r"window=.*at least 1, got -1"),
    "no residual": (lambda: presets.kivi(residual=0), r"residual=.*at least 1, got 0"),
    "unknown group_reduce": (
        lambda: Fier(group_reduce="median"),
        r"Fier\(group_reduce='median'\) must be one of mean_query",
    ),  # type: ignore[arg-type]
    "head size that does not pack": (
        lambda: kvjax.init_layer(BASE, dataclasses.replace(SPEC, head_dim=12)),
        r"head_dim=12; use a multiple of 8",
    ),
    "heads that do not divide": (
        lambda: dataclasses.replace(SPEC, q_heads=7),
        r"q_heads=7, kv_heads=2.*must divide",
    ),
    "budget within the sink": (
        lambda: presets.streaming_llm(budget=4),
        r"Sliding\(sink=4.*always keeps 4 tokens, got a budget of 4; use at least 5",
    ),
    "negative sink": (lambda: Sliding(sink=-1), r"Sliding\(sink=.*at least 0, got -1"),
    "rule that there is not": (
        lambda: presets.evict(rule="best"),
        r"rule='best'\) must be one of random, ",
    ),
    "rule without its RoPE": (
        lambda: presets.evict(rule="expected"),
        r"rule='expected'.*set rope_theta",
    ),
    "as many evictions as tokens": (
        lambda: presets.evict(8, every=8),
        r"every=8\) must be below budget=8",
    ),
    "tokens that close up one by one": (
        lambda: presets.evict(64, every=1, close_up=True, rope_theta=1e4),
        r"rope=\.\.\.\) rotates keys at each eviction.*use every=64",
    ),
    "heads that share remembered queries": (
        lambda: HeadBudgets(evictor=kvjax.evictors.Redundancy(), budget=64),
        r"HeadBudgets evicts one token at a time",
    ),
    "values weighed without attention": (
        lambda: kvjax.evictors.ValueWeighted(evictor=Sliding()),
        r"no attention guides; use kvjax.HeavyHitter",
    ),
    "no queries vote": (lambda: HeavyHitter(queries=0), r"HeavyHitter.queries"),
    "recent share of 2": (
        lambda: HeavyHitter(recent=2.0),
        r"recent=2.0\) must be a share of the slots, at least 0",
    ),
    "no room beside the window": (
        lambda: presets.snapkv(budget=1),
        r"budget of Observation.*at least 2, got 1",
    ),
    "kernel_size without a middle": (
        lambda: presets.snapkv(kernel_size=8),
        r"kernel_size=8\) must be odd; use 7 or 9",
    ),
    "eviction without a budget": (
        lambda: Evicting(evictor=LastQuery(), budget=0),
        r"budget=.*at least 1, got 0",
    ),
    "prompt without queries": (
        lambda: kvjax.init_layer(presets.tova().rest, SPEC).policy.prefill(
            None, *[jnp.zeros(0)] * 3
        ),
        r"LastQuery\(\) needs the queries of a prompt",
    ),
    "integer dtype": (
        lambda: dataclasses.replace(SPEC, dtype=jnp.int8),
        r"cannot hold dtype int8; use one of bfloat16",
    ),
    "nameless dtype": (
        lambda: dataclasses.replace(SPEC, dtype="float7"),
        r"cannot hold dtype 'float7'",
    ),
    "capacity 0": (
        lambda: dataclasses.replace(SPEC, capacity=0),
        r"capacity=.*at least 1, got 0",
    ),
    "layers as a policy": (
        lambda: kvjax.init_layer(presets.full(), SPEC),
        r"policy of one layer",
    ),  # type: ignore[arg-type]
}
