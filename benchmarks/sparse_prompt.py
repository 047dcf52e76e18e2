"""Answers and loss of a model whose prompts attend to a share of the blocks before them, beside
the exact prompt.

    python benchmarks/sparse_prompt.py MODEL [--shares 0.05,0.1,0.2] [--lengths 16384,32768] \\
        [--samples 10]

`score` is the share of right answers with the cache `full` where one needle, or one of eight,
is hidden in a text and the question ends the prompt. `loss` is the mean negative log-likelihood
of the 256 tokens that follow a prompt of text, the pages of `--text`, over `--windows` places
of it. A row with share 1 is the exact prompt. `seconds` are of the prompts alone, without the
first one of each length and share, which compiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from layers import out_of, save, show

import kvjax
from kvjax import models
from kvjax.evaluate.tasks import make_tasks
from kvjax.generation import decode, prefill
from kvjax.models import Checkpoint

AFTER = 256  # tokens whose loss is measured
DOCS = Path(__file__).resolve().parents[1] / "docs"


def read(
    checkpoint: Checkpoint, tokens: np.ndarray, capacity: int, share: float
) -> tuple[float, Any, Any]:
    """Seconds, logits and the cache of a prompt."""
    cache = jax.block_until_ready(checkpoint.init_cache(kvjax.Full(), capacity=capacity))
    start = time.perf_counter()
    sparse = None if share == 1 else share
    logits, cache = jax.block_until_ready(
        prefill(checkpoint.model, cache, tokens[None], sparse_prompt=sparse)
    )
    return time.perf_counter() - start, logits, cache


def needles(
    checkpoint: Checkpoint, hidden: int, length: int, given: Any
) -> list[dict[str, Any]]:
    about: Any = {
        "lengths": [length],
        "samples": given.samples,
        "text": None,
        "question": "prefilled",
    }
    (task,) = make_tasks([f"needles:hidden={hidden}"], **about)
    capacity, found = (
        -(-(length + task.max_new_tokens) // 128) * 128,
        dict[float, list[tuple[float, float]]](),
    )
    for example in task.examples(checkpoint.tokenizer):
        for share in (1.0, *given.shares):
            took, logits, cache = read(
                checkpoint, np.array(example.prompt, np.int32), capacity, share
            )
            how: dict[str, Any] = {
                "max_new_tokens": task.max_new_tokens,
                "stop_tokens": checkpoint.stop_tokens,
            }
            said = checkpoint.decode(decode(checkpoint.model, cache, logits, **how).rows[0])
            found.setdefault(share, []).append((task.score(example, said), took))
    return [
        {
            "what": f"needles, one of {hidden}",
            "share": share,
            "tokens": length,
            "samples": len(results),
        }
        | {"score": statistics.mean(score for score, _ in results)}
        | {"seconds": statistics.median(took for _, took in results[1:] or results)}
        for share, results in found.items()
    ]


@partial(jax.jit, donate_argnums=1)
def _loss(model: Any, cache: Any, last: Any, tokens: Any) -> Any:
    logits, cache = model(tokens, cache)
    every = jnp.concatenate([last[:, None], logits[:, :-1]], axis=1).astype(jnp.float32)
    chosen = jnp.take_along_axis(every, tokens[..., None], axis=2)[..., 0]
    return jnp.mean(jax.nn.logsumexp(every, axis=2) - chosen), cache


def loss(checkpoint: Checkpoint, length: int, given: Any) -> list[dict[str, Any]]:
    files = sorted(given.text.glob("*.md")) if given.text.is_dir() else [given.text]
    tokens = np.array(
        checkpoint.encode("\n".join(file.read_text() for file in files)), np.int32
    )
    prompt, rows = length - AFTER, []
    if len(tokens) < length:
        raise SystemExit(
            f"{given.text} has {len(tokens)} tokens; give a longer --text, or fewer than {length} tokens"
        )
    places = np.linspace(0, len(tokens) - length, given.windows).astype(int)
    for share in (1.0, *given.shares):
        found = []
        for place in places:
            part = tokens[place : place + length]
            _, logits, cache = read(checkpoint, part[:prompt], -(-length // 128) * 128, share)
            found.append(float(_loss(checkpoint.model, cache, logits, part[None, prompt:])[0]))
        rows.append({"what": "text", "share": share, "tokens": length, "samples": len(found)})
        rows[-1]["loss"] = statistics.mean(found)
    return rows


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[16384, 32768]
    )
    parser.add_argument(
        "--shares",
        type=lambda text: [float(n) for n in text.split(",")],
        default=[0.05, 0.1, 0.2],
    )
    parser.add_argument(
        "--hidden", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8]
    )
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument(
        "--text", type=Path, default=DOCS, help="a text, or a folder of *.md; default: docs/"
    )
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, help="default: results/sparse_prompt.json")
    given = parser.parse_args(args)
    given.quick = False
    checkpoint = models.load(given.model, dtype=given.dtype)
    what = f"{__doc__.splitlines()[0]} {jax.default_backend()}"
    for length in given.lengths:
        for measured in (
            partial(loss, checkpoint),
            *(partial(needles, checkpoint, hidden) for hidden in given.hidden),
        ):
            rows = [
                {"model": checkpoint.directory.name, **row} for row in measured(length, given)
            ]
            for row in rows:
                show(row)
            save(
                out_of(given, "sparse_prompt.json"),
                what,
                rows,
                ("model", "what", "share", "tokens"),
            )


if __name__ == "__main__":
    main()
