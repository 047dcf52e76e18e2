"""Examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import kvjax

MODULES = ["kvjax", *sorted(m.name for m in pkgutil.walk_packages(kvjax.__path__, "kvjax."))]


@pytest.mark.parametrize("name", [*MODULES, "kvjax.kernels_pallas", "kvjax.models"])
def test_examples_of(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed, "the report is in the captured output"
