"""Compiles every preset's programs for TPUs, on a machine that has none, and says what they move.

    python -m benchmarks.tpu [--chips v5e,v6e,tpu7x] [--presets full,fier] [--programs step,flush]
                             [--capacity 131072] [--rows 1] [--check] [--json FILE] [--hlo FOLDER]
    python -m benchmarks.tpu --kernels [--chips v5e] [--json FILE]

Needs libtpu (`pip install "jax[tpu]"`), whose compiler runs on any CPU. For each chip, preset and
program it prints, beside dense attention by hand, which is compiled in the same run:

- MB: bytes of the main memory that a run reads and writes, counted from the compiled program,
  and for Pallas kernels from the jaxpr (`benchmarks/tpu_moves.py`). XLA's own figure also has
  what stays in the fast memory, and counts a loop once. A loop whose number of rounds depends on
  data reads all of what it slices.
- DMAs: slices that gathers read, each by a DMA of its own, and those of kernels; beside them
  those of gathers that the compiler gives to SparseCores.
- us: derived, not measured. Bytes at the chip's bandwidth, 30 ns more for each slice that a
  gather reads, and for one by a SparseCore 30 ns of one of its subcores. A kernel takes as long
  as its bytes, its DMAs at 30 ns each, or its bundles, which `--kernels` counts, whichever is
  longest. What XLA's own fusions compute is left out.
  The kernel that reads groups of 128 tokens reads as many as selections of trained models touch:
  `benchmarks/touched.py` counted them, at the same share of tokens selected.
- temp: memory beside arguments and results.
- copies: instructions outside of fusions, in any branch or loop, that copy or transpose an array
  as large as one of the cache.
- compile: CPU seconds, of this machine's cores.

`--check` fails if a program has such a copy, or temporary memory above 5 % of the bytes that keys
and values of all tokens take.

One layer of Llama-3.1-8B's shapes, budget 2048, in bfloat16; the cache is donated. Of a branch the
more expensive side counts. Nothing runs, so no time is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "TPU_SKIP_MDS_QUERY", "1"
)  # libtpu otherwise asks the network which TPU this is
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no process here holds a TPU
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding, use_abstract_mesh

import kvjax
from benchmarks.named import caches, names_of
from benchmarks.tpu_moves import BANDWIDTH, CLOCK, Moves, bytes_of, derived_us, kernel_moves
from benchmarks.tpu_program import Program, cache_sized_copies
from kvjax import presets
from kvjax.evaluate.provenance import provenance
from kvjax.kernels_pallas.tpu import attend_groups, attend_pages, score_1bit, score_pages

CHIPS = {
    "v5e": "v5e:2x2",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}  # a name, and its smallest topology
# What a user passes to `jax.jit(..., compiler_options=...)`. On a v6e the compiler leaves gathers to
# the TensorCore unless it is asked; on a TPU7x it gives long ones to the SparseCores by itself.
OPTIONS = {"v6e": {"xla_tpu_offload_gather_to_sparsecore": True}}
BUDGET = 2048
DENSE = "dense by hand"
STEPS = 8  # tokens of a step of several
PROGRAMS = ("step", "steps", "prompt", "flush")
MOST_TEMP = 0.05  # of the bytes of all tokens' keys and values


@dataclass(frozen=True)
class Row:
    """What the compiler says of one program."""

    chip: str
    preset: str
    program: str
    rows: int
    capacity: int
    bytes: int  # with those of kernels
    kernel_bytes: int
    dmas: int
    sparsecore_dmas: int
    us: float  # derived
    us_least: float  # if selected tokens lie side by side
    us_most: float  # if as many groups of tokens as possible hold one
    cache: int  # bytes of the arrays that grow with the capacity
    temp: int
    copies: list[str]  # shapes with layouts
    compile_s: float
    faults: list[str]


# ------------------------------------------------------------------------------------------------------------ programs


def programs(
    preset: str, spec: kvjax.CacheSpec
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions of a cache of one layer and tokens, and the shapes of their arguments."""
    layer = jax.eval_shape(lambda: kvjax.init_layer(policy_of(preset), spec))

    def tokens(count: int) -> list[jax.ShapeDtypeStruct]:
        heads = spec.q_heads, spec.kv_heads, spec.kv_heads
        return [
            jax.ShapeDtypeStruct((spec.batch, count, n, spec.head_dim), spec.dtype)
            for n in heads
        ]

    def flush(layer: kvjax.LayerCache) -> kvjax.LayerCache:
        return kvjax.flush(kvjax.Cache((layer,))).layers[0]

    chunk = min(2048, spec.capacity // 4)
    return {
        "step": (kvjax.attention, (layer, *tokens(1))),
        "steps": (kvjax.decode, (layer, *tokens(STEPS))),
        "prompt": (kvjax.prefill, (layer, *tokens(chunk))),
        "flush": (flush, (layer,)),
    }


def policy_of(preset: str) -> kvjax.Policy:
    takes_budget = "budget" in presets.REGISTRY[preset.partition(":")[0]].settings
    return (
        presets.parse_with_budget(preset, BUDGET)[0] if takes_budget else presets.parse(preset)
    ).rest


def growing(preset: str, spec: kvjax.CacheSpec) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a layer's cache that are larger for more capacity: not its recent block."""
    if preset == DENSE:
        return []
    twice = replace(spec, capacity=2 * spec.capacity)
    caches = [
        jax.eval_shape(partial(kvjax.init_layer, policy_of(preset), s)) for s in (spec, twice)
    ]
    return [a for a, b in zip(*map(jax.tree.leaves, caches), strict=True) if a.shape != b.shape]


def dense_by_hand(
    k: Array, v: Array, length: Array, q: Array, new_k: Array, new_v: Array
) -> tuple[Array, Array, Array]:
    """A step of dense attention over k, v [B, K, S, D], as one writes it for a TPU."""
    B, K, S, D = k.shape
    k = lax.dynamic_update_slice(k, jnp.swapaxes(new_k, 1, 2), (0, 0, length, 0))
    v = lax.dynamic_update_slice(v, jnp.swapaxes(new_v, 1, 2), (0, 0, length, 0))
    q = q.reshape(B, K, -1, D)
    logits = jnp.einsum("bkgd,bksd->bkgs", q, k, preferred_element_type=jnp.float32) * D**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(S) <= length, logits, -1e30), axis=-1)
    out = jnp.einsum(
        "bkgs,bksd->bkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(v.dtype), k, v


def dense_program(spec: kvjax.CacheSpec) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, spec.dtype)

    B, D = spec.batch, spec.head_dim
    stored = array(B, spec.kv_heads, spec.capacity, D)
    new = array(B, 1, spec.kv_heads, D)
    length = jax.ShapeDtypeStruct((), jnp.int32)
    return dense_by_hand, (stored, stored, length, array(B, 1, spec.q_heads, D), new, new)


