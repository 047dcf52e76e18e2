"""What a type checker sees of kvjax after README's editable install, from a file of a user."""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.test_distribution import BUILD, ROOT, run

USER = """
import jax.numpy as jnp
import kvjax

spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=512, dtype="float32")
cache = kvjax.init_layer(kvjax.Retrieval(selector=kvjax.Fier(), budget=64), spec)
q, k = jnp.zeros((1, 3, 4, 16)), jnp.zeros((1, 3, 2, 16))
out, cache = kvjax.attention(cache, q, k, k)
out, cache, info = kvjax.attention_info(cache, q, k, k)
reveal_type(cache.length)
reveal_type(kvjax.attention(None, q, k, k))
checkpoint = kvjax.models.load(kvjax.models.shipped())
reveal_type(checkpoint)
reveal_type(kvjax.presets.fier(64))
reveal_type(kvjax.evaluate.compare(checkpoint, "pass_key", ["full"]))
kvjax.save("folder", cache)
kvjax.no_such_name
kvjax.presets.no_such_name
kvjax.models.no_such_name
kvjax.init_layer(64, spec)
"""
# To read these takes most of the time, and no type of kvjax is theirs.
CONFIG = """
[mypy]
[mypy-torch.*,transformers.*,flax.*,orbax.*,tensorstore.*,tokenizers.*,rich.*,typer.*,matplotlib.*,pandas.*]
follow_imports = skip
"""
REVEALED = (
    "Array",
    "tuple[Array, None]",
    "Checkpoint",
    "PerLayer",
    "Comparison",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with an editable install of this tree, and the packages of this one."""
    folder = tmp_path_factory.mktemp("editable")
    tree = folder / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():  # links, so that a build leaves nothing behind here
        if path.suffix in (".toml", ".md", ".in") or path.name in (
            "LICENSE",
            "kvjax",
            "kernels_pallas",
            "models",
        ):
            (tree / path.name).symlink_to(path)
    made = run(BUILD.format("editable", str(folder)), tree)
    assert made.returncode == 0, made.stderr
    venv.create(folder / "env", symlinks=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(folder / made.stdout.splitlines()[-1]).extractall(site)
    others = [part for part in sys.path if Path(part).name == "site-packages"]
    (site / "zz_others.pth").write_text("\n".join(others) + "\n")
    return folder / "env" / "bin" / "python"


def test_a_users_file_has_full_types_and_wrong_names_are_errors(python, tmp_path):
    pytest.importorskip("mypy", reason="mypy is of the extra dev")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        str(python),
        "--config-file=mypy.ini",
        "user.py",
    ]
    told = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600
    ).stdout
    kinds = [
        re.sub(r"[\w.]+\.(\w+)", r"\1", kind)
        for kind in re.findall(r'Revealed type is "(.*)"', told)
    ]
    assert tuple(kinds) == REVEALED, told
    errors = re.findall(r"user\.py:\d+: error: (.*)", told)
    assert len(errors) == 4, told
    assert sum('has no attribute "no_such_name"' in error for error in errors) == 3
    assert 'Argument 1 to "init_layer" has incompatible type "int"' in errors[-1]
