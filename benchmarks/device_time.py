"""Time that a GPU spends in the kernels of a call, from the profiler, and the JSON that a
benchmark writes.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jaxlib
from measured import write_rows

from kvjax.kernels_pallas import simt

# The best rate at which kernels were seen to read device memory, in bytes per microsecond.
BYTES_PER_US = {"NVIDIA H200": 4.3e6, "NVIDIA H100 80GB HBM3": 3.0e6}
H200_BYTES_PER_US = BYTES_PER_US["NVIDIA H200"]


def bytes_per_us() -> float:
    """The rate of this process's device; that of an H200 if it is not known."""
    return BYTES_PER_US.get(jax.devices()[0].device_kind, H200_BYTES_PER_US)


_started: list[str] | None = None  # the kernels that the simulator ran


@contextmanager
def simulated() -> Iterator[None]:
    """In the block, kernels run in the simulator of the tests and times are the host's clock,
    so that `--quick` can try a benchmark on any machine. The times are meaningless."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.kernels.simulate import Simulator

    class Named(Simulator):
        """Records each launch when it runs."""

        def run(self, program: Callable[..., None], launch: Any, *args: Any, **how: Any) -> Any:
            def body(*refs: Any) -> None:
                assert _started is not None
                _started.append(launch.name)
                program(*refs)

            return super().run(body, launch, *args, **how)

    global _started
    _started = []
    try:
        with simt.use(Named()):
            yield
    finally:
        _started = None


def is_simulated() -> bool:
    return _started is not None


def device_time(
    f: Callable[..., Any], *args: Any, calls: int = 20, starts: int = 1
) -> tuple[float, dict[str, float]]:
    """Microseconds of all kernels of jit(f)(*args), the median of `calls`, and the same for
    each kernel's name. A call must start each of kvjax's kernels `starts` times: XLA runs an
    operation once for all calls with equal arguments."""
    run = jax.jit(f)
    found = kernels(lambda: run(*args), calls)
    for name, each in found:
        if "kvjax_" in name and len(each) < starts * calls:
            raise SystemExit(
                f"{name} ran {len(each) / calls:g} times in a call, not {starts}: are arguments shared?"
            )
    times = {name: statistics.median(each) * (len(each) / calls) for name, each in found}
    return sum(times.values()), times


def kernels(call: Callable[[], Any], calls: int) -> list[tuple[str, list[float]]]:
    """The kernels that `calls` calls of `call` start, after two that warm up: each name, with
    microseconds of each.
    """
    if _started is not None:
        return _by_clock(call, calls)
    for _ in range(2):
        jax.block_until_ready(call())

    def calling() -> None:
        for _ in range(calls):
            jax.block_until_ready(call())

    return list(traced(calling).items())


def traced(run: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds of each kernel that `run()` starts on a GPU, by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        found: dict[str, list[float]] = {}
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    found.setdefault(event.name, []).append(event.duration_ns / 1e3)
    if not found:
        raise SystemExit("the profiler saw no kernel; run this on a GPU")
    return found


def _by_clock(call: Callable[[], Any], calls: int) -> list[tuple[str, list[float]]]:
    """Like `kernels`, for kernels in the simulator, with the time of the whole call added."""
    assert _started is not None
    jax.block_until_ready(call())
    _started.clear()
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    us = 1e6 * (time.perf_counter() - start) / calls
    ran = {name: [us] * _started.count(name) for name in dict.fromkeys(_started)}
    return list({"the host's clock": [us] * calls, **ran}.items())


TIMES = "microseconds of device time, kernels only, medians of 20 calls (xla: 3 to 5)"


def where() -> dict[str, Any]:
    """The date, device and versions of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
    }


def write(
    file: str | Path, what: str, distribution: str, rows: list[dict[str, Any]], times: str = ""
) -> None:
    """Writes rows to a file of results/, or to a path from the root on; `times` says what their
    numbers are.
    """
    path = Path(__file__).parent / "results" / file
    about = {
        "what": what,
        **where(),
        "distribution": distribution,
        "times": times or f"{TIMES}; floor: bytes / {bytes_per_us() / 1e6} TB/s",
    }
    write_rows(path, about, rows)
