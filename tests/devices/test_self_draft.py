"""Drafts of a model by itself on several devices: the text is that of full attention on one."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kvjax
from kvjax import Placement, SelfDraft
from kvjax.models import Decoder
from tests.generation.test_self_draft import CONFIG, POLICY, PROMPT

AXES = ({"batch": "data", "heads": "model"}, {"context": "data"})


@pytest.mark.parametrize("axes", AXES, ids=["rows and heads", "context"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_drafts_on_a_mesh_give_the_text_of_full_attention(axes: Any, kind: AxisType) -> None:
    model, prompt = Decoder(CONFIG, rngs=nnx.Rngs(3)), PROMPT[:2]
    mesh = jax.make_mesh((2,) * len(axes), tuple(axes.values()), axis_types=(kind,) * len(axes))
    placement = Placement(mesh=mesh, **axes)

    def generate(model: Decoder, policy: Any, placed: Any, draft: Any) -> Any:
        spec = model.spec(2, 96)
        cache = kvjax.init(policy, spec, layers=CONFIG.layers, placement=placed)
        return kvjax.generate(model, cache, prompt, max_new_tokens=24, draft=draft)

    want = generate(model, kvjax.Full(), None, None)
    on_mesh = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    found = generate(on_mesh, POLICY, placement, SelfDraft(tokens=3))
    assert found.rows == want.rows
    assert found.speculation.accepted > 0
