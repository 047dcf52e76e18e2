"""Presses of kvpress, with transformers, and methods of kvjax: the same model answers the same
questions on hidden numbers, at equal budgets.

    pip install kvpress
    python benchmarks/presses.py [MODEL] [--length 1024] [--samples 32] [--budgets 64,256] [--speed]

A press drops tokens of the prompt in every layer, before the question is known; kvjax's methods
of `CACHES` keep or read as many tokens in every layer, too. Both read the same token ids, answer
greedily, and are scored alike. A budget is the number of tokens that a KV head has of the prompt
(kvpress, which keeps question and answer on top) or reads in a step in all (kvjax). A press also
frees memory, which methods that select do not: `memory` says which tokens stay.

`--speed` adds the tokens a second of one row that writes `--new` tokens: by the loop of kvpress's
pipeline, eager as it is documented, and by `kvjax.generation.stream`. It says something on a GPU
alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch uses the GPU, too

from layers import numbers, save, show
from named import caches, names_of

from kvjax import models
from kvjax.evaluate import compare, side_by_side
from kvjax.evaluate.accuracy import cut
from kvjax.evaluate.caches import make_rows
from kvjax.evaluate.plan import Plan, prepare
from kvjax.evaluate.tasks import make_tasks
from kvjax.evaluate.tasks.checking import score_of

if TYPE_CHECKING:
    from kvjax.models import Checkpoint

OUT = Path(__file__).parent / "results" / "presses.json"
PRESSES = {  # by kvpress's names, with the defaults of each
    "none": "no press: all tokens",
    "snapkv": "SnapKVPress",
    "adakv": "AdaKVPress over SnapKVPress",
    "expected_attention": "ExpectedAttentionPress",
    "tova": "TOVAPress",
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "streaming_llm": "StreamingLLMPress",
}
CACHES = "full fier quest pariskv:sink=4,local=16,dense_below=0 snapkv adakv tova streaming_llm"
KEEP_ALL = ("full", "fier", "quest", "pariskv")


def press_of(name: str, kept: int, length: int) -> Any:
    """The press that leaves `kept` of `length` tokens; None for none."""
    import kvpress

    if name == "none":
        return None
    ratio = 1 - kept / length
    by_name: Mapping[str, Any] = {
        "snapkv": kvpress.SnapKVPress,
        "expected_attention": kvpress.ExpectedAttentionPress,
        "tova": kvpress.TOVAPress,
        "knorm": kvpress.KnormPress,
        "keydiff": kvpress.KeyDiffPress,
        "streaming_llm": kvpress.StreamingLLMPress,
    }
    if name == "adakv":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=ratio))
    return by_name[name](compression_ratio=ratio)


class Pressed:
    """A model of transformers that answers by way of kvpress."""

    def __init__(self, folder: Path):
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = loaded.to(self.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.pipe = kvpress.KVPressTextGenerationPipeline(model=self.model, tokenizer=tokenizer)

    def answer(
        self, prompt: Sequence[int], question: Sequence[int], name: str, kept: int, new: int
    ) -> tuple[str, float]:
        """The answer of at most `new` tokens, and the seconds in which it was written."""
        import contextlib

        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        press = press_of(name, kept, len(prompt))
        ids = torch.tensor([list(prompt)], device=self.device)
        with torch.inference_mode():
            with press(self.model) if press is not None else contextlib.nullcontext():
                self.model.model(input_ids=ids, past_key_values=cache)
            begin = time.perf_counter()
            text = self.pipe.generate_answer(
                question_ids=torch.tensor([list(question)], device=self.device),
                cache=cache,
                context_length=len(prompt),
                max_new_tokens=new,
            )
        return text, time.perf_counter() - begin


def by_kvpress(pressed: Pressed, plan: Plan, given: Any) -> Iterator[dict[str, Any]]:
    task = plan.task
    for name in given.presses:
        for budget in given.budgets if name != "none" else [None]:
            scores = []
            for key, prompt in plan.prompts.items():
                *context, last = prompt
                question = plan.fed[key] or [last]
                context = list(prompt) if plan.fed[key] else context
                kept = budget or len(context)
                text, _ = pressed.answer(context, question, name, kept, task.max_new_tokens)
                scores.append(score_of(task, plan.examples[key], cut(text, task.stop)[0]))
            yield {
                "library": "kvpress",
                "method": name,
                "what": PRESSES[name],
                "budget": budget,
                "n": len(scores),
                "score": sum(scores) / len(scores),
                "memory": "budget" if budget else "all tokens",
                "version": metadata.version("kvpress"),
            }


def by_kvjax(checkpoint: Checkpoint, given: Any) -> Iterator[dict[str, Any]]:
    found = compare(
        checkpoint,
        given.task,
        given.caches,
        lengths=[given.length],
        samples=given.samples,
        budgets=given.budgets,
        dense_layers=None,
    )
    for row in found.rows:
        if "refused" in row:
            continue
        yield {
            "library": "kvjax",
            "method": row["cache"],
            "what": "kvjax.presets",
            "budget": row["budget"],
            "n": row["n"],
            "score": row["mean"],
            "memory": "all tokens" if row["cache"].startswith(KEEP_ALL) else "budget",
            "version": metadata.version("kvjax"),
        }


def speeds(
    checkpoint: Checkpoint, pressed: Pressed, plan: Plan, given: Any
) -> dict[tuple[str, str, int | None], float]:
    """Tokens a second by library, method and budget, of one row after one prompt."""
    prompt = list(next(iter(plan.prompts.values())))
    found: dict[tuple[str, str, int | None], float] = {}
    for name in given.presses:
        for budget in given.budgets if name != "none" else [None]:
            kept = budget or len(prompt)
            for _ in range(2):  # the first one warms up
                text, seconds = pressed.answer(prompt[:-1], prompt[-1:], name, kept, given.new)
            count = len(checkpoint.tokenizer(text, verbose=False)["input_ids"])
            found["kvpress", name, budget] = count / seconds
    for budget in given.budgets:
        for answer in side_by_side(
            checkpoint,
            checkpoint.tokenizer.decode(prompt),
            given.caches,
            budget=budget,
            dense_layers=None,
            max_new_tokens=given.new,
        ):
            name, _, own = answer.cache.partition("@")
            if not answer.refused:
                speed = answer.decode_tokens_per_second
                found["kvjax", name, int(own) if own else None] = speed
    return found


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, help="default: the shipped model")
    parser.add_argument("--task", default="needles")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--budgets", type=numbers, default=[64, 256])
    parser.add_argument("--presses", type=names_of(PRESSES, "press"), default=list(PRESSES))
    parser.add_argument("--caches", type=caches(), default=CACHES)
    parser.add_argument("--speed", action="store_true", help="also tokens a second")
    parser.add_argument("--new", type=int, default=64, help="tokens written for --speed")
    parser.add_argument("--out", type=Path, help="default: results/presses.json")
    parser.add_argument("--quick", action="store_true", help="few questions; writes nothing")
    given = parser.parse_args(args)
    if given.quick:
        given.samples, given.length, given.budgets, given.new = 2, 320, [96], 4
        given.caches, given.presses = ["full", "snapkv"], ["none", "snapkv"]
    folder = given.model_dir or models.shipped()
    checkpoint = models.load(folder)
    (task,) = make_tasks([given.task], lengths=[given.length], samples=given.samples)
    plan = prepare(checkpoint, task, make_rows("full"), dtype=checkpoint.model.dtype)
    pressed = Pressed(folder)
    speed = speeds(checkpoint, pressed, plan, given) if given.speed else {}
    what = f"{task.name}: kvpress with transformers and kvjax, no layer dense"
    common = {"model": folder.resolve().name, "task": task.name, "length": given.length}
    out = None if given.quick else given.out or OUT
    for rows in (by_kvpress(pressed, plan, given), by_kvjax(checkpoint, given)):
        for row in rows:
            key = (row["library"], row["method"], row["budget"])
            row = common | row | {"tokens_per_second": speed.get(key)}
            show(row)
            save(out, what, [row], ("model", "task", "length", "library", "method", "budget"))


if __name__ == "__main__":
    main()
