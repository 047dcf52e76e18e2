"""Other libraries beside kvjax: what is timed, what is kept of a run, and what a failure says."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a benchmark as a script does, with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: __import__(name)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture
def cases(scripts):
    return scripts("beside.cases").cases


def test_time_in_which_two_kernels_run_counts_once(cases):
    rng = np.random.default_rng(0)
    for _ in range(50):
        ends = np.sort(rng.integers(0, 60, (8, 2)), axis=1)
        busy = np.zeros(60, bool)
        for start, end in ends:
            busy[start:end] = True
        assert cases.covered([(float(a), float(b)) for a, b in ends]) == busy.sum()
    assert cases.covered([]) == 0


def test_the_layers_of_a_call_read_twice_the_cache_of_the_gpu(cases):
    case = cases.Case(131072, 1, 2048)
    assert case.dense_bytes == 131072 * 8 * 128 * 2 * 2
    assert case.layers(case.dense_bytes) == 2
    assert case.layers(60e6) == 2
    assert case.layers(40e6) == 3
    assert case.layers(1e3) == cases.MOST_LAYERS


def test_an_output_that_is_not_the_reference_is_not_timed(cases):
    assert cases.require(1e-3, 1e-2, "one") == 1e-3
    for wrong in (0.1, float("nan")):
        with pytest.raises(SystemExit, match=r"one: the output is .* from the reference"):
            cases.require(wrong, 1e-2, "one")


def made(length=1024, batch=1, us=1.0):
    return {"library": "torch", "name": "one", "length": length, "batch": batch, "us": us}


def test_a_run_replaces_what_it_measured_and_keeps_the_rest(scripts, tmp_path):
    peers, out = scripts("peers"), tmp_path / "peers.json"
    peers.save(out, "torch", [made(us=1.0), made(batch=8)], "")
    peers.save(out, "jax", [], "it is not installed")
    peers.save(out, "torch", [made(us=2.0)], "the second case did not fit")
    found = json.loads(out.read_text())
    assert {(row["batch"], row["us"]) for row in found["rows"]} == {(1, 2.0), (8, 1.0)}
    assert found["not_run"]["jax"]["why"] == "it is not installed"
    assert found["not_run"]["torch"]["why"] == "the second case did not fit"
    peers.save(out, "torch", [], "")
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 2, "nothing new was measured"
    assert set(found["not_run"]) == {"jax"}


def test_rows_are_kept_until_a_call_fails(scripts, tmp_path, monkeypatch):
    """What was measured before a library failed is in the file."""
    peers = scripts("peers")

    def rows(case):
        yield made(case.length)
        raise RuntimeError("a kernel failed")

    module = ModuleType("beside.failing")
    module.rows = rows
    monkeypatch.setitem(sys.modules, "beside.failing", module)
    monkeypatch.setitem(peers.LIBRARIES, "failing", "failing:rows")
    file = tmp_path / "rows"
    with pytest.raises(RuntimeError, match="a kernel failed"):
        peers.measure("failing", SimpleNamespace(rows=file, quick=True))
    assert json.loads(file.read_text())["length"] == peers.QUICK_LENGTH


@pytest.mark.parametrize("name", ["expert", "batch", "ragged_dot"])
def test_products_of_experts_agree(scripts, name):
    moe_steps, products = scripts("moe_steps"), scripts("moe_products")
    config = moe_steps.shrunk(moe_steps.SHAPES["gpt-oss"])
    row = products.measure("gpt-oss", config, name, batch=2, calls=1)
    assert row["error"] < 1e-5
    assert row["us"] > 0
