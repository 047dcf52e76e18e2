"""The forms of the kernels for other GPUs, run on this one: without clusters, and with less
shared memory.

    python benchmarks/targets.py --out FOLDER [--minutes 8] [--only tests,131072x1]

A process for each part, so that one that fails leaves the others:
- tests: `pytest tests/kernels` of the kernels that select and attend, with the forms of compute
  capability 8.9, which has 99 KB of shared memory.
- 131072x1, 32768x8: `kvjax.evaluate.kernels` at this length and batch, with the forms of this
  GPU, then those without clusters on as many multiprocessors, then those of 8.9.

FOLDER gets targets.json, with the rows of all parts, and the output of each part. The last
lines printed are a table of clusters against none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = "select_1bit select_pages select_4bit top_k top_k_grouped most_voted attend_slots attend_zones steps hot_pages"
PARTS = "131072x1", "32768x8", "tests"


def measure(part: str, file: Path) -> None:
    """Measures a part in this process; the file is written after each row."""
    import jax

    from kvjax.evaluate import kernels

    sys.path.append(str(ROOT / "benchmarks"))
    from device_time import where

    from kvjax.kernels_pallas import simt

    jax.config.update("jax_compilation_cache_dir", str(file.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)
    here, (length, batch) = simt.target(), map(int, part.split("x"))
    forms = {
        "here": None,
        "parts": dataclasses.replace(here, clusters=False),
        "8.9": simt.stands_for("8.9"),
    }
    rows: list[dict[str, Any]] = []
    for name in kernels.works(length, batch):
        for form, target in forms.items():
            for row in kernels.measure(
                length, batch, target=target, only=[name], reference=form != "8.9"
            ):
                rows.append({**row, "form": form})
                print(json.dumps(rows[-1]), flush=True)
                file.write_text(json.dumps({**where(), "rows": rows}, indent=1))


def test(file: Path) -> None:
    """Runs the files of tests beside each other, each with a share of the memory."""
    env = os.environ | {"KVJAX_TEST_TARGET": "8.9", "XLA_FLAGS": "", "JAX_PLATFORMS": "cuda"}
    env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.08", "PYTHONPATH": str(ROOT)}
    running = {}
    for name in TESTS.split():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"tests/kernels/test_{name}.py",
        ]
        log = (file.parent / f"test_{name}.log").open("w")
        running[name] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    found = {}
    for name, process in running.items():
        process.wait()
        lines = (file.parent / f"test_{name}.log").read_text().strip().splitlines()
        found[name] = [line for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[
            -1:
        ]
        print(name, *found[name], sep="\n", flush=True)
        file.write_text(json.dumps(found, indent=1))


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds of clusters and of none, by operation and step."""
    lines = [
        f"{'what':<34}{'length x batch':<16}{'clusters':>10}{'none':>10}{'ratio':>7}{'8.9':>10}"
    ]
    by: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "us" not in row:
            continue
        where = f"{row['length']} x {row['batch']}"
        by.setdefault((row["what"], where), {})[row["form"]] = row["us"]
        for op in ("select_1bit", "select_pages", "attend_zones", "select_4bit", "most_voted"):
            own = [
                us
                for name, us in row["kernels"].items()
                if name == op or name.startswith(op + "_")
            ]
            if own:
                by.setdefault((f"{row['what']}: {op}", where), {})[row["form"]] = sum(own)
    for (what, where), us in by.items():
        a, b, c = (us.get(form, float("nan")) for form in ("here", "parts", "8.9"))
        lines.append(f"{what:<34}{where:<16}{a:10.2f}{b:10.2f}{b / a:7.2f}{c:10.2f}")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    parts = given.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part:
        file = given.out / f"{given.part}.json"
        return test(file) if given.part == "tests" else measure(given.part, file)
    end = time.monotonic() + 60 * given.minutes
    for part in parts:
        log = given.out / f"{part}.log"
        with log.open("w") as to:
            command = [sys.executable, __file__, "--out", str(given.out), "--part", part]
            env, left = os.environ | {"PYTHONPATH": str(ROOT)}, max(end - time.monotonic(), 5)
            try:
                subprocess.run(
                    command, stdout=to, stderr=to, check=False, timeout=left, env=env
                )
            except subprocess.TimeoutExpired:
                print(f"{part}: stopped after {given.minutes} minutes in all")
        print(f"--- {part}\n" + "\n".join(log.read_text().splitlines()[-15:]), flush=True)
    found = {
        part: json.loads(f.read_text())
        for part in PARTS
        if (f := given.out / f"{part}.json").exists()
    }
    (given.out / "targets.json").write_text(json.dumps(found, indent=1))
    print(
        table(
            [
                row
                for part in found.values()
                if isinstance(part, dict)
                for row in part.get("rows", ())
            ]
        )
    )


if __name__ == "__main__":
    main()
