"""The cost of a cache: TTFT, TPOT, tokens per second, bytes of the cache and peak memory, by
cache, length and batch.

The code that is timed is what users run: the prefill of `kvjax.generate` and its loop on the
device, which donates the cache. All programs are compiled, and run once, before. A prompt has
exactly `length` random tokens and is prefilled by the model. At long contexts that takes most
of the time, and decoding does not need it; so with `Workload.synthetic`, keys and values are
drawn at random and stored by each layer's policy. The loop runs on the device in blocks of
steps, and the host reads the clock after each block: the time per output token (TPOT) is the
time of a block over its steps. To start a block takes the host some milliseconds, for a model
of 32 layers, which is visible if blocks have few steps.

A cell that does not fit in memory is a result as well. Cells are saved to the store of
`kvjax.evaluate.store` one by one. Times depend on the device, on every version and on every
line of the source, so here these are part of the key: cells that were measured with other code
are measured again.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache.cache import Cache, LayerCache, init, raise_on_overflow
from kvjax.call import run
from kvjax.evaluate.provenance import provenance
from kvjax.evaluate.store import FORMAT, Cell, Progress
from kvjax.generation import Stream, warm_up
from kvjax.generation.prefilling import chunk_size, prefill, prompt_programs
from kvjax.memory import in_units, nbytes, shapes
from kvjax.models import Decoder, DecoderConfig
from kvjax.models.decoder import decoder_of_shapes
from kvjax.models.rope import Default, Llama3
from kvjax.models.weights import model_shardings
from kvjax.policies import PerLayer, Recurrent
from kvjax.sharding.placement import Placement
from kvjax.spec import CacheSpec, padded_capacity, require_int
from kvjax.steps import Tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The settings that all cells of a sweep share."""

    steps: int = 128  # decode steps under the clock
    block: int = 32  # steps that are timed together; one block runs before the clock starts
    chunk: int | None = None  # of the prompt, as in `kvjax.generation.prefill`
    synthetic: bool = False  # random keys and values in place of a prompt; without TTFT
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "block"):
            require_int(f"Workload({name}=...)", getattr(self, name), at_least=1)
        if self.chunk is not None:
            require_int("Workload(chunk=...)", self.chunk, at_least=2)
        require_int("Workload(seed=...)", self.seed, at_least=0)

    @property
    def new_tokens(self) -> int:
        """Tokens that a row decodes, including those before the clock starts."""
        return self.block + self.steps

    def spec(self, model: Decoder, length: int, batch: int) -> CacheSpec:
        """A layer's cache of `batch` rows that decode after `length` tokens."""
        return model.spec(batch=batch, capacity=padded_capacity(length + self.new_tokens))


def time_cell(
    model: Decoder,
    caches: PerLayer,
    *,
    length: int,
    batch: int,
    workload: Workload = Workload(),
) -> dict[str, Any]:
    """Measures one cell: seconds, tokens per second and bytes of decoding `batch` rows after
    `length` tokens each.

    `ttft_seconds` is the prefill, up to the logits of the first token; `tpot_ms` the median
    over blocks of steps, with `tpot_ms_min`, `_max` and `_mean` (a block in which a chunk is
    flushed is slower; the mean has its share). `peak_bytes` is the peak that the device reports
    (`peak_of` "device") if this cell raised it, as a process cannot reset it; else the need of
    the largest compiled program, arguments and temporaries ("programs").

    Raises:
      JaxRuntimeError: RESOURCE_EXHAUSTED, if it does not fit.
    """
    require_int("length", length, at_least=1)
    require_int("batch", batch, at_least=1)
    rng, block = np.random.default_rng(workload.seed), workload.block
    new, spec = workload.new_tokens, workload.spec(model, length, batch)
    peak = _device_peak()

    def empty() -> Cache:
        return jax.block_until_ready(init(caches, spec, layers=model.config.layers))

    begin = time.perf_counter()
    row: dict[str, Any] = {"ttft_seconds": None, "prefill_tokens_per_second": None}
    if workload.synthetic:
        cache = fill(empty(), length, seed=workload.seed, chunk=workload.chunk)
        logits = jnp.asarray(rng.standard_normal((batch, model.config.vocab_size), np.float32))
    else:
        warm_up(model, empty(), length, max_new_tokens=new, chunk=workload.chunk)
        tokens, cache = (
            rng.integers(model.config.vocab_size, size=(batch, length), dtype=np.int32),
            empty(),
        )
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(
            prefill(model, cache, tokens, chunk=workload.chunk, first_chunk=True)
        )
        row["ttft_seconds"] = time.perf_counter() - start
        row["prefill_tokens_per_second"] = batch * length / row["ttft_seconds"]
    run = Stream(model, cache, logits, new)
    del cache, logits
    run.advance(block)
    row["warm_up_seconds"] = time.perf_counter() - begin - (row["ttft_seconds"] or 0.0)

    row |= time_steps(run, block)
    size = nbytes(run.cache)
    row |= {
        "cache_bytes_device": size.device,
        "cache_bytes_host": size.host,
        "weight_bytes": nbytes(model).device,
    }
    after = _device_peak()
    rose = peak is not None and after is not None and after > peak
    row["peak_bytes"] = after if rose else _program_bytes(model, run, length, workload)
    row["peak_of"] = "device" if rose else "programs"
    return row


