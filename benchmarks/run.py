"""Runs the plan of benchmarks, a part at a time, and skips what this code has already measured.

    python -m benchmarks.run --out measured --minutes 9 [--parts kernels,steps] \\
        [--match fier] [--parallel 8] [--list]
    python -m benchmarks.run --out measured --parts checkpoint --checkpoint DIR --text BOOK \\
        --other BOOK --gsm8k DIR
    python -m benchmarks.run --out measured --smoke

Each cell of `plan.py` is a process with a time limit. A cell begins only if there is time for
its limit, or for the time that it took before; one that still runs at the end of `--minutes` is
stopped. All share a cache of compiled programs. After each cell a line is printed and
OUT/cells.json is written, with the digest of the code and the kind of device: so a second call
continues where the first stopped, and a call with other code or another device starts over.
Results are in OUT/results, the output of cells in OUT/logs; nothing else needs to be kept.

With `--parallel 8`, work that is not timed comes first, eight processes at a time: tests of
kernels, measurements of quality, and compilation. They share the GPU's memory, and most cells
of a published model decode eight caches at the same time: three such cells of a 1.5B model were
too many for 139 GiB. Most of the time of a short cell is compiling, on one core. So timed cells
are first run briefly, to fill the cache of programs; their times in that run are discarded.

`--smoke` runs each command on the CPU with its smallest sizes, to find a wrong option or a
missing package; with `--one`, only one of the cells that differ by method or length alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.plan import BESIDE_OTHERS, PARTS, ROOT, WARMING, Cell, cells

ASK = """
import jax
found = jax.devices()
print(found[0].platform, len(found), f"{found[0].device_kind}, jax {jax.__version__}", sep="|")
"""
SOURCES = ("kvjax", "kernels_pallas", "models", "benchmarks")
THIS = (
    "plan.py",
    "run.py",
)  # of benchmarks/, not in the digest: a cell's state has its own command
KEPT = ("ok", "failed", "over its limit")  # outcomes of cells that are not run again
KNOWN, NO_TIME = "known before", "for which no time was left"
MEMORY = 0.92  # of the GPU's, for all processes; the rest is for their programs
RULER = "ruler-synthetic"  # of which one task needs some 3000 tokens


def digest_of_code() -> str:
    """A digest of the Python files that decide what is measured, and of the block sizes."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted(
            (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("tuned.json"))
        ):
            if "results" not in file.parts and not (
                folder == "benchmarks" and file.name in THIS
            ):
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def devices() -> tuple[str, int, str]:
    """Platform, number and kind of the devices that a cell finds, and the version of jax.

    A process of its own finds out, as this one must not hold a GPU's memory.
    """
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"jax finds no device here: {done.stderr.strip().splitlines()[-1]}")
    platform, count, kind = done.stdout.splitlines()[-1].split("|")
    return platform, int(count), kind


class State:
    """The outcome of each cell, in OUT/cells.json, which is written whole after each.

    An outcome of other code, of another device or of another jax does not count as known.
    """

    def __init__(self, file: Path, code: str, device: str):
        self.file, self.made_by, self.lock = (
            file,
            {"code": code, "device": device},
            threading.Lock(),
        )
        self.cells: dict[str, dict[str, Any]] = (
            json.loads(file.read_text())["cells"] if file.is_file() else {}
        )

    def is_done(self, name: str, asked: str) -> bool:
        cell = self.cells.get(name)
        made_by = {**self.made_by, "asked": asked}
        return cell is not None and made_by.items() <= cell.items() and cell["status"] in KEPT

    def seconds(self, cell: Cell) -> float:
        """Seconds that the cell took, with any code; else its limit."""
        earlier = self.cells.get(name_of(cell), {})
        return 1.2 * earlier["seconds"] + 5 if earlier.get("status") == "ok" else cell.seconds

    def keep(self, name: str, row: dict[str, Any]) -> None:
        self.cells[name] = {**row, **self.made_by}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({"cells": self.cells}, indent=1) + "\n")
        part.replace(self.file)


def name_of(cell: Cell) -> str:
    """The name under which its outcome is kept: "steps: top_k"."""
    return f"{cell.part}: {cell.name}"


def asked_of(cell: Cell, given: argparse.Namespace) -> str:
    """The command of a cell, for which its outcome holds."""
    return f"{cell.command} {cell.smoke}" if given.smoke else cell.command


def cannot_run(cell: Cell, places: dict[str, str], count: int) -> str | None:
    """The inputs or devices that a cell lacks, in words; None if it lacks nothing."""
    if missing := [need for need in cell.needs if need not in places]:
        return f"{name_of(cell)} needs {', '.join(f'--{need}' for need in missing)}"
    return (
        f"{name_of(cell)} needs two devices" if cell.part == "devices" and count < 2 else None
    )


