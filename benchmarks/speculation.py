"""Tokens per second with and without drafts by prompt look-up, on code to edit and on passages
to summarise.

    python benchmarks/speculation.py MODEL --text book.txt [--methods "full fier"] \\
        [--tokens 3584] [--new-tokens 256]

A model answers greedily, one prompt at a time, in its chat template if it has one. Code: files
of Python's standard library, to be written again with type annotations. Summaries: passages of
a book, to be summarised with quotations. `same_tokens` counts the prompts whose answers with
and without drafts are equal; `acceptance` is the share of drafted tokens that the model would
have written. Seconds are those of decoding alone, from the second run of each program on.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import measured
import named
import numpy as np
from layers import show
from measured import write_rows

from kvjax import PromptLookup, models
from kvjax.evaluate.caches import make_rows
from kvjax.generation import stream
from kvjax.models import Checkpoint
from kvjax.spec import default_dtype

MODULES = (
    "textwrap",
    "heapq",
    "fnmatch",
    "shlex",
    "calendar",
    "configparser",
    "difflib",
    "argparse",
)
CODE = "Write this Python code again with type annotations, and change nothing else.\n\n```python\n{}\n```"
SUMMARY = "Sum up this passage in five sentences, and quote a sentence of it word by word after each.\n\n{}"


def prompts(
    checkpoint: Checkpoint, text: Path, tokens: int, count: int
) -> dict[str, list[list[int]]]:
    """Token ids of chat prompts by kind, each with `tokens` tokens of material."""
    tokenizer = checkpoint.tokenizer

    def ask(form: str, ids: Sequence[int]) -> list[int]:
        asked = form.format(tokenizer.decode(list(ids)))
        return (
            checkpoint.encode(asked)
            if tokenizer.chat_template is None
            else checkpoint.apply_chat(asked)
        )

    sources = [inspect.getsource(__import__(name)) for name in MODULES[:count]]
    code = [tokenizer(source, verbose=False)["input_ids"][:tokens] for source in sources]
    words = measured.read_tokens(checkpoint, text, tokens * 2 * count)
    passages = [words[start : start + tokens] for start in range(0, len(words), 2 * tokens)]
    return {
        "code": [ask(CODE, ids) for ids in code],
        "summary": [ask(SUMMARY, ids) for ids in passages],
    }


def answer(
    checkpoint: Checkpoint,
    cache: str,
    ids: list[int],
    capacity: int,
    new_tokens: int,
    draft: PromptLookup | None,
) -> tuple[list[int], float, Any]:
    """The answer's tokens, seconds of decoding, and statistics of the drafts."""
    (row,) = make_rows(
        [cache], dense_layers=None
    )  # it runs its own method, however short the cache
    assert row.policies is not None, row.refused
    held = checkpoint.init_cache(row.policies, capacity=capacity)
    stop = checkpoint.stop_tokens
    settings: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "stop_tokens": stop,
        "block": new_tokens,
        "draft": draft,
    }
    run = stream(checkpoint.model, held, [ids], **settings)
    jax.block_until_ready(run.logits)
    begin = time.perf_counter()
    for _ in run:
        pass
    return run.rows[0], time.perf_counter() - begin, run.speculation


def measure(
    checkpoint: Checkpoint,
    cache: str,
    kind: str,
    asked: list[list[int]],
    draft: PromptLookup,
    given: Any,
) -> dict[str, Any]:
    row: dict[str, Any] = {"cache": cache, "kind": kind, "prompts": len(asked)}
    capacity = -(-(given.tokens + 256 + given.new_tokens) // 128) * 128
    seconds, tokens, same, numbers = np.zeros(2), np.zeros(2, int), 0, np.zeros(3, int)
    try:
        for i, ids in enumerate(
            asked
        ):  # compiles; arrays of the look-up depend on the prompt's length
            for one in (draft,) if i else (None, draft):
                answer(checkpoint, cache, ids, capacity, given.new_tokens, one)
    except (ValueError, NotImplementedError) as error:
        return {**row, "refused": str(error)}
    for ids in asked:
        plain, plain_took, _ = answer(checkpoint, cache, ids, capacity, given.new_tokens, None)
        drafted, took, went = answer(checkpoint, cache, ids, capacity, given.new_tokens, draft)
        seconds += (plain_took, took)
        tokens += (len(plain), len(drafted))
        same += plain == drafted
        numbers += (went.steps, went.drafted, went.accepted)
    steps, proposed, accepted = (int(n) for n in numbers)
    plain_rate, rate = (float(n) for n in tokens / seconds)
    return {
        **row,
        "tokens_per_second": round(plain_rate, 1),
        "tokens_per_second_drafted": round(rate, 1),
        "times": round(rate / plain_rate, 3),
        "acceptance": round(accepted / max(proposed, 1), 4),
        "tokens_per_step": round(int(tokens[1]) / max(steps, 1), 3),
        "same_tokens": same,
        "new_tokens": int(tokens[0]),
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="a model that follows instructions")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument(
        "--methods",
        type=named.caches(),
        default="full fier:budget=1024 quest:budget=1024 pariskv:budget=1024,dense_below=0",
        help="separated by spaces",
    )
    parser.add_argument(
        "--prompts", type=int, default=4, help=f"of each kind, at most {len(MODULES)}"
    )
    parser.add_argument(
        "--tokens", type=int, default=3584, help="of the material in a prompt, at most"
    )
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--ngram", type=int, default=3)
    parser.add_argument(
        "--draft", type=int, default=PromptLookup().tokens, help="tokens of a draft"
    )
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "speculation.json"
    )
    given = parser.parse_args(args)
    checkpoint = models.load(given.model_dir, dtype=given.dtype)
    draft = PromptLookup(ngram=given.ngram, tokens=given.draft)
    asked = prompts(checkpoint, given.text, given.tokens, given.prompts)
    about = measured.about(
        given.model_dir, given.text, given.dtype, [given.tokens], given.new_tokens
    )
    head = {**about, "ngram": given.ngram, "draft": given.draft}
    rows = []
    for cache in given.methods:
        for kind, ids in asked.items():
            rows.append(measure(checkpoint, cache, kind, ids, draft, given))
            show(rows[-1])
            write_rows(given.out, head, rows)


if __name__ == "__main__":
    main()
