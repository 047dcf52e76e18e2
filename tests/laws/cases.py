"""Every policy that the laws run on, and every combination that must be refused with its error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax import All, CacheSpec, Fier, Fifo, Full, Retrieval, presets

SPEC = CacheSpec(batch=3, q_heads=8, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)
BASE = Retrieval(selector=Fier(group=16), budget=64, sink=4, local=24, demote=Fifo(leave=32), dense_below=0)


@dataclass(frozen=True)
class Case:
    policy: kvjax.Policy
    spec: CacheSpec = SPEC


def _with(policy: Retrieval = BASE, spec: CacheSpec = SPEC, **changes: Any) -> Case:
    return Case(dataclasses.replace(policy, **changes), spec)


CASES: dict[str, Case] = {
    "full": Case(Full()),
    "full, 7 query heads on 1, bf16": Case(
        Full(), dataclasses.replace(SPEC, q_heads=7, kv_heads=1, dtype=jnp.bfloat16)
    ),
    "fier preset, budget 24": Case(presets.fier(budget=24, group=8, chunk=32).rest),
    "fier with sink and window": _with(),
    "fier, dense below 90 tokens": _with(dense_below=90),
    "fier per query head, 7 on 1": _with(
        selector=Fier(group=16, pool="per_head"), spec=dataclasses.replace(SPEC, q_heads=7, kv_heads=1)
    ),
    "fier, no group, f16": _with(spec=dataclasses.replace(SPEC, q_heads=2, kv_heads=2, dtype=jnp.float16)),
    "retrieval of all": _with(selector=All(), budget=None),
}

# Variants that differ from a case above in the choice alone: they run the laws that a choice can break.
POOLS: dict[str, Case] = {
    f"fier, {pool}": _with(selector=Fier(group=16, pool=pool))  # type: ignore[arg-type]
    for pool in ("mean_query", "mean_score", "max_softmax", "sum_softmax")
}
CHOICE_LAWS = (
    "slots_past_count_do_not_matter",
    "selected_slots_are_valid_and_unique",
    "recall_grows_with_budget",
)

# Combinations that do not work, each with what its error says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "budget 0": (lambda: presets.fier(budget=0), r"budget=.*at least 1, got 0"),
    "negative budget": (lambda: presets.fier(budget=-5), r"budget=.*at least 1, got -5"),
    "budget of a fraction": (lambda: presets.fier(budget=0.5), r"budget=.*must be an integer, got 0.5"),  # type: ignore[arg-type]
    "budget below sink + local": (
        lambda: presets.fier(budget=16, sink=4, local=64),
        r"budget=16.*4 \+ 64.*at least 68",
    ),
    "no budget": (lambda: dataclasses.replace(BASE, budget=None), r"budget=None needs the selector All"),
    "All with a budget": (
        lambda: dataclasses.replace(BASE, selector=All()),
        r"budget=64 cannot hold; give budget=None",
    ),
    "no local window": (lambda: dataclasses.replace(BASE, local=0), r"local=.*at least 1, got 0"),
    "group that straddles chunks": (
        lambda: kvjax.init(presets.fier(group=48), SPEC, layers=3),
        r"Fier\(group=48\) does not divide the chunk of 256; use a divisor of 256",
    ),
    "unknown pool": (lambda: Fier(pool="median"), r"pool must be one of mean_query.*got 'median'"),  # type: ignore[arg-type]
    "head size that does not pack": (
        lambda: kvjax.init_layer(BASE, dataclasses.replace(SPEC, head_dim=12)),
        r"head_dim=12; use a multiple of 8",
    ),
    "heads that do not divide": (lambda: dataclasses.replace(SPEC, q_heads=7), r"q_heads=7, kv_heads=2.*must divide"),
    "integer dtype": (
        lambda: dataclasses.replace(SPEC, dtype=jnp.int8),
        r"cannot hold dtype int8; use one of bfloat16",
    ),
    "nameless dtype": (lambda: dataclasses.replace(SPEC, dtype="float7"), r"cannot hold dtype 'float7'"),
    "capacity 0": (lambda: dataclasses.replace(SPEC, capacity=0), r"capacity=.*at least 1, got 0"),
    "layers as a policy": (lambda: kvjax.init_layer(presets.full(), SPEC), r"policy of one layer"),  # type: ignore[arg-type]
}
