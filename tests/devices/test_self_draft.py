"""Drafts of a model by itself on several devices: the text is that of full attention on one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kvjax
from kvjax import Placement, SelfDraft
from kvjax.models import Decoder
from tests.generation.test_self_draft import CONFIG, POLICY, PROMPT


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(dataclasses.replace(CONFIG, layers=1, windows=()), rngs=nnx.Rngs(3))


def generate(model: Decoder, policy: Any, placed: Any, draft: Any) -> Any:
    cache = kvjax.init(policy, model.spec(2, 96), layers=1, placement=placed)
    return kvjax.generate(model, cache, PROMPT[:2], max_new_tokens=24, draft=draft)


@pytest.fixture(scope="module")
def want(model: Decoder) -> Any:
    """The text of full attention on one device."""
    return generate(model, kvjax.Full(), None, None)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        ({"batch": "data", "heads": "model"}, AxisType.Explicit),
        ({"context": "data"}, AxisType.Auto),
    ],
    ids=["rows and heads, Explicit", "context, Auto"],
)
def test_drafts_on_a_mesh_give_the_text_of_full_attention(
    model: Decoder, want: Any, axes: Any, kind: AxisType
) -> None:
    mesh = jax.make_mesh((2,) * len(axes), tuple(axes.values()), axis_types=(kind,) * len(axes))
    placement = Placement(mesh=mesh, **axes)
    on_mesh = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    found = generate(on_mesh, POLICY, placement, SelfDraft(tokens=3))
    assert found.rows == want.rows
    assert found.speculation.accepted > 0
