"""Decodes thousands of tokens of a model's own text through each cache: does a method drift?

    python benchmarks/long_generation.py MODEL --text book.txt [--prompt 2048] \\
        [--new-tokens 3072] [--budget 256]

With full attention the model continues passages of a book at temperature 1. Its own text is
then decoded, token by token, through every cache, and the perplexity of each quarter is
compared with that of full attention: the ratio of a method that drifts rises from quarter to
quarter. The standard error is that of paired differences of tokens.

A folder named like `--out` without `.json` keeps the model's text and the results of each cache
with this code, so that an interrupted run continues, and other `--methods` are compared on the
same text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import measured
import named
import numpy as np
from layers import show
from measured import write_rows

from kvjax import models
from kvjax.evaluate import passages, plan
from kvjax.evaluate.caches import make_rows
from kvjax.evaluate.provenance import digest_json, json_text, replace_file, source_digest
from kvjax.evaluate.store import Cell
from kvjax.generation import generate
from kvjax.generation.sampling import sampling
from kvjax.models import Checkpoint
from kvjax.spec import default_dtype

METHODS = (
    "full pariskv:sink=4,local=64,dense_below=0 fier quest streaming_llm "
    "freekv:sink=16,local=32,page=16 logquant kivi"
)
PARTS = 4


def own_text(
    checkpoint: Checkpoint, prompts: np.ndarray, new_tokens: int, seed: int
) -> np.ndarray:
    """i32[B, T + new]: prompts and the model's continuations at temperature 1, past stop
    tokens.
    """
    capacity = -(-(prompts.shape[1] + new_tokens) // 128) * 128
    cache = checkpoint.init_cache("full", capacity=capacity, batch=len(prompts))
    settings: dict[str, Any] = {"sampling": sampling(1.0), "key": jax.random.key(seed)}
    written = generate(checkpoint.model, cache, prompts, max_new_tokens=new_tokens, **settings)
    return np.concatenate([prompts, written.tokens], axis=1)


def kept_text(
    folder: Path, made_by: dict[str, Any], make: Callable[[], np.ndarray]
) -> list[list[int]]:
    """The result of `make`, which runs once for the same model and settings; then it is kept in
    `folder`.
    """
    file = folder / f"text-{digest_json(made_by)[:12]}.json"
    if not file.is_file():
        replace_file(file, json_text(make().tolist()))
    tokens: list[list[int]] = json.loads(file.read_text())
    return tokens


def summary(cell: Cell, full: Cell) -> dict[str, Any]:
    """Total perplexity, and the ratio to full attention of each quarter with its standard
    error.
    """
    nats, gap = passages.nats(cell), passages.nats(cell) - passages.nats(full)
    parts = np.array_split(gap, PARTS, axis=1)
    errors = [np.std(part, ddof=1) / math.sqrt(part.size) for part in parts]
    return {
        "cache": cell.method,
        "tokens_read": cell.tokens_read,
        "perplexity": round(math.exp(nats.mean()), 4),
        "ratio_by_quarter": [round(math.exp(part.mean()), 4) for part in parts],
        "stderr_by_quarter": [round(float(error), 4) for error in errors],
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument(
        "--methods",
        type=named.caches(),
        default=METHODS,
        help="separated by spaces; the first is the baseline",
    )
    parser.add_argument("--rows", type=int, default=4, help="passages that the model continues")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each passage")
    parser.add_argument("--new-tokens", type=int, default=3072)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parallel", type=int, default=8, help="caches that decode at the same time"
    )
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "long_generation.json"
    )
    given = parser.parse_args(args)
    directory, folder = given.model_dir or models.shipped(), given.out.with_suffix("")
    checkpoint = models.load(directory, dtype=given.dtype)
    about = measured.about(directory, given.text, given.dtype, [given.prompt], given.new_tokens)
    about |= {"budget": given.budget, "rows": given.rows, "seed": given.seed}
    words = np.array(
        measured.read_tokens(checkpoint, given.text, given.rows * given.prompt), np.int32
    )
    prompts = words.reshape(given.rows, -1)
    made_by = {name: about[name] for name in ("model", "dtype", "steps", "seed")} | {
        "prompts": prompts.tolist()
    }
    texts = kept_text(
        folder, made_by, lambda: own_text(checkpoint, prompts, given.new_tokens, given.seed)
    )
    task = passages.Passages(tuple(map(tuple, texts)), given.new_tokens)
    asked = make_rows(given.methods, budgets=[given.budget])
    kept: dict[str, Any] = {
        "model": about["model"]["digest"],
        "out": folder / source_digest()[:12],
    }
    one = plan.prepare(checkpoint, task, asked, dtype=given.dtype, **kept)
    if refused := [cell.refused for cell in one.cells.values() if cell.refused]:
        parser.error("; ".join(refused))
    cells = plan.run(checkpoint, one, passages.score, batch=given.rows, parallel=given.parallel)
    rows = [summary(cell, cells[0]) for cell in cells]
    for row in rows:
        show({key: str(value) for key, value in row.items()})
    write_rows(given.out, about, rows, "results")


if __name__ == "__main__":
    main()
