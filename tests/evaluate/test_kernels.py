"""`kvjax bench --kernels`: rows of any machine, and what it says where there is no GPU."""

import json
import re

import jax
import pytest
from typer.testing import CliRunner

from kvjax import ops
from kvjax.cli import app
from kvjax.evaluate import kernels
from kvjax.kernels_pallas import simt


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(kernels, "BUDGET", 256)
    monkeypatch.setattr(kernels, "CHUNK", 256)


def test_a_row_has_times_and_what_differs_from_the_reference(small):
    names = ["top_k", "step full", "step fier"]
    rows = list(kernels.measure(512, 1, only=names, calls=1))
    assert [row["what"] for row in rows] == names
    for row in rows:
        assert row["us"] > 0
        assert row["xla_us"] > 0
        assert row["error"] == 0, "without a GPU both are the reference"
        assert len(kernels.columns(row)) == len(kernels.TITLES)
        json.dumps(row, allow_nan=False)


def test_a_row_of_a_tpu_has_scores_and_steps_by_pages(small, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    names = ["score_1bit", "step fier:page=32"]
    rows = list(kernels.measure(512, 1, only=names, calls=1))
    assert {row["what"] for row in rows} == set(names)
    for row in rows:
        assert row["us"] > 0, row
        assert row["error"] == 0, row
        assert "form" not in row, "a TPU has no compute capability"


def test_a_kernel_that_fails_hides_no_other(small, monkeypatch):
    def fails(*args, **options):
        raise NotImplementedError("not here")

    monkeypatch.setattr(ops, "top_k", fails)
    failed, row = kernels.measure(
        512, 1, only=["top_k", "score_pages"], calls=1, reference=False
    )
    assert failed["failed"] == "NotImplementedError: not here"
    assert kernels.columns(failed)[:2] == ["top_k", "failed"]
    assert row["us"] > 0


def kvjax(*args):
    return CliRunner().invoke(app, ["bench", *args])


def test_bench_prints_a_table_and_json_to_send(small, monkeypatch):
    monkeypatch.setattr(simt, "why_not", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    row, asked = (
        {
            "what": "top_k",
            "us": 12.5,
            "xla_us": 200.0,
            "error": 0.0,
            "kernels": {"top_k": 11.5},
        },
        [],
    )

    def measure(length, batch, *, target):
        asked.append((length, batch, target and target.capability))
        return [row]

    monkeypatch.setattr(kernels, "measure", measure)
    size = ["--kernels", "--length", "512", "--batch", "1"]
    assert re.search(r"top_k\W+12.5\W+200\b", kvjax(*size).stdout)
    found = json.loads(kvjax(*size, "--json", "--target", "8.9").stdout)
    assert found["what"] == "top_k"
    assert found["card"]["kind"] == "NVIDIA H200"
    assert {"versions", "device", "us"} <= found.keys()
    assert asked == [(512, 1, None), (512, 1, "8.9")]


def test_bench_on_a_tpu_names_it(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    row = {"what": "step fier", "us": 12.5, "error": 0.0, "kernels": {}}
    monkeypatch.setattr(kernels, "measure", lambda length, batch, *, target: [row])
    found = json.loads(kvjax("--length", "512", "--json").stdout)
    assert found["card"] == {"kind": jax.devices()[0].device_kind}
    assert found["us"] == 12.5
    refused = kvjax("--length", "512", "--target", "8.9")
    assert "--target takes forms of GPUs" in str(refused.exception)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "kernels, which run on an NVIDIA GPU or a TPU, and this process runs on cpu"),
        (["--target", "7.0"], "--target must be one of 8.0"),
    ],
)
def test_bench_says_what_it_needs(monkeypatch, args, words):
    monkeypatch.setattr(simt, "why_not", lambda: None)
    result = kvjax(*args)
    assert result.exit_code
    assert words in str(result.exception)
