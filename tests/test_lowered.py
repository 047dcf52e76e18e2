"""The comparison of lowered programs: it sees what changes a program, and nothing else."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kvjax
from benchmarks import lowered
from tests.kernels.conftest import HAS_KERNELS

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def digests(f: Any) -> tuple[str, str]:
    module = jax.jit(f).trace(X, X).lower().compiler_ir("stablehlo")
    with module.context:
        return lowered.text_of(module), lowered.Graph(module).main()


def base(x: Any, y: Any) -> Any:
    a = jnp.sin(x)
    b = jnp.cos(y)
    return jax.lax.fori_loop(0, 3, lambda i, c: c * jnp.where(c > 0, a, b), x)


def renamed(first: Any, second: Any) -> Any:
    one = jnp.sin(first)
    two = jnp.cos(second)
    return jax.lax.fori_loop(
        0, 3, lambda step, carry: carry * jnp.where(carry > 0, one, two), first
    )


def reordered(x: Any, y: Any) -> Any:
    b, _, a = jnp.cos(y), jnp.tan(y), jnp.sin(x)
    return jax.jit(
        lambda: jax.lax.fori_loop(0, 3, lambda i, c: c * jax.jit(jnp.where)(c > 0, a, b), x)
    )()


def another_constant(x: Any, y: Any) -> Any:
    return jax.lax.fori_loop(0, 4, lambda i, c: c * jnp.where(c > 0, jnp.sin(x), jnp.cos(y)), x)


def another_branch(x: Any, y: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, c: c * jnp.where(c > 0, jnp.cos(y), jnp.sin(x)), x)


def another_argument(x: Any, y: Any) -> Any:
    return base(y, x)


def with_effect(x: Any, y: Any) -> Any:
    jax.debug.callback(lambda x: None, x)
    return base(x, y)


def test_names_and_places_in_the_source_do_not_matter() -> None:
    assert digests(renamed) == digests(base)


def test_order_dead_code_and_calls_change_only_the_text() -> None:
    assert digests(reordered)[0] != digests(base)[0]
    assert digests(reordered)[1] == digests(base)[1]


@pytest.mark.parametrize(
    "other", [another_constant, another_branch, another_argument, with_effect]
)
def test_another_program_has_another_graph(other: Any) -> None:
    assert digests(other)[1] != digests(base)[1]


def test_the_order_in_which_kernels_are_lowered_does_not_matter() -> None:
    if not HAS_KERNELS:
        pytest.skip("there are kernels from jax 0.11 on")
    scores = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    valid = jax.ShapeDtypeStruct((8, 4096), bool)

    def digests_of(k: int) -> tuple[str, str]:
        jax.clear_caches()  # so that it is lowered again
        traced = jax.jit(partial(kvjax.ops.top_k, k=k, implementation="mosaic")).trace(
            scores, valid
        )
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        with module.context:
            lowered.shorten_kernels(module)
            return lowered.text_of(module), lowered.Graph(module).main()

    first = digests_of(16)
    assert digests_of(32)[1] != first[1]
    assert digests_of(16) == first


def test_every_preset_has_programs() -> None:
    made = {text.partition(":")[0] for text in lowered.CACHES.values() if isinstance(text, str)}
    assert made | {name for name in lowered.CACHES if name in kvjax.presets.REGISTRY} == set(
        kvjax.presets.REGISTRY
    )


def test_compare_names_the_programs_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lowered, "programs", lambda kv, policies: [("step", base, (X, X))])
    monkeypatch.setattr(lowered, "use_tree", lambda tree: kvjax)
    for folder, f in (("a", base), ("b", renamed), ("c", reordered), ("d", another_constant)):
        monkeypatch.setattr(
            lowered, "programs", lambda kv, policies, f=f: [("step", f, (X, X))]
        )
        lowered.write(tmp_path / folder, lowered.ROOT, "cpu", "^full$")
    assert lowered.compare(tmp_path / "a", tmp_path / "b")
    assert lowered.compare(tmp_path / "a", tmp_path / "c")
    assert "full.step: another text of an equal graph" in capsys.readouterr().out
    assert not lowered.compare(tmp_path / "a", tmp_path / "d")
    assert "full.step: differs" in capsys.readouterr().out


def test_compare_refuses_a_folder_that_has_no_programs(tmp_path: Path) -> None:
    (tmp_path / "a" / "cpu").mkdir(parents=True)
    (tmp_path / "a" / "cpu" / "digests.json").write_text("{}")
    for folder, cure in (
        ("a/cpu", f"give {tmp_path / 'a'} that"),
        (".", "give the folder that"),
    ):
        with pytest.raises(SystemExit, match=r"no folder in it has a digests\.json") as error:
            lowered.compare(tmp_path / folder, tmp_path / folder)
        assert cure in str(error.value)
