"""Every preset's programs lower for TPUs and for AMD's GPUs; none has run on one."""

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import presets

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=2048, dtype=jnp.bfloat16
)


@pytest.mark.parametrize("name", presets.REGISTRY)
def test_a_step_and_a_prompt_lower_for_tpus_and_amd_gpus(name, monkeypatch):
    # So that the forms for GPUs and TPUs are traced.
    monkeypatch.setattr("kvjax.ops.op.reaches_gpus", lambda: True)
    monkeypatch.setattr("kvjax.numerics.platforms.reaches_tpus", lambda: True)
    takes_budget = "budget" in presets.REGISTRY[name].settings
    policies = presets.parse_with_budget(name, 640)[0] if takes_budget else presets.parse(name)
    layer = jax.eval_shape(lambda: kvjax.init_layer(policies.rest, SPEC))
    for verb, tokens in ((kvjax.attention, 1), (kvjax.prefill, 300)):
        new = [
            jax.ShapeDtypeStruct((2, tokens, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)
        ]
        # What names a layout is no operation that an export promises to keep.
        layouts = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
        exported = jax.export.export(
            jax.jit(verb), platforms=["tpu", "rocm"], disabled_checks=[layouts]
        )
        program = exported(layer, *new)
        assert program.platforms == ("tpu", "rocm")
