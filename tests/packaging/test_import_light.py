"""`import kvjax` needs jax and numpy alone, and no kernel where none can run."""

import subprocess
import sys

import pytest

ALONE = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {refused} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
OTHERS = (
    "chex", "etils", "filelock", "flax", "jaxtyping", "jinja2", "matplotlib", "orbax", "pandas", "rich", "safetensors",
    "tokenizers", "torch", "transformers", "typer",
)  # fmt: skip
STEP = """
import jax, jax.numpy as jnp, kvjax
spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=512, dtype="float32")
for policy in (kvjax.Full(), kvjax.Retrieval(selector=kvjax.Fier(), budget=64), kvjax.presets.snapkv(64).rest):
    layer = kvjax.init_layer(policy, spec)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 300, n, 16)) for i, n in enumerate((4, 2, 2)))
    out, layer = kvjax.attention(layer, q, k, v)
    out, layer = kvjax.attention(layer, q[:, :1], k[:, :1], v[:, :1])
    assert int(layer.length[0]) == 301 and bool(jnp.isfinite(out).all())
print("kernels:", sorted(m for m in sys.modules if m.startswith("kvjax.kernels_pallas.")))
"""


def run(code, *, refused=()):
    return subprocess.run(
        [sys.executable, "-c", ALONE.format(refused=set(refused) or "()") + code], capture_output=True, text=True
    )


def test_a_step_runs_where_only_jax_and_numpy_are_installed_and_imports_no_kernel():
    done = run("import kvjax.ops.op as op\nop._has_cuda_plugin = lambda: False\n" + STEP, refused=OTHERS)
    assert done.returncode == 0, done.stderr
    assert "simt" not in done.stdout
    assert not [name for name in ("attend", "score", "select", "write") if f"kernels_pallas.{name}" in done.stdout]


def test_import_loads_jax_and_numpy_alone():
    done = run(
        "import jax, numpy, numpy.typing, jaxtyping; before = set(sys.modules); import kvjax\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    assert done.stdout.split() in (["kvjax"], ["jax", "kvjax"]), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import kvjax; kvjax.models", "flax"),
        ("import kvjax; from kvjax import models", "safetensors"),
        ("import kvjax; kvjax.save", "orbax-checkpoint"),
        ("import kvjax; kvjax.evaluate", "flax"),
        ("from kvjax import testing", "chex"),
        ("import kvjax; kvjax.restore", "filelock"),
    ],
    ids=str,
)
def test_an_absent_package_is_named_in_one_sentence(code, package):
    module = {"orbax-checkpoint": "orbax"}.get(package, package)
    done = run(f"{code}", refused=[module])
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"needs {package}, which is not installed: pip install {package}" in last, done.stderr[-2000:]
