"""What is measured, for all libraries alike: sizes, and the row of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

# The work that rows of several libraries share.
DENSE = "attention to all tokens"
SELECTED = "attention to a selection"
TOP_K = "top-k of scores"
STEP = "step of a method"
PROMPT = "attention in a prompt"

L2_BYTES = 60e6
MOST_LAYERS = 16


@dataclass(frozen=True)
class Case:
    """One layer and batch, and how it is timed.

    A call runs several layers in turn, which together read twice what the L2 cache holds: in a
    model, too, another layer's bytes come between two steps of a layer.
    """

    length: int  # tokens of a row
    batch: int
    budget: int  # tokens that a KV head selects
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    calls: int = 20
    quick: bool = False  # small, on a CPU: the host's clock, whose times mean nothing

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def pair_bytes(self) -> int:
        """Of key and value of a token in all KV heads, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_dim

    @property
    def dense_bytes(self) -> float:
        return float(self.batch * self.length * self.pair_bytes)

    @property
    def selected_bytes(self) -> float:
        return float(self.batch * self.budget * self.pair_bytes)

    def layers(self, bytes_read: float) -> int:
        """How many layers of `bytes_read` bytes a call runs."""
        if self.quick:
            return 2
        return min(max(2, int(-(-2 * L2_BYTES // bytes_read))), MOST_LAYERS)


@dataclass(frozen=True)
class Timed:
    """Microseconds of one layer, in the kernels alone."""

    us: float
    parts: Mapping[str, float]  # by kernel
    kernels: float | None  # that a layer starts
    graph_us: float | None = None  # of a replayed CUDA graph of these calls, gaps included


def row(
    case: Case,
    work: str,
    library: str,
    name: str,
    call: str,
    timed: Timed,
    *,
    layers: int,
    error: float,
    setting: str = "",
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """One result. `call` is the documented function, `error` the relative distance of its
    output from the reference's, and `beside` the packages whose versions matter, too.
    """
    return {
        "work": work,
        "library": library,
        "name": name,
        "length": case.length,
        "batch": case.batch,
        "budget": case.budget if work in (SELECTED, TOP_K, STEP) else None,
        "us": timed.us,
        "graph_us": timed.graph_us,
        "kernels": timed.kernels,
        "call": call,
        "setting": setting,
        "error": error,
        "layers": layers,
        "parts": {part: round(us, 2) for part, us in timed.parts.items()},
        "packages": {package: version(package) for package in (library, *beside)},
    }


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require(close: float, most: float, what: str) -> float:
    """Returns the error `close`; ends the program if it is over `most`, or no number."""
    if not close <= most:
        raise SystemExit(f"{what}: the output is {close:.3g} from the reference, over {most:g}")
    return close
