"""What a model writes over thousands of tokens, read again through each cache: does a method drift?

    python benchmarks/long_generation.py MODEL --text book.txt [--prompt 2048] [--new-tokens 3072] [--budget 256]

With full attention the model goes on from passages of a book at temperature 1. Its own text is then decoded, token by
token, through every cache, and the perplexity of each quarter is compared with that of full attention: the ratio of a
method that drifts rises from quarter to quarter. The standard error is that of paired differences of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from layers import show

from kvjax import models
from kvjax.evaluate import perplexity, plan, recall
from kvjax.evaluate.caches import make_rows
from kvjax.evaluate.provenance import model_digest, replace_file
from kvjax.evaluate.store import Cell
from kvjax.generation import generate
from kvjax.models import Checkpoint
from kvjax.sampling import sampling

METHODS = (
    "full pariskv:sink=4,local=64,dense_below=0 fier quest streaming_llm freekv:sink=16,local=32,page=16 logquant kivi"
)
PARTS = 4


def own_text(checkpoint: Checkpoint, prompts: np.ndarray, new_tokens: int, seed: int) -> np.ndarray:
    """i32[B, T + new]: prompts and what the model writes after them at temperature 1, past stop tokens."""
    capacity = -(-(prompts.shape[1] + new_tokens) // 128) * 128
    cache = checkpoint.init_cache("full", capacity=capacity, batch=len(prompts))
    settings: dict[str, Any] = {"sampling": sampling(1.0), "key": jax.random.key(seed)}
    written = generate(checkpoint.model, cache, prompts, max_new_tokens=new_tokens, **settings)
    return np.concatenate([prompts, written.tokens], axis=1)


def summary(cell: Cell, full: Cell) -> dict[str, Any]:
    """Perplexity in all, and the ratio to full attention of each quarter with its standard error."""
    nats, gap = perplexity.nats(cell), perplexity.nats(cell) - perplexity.nats(full)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path, default=None, help="default: the shipped model")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument("--methods", default=METHODS, help="with spaces between; the first is compared with")
    parser.add_argument("--rows", type=int, default=4, help="passages that the model goes on from")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each")
    parser.add_argument("--new-tokens", type=int, default=3072)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "long_generation.json")
    given = parser.parse_args(args)
    directory = given.model_dir or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    words = np.array(recall.read_tokens(checkpoint, given.text, given.rows * given.prompt), np.int32)
    texts = own_text(checkpoint, words.reshape(given.rows, -1), given.new_tokens, given.seed)
    about = recall.about(directory, given.text, given.dtype, [given.prompt], given.new_tokens)
    head = json.dumps({**about, "budget": given.budget, "rows": given.rows, "seed": given.seed}, indent=1)[:-2]
    task = perplexity.Passages(tuple(tuple(row) for row in texts.tolist()), given.new_tokens)
    full: Cell | None = None
    rows = []
    for name in given.methods.split():
        made = make_rows([name], budgets=None if name in ("full", "logquant", "kivi") else [given.budget])
        digest = model_digest(directory)
        one = plan.prepare(checkpoint, task, made, dtype=given.dtype, model=digest)
        (cell,) = plan.run(checkpoint, one, perplexity.score, batch=given.rows)
        full = full or cell
        rows.append(summary(cell, full))
        show({key: str(value) for key, value in rows[-1].items()})
        lines = ",\n".join("    " + json.dumps(row) for row in rows)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(given.out, f'{head},\n "results": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
