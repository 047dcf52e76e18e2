"""How long a decode step takes to trace, and a decode loop of 32 layers to trace and compile,
on CPU.

    python benchmarks/compile_time.py [--methods fier pariskv] [--trees before=DIR,after=.]
    [--repeats 3] [--out FILE]

A step writes one token to a layer and attends. The loop is a `fori_loop` over tokens, with all
layers unrolled and one flush of all of them, as in docs/guides/own_model.md. Layers are equal (`rest` of
the preset), with the heads of a Llama-3.1-8B.

`--trees` compares several checkouts: each repeat starts a fresh process for each of them in
turn, so that a busy machine slows all of them alike. Times are CPU seconds of all threads of
that process, the least of the repeats. Loop and step are traced when JAX and kvjax are imported
and warm, with JAX's caches cleared. `step_calls` are the calls of Python functions of that
trace: they do not depend on the machine. Versions and source in the results are those of the
tree that contains this script.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("full", "fier", "quest", "pariskv", "freekv", "logquant", "kivi")
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}


def spent(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of `run`, and its result."""
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


def python_calls(run: Callable[[], Any]) -> int:
    """The calls of Python functions that `run` makes: a measure of tracing that no other
    process disturbs.
    """
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def times(tree: str, method: str, layers: int, capacity: int) -> dict[str, float]:
    """Times and counts of the kvjax in `tree`: a step's trace, and the loop's trace, lowering
    and compilation.
    """
    import jax
    import jax.numpy as jnp

    import kvjax

    kvjax.__path__.append(
        tree
    )  # the kernels of a checkout are outside the package, and another may be installed
    kernels = importlib.import_module("kvjax.kernels_pallas")
    for module in (kvjax, kernels):
        if not Path(str(module.__file__)).is_relative_to(tree):
            raise ImportError(f"{module.__name__} is that of {module.__file__}, not of {tree}")

    policy = getattr(kvjax.presets, method)().rest
    spec = kvjax.CacheSpec(batch=1, capacity=capacity, dtype=jnp.bfloat16, **HEADS)
    # Nothing runs, so all layers may share their arrays. They are arrays, as shapes would lose
    # the memory kind.
    cache = kvjax.Cache(kvjax.init(policy, spec, layers=1).layers * layers)
    q, k = (
        jax.ShapeDtypeStruct((1, 1, HEADS[heads], spec.head_dim), spec.dtype)
        for heads in ("q_heads", "kv_heads")
    )

    def step(layer: Any, q: Any, k: Any) -> tuple[Any, Any]:
        out: tuple[Any, Any] = kvjax.attention(layer, q, k, k, flush=False)
        return out

    def loop(cache: Any, q: Any, k: Any, steps: Any) -> tuple[Any, Any]:
        def body(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            cache, q = carry
            after = []
            for layer in kvjax.flush(cache).layers:
                q, layer = step(layer, q, k)
                after.append(layer)
            return kvjax.Cache(tuple(after)), q

        done: tuple[Any, Any] = jax.lax.fori_loop(0, steps, body, (cache, q))
        return done

    steps = jax.ShapeDtypeStruct((), jnp.int32)
    jax.jit(loop).trace(cache, q, k, steps)  # imports the kernels, and what of JAX they need
    jax.clear_caches()
    loop_trace, traced = spent(
        lambda: jax.jit(loop, donate_argnums=0).trace(cache, q, k, steps)
    )
    lower, lowered = spent(traced.lower)
    compile_, _ = spent(lowered.compile)
    traces = []
    for _ in range(5):
        jax.clear_caches()
        traces.append(spent(lambda: jax.jit(step).trace(cache.layers[0], q, k))[0])
    jax.clear_caches()
    calls = python_calls(lambda: jax.jit(step).trace(cache.layers[0], q, k))
    return {
        "step_trace_s": min(traces),
        "step_calls": calls,
        "loop_trace_s": loop_trace,
        "loop_lower_s": lower,
        "loop_compile_s": compile_,
    }


def measure(tree: Path, method: str, layers: int, capacity: int) -> dict[str, float]:
    """`times` of the kvjax in `tree`, in a process of its own."""
    tree = tree.resolve()
    wanted = f"{str(tree)!r}, {method!r}, {layers}, {capacity}"
    call = f"import json, compile_time; print(json.dumps(compile_time.times({wanted})))"
    paths = os.pathsep.join(map(str, (tree, Path(__file__).resolve().parent)))
    env = {
        **os.environ,
        "PYTHONPATH": paths,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", call],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(args: Sequence[str] | None = None) -> None:
    from layers import out_of, save, show

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--trees",
        default=f"this={ROOT}",
        help="NAME=DIRECTORY of checkouts, separated by commas",
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out",
        type=Path,
        help="default: results/compile_time.json; with --quick nothing is written",
    )
    parser.add_argument("--quick", action="store_true", help="two layers, once")
    given = parser.parse_args(args)
    layers, repeats = (2, 1) if given.quick else (given.layers, given.repeats)
    trees = {
        name: Path(folder)
        for name, _, folder in (part.partition("=") for part in given.trees.split(","))
    }
    what = "CPU seconds to trace a decode step, and to trace, lower and compile a loop over layers for a CPU; "
    what += ", ".join(f"{k} {v}" for k, v in HEADS.items()) + f"; the least of {repeats} runs"
    for method in given.methods:
        run = partial(measure, method=method, layers=layers, capacity=given.capacity)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(repeats):
            for name, tree in trees.items():
                found[name].append(run(tree))
        for name, each in found.items():
            least = {part: min(one[part] for one in each) for part in each[0]}
            row = {
                "method": method,
                "tree": name,
                "layers": layers,
                **least,
                "cores": os.cpu_count(),
            }
            show(row)
            save(
                out_of(given, "compile_time.json"),
                what,
                [row],
                ("method", "tree", "layers", "backend"),
            )


if __name__ == "__main__":
    main()
