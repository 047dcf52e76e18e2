"""`import kvjax` needs jax and numpy alone, and no kernel where none can run."""

import json
import subprocess
import sys

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
attention = jax.jit(kvjax.attention)
for policy in (kvjax.Full(), kvjax.Retrieval(selector=kvjax.Fier(), budget=64), kvjax.presets.snapkv(64).rest):
    layer = kvjax.init_layer(policy, spec)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 300, n, 16)) for i, n in enumerate((4, 2, 2)))
    out, layer = attention(layer, q, k, v)
    out, layer = attention(layer, q[:, :1], k[:, :1], v[:, :1])
    assert int(layer.length[0]) == 301 and bool(jnp.isfinite(out).all())
print("kernels:", sorted(m for m in sys.modules if m.startswith("kvjax.kernels_pallas.")))
"""


def run(code, *, refused=()):
    return subprocess.run(
        [sys.executable, "-c", ALONE.format(refused=set(refused) or "()") + code],
        capture_output=True,
        text=True,
    )


def test_a_step_runs_where_only_jax_and_numpy_are_installed_and_imports_no_kernel():
    done = run(
        "import kvjax.ops.op as op\nop._has_cuda_plugin = lambda: False\n" + STEP,
        refused=OTHERS,
    )
    assert done.returncode == 0, done.stderr
    assert "simt" not in done.stdout
    assert not [
        name
        for name in ("attend", "score", "select", "write")
        if f"kernels_pallas.{name}" in done.stdout
    ]


def test_import_loads_jax_and_numpy_alone():
    done = run(
        "import jax, numpy, numpy.typing, jaxtyping; before = set(sys.modules); import kvjax\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    assert done.stdout.split() in (["kvjax"], ["jax", "kvjax"]), done.stdout + done.stderr


# What is imported, called or typed without a package. In this order, each is absent before
# others have loaded it.
ABSENT = [
    ("typer", "kvjax.cli.main"),
    ("typer", "kvjax generate"),
    ("chex", "kvjax.testing.LAWS"),
    ("filelock", "kvjax.restore"),
    ("orbax-checkpoint", "kvjax.save"),
    ("flax", "kvjax.models"),
    ("flax", "kvjax.models.load"),
    ("flax", "kvjax.evaluate"),
    ("flax", "kvjax generate"),
    ("safetensors", "kvjax.models"),
    ("safetensors", "kvjax generate"),
    ("rich", "kvjax generate"),
    ("tokenizers", "kvjax generate"),
]
EACH = """
import contextlib, importlib, io
refused = set()
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
def without(package, what):
    refused.clear()
    refused.add(package)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("kvjax", "kvjax_command", package):
            del sys.modules[name]
    try:
        if what == "kvjax generate":
            with contextlib.redirect_stderr(io.StringIO()) as told:
                import kvjax_command
                kvjax_command.end_at_interrupt = lambda: None
                sys.argv = ["kvjax", "generate", "--prompt", "a", "--max-new-tokens", "1"]
                code = kvjax_command.main()
            return told.getvalue().strip() if code == 2 else f"ended with {code}: {told.getvalue()}"
        module, _, name = what.rpartition(".")
        getattr(importlib.import_module(module), name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was missing"
"""


def test_an_absent_package_is_named_in_one_sentence():
    """In one process, as imports take a second."""
    cases = [
        ({"orbax-checkpoint": "orbax"}.get(package, package), what) for package, what in ABSENT
    ]
    done = run(f"{EACH}\nimport json\nprint(json.dumps([without(*case) for case in {cases}]))")
    assert done.returncode == 0, done.stderr[-2000:]
    for (package, what), told in zip(
        ABSENT, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        start = "error: " if what == "kvjax generate" else "ImportError: "
        assert told.startswith(start), (package, what, told)
        assert told.endswith(
            f" needs {package}, which is not installed: pip install {package}"
        ), (package, what, told)
        assert "\n" not in told
