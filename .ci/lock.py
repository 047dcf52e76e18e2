"""Writes constraints.txt: the exact versions that CI tests, on both Pythons.

    python3.11 .ci/lock.py python3.11 python3.12

For each interpreter, pip resolves the extras below in a new environment without installing
anything. Versions that agree are written once, the others with a marker. The first interpreter
is the older one.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Extras that CI installs, and what is held below the newest: Python -> requirements. jax 0.10.2
# is the last for Python 3.11. torch is for the goldens, which run on the older Python only.
WANTED = {
    "3.11": (".[dev]", "jax==0.10.2", "torch==2.13.0"),
    "3.12": (".[test,harness,serve]", "jax==0.11.2"),
}


def resolve(python: str) -> tuple[str, dict[str, str]]:
    """The interpreter's version as 3.x, and name -> version of everything that is installed
    with it.
    """
    version = subprocess.check_output(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    if version not in WANTED:
        raise SystemExit(
            f"{python} is Python {version}; constraints are made for {' and '.join(WANTED)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.check_call([python, "-m", "venv", folder])
        report = Path(folder, "report.json")
        pip = [
            f"{folder}/bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--report",
            report,
        ]
        subprocess.check_call([*pip, *WANTED[version]], cwd=ROOT)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    # A local label such as +cpu names a build, not a version, and other machines have other
    # builds.
    return version, {
        m["name"].lower().replace("_", "-"): m["version"].split("+")[0]
        for m in found
        if m["name"] != "kvjax"
    }


def main() -> None:
    (old, older), (new, newer) = map(resolve, sys.argv[1:3])
    lines = [
        f"# Exact versions for Python {old} and {new}. Made by .ci/lock.py; see MAINTAINING.md."
    ]
    for name in sorted(older | newer):
        versions = {older.get(name), newer.get(name)} - {None}
        if len(versions) == 1:
            lines.append(f"{name}=={versions.pop()}")
        else:
            lines.append(f'{name}=={older[name]} ; python_version < "{new}"')
            lines.append(f'{name}=={newer[name]} ; python_version >= "{new}"')
    (ROOT / "constraints.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
