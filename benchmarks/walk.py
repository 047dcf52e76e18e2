"""The walk of a step: what a reader passes from `kvjax.attention_info` down to the arithmetic.

    python benchmarks/walk.py [--tree DIR] [--list fier:page=16]

Traces, on a CPU, the calls that README shows, and prints of each: how many functions of the
library it passes, in how many files, and how often a function calls one in another file (each
pair of functions counts once). A step flushes, as it does by default. `--list` prints the
functions that one call, or a step of any preset, passes, in the order in which they are first
called.

These are observations for someone who reads the code, and no test holds them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("kvjax", "kernels_pallas")  # the folders of a step
CAPACITY = 4096


class Call(NamedTuple):
    preset: str  # of the policy, as text
    verb: str = "attention_info"
    tokens: int = 1  # that it is given at once


WALKS = {
    "full": Call("full"),
    "fier": Call("fier"),
    "freekv": Call("freekv"),
    "prompt chunk": Call("fier", tokens=256),
    "decode, T = 8": Call("fier", "decode", tokens=8),
}


class Walk(NamedTuple):
    functions: list[CodeType]  # in the order in which they are first called
    changes: int  # pairs of caller and called function that are in different files

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}


def walk(tree: Path, run: Callable[[], Any]) -> Walk:
    """The functions of the library that `run` passes."""
    folders = tuple(f"{tree / part}/" for part in PARTS)
    functions: dict[CodeType, None] = {}
    changes: set[tuple[CodeType, CodeType]] = set()

    def is_ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(folders)

    def caller_of(frame: FrameType) -> FrameType | None:
        """The nearest caller in the library: JAX stands between a function and its program."""
        caller = frame.f_back
        while caller is not None and not is_ours(caller):
            caller = caller.f_back
        return caller

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_ours(frame):
            return
        functions[frame.f_code] = None
        caller = caller_of(frame)
        if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            changes.add((caller.f_code, frame.f_code))

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(list(functions), len(changes))


def traced(kv: Any, call: Call) -> Callable[[], Any]:
    """Returns a function that traces a call for a layer of its preset."""
    import jax
    import jax.numpy as jnp

    spec = kv.CacheSpec(
        batch=1, q_heads=8, kv_heads=2, head_dim=128, capacity=CAPACITY, dtype=jnp.bfloat16
    )
    policy = kv.presets.parse(call.preset).rest
    cache = kv.init(policy, spec, layers=1).layers[0]
    q, k, v = (
        jax.ShapeDtypeStruct((1, call.tokens, heads, spec.head_dim), spec.dtype)
        for heads in (spec.q_heads, spec.kv_heads, spec.kv_heads)
    )
    # A function of its own, as jax remembers what it has traced by function.
    return lambda: jax.jit(lambda *operands: getattr(kv, call.verb)(*operands)).trace(
        cache, q, k, v
    )


def walk_of(call: Call, tree: Path = ROOT) -> Walk:
    """The walk of a call through the library at `tree`, which must be the imported one.

    Raises:
      ValueError: no preset has the call's text.
    """
    import jax

    import kvjax

    # with JAX's plugin for GPUs a step would trace kernels too
    kvjax.ops.op._has_cuda_plugin = lambda: False
    trace = traced(kvjax, call)
    trace()  # imports what a step imports
    jax.clear_caches()
    return walk(tree, trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; default: this one")
    parser.add_argument(
        "--list",
        metavar="NAME",
        help=f"print the functions of one walk: {'; '.join(WALKS)}; or of a step of any preset, such as quest",
    )
    options = parser.parse_args()
    tree = options.tree.resolve()
    sys.path.insert(0, str(tree))
    import kvjax

    kvjax.__path__.append(str(tree))  # the kernels of a checkout are outside the package
    importlib.import_module("kvjax.kernels_pallas")
    if options.list:
        try:
            found = walk_of(WALKS.get(options.list, Call(options.list)), tree)
        except ValueError as error:
            parser.error(f"--list: {error}")
        for code in found.functions:
            file = Path(code.co_filename).relative_to(tree)
            print(f"{file}:{code.co_firstlineno} {code.co_qualname}")
        return
    print(f"{'step':16}{'functions':>11}{'files':>7}{'changes of file':>17}")
    for name, call in WALKS.items():
        one = walk_of(call, tree)
        print(f"{name:16}{len(one.functions):11}{len(one.files):7}{one.changes:17}")


if __name__ == "__main__":
    main()
