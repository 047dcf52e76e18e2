"""Attention with heads of 256 beside the same bytes in heads of 128, by query heads that share a
KV head, in one run.

    python benchmarks/heads_of_256.py [--cells 131072x1,32768x8] [--groups 4,16,8,12]
    [--parts attend,steps,select] [--tune] [--out FILE]

- "steps": a decode step of attention of one layer, as `decode_step.py` measures it, with 4 KV
  heads of 256 and with 8 of 128, and as many query heads for each KV head. `--methods` names the
  caches.
- "attend": `attend_zones` alone by block sizes. Each output is compared with the reference's;
  `--tune` writes block sizes that win by 3 % or more to kernels_pallas/tuned.json.
- "select": `select_1bit` alone by block sizes, for the first of `--groups`; what it selects is
  compared with the reference's.

A row is written when it is measured. Without a GPU (`--quick`) one small step shows that the
script works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attend_zones
import decode_step
import jax
import jax.numpy as jnp
import select_1bit
from hybrid_step import cells
from layers import numbers, options, out_of, parse, save, show
from named import names_of
from sweep import Sweep

from kvjax import CacheSpec
from kvjax.kernels_pallas import tuned

WIDTHS = {256: 4, 128: 8}  # head sizes, with KV heads that have as many bytes
RECENT = 256  # slots of the recent block of FIER's cache


def steps(given: Any, length: int, batch: int) -> Iterator[dict[str, Any]]:
    for group in given.groups:
        for method in given.methods:
            for head_dim, kv_heads in WIDTHS.items():
                spec = CacheSpec(
                    batch=batch,
                    q_heads=kv_heads * group,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    capacity=length,
                    dtype=jnp.bfloat16,
                )
                most_layers = 2 if given.quick else 16
                found = decode_step.measure(
                    method, "default", spec, given.budget, given.calls, most_layers
                )
                yield {"part": "step", "D": head_dim, "G": group} | found


def attend(given: Any, length: int, batch: int) -> Iterator[dict[str, Any]]:
    selected = given.budget - 1
    settled: list[tuned.Asked] | None = [] if given.tune else None
    for group in given.groups:
        for head_dim, kv_heads in WIDTHS.items():
            sweep = Sweep(None, settled) if head_dim == 256 else Sweep(1)
            sizes = (batch, kv_heads, group, 1, length, RECENT, 1, 0, head_dim, selected)
            found = attend_zones.measure(sweep, *sizes, "bfloat16")
            yield {"part": "attend", "method": "fier", "length": length, "batch": batch} | found


def select(given: Any, length: int, batch: int) -> Iterator[dict[str, Any]]:
    for head_dim, kv_heads in WIDTHS.items():
        sweep = Sweep(None if head_dim == 256 else 1)
        sizes = (batch, kv_heads, given.groups[0], length, RECENT, given.budget, head_dim)
        found = select_1bit.measure(sweep, *sizes, "mean_softmax")
        yield {"part": "select", "method": "fier", "length": length, "batch": batch} | found


PARTS = {"attend": attend, "steps": steps, "select": select}


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "heads_of_256.json", calls=20)
    parser.add_argument("--cells", type=cells, default=cells("131072x1,32768x8"))
    parser.add_argument("--groups", type=numbers, default=[4, 16, 8, 12])
    parser.add_argument(
        "--methods", type=names_of(decode_step.METHODS), default=["fier", "quest"]
    )
    parser.add_argument("--parts", type=names_of(PARTS, "part"), default=list(PARTS))
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--tune", action="store_true", help="write to kernels_pallas/tuned.json"
    )
    given = parse(parser, args)
    if given.quick:
        given.cells, given.groups, given.parts, given.budget = [[512, 1]], [12], ["steps"], 160
    what = (
        "attention of a layer with 4 KV heads of 256 beside 8 of 128, G query heads for each; "
        f"budget {given.budget}; normal random keys, values and queries; us: device time of the "
        "kernels, parts: by kernel, all: by block sizes"
    )
    key = ("part", "method", "D", "G", "length", "batch", "backend")
    for part in given.parts:
        for length, batch in given.cells:
            for row in PARTS[part](given, length, batch):
                row["backend"] = jax.default_backend()
                show(row)
                save(out_of(given, "heads_of_256.json"), what, [row], key)


if __name__ == "__main__":
    main()
