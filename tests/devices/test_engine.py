"""An engine whose rows and heads are split over devices gives each request the tokens of one
device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Placement
from tests.devices.test_models import BOTH, directory, models  # noqa: F401 (fixtures)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("full", marks=pytest.mark.thorough),
        "fier:budget=24,group=8,chunk=32,dense_layers=1",
        "kivi:residual=16,group=8",  # whose prompts of two chunks are held until they end
    ],
)
def test_requests_over_rows_and_heads_get_their_tokens(
    models: tuple[Any, Any, Any],  # noqa: F811
    method: str,
) -> None:
    """Two rows on each half of the devices, slots used again, a cancelled request, and answers
    to one prompt.
    """
    policies, rng = kvjax.presets.parse(method), np.random.default_rng(0)
    prompts = [rng.integers(1, 90, n).tolist() for n in (50, 3, 40, 20, 31)]

    def run(model: Any, placement: Placement | None) -> list[list[int]]:
        cache = kvjax.init(
            policies, model.spec(batch=4, capacity=128), layers=2, placement=placement
        )
        engine = kvjax.Engine(model, cache, block=4, chunk=32)
        sent = [
            request
            for i, prompt in enumerate(prompts)
            for request in engine.submit(prompt, max_new_tokens=9, n=2 if i == 1 else 1)
        ]
        while sent[0].state != "running":  # a step reads a bounded part of the prompts
            engine.step()
        if placement is not None:
            with pytest.raises(
                ValueError, match="no row can be taken out of slots that devices share"
            ):
                engine.row(sent[0])
        engine.cancel(sent[0])
        engine.run()
        return [request.tokens for request in sent[1:]]

    assert run(models[1].model, BOTH) == run(models[0].model, None)


def test_rows_move_between_devices_where_the_context_is_split(
    models: tuple[Any, Any, Any],  # noqa: F811
) -> None:
    """`take_rows` under rows, heads and context."""
    place = models[2].placement
    spec = kvjax.CacheSpec(
        batch=4, q_heads=8, kv_heads=4, head_dim=16, capacity=128, dtype="float32"
    )
    policy = kvjax.presets.parse("fier:budget=24,group=8,chunk=32").rest
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((4, 90, n, 16)), jnp.float32) for n in (8, 4, 4))
    outs = []

    @jax.jit
    def talk(cache: kvjax.LayerCache, rows: jax.Array) -> jax.Array:
        _, cache = kvjax.prefill(cache, q, k, v, lengths=jnp.array([90, 50, 7, 64]))
        return kvjax.attention(kvjax.take_rows(cache, rows), q[:, :1], k[:, :1], v[:, :1])[0]

    for at in (None, place):
        outs.append(
            np.asarray(talk(kvjax.init_layer(policy, spec, at), jnp.array([3, 3, 0, 1])))
        )
    np.testing.assert_allclose(outs[0], outs[1], atol=2e-5)
