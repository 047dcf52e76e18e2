"""Builds and checks what a release uploads, and publishes nothing: `python .ci/release.py`.

With `--tag v0.1.0` the tag must be that of the version, and the changelog must have its date and
nothing unreleased.
The archives of kvjax are written to `--out` (default: dist), and those of the model, which is a
project of its own, to its `model`.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty folder")
    options = parser.parse_args()
    out = options.out.absolute()
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty; remove it, or name another folder by --out")

    version = check_versions(options.tag)
    with tempfile.TemporaryDirectory() as scratch:
        tools = environment(Path(scratch) / "tools")
        install(tools, "build", "twine")
        tree = copy_for_index(version, Path(scratch) / "tree")
        build(tools, tree, out)
        build(tools, tree / "kvjax" / "data", out / "model")
        archives = sorted(out.rglob("*.whl")) + sorted(out.rglob("*.tar.gz"))
        run(tools, "-m", "twine", "check", "--strict", *map(str, archives))

        user = environment(Path(scratch) / "user")
        install(
            user, "-c", str(ROOT / "constraints.txt"), *map(str, sorted(out.rglob("*.whl")))
        )
        answer = ask(user, Path(scratch))
    print(f"kvjax {version}: {len(archives)} archives in {out}; README's command says {answer}")


def check_versions(tag: str | None) -> str:
    """Returns the version, which all files that name it must agree on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = {
        "pyproject.toml": project,
        "kvjax/__init__.py": _first(r'^__version__ = "(.+)"', ROOT / "kvjax" / "__init__.py"),
        "CITATION.cff": _first(r"^version: (.+)", ROOT / "CITATION.cff"),
    }
    if tag is not None:
        found["the tag"] = tag.removeprefix("v")
        found["CHANGELOG.md"] = _first(r"^## (\d\S*) \(?\d{4}-\d\d-\d\d", ROOT / "CHANGELOG.md")
    if len(set(found.values())) > 1:
        sys.exit("versions differ: " + ", ".join(f"{k} has {v}" for k, v in found.items()))
    if tag is not None and (entries := unreleased()):
        sys.exit(
            f"CHANGELOG.md has {entries} entries under Unreleased; move them under {project} and its date, or release "
            "another version"
        )
    return project


def unreleased() -> int:
    """Returns the number of entries of the changelog that no version has."""
    section = _first(r"^## Unreleased\n((?:(?!## ).*\n?)*)", ROOT / "CHANGELOG.md")
    return len(re.findall(r"^- ", section or "", re.MULTILINE))


def _first(pattern: str, path: Path) -> str | None:
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    return match and match[1]


def copy_for_index(version: str, folder: Path) -> Path:
    """Copies the repository to `folder`, with pages for an index, and returns it."""
    left_out = shutil.ignore_patterns(".*", "dist", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    shutil.copytree(ROOT / ".ci", folder / ".ci")  # of the source archive
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]
    for page in (folder / "README.md", folder / "kvjax/data/kvjax-26m/README.md"):
        place = page.parent.relative_to(folder)
        page.write_text(with_whole_links(page.read_text(), repository, f"v{version}", place))
    return folder


def with_whole_links(text: str, repository: str, tag: str, place: Path) -> str:
    """A page of the folder `place`, with links to the repository instead of those between files,
    which an index of packages does not have.
    """

    def whole(match: re.Match[str]) -> str:
        name, target = match.groups()
        kind = "raw" if name.startswith("!") else "blob"
        return f"{name}({repository}/{kind}/{tag}/{posixpath.normpath(place / target)})"

    return re.sub(r"(!?\[[^\[\]]*\])\((?!https?:|#)([^()\s]+)\)", whole, text)


def environment(folder: Path) -> Path:
    """Makes a virtual environment, and returns its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, folder: Path = ROOT) -> str:
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def install(python: Path, *what: str) -> None:
    run(python, "-m", "pip", "install", "-q", *what)


def build(python: Path, project: Path, out: Path) -> None:
    """Writes a source archive, and the wheel that is built from it alone."""
    run(python, "-m", "build", "--outdir", str(out), str(project))


def ask(python: Path, folder: Path) -> str:
    """Runs README's command on what was installed, away from the repository."""
    command = _first(r"^  \.venv/bin/kvjax (generate --example.*)$", ROOT / "README.md")
    if command is None:
        sys.exit("README.md has no command `kvjax generate --example` in its first block")
    answer = run(python, "-m", "kvjax", *command.split(), folder=folder).strip()
    if answer != "71432":
        sys.exit(f"kvjax {command} printed {answer!r}; 71432 was wanted")
    return answer


if __name__ == "__main__":
    main()
