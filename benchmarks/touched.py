"""Counts the groups of adjacent tokens that hold a selected one, on live queries and keys of a
model.

    python benchmarks/touched.py [MODEL_DIR] --text book.txt [--length 16384] [--steps 16] \\
        [--budgets 320,1088]

A TPU reads a group of 128 tokens as fast as one token, so a step that selects single tokens takes
as long as it touches groups: `kvjax.kernels_pallas.tpu.attend_groups`. Groups are aligned, and
those of all query heads that share a KV head are read once. "even" is the number that tokens
chosen at random would touch, "least" that of tokens side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import measured
import numpy as np
from hit_rates import POLICIES, pages_of
from layers import numbers
from named import names_of

from kvjax import models
from kvjax.evaluate.capture import capture
from kvjax.spec import default_dtype

SIZES = (16, 32, 64, 128)  # tokens of a group


def touched(slots: np.ndarray, size: int) -> np.ndarray:
    """i[...]: different groups of `size` slots among those of i32[..., N]; -1 is none.

    >>> touched(np.array([[0, 17, 3, -1], [5, 5, 6, 7]]), 16)
    array([2, 1])
    """
    groups = np.sort(np.where(slots >= 0, slots // size, -1), axis=-1)
    first = np.ones(groups.shape, bool)
    first[..., 1:] = groups[..., 1:] != groups[..., :-1]
    return np.asarray((first & (groups >= 0)).sum(axis=-1))


def even(selected: float, tokens: int, size: int) -> float:
    """Groups of `size` that so many of `tokens` touch if each is chosen at random."""
    return tokens / size * (1 - (1 - selected / tokens) ** size)


def row_of(slots: np.ndarray, tokens: int, size: int) -> dict[str, float]:
    """What the selections i32[L, T, B, K, N] of `tokens` touch."""
    found = touched(slots, size)
    selected = float(
        np.mean([len(set(one[one >= 0])) for one in slots.reshape(-1, slots.shape[-1])])
    )
    return {
        "size": size,
        "groups": tokens // size,
        "selected": round(selected, 1),
        "touched": round(float(found.mean()), 1),
        "most": int(found.max()),
        "even": round(even(selected, tokens, size), 1),
        "least": -(-int(selected) // size),
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument("--length", type=int, default=16384, help="tokens of context")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--budgets", type=numbers, default=[320, 1088])
    parser.add_argument("--methods", type=names_of(POLICIES), default=["fier", "pariskv"])
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "touched.json"
    )
    given = parser.parse_args(args)
    directory = given.model_dir or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    tokens = measured.read_tokens(checkpoint, given.text, given.length)
    live = capture(checkpoint, [tokens], lengths=[given.length], steps=given.steps)
    head = {
        **measured.about(directory, given.text, given.dtype, [given.length], given.steps),
        "what": "groups with a selected token, of a KV head; mean over layers that select, steps and heads",
    }
    rows = []
    for name, budget in product(given.methods, given.budgets):
        policies = POLICIES[name](budget)
        layers = live.layers[len(policies.first) :]
        slots = np.stack([pages_of(layer, live, policies.rest, 1) for layer in layers])
        for size in SIZES:
            rows.append({"method": name, "budget": budget, **row_of(slots, given.length, size)})
            print(rows[-1], flush=True)
        measured.write_rows(given.out, head, rows)


if __name__ == "__main__":
    main()
