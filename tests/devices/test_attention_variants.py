"""Sink logits, soft caps and values of another size than keys over devices: what one device
gives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import CacheSpec, Fier, Fifo, Full, Placement, Policy, Retrieval

SPEC = CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, value_dim=8, capacity=112, dtype="float32"
)
DEVICES = np.array(jax.devices()).reshape(2, 2, 2)
PLACEMENT = Placement(
    mesh=Mesh(DEVICES, ("data", "model", "ctx")), batch="data", heads="model", context="ctx"
)
FIER = Retrieval(selector=Fier(group=4), budget=24, sink=2, local=6, demote=Fifo(leave=16))
# Where each call ends: a text of 45 tokens is read as a prompt, then go on chunks or steps.
FIRST: dict[str, Any] = {"first_chunk": True}
CALLS: dict[Policy, list[tuple[int, Any, dict[str, Any]]]] = {
    Full(): [
        (24, kvjax.attention, FIRST),
        (40, kvjax.attention, {}),
        (41, kvjax.attention, {}),
    ],
    FIER: [(40, kvjax.attention, FIRST), (45, kvjax.decode, {})],
}


@pytest.mark.parametrize(
    "sinks",
    [
        pytest.param(None, marks=pytest.mark.thorough),
        np.linspace(-1.0, 4.0, 4).astype(np.float32),
    ],
    ids=["no sinks", "sinks"],  # without them all other tests over devices attend
)
@pytest.mark.parametrize("policy", CALLS, ids=["full", "fier"])
def test_variants_of_attention_are_those_of_one_device(policy: Policy, sinks: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((2, 45, n, size), np.float32)
        for n, size in ((4, 16), (2, 16), (2, 8))
    )
    how: dict[str, Any] = {"scale": 0.4, "soft_cap": 1.5, "sinks": sinks}

    @partial(jax.jit, static_argnums=0)
    def run(placement: Placement | None, *qkv: Any) -> list[jax.Array]:
        cache, outs = kvjax.init_layer(policy, SPEC, placement), []
        first = 0
        for stop, verb, more in CALLS[policy]:
            out, cache = verb(cache, *(a[:, first:stop] for a in qkv), **how, **more)
            outs.append(out)
            first = stop
        return outs

    for got, want in zip(run(PLACEMENT, q, k, v), run(None, q, k, v), strict=True):
        assert got.shape[-1] == 8
        np.testing.assert_allclose(got, want, atol=1e-5)