# ----------------------------------------------------------------------------------------------------------- measuring


def compile_for(
    chip: str, run: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...] = ()
) -> tuple[Any, Any, float]:
    """The compiled program, its jaxpr, and the CPU seconds that compiling took."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    sharding = SingleDeviceSharding(topology.devices[0])
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args
    )
    chip_alone = Mesh(np.array(topology.devices[:1]), ("chip",)).abstract_mesh
    # Operations choose by the TPU that they are traced for.
    with use_abstract_mesh(chip_alone):
        traced = jax.jit(run, donate_argnums=donated).trace(*args)
        lowered = traced.lower(lowering_platforms=("tpu",))
    start = time.process_time()
    compiled = lowered.compile(compiler_options=OPTIONS.get(chip))
    return compiled, traced.jaxpr.jaxpr, time.process_time() - start


def measure(
    chip: str,
    preset: str,
    program: str,
    spec: kvjax.CacheSpec,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    donated: tuple[int, ...],
    hlo: Path | None,
) -> Row:
    compiled, jaxpr, seconds = compile_for(chip, run, args, donated)
    text = compiled.as_text()
    if hlo is not None:
        hlo.mkdir(parents=True, exist_ok=True)
        (hlo / f"{preset}_{program}_{chip}_{spec.capacity}x{spec.batch}.txt").write_text(text)
    cache = growing(preset, spec) or jax.tree.leaves([args[i] for i in donated])
    parsed = Program(text)
    copies = cache_sized_copies(parsed, cache)
    temp = compiled.memory_analysis().temp_size_in_bytes
    whole = (
        2
        * spec.batch
        * spec.kv_heads
        * spec.capacity
        * spec.head_dim
        * jnp.dtype(spec.dtype).itemsize
    )
    faults = [f"copies {shape} {times} times" for shape, times in Counter(copies).items()]
    if temp > MOST_TEMP * whole:
        faults.append(f"takes {temp / whole:.0%} of the cache's bytes as temporary memory")
    outside = parsed.moved()
    slices = parsed.gathered(on_sparsecore=False)
    on_sparsecore = parsed.gathered(on_sparsecore=True)

    def priced(groups: int) -> tuple[dict[str, Moves], float]:
        """The moves of kernels if a KV head's selections touch so many groups, and the time."""
        kernels = kernel_moves(jaxpr, {GROUPS: groups_read(groups, spec)})
        bundles = bundles_known(chip, groups)
        return kernels, derived_us(chip, outside, slices, on_sparsecore, kernels, bundles)

    kernels, us = priced(touched(preset, spec.capacity))
    return Row(
        chip=chip,
        preset=preset,
        program=program,
        rows=spec.batch,
        capacity=spec.capacity,
        bytes=outside + bytes_of(kernels),
        kernel_bytes=bytes_of(kernels),
        dmas=slices + sum(moves.dmas for moves in kernels.values()),
        sparsecore_dmas=on_sparsecore,
        us=round(us, 1),
        us_least=round(priced(-(-BUDGET // attend_groups.GROUP))[1], 1),
        us_most=round(priced(min(BUDGET, spec.capacity // attend_groups.GROUP))[1], 1),
        cache=sum(leaf.size * leaf.dtype.itemsize for leaf in cache),
        temp=temp,
        copies=copies,
        compile_s=round(seconds, 1),
        faults=faults,
    )


# ------------------------------------------------------------------------------------------------------------- kernels

RESULTS = Path(__file__).parent / "results" / "tpu.json"


TOUCHED = Path(__file__).parent / "results" / "touched.json"
GROUPS = "kvjax_attend_groups"


def bundles_known(chip: str, groups: int) -> dict[str, int]:
    """By kernel, the bundles of a step of its grid, as `--kernels` counted them for a chip; of
    the one that reads groups those of so many."""
    found = json.loads(RESULTS.read_text()).get("kernels") if RESULTS.exists() else None
    rows = found["rows"] if found else []
    known = {f"kvjax_{row['name']}": row["bundles"] for row in rows if row["chip"] == chip}
    if GROUPS in known:
        known[GROUPS] = known[GROUPS] * parts_of(groups) // parts_of(KERNEL_GROUPS)
    return known


KERNEL_GROUPS = 512  # that a KV head touches, where `--kernels` counts bundles


def parts_of(groups: int) -> int:
    """The rounds in which the kernel attends to so many groups."""
    return -(-groups // attend_groups.TOGETHER)


def touched(preset: str, capacity: int) -> int:
    """The groups of a cache that a KV head's selections touch, by the share that those of a
    trained model touch with nearly the same share of tokens selected; of a method that was not
    measured, as many as it can."""
    most = min(BUDGET, capacity // attend_groups.GROUP)
    rows = json.loads(TOUCHED.read_text())["rows"] if TOUCHED.exists() else []
    name = preset.partition(":")[0]
    own = [row for row in rows if (row["method"], row["size"]) == (name, attend_groups.GROUP)]
    if not own:
        return most

    def distance(row: dict[str, Any]) -> float:
        return abs(row["selected"] / (row["groups"] * row["size"]) - BUDGET / capacity)

    nearest = min(own, key=distance)
    return round(capacity // attend_groups.GROUP * nearest["touched"] / nearest["groups"])


def groups_read(groups: int, spec: kvjax.CacheSpec) -> Moves:
    """The own DMAs of the kernel that reads groups, for the queries of one KV head."""
    size = attend_groups.GROUP * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    return Moves(bytes=2 * groups * size, dmas=2 * groups)


@dataclass(frozen=True)
class KernelRow:
    """What the compiler makes of one kernel."""

    chip: str
    name: str
    shapes: str
    bundles: int  # of a step of the grid
    steps: int
    bytes: int
    us: float | None  # of the bundles; None where the clock is not known
    us_of_bytes: float


@dataclass(frozen=True)
class KernelProgram:
    """A kernel with shapes as a step of a long cache has them."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    shapes: str
    rounds: int = 1  # of the loop that makes up a step of its grid; its code is counted once
    own: Moves | None = None  # DMAs of a step of its grid, where the data say how many


def kernel_programs(capacity: int) -> dict[str, KernelProgram]:
    """Kernels for eight heads with four query heads each."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 8, *shape), dtype)

    q = array(4, 128)
    groups = array(capacity // 32, 128)
    corners = array(capacity // 16, 128)
    stored = array(capacity, 128)
    selection = [array(1, BUDGET, dtype=dtype) for dtype in (jnp.int32, jnp.bool_)]
    heads = "8 kv heads of 128, 4 query heads each"
    return {
        "score_1bit": KernelProgram(
            score_1bit.score_1bit,
            (q, array(capacity, 16, dtype=jnp.uint8), groups, groups),
            f"{capacity} tokens, {heads}",
            rounds=min(score_1bit.PARTS, capacity // score_1bit.PART),
        ),
        "score_pages": KernelProgram(
            score_pages.score_pages,
            (q, corners, corners),
            f"{capacity // 16} pages, {heads}",
        ),
        "attend_pages": KernelProgram(
            partial(attend_pages.attend_pages, together=16, scale=128**-0.5),
            (q, stored, stored, *selection),
            f"{BUDGET // 16} pages of 16 tokens, {heads}",
        ),
        "attend_groups": KernelProgram(
            partial(attend_groups.attend_groups, scale=128**-0.5),
            (q, stored, stored, *selection),
            f"{KERNEL_GROUPS} groups of 128 tokens, {heads}",
            rounds=parts_of(KERNEL_GROUPS),
            own=Moves(2 * KERNEL_GROUPS * 128 * 128 * 2, 2 * KERNEL_GROUPS),
        ),
    }


def kernel_rows(chips: Sequence[str], capacity: int) -> Iterator[KernelRow]:
    """Compiles each kernel, with a dump of its final bundles."""
    for chip in chips:
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, "-m", "benchmarks.tpu"]
            command = [*program, "--kernel-into", folder, "--chips", chip]
            flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            environment = {**os.environ, "LIBTPU_INIT_ARGS": flags}
            subprocess.run([*command, "--capacity", str(capacity)], check=True, env=environment)
            for name, program_of_kernel in kernel_programs(capacity).items():
                yield kernel_row(chip, name, program_of_kernel, Path(folder))


def kernel_row(chip: str, name: str, program: KernelProgram, dump: Path) -> KernelRow:
    by_data = {} if program.own is None else {f"kvjax_{name}": program.own}
    traced = jax.make_jaxpr(program.run)(*program.args)
    (moves,) = kernel_moves(traced.jaxpr, by_data).values()
    bundles = bundles_of(name, dump) * program.rounds
    clock = CLOCK.get(chip)
    return KernelRow(
        chip=chip,
        name=name,
        shapes=program.shapes,
        bundles=bundles,
        steps=moves.steps,
        bytes=moves.bytes,
        us=None if clock is None else round(1e6 * bundles * moves.steps / clock, 1),
        us_of_bytes=round(1e6 * moves.bytes / BANDWIDTH[chip], 1),
    )


def bundles_of(kernel: str, dump: Path) -> int:
    """The bundles of a kernel's final code, in a dump of the compiler."""
    (found,) = dump.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt")
    lines = found.read_text().splitlines()
    return sum(bool(re.fullmatch(r"\s*\d+(\s+\d+){9}\s*", line)) for line in lines)


def measure_all(given: argparse.Namespace) -> Iterator[Row]:
    spec = kvjax.CacheSpec(
        batch=given.rows,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        capacity=given.capacity,
        dtype=jnp.bfloat16,
    )
    for chip in given.chips:
        yield measure(chip, DENSE, "step", spec, *dense_program(spec), (0, 1), given.hlo)
        for preset in given.presets:
            for name, (run, args) in programs(preset, spec).items():
                if name in given.programs:
                    yield measure(chip, preset, name, spec, run, args, (0,), given.hlo)


def about() -> dict[str, Any]:
    """The provenance of a run, with the version of the compiler; JSON."""
    made = provenance()
    return made | {"versions": made["versions"] | {"libtpu": version("libtpu")}}


def save(path: Path, run: dict[str, Any]) -> None:
    """Adds a run to those of a file, from which it removes earlier rows of the same programs."""
    whole = json.loads(path.read_text()) if path.exists() else {"runs": []}
    runs = whole["runs"]
    measured = set(map(program_of, run["rows"]))
    for earlier in runs:
        earlier["rows"] = [row for row in earlier["rows"] if program_of(row) not in measured]
    runs = [earlier for earlier in runs if earlier["rows"]]
    path.write_text(json.dumps({**whole, "runs": [*runs, run]}, indent=1) + "\n")


def save_kernels(path: Path, made: dict[str, Any]) -> None:
    """Replaces the figures of kernels in a file of runs."""
    whole = json.loads(path.read_text()) if path.exists() else {"runs": []}
    path.write_text(json.dumps({**whole, "kernels": made}, indent=1) + "\n")


def program_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("chip", "preset", "program", "rows", "capacity"))


def shown(row: Row) -> str:
    return (
        f"{row.chip:6} {row.preset:14} {row.program:7} {row.bytes / 1e6:9.1f} MB  {row.dmas:6d} DMAs  "
        f"{row.sparsecore_dmas:6d} by SparseCores  "
        f"{row.us:8.1f} us  temp {row.temp / 1e6:8.2f} MB  compile {row.compile_s:5.1f} s  "
        f"{'; '.join(row.faults) or 'no fault'}"
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", type=names_of(CHIPS, "chip"), default=list(CHIPS))
    parser.add_argument(
        "--presets", type=caches(DENSE, apart=","), default=list(presets.REGISTRY)
    )
    parser.add_argument(
        "--programs", type=names_of(PROGRAMS, "program"), default=list(PROGRAMS)
    )
    parser.add_argument("--capacity", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail on a copy as large as a cache, or much temporary memory",
    )
    parser.add_argument("--json", type=Path, help="a file of runs, to which this one is added")
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled programs")
    parser.add_argument("--kernels", action="store_true", help="count the kernels' bundles")
    parser.add_argument("--kernel-into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.kernel_into is not None:
        for program in kernel_programs(given.capacity).values():
            compile_for(given.chips[0], program.run, program.args)
        return
    if given.kernels:
        found = [asdict(row) for row in kernel_rows(given.chips, given.capacity)]
        print(json.dumps(found, indent=1))
        if given.json is not None:
            save_kernels(given.json, {"provenance": about(), "rows": found})
        return
    rows = []
    for row in measure_all(given):
        print(shown(row), flush=True)
        rows.append(row)
        if given.json is not None:
            save(given.json, {"provenance": about(), "rows": [asdict(row) for row in rows]})
    if given.check and any(row.faults for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
