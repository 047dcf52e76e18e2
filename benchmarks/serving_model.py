"""What designs of the engine are worth on one H100, by arithmetic: tokens a second of the load of serving.py, `full`.

    python benchmarks/serving_model.py          # no GPU; writes results/serving_model.json

Two numbers come from measurements: a step of 10 rows of 9174 tokens takes 9.99 ms (`full` in serving.json), of which
131072 bytes a token at 3 TB/s are keys and values, the rest weights and launches; and prompts run at 530 TFLOP/s, with
which `alike` and `sizes` of 64 requests give what was measured, 421 and 454 tokens a second. Fixed batches, measured
with 183, read their prompts 11 at a time, which the model does not know: their row is a guess. The designs:

  alike      10 slots of the greatest length, prompts read until all slots are full
  sizes      7 of these and 9 of 10240 tokens, in the same memory (`small_slots`)
  mixed      each chunk of a prompt is read by a program that also decodes a step, which reads the weights once for both
  longest    `sizes`, and of the requests for which a slot is free, the one with the longest answer comes first
  pages      as many rows as if memory had no slots but pages: 27

Rows are idle at the end of a load, so that few requests gain more from an order than many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layers import save
from serving import SIZES, mixed_requests

LONGEST = sum(SIZES[False][name][1] for name in ("prompts", "answers"))
TOKEN = 131072 / 3e12  # seconds to read the keys and values of a token
STEP = 9.99e-3 - 10 * 9174 * TOKEN  # of weights and launches
CALL = 3e-3  # of the host, for a block of steps
GROUP = 1.5e-4  # of a step, for the kernels of one more capacity


def prompt_seconds(tokens: int, start: int = 0) -> float:
    return (15e9 * tokens + 262144 * ((start + tokens) ** 2 - start**2)) / 530e12


def batches(work: Sequence[tuple[int, int]], rows: int) -> float:
    seconds = 0.0
    for first in range(0, len(work), rows):
        batch = work[first : first + rows]
        seconds += rows * prompt_seconds(max(prompt for prompt, _ in batch))
        for step in range(max(new for _, new in batch)):
            seconds += STEP + TOKEN * sum(prompt + min(step, new) for prompt, new in batch)
    return seconds


def engine(
    work: Sequence[tuple[int, int]],
    capacities: Sequence[int],
    *,
    budget: int = 40000,
    mixed: bool = False,
    chunk: int = 2048,
) -> tuple[float, int]:
    """Seconds and decode steps of an engine: `Engine._next_waiting` says which request takes which slot."""
    capacities = sorted(capacities)
    groups, waiting, slots = len(set(capacities)), list(work), [None] * len(capacities)
    rows: list[Any] = slots
    seconds, steps, reading = 0.0, 0, None

    def decode(overhead: float) -> float:
        nonlocal steps
        busy = [row for row in rows if row is not None]
        taken = overhead + GROUP * (groups - 1) + TOKEN * sum(tokens for tokens, _ in busy)
        for i, row in enumerate(rows):
            if row is not None:
                rows[i] = (row[0] + 1, row[1] - 1) if row[1] > 1 else None
        steps += 1
        return taken

    while waiting or reading or any(rows):
        left = budget
        while left > 0:
            if reading is None:
                most, pick = LONGEST + 1, None
                for request in waiting:
                    fit = [capacity for capacity in capacities if capacity >= sum(request)]
                    free = [c for c, row in zip(capacities, rows, strict=True) if row is None and fit[0] <= c < most]
                    if free:
                        pick = request
                        break
                    most = min(most, fit[0])
                if pick is None:
                    break
                waiting.remove(pick)
                reading = [*pick, 0]
            size = min(chunk, reading[0] - reading[2])
            seconds, left = seconds + prompt_seconds(size, reading[2]), left - chunk
            reading[2] += size
            if mixed and any(rows):
                seconds += decode(1e-3)
            if reading[2] == reading[0]:
                free = [i for i, c in enumerate(capacities) if rows[i] is None and c >= sum(reading[:2])]
                rows[free[0]], reading = tuple(reading[:2]), None
            left = left if any(rows) else max(left, 1)
        seconds += CALL
        for _ in range(16):
            if any(rows):
                seconds += decode(STEP)
    return seconds, steps


def main() -> None:
    found = []
    small, count = SIZES[False]["small"]
    alike, sizes = [LONGEST] * 10, [LONGEST] * SIZES[False]["large"] + [small] * count
    for requests in (64, 256):
        work = [(len(prompt), new) for prompt, new in mixed_requests((1024, 32768), (16, 1024), requests)]
        tokens, by_answer = sum(new for _, new in work), sorted(work, key=lambda request: -request[1])
        fixed = tokens / batches(work, 11)
        designs: dict[str, tuple[float, int]] = {
            "alike, 8192 tokens of prompts at once": engine(work, alike, budget=8192),
            "alike": engine(work, alike),
            "alike, mixed": engine(work, alike, mixed=True, chunk=1024),
            "sizes": engine(work, sizes),
            "sizes, mixed": engine(work, sizes, mixed=True, chunk=1024),
            "sizes, longest": engine(by_answer, sizes),
            "pages": engine(work, [LONGEST] * 27),
        }
        for name, (seconds, steps) in designs.items():
            rate = tokens / seconds
            row: dict[str, Any] = {"design": name, "requests": requests, "tokens_per_second": rate, "steps": steps}
            found.append({**row, "batches": fixed, "ratio": rate / fixed})
            print(f"{requests} {name}: {rate:.0f} tokens/s, {rate / fixed:.2f} of fixed batches, {steps} steps")
    save(
        Path(__file__).parent / "results" / "serving_model.json",
        "a model of the engine on one H100",
        found,
        ("design", "requests"),
    )


if __name__ == "__main__":
    main()
