"""What users of an engine wait for while it reads a long prompt.

    python benchmarks/while_reading.py                    # 100 000 tokens; some minutes of a CPU
    python benchmarks/while_reading.py --quick            # 4000 tokens; a trial of the script

A thread steps the engine, which reads one long prompt three times:

- alone, for the time of a chunk at its end, and of a block after it;
- while a request streams, and a client submits short requests one after another, asks for the
  counts, copies the row that streams and cancels;
- the same, while nobody streams.

The script prints the longest time of each call, the longest time between two blocks of streamed
tokens, and how long short requests wait for their first tokens. No call should take more than
`bound`, twice the time of a chunk and a block alone. Rows are kept after requests, so their
copies are among the work. Two rows are added to results/while_reading.json.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from layers import out_of, save, show

import kvjax
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    layers=1,
    q_heads=1,
    kv_heads=1,
    head_dim=8,
    max_position_embeddings=2**20,
)
SHORT = 8  # tokens of a short prompt
SLOTS = 4
KEPT_BYTES = 2**20  # some dozens of short rows
KEY = ("tokens", "chunk", "block", "prompt_tokens", "short_ones", "streams")


class Client:
    """Submits short requests while a prompt is read, and times each call."""

    def __init__(self, engine: kvjax.Engine, long: Any, streamed: Any) -> None:
        self.engine = engine
        self.long = long
        self.streamed = streamed
        self.rng = np.random.default_rng(1)
        self.times: dict[str, list[float]] = {}
        self.first: list[float] = []  # seconds until the first tokens of each short request
        self.steps: list[int] = []  # steps of the engine until then

    def timed(self, what: str, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **settings)
        self.times.setdefault(what, []).append(time.perf_counter() - start)
        return result

    def run(self, clock: Stepper) -> None:
        while self.long.state == "waiting":
            time.sleep(0.001)
        while self.long.state == "reading":
            self.one_round(clock)

    def one_round(self, clock: Stepper) -> None:
        prompt = self.rng.integers(1, 64, SHORT)
        (request,) = self.timed("submit", self.engine.submit, prompt, max_new_tokens=4)
        start, step = time.perf_counter(), clock.count
        # Nobody steps any more once the long prompt is answered.
        while not (request.tokens or request.done or self.long.done):
            self.timed("stats", self.engine.stats)
            time.sleep(0.002)
        if self.long.state == "reading":
            self.first.append(time.perf_counter() - start)
            self.steps.append(clock.count - step)
        drawn = {"sampling": sampling(1.0), "key": jax.random.key(clock.count)}
        unwanted = self.timed("submit", self.engine.submit, prompt, n=2, **drawn)
        for one in unwanted:
            self.timed("cancel", self.engine.cancel, one)
        if self.streamed is not None and self.long.state == "reading":
            self.timed("row", self.engine.row, self.streamed)


class Stepper:
    """Steps an engine until a prompt is answered, and notes when a request gets tokens."""

    def __init__(self, engine: kvjax.Engine, long: Any, streamed: Any = None) -> None:
        self.engine = engine
        self.long = long
        self.streamed = streamed
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


def engine_of(given: argparse.Namespace) -> kvjax.Engine:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    spec = model.spec(batch=SLOTS, capacity=given.tokens + 8 * given.block)
    engine = kvjax.Engine(
        model,
        kvjax.init(kvjax.Full(), spec, layers=CONFIG.layers),
        chunk=given.chunk,
        block=given.block,
        prompt_tokens=given.prompt_tokens,
        prefix_bytes=KEPT_BYTES,
    )
    engine.warm_up()
    return engine


def long_prompt(given: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 64, given.tokens)


def alone(given: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a chunk at the end of the long prompt, and of a block after it."""
    engine = engine_of(given)
    (long,) = engine.submit(long_prompt(given), max_new_tokens=6 * given.block)
    chunks = list[float]()
    blocks = list[float]()
    while not long.done:
        start, running = time.perf_counter(), long.state == "running"
        engine.step()
        (blocks if running else chunks).append(time.perf_counter() - start)
    last = chunks[-max(len(chunks) // 10, 2) :]
    return float(np.median(last)), float(np.median(blocks[1:]))


def measure(
    given: argparse.Namespace, streams: bool, chunk: float, block: float
) -> dict[str, Any]:
    engine = engine_of(given)
    streamed = None
    if streams:
        (streamed,) = engine.submit([1, 2, 3], max_new_tokens=given.tokens)
        while not streamed.tokens:
            engine.step()
    (long,) = engine.submit(long_prompt(given), max_new_tokens=1)
    stepper = Stepper(engine, long, streamed)
    client = Client(engine, long, streamed)
    other = threading.Thread(target=client.run, args=(stepper,))
    other.start()
    start = time.perf_counter()
    stepper.run()
    seconds = time.perf_counter() - start
    other.join()
    row: dict[str, Any] = {
        "tokens": given.tokens,
        "chunk": given.chunk,
        "block": given.block,
        "prompt_tokens": given.prompt_tokens or given.chunk,
        "short_ones": SHORT,
        "streams": streams,
        "chunk_alone": chunk,
        "block_alone": block,
        "bound": 2 * (chunk + block),
        "seconds": seconds,
        "steps": stepper.count,
        "longest_step": max(stepper.seconds),
        "median_step": float(np.median(stepper.seconds)),
        "short_answered": len(client.first),
        "short_first_longest": max(client.first),
        "short_first_median": float(np.median(client.first)),
        "short_steps_longest": max(client.steps),
    }
    if streams:
        gaps = np.diff(stepper.news)
        row["longest_between_blocks"] = float(gaps.max())
        row["median_between_blocks"] = float(np.median(gaps))
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
    chunk, block = alone(given)
    what = "seconds by the host's clock, while an engine reads a long prompt"
    for streams in (True, False):
        row = measure(given, streams, chunk, block)
        for name, value in row.items():
            print(
                f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}"
            )
        show(row)
        save(out_of(given, "while_reading.json"), what, [row], KEY)


if __name__ == "__main__":
    main()
