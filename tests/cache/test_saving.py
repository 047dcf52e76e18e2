"""Restored caches equal the saved ones bit by bit, continue alike, and are refused where they
do not fit.
"""

import dataclasses
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache import saving
from kvjax.cache.saving import restore, save
from kvjax.testing import _drive as drive
from tests.laws.cases import BASE, SPEC

LENGTHS = np.array([150, 3, 61])


def filled(policy: kvjax.Policy = BASE, seed: int = 0) -> tuple[kvjax.LayerCache, drive.Tokens]:
    tokens = drive.random_tokens(SPEC, seed)
    return drive.fill(kvjax.init_layer(policy, SPEC), tokens, LENGTHS)[0], tokens


def test_conversation_goes_on_after_a_restart_as_if_there_had_been_none(tmp_path: Path) -> None:
    cache, tokens = filled()
    save(tmp_path / "talk", cache)
    back = restore(tmp_path / "talk", kvjax.init_layer(BASE, SPEC))
    jax.tree.map(np.testing.assert_array_equal, back, cache)
    for i in range(40):  # crosses a flush
        out, cache, _ = drive.step(cache, tokens, LENGTHS + i)
        again, back, _ = drive.step(back, tokens, LENGTHS + i)
        np.testing.assert_array_equal(again, out)


def test_whole_cache_and_abstract_like(tmp_path: Path) -> None:
    cache = kvjax.init(kvjax.presets.fier(budget=24, group=8, chunk=32), SPEC, layers=3)
    layers = tuple(
        drive.fill(layer, drive.random_tokens(SPEC), LENGTHS)[0] for layer in cache.layers
    )
    cache = dataclasses.replace(cache, layers=layers)
    save(tmp_path, cache)
    like = jax.eval_shape(
        lambda: kvjax.init(kvjax.presets.fier(budget=24, group=8, chunk=32), SPEC, layers=3)
    )
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, like), cache)


def test_shapes_without_shardings_come_back_into_the_memory_that_they_were_in(
    tmp_path: Path,
) -> None:
    policy = kvjax.Speculative(dataclasses.replace(BASE, store=kvjax.HostOffload()), tau=0.0)
    cache, tokens = filled(policy)
    save(tmp_path, cache)
    back = restore(tmp_path, jax.eval_shape(lambda: kvjax.init_layer(policy, SPEC)))
    assert kvjax.memory.nbytes(back) == kvjax.memory.nbytes(cache)
    assert back.state.zones.store.kv.sharding.memory_kind == "pinned_host"
    for i in range(2):
        out, cache, _ = drive.step(cache, tokens, LENGTHS + i)
        again, back, _ = drive.step(back, tokens, LENGTHS + i)
        np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("larger", [False, True])
def test_arrays_of_host_memory_come_back_with_its_type(tmp_path: Path, larger: bool) -> None:
    """jit sees the type only. In a new process, no program is left that was compiled for the
    cache before its save.
    """
    policy = dataclasses.replace(BASE, store=kvjax.HotSet(tokens=64))
    cache, tokens = filled(policy)
    save(tmp_path / "talk", cache)
    like = kvjax.init_layer(policy, dataclasses.replace(SPEC, capacity=400) if larger else SPEC)
    back = restore(tmp_path / "talk", like)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
        assert jax.typeof(found).memory_space == jax.typeof(wanted).memory_space
        assert found.sharding == wanted.sharding
    step = jax.jit(lambda cache, *new: kvjax.attention(cache, *new))  # compiled here
    _, back = step(back, *tokens.at(LENGTHS[:, None]))
    assert back.nbytes == like.nbytes
    assert kvjax.grow(back, 600).state.store.history.kv.sharding.memory_kind == "pinned_host"


def test_prefix_saved_once_serves_many_continuations(tmp_path: Path) -> None:
    cache, _ = filled()
    save(tmp_path, cache)
    outs = []
    for seed in (1, 2, 1):
        branch = restore(tmp_path, cache)
        out, branch, _ = drive.step(branch, drive.random_tokens(SPEC, seed), LENGTHS)
        outs.append(out)
    np.testing.assert_array_equal(outs[0], outs[2])
    assert not np.allclose(outs[0], outs[1])


