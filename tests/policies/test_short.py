"""Caches too short for a selection to pay: `Full` in place of a `Retrieval`, and back when they
grow.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Fier, Fifo, Full, Retrieval, presets
from kvjax.policies import Short, short
from kvjax.testing import _drive as drive

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=128, dtype=jnp.float32)
POLICY = Retrieval(
    selector=Fier(group=16),
    budget=32,
    sink=4,
    local=8,
    demote=Fifo(leave=16),
    dense_capacity=128,
)
ALONE = dataclasses.replace(POLICY, dense_capacity=0)


def prompted(policy: Any, spec: CacheSpec, lengths: Any) -> tuple[kvjax.Cache, Any]:
    tokens = drive.random_tokens(spec, 1)
    cache = kvjax.init(policy, spec, layers=1)
    layer = drive.fill(cache.layers[0], tokens, lengths)[0]
    return kvjax.Cache((layer,)), tokens


def test_a_short_cache_attends_to_everything_and_a_longer_one_selects() -> None:
    assert kvjax.init(POLICY, SPEC, layers=1).layers[0].policy == Short(POLICY)
    assert (
        kvjax.init(POLICY, dataclasses.replace(SPEC, capacity=129), layers=1).layers[0].policy
        == POLICY
    )
    assert kvjax.init(ALONE, SPEC, layers=1).layers[0].policy == ALONE
    assert kvjax.init_layer(POLICY, SPEC).policy == POLICY
    lengths = np.array([100, 60])
    (layer,), tokens = prompted(POLICY, SPEC, lengths)[0].layers, drive.random_tokens(SPEC, 1)
    out, layer, info = drive.step(layer, tokens, lengths)
    wanted, *_ = drive.step(
        drive.fill(drive.new_cache(Full(), SPEC), tokens, lengths)[0], tokens, lengths
    )
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(info.attended, (lengths + 1)[:, None] * np.ones((2, 2)))


def test_a_short_cache_that_grows_is_the_one_that_got_all_tokens_as_a_prompt() -> None:
    lengths = np.array([100, 60])
    cache, _ = prompted(POLICY, SPEC, lengths)
    larger = dataclasses.replace(SPEC, capacity=256)
    grown = kvjax.grow(cache, 256)
    wanted, _ = prompted(POLICY, larger, lengths)
    assert grown.layers[0].policy == POLICY
    assert grown.layers[0].spec == larger
    got, want = (x.layers[0].state for x in (grown, wanted))
    np.testing.assert_array_equal(got.length, lengths)
    count = int(want.store.count[0])
    np.testing.assert_array_equal(got.store.count, want.store.count)
    np.testing.assert_array_equal(got.store.k[0, :, :count], want.store.k[0, :, :count])
    np.testing.assert_array_equal(got.index.bits[0, :, :count], want.index.bits[0, :, :count])
    np.testing.assert_array_equal(got.recent.k[0, :, :8], want.recent.k[0, :, :8])


def test_a_short_prefix_is_inserted_where_a_batch_selects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By bytes a row alone is short and a batch is not."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("kvjax.kernels_pallas.tuned.device_kind", lambda: "here")
    monkeypatch.setattr("kvjax.kernels_pallas.simt.why_not", lambda: None)
    one_row = 2 * 128 * 2 * 16 * 4
    monkeypatch.setattr(short, "measured", lambda: {"here": {"Fier": {"bytes": one_row}}})
    policy = dataclasses.replace(POLICY, dense_capacity="auto")
    batch = kvjax.init(policy, SPEC, layers=1)
    prefix, _ = prompted(policy, dataclasses.replace(SPEC, batch=1), np.array([50]))
    assert [c.layers[0].policy for c in (batch, prefix)] == [policy, Short(policy)]
    np.testing.assert_array_equal(kvjax.insert(batch, prefix, 1).length, [0, 50])


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 80GB HBM3", "Tesla T4", "AMD Instinct MI300X", None]
)
def test_a_gpu_without_kernels_attends_to_longer_caches(
    monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    """An H100 reads 131072 tokens in 218 us, and in plain JAX FIER takes more than 400 to
    select, MagicPIG 550. Other kinds, which nobody measured, take its measurement; None stands
    for GPUs of several kinds."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("kvjax.kernels_pallas.tuned.device_kind", lambda: kind)
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072, dtype="bfloat16"
    )
    for kernels, slow in ((None, False), ("turned off", True)):
        monkeypatch.setattr(
            "kvjax.kernels_pallas.simt.why_not", lambda kernels=kernels: kernels
        )
        for name, full in (
            ("fier", slow),
            ("pariskv", slow),
            ("magicpig", slow),
            ("quest", False),
        ):
            made = presets.parse(name).rest
            (layer,) = jax.eval_shape(partial(kvjax.init, made, spec, layers=1)).layers
            assert layer.policy == (Short(made) if full else made), name
            assert made.of_size(dataclasses.replace(spec, capacity=262144)) == made
            for setting in ("store=host", "dense_capacity=0"):
                selects = presets.parse(f"{name}:{setting}").rest
                assert selects.of_size(spec) == selects


