"""Two names are two methods: at their released settings they keep different tokens of one text,
or stand in `EQUAL` with the reason. Those of `READING` return different sums of values.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.contrib.evict import RULES
from kvjax.policies import Policy
from kvjax.testing._expect import held_positions

TOKENS = 700  # of a prompt
STEPS = 40
BUDGET = 288  # `lagkv` needs 260
SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=1024, dtype="float32"
)
# Names by how they save, with what a name must know of a model.
EVICTING = {
    "streaming_llm": "",
    "logevict": "",
    "h2o": "",
    "tova": "",
    "snapkv": "",
    "adakv": "",
    "raas": "",
    "pyramidkv": ",layers=3",
    "duoattention": "",
}
SELECTING = {
    "exact": "",
    "fier": "",
    "quest": "",
    "pariskv": "",
    "freekv": "",
    "arkvale": "",
    "pqcache": "",
    "magicpig": ",chunk=32",
    "shadowkv": ",rank=8,outliers=2,host=false,rope_theta=10000",
}
# Those that read every token, or a mean of those that are gone: they differ in what they return.
READING = (
    "full",
    "kivi",
    "logquant:group=16",
    "turboquant",
    f"mikv:budget={BUDGET}",
    f"razorattention:budget={BUDGET}",
)

# Pairs that keep the same tokens here, and why.
EQUAL: dict[frozenset[str], str] = {}


def evicting() -> dict[str, Policy]:
    """Returns the policies of names that evict, each that of the second layer of two."""
    found = {
        name: kvjax.presets.parse(f"{name}:budget={BUDGET}{settings}").policy(1)
        for name, settings in EVICTING.items()
    }
    for rule in RULES:
        found[rule] = kvjax.presets.evict(BUDGET, rule=rule, rope_theta=1e4).policy(1)
    return found


def selecting() -> dict[str, Policy]:
    """Returns the policies of names that select, each that of a layer that does."""
    return {
        name: kvjax.presets.parse(f"{name}:budget={BUDGET}{settings}").rest
        for name, settings in SELECTING.items()
    }


def all_names() -> dict[str, Policy]:
    """Returns the policies of all names but `READING`."""
    return evicting() | selecting()


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


_step = jax.jit(kvjax.attention_info)


def decoded(policy: Policy):
    """What the last step returns, and its info."""
    q, k, v = tokens(0, TOKENS + STEPS)
    layer = kvjax.init_layer(policy, SPEC)
    layer = _prompt(layer, q[:, :TOKENS], k[:, :TOKENS], v[:, :TOKENS])
    for i in range(TOKENS, TOKENS + STEPS):
        out, layer, info = _step(layer, *(a[:, i : i + 1] for a in (q, k, v)))
    return np.asarray(out), info


def held(policy: Policy) -> list[set[int]]:
    """The positions that a policy that evicts holds after the prompt, of each KV head.

    Names that differ there are two methods, whatever their steps do.
    """
    layer = _prompt(kvjax.init_layer(policy, SPEC), *tokens(0, TOKENS))
    return [set(head) for head in held_positions(layer)[0]]


def kept(policy: Policy) -> list[set[int]]:
    """The positions that the last step reads, of each KV head."""
    _, info = decoded(policy)
    return [set(head.ravel().tolist()) - {-1} for head in np.asarray(info.positions[0])]


def test_every_name_is_compared() -> None:
    reading = {name.partition(":")[0] for name in READING}
    assert {*EVICTING, *SELECTING, *reading, "evict"} == set(kvjax.presets.REGISTRY)


@pytest.mark.parametrize(
    ("policies", "of"),
    [(evicting, held), pytest.param(all_names, kept, marks=pytest.mark.thorough)],
)
def test_each_name_keeps_tokens_of_its_own(policies, of):
    found = {name: of(policy) for name, policy in policies().items()}
    equal = {
        frozenset(pair)
        for pair in itertools.combinations(found, 2)
        if found[pair[0]] == found[pair[1]]
    }
    assert equal == {pair for pair in EQUAL if pair <= set(found)}


def test_names_that_read_all_return_different_sums_of_values() -> None:
    found = {name: decoded(kvjax.presets.parse(name).rest)[0] for name in READING}
    for one, other in itertools.combinations(found, 2):
        assert np.abs(found[one] - found[other]).max() > 1e-4, f"{one} is {other}"
