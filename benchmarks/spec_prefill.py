"""Answers of a model that reads a part of its prompt, chosen by a draft, and of one that reads
the whole prompt.

    python benchmarks/spec_prefill.py MODEL [--draft DIR] [--layers 4,8] [--lengths 4096]
    [--keep 0.1,0.2,0.3]

The parts are chosen by `kvjax.generation.SpecPrefill`. One needle, or one of eight, is hidden
in a text; the question ends the prompt. `score` is the share of right answers with the cache
`full`, `found` the share of prompts of which the answer is read. The drafts are the model's own
first `--layers` layers, and the model of `--draft`, which must have the same tokenizer. A row
with keep 1 is the whole prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from layers import out_of, save, show

import kvjax
from kvjax import models
from kvjax.evaluate.tasks import make_tasks
from kvjax.generation import decode, prefill
from kvjax.generation.spec_prefill import best_chunks, importance
from kvjax.models import Checkpoint


def answer(
    checkpoint: Checkpoint, tokens: np.ndarray, positions: np.ndarray, capacity: int, new: int
) -> str:
    cache = checkpoint.init_cache(kvjax.Full(), capacity=capacity)
    logits, cache = prefill(
        checkpoint.model, cache, tokens[None, positions], positions=positions[None]
    )
    stop = checkpoint.stop_tokens
    return checkpoint.decode(
        decode(checkpoint.model, cache, logits, max_new_tokens=new, stop_tokens=stop).rows[0]
    )


def measure(
    checkpoint: Checkpoint, drafts: dict[str, Any], hidden: int, length: int, given: Any
) -> list[dict[str, Any]]:
    about: Any = {
        "lengths": [length],
        "samples": given.samples,
        "text": given.text,
        "question": "prefilled",
    }
    (task,) = make_tasks([f"needles:hidden={hidden}"], **about)
    found: dict[tuple[str, float], list[tuple[float, bool]]] = {}
    for example in task.examples(checkpoint.tokenizer):
        tokens = np.array(example.prompt, np.int32)
        text = checkpoint.decode(example.prompt)
        chosen = {("none", 1.0): np.arange(len(tokens), dtype=np.int32)}
        for name, draft in drafts.items():
            padded = np.pad(tokens, (0, length - len(tokens)))[
                None
            ]  # one program for all prompts
            scores = np.asarray(importance(draft, padded, np.array([len(tokens)])))[
                0, : len(tokens)
            ]
            chosen |= {(name, keep): best_chunks(scores, keep) for keep in given.keep}
        for key, positions in chosen.items():
            said = answer(checkpoint, tokens, positions, length, task.max_new_tokens)
            read = checkpoint.decode(tokens[positions].tolist())
            whole = (
                all(right in read for right in example.answers) and example.answers[0] in text
            )
            found.setdefault(key, []).append((task.score(example, said), whole))
    rows = []
    for (name, keep), results in found.items():
        score, whole = np.mean(results, axis=0).tolist()
        row = {
            "model": checkpoint.directory.name,
            "draft": name,
            "keep": keep,
            "hidden": hidden,
            "tokens": length,
        }
        rows.append({**row, "samples": len(results), "score": score, "found": whole})
        show(rows[-1])
    return rows


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument(
        "--layers", type=lambda text: [int(n) for n in text.split(",")], default=[4]
    )
    parser.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[4096]
    )
    parser.add_argument(
        "--keep", type=lambda text: [float(n) for n in text.split(",")], default=[0.1, 0.2, 0.3]
    )
    parser.add_argument(
        "--hidden", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8]
    )
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--text", type=Path, help="a book; default: made sentences")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, help="default: results/spec_prefill.json")
    given = parser.parse_args(args)
    given.quick = False
    checkpoint = models.load(given.model, dtype=given.dtype)
    drafts = {f"first {n} layers": checkpoint.model.first_layers(n) for n in given.layers}
    if given.draft is not None:
        drafts[given.draft.name] = models.load(given.draft, dtype=given.dtype).model
    key = ("model", "draft", "keep", "hidden", "tokens")
    for length in given.lengths:
        for hidden in given.hidden:
            rows = measure(checkpoint, drafts, hidden, length, given)
            what = f"{__doc__.splitlines()[0]} {jax.default_backend()}"
            save(out_of(given, "spec_prefill.json"), what, rows, key)


if __name__ == "__main__":
    main()
