"""Evictors, retrievals and codes at equal memory: perplexity of long answers, and needles that
are asked for late.

    python benchmarks/evictors.py [MODEL_DIR] --text book.txt [--budget 256] [--prompt 1024] \\
        [--new-tokens 2048]
    python -m benchmarks.gsm8k MODEL --data DIR --shots 0 --chat --max-new-tokens 2048 \\
        --budget 256 --out gsm8k \\
        $(python benchmarks/evictors.py MODEL --list)

The model continues passages of a book at temperature 1, and decodes its own text through each
cache (as `long_generation.py`); then it answers questions on numbers hidden in a text, which it
sees after the text. "held" is what a cache takes at the end of the answer, in bytes of a layer
and row. Evictors hold the budget, codes hold everything, and retrievals hold everything and
read the budget. Random eviction and `fier` are the two to compare with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import named
import numpy as np
from layers import show
from long_generation import own_text, summary
from measured import write_rows

from kvjax import models, presets
from kvjax.evaluate import compare, passages, plan
from kvjax.evaluate.caches import make_rows
from kvjax.spec import default_dtype

RULES = (
    "random",
    "random_afresh",
    "knorm",
    "keydiff",
    "lagkv",
    "vatp",
    "criticalkv",
    "expected",
    "rkv",
    "triattention",
)
OTHERS = "streaming_llm h2o tova snapkv raas fier quest pariskv fier:store=turbo4 turboquant:bits=2 kivi logquant"


def caches(checkpoint: Any, prompt: int) -> list[str]:
    """The caches to compare; rules of `evict` also with the prompt kept beside the budget."""
    rope = checkpoint.config.rope
    theta = getattr(rope, "theta", 1e4)
    rules = [f"evict:rule={rule},rope_theta={theta}" for rule in RULES]
    kept = [
        f"{text},prompt={prompt}"
        for text in rules
        if "random," in text or "rkv" in text or "tri" in text
    ]
    return ["full", *rules, *kept, *OTHERS.split()]


def held(checkpoint: Any, text: str, budget: int, length: int) -> float:
    """Bytes of a layer and row at that capacity, as the mean over layers."""
    made = presets.find(text.partition(":")[0])
    policies, _ = presets.parse_with_budget(
        text, budget if made.has_budget and "budget=" not in text else None
    )
    cache = checkpoint.init_cache(policies, capacity=length, batch=1)
    return cache.nbytes.total / checkpoint.config.layers


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument(
        "--text", type=Path, help="UTF-8 file with a long text that the model never saw"
    )
    parser.add_argument(
        "--caches",
        nargs="*",
        type=named.cache,
        help="some of the caches; the first is the baseline. Default: all",
    )
    parser.add_argument(
        "--list", action="store_true", help="write the caches as arguments of other scripts"
    )
    parser.add_argument("--rows", type=int, default=4, help="passages that the model continues")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each passage")
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--needles", type=int, default=24, help="questions on hidden numbers")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument(
        "--parallel", type=int, default=4, help="caches that decode at the same time"
    )
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "evictors.json"
    )
    given = parser.parse_args(args)
    directory = given.model_dir or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    names = given.caches or caches(checkpoint, given.prompt)
    if given.list:
        print(" ".join(f"--cache {name}" for name in names))
        return
    if given.text is None:
        parser.error("--text is needed")
    about = measured.about(directory, given.text, given.dtype, [given.prompt], given.new_tokens)
    about |= {"budget": given.budget, "passages": given.rows, "needles": given.needles}
    words = np.array(
        measured.read_tokens(checkpoint, given.text, given.rows * given.prompt), np.int32
    )
    texts = own_text(checkpoint, words.reshape(given.rows, -1), given.new_tokens, seed=0)
    task = passages.Passages(tuple(map(tuple, texts.tolist())), given.new_tokens)
    one = plan.prepare(
        checkpoint, task, make_rows(names, budgets=[given.budget]), dtype=given.dtype
    )
    cells = plan.run(checkpoint, one, passages.score, batch=given.rows, parallel=given.parallel)
    late = compare(
        checkpoint,
        "needles",
        names,
        lengths=[given.prompt],
        samples=given.needles,
        budgets=[given.budget],
        parallel=given.parallel,
    )
    right = {cell.method: float(np.mean(cell.scores)) for cell in late.cells}
    length, rows = given.prompt + given.new_tokens, []
    for name, cell in zip(names, cells, strict=True):
        row = {**summary(cell, cells[0]), "held": held(checkpoint, name, given.budget, length)}
        rows.append(
            row
            | {
                "needles": next(
                    (score for key, score in right.items() if key.startswith(name)), None
                )
            }
        )
        show({key: str(value) for key, value in rows[-1].items()})
        write_rows(given.out, about, rows)


if __name__ == "__main__":
    main()
