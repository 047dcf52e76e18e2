"""All functions that take a cache with a placement: the cache keeps its placement, and mistakes
are explained.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, PartitionSpec

import kvjax
from kvjax import CacheSpec, Evicting, LastQuery, Placement
from kvjax.cli.options import capacity_over, make_placement
from kvjax.evictors import scores as evictors
from kvjax.policies.per_head import PerHead
from kvjax.sharding.placement import mean_over_heads
from tests.devices.programs import COLLECTIVE
from tests.devices.test_rows_and_heads import BOTH, MESH
from tests.laws.cases import CASES

SPEC = CacheSpec(batch=4, q_heads=8, kv_heads=4, head_dim=16, capacity=96, dtype="float32")
FIER = CASES["fier with sink and window"].policy
ONE = dataclasses.replace(SPEC, batch=1)
FOUR = Placement(mesh=jax.make_mesh((4,), ("model",)), heads="model")
TOVA = Evicting(evictor=LastQuery(), budget=24)


def prompt(tokens: int = 40, rows: int = 4) -> tuple[Array, ...]:
    rng = np.random.default_rng(tokens)  # jax.random would compile
    return tuple(
        jnp.asarray(rng.standard_normal((rows, tokens, n, 16), np.float32)) for n in (8, 4, 4)
    )


@jax.jit
def fill(cache: kvjax.LayerCache, q: Array, k: Array, v: Array) -> tuple[Any, kvjax.LayerCache]:
    """A prompt and one step."""
    out, cache = kvjax.attention(cache, q[:, :-1], k[:, :-1], v[:, :-1], first_chunk=True)
    last, cache = kvjax.attention(cache, q[:, -1:], k[:, -1:], v[:, -1:])
    return (out, last), cache


@pytest.fixture(scope="module")
def filled() -> tuple[kvjax.LayerCache, kvjax.LayerCache]:
    return tuple(fill(kvjax.init_layer(FIER, SPEC, at), *prompt())[1] for at in (None, BOTH))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def tova() -> Any:
    """The results of one device."""
    return fill(kvjax.init_layer(TOVA, SPEC), *prompt())


def assert_equal(one: Any, split: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=2e-5)


def assert_in_place(cache: kvjax.LayerCache) -> None:
    for leaf, home in zip(
        jax.tree.leaves(cache), jax.tree.leaves(kvjax.shardings(cache)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)


def test_init_makes_each_part_on_its_device() -> None:
    cache = kvjax.init(FIER, SPEC, layers=2, placement=BOTH)
    assert cache.placement == BOTH
    assert_in_place(cache)
    assert cache.nbytes.device < kvjax.init(FIER, SPEC, layers=2).nbytes.device / 7
    assert "length [0, 0, 0, 0]" in repr(cache)
    gathered = jax.tree.map(
        lambda a: jax.device_put(a, jax.NamedSharding(BOTH.mesh, jax.P())), cache
    )
    with pytest.raises(AssertionError):
        assert_in_place(gathered)


def test_a_step_in_three_calls_is_that_of_one_device(filled: Any) -> None:
    one, split = filled
    q, k, v = prompt(tokens=1)
    want, after = jax.jit(kvjax.attention)(one, q, k, v)

    @jax.jit
    def step(cache: kvjax.LayerCache) -> Any:
        cache = kvjax.update(cache, k, v)
        selection = kvjax.select(cache, q)
        return *kvjax.attend(cache, q, selection), selection

    out, cache, selection = step(split)
    assert_in_place(cache)
    assert_equal((want, after.state), (out, cache.state))
    assert_equal(step(one)[2], selection)


@pytest.mark.parametrize("row", [0, 3])
def test_insert_writes_one_row_where_it_lies(filled: Any, row: int) -> None:
    one, split = filled
    single = dataclasses.replace(SPEC, batch=1)
    alone, prefix = (
        kvjax.init_layer(FIER, single, at)
        for at in (None, dataclasses.replace(BOTH, batch=None))
    )
    alone = dataclasses.replace(
        alone, state=jax.tree.map(lambda a: a[2:3], one.state)
    )  # row 2, as if read alone
    prefix = jax.tree.map(
        jax.device_put, dataclasses.replace(prefix, state=alone.state), kvjax.shardings(prefix)
    )
    inserted = jax.jit(kvjax.insert)(split, prefix, row)
    assert_in_place(inserted)
    assert_equal(kvjax.insert(one, alone, row).state, inserted.state)
    outside = jax.jit(kvjax.insert)(split, prefix, 4)
    assert_equal(one.state, outside.state)


@pytest.mark.parametrize("rows", [[1, 2, 3, 3, 0, 1, 1, 0], [2, 1]])
def test_take_rows_moves_rows_between_devices(filled: Any, rows: list[int]) -> None:
    one, split = filled
    taken = kvjax.take_rows(split, rows)
    assert_in_place(taken)
    assert_equal(kvjax.take_rows(one, rows).state, taken.state)
    with pytest.raises(ValueError, match="cannot split 3 rows evenly"):
        kvjax.take_rows(split, [0, 1, 2])


def test_take_rows_under_heads_alone_and_in_host_memory() -> None:
    policy = kvjax.Retrieval(selector=kvjax.Fier(), store=kvjax.HostOffload(), budget=64)
    rows = jnp.array([3, 1, 1, 9])
    for place in (BOTH, dataclasses.replace(BOTH, batch=None)):
        one, split = (kvjax.init_layer(policy, SPEC, at) for at in (None, place))
        one = dataclasses.replace(one, state=jax.tree.map(_numbered, one.state))
        split = jax.tree.map(
            jax.device_put, dataclasses.replace(split, state=one.state), kvjax.shardings(split)
        )
        taken = jax.jit(kvjax.take_rows, out_shardings=kvjax.shardings(split))(split, rows)
        assert_in_place(taken)
        assert_equal(jax.jit(kvjax.take_rows)(one, rows).state, taken.state)


def _numbered(leaf: Any) -> Any:
    """An array of the same kind with other contents in each row."""
    rows = np.arange(leaf.shape[0]).reshape(-1, *[1] * (leaf.ndim - 1))
    return jax.device_put(
        np.broadcast_to(rows % 2 if leaf.dtype == bool else rows, leaf.shape).astype(
            leaf.dtype
        ),
        leaf.sharding,
    )


def test_grow_save_and_restore_keep_the_parts_in_place(filled: Any, tmp_path: Path) -> None:
    one, split = filled
    grown = kvjax.grow(split, 160)
    assert_in_place(grown)
    assert_equal(kvjax.grow(one, 160).state, grown.state)
    kvjax.save(tmp_path, split)
    other = Placement(
        mesh=jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2),
        batch="a",
        heads="b",
    )
    for at in (other, None):
        found = kvjax.restore(tmp_path, kvjax.init_layer(FIER, SPEC, at))
        assert found.placement == at
        assert_equal(one.state, found.state)
    like = jax.eval_shape(partial(kvjax.init_layer, FIER, SPEC, other))
    assert_in_place(kvjax.restore(tmp_path, like))
    eight = dataclasses.replace(
        like, placement=Placement(mesh=jax.make_mesh((8,), ("x",)), heads="x")
    )
    with pytest.raises(
        ValueError,
        match=r"cannot split 4 KV heads evenly over 8 devices.*use an axis of 4 for heads",
    ):
        kvjax.restore(tmp_path, eight)


def test_all_steps_run_one_program(caplog: pytest.LogCaptureFixture) -> None:
    """Arrays come back where they were given, so a step that gets them compiles nothing."""

    @jax.jit
    def one_step(cache: kvjax.LayerCache, q: Array, k: Array, v: Array) -> kvjax.LayerCache:
        return kvjax.attention(cache, q, k, v)[1]

    def compiled() -> int:
        return sum(
            "Finished XLA compilation of jit(one_step)" in record.getMessage()
            for record in caplog.records
        )

    cache = kvjax.init_layer(TOVA, SPEC, BOTH)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(4):
            cache = one_step(cache, *prompt(1))
        assert compiled() == 1
        whole = jax.NamedSharding(MESH, PartitionSpec())
        one_step(jax.tree.map(lambda leaf: jax.device_put(leaf, whole), cache), *prompt(1))
    assert compiled() == 2, "a cache that lies elsewhere is not noticed"


MESHES = {
    "Auto": MESH,
    "Explicit": jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
}


@pytest.mark.parametrize(
    ("own", "around"),
    [
        ("Explicit", "Explicit"),
        ("Auto", "Explicit"),
        *(
            pytest.param(*kinds, marks=pytest.mark.thorough)
            for kinds in (("Explicit", ""), ("Explicit", "Auto"))
        ),
    ],
)
def test_explicit_axes_do_as_well(tova: Any, own: str, around: str) -> None:
    """In the mesh of a placement, and in the one that `jax.set_mesh` has set around it."""
    at = Placement(mesh=MESHES[own], batch="data", heads="model")
    want, alone = tova
    with jax.set_mesh(MESHES[around]) if around else contextlib.nullcontext():
        given = prompt()
        if around:
            given = jax.device_put(
                given, jax.NamedSharding(MESHES[around], PartitionSpec("data"))
            )
        found, cache = fill(kvjax.init_layer(TOVA, SPEC, at), *given)
        found = jax.tree.map(
            lambda out: out * 1, found
        )  # computed with as with any other array here
    assert_equal(want, found)
    assert_equal(alone.state, cache.state)


@pytest.mark.thorough
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("around", ["Auto", "Explicit"])
@pytest.mark.parametrize("own", ["Auto", "Explicit"])
def test_every_verb_takes_any_mesh_around(
    filled: Any, tmp_path: Path, own: str, around: str, jitted: bool
) -> None:
    at = Placement(mesh=MESHES[own], batch="data", heads="model")
    single, alone = dataclasses.replace(SPEC, batch=1), dataclasses.replace(at, batch=None)

    def talk(cache: kvjax.LayerCache, prefix: kvjax.LayerCache) -> Any:
        """Lengths, room and outputs, used in computations outside of kvjax; and the cache."""
        out, cache, info = kvjax.decode_info(cache, *prompt(3), lengths=np.array([2, 3, 0, 1]))
        free = kvjax.room(cache) + cache.length
        cache = kvjax.rollback(kvjax.flush(cache), cache.length - np.array([1, 0, 0, 1]))
        cache = kvjax.insert(kvjax.truncate(cache, cache.length // 2), prefix, 1)
        return (out[:, 0] * 1, info.attended * 1, free, ~kvjax.any_full(cache)), cache

    found = []
    for cache, placement, one in ((filled[0], None, None), (filled[1], at, alone)):
        with contextlib.nullcontext() if placement is None else jax.set_mesh(MESHES[around]):
            prefix = kvjax.init_layer(FIER, single, one)
            if placement is not None:
                homes = kvjax.shardings(kvjax.init_layer(FIER, SPEC, placement))
                cache = jax.tree.map(
                    jax.device_put, dataclasses.replace(cache, placement=placement), homes
                )
            values, cache = (jax.jit(talk) if jitted else talk)(cache, prefix)
            kvjax.save(tmp_path, kvjax.grow(cache, 160))
            found.append((values, kvjax.restore(tmp_path, kvjax.grow(cache, 160))))
            repr(cache)
    assert_equal(found[0][0], found[1][0])
    assert_equal(found[0][1].state, found[1][1].state)
    assert_in_place(found[1][1])


def test_mean_of_the_heads_at_hand_would_evict_other_tokens(
    tova: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why TOVA takes a mean over devices: without it each device goes by its own heads."""

    def run(capacity: int) -> np.ndarray:  # of another capacity, nothing is traced yet
        cache = kvjax.init_layer(TOVA, dataclasses.replace(SPEC, capacity=capacity), BOTH)
        program = fill.lower(cache, *prompt()).compile()
        _, cache = program(cache, *prompt())
        found.append({kind for _, kind in COLLECTIVE.findall(program.as_text())})
        return np.asarray(cache.state.position)

    found: list[set[str]] = []
    alone = np.asarray(tova[1].state.position)
    np.testing.assert_array_equal(run(SPEC.capacity), alone)
    monkeypatch.setattr(evictors, "mean_over_heads", lambda x: x)
    assert np.any(run(SPEC.capacity + 1) != alone)
    assert found == [{"all-reduce"}, set()]
    assert mean_over_heads(jnp.ones(())) == 1  # outside of a placement


