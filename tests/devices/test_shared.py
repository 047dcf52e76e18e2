"""Shared selections and hot sets of a cache that is split over devices: as on one device,
without collectives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import kvjax
from kvjax import Fier, Fifo, HotSet, Placement, Retrieval
from tests.devices.programs import COLLECTIVE
from tests.devices.test_rows_and_heads import BOTH, SPEC, assert_same

POLICY = Retrieval(
    selector=Fier(group=16),
    store=HotSet(tokens=24),
    budget=32,
    sink=4,
    local=8,
    demote=Fifo(leave=16),
)
LENGTH, STEPS = 80, 6


def pair(placement: Placement | None) -> tuple[kvjax.LayerCache, kvjax.LayerCache]:
    spec = dataclasses.replace(SPEC, capacity=128)
    return kvjax.init_layer(POLICY, spec, placement), kvjax.init_layer(
        POLICY.follower(), spec, placement
    )


def run(caches: Any, tokens: Any, others: Any) -> Any:
    """A ragged prompt, then steps of an anchor and the layer that follows it."""
    lengths = jnp.array([80, 31, 64, 7])
    caches = tuple(
        kvjax.attention(
            cache, *(a[:, :LENGTH] for a in data), lengths=lengths, first_chunk=True
        )[1]
        for cache, data in zip(caches, (tokens, others), strict=True)
    )

    def step(caches: Any, t: Array) -> Any:
        anchor, follower = caches
        own, its = (
            [lax.dynamic_slice_in_dim(a, LENGTH + t, 1, axis=1) for a in data]
            for data in (tokens, others)
        )
        out, anchor, info = kvjax.attention_info(anchor, *own, flush=False)
        after, follower, seen = kvjax.attention_info(
            follower, *its, flush=False, selection=info.selection
        )
        return (anchor, follower), (out, after, info.positions, seen.positions)

    caches, stepped = lax.scan(step, caches, jnp.arange(STEPS))
    return stepped, caches


@pytest.mark.thorough
def test_a_split_anchor_hands_on_what_it_selected() -> None:
    rng, T = np.random.default_rng(0), LENGTH + STEPS
    shapes = [
        (4, T, heads, SPEC.head_dim) for heads in (SPEC.q_heads, SPEC.kv_heads, SPEC.kv_heads)
    ]
    tokens, others = (
        [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes] for _ in range(2)
    )
    results = []
    for placement in (None, BOTH):
        program = jax.jit(run).lower(pair(placement), tokens, others).compile()
        results.append(program(pair(placement), tokens, others))
    assert not COLLECTIVE.findall(program.as_text())
    (one, alone), (split, caches) = results
    assert_same(SPEC, one, split)
    for a, b in zip(alone, caches, strict=True):
        np.testing.assert_array_equal(a.state.store.hot.loads, b.state.store.hot.loads)
        assert (np.asarray(b.state.store.hot.loads)[0] > 24).all(), "nothing was replaced"
