"""Programs for 8 H200s, compiled without one: kernels run on the part of a device, and no part of a cache moves."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax import CacheSpec, LayerCache, Placement, ops, presets
from kvjax.generation import decode_step
from kvjax.memory import nbytes, shapes
from kvjax.models import Decoder, DecoderConfig, weights
from kvjax.models.decoder import embed
from kvjax.ops import partitioned
from kvjax.partial import Span
from kvjax.placement import state_specs
from tests.devices.test_rows_and_heads import COLLECTIVE
from tests.kernels import aot

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
SPEC = CacheSpec(batch=8, q_heads=32, kv_heads=8, head_dim=128, capacity=32768)


@cache
def mesh(data: int, model: int, ctx: int = 1) -> Mesh:
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it asks the driver
    eight = topologies.get_topology_desc(platform="cuda", target_config=aot.TARGET, topology="1x1x8")
    return Mesh(np.array(eight.devices).reshape(data, model, ctx), ("data", "model", "ctx"))


def compiled(policy: Any, placement: Placement | None, at: Mesh) -> tuple[str, int, int]:
    """HLO of a step, its temporary bytes on a device, and the kernels that it calls."""

    def shape(leaf: Any, split: PartitionSpec) -> Any:
        kind = aot._OnHost if leaf.sharding.memory_kind == "pinned_host" else NamedSharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kind(at, split))

    spec = SPEC if at.size > 1 else Placement(mesh=mesh(2, 4), batch="data", heads="model").local(SPEC)
    whole = shapes(partial(policy.init, spec))
    specs = (
        jax.tree.map(lambda _: PartitionSpec(), whole) if placement is None else state_specs(policy, spec, placement)
    )
    layer = LayerCache(jax.tree.map(shape, whole, specs), policy, spec, placement)
    split = PartitionSpec() if placement is None else placement.spec("BTN")
    q, k, v = (
        jax.ShapeDtypeStruct((spec.batch, 1, n, 128), jnp.bfloat16, sharding=NamedSharding(at, split))
        for n in (spec.q_heads, spec.kv_heads, spec.kv_heads)
    )
    program = jax.jit(kvjax.attention, donate_argnums=0).lower(layer, q, k, v).compile()
    memory = program.memory_analysis()
    text = program.as_text()
    return text, memory.temp_size_in_bytes + memory.host_temp_size_in_bytes, text.count('custom_call_target="mosaic')


CASES = {"fier": presets.fier(2048).rest, "full": kvjax.Full()}
MORE = {
    name: getattr(presets, name)().rest for name in ("quest", "pariskv", "freekv", "kivi", "streaming_llm", "exact")
}


def check(policy: Any) -> None:
    placement = Placement(mesh=mesh(2, 4), batch="data", heads="model")
    split, temporary, kernels = compiled(policy, placement, placement.mesh)
    _, _, wanted = compiled(policy, None, Mesh(mesh(2, 4).devices[:1, :1, :1], ("data", "model", "ctx")))
    assert not COLLECTIVE.findall(split)
    assert kernels == wanted > 0
    assert temporary < 20e6


@pytest.mark.parametrize("name", CASES)
def test_kernels_run_on_the_part_of_a_device(name: str) -> None:
    check(CASES[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE)
def test_kernels_of_more_methods_run_on_the_part_of_a_device(name: str) -> None:
    check(MORE[name])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "gathers", "sums"), [("full", 1, 0), ("fier", 3, 0), ("pariskv", 3, 1)])
def test_kernels_run_on_the_tokens_of_a_device(name: str, gathers: int, sums: int) -> None:
    """Of 8 GPUs, 2 by rows, 2 by heads and 2 by tokens; all that moves is what the formulas say."""
    at = mesh(2, 2, 2)
    placement = Placement(mesh=at, batch="data", heads="model", context="ctx")
    program, temporary, kernels = compiled((CASES | MORE)[name], placement, at)
    found = Counter(kind for _, kind in COLLECTIVE.findall(program))
    assert found == Counter({"all-gather": gathers, "all-reduce": sums})
    assert kernels > 0
    assert temporary < 20e6


def test_one_token_is_looked_up_without_gathering_the_table() -> None:
    def home(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh(2, 4), PartitionSpec(*axes))

    table = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16, sharding=home("model"))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32, sharding=home())
    program = jax.jit(embed).lower(table, tokens).compile().as_text()
    assert {kind for _, kind in COLLECTIVE.findall(program)} == {"all-reduce"}


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "ctx"), [(8, 1), (4, 2)])
def test_step_of_a_70b_model_needs_the_memory_that_is_computed(model: int, ctx: int) -> None:
    """Each of 8 GPUs holds its part of the weights and of the cache, and little beside them."""
    config = DecoderConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, layers=80, q_heads=64, kv_heads=8, head_dim=128
    )
    placement = Placement(mesh=mesh(1, model, ctx), heads="model", context="ctx")
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype="bfloat16"))
    homes = weights.model_shardings(decoder, placement)
    for _, param in weights._params(decoder):
        like = param.get_value()
        param.set_value(jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=homes[id(param)]))
    spec, policy = decoder.spec(batch=1, capacity=131072), CASES["fier"]
    state = jax.tree.map(
        lambda a, split: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(placement.mesh, split)),
        shapes(partial(policy.init, spec)),
        state_specs(policy, spec, placement),
    )
    held = kvjax.Cache((LayerCache(state, policy, spec, placement),) * config.layers)
    token = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(placement.mesh, PartitionSpec()))
    memory = decode_step.lower(decoder, held, token).compile().memory_analysis()
    assert nbytes(decoder).device < 2 * 70.6e9 / model * 1.01
    assert memory.argument_size_in_bytes == pytest.approx(nbytes(decoder).device + nbytes(held).device, rel=1e-3)
    assert memory.temp_size_in_bytes < 100e6


def test_plain_jit_over_several_devices_warns_once_and_names_the_cure() -> None:
    at = mesh(2, 4)
    q = jax.ShapeDtypeStruct((8, 8, 4, 128), jnp.bfloat16, sharding=NamedSharding(at, PartitionSpec("data", "model")))
    k = jax.ShapeDtypeStruct((8, 8, 1024, 128), jnp.bfloat16, sharding=q.sharding)
    count = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(at, PartitionSpec("data")))

    def attend(q: Any, k: Any, v: Any, count: Any) -> Any:
        return ops.attend_span(q, Span(k, v, jnp.zeros_like(count), count), scale=1.0)

    partitioned._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="attend_span is compiled for 8 devices without a placement.*Placement"):
        jax.jit(attend).lower(q, k, k, count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda *given: attend(*given)).lower(q, k, k, count)  # once
        partitioned._warn_once.cache_clear()
        split = (PartitionSpec("data", "model"),) * 3 + (PartitionSpec("data"),)
        local = jax.shard_map(attend, mesh=at, in_specs=split, out_specs=split[0], check_vma=False)
        jax.jit(local).lower(q, k, k, count)
