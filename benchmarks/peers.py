"""What pip brings beside kvjax: decode steps, their parts and prompts in a layer of Llama-3.1-8B,
by the kernels of each library, one after the other on one GPU.

    pip install amass-kv flashinfer-python flash-attn3-jax tokamax torch
    python benchmarks/peers.py [--libraries kvjax,amass-kv] [--lengths 131072] [--batches 1,8]

Each library runs in a process of its own (`beside/`), by its documented calls at their best
setting, and each call's output is compared with a reference before it is timed. A library that is
not installed, or does not run here, gets a row that says why. All times are of kernels alone: by
the profiler of jax or of torch, the median of `--calls` calls of as many layers as read twice the
size of the L2 cache. Where two kernels run at the same time, it counts once. `graph_us` is the
time of a layer in a replayed CUDA graph, with the gaps between kernels, where torch can record
one.

Budgets are tokens: each KV head attends to `--budget` of them in all, sinks and newest included.
kvjax's steps write the new token, which those of other libraries leave to another call. The first
call of FlashInfer's and amass-kv's kernels compiles them with nvcc, some minutes in all.

Without a GPU (`--quick`) sizes are small and the clock is the host's: that shows which calls run.
amass-kv then needs triton and `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from beside.cases import Case
from layers import numbers, options, out_of, parse, show
from measured import write_rows
from named import names_of

from kvjax.evaluate.provenance import json_text, provenance

# A library's name at PyPI, and what measures it.
LIBRARIES = {
    "kvjax": "ours:rows",
    "jax": "jax_attention:rows",
    "torch": "torch_attention:rows",
    "flashinfer-python": "flashinfer_kernels:rows",
    "amass-kv": "amass_kernels:rows",
    "flash-attn3-jax": "jax_attention:flash_rows",
    "tokamax": "tokamax_attention:rows",
}
WHAT = (
    "kernels of several libraries in a layer of Llama-3.1-8B (32 query heads, 8 KV heads, heads "
    "of 128, bfloat16), normal random queries, keys and values; us: device time of the kernels"
)
QUICK = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "calls": 1, "quick": True}
QUICK_LENGTH, QUICK_BUDGET = 1024, 256


def cases(given: Any) -> list[Case]:
    if given.quick:
        return [Case(QUICK_LENGTH, 1, QUICK_BUDGET, **QUICK)]
    sizes = [(length, batch) for length in given.lengths for batch in given.batches]
    return [Case(length, batch, given.budget, calls=given.calls) for length, batch in sizes]


def measure(library: str, given: Any) -> None:
    """Writes rows of all cases to the file `given.rows`, one a line, as they are measured."""
    module, _, name = LIBRARIES[library].partition(":")
    rows: Callable[[Case], Iterator[dict[str, Any]]]
    rows = getattr(import_module(f"beside.{module}"), name)
    with given.rows.open("w") as file:
        for case in cases(given):
            for row in rows(case):
                file.write(json_text(row).rstrip() + "\n")
                file.flush()


def run(library: str, options: Sequence[str], limit: int) -> tuple[list[dict[str, Any]], str]:
    """The rows of a library, measured by another process, and why there are no more; "" if all
    were measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder) / "rows", Path(folder) / "errors"
        command = [
            sys.executable,
            __file__,
            "--measure",
            library,
            "--rows",
            str(file),
            *options,
        ]
        with errors.open("w") as told:
            try:
                ended = subprocess.run(
                    command, stdout=told, stderr=told, timeout=limit, check=False
                )
                why = "" if ended.returncode == 0 else last_line(errors)
            except subprocess.TimeoutExpired:
                why = f"it took over {limit} s"
        lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines], why


def last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it ended without a word"


def save(out: Path | None, library: str, rows: list[dict[str, Any]], why: str) -> None:
    """Puts a library's rows in the file instead of its older ones; without any row, the reason.
    What was measured before stays if nothing was measured now.
    """
    if out is None:
        return
    before = json.loads(out.read_text()) if out.is_file() else {"rows": [], "not_run": {}}
    reasons = before["not_run"]
    reasons.pop(library, None)
    if why:
        reasons[library] = {"why": why, **provenance()}
    measured = {(row["library"], row["length"], row["batch"]) for row in rows}
    kept = [
        row
        for row in before["rows"]
        if (row["library"], row["length"], row["batch"]) not in measured
    ]
    made = provenance()
    write_rows(
        out,
        {"what": WHAT, "not_run": reasons},
        kept + [{**row, **made} for row in rows],
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "peers.json", calls=20)
    parser.add_argument(
        "--libraries", type=names_of(LIBRARIES, "library"), default=list(LIBRARIES)
    )
    parser.add_argument("--lengths", type=numbers, default=[131072])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=400, help="seconds for a library")
    parser.add_argument("--measure", choices=LIBRARIES, help="only this one, in this process")
    parser.add_argument("--rows", type=Path, help="the file of --measure")
    if args is None:
        args = sys.argv[1:]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # leaves others the GPU's memory
    given = parser.parse_args(args) if "--measure" in args else parse(parser, args)
    if given.measure:
        measure(given.measure, given)
        return
    for library in given.libraries:
        rows, why = run(library, args, given.limit)
        for row in rows:
            show({**row, "packages": {}, "call": ""})
        if why:
            print(f"{library} | not run further: {why}", flush=True)
        save(out_of(given, "peers.json"), library, rows, why)


if __name__ == "__main__":
    main()
