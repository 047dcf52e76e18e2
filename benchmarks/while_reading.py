"""What users of an engine wait for while it reads a long prompt.

    python benchmarks/while_reading.py                    # 100 000 tokens; some minutes of a CPU
    python benchmarks/while_reading.py --quick            # 4000 tokens; a trial of the script

A thread steps the engine, which reads one long prompt. A request streams meanwhile. A client
submits short requests one after another, asks for the counts and cancels. The script prints the
longest time of each call, the longest time between two blocks of streamed tokens, and how long
short requests wait for their first tokens; beside them the time of a step, which reads one chunk
and decodes one block. A row is added to results/while_reading.json.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from layers import out_of, save, show

import kvjax
from kvjax.models import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    layers=1,
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    max_position_embeddings=2**20,
)
SHORT = 8  # tokens of a short prompt
KEY = ("tokens", "chunk", "block", "prompt_tokens", "short_ones")


class Client:
    """Submits short requests while a prompt is read, and times each call."""

    def __init__(self, engine: kvjax.Engine, long: Any) -> None:
        self.engine = engine
        self.long = long
        self.rng = np.random.default_rng(1)
        self.times: dict[str, list[float]] = {"submit": [], "stats": [], "cancel": []}
        self.first: list[float] = []  # seconds until the first tokens of each short request
        self.steps: list[int] = []  # steps of the engine until then

    def timed(self, what: str, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **settings)
        self.times[what].append(time.perf_counter() - start)
        return result

    def run(self, clock: Stepper) -> None:
        while self.long.state == "waiting":
            time.sleep(0.001)
        while self.long.state == "reading":
            prompt = self.rng.integers(1, 64, SHORT)
            (request,) = self.timed("submit", self.engine.submit, prompt, max_new_tokens=4)
            start, step = time.perf_counter(), clock.count
            while not request.tokens and not request.done:
                self.timed("stats", self.engine.stats)
                time.sleep(0.002)
            if self.long.state == "reading":
                self.first.append(time.perf_counter() - start)
                self.steps.append(clock.count - step)
            (unwanted,) = self.timed("submit", self.engine.submit, prompt, max_new_tokens=4)
            self.timed("cancel", self.engine.cancel, unwanted)


class Stepper:
    """Steps an engine, and notes when a request gets tokens."""

    def __init__(self, engine: kvjax.Engine, streamed: Any, long: Any) -> None:
        self.engine, self.streamed, self.long = engine, streamed, long
        self.count = 0
        self.seconds = list[float]()  # of each step that read a chunk
        self.news = list[float]()  # when the streamed request got tokens

    def run(self) -> None:
        while not self.long.done:
            start = time.perf_counter()
            news = self.engine.step()
            self.count += 1
            if self.long.state == "reading":
                self.seconds.append(time.perf_counter() - start)
                if self.streamed in news:
                    self.news.append(time.perf_counter())


def measure(given: argparse.Namespace) -> dict[str, Any]:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    capacity = given.tokens + 64
    streamed_tokens = capacity - 8
    cache = kvjax.init(kvjax.Full(), model.spec(batch=4, capacity=capacity), layers=1)
    engine = kvjax.Engine(
        model, cache, chunk=given.chunk, block=given.block, prompt_tokens=given.prompt_tokens
    )
    engine.warm_up(draws=False)
    (streamed,) = engine.submit([1, 2, 3], max_new_tokens=streamed_tokens)
    while not streamed.tokens:
        engine.step()
    prompt = np.random.default_rng(0).integers(1, 64, given.tokens)
    (long,) = engine.submit(prompt, max_new_tokens=1)
    stepper, client = Stepper(engine, streamed, long), Client(engine, long)
    other = threading.Thread(target=client.run, args=(stepper,))
    other.start()
    start = time.perf_counter()
    stepper.run()
    seconds = time.perf_counter() - start
    other.join()
    gaps = np.diff(stepper.news)
    row: dict[str, Any] = {
        "tokens": given.tokens,
        "chunk": given.chunk,
        "block": given.block,
        "prompt_tokens": given.prompt_tokens or given.chunk,
        "short_ones": SHORT,
        "seconds": seconds,
        "steps": stepper.count,
        "longest_step": max(stepper.seconds),
        "longest_between_blocks": float(gaps.max()),
        "short_answered": len(client.first),
        "short_first_longest": max(client.first),
        "short_first_median": float(np.median(client.first)),
        "short_steps_longest": max(client.steps),
    }
    for what, times in client.times.items():
        row[f"longest_{what}"] = max(times)
        row[f"{what}_calls"] = len(times)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="of the long prompt")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, help="most tokens that a step reads")
    parser.add_argument("--quick", action="store_true", help="4000 tokens")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.tokens = min(given.tokens, 4000)
    row = measure(given)
    for name, value in row.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")
    show(row)
    what = "seconds by the host's clock, while an engine reads a long prompt"
    save(out_of(given, "while_reading.json"), what, [row], KEY)


if __name__ == "__main__":
    main()
