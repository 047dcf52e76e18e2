"""Shapes and dtypes in signatures hold: every operation and every preset is traced under
jaxtyping's import hook.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
from jaxtyping import TypeCheckError, install_import_hook

install_import_hook(["kvjax.ops", "kvjax.numerics.partial", "kvjax.numerics.quant"], "beartype.beartype")
from functools import partial

import jax
import jax.numpy as jnp

import kvjax
from kvjax import ops, presets
from tests.kernels.cases import CASES, sds

def trace(f, args):
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}
    jax.eval_shape(lambda a: f(*jax.tree.unflatten(tree, [a.get(i, leaf) for i, leaf in enumerate(leaves)])), arrays)

for name, case in CASES.items():
    args, options = case.args()
    trace(partial(ops.OPS[name], **options, implementation="xla"), args)

args, options = CASES["attend_slots"].args()
q, k, v, selection = args
for wrong in ((q, k, sds(1, 2, 63, 128), selection), (q, k.update(dtype=jnp.int32), v, selection)):
    try:
        trace(partial(ops.attend_slots, **options, implementation="xla"), wrong)
    except TypeCheckError:
        continue
    raise SystemExit(f"nothing was checked of {wrong}")
print("checked")
"""
OF_PRESETS = """
spec = kvjax.CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=4096, dtype="bfloat16")
q, kv = sds(2, 1, 4, 64), sds(2, 1, 2, 64)
for preset in presets.REGISTRY.values():
    policy = preset.policy()

    def run(q, k, v, policy=policy):
        cache = kvjax.init_layer(policy, spec)
        _, cache = kvjax.attention(cache, *(jnp.repeat(x, 5, axis=1) for x in (q, k, v)))
        return kvjax.attention(cache, q, k, v)

    jax.eval_shape(run, q, kv, kv)
"""


def run(program):
    """In a process of its own: modules are checked if they are imported after the hook was
    installed.
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("checked")


def test_axes_and_dtypes_in_signatures_hold():
    run(PROGRAM)


@pytest.mark.thorough
def test_axes_and_dtypes_in_signatures_hold_in_steps_of_all_presets():
    run(PROGRAM + OF_PRESETS)
