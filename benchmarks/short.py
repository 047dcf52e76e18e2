"""Finds the caches in which attending to everything is faster than selecting, and writes
kvjax/policies/short.json.

    python benchmarks/decode_step.py --lengths 2048,4096,8192,12288,16384,24576,32768 \\
        --batches 1,2,8 \\
        --methods full,fier,quest,pariskv --implementations default --dense-capacity 0 \\
        --out short_rows.json
    python benchmarks/short.py short_rows.json

For each selector it writes the largest number of bytes of keys and values, of all rows of a
layer, up to which a step of `full` took no longer in any case that was measured. Sizes without
a measurement of one row do not count: there a selection costs least.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_step import policies

from kvjax.policies.short import FILE

# of keys and values in the layer that decode_step.py measures
BYTES_PER_TOKEN = 2 * 8 * 128 * 2


def bounds(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By device and selector, the entry of short.json that these rows of decode_step.py give."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    rows = [
        row for row in rows if row["implementation"] == "default" and row["backend"] == "gpu"
    ]
    full = {
        (row["device"], row["length"], row["batch"]): row["us"]
        for row in rows
        if row["method"] == "full"
    }
    for method in ("fier", "quest", "pariskv"):
        selector = type(policies(2048, 0)[method].selector).__name__  # type: ignore[attr-defined]
        own = [row for row in rows if row["method"] == method and row["policy"] == "Retrieval"]
        for device in {row["device"] for row in own}:
            here = [row for row in own if row["device"] == device]
            alone = {tokens(row) for row in here if row["batch"] == 1}
            for row in sorted((row for row in here if tokens(row) in alone), key=tokens):
                if full[device, row["length"], row["batch"]] > row["us"]:
                    break
                versions = {name: row["versions"][name] for name in ("jax", "jaxlib")}
                entry = {
                    "bytes": tokens(row) * BYTES_PER_TOKEN,
                    "date": row["date"][:10],
                    "versions": versions,
                }
                found.setdefault(device, {})[selector] = entry
    return found


def tokens(row: dict[str, Any]) -> int:
    size: int = row["length"] * row["batch"]
    return size


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="the output file of decode_step.py")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args(args)
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    known |= bounds(json.loads(given.rows.read_text())["rows"])
    devices = []
    for device, entries in known.items():
        lines = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()
        )
        devices.append(f"  {json.dumps(device)}: {{\n{lines}\n  }}")
        print(
            device, {name: entry["bytes"] // BYTES_PER_TOKEN for name, entry in entries.items()}
        )
    given.out.write_text("{\n" + ",\n".join(devices) + "\n}\n")


if __name__ == "__main__":
    main()
