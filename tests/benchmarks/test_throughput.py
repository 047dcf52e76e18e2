"""Throughput and memory: the fields of a cell; a cell that does not fit is a result; none is
measured twice.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from benchmarks import throughput
from benchmarks.throughput import Workload
from kvjax import presets
from kvjax.models import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    qk_norm=True,
)
WORKLOAD = Workload(steps=5, block=2, chunk=32)
LENGTH, BATCH = 40, 2
CAPACITY = 128  # of 40 + 2 + 5 tokens
ABOUT = {"model": "tiny", "dtype": "float32"}
FIER = presets.fier(budget=16, chunk=16, group=8, layers=presets.Layers(dense=1))


@pytest.fixture(scope="module")
def model():
    return throughput.random_model(CONFIG, jnp.float32)


@pytest.fixture(scope="module")
def full(model):
    return throughput.time_cell(
        model, presets.full(), length=LENGTH, batch=BATCH, workload=WORKLOAD
    )


def sweep(model, caches, out=None, **changes):
    settings = {
        "lengths": [LENGTH],
        "batches": [BATCH],
        "about": ABOUT,
        "workload": WORKLOAD,
        "out": out,
    } | changes
    return throughput.sweep(model, caches, **settings)


def test_numbers_of_a_cell_agree(model, full):
    assert full["blocks"] == 3  # of 2, 2 and 1 steps
    assert 0 < full["tpot_ms_min"] <= full["tpot_ms"] <= full["tpot_ms_max"] < np.inf
    assert full["tpot_ms_min"] <= full["tpot_ms_mean"] <= full["tpot_ms_max"]
    assert full["tokens_per_second"] == pytest.approx(BATCH * 1000 / full["tpot_ms"])
    assert full["prefill_tokens_per_second"] == pytest.approx(
        BATCH * LENGTH / full["ttft_seconds"]
    )


def test_bytes_are_those_of_the_cache_and_the_model(model, full):
    cache = kvjax.init(
        presets.full(), model.spec(batch=BATCH, capacity=CAPACITY), layers=CONFIG.layers
    )
    assert (full["cache_bytes_device"], full["cache_bytes_host"]) == kvjax.memory.nbytes(cache)
    assert full["weight_bytes"] == 4 * sum(
        x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))
    )
    # CPUs do not report a peak; the programs hold weights, cache and more, but no second cache
    # beside these.
    assert full["peak_of"] == "programs"
    held = full["weight_bytes"] + full["cache_bytes_device"]
    assert held < full["peak_bytes"] < held + 20 * 2**20


def test_the_peak_is_the_devices_own_where_the_cell_raised_it(model, monkeypatch):
    peaks = iter([1000, 5000])
    monkeypatch.setattr(throughput, "_device_peak", lambda: next(peaks))
    synthetic = Workload(steps=1, block=2, synthetic=True)
    row = throughput.time_cell(
        model, presets.full(), length=LENGTH, batch=BATCH, workload=synthetic
    )
    assert (row["peak_bytes"], row["peak_of"]) == (5000, "device")


def test_asking_for_the_programs_memory_compiles_nothing(model, monkeypatch):
    cell = {"length": LENGTH, "batch": BATCH, "workload": WORKLOAD}
    before = throughput.time_cell(
        model, presets.full(), **cell
    )  # a fixture's programs may be forgotten by now
    compiled = []
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, *a, real=jax.stages.Lowered.compile: compiled.append(self) or real(self),
    )
    seen = []

    def listen(event, seconds, **_):
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        row = throughput.time_cell(model, presets.full(), **cell)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 3  # the loop, the first and the further chunks of a prompt
    assert not [event for event in seen if "backend_compile" in event]
    assert row["peak_bytes"] == before["peak_bytes"]


def test_a_filled_cache_is_that_of_a_prompt_of_random_keys(model):
    spec = model.spec(batch=BATCH, capacity=64)
    filled = throughput.fill(kvjax.init(FIER, spec, layers=2), 45, seed=3, chunk=16)
    assert filled.length.tolist() == [45, 45]
    kvjax.raise_on_overflow(filled)
    dense, retrieval = filled.layers
    keys = dense.state.tokens.k[:, :, :45]
    assert abs(float(keys.mean())) < 0.1
    assert abs(float(keys.std()) - 1) < 0.1
    assert not jnp.any(keys[:, :, :16] == keys[:, :, 16:32])  # chunks differ
    assert int(retrieval.state.store.count[0]) == 32
    assert jnp.all(jnp.any(retrieval.state.index.scale[:, :, : 32 // 8] != 0, axis=-1))


def test_one_that_does_not_fit_is_reported_and_the_rest_goes_on(model, monkeypatch, tmp_path):
    tried = []

    def time_cell(model, policies, *, length, batch, workload):
        tried.append((policies, length, batch))
        if policies == FIER and batch >= 4:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
            )
        return {"tpot_ms": 1.0}

    monkeypatch.setattr(throughput, "time_cell", time_cell)
    caches = {"fier": FIER, "full": presets.full()}
    rows = sweep(model, caches, lengths=[64, 32], batches=[8, 2, 4], out=tmp_path)
    said = {(row["cache"], row["length"], row["batch"]): row["status"] for row in rows}
    assert [key for key, status in said.items() if status != "ok"] == [
        ("fier", length, batch) for length in (32, 64) for batch in (4, 8)
    ]
    assert len(said) == 12
    assert len(tried) == 12 - 3  # what is larger than a cell that did not fit is not tried
    assert "9 bytes" in rows[1]["error"]
    assert "batch of 4 did not fit" in rows[2]["error"]
    assert sweep(model, caches, lengths=[64, 32], batches=[8, 2, 4], out=tmp_path) == rows
    assert len(list(tmp_path.iterdir())) == 12


def test_other_errors_are_raised(model, monkeypatch):
    def time_cell(*args, **settings):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(throughput, "time_cell", time_cell)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        sweep(model, {"full": presets.full()})


def test_what_is_in_the_file_is_not_measured_again(model, monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(
        throughput,
        "time_cell",
        lambda *a, batch, **s: measured.append(batch) or {"tpot_ms": float(len(measured))},
    )
    out, full = tmp_path / "deep", {"full": presets.full()}
    first = sweep(model, full, out)
    assert sweep(model, full, out) == first
    both = sweep(model, full, out, batches=[BATCH, 7])
    assert both[0] == first[0]
    assert measured == [BATCH, 7]
    # Another cache of the same name, other steps, other weights, other code are other cells.
    sweep(model, {"full": FIER}, out)
    sweep(model, full, out, workload=Workload(steps=6, block=2, chunk=32))
    sweep(model, full, out, about={**ABOUT, "digest": "other"})
    real = throughput.provenance()
    monkeypatch.setattr(throughput, "provenance", lambda: {**real, "source": "other"})
    sweep(model, full, out)
    assert measured == [BATCH, 7, BATCH, BATCH, BATCH, BATCH]
    assert len(list(out.iterdir())) == 6
    for text in ("[]", "{}", "{"):
        for path in out.iterdir():
            path.write_text(text)
        with pytest.raises(
            ValueError, match=r"is no result of kvjax .*move it away or delete it"
        ):
            sweep(model, full, out)


@pytest.mark.parametrize("most", [0, 1, 5, 29, 64])
@pytest.mark.parametrize("guess", [0, 1, 6, 31, 500])
def test_the_largest_that_fits_is_found(most, guess):
    tried = []
    assert throughput.largest(lambda n: tried.append(n) or n <= most, guess=guess) == most
    assert len(tried) == len(set(tried))
    assert all(n > 0 for n in tried)
    assert len(tried) <= 2 * np.log2(abs(most - guess) + 2) + 2


def test_the_largest_batch_of_a_sweep(model, monkeypatch):
    limit = 5 * 2**20

    def time_cell(model, policies, *, length, batch, workload):
        used = batch * length * 2 * CONFIG.layers * 2 * 2 * CONFIG.head_dim * 4
        if used > limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return {"steps": workload.steps, "batch": batch}

    monkeypatch.setattr(throughput, "time_cell", time_cell)
    with pytest.raises(NotImplementedError, match="'cpu' does not report"):
        sweep(model, {"full": presets.full()}, batches=None)

    monkeypatch.setattr(
        throughput, "_memory_stats", lambda: {"bytes_limit": 6 * 2**20, "bytes_in_use": 2**20}
    )
    monkeypatch.setattr(throughput, "provenance", lambda: {"date": "today"})
    (row,) = sweep(model, {"full": presets.full()}, batches=None, lengths=[512])
    assert row["batch"] == limit // (512 * 2 * CONFIG.layers * 2 * 2 * CONFIG.head_dim * 4)
    assert (row["steps"], row["bytes_limit"], row["status"]) == (
        WORKLOAD.steps,
        6 * 2**20,
        "ok",
    )
    monkeypatch.setattr(throughput, "_free_host_bytes", lambda: 2 * 2**20)
    in_host = presets.freekv(256, sink=32, local=32, layers=presets.Layers(dense=0))
    (row,) = sweep(model, {"freekv": in_host}, batches=None, lengths=[1024])
    assert row["batch"] == row["host_limit"] == 3
    (none,) = sweep(model, {"full": presets.full()}, batches=None, lengths=[2**15])
    assert (none["batch"], none["status"]) == (0, "out of memory")


def test_a_preallocated_pool_of_host_memory_can_be_filled(monkeypatch):
    monkeypatch.setattr(throughput, "_free_host_bytes", lambda: 100 << 30)
    assert throughput._host_room() == int(0.45 * (100 << 30))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "true")
    assert throughput._host_room() == int(0.97 * (64 << 30))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "85")
    assert throughput._host_room() == int(0.97 * (85 << 30))


def test_no_batch_is_tried_whose_caches_alone_have_no_room(model, monkeypatch):
    tried = []
    monkeypatch.setattr(
        throughput, "time_cell", lambda *args, batch, **how: tried.append(batch) or {}
    )
    monkeypatch.setattr(
        throughput, "_memory_stats", lambda: {"bytes_limit": 6 * 2**20, "bytes_in_use": 2**20}
    )
    monkeypatch.setattr(throughput, "provenance", lambda: {"date": "today"})
    (row,) = sweep(model, {"full": presets.full()}, batches=None, lengths=[512])
    cache = kvjax.init(presets.full(), model.spec(batch=1, capacity=512), layers=CONFIG.layers)
    assert row["batch"] == max(tried) == 5 * 2**20 // kvjax.memory.nbytes(cache).device


def test_random_weights_are_those_of_a_decoder_in_kind_and_dtype(model):
    usual = nnx.state(nnx.eval_shape(lambda: Decoder(CONFIG)))
    drawn = nnx.state(model)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), drawn) == jax.tree.map(
        lambda a: (a.shape, a.dtype), usual
    )
    layer = model.layers[0]
    assert jnp.all(layer.mlp_norm.scale[...] == 1)
    matrices = [
        model.embedding[...],
        *(part.kernel[...] for part in (layer.mlp.up, layer.mlp.gate, layer.attention.q)),
    ]
    for i, matrix in enumerate(matrices):
        assert float(matrix.mean()) == pytest.approx(0, abs=0.005)
        assert float(matrix.std()) == pytest.approx(CONFIG.initializer_range, rel=0.15)
        assert not any(jnp.any(jnp.isin(matrix, other)) for other in matrices[:i])
    narrow = throughput.random_model(
        dataclasses.replace(CONFIG, qk_norm=False, qkv_bias=True, layers=1, windows=()),
        "bfloat16",
    )
    assert {a.dtype for a in jax.tree.leaves(nnx.state(narrow, nnx.Param))} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert jnp.all(narrow.layers[0].attention.q.bias[...] == 0)


def test_shapes_have_the_parameters_that_their_names_say():
    billions = {
        "llama-3.1-8b": 8.03,
        "llama-3.1-70b": 70.55,
        "llama-3.2-1b": 1.24,
        "mistral-7b": 7.25,
    }
    billions |= {"qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "qwen3-8b": 8.19}

    def parameters(config, layers):
        config = dataclasses.replace(config, layers=layers, windows=())
        state = nnx.state(nnx.eval_shape(lambda: Decoder(config)), nnx.Param)
        return sum(x.size for x in jax.tree.leaves(state))

    for name, config in throughput.SHAPES.items():
        one, two = parameters(config, 1), parameters(config, 2)
        assert round((one + (config.layers - 1) * (two - one)) / 1e9, 2) == billions[name]


@pytest.mark.parametrize("changes", [{"steps": 0}, {"block": 0}, {"seed": -1}])
def test_a_workload_without_work_is_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"Workload\({name}=\.\.\.\) must be"):
        Workload(**changes)


def test_a_model_without_room_is_refused_before_it_is_drawn(monkeypatch):
    monkeypatch.setattr(throughput, "_available_bytes", lambda: 2**30)
    monkeypatch.setattr(
        throughput, "_drawing", lambda *args, **settings: pytest.fail("weights were drawn")
    )
    with pytest.raises(
        MemoryError,
        match=r"the weights in bfloat16 would take 2.3 GiB, and 1.0 GiB are free; use a",
    ):
        throughput.random_model(throughput.SHAPES["llama-3.2-1b"])
