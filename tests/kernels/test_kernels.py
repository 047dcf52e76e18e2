"""The Pallas kernels: what they refuse, and when they are used."""

import dataclasses
import json
import logging
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheSpec, Fifo, Retrieval, Step, ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_quantized, attend_slots, attend_span
from kvjax.kernels_pallas.delta import delta_rule
from kvjax.kernels_pallas.host import host_rows
from kvjax.kernels_pallas.score import rerank, score_1bit, score_pages
from kvjax.kernels_pallas.select import select_1bit, select_4bit, tiling, top_k, top_k_grouped
from kvjax.kernels_pallas.vote import collide, most_voted
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import quantize_1bit
from kvjax.selectors import Fier
from tests.kernels.cases import CASES
from tests.kernels.conftest import HAS_KERNELS, KERNELS, ON_GPU

STEPS = {  # kernels that were timed as parts of others' rows, and where
    "attend_coded_zones": "turbo_step",
    "delta_rule": "delta_step",
    "delta_step": "delta_step",
}
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def index(B, K, S, D, group, dtype):
    return quantize_1bit(jax.random.normal(jax.random.key(0), (B, K, S, D)), group, dtype)


def test_configs_refuse_what_a_cluster_or_a_product_cannot_be():
    with pytest.raises(ValueError, match="blocks must be"):
        top_k.Config(blocks=3)
    with pytest.raises(ValueError, match="units must be"):
        score_1bit.Config(units=17)
    with pytest.raises(ValueError, match="stages must be 2, 4 or 8"):
        score_1bit.Config(stages=1)
    with pytest.raises(ValueError, match="units must be"):
        select_1bit.Config(units=0)
    with pytest.raises(ValueError, match="stages must be 2, 4 or 8"):
        select_1bit.Config(stages=3)
    with pytest.raises(ValueError, match="blocks must be"):
        select_1bit.Config(blocks=3)
    with pytest.raises(ValueError, match="blocks must be"):
        attend_slots.Config(blocks=16)
    with pytest.raises(ValueError, match="warpgroups must be"):
        attend_slots.Config(warpgroups=3)
    with pytest.raises(ValueError, match="warpgroups 1, 2 or 4"):
        score_pages.Config(warpgroups=8)
    with pytest.raises(ValueError, match="keys must be 1, 2 or 4"):
        collide.Config(keys=8)
    with pytest.raises(ValueError, match="warpgroups must be 2, 4 or 8"):
        most_voted.Config(warpgroups=1)
    with pytest.raises(ValueError, match="warpgroups must be 1, 2, 4 or 8; got 3"):
        rerank.Config(3)
    with pytest.raises(ValueError, match="warpgroups must be 1, 2, 4 or 8; got 16"):
        select_4bit.Config(warpgroups=16)
    with pytest.raises(ValueError, match="blocks must be"):
        select_4bit.Config(blocks=3)
    with pytest.raises(ValueError, match="parts must be at least 1"):
        collide.Config(parts=0)
    with pytest.raises(ValueError, match="stages must be at least 1"):
        collide.Config(stages=0)
    with pytest.raises(ValueError, match="apart must be 0 or 1"):
        collide.Config(apart=2)
    with pytest.raises(ValueError, match="blocks must be at least 1"):
        attend_quantized.Config(blocks=0)
    with pytest.raises(ValueError, match="keys 16, 32 or 64"):
        attend_span.Config(blocks=1, keys=8)
    with pytest.raises(ValueError, match="columns must be 32 or 64; got 128"):
        delta_rule.Config(128)
    with pytest.raises(ValueError, match="ahead must be at least 1"):
        host_rows.Config(ahead=0)


