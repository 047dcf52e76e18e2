"""One GPU against several: the same tokens, and TPOT of a Llama-3.1-8B shape with random
weights, by placement.

    python benchmarks/devices.py [--methods full,fier] [--placements ctx=2,model=2+ctx=2] \\
        [--sizes 131072x2] [--links]

Needs two GPUs or more; with n of them the placements are none, a mesh of one device (what a
placement costs by itself), data=n (rows split, the model on each), model=n (heads, MLP and
vocabulary split) and ctx=n (the tokens of each row split, MLP and vocabulary too). Others are
named by their axes, and by "share" where each device selects its share of the budget:
ctx=2+share. `none` is left out by --no-none.

First a small model in float32 decodes by each method and placement, in plain JAX, and its
tokens must equal those of one GPU, but for those by share. Kernels are not compared in this way: that of `fier` rounds
queries to 16 bits, which by itself changes tokens of a model with random weights. The times are
of bfloat16 over a synthetic cache, medians over blocks of steps. Each decode loop is one
program, so they include one call from the host per block. `--prompt` also measures the time
until the logits after a prompt, and the difference of the logits from those of one GPU, in
standard deviations of the logits. `--links` measures all-reduces and all-gathers of the sizes
that a step has. `--drafts` times, in each cell of a method that selects, a draft step and a
verification of 5 tokens by full attention, each taken back, and in those of `full` a step.
`--shape llama-3.1-70b --layers 80` needs four GPUs of 80 GB; no device ever holds more than its
parts of the weights. A cell that fails, as for lack of memory, is a row that says so.

`full` selects nothing, so by share it runs the program of an exact selection, and is left out if
that is asked for, too.

Each row is written to results/devices.json as soon as it is measured, and replaces the row of
the same sizes; with `--missing`, times and drafts that the file has are not measured again. It
has the bytes of weights and cache of one device, the floor (the weights over the memory's
bandwidth, without the traffic between devices), and the collectives of the decode loop.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import throughput
from device_time import bytes_per_us
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from layers import implementation, out_of, save, show
from lossless import take_steps, time_steps
from named import names_of

import kvjax
from kvjax import PerLayer, Placement, presets
from kvjax.compiling import Program
from kvjax.generation import Generation, Stream, generate, prefill
from kvjax.memory import nbytes
from kvjax.models import Decoder, distribute

METHODS: dict[str, Callable[[int], PerLayer]] = {
    "full": lambda budget: presets.full(),
    "fier": partial(
        presets.fier, dense_capacity=0
    ),  # a cache with a placement selects however short it is
    "quest": partial(presets.quest, dense_capacity=0),
    "pariskv": partial(presets.pariskv, dense_capacity=0),
    "freekv": presets.freekv,
    "logquant": lambda budget: presets.logquant(),
    # Tokens that leave together have one scale by channel, and cannot be cut; one scale for
    # each token can.
    "logquant:key_axis=token": lambda budget: presets.logquant(window=64, key_axis="token"),
    "kivi": lambda budget: presets.kivi(),
    "tova": presets.tova,
}
# A page of quest becomes a page for each device where tokens are split, which is another cache:
# one chunk for all.
CHECKED = METHODS | {"quest": partial(presets.quest, dense_capacity=0, chunk=128)}
KEY = ("part", "method", "placement", "shape", "layers", "length", "batch", "budget", "device")
COLLECTIVE = re.compile(
    r" = .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


SHARE = "share"  # in the name of a placement
LINK_BYTES = (
    1 << 10,
    1 << 14,
    1 << 17,
    1 << 20,
    1 << 24,
)  # of a device: from the log-sums of a row to a prompt's part


def placement_of(name: str, devices: Sequence[Any]) -> Placement | None:
    """The placement named "mesh of 1", "none" (None: one device without a mesh) or by axes,
    such as "model=2+ctx=2", and "share" after them.
    """
    if name == "none":
        return None
    sizes = {"data": 1, "model": 1, "ctx": 1}
    axes = [part for part in name.split("+") if part not in ("mesh of 1", SHARE)]
    sizes |= {axis: int(n) for axis, _, n in (part.partition("=") for part in axes)}
    (data, model, ctx) = sizes.values()
    mesh = Mesh(
        np.array(devices[: data * model * ctx]).reshape(data, model, ctx),
        ("data", "model", "ctx"),
    )
    return Placement(
        mesh=mesh,
        batch="data",
        heads="model",
        context="ctx",
        selection="share" if selects_by_share(name) else "exact",
    )


def selects_by_share(name: str) -> bool:
    """True for a placement whose devices select other tokens than one device would."""
    return SHARE in name.split("+")


def link_times(devices: Sequence[Any], turns: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Microseconds of a collective over all devices, with one small kernel after it, in a loop
    of 16 of them.
    """
    n = len(devices)
    mesh, split = Mesh(np.array(devices), ("all",)), PartitionSpec("all")
    turn = {
        "all-reduce": lambda x: lax.psum(x, "all") * (1 / n),
        "all-gather": lambda x: jnp.sum(lax.all_gather(x, "all"), axis=0) * (1 / n),
    }
    for kind, one in turn.items():
        for size in LINK_BYTES:

            def body(_: Any, x: Array, one: Callable[[Array], Array] = one) -> Array:
                for _ in range(16):
                    x = one(x)
                return x

            loop = jax.shard_map(
                partial(lax.fori_loop, 0, turns, body),
                mesh=mesh,
                in_specs=split,
                out_specs=split,
                check_vma=False,
            )
            run, times = jax.jit(loop), []
            x = jax.device_put(jnp.ones((n, size // 4)), jax.NamedSharding(mesh, split))
            for _ in range(4):
                start = time.perf_counter()
                jax.block_until_ready(run(x))
                times.append(1e6 * (time.perf_counter() - start) / turns / 16)
            yield (
                f"{kind} of {size}",
                {"us": round(float(np.median(times[1:])), 3), "bytes": size},
            )


def small_model(width: int) -> Decoder:
    """Two layers of random weights, in float32."""
    config = replace(
        throughput.SHAPES["llama-3.2-1b"],
        layers=2,
        windows=(),
        hidden_size=width,
        intermediate_size=width,
        head_dim=64,
    )
    config = replace(
        config, vocab_size=512, initializer_range=0.05
    )  # with .2, 1e-6 of the weights change selections
    return throughput.random_model(config, "float32")


def answer(
    model: Decoder, method: str, place: Placement | None, *, length: int
) -> Generation | ValueError:
    """What the model generates from random prompts, or why a policy refuses `place`."""
    own = model if place is None else distribute(model, place)
    tokens = np.random.default_rng(0).integers(512, size=(8, length), dtype=np.int32)
    lengths = length - length // 16 * np.arange(8, dtype=np.int32)
    policy = CHECKED[method](320)
    policies = PerLayer(policy.first[:1], policy.rest)
    try:
        cache = kvjax.init(
            policies, own.spec(batch=8, capacity=length + 128), layers=2, placement=place
        )
    except ValueError as refused:  # tokens cannot be split
        return refused
    return generate(own, cache, tokens, lengths, max_new_tokens=length // 8)


def compare(
    answers: Iterable[tuple[str, Generation | ValueError]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """By placement, whether its tokens are those of the first, which is one device."""
    alone: Generation | None = None
    for name, done in answers:
        if isinstance(done, ValueError):
            yield name, {"error": str(done)[:200]}
            continue
        alone = alone or done
        error = float(np.abs(np.asarray(done.logits) - np.asarray(alone.logits)).max())
        yield (
            name,
            {
                "same_tokens": bool(np.array_equal(done.tokens, alone.tokens)),
                "largest_difference": error,
            },
        )


def begun(
    model: Decoder,
    policies: PerLayer,
    place: Placement | None,
    *,
    length: int,
    batch: int,
    new: int,
    filled: bool = True,
) -> tuple[Stream, dict[str, Any]]:
    """A generation of `new` tokens after a synthetic cache, and the bytes of a row of the
    table. One that is not `filled` has the same programs.
    """
    spec = model.spec(batch=batch, capacity=-(-(length + new) // 1024) * 1024)
    cache = kvjax.init(policies, spec, layers=model.config.layers, placement=place)
    if filled:
        cache = throughput.fill(cache, length)
    size, weights = nbytes(cache), nbytes(model)
    used = (
        max(device.memory_stats()["bytes_in_use"] for device in jax.devices())
        if device_has_stats()
        else 0
    )
    logits = jnp.asarray(
        np.random.default_rng(0).standard_normal((batch, model.config.vocab_size), np.float32)
    )
    if place is not None:
        vocabulary = model.head.kernel.get_value().sharding.spec[
            1
        ]  # as later logits, or a second program is compiled
        logits = jax.device_put(
            logits, jax.NamedSharding(place.mesh, PartitionSpec(place.batch, vocabulary))
        )
    found = {
        "weight_bytes": weights.device,
        "cache_bytes": size.device,
        "host_bytes": size.host,
        "used_bytes": used,  # of the fullest device, before the first step
        "floor_ms": round(weights.device / bytes_per_us() / 1e3, 4),
    }
    return Stream(model, cache, logits, new), found


def decode_time(run: Stream, *, block: int, blocks: int) -> tuple[dict[str, Any], np.ndarray]:
    """Times of a row of the table, and the first generated tokens."""
    begin = time.perf_counter()
    first = run.advance(block)
    compiled = time.perf_counter() - begin
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        run.advance(block)
        times.append(1e3 * (time.perf_counter() - start) / block)
    kvjax.raise_on_overflow(run.cache)
    found = COLLECTIVE.findall(
        run.programs(block)[0].lower().compile().as_text()
    )  # compiled before, and found again
    row = {
        "tpot_ms": round(float(np.median(times)), 4),
        "tpot_ms_min": round(min(times), 4),
        "tpot_ms_max": round(max(times), 4),
        "collectives": {kind: found.count(kind) for kind in sorted(set(found))},
        "compile_seconds": round(compiled, 1),
    }
    return row, first


def round_steps(method: str) -> dict[str, tuple[int, bool]]:
    """Tokens of the steps of a round that drafts by a selection, and whether a step is by full
    attention; a step of `full` to compare with."""
    if method == "full":
        return {"step_ms": (1, False)}
    return {"draft_ms": (1, False), "verify_5_ms": (5, True)}


def draft_times(
    model: Decoder, cache: kvjax.Cache, method: str, count: int
) -> dict[str, float]:
    """Milliseconds of `round_steps`."""
    found: dict[str, float] = {}
    for name, (tokens, exact) in round_steps(method).items():
        took, cache = time_steps(model, cache, tokens, exact, count)
        found[name] = round(took, 4)
    return found


def shape_of(leaf: Any) -> Any:
    """The shape of an array, on its mesh if it has one; other leaves as they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    home = leaf.sharding if isinstance(leaf.sharding, jax.NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)


def device_has_stats() -> bool:
    return jax.devices()[0].memory_stats() is not None


def prompt_time(
    model: Decoder,
    policies: PerLayer,
    place: Placement | None,
    *,
    tokens: np.ndarray,
    dtype: str,
) -> tuple[dict[str, Any], np.ndarray]:
    """A row: milliseconds until the logits after a prompt, read in two chunks; and the logits."""
    B, T = tokens.shape
    spec, times = model.spec(batch=B, capacity=T + 1024, dtype=dtype), []
    for _ in range(4):
        cache = jax.block_until_ready(
            kvjax.init(policies, spec, layers=model.config.layers, placement=place)
        )
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(prefill(model, cache, tokens, chunk=T // 2))
        times.append(1e3 * (time.perf_counter() - start))
        del cache
    row = {"prompt_ms": round(float(np.median(times[1:])), 3), "first_ms": round(times[0], 1)}
    return row, np.asarray(logits, np.float32)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds, or when the call of XLA that then
    runs has returned.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", type=names_of(CHECKED), default=["full", "fier"])
    parser.add_argument(
        "--placements",
        type=lambda text: text.split(","),
        help="of those above, in addition to none",
    )
    parser.add_argument(
        "--sizes", default="32768x8", help="tokens of a row x rows, such as 131072x2,1048576x1"
    )
    parser.add_argument(
        "--shape", choices=["llama-3.1-8b", "llama-3.1-70b"], default="llama-3.1-8b"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--prompt", type=int, default=0, help="also time a prompt of this many tokens, one row"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no further row after this many",
    )
    parser.add_argument(
        "--cell", type=int, default=300, help="give up a row after this many seconds"
    )
    parser.add_argument(
        "--links", action="store_true", help="also time collectives over all devices"
    )
    parser.add_argument(
        "--ahead",
        type=int,
        default=0,
        help="compile the cells before, so many at once; needs JAX_COMPILATION_CACHE_DIR",
    )
    parser.add_argument("--drafts", action="store_true", help="time drafts, too")
    parser.add_argument(
        "--missing", action="store_true", help="leave out what the file of --out has"
    )
    parser.add_argument("--no-check", action="store_true", help="compare no tokens")
    parser.add_argument("--no-times", action="store_true", help="time no steps")
    parser.add_argument(
        "--no-none", action="store_true", help="leave out one device without a mesh"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes on any devices; nothing is written"
    )
    given = parser.parse_args(args)
    end = time.monotonic() + given.seconds
    if not given.quick and (jax.default_backend() != "gpu" or jax.device_count() < 2):
        parser.error(
            "this compares one GPU with several, and found fewer than two; --quick runs on any devices"
        )
    if given.no_none and not given.no_check:
        parser.error(
            "tokens are compared with those of one device: leave --no-none out, or add --no-check"
        )
    config = replace(throughput.SHAPES[given.shape], layers=given.layers, windows=())
    sizes = [tuple(map(int, size.split("x"))) for size in given.sizes.split(",")]
    dtype, blocks, block, turns, width, length = "bfloat16", 4, 32, 32, 1024, 800
    if given.quick:
        config = replace(
            config,
            layers=3,
            windows=(),
            hidden_size=64,
            intermediate_size=64,
            vocab_size=64,
            head_dim=16,
        )
        dtype, blocks, block, turns, width, length = "float32", 2, 4, 1, 64, 96
        sizes, given.budget = [(600, batch) for _, batch in sizes], 320
    n = jax.device_count()
    names = given.placements or [
        "mesh of 1",
        *([f"data={n}", f"model={n}", f"ctx={n}"] if n > 1 else []),
    ]
    # The others are compared with "none".
    names = [*([] if given.no_none else ["none"]), *(name for name in names if name != "none")]
    places = {name: placement_of(name, jax.devices()) for name in names}
    rows: list[dict[str, Any]] = []
    out = out_of(given, "devices.json")

    def keep(part: str, method: str, name: str, found: dict[str, Any]) -> None:
        asked = {
            "shape": given.shape,
            "layers": config.layers,
            "length": 0,
            "batch": 0,
            "budget": given.budget,
        }
        rows.append({"part": part, "method": method, "placement": name, **asked, **found})
        show(rows[-1])
        save(
            out,
            "one GPU against several. tokens: those of a small model in float32. times: milliseconds a step of the "
            "shape of a Llama in bfloat16 by the host's clock, medians of 4 blocks of 32 steps of one program; "
            "keys, values and weights normal; floor: bytes of the weights of a device over the rate of its memory. "
            "links: microseconds of a collective with one small kernel, in a loop on the devices; drafts: milliseconds "
            "of a step that drafts and of a verification of 5 tokens, each taken back, medians of 3 runs of 32",
            rows[-1:],
            KEY,
        )

    def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a cell, or why it has none."""
        try:
            with limited(given.cell):
                return run()
        except Exception as error:  # such as a lack of memory: the other cells still count
            if given.quick:
                raise
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        finally:
            gc.collect()

    for name, found in link_times(jax.devices(), turns) if given.links else ():
        keep(
            "links",
            "all-gather" if "gather" in name else "all-reduce",
            f"{name}, {n} devices",
            found,
        )
    if not given.no_check:
        with implementation("xla"), jax.default_matmul_precision("highest"):
            model = small_model(width)
            for method in given.methods:
                answers = (
                    (name, answer(model, method, place, length=length))
                    for name, place in places.items()
                    if not selects_by_share(name)
                )
                for name, found in compare(answers):
                    keep("tokens", method, name, found)
                    if time.monotonic() > end:
                        break
    alone: dict[Any, Any] = {}
    prompt = np.random.default_rng(1).integers(
        config.vocab_size, size=(1, given.prompt), dtype=np.int32
    )

    def read_prompt(place: Placement | None) -> dict[str, Any]:
        model = throughput.random_model(config, dtype, placement=place)
        row, logits = prompt_time(model, presets.full(), place, tokens=prompt, dtype=dtype)
        base = alone.setdefault("prompt", logits)
        apart = float(np.abs(logits - base).max() / np.std(base))
        return row | {"difference_of_logits": round(apart, 5), "same_tokens": apart < 0.5}

    for name, place in places.items() if given.prompt else ():
        # One row is not split.
        if time.monotonic() < end and (place is None or place.mesh.shape["data"] == 1):
            keep(
                "prompt",
                "full",
                name,
                tried(partial(read_prompt, place)) | {"length": given.prompt, "batch": 1},
            )

    kept: dict[str, Decoder] = {}  # the model in one placement

    def begin(
        method: str, name: str, length: int, batch: int, *, filled: bool = True
    ) -> tuple[Stream, dict[str, Any]]:
        if name not in kept:
            kept.clear()
            gc.collect()
            kept[name] = throughput.random_model(config, dtype, placement=places[name])
        new = block * (blocks + 1)
        return begun(
            kept[name],
            METHODS[method](given.budget),
            places[name],
            length=length,
            batch=batch,
            new=new,
            filled=filled,
        )

    def compile_later(
        cell: tuple[str, str, int, int], pool: ThreadPoolExecutor
    ) -> dict[str, Any]:
        run, _ = begin(*cell, filled=False)
        decoding = run.programs(block)[0]
        # shapes hold no cache while others are compiled
        like = jax.tree.map(shape_of, decoding.args)
        pool.submit(Program(decoding.function, like, decoding.static).compile)
        for tokens, exact in round_steps(cell[0]).values() if given.drafts else ():
            how = {"T": tokens, "exact": exact, "count": block}
            pool.submit(Program(take_steps, like[:2], how).compile)
        return {}

    def decode(method: str, name: str, length: int, batch: int) -> dict[str, Any]:
        run, row = begin(method, name, length, batch)
        times, first = decode_time(run, block=block, blocks=blocks)
        same = np.mean(first == alone.setdefault((method, length, batch), first))
        return {**row, **times, "share_of_same_tokens": round(float(same), 4)}

    known = (
        json.loads(out.read_text())["rows"] if given.missing and out and out.is_file() else []
    )

    def wanted(part: str, method: str, name: str, length: int, batch: int) -> bool:
        """True if the rows are split evenly, and no other row says as much."""
        place = places[name]
        if place is not None and batch % place.mesh.shape["data"]:
            return False
        if method == "full" and name.removesuffix("+share") in set(places) - {name}:
            return False
        asked = (part, method, name, given.shape, config.layers, length, batch, given.budget)
        return not any(
            "error" not in row and asked == tuple(row[key] for key in KEY[:-1]) for row in known
        )

    cells = [
        (method, name, *size) for name in places for size in sizes for method in given.methods
    ]
    left = [] if given.no_times else [cell for cell in cells if wanted("times", *cell)]
    with ThreadPoolExecutor(
        given.ahead or 1
    ) as pool:  # programs of all cells at once, kept by jax's cache on disk
        for cell in left if given.ahead else ():
            if time.monotonic() < end:
                tried(partial(compile_later, cell, pool))
    while left and time.monotonic() < end:
        method, name, length, batch = left.pop(0)
        found = tried(partial(decode, method, name, length, batch))
        keep("times", method, name, {**found, "length": length, "batch": batch})

    def draft(method: str, name: str, length: int, batch: int) -> dict[str, Any]:
        run, row = begin(method, name, length, batch)
        cache = run.cache
        del run
        return {**row, **draft_times(kept[name], cache, method, block)}

    rounds = [cell for cell in cells if wanted("drafts", *cell)] if given.drafts else []
    while rounds and time.monotonic() < end:
        method, name, length, batch = rounds.pop(0)
        found = tried(partial(draft, method, name, length, batch))
        keep("drafts", method, name, {**found, "length": length, "batch": batch})
    left += rounds
    if left:
        print(
            "no time left for",
            ", ".join(f"{method} {name} {size}x{rows}" for method, name, size, rows in left),
        )
    wrong = [row for row in rows if row.get("same_tokens") is False]
    if wrong:
        raise SystemExit(f"tokens differ from those of one device: {wrong}")


if __name__ == "__main__":
    main()
