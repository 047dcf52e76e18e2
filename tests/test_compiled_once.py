"""What the suite saves in compiling and lowering changes no result."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array
from jax._src.interpreters import mlir

from tests import compiled_once


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, Any]:
    """The programs that a test adds."""
    programs: OrderedDict[Any, Any] = OrderedDict()
    monkeypatch.setattr(compiled_once, "_kept", programs)
    return programs


X = np.arange(5, dtype=np.float32)


def _times(factor: float) -> Callable[[Array], Array]:
    @jax.jit
    def times(x: Array) -> Array:
        return x * factor

    return times


def test_equal_programs_are_one_and_others_are_not(kept: OrderedDict[Any, Any]) -> None:
    for factor, programs in ((2.0, 1), (2.0, 1), (3.0, 2)):
        np.testing.assert_array_equal(_times(factor)(X), factor * X)
        assert len(kept) == programs


@pytest.mark.parametrize("donate", [(), 0])
def test_a_program_serves_arrays_that_were_put_on_a_device_and_others(
    kept: OrderedDict[Any, Any], donate: Any
) -> None:
    for given in (jax.device_put(X), jax.device_put(X, jax.devices()[0])):
        committed = given.committed
        doubled = jax.jit(lambda x: x * 2, donate_argnums=donate)(given)
        np.testing.assert_array_equal(doubled, 2 * X)
        assert doubled.committed == committed
        assert len(kept) == 1


def test_a_program_that_donates_is_another(kept: OrderedDict[Any, Any]) -> None:
    given = jax.device_put(X)
    for donate in ((), 0):
        doubled = jax.jit(lambda x: x * 2, donate_argnums=donate)(given)
    np.testing.assert_array_equal(doubled, 2 * X)
    assert given.is_deleted()
    assert len(kept) == 2


def _times_outside_of_jax(factor: float) -> Callable[[Array], Array]:
    def times(x: np.ndarray) -> np.ndarray:
        return np.asarray(x) * np.float32(factor)

    return jax.jit(
        lambda x: jax.pure_callback(times, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    )


def test_each_program_calls_its_own_callback() -> None:
    for factor in (2.0, 3.0):
        np.testing.assert_array_equal(_times_outside_of_jax(factor)(X), factor * X)


def test_the_least_used_program_is_dropped(
    kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_once, "MOST", 2)
    for factor in (1.0, 2.0):
        _times(factor)(X)
    first = next(iter(kept))
    for factor in (1.0, 3.0):
        _times(factor)(X)
    assert next(iter(kept)) == first
    assert len(kept) == 2


def test_another_way_to_compile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_otherwise(module: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(compiled_once.compiler, "compile_or_get_cached", compile_otherwise)
    assert not compiled_once.install()
    assert compiled_once.compiler.compile_or_get_cached is compile_otherwise


def test_a_context_serves_some_programs_of_one_thread() -> None:
    numbers = itertools.count()
    make = compiled_once._several_times(lambda: next(numbers))
    taken = [make() for _ in range(2 * compiled_once.LOWERED)]
    assert taken == [0] * compiled_once.LOWERED + [1] * compiled_once.LOWERED
    in_another_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_another_thread.append(make()))
    thread.start()
    thread.join()
    assert in_another_thread == [2]


def test_programs_of_one_context_are_those_of_their_own_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = mlir.make_ir_context

    def lowered() -> list[str]:
        return [_times(factor).lower(X).as_text() for factor in (2.0, 3.0, 2.0)]

    monkeypatch.setattr(mlir, "make_ir_context", getattr(made, "__wrapped__", made))
    alone = lowered()
    monkeypatch.setattr(
        mlir, "make_ir_context", compiled_once._several_times(mlir.make_ir_context)
    )
    assert lowered() == alone
