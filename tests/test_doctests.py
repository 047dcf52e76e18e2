"""Examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest


def modules() -> list[str]:
    path = importlib.import_module("kvjax").__path__
    return sorted(["kvjax", *(module.name for module in pkgutil.walk_packages(path, "kvjax."))])


# Takes half of the time of all examples, to compile for the model that ships; the guides run
# the same on a small one.
LONG = "kvjax.evaluate.comparison"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name == LONG else name
        for name in modules()
    ],
)
def test_examples_of(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if "pip install " not in str(error):  # which a module says whose package is an extra
            raise
        pytest.skip(str(error))
    failed, _ = doctest.testmod(module)
    assert not failed, "the report is in the captured output"
