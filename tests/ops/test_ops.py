"""The selection between an operation's reference and its kernel, and how it is reported."""

import ast
import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax_command
from kvjax import ops
from kvjax.numerics import platforms
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import quantize_1bit
from kvjax.numerics.selection import Candidates
from kvjax.ops.op import op as make_op
from kvjax.ops.op import reaches_gpus
from tests.kernels.conftest import HAS_KERNELS, KERNELS, ON_GPU

SCORES, VALID = jax.random.normal(jax.random.key(0), (2, 50)), jnp.ones((2, 50), bool)


def select_1bit(**options):
    keys = quantize_1bit(jax.random.normal(jax.random.key(1), (1, 1, 64, 64)), 32, jnp.bfloat16)
    q = jax.random.normal(jax.random.key(2), (1, 1, 2, 64))
    late = jnp.zeros((1, 1, 4, 64), jnp.bfloat16)
    among = Candidates(span=(0, 60), pending=(late, 0, 3), k=9, k_max=9, pending_slots=4)
    return ops.select_1bit(q, keys, among, "mean_score", logits=Logits(0.1), **options)


def test_every_kernel_has_an_operation_and_every_operation_is_exported():
    assert {op.module for op in ops.OPS.values()} == set(KERNELS.values())
    for name, op in ops.OPS.items():
        assert getattr(ops, name) is op
        assert name in ops.__all__
        assert "implementation" in inspect.signature(op).parameters
        assert op.__doc__ == op.reference.__doc__


def test_explain_says_what_runs_and_why():
    how = ops.explain("top_k", SCORES, VALID, 5)
    assert dataclasses.is_dataclass(how)
    assert (how.op, how.implementation) == ("top_k", "mosaic" if ON_GPU else "xla")
    if not ON_GPU:
        assert str(how) == f"xla: {how.reason}"
        assert ("for GPUs" if HAS_KERNELS else "jax >= 0.11") in how.reason
    with pytest.raises(dataclasses.FrozenInstanceError):
        how.op = "other"
    assert ops.explain(ops.top_k, SCORES, VALID, 5) == how
    named = ops.explain("top_k", SCORES, VALID, 5, implementation="xla")
    assert named == ops.Explanation("top_k", "xla", "asked for by name")
    assert str(ops.Explanation("top_k", "mosaic", "")) == "mosaic"


def test_explained_has_an_entry_for_each_call_in_order():
    def run():
        ops.top_k(SCORES, VALID, 5)
        ops.top_k(SCORES, VALID, 7, implementation="xla")
        select_1bit(implementation="xla")

    with ops.explained() as calls:
        jax.eval_shape(run)
    assert [call.op for call in calls] == [
        "top_k",
        "top_k",
        "select_1bit",
        "score_1bit",
        "top_k_grouped",
        "top_k",
    ]
    assert {(call.implementation, call.reason) for call in calls[1:]} == {
        ("xla", "asked for by name")
    }
    with ops.explained() as after:
        pass
    assert after == []


def test_exact_attention_of_a_prompt_is_told_of_too(monkeypatch):
    spec = kvjax.CacheSpec(
        batch=1, q_heads=2, kv_heads=1, head_dim=16, capacity=64, dtype="float32"
    )
    q, k = (jnp.zeros((1, 8, heads, 16)) for heads in (2, 1))
    with ops.explained() as calls:
        jax.eval_shape(
            lambda: kvjax.attention(kvjax.init_layer(kvjax.Full(), spec), q, k, k)[0]
        )
    told = {call.op: str(call) for call in calls}
    assert {"attend_own", "attend_zone"} <= set(told) or "attend_chunk" in told
    if not ON_GPU:
        assert all(
            "xla: cuDNN is for GPUs" in how
            for name, how in told.items()
            if name.startswith("attend_")
        )
    assert str(ops.Explanation("attend_own", "cudnn", "")) == "cudnn"


def test_what_a_kernel_replaces_is_not_told_of(monkeypatch):
    if not HAS_KERNELS:
        pytest.skip("there are kernels from jax 0.11 on")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with ops.explained() as calls:
        jax.eval_shape(select_1bit)
    assert [(call.op, str(call)) for call in calls] == [("select_1bit", "mosaic")]


def test_use_chooses_for_a_block_and_a_calls_own_argument_wins():
    with ops.use("mosaic"):
        assert (
            ops.explain("top_k", SCORES, VALID, 5, implementation="xla").implementation == "xla"
        )
        with pytest.raises(
            NotImplementedError, match="platform" if HAS_KERNELS else r"jax >= 0\.11"
        ):
            jax.jit(partial(ops.top_k, k=5))(SCORES, VALID)
        with ops.use("xla"):
            assert ops.explain("top_k", SCORES, VALID, 5) == ops.Explanation(
                "top_k", "xla", "asked for by name"
            )
            with ops.use(None):
                assert ops.explain("top_k", SCORES, VALID, 5).reason != "asked for by name"
    assert ops.explain("top_k", SCORES, VALID, 5).reason != "asked for by name"
    with pytest.raises(
        ValueError, match="implementation must be None or one of 'xla', 'mosaic'; got 'cuda'"
    ):
        ops.use("cuda").__enter__()


