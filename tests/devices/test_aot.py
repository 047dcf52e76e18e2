"""Programs for 8 H200s, compiled without one: kernels run on the part of a device, and no part
of a cache moves.
"""

from __future__ import annotations

import dataclasses
import re
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
from kvjax.ops import chunk as prompt
from kvjax.ops import partitioned
from kvjax.sharding.placement import state_specs
from tests.devices.programs import copies, exchanges, wanted_exchanges
from tests.kernels import aot
from tests.kernels import cases as kernel_cases

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
SPEC = CacheSpec(batch=8, q_heads=32, kv_heads=8, head_dim=128, capacity=32768)


@cache
def mesh(data: int, model: int, ctx: int = 1) -> Mesh:
    return Mesh(
        np.array(aot.devices_of(aot.H200, "1x1x8")).reshape(data, model, ctx),
        ("data", "model", "ctx"),
    )


def layer_of(policy: Any, placement: Placement | None, at: Mesh, spec: CacheSpec) -> LayerCache:
    """A cache of shapes on the devices of `at`."""

    def shape(leaf: Any, split: PartitionSpec) -> Any:
        kind = aot._OnHost if leaf.sharding.memory_kind == "pinned_host" else NamedSharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kind(at, split))

    whole = shapes(partial(policy.init, spec))
    specs = (
        jax.tree.map(lambda _: PartitionSpec(), whole)
        if placement is None
        else state_specs(policy, spec, placement)
    )
    return LayerCache(jax.tree.map(shape, whole, specs), policy, spec, placement)


@cache
def compiled(
    policy: Any,
    placement: Placement | None,
    at: Mesh,
    spec: CacheSpec = SPEC,
    new: int = 1,
    by_hand: bool = False,
) -> tuple[str, int, int]:
    """HLO of a step, or of a chunk of `new` tokens; its temporary bytes on a device, and the
    kernels that it calls.
    """

    spec = (
        spec
        if at.size > 1
        else Placement(mesh=mesh(2, 4), batch="data", heads="model").local(spec)
    )
    layer = layer_of(policy, placement, at, spec)
    if by_hand:  # split as the placement says, and without it
        layer = dataclasses.replace(layer, placement=None)
        partitioned._warn_once.cache_clear()
    split = PartitionSpec() if placement is None else placement.spec("BTN")
    q, k, v = (
        jax.ShapeDtypeStruct(
            (spec.batch, new, n, spec.head_dim), jnp.bfloat16, sharding=NamedSharding(at, split)
        )
        for n in (spec.q_heads, spec.kv_heads, spec.kv_heads)
    )
    program = jax.jit(kvjax.attention, donate_argnums=0).lower(layer, q, k, v).compile()
    memory = program.memory_analysis()
    text = program.as_text()
    return (
        text,
        memory.temp_size_in_bytes + memory.host_temp_size_in_bytes,
        text.count('custom_call_target="mosaic'),
    )


CASES = {"fier": presets.fier(2048).rest, "full": kvjax.Full()}
MORE = {
    name: getattr(presets, name)().rest
    for name in ("quest", "pariskv", "freekv", "kivi", "streaming_llm", "exact")
}


# Of a step of one layer over context. They were 13, 39 with a sort of many kernels, and 58 when
# all devices sorted.
LAUNCHES = {"full": 11, "fier": 34, "pariskv": 54}


def check(policy: Any) -> None:
    placement = Placement(mesh=mesh(2, 4), batch="data", heads="model")
    split, temporary, kernels = compiled(policy, placement, placement.mesh)
    _, _, wanted = compiled(
        policy, None, Mesh(mesh(2, 4).devices[:1, :1, :1], ("data", "model", "ctx"))
    )
    assert not exchanges(split)
    assert not copies(split, layer_of(policy, placement, placement.mesh, SPEC))
    assert kernels == wanted > 0
    assert temporary < 20e6


@pytest.mark.parametrize("name", CASES)
def test_kernels_run_on_the_part_of_a_device(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)]
)
def test_placement_of_one_device_adds_nothing_to_a_step(name: str) -> None:
    """The same launches in the same order, so the same tokens and the same time, as without a
    placement.
    """
    at = Mesh(mesh(2, 4).devices[:1, :1, :1], ("data", "model", "ctx"))
    programs = []
    for placement in (None, Placement(mesh=at, batch="data", heads="model")):
        text, temporary, _ = compiled({**CASES, **MORE}[name], placement, at)
        kinds = [
            re.sub(r"[.\d]+$", "", launch)
            for launch in aot.Compiled(text, temporary, {}, "", {}, {}).launches
        ]
        programs.append((kinds, temporary))
    assert programs[0] == programs[1] != ([], 0)


