"""Exact match of retrieval tasks, decoded for real through each cache.

    python benchmarks/retrieval.py MODEL_DIR TEXT_FILE --out results.json [--length 8000] [--samples 64]

A pass key, or one of 8 needles, is hidden at random depths of running text, and asked for at the end in the words that
the model knows. Every cache gets the same prompts; a prompt is stored in one chunk, so that its own attention is exact
whatever the cache keeps, and the answer is decoded greedily, token by token. An answer is right if it begins with the
digits. Prints a table, and writes JSON with date, versions, device, sizes and seeds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import models, presets
from kvjax.generate import generate

WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "piano",
    "ocean",
    "candle",
    "forest",
    "marble",
    "silver",
    "garden",
    "window",
    "bridge",
    "mirror",
    "hammer",
]


def pass_key(rng: random.Random) -> tuple[list[str], str, str]:
    key = str(rng.randint(10000, 99999))
    return [f"\nThe pass key is {key}. Remember it.\n"], "\nWhat is the pass key? The pass key is ", key


def one_of_8_needles(rng: random.Random) -> tuple[list[str], str, str]:
    words, values = rng.sample(WORDS, 8), [str(rng.randint(10000, 99999)) for _ in range(8)]
    hidden = [f"\nThe special magic number for {w} is: {v}.\n" for w, v in zip(words, values, strict=True)]
    word, value = rng.choice(list(zip(words, values, strict=True)))
    return hidden, f"\nWhat is the special magic number for {word}? The special magic number for {word} is: ", value


TASKS: dict[str, Callable[[random.Random], tuple[list[str], str, str]]] = {
    "pass key": pass_key,
    "1 of 8 needles": one_of_8_needles,
}

CACHES: dict[str, Callable[[], Any]] = {
    "full": presets.full,
    **{f"fier, {b}": lambda b=b: presets.fier(budget=b) for b in (16, 32, 64, 128, 256, 512)},
    **{f"fier per query head, {b}": lambda b=b: presets.fier(budget=b, pool="per_head") for b in (32, 128, 512)},
    **{f"quest, {b}": lambda b=b: presets.quest(budget=b) for b in (32, 64, 128, 256, 512)},
    **{
        f"pariskv, {b}": lambda b=b: presets.pariskv(budget=b, sink=4, local=min(128, b // 4), dense_below=0)
        for b in (32, 64, 128, 256, 512)
    },
    **{f"freekv, {b}": lambda b=b: presets.freekv(budget=b) for b in (512, 1024, 2048)},
    **{f"logquant, {b} bits": lambda b=b: presets.logquant(bits=b) for b in (2, 4)},
    **{f"kivi, {b} bits": lambda b=b: presets.kivi(bits=b) for b in (2, 4)},
}


def prompt(tokenizer: Any, text: str, length: int, hidden: list[str], question: str, rng: random.Random) -> list[int]:
    """`length` token ids: text with the hidden lines at random places, and the question."""

    def ids(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    lines, end = [ids(line) for line in hidden], ids(question)
    start = rng.randrange(max(1, len(text) - 8 * length))
    body = ids(text[start : start + 8 * length])[: length - 1 - len(end) - sum(map(len, lines))]
    places = sorted(rng.randint(0, len(body)) for _ in lines)
    out, at = [tokenizer.bos_token_id], 0
    for place, line in zip(places, lines, strict=True):
        out += body[at:place] + line
        at = place
    return out + body[at:] + end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8000)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--caches", nargs="*", default=list(CACHES), choices=list(CACHES))
    args = parser.parse_args()

    checkpoint = models.load(args.model, dtype=args.dtype)
    model, tokenizer, text = checkpoint.model, checkpoint.tokenizer, args.text.read_text()
    capacity = -(-(args.length + 8) // 256) * 256
    rows = []
    for task, make in TASKS.items():
        rng = random.Random(f"{task} {args.length}")
        asked = []
        for _ in range(args.samples):
            hidden, question, answer = make(rng)
            asked.append((prompt(tokenizer, text, args.length, hidden, question, rng), answer))
        for name in args.caches:
            begin, right, attended = time.perf_counter(), 0, []
            for first in range(0, args.samples, args.batch):
                part = asked[first : first + args.batch]
                spec = model.spec(batch=len(part), capacity=capacity)
                cache = kvjax.init(CACHES[name](), spec, layers=checkpoint.config.layers)
                result = generate(
                    model, cache, [ids for ids, _ in part], max_new_tokens=6, chunk=capacity, measure=True
                )
                attended.append(result.attended)
                texts = [tokenizer.decode(row).strip() for row in result.rows]
                right += sum(t.startswith(a) for t, (_, a) in zip(texts, part, strict=True))
            row = {
                "task": task,
                "cache": name,
                "exact_match": right / args.samples,
                "attended_last_layer": float(np.mean(attended, axis=0)[-1]),
                "seconds": round(time.perf_counter() - begin, 1),
            }
            rows.append(row)
            print(f"{task:16s} {name:26s} {row['exact_match']:.3f}  {row['attended_last_layer']:.1f}", flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "transformers")},
        "python": platform.python_version(),
        "model": args.model.name,
        "text": args.text.name,
        "length": args.length,
        "samples": args.samples,
        "dtype": args.dtype,
        "policies": {name: repr(CACHES[name]().rest) for name in args.caches},
        "results": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