def test_a_jitted_function_is_traced_again_where_use_differs():
    seen = []

    @jax.jit
    def inner(scores):
        seen.append(ops.explain("top_k", scores, VALID, 5).reason == "asked for by name")
        return ops.top_k(scores, VALID, 5)

    @jax.jit
    def outer(scores):
        return jax.lax.fori_loop(
            0, 2, lambda i, slots: inner(scores).slots, jnp.zeros((2, 5), jnp.int32)
        )

    want = outer(SCORES)
    assert seen == [False]
    with ops.use("xla"):
        np.testing.assert_array_equal(outer(SCORES), want)
        assert seen == [False, True]
    with ops.use("xla"):
        outer(SCORES)
        inner(SCORES)
    outer(SCORES)
    assert seen == [False, True], "neither choice is traced twice"


def test_a_program_lowered_for_a_gpu_has_kernels_only_where_use_lets_it():
    if not HAS_KERNELS:
        pytest.skip("there are kernels from jax 0.11 on")
    run = jax.jit(select_1bit)

    def lowered():
        return run.trace().lower(lowering_platforms=("cuda",)).as_text()

    assert "kvjax_select_1bit" in lowered()
    with ops.use("xla"):
        assert "kvjax_" not in lowered(), "nor do operations inside of the reference run one"
    with ops.use("mosaic"):
        assert "kvjax_select_1bit" in lowered()
        assert "chlo.top_k" not in lowered()


def test_a_reference_in_whose_place_a_gpu_runs_a_kernel_has_no_form_for_a_gpu():
    if not HAS_KERNELS:
        pytest.skip("there are kernels from jax 0.11 on")
    traced = str(jax.jit(select_1bit).trace().jaxpr)
    assert "kvjax_select_1bit" in traced
    assert "kvjax_score_1bit" not in traced
    # A process with libtpu has a form for a TPU there, too.
    assert traced.count("= platform_index[platforms=(('cuda'") == 1, (
        "neither kernels nor forms for a GPU inside of the reference"
    )


def test_a_function_jitted_in_a_reference_has_its_kernel_where_it_is_called_alone():
    if not HAS_KERNELS:
        pytest.skip("there are kernels from jax 0.11 on")

    @jax.jit
    def highest(scores):
        return ops.top_k(scores, VALID, 5).slots

    @make_op(
        kernel=lambda: KERNELS["top_k"],
        limit=lambda a: None,
        mosaic=lambda a: VALID.astype(jnp.int32)[:, :5],
    )
    def jits(scores, *, implementation=None):
        return highest(scores)

    del ops.OPS["jits"]  # not one of the library's

    def lowered(run):
        return jax.jit(run).trace(SCORES).lower(lowering_platforms=("cuda",)).as_text()

    assert "kvjax_top_k" not in lowered(jits)
    assert "kvjax_top_k" in lowered(lambda scores: highest(scores)), (
        "not what a platform without CUDA traced before"
    )


def test_a_type_checker_and_a_process_import_the_same_kernels():
    tree = ast.parse(inspect.getsource(ops.kernels))
    typed = {
        name.asname: f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvjax")
        for name in node.names
    }
    assert typed == ops.kernels.PLACES
    with pytest.raises(AttributeError, match="no attribute 'top_kk'"):
        ops.kernels.top_kk  # noqa: B018


def test_arguments_are_bound_as_those_of_a_function():
    with pytest.raises(TypeError, match="missing a required argument: 'valid'"):
        ops.top_k(SCORES, k=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        ops.top_k(SCORES, VALID, 5, size=3)
    assert repr(ops.top_k) == "<kvjax.ops.top_k>"


def test_a_command_on_a_cpu_has_no_programs_for_other_devices(monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("a process on a CPU")
    monkeypatch.setattr("kvjax.ops.op._has_cuda_plugin", lambda: True)
    monkeypatch.setattr(platforms, "_has_libtpu", lambda: True)
    monkeypatch.setattr(platforms, "_compiles_ahead", True)
    assert reaches_gpus()
    assert platforms.reaches_tpus()

    monkeypatch.setattr(kvjax_command, "end_at_interrupt", lambda: None)
    monkeypatch.setattr("kvjax.cli.main", lambda: 0)
    monkeypatch.setattr("gc.disable", lambda: None)
    assert kvjax_command.main() == 0
    assert not reaches_gpus()
    assert not platforms.reaches_tpus()
