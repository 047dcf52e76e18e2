"""Where the kernels run: on a Hopper GPU if there is one, else in the simulator."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import jax
import pytest
from kvjax.kernels_pallas import _common

from kvjax import kernels_pallas
from tests.kernels.simulate import simulated

KERNELS = {
    module.name: import_module(f"{kernels_pallas.__name__}.{module.name}")
    for module in iter_modules(kernels_pallas.__path__)
    if not module.name.startswith("_")
}
HAS_KERNELS = jax.__version_info__ >= (0, 11)
ON_GPU = HAS_KERNELS and jax.default_backend() == "gpu" and _common.why_not() is None

on_gpu = pytest.mark.skipif(not ON_GPU, reason="a size for a GPU of compute capability 9.0, with jax >= 0.11")


@pytest.fixture
def kernels() -> Iterator[None]:
    """The test's kernels run, on a GPU or simulated."""
    if ON_GPU:
        yield
    else:
        with simulated(*KERNELS.values()):
            yield


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """For a test that changes what a kernel is made of."""
    with _common.traced_anew():
        yield
