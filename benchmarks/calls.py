"""Time of a call of the decode loop beside its steps, by form of the call.

    python benchmarks/calls.py [--method fier] [--placements none,ctx=2+share] \\
        [--size 1048576x1] [--layers 16] [--forms apart,loop,alone] [--out FILE]

The model, the caches and the names of placements are those of devices.py. Forms of a call:

- apart: the host puts each small argument anew, and reads tokens, counts and flags one by one;
- loop: arguments stay on the device until they change, and all that the host reads is one array;
- alone: as loop, but a call of one token runs its step without a loop around it, which would
  keep the host until the step is done. `kvjax.stream` does so on a GPU, token by token.

`step_ms` is a step of 32 in a call, the fastest of four calls; `call_of_one_ms` the median of 64
calls that emit one token, and the other times the parts of such a call, medians of 16: until
the call returns to Python, until its results are ready after that, and until the host has read
them. Rows are added to results/calls.json. `--quick` tries it at tiny sizes on any devices and
writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import devices
import jax
import numpy as np
import throughput
from layers import out_of, save, show
from step_trace import BLOCK, parser_of_run, shape_of_run

from kvjax.generation import Stream, loops, streaming
from kvjax.generation.reports import Report

FORMS = ("apart", "loop", "alone")
CALLS = 64
WHAT = (
    "calls of the decode loop and their steps, milliseconds by the host's clock: step_ms of 32 in a "
    "call, the fastest of four; call_of_one_ms: a call that emits one token, the median of 64, and its parts"
)
KEY = ("form", "method", "placement", "layers", "length", "batch", "budget", "device")


class _Apart:
    """Leaves the arrays of a report as they are."""

    @staticmethod
    def of(report: Report) -> Report:
        return report


def _put_anew(run: Stream, name: str, value: Any) -> Any:
    return value


def loop_of_its_own() -> Any:
    """`decode_loop` for one form, so that another form does not find its program."""
    return jax.jit(
        partial(loops.decode_loop.__wrapped__),
        static_argnames=("measure", "single_step"),
        donate_argnums=1,
        compiler_options=loops.CONCURRENT,
    )


@contextmanager
def calls_of(form: str, loop: Any) -> Iterator[None]:
    """In the block, streams make calls of this form."""
    waits = (jax.default_backend(),) if form == "alone" else ()
    with (
        mock.patch.object(streaming, "decode_loop", loop),
        mock.patch.object(loops, "WAITS", waits),
        mock.patch.object(loops, "Packed", _Apart if form == "apart" else loops.Packed),
        mock.patch.object(Stream, "_put", _put_anew if form == "apart" else Stream._put),
    ):
        yield


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def parts_of_a_call(run: Stream, loop: Any, alone: dict[str, bool]) -> list[float]:
    """Milliseconds until a call of one token returns, is ready and is read."""
    arguments, how = run._call(1)
    made: list[Any] = []
    returns = milliseconds(lambda: made.extend(loop(*arguments, **how, **alone)))
    done, report = made
    ready = milliseconds(lambda: jax.block_until_ready(done.logits))
    read = milliseconds(report.read)
    run.cache = done.cache
    run._logits = done.logits
    return [returns, ready, read]


def times_of(run: Stream, form: str) -> dict[str, float]:
    loop = loop_of_its_own()
    alone = {"single_step": True} if form == "alone" else {}
    with calls_of(form, loop):
        run.advance(2)
        for _ in range(3):
            run.advance(1)
        steps = [milliseconds(lambda: run.advance(BLOCK)) / BLOCK for _ in range(4)]
        one = [milliseconds(lambda: run.advance(1)) for _ in range(CALLS)]
        parts = np.median([parts_of_a_call(run, loop, alone) for _ in range(16)], axis=0)
    names = ("returns_ms", "ready_ms", "read_ms")
    found = {"step_ms": min(steps), "call_of_one_ms": float(np.median(one))}
    found |= dict(zip(names, parts.tolist(), strict=True))
    return {name: round(took, 4) for name, took in found.items()}


def main(args: Sequence[str] | None = None) -> None:
    parser = parser_of_run(__doc__)
    parser.add_argument("--forms", type=lambda text: text.split(","), default=list(FORMS))
    given = parser.parse_args(args)
    if unknown := set(given.forms) - set(FORMS):
        parser.error(f"--forms has {sorted(unknown)}; those known are {', '.join(FORMS)}")
    config, dtype, length, batch = shape_of_run(given)
    for name in given.placements:
        place = devices.placement_of(name, jax.devices())
        run, _ = devices.begun(
            throughput.random_model(config, dtype, placement=place),
            devices.METHODS[given.method](given.budget),
            place,
            length=length,
            batch=batch,
            new=len(given.forms) * (5 * BLOCK + CALLS + 32),
        )
        for form in given.forms:
            asked = {
                "form": form,
                "method": given.method,
                "placement": name,
                "layers": config.layers,
                "length": length,
                "batch": batch,
                "budget": given.budget,
            }
            row = asked | times_of(run, form)
            show(row)
            save(out_of(given, "calls.json"), WHAT, [row], KEY)


if __name__ == "__main__":
    main()
