"""The distributions: every package, from a source archive that needs nothing else, and nothing
called `models`.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, folder: Path, *, path: Path | None = None) -> subprocess.CompletedProcess:
    """Python code in a process of its own, in `folder`; `path` is searched before what is
    installed.
    """
    first = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    return subprocess.run(
        [sys.executable, "-c", first + code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def modules() -> list[str]:
    """Every module on disk, as the wheel should hold it; `kvjax/models` and
    `kvjax/kernels_pallas` are links.
    """
    return sorted(
        str((Path(folder) / name).relative_to(ROOT))
        for folder, folders, names in os.walk(ROOT / "kvjax", followlinks=True)
        for name in names
        if name.endswith(".py") and "data" not in Path(folder).relative_to(ROOT).parts
    )


def test_every_folder_of_modules_is_a_package():
    """The wheel would lack a folder without __init__.py, and no tool would say so."""
    folders = {str(Path(name).parent) for name in modules()}
    assert not {folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()}
    assert {"kvjax/models", "kvjax/kernels_pallas/simt"} <= folders


def test_bare_import_of_models_names_the_right_one():
    result = run("import models", ROOT, path=ROOT)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "kvjax.models" in result.stderr.splitlines()[-1]


BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A source distribution of this tree, and a wheel built from that alone."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = folder / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():  # links, so that a build leaves nothing behind here
        if path.suffix in (".toml", ".md", ".txt", ".in") or path.name in (
            "LICENSE",
            "kvjax_command.py",
            "examples",
            "kernels_pallas",
            "models",
            "tests",
        ):
            (tree / path.name).symlink_to(path)
    copy_without_weights(ROOT / "kvjax", tree / "kvjax")
    made = run(BUILD.format("sdist", str(folder)), tree)
    assert made.returncode == 0, made.stderr
    source = folder / made.stdout.splitlines()[-1]
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    made = run(BUILD.format("wheel", str(folder)), folder / source.name.removesuffix(".tar.gz"))
    assert made.returncode == 0, made.stderr
    return source, folder / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def model_wheel(tmp_path_factory):
    """The wheel of the model that ships, with empty weights."""
    folder = tmp_path_factory.mktemp("model")
    copy_without_weights(ROOT / "kvjax" / "data", folder / "data")
    made = run(BUILD.format("wheel", str(folder)), folder / "data")
    assert made.returncode == 0, made.stderr
    return folder / made.stdout.splitlines()[-1]


def copy_without_weights(source: Path, target: Path) -> None:
    """With empty files for them: to compress the weights took most of the time."""
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__")
    )
    for path in source.rglob("*.safetensors"):
        (target / path.relative_to(source)).touch()


def test_wheel_holds_every_module_and_what_they_read(distributions):
    names = set(zipfile.ZipFile(distributions[1]).namelist())
    assert {*modules()} | {"kvjax/py.typed", "kvjax/kernels_pallas/tuned.json"} <= names
    top = {n.split("/")[0] for n in names if ".dist-info" not in n}
    assert top == {"kvjax", "kvjax_command.py"}, (
        "one top-level package, and what runs before it is imported"
    )
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not any("26m" in n or n.endswith(".safetensors") for n in names), (
        "the model is a package of its own"
    )


def test_wheel_of_the_model_holds_its_files_alone(model_wheel):
    names = {n for n in zipfile.ZipFile(model_wheel).namelist() if ".dist-info" not in n}
    assert names == {f"kvjax_26m/{p.name}" for p in (ROOT / "kvjax/data/kvjax-26m").iterdir()}
    assert len(names) > 5


def test_source_distribution_holds_the_tests_and_what_they_read(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    tests = {
        str(path.relative_to(ROOT))
        for folder in ("tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert (
        tests
        | {
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "CONTRIBUTING.md",
            "MAINTAINING.md",
            "constraints.txt",
        }
        <= names
    )


def test_wheels_work_in_a_foreign_directory(distributions, model_wheel, tmp_path):
    """The wheels' own files, unpacked, ahead of whatever kvjax is installed: without the model,
    and then with it.
    """
    site, model = tmp_path / "site", tmp_path / "model"
    zipfile.ZipFile(distributions[1]).extractall(site)
    zipfile.ZipFile(model_wheel).extractall(model)
    code = (
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__name__', '')]\n"
        "import kvjax.cli, kvjax.kernels_pallas, kvjax.models\n"
        "print(kvjax.__file__, kvjax.models.__file__, kvjax.kernels_pallas.__file__)\n"
        "try: kvjax.models.shipped()\n"
        "except FileNotFoundError as error: print(error)\n"
        f"sys.path.append({str(model)!r})\n"
        "print(kvjax.models.shipped())"
    )
    result = run(code, tmp_path, path=site)
    assert result.returncode == 0, result.stderr
    imported, missing, found = result.stdout.splitlines()
    assert all(name.startswith(str(site)) for name in imported.split())
    assert "pip install path/to/clone/kvjax/data" in missing
    assert found == str(model / "kvjax_26m")
