"""Selections over TurboQuant's codes, and by their signs, beside FIER's own, on live queries
and keys of a model.

    python benchmarks/turbo_codes.py [MODEL_DIR] --text book.txt [--length 2048] \\
        [--steps 16] [--budget 128]

Each row is a selector over a store, in every layer. Recall, mass and error are those of
`kvjax.evaluate.recall`; "held" is what a token of the history takes in a layer, keys, values
and index, and "index" how much of that is read of every token, at each step. On the shipped
model with the defaults it takes about two minutes on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import measured
from layers import show
from measured import write_rows

from kvjax import models
from kvjax.evaluate import recall
from kvjax.evaluate.capture import capture
from kvjax.policies import Retrieval
from kvjax.selectors import Exact, Fier, MinMaxPages, Paris, SignPlane
from kvjax.spec import default_dtype
from kvjax.stores import Dense, Quantized, TurboQuant

TURBO = {f"turbo{bits}": TurboQuant(bits=bits) for bits in (4, 3, 2)} | {
    "turbo8v4": TurboQuant(bits=8, value_bits=4)
}
STORES = {
    "dense": Dense(),
    **TURBO,
    "kivi4": Quantized(bits=4, key_group=32),
    "kivi2": Quantized(bits=2, key_group=32),
}
OWN = {
    "exact": Exact(),
    "fier": Fier(),
    "quest": MinMaxPages(page=16, pending="box"),
    "pariskv": Paris(),
}
CELLS = (
    *(("exact", store) for store in STORES),
    *(("fier", store) for store in STORES),
    *((name, "turbo4") for name in ("quest", "pariskv")),
    *(("signs", f"turbo{bits}") for bits in (4, 3, 2)),
)


def policy_of(selector: str, store: str, budget: int) -> Retrieval:
    made = recall.retrieval(OWN.get(selector, Fier()), budget)
    return replace(
        made, store=STORES[store], selector=made.selector if selector in OWN else SignPlane()
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        help="UTF-8 file with a long text that the model never saw",
    )
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of context at the end of the steps"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "turbo_codes.json"
    )
    given = parser.parse_args(args)
    directory = given.model_dir or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    tokens = measured.read_tokens(checkpoint, given.text, given.length)
    live = capture(checkpoint, [tokens], lengths=[given.length], steps=given.steps)
    head = {
        **measured.about(directory, given.text, given.dtype, [given.length], given.steps),
        "what": "selections of equal budget by selector and store; means over layers, steps and heads",
        "budget": given.budget,
    }
    rows, spec = [], live.layers[0].spec
    for selector, store in CELLS:
        policy = policy_of(selector, store, given.budget)
        row = {
            "selector": selector,
            "store": store,
            "held": policy.bytes_per_token(spec),
            "index": float(policy.selector.bytes_read(spec, 1)),
            **recall.reads(live, policy).row(),
        }
        rows.append(row)
        show({key: str(value) for key, value in row.items()})
        write_rows(given.out, head, rows)


if __name__ == "__main__":
    main()
