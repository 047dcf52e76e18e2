"""A model that is loaded onto a mesh: each device reads its own part, and the text is that of
one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import kvjax
from kvjax import Placement
from kvjax.generation import decode_step, generate
from kvjax.generation import prefilling as reading
from kvjax.generation.sampling import Sampling, sample, sampling
from kvjax.models import (
    Decoder,
    DecoderConfig,
    Experts,
    distribute,
    load,
    logical_axis_rules,
    rope,
    save,
    tensor_files,
)
from tests.devices.programs import COLLECTIVE, exchanges

CONFIG = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    q_heads=8,
    kv_heads=4,
    head_dim=16,
    qkv_bias=True,
)
MESH = jax.make_mesh((2, 4), ("data", "model"))  # Explicit axes: load makes them Auto
BOTH = Placement(mesh=MESH, batch="data", heads="model")
THREE = Placement(
    mesh=jax.make_mesh((2, 2, 2), ("data", "model", "ctx")),
    batch="data",
    heads="model",
    context="ctx",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model") / "checkpoint"
    save(found, Decoder(CONFIG, rngs=nnx.Rngs(7)))
    return found


@pytest.fixture(scope="module")
def models(directory: Path) -> tuple[Any, Any, Any]:
    return tuple(load(directory, jnp.float32, placement=at) for at in (None, BOTH, THREE))  # type: ignore[return-value]


def leaves(model: Decoder) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }


def test_parts_are_those_of_the_whole_and_lie_where_the_rules_say(
    models: tuple[Any, Any],
) -> None:
    """Heads over the 4 or 2 devices of heads; MLP and vocabulary over the 2 of context too."""
    one, *splits = (leaves(checkpoint.model) for checkpoint in models)
    assert jax.tree.structure(models[0].model) == jax.tree.structure(models[1].model)
    for split, heads in zip(splits, (4, 2), strict=True):
        for name, whole in one.items():
            np.testing.assert_array_equal(np.asarray(split[name]), np.asarray(whole))
            here = split[name].addressable_shards[0].data.nbytes
            assert here == whole.nbytes // (
                1 if "norm" in name else heads if ".attention" in name else 4
            ), name


def test_mlp_that_context_does_not_divide_is_split_over_heads_alone() -> None:
    odd = Decoder(
        dataclasses.replace(CONFIG, layers=1, windows=(), intermediate_size=62, vocab_size=95)
    )
    split = leaves(distribute(odd, THREE))
    here = {
        name: whole.nbytes / split[name].addressable_shards[0].data.nbytes
        for name, whole in leaves(odd).items()
    }
    assert {parts for name, parts in here.items() if ".mlp." in name} == {2}
    assert {parts for name, parts in here.items() if "embedding" in name or "head" in name} == {
        1
    }


def test_a_mixture_of_experts_is_split_inside_each_expert(tmp_path: Path) -> None:
    """Loaded by parts or distributed; a chunk, which sorts tokens by expert, and a step give
    what one device gives.
    """
    experts = Experts(count=8, per_token=2, size=16, bias=True, clamp=(1.5, 2.0))
    config = dataclasses.replace(
        CONFIG, intermediate_size=16, out_bias=True, sinks=True, experts=experts
    )
    config = dataclasses.replace(
        config, windows=(6, None), rope=rope.Yarn(factor=2.0, original=512, theta=1e4)
    )
    save(tmp_path / "checkpoint", Decoder(config, rngs=nnx.Rngs(8)))
    one, split, three = (
        load(tmp_path / "checkpoint", jnp.float32, placement=at).model
        for at in (None, BOTH, THREE)
    )
    again = distribute(one, BOTH)
    for a, b, c in zip(*map(jax.tree.leaves, (one, split, again)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert b.sharding == c.sharding
    assert split.layers[0].mlp.gate[...].addressable_shards[0].data.shape == (8, 4, 32)

    @partial(jax.jit, static_argnums=1)
    def run(model: Decoder, at: Placement | None, tokens: jax.Array) -> jax.Array:
        cache = kvjax.init(kvjax.Full(), model.spec(2, 32), layers=2, placement=at)
        first, cache = model(tokens[:, :20], cache)
        return jnp.concatenate([first, model(tokens[:, 20:], cache)[0]], axis=1)

    tokens = jax.random.randint(jax.random.key(0), (2, 21), 0, 96)
    want = run(one, None, tokens)
    for model, at in ((split, BOTH), (three, THREE)):
        np.testing.assert_allclose(run(model, at, tokens), want, atol=1e-5)


def test_each_byte_of_the_files_is_read_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    send = tensor_files._send

    def counted(part: tensor_files.Part, default: Any) -> Any:
        read.append(part.view.nbytes)
        return send(part, default)

    monkeypatch.setattr(tensor_files, "_send", counted)
    checkpoint = load(directory, jnp.float32, placement=BOTH)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(checkpoint.model)]
    assert sum(read) == sum(sizes)
    assert max(read) <= max(sizes) // 4
    read.clear()
    load(directory, jnp.float32, placement=dataclasses.replace(BOTH, heads=None))
    assert max(read) > max(sizes) // 4, "whole tensors are not noticed"


# the first layer attends to everything
METHOD = "fier:budget=24,group=8,chunk=32,dense_layers=1"


def on_explicit_axes(model: Decoder, mesh: jax.sharding.Mesh) -> Decoder:
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.NamedSharding(mesh, leaf.sharding.spec)), model
    )


# Axes of the model and of the cache, and those that jax.set_mesh has set.
KINDS = [
    ("Auto", "Explicit", "Explicit"),
    *product(("Auto", "Explicit"), ("Auto", "Explicit"), ("", "Auto", "Explicit")),
]


@pytest.mark.parametrize(
    ("model", "cache", "around"),
    [
        pytest.param(*kinds, marks=[pytest.mark.thorough] * (i > 0))
        for i, kinds in enumerate(dict.fromkeys(KINDS))
    ],
)
def test_generated_tokens_are_those_of_one_device(
    models: tuple[Any, Any, Any], model: str, cache: str, around: str
) -> None:
    """Whatever axes the meshes have: a user's own is of Explicit axes if it was made by
    `jax.make_mesh`.
    """
    prompt = [list(range(1, 60)), [5, 9], list(range(3, 80, 2)), [7] * 40]
    policies = kvjax.presets.parse(METHOD)

    def run(model: Decoder, placement: Placement | None) -> Any:
        cache = kvjax.init(
            policies, model.spec(batch=4, capacity=160), layers=2, placement=placement
        )
        return generate(model, cache, prompt, max_new_tokens=40, chunk=64)

    one, split, meshes = (
        run(models[0].model, None),
        models[2].model,
        {"Explicit": THREE.mesh, "Auto": THREE.auto.mesh},
    )
    split = split if model == "Auto" else on_explicit_axes(split, THREE.mesh)
    with jax.set_mesh(meshes[around]) if around else contextlib.nullcontext():
        if (model, cache, around) == ("Explicit", "Auto", ""):
            with pytest.raises(
                ValueError,
                match=r"model is on a mesh of Explicit axes and the cache on one of Auto",
            ):
                run(split, THREE.auto)
            return
        split = run(split, THREE if cache == "Explicit" else THREE.auto)
        assert jnp.argmax(split.logits, axis=-1).shape == (4,)
    np.testing.assert_array_equal(one.tokens, split.tokens)
    np.testing.assert_allclose(np.asarray(split.logits), np.asarray(one.logits), atol=1e-4)
    homes = jax.tree.leaves(kvjax.shardings(split.cache))
    for leaf, home in zip(jax.tree.leaves(split.cache), homes, strict=True):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
    assert split.cache.nbytes.device < one.cache.nbytes.device / 5


HOSTED = "freekv:dense_layers=0,budget=48,sink=8,local=8,page=8,chunk=8"


@pytest.mark.parametrize("method", ["kivi:residual=16,group=8", HOSTED])
def test_a_model_decodes_on_a_device_that_is_not_the_default(method: str) -> None:
    """A new cache goes to the device of the model, unless it has arrays in host memory, which
    are committed."""
    model = Decoder(dataclasses.replace(CONFIG, layers=1, windows=()), rngs=nnx.Rngs(0))
    third = jax.devices()[3]

    def run(model: Any, made_on: Any) -> Any:
        with jax.default_device(made_on):
            policy = kvjax.presets.parse(method)
            cache = kvjax.init(policy, model.spec(batch=1, capacity=64), layers=1)
        done = generate(model, cache, [[3, 4, 5] * 9], max_new_tokens=9)
        return done.rows, done.logits.devices()

    rows, _ = run(model, None)
    moved = jax.device_put(model, third)
    assert run(moved, third) == (rows, {third})
    if method is HOSTED:
        with pytest.raises(
            ValueError, match=r"the cache is on \S+:0 and the model on \S+:3; make"
        ):
            run(moved, None)
    else:
        assert run(moved, None) == (rows, {third})


def test_arrays_may_be_on_several_devices_without_a_placement() -> None:
    model = Decoder(dataclasses.replace(CONFIG, layers=1, windows=()), rngs=nnx.Rngs(0))
    auto = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    everywhere = jax.NamedSharding(auto, PartitionSpec())

    def run(model: Any, home: Any) -> Any:
        cache = kvjax.init(kvjax.Full(), model.spec(batch=1, capacity=64), layers=1)
        cache = jax.device_put(cache, home)
        return generate(model, cache, [[3, 4, 5]], max_new_tokens=4).rows

    one = run(model, None)
    for home in (everywhere, None):
        assert run(jax.device_put(model, everywhere), home) == one


@pytest.mark.thorough
@pytest.mark.parametrize("method", [METHOD, "quest:budget=32,page=8,chunk=32,dense_layers=1"])
def test_logits_of_forced_tokens_are_those_of_one_device(
    models: tuple[Any, Any, Any], method: str
) -> None:
    """Over 150 steps in which rows are flushed; with another token in one of them, later ones
    differ.

    Keys of a random model score nearly alike: of two tokens whose scores differ by less than
    1e-6, rounding chooses.
    """
    tokens = jnp.asarray(np.random.default_rng(1).integers(96, size=(150, 4)), jnp.int32)

    @jax.jit
    def forced(model: Decoder, cache: kvjax.Cache, tokens: jax.Array) -> jax.Array:
        def step(cache: kvjax.Cache, token: jax.Array) -> tuple[kvjax.Cache, jax.Array]:
            logits, cache = model(token[:, None], cache, last_logits=True)
            return cache, logits

        return jax.lax.scan(step, cache, tokens)[1]

    def run(checkpoint: Any, tokens: jax.Array) -> np.ndarray:
        cache = checkpoint.init_cache(method, capacity=160, batch=4, dtype="float32")
        return np.asarray(forced(checkpoint.model, cache, tokens))

    one = run(models[0], tokens)
    wrong = tokens.at[10, 0].set((tokens[10, 0] + 1) % 96)
    same, changed = (
        np.max(np.abs(run(models[2], given) - one), axis=-1) <= 1e-5
        for given in (tokens, wrong)
    )
    assert np.mean(same) >= 0.995
    assert np.mean(changed[11:, 0]) < 0.1


@pytest.mark.parametrize(
    "at", [pytest.param(1, marks=pytest.mark.thorough, id="rows and heads"), 2]
)
def test_step_talks_as_megatron_does(models: tuple[Any, Any, Any], at: int) -> None:
    """Two sums per layer, the embedding, and the condition of the flush; nothing as large as
    the cache or the logits. With context one gather in the layer that attends to everything,
    and three in the one that selects; the sums of MLP and vocabulary are over context too."""
    checkpoint = models[at]
    cache = checkpoint.init_cache(METHOD, capacity=160, batch=4, dtype="float32")
    program = (
        decode_step.lower(checkpoint.model, cache, jnp.zeros(4, jnp.int32)).compile().as_text()
    )
    found = Counter(kind for _, kind in COLLECTIVE.findall(program))
    assert found.pop("all-gather", 0) == (0 if at == 1 else 4)
    assert found.pop("all-reduce") <= 2 * CONFIG.layers + 2
    assert not found


def test_work_of_a_prompt_is_split_over_context(models: tuple[Any, Any, Any]) -> None:
    """Each of 4 devices computes its quarter of the products of all tokens, but for those of
    the head.
    """
    one, four = models[0], Placement(mesh=jax.make_mesh((4,), ("ctx",)), context="ctx").auto
    tokens, flops = jnp.zeros((2, 64), jnp.int32), []
    for model, placement in ((one.model, None), (distribute(one.model, four), four)):
        cache = kvjax.init(
            kvjax.Full(), model.spec(batch=2, capacity=128), layers=2, placement=placement
        )
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), cache
        )
        program = reading._prefill_chunk.lower(
            model, shapes, tokens, jnp.full(2, 64), first_chunk=True
        ).compile()
        flops.append(program.cost_analysis()["flops"])
    assert flops[1] < 0.3 * flops[0]
    found = Counter(kind for _, kind in COLLECTIVE.findall(program.as_text()))
    # Queries, keys, values, the attention of the chunk to itself and the input of the MLP. No
    # weights are gathered.
    assert found["all-gather"] <= 5 * CONFIG.layers
    assert set(found) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert (
        min(size for kind, size in exchanges(program.as_text()) if kind == "all-gather")
        > 96 * 32
    )


@pytest.mark.parametrize(
    "draw", [Sampling(), sampling(0.8, top_k=5), sampling(0.8, top_k=[1, 5, 9, 96], min_p=0.1)]
)
def test_token_is_drawn_without_gathering_the_logits(draw: Sampling) -> None:
    logits = jax.random.normal(jax.random.key(3), (4, 4096))
    key = None if draw.greedy else jax.random.key(5)
    one = jax.jit(sample)(logits, key, draw)
    split = jax.device_put(
        logits, jax.NamedSharding(BOTH.auto.mesh, PartitionSpec("data", "model"))
    )
    program = jax.jit(sample).lower(split, key, draw).compile()
    np.testing.assert_array_equal(np.asarray(program(split, key, draw)), np.asarray(one))
    sizes = re.findall(
        r" = \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)",
        program.as_text(),
    )
    assert all(np.prod([int(n) for n in size.split(",") if n]) < 100 for size in sizes), sizes


def test_cache_of_another_mesh_than_the_model_is_refused(models: tuple[Any, Any]) -> None:
    one, split, _ = models
    reversed_mesh = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names)
    settings = {"layers": 2, "placement": BOTH}
    for model, given, error in (
        (one.model, settings, "the model is on 1 device and the cache on 8"),
        (
            split.model,
            {**settings, "placement": Placement(mesh=jax.make_mesh((4,), ("m",)), heads="m")},
            "the model is on 8 devices and the cache on 4",
        ),
        (
            split.model,
            {
                **settings,
                "placement": Placement(
                    mesh=jax.make_mesh((4, 2), ("data", "model")), heads="model"
                ).auto,
            },
            "over a mesh of data=2 x model=4 and the cache over one of data=4 x model=2; give both one placement",
        ),
        (
            split.model,
            {**settings, "placement": dataclasses.replace(BOTH, mesh=reversed_mesh)},
            "the same devices in another order",
        ),
    ):
        cache = kvjax.init(kvjax.Full(), model.spec(batch=2, capacity=32), **given)
        with pytest.raises(ValueError, match=error):
            generate(model, cache, [[1, 2], [3]], max_new_tokens=2)
    four = Placement(mesh=jax.make_mesh((4,), ("m",)), heads="m")
    for call in (split.model, jax.jit(lambda tokens, cache: split.model(tokens, cache))):
        cache = kvjax.init(
            kvjax.Full(), split.model.spec(batch=2, capacity=32), layers=2, placement=four
        )
        with pytest.raises(ValueError, match="the model is on 8 devices and the cache on 4"):
            call(jnp.zeros((2, 1), jnp.int32), cache)


@jax.jit
def train(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, Decoder]:
    """The loss of a batch, and the model after a step of gradient descent."""

    def loss(model: Decoder) -> jax.Array:
        logits, _ = model(tokens[:, :-1])
        return jax.sharding.auto_axes(miss, out_sharding=PartitionSpec())(logits, tokens[:, 1:])

    def miss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
        )

    value, slopes = jax.value_and_grad(loss)(model)
    return value, jax.tree.map(lambda weight, slope: weight - slope, model, slopes)


def test_training_step_is_that_of_one_device(models: tuple[Any, Any, Any]) -> None:
    """Rows, heads, MLP and vocabulary split, over a mesh of Explicit axes and over one of Auto
    axes.
    """
    one, split, _ = (checkpoint.model for checkpoint in models)
    tokens = jnp.asarray(np.random.default_rng(0).integers(96, size=(4, 24)), jnp.int32)
    loss, wanted = train(one, tokens)
    before, after = leaves(one), leaves(wanted)
    assert max(np.max(np.abs(np.asarray(after[name] - before[name]))) for name in before) > 1e-2
    for model, mesh in ((on_explicit_axes(split, MESH), MESH), (split, BOTH.auto.mesh)):
        with jax.set_mesh(mesh):
            given = jax.device_put(tokens, jax.NamedSharding(mesh, PartitionSpec("data")))
            found_loss, found = train(model, given)
        np.testing.assert_allclose(float(found_loss), float(loss), atol=1e-5)
        for (name, weight), own in zip(
            leaves(found).items(), leaves(model).values(), strict=True
        ):
            np.testing.assert_allclose(np.asarray(weight), np.asarray(after[name]), atol=1e-5)
            assert weight.sharding.is_equivalent_to(own.sharding, weight.ndim)


def test_names_of_axes_are_where_nnx_looks(models: tuple[Any, Any]) -> None:
    rules = tuple(logical_axis_rules(BOTH).items())
    with nnx.logical_axis_rules(rules):
        homes = nnx.get_named_sharding(nnx.state(models[0].model), MESH)
    assert homes["layers"][0]["attention"]["q"]["kernel"].get_value().spec == PartitionSpec(
        None, "model"
    )


@pytest.mark.parametrize(
    ("mesh", "rules", "error"),
    [
        ((1, 8), None, "splits 4 KV heads over 8 devices"),
        ((2, 4), {"vocabulary": None}, "rules names 'vocabulary'"),
    ],
)
def test_what_cannot_be_split_is_refused(
    directory: Path, mesh: Any, rules: Any, error: str
) -> None:
    placement = Placement(
        mesh=jax.make_mesh(mesh, ("data", "model")), batch="data", heads="model"
    )
    with pytest.raises(ValueError, match=error):
        load(directory, placement=placement, rules=rules)


def test_distribute_leaves_its_model_where_it_was() -> None:
    model = Decoder(CONFIG)
    split = distribute(model, BOTH)
    for own, moved in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(split)), strict=True
    ):
        assert len(own.sharding.device_set) == 1
        np.testing.assert_array_equal(own, moved)
    assert any(
        not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(split))
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(AxisType.Auto, marks=pytest.mark.thorough), AxisType.Explicit]
)
def test_rotation_by_length_follows_rows_over_devices(kind: AxisType) -> None:
    """Each row has the rotation of its own final length, through every verb and on every mesh."""
    original = 16
    longrope = rope.LongRope(short_factor=(1.0,) * 8, long_factor=(9.0,) * 8, original=original)
    model = Decoder(dataclasses.replace(CONFIG, rope=longrope), rngs=nnx.Rngs(7))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    placement = Placement(mesh=mesh, batch="data", heads="model")
    prompts = np.random.default_rng(0).integers(0, 96, (4, 20))
    lengths = np.array([5, 20, 16, 3])

    def run(placement: Placement | None) -> Any:
        own = model if placement is None else distribute(model, placement)
        empty = kvjax.init(kvjax.Full(), model.spec(4, 64), layers=2, placement=placement)
        final = lengths + np.array([11, 3, 0, 20])
        _, cache = reading.prefill(own, empty, prompts, lengths, final=final)
        cache = kvjax.take_rows(cache, [3, 1, 0, 2])
        single = None if placement is None else dataclasses.replace(placement, batch=None)
        one = kvjax.init(kvjax.Full(), model.spec(1, 64), layers=2, placement=single)
        _, prefix = reading.prefill(own, one, prompts[:1], final=30)
        cache = kvjax.truncate(kvjax.insert(cache, prefix, 2), jnp.array([3, 0, 20, 9]))
        return generate(own, cache, [[1], [2], [3], [4]], max_new_tokens=4)

    wanted, found = run(None), run(placement)
    np.testing.assert_array_equal(
        wanted.cache.rotated_for, [2**31 - 1, original, 2**31 - 1, original]
    )
    np.testing.assert_array_equal(found.cache.rotated_for, wanted.cache.rotated_for)
    np.testing.assert_allclose(found.logits, wanted.logits, atol=2e-5)
    assert found.rows == wanted.rows
