"""How large the library is, and how much of it a decode step passes.

    python benchmarks/sizes.py [--tree DIR]

Prints JSON: lines of Python in `kvjax/`, words of README, docs (without tables) and
CONTRIBUTING, names in `__all__`, protocols, and for a decode step of each method of `METHODS`,
while it is traced on a CPU: the functions of the library that are called, the files that they
are in, and the protocols that `isinstance` is asked for. `tests/packaging/test_sizes.py` and
`test_readme.py` hold these numbers.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("full", "fier", "pariskv", "quest", "freekv", "logquant", "h2o")
PARTS = ("kvjax", "kernels_pallas")  # the folders of a step


def sources(tree: Path, folder: str = "kvjax") -> Iterator[Path]:
    return (path for path in sorted((tree / folder).rglob("*.py")) if "data" not in path.parts)


def lines(tree: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(tree))


def words(tree: Path) -> dict[str, int]:
    """Words of what people read: README and CONTRIBUTING whole, the pages of docs/ without
    their tables.
    """

    def count(path: Path, tables: bool = True) -> int:
        text = path.read_text(encoding="utf-8").splitlines()
        return sum(len(line.split()) for line in text if tables or not line.startswith("|"))

    docs = sum(count(path, tables=False) for path in (tree / "docs").glob("*.md"))
    return {
        "README": count(tree / "README.md"),
        "docs": docs,
        "CONTRIBUTING": count(tree / "CONTRIBUTING.md"),
    }


def protocols(tree: Path) -> list[str]:
    """The classes that have `Protocol` as a base."""

    def name(base: ast.expr) -> str:
        base = base.value if isinstance(base, ast.Subscript) else base
        return (
            base.attr
            if isinstance(base, ast.Attribute)
            else base.id
            if isinstance(base, ast.Name)
            else ""
        )

    return sorted(
        node.name
        for path in sources(tree)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "Protocol" in map(name, node.bases)
    )


def passed(tree: Path, run: Callable[[], Any]) -> tuple[set[Any], set[str]]:
    """The functions of the library that `run` calls, and the protocols of which it asks whether
    something is one.
    """
    folders = tuple(str(tree / part) + "/" for part in PARTS)
    functions, asked = set(), set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(folders):
            functions.add(code)
        elif code.co_name == "__instancecheck__" and "cls" in frame.f_locals:
            cls = frame.f_locals["cls"]
            if getattr(cls, "_is_protocol", False) and cls.__module__.startswith("kvjax"):
                asked.add(cls.__name__)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions, asked


def step(kv: Any, method: str) -> Callable[[], Any]:
    """Traces a decode step: it writes one token to a layer and attends."""
    import jax
    import jax.numpy as jnp

    spec = kv.CacheSpec(
        batch=1, q_heads=8, kv_heads=2, head_dim=128, capacity=4096, dtype=jnp.bfloat16
    )
    policy = getattr(kv.presets, method)().rest
    cache = kv.init(policy, spec, layers=1).layers[0]
    q, k = (
        jax.ShapeDtypeStruct((1, 1, n, spec.head_dim), spec.dtype)
        for n in (spec.q_heads, spec.kv_heads)
    )
    return lambda: jax.jit(lambda cache, q, k: kv.attention(cache, q, k, k, flush=False)).trace(
        cache, q, k
    )


def sizes(tree: Path = ROOT) -> dict[str, Any]:
    import jax

    import kvjax

    found: dict[str, Any] = {
        "lines": lines(tree),
        "words": words(tree),
        "names": len(kvjax.__all__),
        "protocols": protocols(tree),
        "steps": {},
    }
    # with JAX's plugin for GPUs a step would trace kernels too
    kvjax.ops.op._has_cuda_plugin = lambda: False
    for method in METHODS:
        trace = step(kvjax, method)
        trace()  # imports what a step imports
        jax.clear_caches()
        functions, asked = passed(tree, trace)
        files = {code.co_filename for code in functions}
        found["steps"][method] = {
            "functions": len(functions),
            "files": len(files),
            "asked": sorted(asked),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; default: this one")
    tree = parser.parse_args().tree.resolve()
    sys.path.insert(0, str(tree))
    import kvjax

    kvjax.__path__.append(str(tree))  # the kernels of a checkout are outside the package
    importlib.import_module("kvjax.kernels_pallas")
    print(json.dumps(sizes(tree), indent=1))


if __name__ == "__main__":
    main()
