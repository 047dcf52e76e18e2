"""Two names are two methods: at their released settings they keep different tokens of one text,
or stand in `EQUAL` with the reason.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.contrib.evict import RULES
from kvjax.policies import Policy

TOKENS = 700  # of a prompt
STEPS = 40
BUDGET = 288  # `lagkv` needs 260
SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=1024, dtype="float32"
)
EVICTING = ("streaming_llm", "logevict", "h2o", "tova", "snapkv", "adakv", "raas")
SELECTING = ("exact", "fier", "quest", "pariskv", "freekv", "arkvale", "pqcache")

# Pairs that keep the same tokens here, and why.
EQUAL: dict[frozenset[str], str] = {}


def evicting() -> dict[str, Policy]:
    """Returns the policies of names that evict, each that of the second layer of two."""
    found = {
        name: kvjax.presets.parse(f"{name}:budget={BUDGET}").policy(1) for name in EVICTING
    }
    for rule in RULES:
        found[rule] = kvjax.presets.evict(BUDGET, rule=rule, rope_theta=1e4).policy(1)
    return found


def selecting() -> dict[str, Policy]:
    """Returns the policies of names that select, each that of a layer that does."""
    return {name: kvjax.presets.parse(f"{name}:budget={BUDGET}").rest for name in SELECTING}


def tokens(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries that look for some of the keys, and values of several sizes."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((1, count, 2, 16)).astype(np.float32)
    v = rng.standard_normal((1, count, 2, 16)) * rng.lognormal(sigma=1.0, size=(1, count, 2, 1))
    wanted = k[:, rng.integers(0, count, count)]
    noise = rng.standard_normal((1, count, 4, 16))
    q = np.repeat(wanted, 2, axis=2) + noise
    return q.astype(np.float32), k, v.astype(np.float32)


@jax.jit
def _prompt(layer, q, k, v):
    return kvjax.attention(layer, q, k, v, first_chunk=True)[1]


@jax.jit
def _step(layer, q, k, v):
    return kvjax.attention_info(layer, q, k, v)[1:]


def kept(policy: Policy) -> list[set[int]]:
    """The positions that the last step reads, of each KV head."""
    q, k, v = tokens(0, TOKENS + STEPS)
    layer = kvjax.init_layer(policy, SPEC)
    layer = _prompt(layer, q[:, :TOKENS], k[:, :TOKENS], v[:, :TOKENS])
    for i in range(TOKENS, TOKENS + STEPS):
        layer, info = _step(layer, *(a[:, i : i + 1] for a in (q, k, v)))
    return [set(head.ravel().tolist()) - {-1} for head in np.asarray(info.positions[0])]


@pytest.mark.parametrize(
    "policies", [evicting, pytest.param(selecting, marks=pytest.mark.thorough)]
)
def test_each_name_reads_tokens_of_its_own(policies):
    found = {name: kept(policy) for name, policy in policies().items()}
    equal = {
        frozenset(pair)
        for pair in itertools.combinations(found, 2)
        if found[pair[0]] == found[pair[1]]
    }
    assert equal == {pair for pair in EQUAL if pair <= set(found)}
