"""Time that a GPU spends in the kernels of calls of torch, from its profiler, and references in
plain torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .cases import Case, Timed, covered


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed(case: Case, run_layer: Callable[[int], Any], layers: int) -> Timed:
    """Times run_layer(0) ... run_layer(layers - 1), one call, by the profiler and as a graph."""

    def call() -> None:
        for layer in range(layers):
            run_layer(layer)

    if not torch.cuda.is_available():
        return _by_clock(call, case.calls, layers)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(case.calls):
            call()
        torch.cuda.synchronize()
    events = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    events.sort(key=lambda event: event[1])
    each, rest = divmod(len(events), case.calls)
    if not events or rest:
        raise SystemExit(f"the profiler saw {len(events)} kernels in {case.calls} equal calls")
    calls = [events[i : i + each] for i in range(0, len(events), each)]
    # A kernel may start while the one before drains, so time in which two run counts once.
    busy = [covered([interval for _, interval in one]) for one in calls]
    parts: dict[str, float] = {}
    for place, (name, _) in enumerate(calls[0]):
        took = statistics.median(end - start for start, end in (one[place][1] for one in calls))
        parts[name[:80]] = parts.get(name[:80], 0.0) + took / layers
    return Timed(
        statistics.median(busy) / layers,
        dict(sorted(parts.items(), key=lambda part: -part[1])[:12]),
        each / layers,
        _by_graph(call, layers),
    )


def _by_graph(call: Callable[[], None], layers: int, replays: int = 20) -> float | None:
    """Microseconds of a layer in a replayed CUDA graph; None for calls that no graph holds."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / (replays * layers)


def _by_clock(call: Callable[[], None], calls: int, layers: int) -> Timed:
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return Timed(1e6 * (time.perf_counter() - start) / (calls * layers), {}, None)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of q [N, D] of one row to k, v [S, K, D], in float32: [N, D]."""
    N, D = q.shape
    K = k.shape[1]
    grouped = q.float().reshape(K, N // K, D)
    logits = torch.einsum("kgd,skd->kgs", grouped, k.float()) * D**-0.5
    return torch.einsum("kgs,skd->kgd", torch.softmax(logits, -1), v.float()).reshape(N, D)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.float(), want.float()
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))
