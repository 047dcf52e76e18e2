"""The benchmarks of published weights: what they prepare and how they sum up, without a run of
a model.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measured import write_rows
from kvjax import Full
from kvjax.cache.cache import Cache, init
from kvjax.cli.options import without_weights
from kvjax.evaluate.prompt import Prompt
from kvjax.evaluate.store import Cell
from kvjax.spec import CacheSpec
from tests.checkpoint import write_checkpoint

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    programs = jax.config.jax_compilation_cache_dir
    yield lambda name: __import__(name)
    jax.config.update("jax_compilation_cache_dir", programs)
    for name in [
        n
        for n, m in sys.modules.items()
        if str(getattr(m, "__file__", "")).startswith(str(FOLDER))
    ]:
        del sys.modules[name]


def test_a_larger_batch_repeats_the_prompts_that_were_read(scripts):
    spec = CacheSpec(
        batch=2, q_heads=2, kv_heads=1, head_dim=4, capacity=8, dtype=jnp.dtype(jnp.float32)
    )
    read = init(Prompt(), spec, layers=1)
    state = replace(read.layers[0].state, length=jnp.array([3, 5], jnp.int32))
    (layer,) = scripts("real_speed").repeated(Cache((replace(read.layers[0], state=state),)), 3)
    assert layer.spec.batch == layer.state.q.shape[0] == 6
    assert layer.state.length.tolist() == [3, 5, 3, 5, 3, 5]


def test_methods_are_timed_with_their_own_selection_however_short_the_cache(scripts):
    made = scripts("real_speed").caches(["cudnn", "full", "fier"], 64, 1, "xla")
    assert list(made) == ["cudnn", "full", "fier"]
    assert made["fier"].rest.dense_capacity == 0
    assert made["fier"].first == (Full(),)


def test_methods_without_a_budget_are_timed_alone(scripts):
    for names in (["cudnn"], ["full"], ["cudnn", "kivi"]):
        assert list(scripts("real_speed").caches(names, 64, 2, "xla")) == names


@pytest.mark.thorough  # a benchmark's own bookkeeping, and it compiles a model three times
def test_a_resumed_file_of_speeds_keeps_one_setting(scripts, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "speed.json"
    text.write_text("The year had grown old, and nobody came. " * 200)
    model = write_checkpoint(tmp_path / "model")

    def run(size, block):
        options = f"{model} --text {text} --out {out} --sizes {size} --steps 4 --block {block} --methods full"
        scripts("real_speed").main([*options.split(), "--no-first-token", "--dtype", "float32"])

    run("64x1", 2)
    run("96x1", 2)
    assert json.loads(out.read_text())["lengths"] == [64, 96]
    with pytest.raises(SystemExit):
        run("64x1", 4)
    assert "has rows of another block; name another file" in capsys.readouterr().err


@pytest.mark.parametrize("head", [{}, {"what": "x"}, {"model": {"name": "y", "sizes": [1]}}])
def test_rows_are_json_with_one_row_a_line(head, tmp_path):
    rows = [{"us": 1.5}, {"us": float("nan"), "parts": {"a": 2}}]
    write_rows(tmp_path / "new" / "file.json", head, rows, "results")
    text = (tmp_path / "new" / "file.json").read_text()

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    expected = {**head, "results": [rows[0], {"us": None, "parts": {"a": 2}}]}
    assert json.loads(text, parse_constant=refuse) == expected
    assert [line.strip(" ,") for line in text.splitlines()][-4:-2] == [
        '{"us": 1.5}',
        '{"us": null, "parts": {"a": 2}}',
    ]


def test_an_answer_that_drifts_shows_by_quarters(scripts):
    def cell(nll):
        batches = [
            {
                "examples": [{"id": "0", "nll": nll}],
                "attended_by_layer": [1.0],
                "steps": 8,
                "seconds": 0.0,
            }
        ]
        return Cell("t", "perplexity", "x", {}, {}, 1, batches=batches)

    drifting = [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.5, 1.5]
    found = scripts("long_generation").summary(cell(drifting), cell([1.0] * 8))
    assert found["ratio_by_quarter"] == pytest.approx(np.exp([0, 0.1, 0.2, 0.5]), abs=1e-4)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(drifting)), abs=1e-4)


def test_a_text_of_the_models_own_is_made_once_for_a_model_and_settings(scripts, tmp_path):
    keep, made = scripts("long_generation").kept_text, []

    def make():
        made.append(np.full((2, 3), len(made)))
        return made[-1]

    for seed, expected in ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)):
        assert (
            keep(tmp_path / "kept", {"model": "x", "seed": seed}, make) == [[expected] * 3] * 2
        )
    assert len(made) == 2


def test_prompts_of_drafts_hold_what_was_asked_for(scripts, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("Call me Ishmael. " * 200)
    checkpoint = without_weights(write_checkpoint(tmp_path))
    made = scripts("speculation").prompts(checkpoint, text, 100, 2)
    assert {kind: len(ids) for kind, ids in made.items()} == {"code": 2, "summary": 2}
    assert all(100 < len(ids) < 250 for kind in made.values() for ids in kind)
    assert made["code"][0] != made["code"][1]