@pytest.mark.thorough
def test_gather_of_a_split_cache_under_plain_jit_is_noticed() -> None:
    """The copies that these tests look for occur if a cache is split by hand."""
    placement = Placement(mesh=mesh(2, 4), batch="data", heads="model")
    with pytest.warns(UserWarning, match="without a"):
        program, temporary, _ = compiled(kvjax.Full(), placement, placement.mesh, by_hand=True)
    assert exchanges(program)
    assert copies(program, layer_of(kvjax.Full(), placement, placement.mesh, SPEC))
    assert temporary > 100e6


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE)
def test_kernels_of_more_methods_run_on_the_part_of_a_device(name: str) -> None:
    check(MORE[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["full", "fier", "pariskv"])
def test_kernels_run_on_the_tokens_of_a_device(name: str) -> None:
    """8 GPUs are split 2 by rows, 2 by heads and 2 by tokens; only the data of the formulas
    moves.
    """
    at, policy = mesh(2, 2, 2), (CASES | MORE)[name]
    placement = Placement(mesh=at, batch="data", heads="model", context="ctx")
    program, temporary, kernels = compiled(policy, placement, at)
    assert exchanges(program) == wanted_exchanges(policy, placement, SPEC)
    assert not copies(program, layer_of(policy, placement, at, SPEC))
    assert kernels > 0
    launches = len(aot.Compiled(program, temporary, {}, "", {}, {}).launches)
    assert launches <= LAUNCHES[name]
    assert temporary < 20e6


# Of a step of one layer by share over two devices; 33, 35 and 51 exact.
LAUNCHES_BY_SHARE = {"fier": 16, "quest": 16, "pariskv": 23}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAUNCHES_BY_SHARE)
def test_a_share_is_selected_by_the_kernels_of_one_device(name: str) -> None:
    """With half the launches of an exact selection, and one exchange: the parts of attention."""
    devices = mesh(2, 4).devices.reshape(-1)[:2].reshape(1, 1, 2)
    at = Mesh(devices, ("data", "model", "ctx"))
    placement = Placement(at, context="ctx", selection="share")
    spec = dataclasses.replace(SPEC, batch=1, capacity=131072)
    policy = getattr(presets, name)(2048, dense_capacity=0).rest.with_divisible_chunks(2)
    program, temporary, kernels = compiled(policy, placement, at, spec)
    parts = 2 * spec.q_heads * (spec.head_dim + 1)
    assert exchanges(program) == Counter({("all-gather", parts): 1})
    assert kernels >= 4
    launches = aot.Compiled(program, temporary, {}, "", {}, {}).launches
    assert len(launches) <= LAUNCHES_BY_SHARE[name]
    assert temporary < 5e6


