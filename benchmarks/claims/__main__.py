"""Measures claims of papers on live queries and keys of a model.

    python -m benchmarks.claims [MODEL_DIR] --text book.txt --what queries,drift --out folder

recall: every selector, compared with exact top-k by context length. group_reduce: the rules by
which a GQA group shares a selection. groups: FIER's recall by layer, head and group size,
compared with Quest. queries: cosine of adjacent queries, and the share that FreeKV would
correct. logquant: coverage and loss for several sets of exact tokens. attended: attention to
the first and the newest tokens, and the overlap of adjacent steps. candidates: ParisKV's recall
with a tenth of the keys as candidates, by length. drift: recall during generation, of indexes
learnt from the prompt and of ParisKV. paris: the effect of each part of ParisKV, left out or
changed. votes: the same of the centroids of its vote.

drift, paris, votes and written_queries, which are queries of the text that a model writes, follow
the model as it generates at temperature 1; the others read a given text. A table goes to stdout;
with --out, measure_WHAT.json, .md and .svg go to a folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import measured
from benchmarks.claims import coverage, drift, figures
from benchmarks.claims.groups import compare, group_reduces, groups, selectors
from benchmarks.claims.live import capture_generated, summary, windows
from benchmarks.claims.queries import Turns, turns
from kvjax import models
from kvjax.cli.options import sizes
from kvjax.evaluate.capture import Live, capture, check_lengths
from kvjax.evaluate.recall import Reads
from kvjax.generation.sampling import sampling
from kvjax.spec import default_dtype
from kvjax.stores.demotion import LogSparse

COMPARED = {"recall": selectors, "group_reduce": group_reduces, "groups": groups}
FOLLOWED = (*COMPARED, "queries", "logquant", "attended", "candidates")
WRITTEN = ("drift", "paris", "votes", "written_queries")
MEASUREMENTS = (*FOLLOWED, *WRITTEN)


def main(args: Sequence[str] | None = None) -> int:
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
        "--what", default=",".join(MEASUREMENTS), help="separated by commas; default all"
    )
    parser.add_argument(
        "--length", default="1024,2048,4096", help="context lengths in tokens, ascending"
    )
    parser.add_argument(
        "--steps", type=int, default=32, help="consecutive live queries at each length"
    )
    parser.add_argument(
        "--budget", type=int, default=256, help="tokens that a step reads for each KV head"
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=None,
        help="tokens to generate for drift, paris, votes and written_queries; default: the last --length",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=42,
        help="W of logquant, which keeps 2W to 3W tokens exact",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args(args)
    kinds = given.what.split(",")
    if unknown := set(kinds) - set(MEASUREMENTS):
        parser.error(f"--what {', '.join(unknown)}: there are {', '.join(MEASUREMENTS)}")
    directory = given.model_dir or models.shipped()
    if {"queries", "written_queries"} & set(kinds) and given.steps < 2:
        parser.error(f"--steps {given.steps}: queries compares adjacent steps; give 2 or more")
    try:  # what is wrong with a request, before anything is measured
        lengths = sizes("--length", given.length)
        for kind in COMPARED.keys() & kinds:
            COMPARED[kind](given.budget)
        if "logquant" in kinds:
            LogSparse(window=given.window)
        checkpoint = models.load(directory, dtype=given.dtype)
        check_lengths(lengths, given.steps, checkpoint.config.max_positions)
        tokens = measured.read_tokens(checkpoint, given.text, lengths[-1])
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    new = given.new_tokens
    if new is None:
        new = min(
            lengths[-1], (checkpoint.config.max_positions or 2 * lengths[-1]) - lengths[-1]
        )
    if set(kinds) & set(WRITTEN) and new < given.steps:
        parser.error(f"--new-tokens {new} is less than --steps {given.steps}")

    live: dict[bool, Live] = {}
    if set(kinds) & set(FOLLOWED):
        live[False] = capture(checkpoint, [tokens], lengths=lengths, steps=given.steps)
    if set(kinds) & set(WRITTEN):
        key = jax.random.key(given.seed)
        written, _ = capture_generated(
            checkpoint, [tokens], steps=new, sampling=sampling(1.0), key=key
        )
        live[True] = windows(written, min(9, new // given.steps), given.steps)
    head = measured.about(directory, given.text, given.dtype, lengths, given.steps)
    for kind in kinds:
        settings, found, figure = measure(
            kind, live[kind in WRITTEN], given.budget, lengths, given.window
        )
        if kind in WRITTEN:
            settings |= {
                "prompt": lengths[-1],
                "new_tokens": new,
                "temperature": 1.0,
                "seed": given.seed,
            }
        table = measured.markdown(rows(found))
        print(f"{kind}\n\n{table}", flush=True)
        if given.out is not None:
            results = {
                n: summary(one) if isinstance(one, Reads) else one.summary()
                for n, one in found.items()
            }
            measured.write(given.out, kind, {**head, **settings}, results, table, figure)
    return 0


def measure(
    kind: str, live: Live, budget: int, lengths: Sequence[int], window: int
) -> tuple[dict[str, Any], Mapping[str, Any], Any]:
    """Settings, results by name, and the figure."""

    def note(done: int, total: int, name: str) -> None:
        print(f"{kind}: {done} of {total}, {name}", file=sys.stderr, flush=True)

    if kind in COMPARED:
        found: Any = compare(live, COMPARED[kind](budget), progress=note)
        draw = {
            "recall": figures.recall_by_length,
            "group_reduce": figures.of_rules,
            "groups": figures.maps,
        }[kind]
        return {"budget": budget}, found, draw(found)
    if kind in ("queries", "written_queries"):
        turned = turns(live)
        return {}, {"cosine of adjacent queries": turned}, figures.turning(turned)
    if kind == "logquant":
        found = coverage.logquant(live, window=window, progress=note)
        return (
            {"window": window},
            found,
            figures.dots(found, ("mass", "top", "weights", "outputs")),
        )
    if kind == "attended":
        found = {"attention": coverage.attended(live)}
        return {}, found, figures.dots(found, ("first_two", "newest", "overlap"))
    if kind == "candidates":
        found = drift.by_length(live, lengths)
        return {"share": 0.1}, found, figures.dots(found, ("recall", "mass", "error"))
    if kind == "drift":
        found = drift.drift(live, prompt=lengths[-1], progress=note)
        return {}, found, figures.drifting(found, prompt=lengths[-1])
    found = (
        drift.votes(live, progress=note)
        if kind == "votes"
        else drift.ablation(live, progress=note)
    )
    return {}, found, figures.dots(found, ("recall", "mass", "error"))


def rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each case; for turns, a row for each threshold tau."""
    made = []
    for name, one in found.items():
        if isinstance(one, Turns):
            shares = one.summary()
            for tau, heads in shares["corrected_heads"].items():
                steps = shares["corrected_steps"][tau]
                made.append(
                    {"tau": tau, "heads corrected": heads, "layers and steps corrected": steps}
                )
        else:
            made.append({"": name, **one.row()})
    return made


if __name__ == "__main__":
    sys.exit(main())
