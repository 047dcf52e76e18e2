"""A cache that grew behaves like one that had the capacity from the start."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax import presets

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=96, dtype="float32"
)
LARGER = dataclasses.replace(SPEC, capacity=224)
SMALL: dict[str, dict[str, Any]] = {
    "fier": {"budget": 24, "chunk": 32, "dense_layers": 0},
    "pariskv": {"budget": 24, "sink": 4, "local": 8, "chunk": 16, "dense_below": 0},
    "quest": {"budget": 32, "page": 8, "dense_layers": 0},
    # Every step attends with the recall of the step before.
    "freekv": {
        "budget": 48,
        "page": 8,
        "sink": 8,
        "local": 8,
        "dense_layers": 0,
        "tau": -1.0,
    },
    "logquant": {"window": 12, "group": 16},
    "kivi": {"residual": 32, "group": 16},
    "exact": {"budget": 24, "chunk": 32, "dense_layers": 0},
    "streaming_llm": {"budget": 128},
    "h2o": {"budget": 128},
    "tova": {"budget": 40},
    "snapkv": {"budget": 40, "window": 8},
    "arkvale": {"budget": 48, "page": 8, "sink": 8, "local": 8, "dense_layers": 0},
    "pqcache": {"budget": 24, "bits": 4, "learn": 16, "local": 8},
    "shadowkv": {"budget": 64, "rank": 12, "outliers": 2, "learn": 16, "local": 8},
    "magicpig": {
        "budget": 48,
        "bits": 4,
        "tables": 32,
        "local": 8,
        "chunk": 16,
        "dense_layers": 0,
    },
    "pyramidkv": {"budget": 40, "layers": 1},
    "adakv": {"budget": 40, "window": 8},
    "mikv": {"budget": 40, "group": 8, "chunk": 16},
    "logevict": {"budget": 128},
    "raas": {"budget": 128},
    "razorattention": {"budget": 128},
    "duoattention": {"budget": 128},
}

LENGTHS = np.array([70, 33])  # of the prompts of two rows

attend = jax.jit(kvjax.attention)


def draw(T: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(2, T, heads, 16)).astype(np.float32) for heads in (4, 2, 2))


# Every kind of state grows in every run; presets whose states are alike wait for --thorough.
ALIKE = (
    "quest",
    "exact",
    "kivi",
    "h2o",
    "tova",
    "arkvale",
    "magicpig",
    "pqcache",
    "pyramidkv",
    "adakv",
    "logevict",
    "mikv",
    "raas",
    "evict",
    "turboquant",
    "shadowkv",
    "razorattention",
    "duoattention",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.thorough if n in ALIKE else ())
        for n in presets.REGISTRY
    ],
)
def test_grown_cache_goes_on_as_one_that_was_large_from_the_start(name: str) -> None:
    policy = presets.find(name).policies(**SMALL.get(name, {})).rest
    small, large = kvjax.init_layer(policy, SPEC), kvjax.init_layer(policy, LARGER)
    _, small = attend(small, *draw(70, 0), lengths=LENGTHS)
    _, large = attend(large, *draw(70, 0), lengths=LENGTHS)
    grown = kvjax.grow(small, LARGER.capacity)
    assert jax.tree.structure(grown) == jax.tree.structure(large)
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
        grown,
        large,
    )
    assert grown.nbytes == large.nbytes
    for i in range(40):  # past the first capacity, across flushes
        new = draw(1, 100 + i)
        got, grown = attend(grown, *new)
        want, large = attend(large, *new)
        np.testing.assert_allclose(got, want, atol=2e-5)
    kvjax.raise_on_overflow(grown)


def test_grow_serves_whole_models_and_refuses_to_shrink() -> None:
    cache = kvjax.init(kvjax.Full(), SPEC, layers=2)
    assert kvjax.grow(cache, 128).spec.capacity == 128
    with pytest.raises(
        ValueError,
        match=r"grow\(capacity=64\) is below the cache's capacity of 96, and a cache cannot shrink",
    ):
        kvjax.grow(cache, 64)
    with pytest.raises(ValueError, match="grow takes a cache, got a Full"):
        kvjax.grow(kvjax.Full(), 128)  # type: ignore[type-var]


@pytest.mark.parametrize(
    "policy",
    [
        presets.find("fier").policies(**SMALL["fier"]).rest,
        pytest.param(
            presets.find("fier").policies(**SMALL["fier"], store="host").rest,
            marks=pytest.mark.thorough,
        ),
        presets.find("freekv").policies(**SMALL["freekv"]).rest,
    ],
    ids=["on the device", "in host memory", "a step late"],
)
def test_donating_a_grown_cache_leaves_the_old_one(policy: kvjax.Policy) -> None:
    """Arrays that a larger capacity leaves as they are, such as the recent block, are copied as
    well.
    """
    _, cache = attend(kvjax.init_layer(policy, SPEC), *draw(70, 0), lengths=LENGTHS)
    new = draw(1, 1)
    out, _ = jax.jit(kvjax.attention, donate_argnums=0)(
        kvjax.grow(cache, LARGER.capacity), *new
    )
    np.testing.assert_allclose(attend(cache, *new)[0], out, atol=2e-5)


RECALLING = kvjax.Retrieval(
    selector=kvjax.Fier(group=16, group_reduce="per_head"),
    budget=160,
    sink=4,
    local=8,
    demote=kvjax.Fifo(leave=16),
)


@pytest.mark.parametrize(
    "policy",
    [
        presets.find("freekv").policies(**SMALL["freekv"]).rest,
        pytest.param(kvjax.Speculative(RECALLING, tau=-1.0), marks=pytest.mark.thorough),
        pytest.param(
            kvjax.Speculative(
                dataclasses.replace(RECALLING, store=kvjax.HostOffload()), tau=-1.0
            ),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=[
        "freekv",
        "a budget above the capacity",
        "a budget above the capacity, in host memory",
    ],
)
def test_a_recall_made_before_growing_has_the_same_tokens(policy: kvjax.Speculative) -> None:
    step = jax.jit(kvjax.attention_info, static_argnames="window")
    caches = [kvjax.init_layer(policy, spec) for spec in (SPEC, LARGER)]
    for i, cache in enumerate(caches):
        _, cache = attend(cache, *draw(70, 0), lengths=LENGTHS)
        for seed in range(1, 6):
            _, cache, _ = step(cache, *draw(1, seed))
        caches[i] = cache
    grown, large = kvjax.grow(caches[0], LARGER.capacity), caches[1]
    recalled = np.asarray(large.state.recall.selection.slots)
    assert (recalled >= large.state.zones.store.slots).any(), "the recall has no pending token"
    for window in (None, 24):
        (got, _, read), (want, _, wanted) = (
            step(cache, *draw(1, 9), window=window) for cache in (grown, large)
        )
        np.testing.assert_array_equal(np.sort(read.positions), np.sort(wanted.positions))
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_lists_of_recalled_tokens_move_apart_where_a_larger_cache_has_room_for_more() -> None:
    """Of each query head a list of tokens, then the edge."""
    policy, rng = kvjax.Speculative(RECALLING), np.random.default_rng(0)
    small, large = (kvjax.init_layer(policy, spec) for spec in (SPEC, LARGER))
    recall = small.state.recall
    recall = recall._replace(
        k=jax.numpy.asarray(rng.normal(size=recall.k.shape), recall.k.dtype)
    )
    grown = kvjax.grow(
        dataclasses.replace(small, state=dataclasses.replace(small.state, recall=recall)), 224
    )
    H, M, more = (
        SPEC.group,
        small.state.recall.selection.slots.shape[3],
        large.state.recall.selection.slots.shape[3],
    )
    got = np.asarray(grown.state.recall.k)
    assert got.shape == large.state.recall.k.shape
    assert more > M
    for head in range(H):
        np.testing.assert_array_equal(
            got[:, :, head * more :][:, :, :M], recall.k[:, :, head * M :][:, :, :M]
        )
    np.testing.assert_array_equal(got[:, :, H * more :], recall.k[:, :, H * M :])