@pytest.mark.parametrize("k", [1, 100, 2048, 4096])
def test_top_k_fits_in_shared_memory(k):
    assert top_k.smem_bytes(k) < top_k_grouped.smem_bytes(k) <= 227 * 1024


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_select_1bit_fits_in_shared_memory_and_runs_at_once(stages):
    assert select_1bit.smem_bytes(128, select_1bit.Config(stages=stages)) <= 227 * 1024 // 4
    for rows, slots in ((8, 130816), (8, 32512), (64, 8192), (8, 300)):
        config = select_1bit.config_for(rows, 1, slots, slots + 256)
        assert (config.units, config.stages) == dataclasses.astuple(
            score_1bit.config_for(rows, slots)
        )
        warps = rows * -(-slots // (score_1bit.UNIT * config.units))
        assert warps <= simt.target().multiprocessors * score_1bit.WARPS_AT_ONCE
        assert tiling.in_one_step(slots + 256, config)
    assert score_1bit.config_for(64, 32512).units == 16  # two turns, the last of them full


@pytest.mark.parametrize("D", [64, 128, 256])
def test_attend_slots_fits_in_shared_memory_and_on_the_multiprocessors(D):
    for rows in (1, 8, 64, 300):
        for slots in (1, 100, 2048, 4096):
            config = attend_slots.config_for(rows, slots, D)
            assert attend_slots.smem_bytes(D, config) <= 227 * 1024
            assert config.blocks == 1 or rows * config.blocks <= 128


@pytest.mark.parametrize("D", [64, 128, 256])
def test_attend_span_takes_the_multiprocessors_in_whole_waves(D):
    for rows in (1, 4, 8, 16, 64, 128, 300):  # a row alone has at most a block a multiprocessor
        config = attend_span.config_for(rows, 131072, D)
        waves = rows * config.blocks / attend_span.at_once(D, config)
        assert waves > 0.9 * np.ceil(waves) or rows == 1


@pytest.mark.parametrize("pending", [0, 256])
@pytest.mark.parametrize("heads", [1, 3, 8, 64, 300])
def test_rerank_has_a_thread_for_each_pick_and_a_multiprocessor_for_each_block_where_these_are_enough(
    heads, pending
):
    for M in (1, 31, 130, 3277, 6554, 13108, 52429):
        config = rerank.config_for(heads, M, pending)
        beside = heads * -(-pending // (128 * config.warpgroups))
        share = rerank.split(heads, M, config, beside)
        assert share.blocks * share.candidates >= M > (share.blocks - 1) * share.candidates
        assert share.candidates <= share.threads == 128 * config.warpgroups
        assert share.candidates % 32 == 0
        fits = heads * -(-M // 1024) + heads * -(-pending // 1024) <= 132
        assert (heads * share.blocks + beside <= 132) == fits


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_chosen_once_its_benchmark_was_run(name):
    file = RESULTS / f"{STEPS.get(name, name)}.json"
    found = json.loads(file.read_text()) if file.exists() else {"rows": []}
    of_steps = (
        row["date"][:10]
        for row in found["rows"]
        if any(part.removeprefix("kvjax_").startswith(name) for part in row.get("parts", ()))
    )
    date = min(of_steps, default=None) if name in STEPS else found.get("date")
    assert date == KERNELS[name].MEASURED, (
        f"{name}.MEASURED must be the date of {file.name}, {date}"
    )


def test_a_kernel_that_was_not_measured_is_only_run_by_name(monkeypatch):
    monkeypatch.setattr(top_k, "MEASURED", None)
    scores, valid = jnp.zeros((1, 50)), jnp.ones((1, 50), bool)
    if HAS_KERNELS:
        assert str(ops.explain("top_k", scores, valid, 5)) == (
            "xla: the kernel top_k is not yet measured on a GPU: ask for it by name"
        )

        def lowered(implementation):
            run = jax.jit(partial(ops.top_k, k=5, implementation=implementation))
            return run.trace(scores, valid).lower(lowering_platforms=("cuda",)).as_text()

        assert "kvjax_top_k" not in lowered(None)
        assert "kvjax_top_k" in lowered("mosaic")


def test_a_gpu_without_kernels_is_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(simt, "why_not", lambda: "this GPU is too old")
    with caplog.at_level(logging.WARNING, "kvjax"):
        for k in (3, 4):
            ops.top_k(jnp.zeros((1, 9)), jnp.ones((1, 9), bool), k)
    assert [r.getMessage() for r in caplog.records] == [
        "running the reference in plain JAX: this GPU is too old"
    ]


def test_an_unknown_implementation_or_operation_is_refused():
    with pytest.raises(
        ValueError, match="implementation must be None or one of 'xla', 'mosaic'"
    ):
        ops.top_k(jnp.zeros((1, 4)), jnp.ones((1, 4), bool), 2, implementation="cuda")
    with pytest.raises(ValueError, match="op must be one of"):
        ops.explain("attend")


@pytest.mark.skipif(ON_GPU, reason="says what is chosen where no kernel can run")
def test_the_reference_runs_where_there_is_no_kernel():
    scores, valid = jax.random.normal(jax.random.key(0), (2, 50)), jnp.ones((2, 50), bool)
    why = "jax >= 0.11" if not HAS_KERNELS else "for GPUs"
    for name, case in CASES.items():
        args, options = case.args()
        unmeasured = HAS_KERNELS and ops.OPS[name].module.MEASURED is None
        assert ("not yet measured" if unmeasured else why) in str(
            ops.explain(name, *args, **options)
        ), name
    chosen, named = (
        jax.jit(partial(ops.top_k, k=5, implementation=i))(scores, valid) for i in (None, "xla")
    )
    np.testing.assert_array_equal(chosen.slots, named.slots)
    assert "kvjax_top_k" not in jax.jit(partial(ops.top_k, k=5)).lower(scores, valid).as_text()
    with pytest.raises(
        NotImplementedError, match=r"platform cpu" if HAS_KERNELS else r"jax >= 0\.11"
    ):
        jax.jit(partial(ops.top_k, k=5, implementation="mosaic"))(scores, valid)


@pytest.mark.skipif(not HAS_KERNELS, reason="there are kernels from jax 0.11 on")
def test_a_program_lowered_for_a_gpu_has_the_kernels():
    if not ON_GPU and jax.default_backend() == "gpu":
        pytest.skip(simt.why_not())
    ix = index(1, 2, 64, 64, 32, jnp.bfloat16)

    def step(q, ix):
        scores = jnp.max(ops.score_1bit(q, ix, logits=Logits(0.1)), axis=2)
        return ops.top_k(scores, jnp.ones(scores.shape, bool), 16)

    q = jnp.zeros((1, 2, 4, 64))
    text = jax.jit(step).trace(q, ix).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") + text.count("custom_call @mosaic_gpu_v2") >= 2
    assert "chlo.top_k" not in text


def test_the_derivative_of_scores_is_the_references():
    ix, q = (
        index(1, 1, 64, 64, 32, jnp.bfloat16),
        jax.random.normal(jax.random.key(1), (1, 1, 2, 64)),
    )
    chosen, named = (
        jax.jit(
            jax.grad(
                lambda q, i=i: jnp.sum(
                    ops.score_1bit(q, ix, logits=Logits(0.1), implementation=i)
                )
            )
        )(q)
        for i in (None, "xla")
    )
    np.testing.assert_allclose(chosen, named, rtol=1e-5)


@pytest.mark.parametrize("group_reduce", ["mean_softmax", "mean_query", "per_head"])
def test_a_step_chooses_of_all_pools_and_lengths_what_select_ranks_highest(group_reduce):
    spec = CacheSpec(
        batch=4, q_heads=4, kv_heads=2, head_dim=16, capacity=128, dtype=jnp.float32
    )
    policy = Retrieval(
        selector=Fier(group=8, group_reduce=group_reduce),
        budget=20,
        sink=2,
        local=4,
        demote=Fifo(leave=16),
        dense_below=30,
    )
    k, q = (jax.random.normal(jax.random.key(i), (4, 2, n, 16)) for i, n in enumerate((100, 2)))
    lengths = jnp.array([100, 29, 31, 0])

    @jax.jit
    def choose(k, q):
        st = policy.prefill(policy.init(spec), k, k, lengths)
        found = []
        for window in (None, 40):
            by = Step(Logits(0.25), window)
            ranked = policy.select(st, q, by, num_sorted_last=st.store.slots)
            found.append((policy.attend(st, q, by)[2].selection, ranked))
        return found

    for chosen, ranked in choose(k, q):
        for ours, theirs in zip(*(_sets(s) for s in (chosen, ranked)), strict=True):
            assert ours == theirs
    assert [len(s) for s in _sets(ranked)][:: len(_sets(ranked)) // 4] == [14, 23, 14, 0]


def _sets(selection):
    slots, valid = (np.asarray(a).reshape(-1, a.shape[-1]) for a in selection)
    return [set(s[ok].tolist()) for s, ok in zip(slots, valid, strict=True)]