@pytest.mark.parametrize(
    ("head_dim", "ctx"), [(128, 1), (64, 1), pytest.param(128, 2, marks=pytest.mark.thorough)]
)
def test_chunk_of_a_prompt_is_cudnn_calls_on_the_part_of_a_device(
    head_dim: int, ctx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One over the chunk and one over what is stored, which is not copied; over context each
    for both of its blocks.
    """
    from jax._src.cudnn import fused_attention_stablehlo as door

    monkeypatch.setattr(prompt, "takes_cudnn", lambda dtype, *_: dtype == jnp.bfloat16)
    monkeypatch.setattr(door, "check_cudnn_version", lambda: 91000)  # it asks the library
    monkeypatch.setattr(
        door, "check_compute_capability", lambda capability: True
    )  # and this the device
    at = mesh(2, 4 // ctx, ctx)
    placement = Placement(mesh=at, batch="data", heads="model", context="ctx")
    spec = dataclasses.replace(SPEC, head_dim=head_dim)
    program, temporary, _ = compiled(kvjax.Full(), placement, at, spec, new=2048)
    assert program.count('custom_call_target="__cudnn$fmha') == (2 if ctx == 1 else 5)
    # Over context q, k, v of the chunk are whole on each device: what is stored merges by a
    # maximum and a sum, and each sends what it computed of the chunk's attention to itself.
    kinds = Counter(kind for kind, _ in exchanges(program))
    assert kinds == (Counter() if ctx == 1 else Counter({"all-gather": 1, "all-reduce": 2}))
    assert not copies(program, layer_of(kvjax.Full(), placement, at, spec))
    # of attention, in f32
    part = 4 * SPEC.batch // 2 * SPEC.q_heads * ctx // 4 * 2048 * (head_dim + 1)
    assert temporary < (1.3 if ctx == 1 else 3.3) * part


def test_one_token_is_looked_up_without_gathering_the_table() -> None:
    def home(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh(2, 4), PartitionSpec(*axes))

    table = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16, sharding=home("model"))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32, sharding=home())
    program = jax.jit(embed).lower(table, tokens).compile().as_text()
    assert {kind for kind, _ in exchanges(program)} == {"all-reduce"}


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "ctx"), [(8, 1), (4, 2)])
def test_step_of_a_70b_model_needs_the_memory_that_is_computed(model: int, ctx: int) -> None:
    """Each of 8 GPUs holds its part of the weights and of the cache, and little else."""
    config = DecoderConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        layers=80,
        q_heads=64,
        kv_heads=8,
        head_dim=128,
    )
    placement = Placement(mesh=mesh(1, model, ctx), heads="model", context="ctx")
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype="bfloat16"))
    homes = weights.model_shardings(decoder, placement)
    for _, param in weights._params(decoder):
        like = param.get_value()
        param.set_value(jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=homes[id(param)]))
    spec, policy = decoder.spec(batch=1, capacity=131072), CASES["fier"]
    state = jax.tree.map(
        lambda a, split: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(placement.mesh, split)
        ),
        shapes(partial(policy.init, spec)),
        state_specs(policy, spec, placement),
    )
    held = kvjax.Cache((LayerCache(state, policy, spec, placement),) * config.layers)
    token = jax.ShapeDtypeStruct(
        (1,), jnp.int32, sharding=NamedSharding(placement.mesh, PartitionSpec())
    )
    memory = decode_step.lower(decoder, held, token).compile().memory_analysis()
    assert (
        nbytes(decoder).device < 2 * (12.1e9 / model + 58.5e9 / 8) * 1.01
    )  # attention, and MLP with vocabulary
    assert memory.argument_size_in_bytes == pytest.approx(
        nbytes(decoder).device + nbytes(held).device, rel=1e-3
    )
    assert memory.temp_size_in_bytes < 100e6


# One line of `kvjax.ops.op` marks the operands of every operation: arrays, parts, a host's.
@pytest.mark.parametrize("name", ["score_1bit", "attend_zones", "host_rows"])
def test_kernel_under_plain_jit_on_several_devices_warns_once_and_names_the_cure(
    name: str,
) -> None:
    """Once for each operation, and not at all if `jax.shard_map` gives it the part of a device."""
    at = mesh(4, 2)
    args, options = kernel_cases.CASES[name].args()
    leaves, tree = jax.tree.flatten((args, options))
    numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def run(*arrays: Any) -> Any:
        args, options = jax.tree.unflatten(
            tree,
            [dict(zip(numbers, arrays, strict=True)).get(i, x) for i, x in enumerate(leaves)],
        )
        return ops.OPS[name](*args, **options, implementation="mosaic")

    def over(leaf: Any) -> Any:  # KV heads over two devices
        heads = len(leaf.shape) > 2 and leaf.shape[1] == 2
        home = NamedSharding(at, PartitionSpec(None, "model") if heads else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)

    shapes = [over(leaves[i]) for i in numbers]
    partitioned._warn_once.cache_clear()
    with pytest.warns(
        UserWarning,
        match=f"the GPU kernel of {name} is compiled for 8 devices without a .*Placement",
    ):
        jax.jit(run).lower(*shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda *arrays: run(*arrays)).lower(*shapes)  # once
        partitioned._warn_once.cache_clear()
        whole = PartitionSpec()
        local = jax.shard_map(run, mesh=at, in_specs=whole, out_specs=whole, check_vma=False)
        jax.jit(local).lower(*shapes)
