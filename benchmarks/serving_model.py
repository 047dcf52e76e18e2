"""What designs of the engine are worth on one H100, by arithmetic: tokens a second of the load
of serving.py, `full`.

    python benchmarks/serving_model.py          # no GPU; writes results/serving_model.json

Three numbers are fitted to measurements. A step of 10 rows of 9174 tokens takes 9.99 ms (`full`
in serving.json), of which 131072 bytes a token at 3 TB/s are keys and values, the rest weights
and launches. A prompt of 32749 tokens that is read at once takes 1.22 s (first_answer.json),
606 TFLOP/s; fixed batches read theirs so. In chunks of 2048, prompts run at 522 TFLOP/s, with
which `alike` and `sizes` of 64 requests give what was measured, 421 and 454 tokens a second;
fixed batches then have 175, measured 183. The designs:

  alike      10 slots of the greatest length, prompts read until all slots are full
  sizes      7 of these and 9 of 10240 tokens, in the same memory (`small_slots`)
  three      6 of these, 6 of 15360 and 7 of 6144, the best for 256 requests of 500 layouts of
             two to four sizes
  chunks     prompts are read in chunks of 8192, whose rate is that of whole prompts
  together   also short prompts have this rate, because several are read as one batch
  ride       each chunk of a prompt is read by a program that also decodes a step, and reads the
             weights once for both; alone in chunks of 512, which bring four times as many steps
             as those of 2048
  no host    the device never waits for the host
  no copies  a prompt is read into its slot, and the spare row is one more slot
  longest    of the requests for which a slot is free, the one with the longest answer comes
             first
  pages      as many rows as if memory had no slots but pages: 27
  bound      no order of requests and no layout of memory is faster: each prompt at the rate of
             whole ones, the keys and values that each step reads, and the weights for as few
             steps as memory without an empty byte allows

Rows are idle at the end of a load, so that few requests gain more from an order than many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layers import save
from serving import SIZES, mixed_requests

from kvjax.generation.prefilling import cut

LONGEST = sum(SIZES[False][name][1] for name in ("prompts", "answers"))
TOKEN = 131072 / 3e12  # seconds to read the keys and values of a token
STEP = 9.99e-3 - 10 * 9174 * TOKEN  # of weights and launches
WHOLE, CHUNK = (
    606e12,
    522e12,
)  # FLOPs a second of prompts that are read whole, and in chunks of 2048
LARGE = 8192  # tokens of a chunk from which the rate is that of a whole prompt
CALL = 3e-3  # of the host, for a block of steps
COPY = 3e-3  # of a row into its slot
GROUP = 1.5e-4  # of a step, for the kernels of one more capacity
RIDE = 1e-3  # of a step beside a chunk, without keys and values


def prompt_seconds(tokens: int, start: int = 0, rate: float = WHOLE) -> float:
    return (14e9 * tokens + 262144 * ((start + tokens) ** 2 - start**2)) / rate


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
    chunks: tuple[int, ...] = (2048, 512),
    together: bool = False,
    ride: bool = False,
    call: float = CALL,
    copy: float = COPY,
) -> tuple[float, int]:
    """Seconds and decode steps of an engine: `Engine._next_waiting` says which request takes
    which slot.
    """
    capacities = sorted(capacities)
    groups, waiting = len(set(capacities)), list(work)
    rows: list[Any] = [None] * len(capacities)
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
                    if any(
                        row is None and fit[0] <= c < most
                        for c, row in zip(capacities, rows, strict=True)
                    ):
                        pick = request
                        break
                    most = min(most, fit[0])
                if pick is None:
                    break
                waiting.remove(pick)
                reading, start, sizes = pick, 0, cut(pick[0], chunks)
            size = sizes.pop(0)
            seconds += prompt_seconds(
                size, start, WHOLE if together or size >= LARGE else CHUNK
            )
            start, left = start + size, left - size
            if ride and any(rows):
                seconds += decode(RIDE)
            if not sizes:
                free = [
                    i for i, c in enumerate(capacities) if rows[i] is None and c >= sum(reading)
                ]
                rows[free[0]], reading, seconds = reading, None, seconds + copy
            left = left if any(rows) else max(left, 1)
        seconds += call
        for _ in range(16):
            if any(rows):
                seconds += decode(STEP)
    return seconds, steps


def bound(work: Sequence[tuple[int, int]], rows: int) -> tuple[float, int]:
    """Seconds and steps below which no engine with the memory of so many rows comes."""
    steps = sum(new * (prompt + new) for prompt, new in work) / (rows * LONGEST)
    held = sum(new * prompt + new * (new - 1) / 2 for prompt, new in work)
    return sum(
        prompt_seconds(prompt) for prompt, _ in work
    ) + TOKEN * held + STEP * steps, round(steps)


def main() -> None:
    found = []
    small, large = SIZES[False]["small"], SIZES[False]["large"]
    alike, sizes = [LONGEST] * 10, [LONGEST] * 7 + [10240] * 9
    three = [LONGEST] * large + [
        capacity for capacity, count in small.items() for _ in range(count)
    ]
    for requests in (64, 256):
        work = [
            (len(prompt), new)
            for prompt, new in mixed_requests((1024, 32768), (16, 1024), requests)
        ]
        tokens, by_answer = (
            sum(new for _, new in work),
            sorted(work, key=lambda request: -request[1]),
        )
        fixed = tokens / batches(work, 11)
        long: Any = {"chunks": (LARGE, 4096, 512)}
        designs: dict[str, tuple[float, int]] = {
            "alike, 8192 tokens of prompts at once": engine(work, alike, budget=8192),
            "alike": engine(work, alike),
            "sizes": engine(work, sizes),
            "sizes, no host": engine(work, sizes, call=0),
            "sizes, no copies": engine(work, [LONGEST, *sizes], copy=0),
            "sizes, ride": engine(work, sizes, chunks=(512,), ride=True),
            "sizes, longest": engine(by_answer, sizes),
            "sizes, chunks": engine(work, sizes, **long),
            "sizes, chunks, together": engine(work, sizes, **long, together=True),
            "sizes, chunks, together, ride": engine(
                work, sizes, **long, together=True, ride=True
            ),
            "three, chunks": engine(work, three, **long),
            "three, chunks, longest": engine(by_answer, three, **long),
            "three, chunks, together": engine(work, three, **long, together=True),
            "three, chunks, together, ride": engine(
                work, three, **long, together=True, ride=True
            ),
            "pages": engine(work, [LONGEST] * 27),
            "pages, chunks": engine(work, [LONGEST] * 27, **long),
            "bound": bound(work, 11),
        }
        for name, (seconds, steps) in designs.items():
            rate = tokens / seconds
            row: dict[str, Any] = {
                "design": name,
                "requests": requests,
                "tokens_per_second": rate,
                "steps": steps,
            }
            found.append({**row, "batches": fixed, "ratio": rate / fixed})
            print(
                f"{requests} {name}: {rate:.0f} tokens/s, {rate / fixed:.2f} of fixed batches, {steps} steps"
            )
    save(
        Path(__file__).parent / "results" / "serving_model.json",
        "a model of the engine on one H100",
        found,
        ("design", "requests"),
    )


if __name__ == "__main__":
    main()