def test_a_short_save_is_restored_into_a_longer_cache(tmp_path: Path) -> None:
    cache, _ = prompted(POLICY, SPEC, np.array([100, 60]))
    kvjax.save(tmp_path / "a", cache)
    like = kvjax.init(POLICY, dataclasses.replace(SPEC, capacity=256), layers=1)
    np.testing.assert_array_equal(kvjax.restore(tmp_path / "a", like).length, [100, 60])


def test_the_measured_bound_is_of_gpus_alone() -> None:
    auto = presets.fier(256, dense_capacity="auto").rest
    assert presets.fier(256).rest == auto
    assert short.measured_capacity("Fier", SPEC) == 0
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert {"Fier", "MinMaxPages", "Paris"} <= short.measured()[device].keys()
    shared = presets.fier(256, layers=presets.Layers(dense=2, share=2)).rest
    assert isinstance(shared, Retrieval)
    assert shared.dense_capacity == 0
    assert presets.quest(256, store="host").rest.dense_capacity == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: presets.fier(
                64, dense_capacity=100, layers=presets.Layers(dense=2, share=2)
            ),
            r"layers that share a selection.*dense_capacity=0",
        ),
        (lambda: presets.fier(64, dense_capacity=-1), r"dense_capacity=.*at least 0, got -1"),
        (lambda: presets.magicpig(dense_capacity=-1), r"dense_capacity=.*at least 0, got -1"),
        (
            lambda: presets.parse("quest:budget=64,dense_capacity=many"),
            r"must be an integer, got 'many'",
        ),
        (
            lambda: kvjax.share_selections(kvjax.PerLayer((), POLICY), share=2),
            r"dense_capacity=128.*dense_capacity=0",
        ),
    ],
)
def test_a_bound_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_benchmark_writes_the_most_bytes_that_are_read_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    script: Any = __import__("short")
    made = {
        "implementation": "default",
        "backend": "gpu",
        "device": "G",
        "date": "2026-01-02T03",
        "policy": None,
    }
    made["versions"] = {"jax": "1", "jaxlib": "2", "numpy": "3"}
    times = {
        "full": (5, 9, 20, 8),
        "fier": (6, 9, 12, 30),
    }  # at 4096 the selection is faster, and what follows is noise
    rows = [
        {
            **made,
            "method": method,
            "length": n,
            "batch": 1,
            "us": us,
            "policy": {"fier": "Retrieval"}.get(method),
        }
        for method, each in times.items()
        for n, us in zip((1024, 2048, 4096, 8192), each, strict=True)
    ]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    script.main([str(tmp_path / "rows.json"), "--out", str(tmp_path / "out.json")])
    entry = json.loads((tmp_path / "out.json").read_text())["G"]
    assert entry == {
        "Fier": {
            "bytes": 2048 * 4096,
            "date": "2026-01-02",
            "versions": {"jax": "1", "jaxlib": "2"},
        }
    }
    for name in ("short", "decode_step", "layers", "device_time"):
        sys.modules.pop(name, None)
