"""Where the kernels run: on a GPU if there is one, else in the simulator.

With the environment variable KVJAX_TEST_TARGET=8.9, they take the forms and block sizes of that
compute capability.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import jax
import pytest

from kvjax import kernels_pallas
from kvjax.kernels_pallas import simt
from tests.kernels.simulate import Simulator

MODULES = (
    import_module(m.name)
    for m in walk_packages(kernels_pallas.__path__, f"{kernels_pallas.__name__}.")
)
KERNELS = {m.__name__.rpartition(".")[2]: m for m in MODULES if hasattr(m, "MEASURED")}
HAS_KERNELS = jax.__version_info__ >= (0, 11)
ON_GPU = HAS_KERNELS and jax.default_backend() == "gpu" and simt.why_not() is None

on_gpu = pytest.mark.skipif(
    not ON_GPU, reason="a size for a GPU: set JAX_PLATFORMS=cuda, with jax >= 0.11"
)


@pytest.fixture(autouse=True)
def target() -> Iterator[None]:
    """The test's kernels are those of KVJAX_TEST_TARGET, if it is set."""
    if not (capability := os.environ.get("KVJAX_TEST_TARGET")):
        yield
    else:
        with simt.build_for(simt.stands_for(capability)):
            yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that asks for clusters by name has none to run on KVJAX_TEST_TARGET."""
    try:
        return (yield)
    except NotImplementedError as error:
        if "KVJAX_TEST_TARGET" in os.environ and "has no clusters of blocks" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def kernels() -> Iterator[None]:
    """The test's kernels run, on a GPU or simulated."""
    if ON_GPU:
        yield
    else:
        with simt.use(Simulator()):
            yield


@pytest.fixture
def bypass_cache() -> Iterator[None]:
    """For a test that changes the parts of a kernel."""
    with simt.bypass_cache():
        yield