def time_steps(run: Stream, block: int) -> dict[str, Any]:
    """Times the rest of a run, `block` steps at a time: milliseconds per token, and tokens per
    second over all rows.

    Run the first block after a compilation before this.

    Raises:
      RuntimeError: a cache took more tokens than it holds.
    """
    each = []
    while True:
        start = time.perf_counter()
        count = run.advance(block).shape[1]  # waits for the device
        if not count:
            break
        each.append(1e3 * (time.perf_counter() - start) / count)
    raise_on_overflow(run.cache)
    return {
        "tpot_ms": float(np.median(each)),
        "tpot_ms_min": min(each),
        "tpot_ms_max": max(each),
        "tpot_ms_mean": float(np.mean(each)),
        "blocks": len(each),
        "tokens_per_second": 1e3 * run.cache.spec.batch / float(np.median(each)),
    }


def sweep(
    model: Decoder,
    caches: Mapping[str, PerLayer],
    *,
    lengths: Iterable[int],
    batches: Iterable[int] | None,
    about: Mapping[str, Any],
    workload: Workload = Workload(),
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[dict]:
    """Runs `time_cell` for every cache, length and batch: a flat JSON object for each, also for
    those that do not fit.

    With `batches` None, the largest batch of each cache and length is found by trial: the first
    guess fills the free memory with caches. Arrays in host memory may fill 9/20 of the free
    host memory, as XLA's pool grows by doubling: with 9/10 the process was killed. With
    XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE=true they may fill the pool's
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 by default, which XLA may take twice. (A process may
    have a part of the device's memory only: on a GPU 3/4 of it, unless
    XLA_PYTHON_CLIENT_MEM_FRACTION is set. `bytes_limit` has the number.)

    `about` names the model, its digest, its dtype and whatever else decides a result. Cells are
    kept in the folder `out`; an existing one, from the same code on the same device, is used
    again. A cell that does not fit has the `status` "out of memory", and larger ones of its
    cache are assumed not to fit either. `progress` is called with the cells done, their number,
    and a line about the last one.

    Raises:
      NotImplementedError: the largest batch on a device that does not report its memory, such
        as a CPU.
    """
    stats = _memory_stats()
    if batches is None and not {"bytes_limit", "bytes_in_use"} <= stats.keys():
        raise NotImplementedError(
            f"the largest batch is found by filling the device's memory, whose size the backend "
            f"{jax.default_backend()!r} does not report; run it on a GPU, or give batches"
        )
    made = provenance()
    date = made.pop("date")
    rows: list[dict] = []
    asked = list(
        product(caches.items(), sorted(lengths), [None] if batches is None else sorted(batches))
    )
    for (name, policies), length, batch in asked:
        key = {
            **about,
            **made,
            **asdict(workload),
            "cache": name,
            "policies": repr(policies),
            "length": length,
        }
        key |= {"largest_batch": True} if batch is None else {"batch": batch}
        cell = _cell(name, key, out)
        if not cell.examples:
            begin = time.perf_counter()
            smaller = [
                r["batch"]
                for r in rows
                if r["status"] != "ok" and r["cache"] == name and r["length"] <= length
            ]
            if batch is None:
                found = _largest_batch(model, policies, length, workload, stats)
            elif smaller and min(smaller) <= batch:
                found = {
                    "status": "out of memory",
                    "error": f"not tried: a batch of {min(smaller)} did not fit",
                }
            else:
                found = _attempt(model, policies, length, batch, workload)
            example = {"id": "time", "date": date, **found}
            seconds = round(time.perf_counter() - begin, 3)
            cell.batches = [
                {"examples": [example], "attended_by_layer": [], "steps": 0, "seconds": seconds}
            ]
            cell.save()
        rows.append(
            {**key, **{name: value for name, value in cell.examples[0].items() if name != "id"}}
        )
        if progress is not None:
            progress(len(rows), len(asked), " | ".join(columns(rows[-1])))
    return rows


def _cell(name: str, key: dict[str, Any], out: Path | None) -> Cell:
    """The cell of a key, with its results from the folder `out`, if there are any."""
    of = f"{key['length']} x {key.get('batch', 'largest')}"
    kept = {
        **json.loads(json.dumps(key)),
        "format": FORMAT,
        "task": {"title": "throughput", "length": key["length"]},
    }
    cell = Cell(f"throughput at {of}", "milliseconds", name, kept, {}, 1)
    if out is not None:
        cell.open(out, ["time"])
    return cell


def short(length: int) -> str:
    """A number of tokens in units of K or M, if it is a multiple."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if length % unit == 0:
            return f"{length // unit}{name}"
    return str(length)


def columns(row: Mapping[str, Any]) -> list[str]:
    """Cache, length, batch, TTFT s, TPOT ms, tokens/s, and MiB of the cache, of its part on the
    host, and of the peak.

    A row that failed has its status after the first three.
    """
    head = [row["cache"], short(row["length"]), str(row["batch"])]
    if row["status"] != "ok":
        return [*head, row["status"]]
    ttft = "-" if row["ttft_seconds"] is None else f"{row['ttft_seconds']:.3g}"
    return [
        *head,
        ttft,
        f"{row['tpot_ms']:.3g} ({row['tpot_ms_min']:.3g} to {row['tpot_ms_max']:.3g})",
        f"{row['tokens_per_second']:.1f}",
        *(
            "-" if (size := row[name]) is None else f"{size / 2**20:,.1f}"
            for name in ("cache_bytes_device", "cache_bytes_host", "peak_bytes")
        ),
    ]


def largest(fits: Callable[[int], bool], *, guess: int) -> int:
    """The largest n for which `fits(n)`, at least 0; numbers below one that fits must fit too.

    The search takes steps of doubling size from the guess until it has a number that fits and
    one that does not, then bisects between the two, so a good guess costs few trials.

    >>> tried = []
    >>> largest(lambda n: tried.append(n) or n <= 29, guess=31), tried
    (29, [31, 30, 28, 29])
    """
    low, high, step = 0, None, 1  # fits(low); not fits(high)
    n = max(guess, 1)
    while high is None or high - low > 1:
        if fits(n):
            low, n = n, n + step
        else:
            high, n = n, n - step
        step *= 2
        if high is not None and not low < n < high:
            n = (low + high) // 2
    return low


def fill(
    cache: Cache, length: int | np.ndarray, *, seed: int = 0, chunk: int | None = None
) -> Cache:
    """Fills an empty cache, which is donated, with `length` tokens per row, or i32[B] of them:
    normal random keys and values.

    Each layer's policy stores them by its own `prefill`, a chunk at a time (as
    `kvjax.generation.chunk_size`), so its index is built as for a prompt. States of fixed size
    stay zero, as a step takes as long whatever they hold.
    """
    spec, key = cache.spec, jax.random.key(seed)
    longest = int(np.max(length))
    size = chunk_size(longest, chunk, rows=spec.batch)
    layers = list(cache.layers)
    del cache
    for i in range(len(layers)):
        if isinstance(layers[i].policy, Recurrent):
            st = layers[i].state
            received = jnp.broadcast_to(jnp.asarray(length, jnp.int32), st.length.shape)
            layers[i] = replace(layers[i], state=replace(st, length=received))
            continue
        for start in range(0, longest, size):
            own = jax.random.fold_in(jax.random.fold_in(key, i), start)
            layers[i] = _store(
                layers[i], own, np.clip(length - start, 0, size).astype(np.int32), tokens=size
            )
    return jax.block_until_ready(Cache(tuple(layers)))


@partial(jax.jit, static_argnames="tokens", donate_argnames="layer")
def _store(layer: LayerCache, key: Array, count: Array, *, tokens: int) -> LayerCache:
    spec = layer.spec
    shape = (spec.batch, tokens, spec.kv_heads, spec.head_dim)
    k, v = (jax.random.normal(own, shape, spec.dtype) for own in jax.random.split(key))
    return run(_append, layer, Tokens(k, v, jnp.full(spec.batch, count), flush=False))[1]


def _append(layer: LayerCache, new: Tokens) -> tuple[None, LayerCache, tuple[()]]:
    k, v = jnp.swapaxes(new.k, 1, 2), jnp.swapaxes(new.v, 1, 2)
    state = layer.policy.prefill(layer.state, k, v, new.count)
    return None, replace(layer, state=state), ()


# -------------------------------------------------------------------------------------------------------------- models

_LLAMA: dict[str, Any] = {"vocab_size": 128256, "q_heads": 32, "kv_heads": 8, "norm_eps": 1e-5}
_LLAMA_ROPE: dict[str, Any] = {
    "theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original": 8192,
}

SHAPES: dict[str, DecoderConfig] = {
    "llama-3.1-8b": DecoderConfig(
        **_LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        layers=32,
        head_dim=128,
        max_position_embeddings=131072,
        rope=Llama3(**_LLAMA_ROPE, factor=8.0),
    ),
    "llama-3.1-70b": DecoderConfig(
        **{**_LLAMA, "q_heads": 64},
        hidden_size=8192,
        intermediate_size=28672,
        layers=80,
        head_dim=128,
        max_position_embeddings=131072,
        rope=Llama3(**_LLAMA_ROPE, factor=8.0),
    ),
    "llama-3.2-1b": DecoderConfig(
        **_LLAMA,
        hidden_size=2048,
        intermediate_size=8192,
        layers=16,
        head_dim=64,
        max_position_embeddings=131072,
        rope=Llama3(**_LLAMA_ROPE, factor=32.0),
        tied_head=True,
    ),
    "mistral-7b": DecoderConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        layers=32,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rope=Default(theta=1e6),
        norm_eps=1e-5,
    ),
    "qwen2.5-1.5b": DecoderConfig(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        layers=28,
        q_heads=12,
        kv_heads=2,
        head_dim=128,
        max_position_embeddings=32768,
        rope=Default(theta=1e6),
        qkv_bias=True,
        tied_head=True,
    ),
    "qwen2.5-7b": DecoderConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        layers=28,
        q_heads=28,
        kv_heads=4,
        head_dim=128,
        max_position_embeddings=32768,
        rope=Default(theta=1e6),
        qkv_bias=True,
    ),
    "qwen3-8b": DecoderConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        layers=36,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope=Default(theta=1e6),
        qk_norm=True,
    ),
}


def random_model(
    config: DecoderConfig,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    placement: Placement | None = None,
    seed: int = 0,
) -> Decoder:
    """A Decoder with random parameters, each drawn on its devices directly in `dtype`: 8B in
    bfloat16 takes 16 GB.

    They do not depend on the placement.

    Normal with the config's initializer_range, biases 0, norms 1, as `Decoder` itself, which
    draws in f32.

    Raises:
      MemoryError: a CPU's memory has no room for them; a GPU raises its own error.
    """
    model, key = decoder_of_shapes(config, dtype), jax.random.key(seed)
    homes = {} if placement is None else model_shardings(model, placement.auto)
    if lacking := _no_room(
        f"the weights in {jnp.dtype(dtype).name}", nbytes(nnx.state(model, nnx.Param)).total
    ):
        raise MemoryError(f"{lacking}; use a smaller model, or a dtype of fewer bits")
    for number, (path, param) in enumerate(nnx.iter_graph(model)):
        if isinstance(param, nnx.Param):
            kind, like = str(path[-1]), param.get_value()
            home = homes.get(id(param))
            if kind in ("scale", "bias"):
                value = jnp.full(like.shape, float(kind == "scale"), like.dtype, device=home)
            else:
                draw = _drawing(like.shape, like.dtype, home)
                value = draw(jax.random.fold_in(key, number), config.initializer_range)
            param.set_value(jax.block_until_ready(value))
    return model


@cache
def _drawing(
    shape: tuple[int, ...], dtype: Any, home: jax.sharding.Sharding | None
) -> Callable[..., Array]:
    def draw(key: Array, size: float) -> Array:
        return (jax.random.normal(key, shape) * size).astype(
            dtype
        )  # one fused kernel: no f32 numbers in memory

    return jax.jit(draw, out_shardings=home)


# --------------------------------------------------------------------------------------------------------------- parts


def _attempt(
    model: Decoder, policies: PerLayer, length: int, batch: int, workload: Workload
) -> dict[str, Any]:
    """`time_cell` with `status` "ok"; or, if it does not fit, "out of memory" once the memory
    is free again.
    """
    spec = workload.spec(model, length, batch)
    size = nbytes(shapes(partial(init, policies, spec, layers=model.config.layers)))
    if lacking := _no_room("the cache", size.total):
        return {"status": "out of memory", "error": lacking}
    try:
        row = {
            "status": "ok",
            **time_cell(model, policies, length=length, batch=batch, workload=workload),
        }
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        row = {"status": "out of memory", "error": " ".join(str(error).split())[:300]}
    gc.collect()  # frees what the frames of the error's traceback held
    return row


def _largest_batch(
    model: Decoder,
    policies: PerLayer,
    length: int,
    workload: Workload,
    stats: Mapping[str, int],
) -> dict[str, Any]:
    spec = model.spec(batch=1, capacity=length)
    one = nbytes(shapes(partial(init, policies, spec, layers=model.config.layers)))
    host = _host_room() // one.host if one.host else None
    room = stats["bytes_limit"] - stats["bytes_in_use"]
    limit = min(
        x for x in (room // one.device, host) if x is not None
    )  # the caches alone take all memory
    tried: dict[int, dict[str, Any]] = {}

    def fits(n: int) -> bool:
        if n > limit:
            return False
        tried[n] = _attempt(model, policies, length, n, workload)
        logging.getLogger("kvjax").info(
            "batch %d x %d tokens: %s", n, length, tried[n]["status"]
        )
        return tried[n]["status"] == "ok"

    # Programs need memory too; a trial that just fails takes the longest, as XLA looks for
    # other ways to compile it.
    batch = largest(fits, guess=min(int(0.97 * room) // one.device, limit))
    found = {"batch": batch, "bytes_limit": stats["bytes_limit"], "host_limit": host}
    return {
        **found,
        **tried.get(batch, {"status": "out of memory", "error": "not even a batch of 1 fits"}),
    }


def _host_room() -> int:
    """Bytes of host memory that caches may fill.

    A pool that grows takes up to twice as much, and a process that takes all is killed. A
    preallocated pool is one region of a fixed size, and arrays can use nearly all of it.
    """
    if os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "").lower() in ("1", "true"):
        return int(0.97 * (int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64)) << 30))
    return int(0.45 * _free_host_bytes())


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _no_room(what: str, size: int) -> str:
    """Why `size` bytes do not fit in the machine's memory; empty if they fit, or if the device
    has memory of its own.

    A GPU refuses what does not fit; a machine kills a process that takes more than there is.
    """
    if _memory_stats() or size <= (free := _available_bytes()):
        return ""
    return f"out of memory: {what} would take {in_units(size)}, and {in_units(free)} are free"


def _available_bytes() -> int:
    """Bytes of the machine's memory that a new program could have, those of file caches
    included.
    """
    try:
        (line,) = (
            line
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return _free_host_bytes()


def _memory_stats() -> Mapping[str, int]:
    return jax.devices()[0].memory_stats() or {}


def _device_peak() -> int | None:
    return _memory_stats().get("peak_bytes_in_use")


def _program_bytes(model: Decoder, run: Stream, length: int, workload: Workload) -> int | None:
    """Bytes of the largest program of the run: arguments, outputs outside the arguments'
    memory, temporaries. None if the backend does not report them.

    The run compiled these programs; lowering them with arguments of the same shapes finds them
    again.
    """
    programs = run.programs(workload.block)
    if not workload.synthetic:
        programs += prompt_programs(model, run.cache, length, chunk=workload.chunk)
    compiled = [program.lower().compile() for program in programs]
    found = [analysis for one in compiled if (analysis := one.memory_analysis()) is not None]
    return max(
        (
            m.argument_size_in_bytes
            + m.output_size_in_bytes
            - m.alias_size_in_bytes
            + m.temp_size_in_bytes
            for m in found
        ),
        default=None,
    )
