"""The data that a compiled program moves, between devices and within one."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import CacheSpec, Paris, Placement, Retrieval
from kvjax.contrib.magicpig import Sampled

COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
NAMES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
}


def exchanges(program: str) -> Counter[tuple[str, int]]:
    """The collectives of a program, each with the numbers that a device holds after it."""
    found: Counter[tuple[str, int]] = Counter()
    for shape, kind in COLLECTIVE.findall(program):
        sizes = re.findall(r"\w+\[([\d,]*)\]", shape)[-1]  # the last of a tuple is the result
        found[kind, int(np.prod([int(n) for n in sizes.split(",") if n]))] += 1
    return found


def wanted_exchanges(
    policy: Any, placement: Placement, spec: CacheSpec
) -> Counter[tuple[str, int]]:
    """`exchanges` of a decode step of one layer, by the formulas of docs/scaling.md."""
    C, local = placement.parts("context"), placement.local(spec)
    heads, G, D = local.batch * local.kv_heads, spec.group, spec.head_dim
    if C == 1 or isinstance(policy, kvjax.Evicting):
        return Counter()
    found = Counter({("all-gather", C * heads * G * (D + 1)): 1})  # the parts of attention
    if isinstance(policy, Sampled):
        found["all-gather", C * heads * G * (policy.room + 1)] += (
            1  # places, and how many collide
        )
    if not isinstance(policy, Retrieval):
        return found
    rule = policy.selector.group_reduce
    lists = G if rule == "per_head" else 1
    _, gathered = policy.sizes(jax.eval_shape(lambda: policy.init(spec)))
    found["all-gather", C * heads * lists * gathered * 2] += 1  # offers
    if "softmax" in rule:
        found["all-gather", C * heads * G] += 1  # log-sums
    if isinstance(policy.selector, Paris):
        levels, stripes = (
            6 * D // 8 + 2,
            jax.eval_shape(lambda: policy.init(spec)).store.slots // policy.demote.leave,
        )
        found["all-reduce", heads * levels] += 1  # votes
        found["all-gather", C * heads * stripes] += 1  # ties by stripe
    return found


def copies(program: str, cache: Any) -> list[str]:
    """Operations that copy a whole array of keys, values, codes or hashes, as a device holds
    them, or gather one.
    """
    found = []
    for leaf in history(cache):
        for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
            name = f"{NAMES[np.dtype(leaf.dtype).name]}[{','.join(map(str, shape))}]"
            made = rf" = \(?{re.escape(name)}\S* (?:copy|copy-start|transpose|concatenate|all-gather)[\w-]*\("
            found += re.findall(made, program)
    return found


def history(cache: Any) -> list[Any]:
    """The arrays that have a slot for each token, or one for some; not the `offset` of a row's
    keys.
    """
    state = getattr(cache.state, "zones", cache.state)  # those inside of FreeKV's
    names = [name for name in ("tokens", "store", "index") if hasattr(state, name)]
    zones = [getattr(state, name) for name in names] or state  # of an evicting cache all
    found = jax.tree_util.tree_leaves_with_path(zones)
    return [
        leaf
        for path, leaf in found
        if leaf.ndim > 2 and getattr(path[-1], "name", None) != "offset"
    ]
