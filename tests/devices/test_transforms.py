"""`jax.shard_map` of a user's own, with its default checks, and a default device that is not
the first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kvjax
from kvjax import models, presets

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype="float32"
)
POLICIES: dict[str, kvjax.Policy] = {
    "fier, host": presets.fier(
        24, group=8, chunk=16, layers=presets.Layers(dense=0), store="host"
    ).rest,
    "h2o": presets.h2o(24).rest,
    "pariskv": presets.pariskv(40, sink=2, local=8, chunk=16, dense_below=0).rest,
    "freekv": presets.freekv(
        32, page=8, sink=8, local=8, layers=presets.Layers(dense=0), tau=0.0
    ).rest,
    "kivi": presets.kivi(residual=16, group=8).rest,
    "full": kvjax.Full(),
}


def qkv(tokens: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(tokens)
    return tuple(
        jnp.asarray(rng.normal(size=(2, tokens, h, 16)).astype(np.float32)) for h in (4, 2, 2)
    )


def talk(cache: kvjax.Cache, prompt: Any, step: Any) -> tuple[Any, kvjax.Cache]:
    """A prompt and a step, the same for all layers."""
    layers, outs = [], []
    for layer in cache.layers:
        first, layer = kvjax.attention(layer, *prompt)  # type: ignore[assignment]
        second, layer = kvjax.attention(layer, *step)  # type: ignore[assignment]
        layers.append(layer)
        outs += [first, second]
    return outs, kvjax.Cache(tuple(layers))


@pytest.mark.parametrize(
    "names",
    [
        ("fier, host",),
        *(
            pytest.param((n,), marks=pytest.mark.thorough)
            for n in POLICIES
            if n != "fier, host"
        ),
    ],
    ids=str,
)
def test_shard_map_over_rows_passes_its_default_checks(names: tuple[str, ...]) -> None:
    policies = [POLICIES[name] for name in names]
    cache = kvjax.init(policies, SPEC, layers=len(policies))
    one = kvjax.init(policies, dataclasses.replace(SPEC, batch=1), layers=len(policies))
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    rows = PartitionSpec("rows")

    def place(leaf: jax.Array) -> jax.Array:
        return jax.device_put(
            leaf, NamedSharding(mesh, rows, memory_kind=leaf.sharding.memory_kind)
        )

    def local(leaves: Any, prompt: Any, step: Any) -> Any:
        outs, mine = talk(jax.tree.unflatten(jax.tree.structure(one), leaves), prompt, step)
        return outs, jax.tree.leaves(mine)

    split = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows)
    )
    outs, leaves = split(
        [place(leaf) for leaf in jax.tree.leaves(cache)],
        *jax.tree.map(place, (qkv(40), qkv(1))),
    )
    want, wanted = jax.jit(talk)(cache, qkv(40), qkv(1))
    for got, whole in zip((*outs, *leaves), (*want, *jax.tree.leaves(wanted)), strict=True):
        np.testing.assert_allclose(got, whole, atol=2e-5)


FIER = kvjax.Retrieval(
    selector=kvjax.Fier(group=16),
    budget=64,
    sink=4,
    local=24,
    demote=kvjax.Fifo(leave=32),
    dense_below=0,
)


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(
            kvjax.HostOffload(), marks=pytest.mark.thorough
        ),  # the two below are made of it
        pytest.param(kvjax.HostFloat8(), marks=pytest.mark.thorough),
        kvjax.HotSet(tokens=64, store=kvjax.HostTurboQuant()),
        None,
    ],
    ids=str,
)
def test_a_host_store_that_shard_map_makes_passes_its_default_checks(store: Any) -> None:
    """Zeros that are made inside do not vary over devices until tokens are stored."""
    policy: Any = dataclasses.replace(FIER, store=store) if store else None
    if policy is None:
        pages = kvjax.MinMaxPages(page=4)
        policy = kvjax.Speculative(
            dataclasses.replace(FIER, selector=pages, store=kvjax.HostOffload(page=4)), tau=0.9
        )
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    rows = PartitionSpec("rows")
    spec = dataclasses.replace(SPEC, batch=1, capacity=128)

    def run(prompt: Any, step: Any) -> Any:
        return talk(kvjax.init(policy, spec, layers=1), prompt, step)[0]

    split = jax.shard_map(run, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    found = jax.eval_shape(split, qkv(100), qkv(1))  # which checks
    assert [out.shape for out in found] == [(2, 100, 4, 16), (2, 1, 4, 16)]


def test_a_cache_that_shard_map_splits_is_refused_by_name_of_the_placement() -> None:
    cache = kvjax.init(kvjax.Full(), SPEC, layers=1)
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    rows = PartitionSpec("rows")
    split = jax.shard_map(talk, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows)
    with pytest.raises(
        ValueError,
        match=r"q has B=1 but the cache has B=2.*placement=kvjax\.Placement\(mesh=\.\.\.\)",
    ):
        split(cache, qkv(40), qkv(1))


CONFIG = models.DecoderConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
)


@pytest.mark.parametrize("how", ["default", pytest.param("put", marks=pytest.mark.thorough)])
def test_everything_stays_on_a_device_that_is_not_the_first(how: str, tmp_path: Any) -> None:
    """On the default device; or where model and cache were put, beside a default that is
    another.
    """
    third = jax.devices()[2]
    policies = [POLICIES["fier, host"], kvjax.Full()]

    def run() -> Any:
        model, cache = models.Decoder(CONFIG), kvjax.init(policies, SPEC, layers=2)
        if how == "put":
            model = jax.device_put(model, third)
            cache = jax.tree.map(
                lambda a: jax.device_put(
                    a,
                    jax.sharding.SingleDeviceSharding(
                        third, memory_kind=a.sharding.memory_kind
                    ),
                ),
                cache,
            )
        made = kvjax.generate(model, cache, [[1, 2, 3], [4]], max_new_tokens=20)
        kvjax.save(tmp_path, made.cache)
        back = kvjax.restore(tmp_path, made.cache)
        grown = kvjax.grow(made.cache, 96)
        like = jax.eval_shape(lambda: kvjax.init(policies, SPEC, layers=2))
        return made, (made.cache, made.logits, back, grown), kvjax.restore(tmp_path, like)

    with jax.default_device(third if how == "default" else jax.devices()[0]):
        made, held, anew = run()
    kinds = {"pinned_host", third.default_memory().kind}
    for leaf in jax.tree.leaves(held):
        assert leaf.devices() == {third}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(made.cache)} == kinds
    for leaf in jax.tree.leaves(anew):  # of shapes alone: the default device
        assert leaf.devices() == {third if how == "default" else jax.devices()[0]}
