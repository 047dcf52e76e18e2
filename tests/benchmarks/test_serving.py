"""The rates of benchmarks/serving.py count the tokens of the blocks whose time they count."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax.serve import reading, slots


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("serving")


@pytest.mark.parametrize("waits", [True, False])
def test_busy_rate_is_that_of_the_steps(monkeypatch, serving, waits):
    """A step takes a second, whether the host waits for it when it asks for it or when it takes
    its tokens.
    """
    model = serving.random_model(serving.TINY, "float32")
    engine = kvjax.Engine(
        model, serving.cache_of(model, "full", 3, 64), block=4, chunk=8, max_waiting=64
    )
    clock, due = [0.0], []
    loop = slots._run_loop
    read = reading.read_chunk
    ready = serving.jax.block_until_ready

    def run(*args, **settings):
        done, bad = loop(*args, **settings)
        due.append(int(done.step))
        if waits:
            clock[0] += due.pop()
        return done, bad

    def read_chunk(*args, **settings):
        clock[0] += 100.0
        return read(*args, **settings)

    def wait(arrays):
        clock[0] += due.pop(0) if due and serving.jax.tree.leaves(arrays) else 0
        return ready(arrays)

    monkeypatch.setattr(slots, "_run_loop", run)
    monkeypatch.setattr(reading, "read_chunk", read_chunk)
    monkeypatch.setattr(serving.jax, "block_until_ready", wait)
    monkeypatch.setattr(serving, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    rng = np.random.default_rng(0)
    work = [(rng.integers(1, 60, 8), int(new)) for new in rng.integers(5, 40, 30)]
    found = serving.run_engine(engine, work, 1, 1e9)
    assert found["answered"] == 30
    assert found["busy_seconds"] > 50
    # Every row takes each step, except in the blocks in which one reaches its limit.
    assert 2.4 <= found["busy_tokens_per_second"] <= 3
    assert len(found["busy_lengths"]) == 3
    assert 8 < np.mean(found["busy_lengths"]) < 48