def run(
    cell: Cell, words: Sequence[str], env: dict[str, str], log: Path, limit: float
) -> dict[str, Any]:
    """Runs a cell's command, with all that it starts, for at most `limit` seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            code, status = None, "cut"
        finally:
            stop(process)
    row = {
        "status": status,
        "exit": code,
        "seconds": round(time.monotonic() - start, 1),
        "limit": round(limit),
    }
    return {
        **row,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(words),
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started, if they still run."""
    for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        try:
            process.wait(timeout=patience)
            break
        except subprocess.TimeoutExpired:
            continue


def environment(
    cell: Cell, given: argparse.Namespace, *, parallel: bool = False
) -> dict[str, str]:
    """The environment of a cell's process; with `parallel`, the process gets only its share of
    the GPU's memory.
    """
    share = (
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / given.parallel:.2f}", **BESIDE_OTHERS}
        if parallel
        else {}
    )
    env = {
        **os.environ,
        **share,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str((given.cache or given.out / "cache").resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        **cell.env,
    }
    return env | {"JAX_PLATFORMS": "cpu"} | cell.smoke_env if given.smoke else env


def run_beside(
    untimed: Sequence[Cell], warmed: Sequence[Cell], given: argparse.Namespace, state: State,
    places: dict[str, str], until: float,
) -> list[str]:  # fmt: skip
    """Runs cells that are not timed, and others briefly, `given.parallel` at a time; the
    statuses of the former.

    A cell that fails in its brief run fails again when it is measured, and is reported then.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.parallel) as pool:

        def warm(cell: Cell) -> None:
            words = cell.words(places | {"out": folder}, cell.smoke if given.smoke else WARMING)
            if (left := until - time.monotonic()) > 0:
                env = environment(cell, given, parallel=True)
                run(cell, words, env, Path(folder, "logs", cell.name), min(cell.seconds, left))

        jobs = [
            pool.submit(measure, cell, given, state, places, until, parallel=True)
            for cell in untimed
        ]
        for job in [pool.submit(warm, cell) for cell in warmed]:
            job.result()  # raises what a thread raised
        if warmed:
            print(
                f"compiled beforehand for {len(warmed)} cells | {time.monotonic() - start:.0f} s",
                flush=True,
            )
        return [job.result() for job in jobs]


def inputs(given: argparse.Namespace) -> dict[str, str]:
    """The values of the names in braces: the paths of the inputs and of the results, and a
    task.

    The code is 120 modules of Python's own library; the docs are those of kvjax, without their
    tables. With --smoke, this writes small inputs for those that were not given.
    """
    folder = given.out.resolve() / "inputs"
    found: dict[str, Path] = {
        name: path
        for name in ("checkpoint", "text", "other", "gsm8k")
        if (path := getattr(given, name)) is not None
    }
    found["code"] = write(
        folder / "code.txt", joined(Path(os.__file__).parent, "*.py", most=120)
    )
    pages = "".join(joined(place, "*.md") for place in (ROOT, ROOT / "docs"))
    found["docs"] = write(
        folder / "docs.txt", re.sub(r"^\|.*\n", "", pages, flags=re.MULTILINE)
    )
    if given.smoke:
        found.setdefault("checkpoint", ROOT / "kvjax" / "data" / "kvjax-26m")
        if "text" not in found:
            found["text"] = write(folder / "text.txt", joined(ROOT / "docs", "*.md"))
        found.setdefault("other", found["text"])
        if "gsm8k" not in found:
            lines = (
                {"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
                for n in range(3)
            )
            found["gsm8k"] = write(
                folder / "gsm8k" / "test.jsonl", "\n".join(map(json.dumps, lines)) + "\n"
            ).parent
    return {
        **{name: str(path.resolve()) for name, path in found.items()},
        "ruler_task": "variables" if given.smoke else RULER,
        "out": str(given.out.resolve() / "results"),
    }


def joined(folder: Path, pattern: str, most: int | None = None) -> str:
    """The text of the files of a folder, at most `most`, in the order of their names."""
    return "".join(
        file.read_text(encoding="utf-8") for file in sorted(folder.glob(pattern))[:most]
    )


def write(path: Path, text: str) -> Path:
    """Writes a file, its folder too, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def last_line(log: Path) -> str:
    lines = [
        line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()
    ]
    return lines[-1][:120] if lines else "it printed nothing"


def options() -> argparse.ArgumentParser:
    def parts(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for all results; a later call continues"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="the last cell has ended by then"
    )
    parser.add_argument(
        "--parts", type=parts, default=list(PARTS), help=f"in this order; of {', '.join(PARTS)}"
    )
    parser.add_argument("--match", default="", help="only cells with this text in their names")
    parser.add_argument("--checkpoint", type=Path, help="a model in the format of Hugging Face")
    parser.add_argument(
        "--text", type=Path, help="UTF-8 file with a long text that the model never saw"
    )
    parser.add_argument(
        "--other", type=Path, help="another such text, to calibrate shared selections on"
    )
    parser.add_argument("--gsm8k", type=Path, help="folder with test.jsonl as published")
    parser.add_argument(
        "--cache", type=Path, help="folder of compiled programs; default OUT/cache"
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=0,
        metavar="N",
        help="first run untimed work, N cells at a time",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="also run cells that this code has measured or failed at",
    )
    parser.add_argument(
        "--list", action="store_true", help="print what would run, and run nothing"
    )
    parser.add_argument(
        "--one", action="store_true", help="one cell of each script and command"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="each command with its smallest sizes, on the CPU"
    )
    return parser


def select(given: argparse.Namespace) -> list[Cell]:
    """The cells that the options name, in the order of --parts."""
    by_part = {part: [cell for cell in cells() if cell.part == part] for part in PARTS}
    asked = [
        cell for part in given.parts for cell in by_part[part] if given.match in name_of(cell)
    ]
    if given.one:
        asked = list({cell.kind: cell for cell in reversed(asked)}.values())[::-1]
    return asked


def measure(
    cell: Cell,
    given: argparse.Namespace,
    state: State,
    places: dict[str, str],
    until: float,
    *,
    parallel: bool = False,
) -> str:
    """Runs a cell, keeps and prints its outcome, and returns its status. With `parallel`, it
    may take twice as long.
    """
    name, left, longest = name_of(cell), until - time.monotonic(), (1 + parallel) * cell.seconds
    if left < (min(state.seconds(cell), 120) if cell.resumes else state.seconds(cell)):
        return NO_TIME
    limit = min(longest, left)
    log = (
        given.out
        / "logs"
        / f"{name.replace(': ', '_').replace(' ', '_').replace('/', '_')}.txt"
    )
    words = cell.words(places, cell.smoke if given.smoke else "")
    row = run(cell, words, environment(cell, given, parallel=parallel), log, limit)
    if row["status"] == "cut" and limit == longest and not cell.resumes:
        row["status"] = "over its limit"
    line = [name, row["status"], f"{row['seconds']:.0f} s"]
    with state.lock:
        state.keep(name, {**row, "asked": asked_of(cell, given)})
        print(
            " | ".join(line if row["status"] == "ok" else [*line, last_line(log)]), flush=True
        )
    return str(row["status"])


def main(args: Sequence[str] | None = None) -> int:
    parser = options()
    given, start = parser.parse_args(args), time.monotonic()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in ("checkpoint", "text", "other", "gsm8k"):
        if (path := getattr(given, name)) is not None and not path.exists():
            parser.error(f"--{name} {path}: there is no such file or folder")
    asked = select(given)
    if given.list:
        for cell in asked:
            print(f"{name_of(cell)} | {cell.seconds} s | {cell.command}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `stop`
    platform, count, device = ("cpu", 2, "smoke") if given.smoke else devices()
    if platform != "gpu" and not given.smoke:
        parser.error(
            f"this measures a GPU, and jax finds {platform} ({device}); --smoke tries the commands without one"
        )
    state, places = State(given.out / "cells.json", digest_of_code(), device), inputs(given)
    left_out = [line for cell in asked if (line := cannot_run(cell, places, count))]
    asked = [cell for cell in asked if not cannot_run(cell, places, count)]
    ready = [
        cell
        for cell in asked
        if given.again or not state.is_done(name_of(cell), asked_of(cell, given))
    ]
    until = start + 60 * given.minutes - 6  # a process has 5 seconds to end
    counts = Counter({KNOWN: len(asked) - len(ready)})
    if given.parallel:
        untimed, warmed = (
            [cell for cell in ready if not cell.timed],
            [cell for cell in ready if cell.warms],
        )
        counts.update(run_beside(untimed, warmed, given, state, places, until))
        ready = [cell for cell in ready if cell.timed]
    counts.update(measure(cell, given, state, places, until) for cell in ready)
    order = ("ok", "failed", "cut", "over its limit", KNOWN, NO_TIME)
    print(
        "; ".join(f"{counts[what]} {what}" for what in order if counts[what])
        or "nothing to run",
        flush=True,
    )
    for line in left_out:
        print(f"left out: {line}")
    return 1 if counts["failed"] or counts["over its limit"] else 0


if __name__ == "__main__":
    sys.exit(main())
