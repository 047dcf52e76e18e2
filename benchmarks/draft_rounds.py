"""Where the time of drafts by a selection goes: the kernels of each kind of step of a whole
model, the fewest bytes that it must read, and the rounds of the loop.

    python benchmarks/draft_rounds.py MODEL --text prose=book.txt [--size 31744x24]
    [--method fier:budget=1024] [--parts rounds,forms,layers] [--minutes 3]

- `rounds`: steps of the model by full attention, of a draft, of drafts by one selection, and
  of verifications of 5 and 8 tokens. `us` is the time of a step, `kernels_us` the device time of
  its kernels by kind, and `floor_us` the time to read what it must, at the rate of
  `device_time.bytes_per_us`. Then the loop continues the text, of which the profiler counts rounds
  and draft steps: a round stores its tokens by one `put_tokens` a layer, and a step by one
  `put_token`.
- `forms`: the whole loop by several methods (`--forms`), by numbers of draft steps that attend to
  one selection; and the loop of full attention.
- `layers`: a verification of 8 tokens by layers of the shape of Llama-3.1-8B, 24 rows of 32768
  tokens, verifications of fewer, and other forms of it: kernels of attention with other blocks,
  and products by cuBLAS alone.

Without a GPU, `--quick` runs both at tiny sizes, without kernels.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import named
from decode_tokens import block_sizes
from device_time import bytes_per_us, traced
from flax import nnx
from jax import Array
from layers import clock, numbers, show
from lossless import (
    EIGHT,
    SMALL,
    Rows,
    begin,
    draft_bytes,
    excerpts,
    read,
    shape,
    stored,
    take_step,
    time_head,
    time_steps,
    token_stream,
    told,
)
from throughput import fill

import kvjax
from kvjax import SelfDraft, models
from kvjax.cache.cache import Cache, init
from kvjax.evaluate.provenance import digest, model_digest, provenance
from kvjax.generation import Stream
from kvjax.generation.draft_length import tokens_in_one_pass
from kvjax.generation.kept_selections import steps_together
from kvjax.memory import QUICK, nbytes
from kvjax.models import Decoder, DecoderConfig
from kvjax.policies import Full
from kvjax.spec import default_dtype, padded_capacity

OUT = Path(__file__).parent / "results" / "draft_rounds.json"
PARTS = ("rounds", "forms", "layers")
KINDS = {  # of kernels, by a part of their name; the first that is found
    "attention": r"kvjax_attend",
    "selection": r"kvjax_(select|score|collide|most_voted)",
    "products": r"gemm|nvjet|cutlass|xmma|splitK|_dot",
}
OTHER = "other kernels"
# Blocks of the kernel of attention for several tokens. Its rule leaves one block of 4 warps to a
# multiprocessor, as for one token, whose queries take a quarter of the products.
BLOCKS = {
    "two blocks, 3 stages of 16 keys": "attend_span:blocks=4,warpgroups=1,stages=3,keys=16",
    "two blocks, 2 stages of 16 keys": "attend_span:blocks=4,warpgroups=1,stages=2,keys=16",
    "two blocks, a stage of 32 keys": "attend_span:blocks=4,warpgroups=1,stages=1,keys=32",
    "8 warps, 3 stages of 16 keys": "attend_span:blocks=2,warpgroups=2,stages=3,keys=16",
    "8 warps, a stage of 32 keys": "attend_span:blocks=2,warpgroups=2,stages=1,keys=32",
}


def kind_of(name: str) -> str:
    """The kind of a kernel.

    >>> kind_of("nvjet_tst_128x64_64x6_1x2_h_bz_TNT"), kind_of("loop_add_fusion_3")
    ('products', 'other kernels')
    """
    return next((kind for kind, words in KINDS.items() if re.search(words, name)), OTHER)


def by_kind(parts: dict[str, float]) -> dict[str, float]:
    """Microseconds of kernels by kind."""
    found = dict.fromkeys([*KINDS, OTHER], 0.0)
    for name, us in parts.items():
        found[kind_of(name)] += us
    return found


# ------------------------------------------------------------------------------------ steps


one_step = jax.jit(
    take_step, static_argnames=("T", "exact", "together"), donate_argnames="cache"
)


def measure_step(
    model: Decoder, cache: Cache, T: int, exact: bool, count: int, together: int = 1
) -> tuple[dict[str, Any], Cache]:
    """The time of a step of a model, and that of its kernels by kind."""
    ms, cache = time_steps(model, cache, T, exact, count, together)
    row: dict[str, Any] = {"us": 1e3 * ms}
    if jax.default_backend() != "gpu":
        return row, cache
    token = jnp.zeros(cache.spec.batch, jnp.int32)
    held = [cache]

    def calls() -> None:
        for _ in range(CALLS):
            out, held[0] = one_step(model, held[0], token, T=T, exact=exact, together=together)
            jax.block_until_ready(out)

    calls()
    found = traced(calls)
    parts = {name: sum(each) / CALLS for name, each in found.items()}
    row["kernels"] = sum(map(len, found.values())) / CALLS
    row["kernels_us"] = by_kind(parts)
    row["largest"] = largest(parts, 12)
    return row, held[0]


CALLS = 5


def floors(model: Decoder, cache: Cache, length: int, *, selects: bool) -> dict[str, float]:
    """Microseconds to read what a step must: weights, keys and values, and indexes."""
    rate = bytes_per_us()
    whole = [
        layer.spec for layer in cache.layers if not selects or isinstance(layer.policy, Full)
    ]
    tokens = sum(spec.batch * length * spec.key_value_bytes for spec in whole)
    own = draft_bytes(cache, length) if selects else {"selected_bytes": 0, "index_bytes": 0}
    return {
        "attention": (tokens + own["selected_bytes"]) / rate,
        "selection": own["index_bytes"] / rate,
        "products": nbytes(model).device / rate,
    }


# ------------------------------------------------------------------------------------ rounds


def rounds(given: argparse.Namespace, keep: Rows) -> None:
    """The part `rounds`."""
    checkpoint = models.load(given.model_dir, dtype=given.dtype)
    model, (length, batch) = checkpoint.model, given.size
    name, _, source = given.text.partition("=")
    prompt = excerpts(token_stream(checkpoint, Path(source)), batch, length - given.new)
    policies = kvjax.presets.parse(given.method)
    capacity = padded_capacity(length)
    shared = {"part": "rounds", "text": name, "length": length, "batch": batch}

    def tell(what: str, row: dict[str, Any]) -> None:
        keep({**shared, "method": what, "new": given.new, "cache": given.method, **row})
        show({"step": what, "us": row["us"], **row.get("kernels_us", {})})

    logits, full = read(model, prompt, capacity)
    cache = stored(full, policies)
    tokens = given.tokens or tokens_in_one_pass(cache.spec)
    steps = {
        "draft": (1, False, 1),
        "drafts": (1, False, steps_together(cache, None, tokens)),
        "verify 5": (5, True, 1),
        "verify 8": (8, True, 1),
    }
    for what, (T, exact, together) in steps.items():
        row, cache = measure_step(model, cache, T, exact, given.count, together)
        floor = floors(model, cache, length, selects=not exact)
        if together > 1:  # one selection for all
            floor = {name: together * us for name, us in floor.items()}
            floor["selection"] /= together
        tell(what, {**row, "tokens": T, "together": together, "floor_us": floor})
    del cache
    row, full = measure_step(model, full, 1, False, given.count)
    tell("full", {**row, "tokens": 1, "floor_us": floors(model, full, length, selects=False)})
    hidden, words = model.config.hidden_size, model.config.vocab_size
    head = jnp.ones((hidden, words), given.dtype)
    for T in (1, 5, 8):
        us = 1e3 * time_head(head, batch * T, given.count)
        tell(
            f"logits of {T}",
            {"us": us, "tokens": T, "floor_us": {"products": head.nbytes / bytes_per_us()}},
        )
    del head
    tell("loop", measure_loop(given, model, full, policies, logits, prompt))


def measure_loop(
    given: argparse.Namespace,
    model: Decoder,
    full: Cache,
    policies: Any,
    logits: Array,
    prompt: Any,
) -> dict[str, Any]:
    """The time of the loop that drafts, and on a GPU its rounds and draft steps."""

    def run() -> Any:
        # a drafter counts how often its drafts were right, so each run has its own
        return begin(
            model, stored(full, policies), logits, given.new, SelfDraft(given.tokens), prompt
        )

    run().advance(given.new)
    loop = run()
    start = time.perf_counter()
    loop.advance(given.new)
    seconds = time.perf_counter() - start
    row = {"us": 1e6 * seconds, **told(loop)}
    if jax.default_backend() == "gpu":
        loop = run()
        found = traced(lambda: loop.advance(given.new))
        layers = model.config.layers
        row["rounds"] = _count(found, "kvjax_put_tokens") / layers
        row["draft_steps"] = _count(found, "kvjax_put_token_") / layers
        parts = {name: sum(each) for name, each in found.items()}
        row["kernels_us"] = by_kind(parts)
        row["largest"] = largest(parts, 40)
        row["runs"] = {name: len(found[name]) for name in row["largest"]}
    return row


def largest(parts: dict[str, float], count: int) -> dict[str, float]:
    """The kernels that take longest, and their microseconds."""
    return dict(sorted(parts.items(), key=lambda part: -part[1])[:count])


def _count(found: dict[str, list[float]], name: str) -> int:
    """How often a kernel ran."""
    return sum(len(each) for own, each in found.items() if own.startswith(name))


# ------------------------------------------------------------------------------------- forms


def forms(given: argparse.Namespace, keep: Rows) -> None:
    """The part `forms`. Programs compile in threads, before any of them is timed."""
    checkpoint = models.load(given.model_dir, dtype=given.dtype)
    model, (length, batch) = checkpoint.model, given.size
    name, _, source = given.text.partition("=")
    prompt = excerpts(token_stream(checkpoint, Path(source)), batch, length - given.new)
    logits, full = read(model, prompt, padded_capacity(length))
    shared = {"part": "forms", "text": name, "length": length, "batch": batch}

    def plain(new: int) -> float:
        run = begin(model, jax.tree.map(jnp.copy, full), logits, new, None, prompt)
        return seconds_of(run, new)

    def drafting(method: str, steps: int) -> Stream:
        cache = stored(full, kvjax.presets.parse(method))
        draft = SelfDraft(given.tokens, steps_per_selection=steps)
        return begin(model, cache, logits, given.new, draft, prompt)

    plain(given.new)
    whole = plain(given.new)
    keep({**shared, "method": "full", "new": given.new, "seconds": whole})
    show({"method": "full", "seconds": whole})
    asked = [(method, steps) for method in given.forms for steps in given.steps_per_selection]
    for first in range(0, len(asked), given.parallel):
        now = asked[first : first + given.parallel]
        if not keep.time_left():
            return
        with ThreadPoolExecutor(given.parallel) as pool:
            list(pool.map(lambda form: drafting(*form).advance(8), now))
        for method, steps in now:
            run = drafting(method, steps)
            seconds = seconds_of(run, given.new)
            row = {
                "seconds": seconds,
                "times_full": whole / seconds,
                "steps_per_selection": steps,
                **told(run),
            }
            keep({**shared, "method": f"{steps} x {method}", "new": given.new, **row})
            show({"method": method, **{key: row.get(key) for key in SHOWN}})
            del run


SHOWN = ("steps_per_selection", "times_full", "tokens_per_step", "acceptance", "idle")


def seconds_of(run: Stream, new: int) -> float:
    """The time in which a run writes its tokens."""
    start = time.perf_counter()
    run.advance(new)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------ layers


def layers(given: argparse.Namespace, keep: Rows) -> None:
    """The part `layers`."""
    sizes = SMALL if given.quick else EIGHT
    config = DecoderConfig(vocab_size=256, layers=given.layers, **sizes)
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(given.dtype))
    policy = kvjax.presets.parse(given.method).policy(given.layers + 8)  # past dense layers
    length, batch = (1024, 2) if given.quick else (32768, 24)
    spec = model.spec(batch=batch, capacity=padded_capacity(length))
    shared = {"part": "layers", "length": length, "batch": batch, "layers": given.layers}

    def tell(
        what: str, T: int, made: Any = policy, sizes: str = "", products: bool = False
    ) -> None:
        key = {**shared, "method": what}
        if keep.has(**key) or not keep.time_left():
            return
        cache = fill(init(made, spec, layers=given.layers), length - 64)
        with block_sizes(sizes) if sizes else nullcontext():
            row, _ = measure_layers(model, cache, T, products, given.count)
        keep({**key, "tokens": T, "blocks": sizes, **row})
        show({"form": what, "us": row["us"], **row.get("kernels_us", {})})

    tell("full", 1, kvjax.Full())
    for T in (4, 5, 8):
        tell(f"verify {T}", T)
    tell("verify 8, products by cuBLAS alone", 8, products=True)
    for T in (8, 5):
        for name, config_text in BLOCKS.items():
            tell(f"verify {T}, {name}", T, sizes=config_text)


def measure_layers(
    model: Decoder, cache: Cache, T: int, cublas: bool, count: int
) -> tuple[dict[str, Any], Cache]:
    """The time of a step of some layers and its kernels by kind, over the number of layers."""
    options = (
        {"xla_gpu_enable_triton_gemm": QUICK["xla_gpu_enable_triton_gemm"]} if cublas else {}
    )
    run = jax.jit(
        lambda cache, model, token: take_step(model, cache, token, T=T, exact=T > 1),
        donate_argnums=0,
        compiler_options=options if jax.default_backend() == "gpu" else None,
    )  # fmt: skip
    token = jnp.zeros(cache.spec.batch, jnp.int32)
    took, _ = clock(run, kvjax.flush(cache), model, token, calls=count)
    number = model.config.layers
    row: dict[str, Any] = {"us": took.us / number}
    if took.parts:
        row["kernels"] = took.kernels / number
        row["kernels_us"] = {name: us / number for name, us in by_kind(took.parts).items()}
        row["largest"] = {name: us / number for name, us in list(took.parts.items())[:10]}
    return row, cache


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, help="default: the shipped model")
    parser.add_argument("--text", help="NAME=FILE; default: Python files of kvjax")
    parser.add_argument("--size", type=shape, default=(31744, 24), help="tokens x rows")
    parser.add_argument("--method", type=named.cache, default="fier:budget=1024")
    parser.add_argument("--tokens", type=int, help="of a draft; default: SelfDraft's own")
    parser.add_argument("--new", type=int, default=384, help="tokens that each row writes")
    parser.add_argument(
        "--parts",
        type=named.names_of(PARTS, "part"),
        default="rounds,forms,layers",
        help=",".join(PARTS),
    )
    parser.add_argument(
        "--forms",
        nargs="*",
        type=named.cache,
        default=[
            "fier:budget=1024",
            "fier:budget=1024,dense_layers=0",
            "fier:budget=1024,share=2",
        ],
        help="methods of the part forms",
    )
    parser.add_argument(
        "--steps-per-selection", type=numbers, default=[1, 2, 4], help="of the part forms"
    )
    parser.add_argument(
        "--parallel", type=int, default=3, help="methods that compile at the same time"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the part layers")
    parser.add_argument("--count", type=int, default=20, help="steps that are timed together")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser


def main(args: Sequence[str] | None = None) -> None:
    parser = options()
    given = parser.parse_args(args)
    given.model_dir = given.model_dir or models.shipped()
    given.text = given.text or f"code={Path(kvjax.__file__).parent}"
    if given.quick:
        given.size, given.new, given.count, given.layers = (640, 2), 24, 2, 2
        given.method = "fier:budget=96"
        given.forms = ["fier:budget=96", "fier:budget=96,dense_layers=0"]
    source = Path(given.text.partition("=")[2])
    about = {
        **provenance(),
        "model": {
            "name": given.model_dir.resolve().name,
            "digest": model_digest(given.model_dir),
        },
        "texts": {
            given.text.partition("=")[0]: digest(source) if source.is_file() else source.name
        },
        "dtype": given.dtype,
    }
    keep = Rows(given.out, about, given.minutes)
    for part in given.parts:
        {"rounds": rounds, "forms": forms, "layers": layers}[part](given, keep)


if __name__ == "__main__":
    main()