def test_gradients_are_those_of_one_device() -> None:
    def loss(cache: kvjax.LayerCache, q: Array, k: Array, v: Array) -> Array:
        (out, last), _ = fill(cache, q, k, v)
        return jnp.sum(out**2) + jnp.sum(last**2)

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)))
    one, split = (
        gradient(kvjax.init_layer(kvjax.Full(), SPEC, at), *prompt()) for at in (None, BOTH)
    )
    assert_equal(one, split)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: Placement(mesh=MESH, heads="tensor"),
            "no axis of that name; its axes are data=2 x model=4",
        ),
        (lambda: Placement(mesh=MESH, batch="data", heads="data"), "splits batch already"),
        (lambda: Placement(mesh=8, heads="model"), "must be a jax.sharding.Mesh, got 8"),
        (lambda: Placement(mesh=MESH, heads=4), "must be the name of an axis"),
        (
            lambda: kvjax.init(
                FIER, dataclasses.replace(SPEC, kv_heads=2), layers=1, placement=BOTH
            ),
            "cannot split 2 KV heads evenly over 4 devices.*use an axis of 2 for heads",
        ),
        (
            lambda: kvjax.init(
                FIER, dataclasses.replace(SPEC, batch=3), layers=1, placement=BOTH
            ),
            "cannot split 3 rows evenly over 2 devices.*make the batch a multiple of 2",
        ),
        (
            lambda: kvjax.init(
                FIER, dataclasses.replace(SPEC, kv_heads=1), layers=1, placement=BOTH
            ),
            r"cannot split 1 KV heads evenly over 4 devices.*split the batch or the tokens of a row \(context\)",
        ),
        (
            lambda: kvjax.insert(
                kvjax.init_layer(FIER, SPEC, BOTH), kvjax.init_layer(FIER, ONE, FOUR), 0
            ),
            "a prefix of Placement.model=4, .*, over other devices; make the prefix with the placement of the cache",
        ),
        (
            lambda: kvjax.init(
                PerHead(heads=(1,), selected=FIER, others=TOVA), SPEC, layers=1, placement=BOTH
            ),
            "numbers the KV heads of a layer, so they cannot be split over the 4 devices",
        ),
        *(
            (
                lambda make=make: kvjax.init(make().rest, SPEC, layers=1, placement=BOTH),
                "computes with all KV heads of a layer together, so they cannot be split over the 4 devices",
            )
            for make in (kvjax.presets.adakv, kvjax.presets.shadowkv)
        ),
        (
            lambda: kvjax.init(FIER, SPEC, layers=1, placement="model"),
            "must be a kvjax.Placement, got 'model'",
        ),
        (
            lambda: kvjax.shardings(kvjax.init_layer(FIER, SPEC)),
            "takes a cache with a placement",
        ),
    ],
)
def test_mistakes_are_told_in_words(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()


def test_host_store_needs_pinned_memory_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.stores.host.has_host_memory", lambda: False)
    policy = dataclasses.replace(FIER, store=kvjax.HostOffload())
    with pytest.raises(ValueError, match="pinned host memory"):
        kvjax.init(policy, SPEC, layers=1, placement=BOTH)


@pytest.mark.parametrize(
    "mesh", ["model", "model=0", "heads=2", "model=2,model=2", "data=4,model=4"]
)
def test_mesh_of_the_command_is_checked(mesh: str) -> None:
    with pytest.raises(ValueError, match="--mesh"):
        make_placement(mesh)
    assert make_placement("model=4,ctx=2") == Placement(
        mesh=Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("data", "model", "ctx")),
        heads="model",
        context="ctx",
    )
    by_share = make_placement("ctx=2", "share")
    assert by_share is not None
    assert by_share.selection == "share"
    assert [
        capacity_over(128, at)
        for at in (None, make_placement("ctx=3"), make_placement("ctx=4"))
    ] == [
        128,
        129,
        128,
    ]
