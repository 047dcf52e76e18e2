"""Examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

# Where the package is not installed, models and kernels lie in folders of their own, which a walk does not find.
APART = ("kvjax.kernels_pallas", "kvjax.models")


def modules() -> list[str]:
    found = {"kvjax", *APART}
    for name in ("kvjax", *APART):
        path = importlib.import_module(name).__path__
        found |= {module.name for module in pkgutil.walk_packages(path, f"{name}.")}
    return sorted(found)


# Takes half of the time of all examples, to compile for the model that ships; the guides run the same on a small one.
LONG = "kvjax.evaluate.comparison"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name == LONG else name for name in modules()]
)
def test_examples_of(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if "pip install 'kvjax[" not in str(error):
            raise
        pytest.skip(str(error))
    failed, _ = doctest.testmod(module)
    assert not failed, "the report is in the captured output"