@pytest.mark.parametrize(
    ("policy", "spec", "message"),
    [
        (
            dataclasses.replace(BASE, budget=128),
            SPEC,
            r"policy.budget is 64 in the save, 128 wanted",
        ),
        (kvjax.Full(), SPEC, r"policy.kind is Retrieval in the save, Full wanted"),
        (
            dataclasses.replace(BASE, selector=kvjax.Fier(group=32)),
            SPEC,
            r"policy.selector.group is 16 in the save, 32 wanted$",
        ),
        (
            BASE,
            dataclasses.replace(SPEC, capacity=150),
            r"spec.capacity is 200 in the save, 150 wanted",
        ),
        (
            BASE,
            dataclasses.replace(SPEC, dtype="bfloat16"),
            r"spec.dtype is float32 in the save, bfloat16 wanted",
        ),
    ],
)
def test_save_of_another_kind_is_refused_with_the_difference(
    tmp_path: Path, policy: kvjax.Policy, spec: kvjax.CacheSpec, message: str
) -> None:
    save(tmp_path, filled()[0])
    with pytest.raises(ValueError, match=message):
        restore(tmp_path, kvjax.init_layer(policy, spec))


@pytest.mark.parametrize(
    ("ours", "age"), [(saving.FORMAT + 1, "an older"), (saving.FORMAT - 1, "a newer")]
)
def test_save_of_another_format_is_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: int, age: str
) -> None:
    save(tmp_path, filled()[0])
    message = rf"was written by {age} version of kvjax \(its format is {saving.FORMAT}, and this version reads {ours}\)"
    monkeypatch.setattr(saving, "FORMAT", ours)
    with pytest.raises(ValueError, match=message):
        restore(tmp_path, filled()[0])


def test_save_that_was_cut_off_leaves_the_last_good_one(tmp_path: Path) -> None:
    first, _ = filled()
    assert save(tmp_path, first) == 0
    second, _ = filled(seed=5)
    assert save(tmp_path, second, keep=2) == 1
    # What a save leaves that was killed while it wrote: its folder under the temporary name,
    # without the arrays.
    newest = tmp_path / "1"
    unfinished = tmp_path / "1.orbax-checkpoint-tmp-7"
    newest.rename(unfinished)
    for part in ("arrays", "about"):
        shutil.rmtree(unfinished / part, ignore_errors=True)
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, first), first)
    assert save(tmp_path, second, keep=1) == 1
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, first), second)


def test_nothing_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        restore(tmp_path / "none", filled()[0])
    with pytest.raises(FileNotFoundError, match="no complete save"):
        restore(tmp_path, filled()[0])


@pytest.mark.thorough  # three processes, each with its own jax
def test_restores_on_another_number_of_devices(tmp_path: Path) -> None:
    """Saved with rows over 4 devices, restored over 2 and on 1; each process has its own number
    of them.
    """
    program = """
        import sys, jax, numpy as np, kvjax
        from kvjax.testing import _drive as drive
        from kvjax.cache.saving import restore, save
        count, path, saving = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "save"
        assert len(jax.devices()) == count
        spec = kvjax.CacheSpec(batch=4, q_heads=4, kv_heads=2, head_dim=16, capacity=120, dtype="float32")
        policy = kvjax.Retrieval(
            selector=kvjax.Fier(group=16), budget=40, sink=4, local=8, demote=kvjax.Fifo(leave=16), dense_below=0
        )
        mesh = jax.make_mesh((count,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        tokens = drive.random_tokens(spec)
        wanted, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, [100, 20, 3, 60])
        if saving:
            save(path, jax.device_put(wanted, rows))
        else:
            like = jax.device_put(kvjax.init_layer(policy, spec), rows)
            found = restore(path, like)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            assert all(a.sharding == rows for a in jax.tree.leaves(found))
            print("restored")
    """
    for count, verb in ((4, "save"), (2, "restore"), (1, "restore")):
        env = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "JAX_PLATFORMS": "cpu",
        }
        args = [sys.executable, "-c", textwrap.dedent(program), str(count), str(tmp_path), verb]
        result = subprocess.run(
            args,
            env={"PATH": "", **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-2000:]
    assert "restored" in result.stdout


def test_the_lengths_of_rotations_come_back_to_the_device_beside_a_history_on_the_host(
    tmp_path: Path,
) -> None:
    policy = dataclasses.replace(
        BASE, sink=0, store=kvjax.HostOffload()
    )  # its first array is in host memory

    def cache() -> kvjax.Cache:
        return kvjax.Cache(
            (kvjax.init_layer(policy, SPEC),), rotated_for=jax.numpy.zeros(SPEC.batch, "int32")
        )

    save(tmp_path, cache())
    back = restore(tmp_path, jax.eval_shape(cache))
    kinds = [
        [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]
        for tree in (back, cache())
    ]
    assert kinds[0] == kinds[1]
    assert kinds[0][0] == "pinned_host" != back.rotated_for.sharding.memory_kind
