"""TPOT of a Llama-3.1-8B shape with random weights, by method, length and batch, against full
attention by cuDNN.

    python benchmarks/end_to_end.py --out end_to_end.json [--lengths 8192,32768,131072] \\
        [--batches 1,8 | --largest]
        [--methods cudnn,full,fier,pariskv,freekv,logquant] [--prompt]

`throughput.py` says what is timed. One row is the strongest full attention that JAX offers,
`jax.nn.dot_product_attention(implementation="cudnn")` over keys and values [B, S, K, D], as a
policy. The queries of a random model turn in every step, so all heads of `freekv` recall before
they attend; in `freekv:tau=-1` none does, and the recall overlaps with the rest of the step.
With `--prompt` the model prefills random tokens in one chunk, which times TTFT too. Rows that
the file has are not measured again; each row is written as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import throughput
from jax import Array
from jax.tree_util import register_dataclass
from layers import out_of, show
from measured import write_rows
from named import names_of

from kvjax import CacheSpec, Full, PerLayer, presets
from kvjax.evaluate.provenance import digest_json
from kvjax.numerics.partial import PartialAttention
from kvjax.ops.chunk import attend_zone
from kvjax.policies import Info, Policy, Step


@register_dataclass
@dataclass(frozen=True)
class RowsFirst:
    k: Array  # dtype[B, S, K, D]
    v: Array  # dtype[B, S, K, D]
    length: Array  # i32[B]
    overflow: Array  # bool[B]


@dataclass(frozen=True)
class FullByCudnn(Policy):
    """Full attention by cuDNN over [B, S, K, D], the layout that it needs and that is slow for
    XLA.
    """

    implementation: str = "cudnn"

    def init(self, spec: CacheSpec) -> RowsFirst:
        shape = (spec.batch, spec.capacity, spec.kv_heads, spec.head_dim)
        k, v = (jnp.zeros(shape, spec.dtype) for _ in range(2))
        return RowsFirst(k, v, jnp.zeros(spec.batch, jnp.int32), jnp.zeros(spec.batch, bool))

    def prefill(self, st: RowsFirst, k: Array, v: Array, lengths: Array) -> RowsFirst:
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        i, S = jnp.arange(k.shape[1])[None], st.k.shape[1]
        at = jnp.where(i < lengths[:, None], st.length[:, None] + i, S)
        row = jnp.arange(k.shape[0])[:, None]
        k, v = (
            old.at[row, at].set(new.astype(old.dtype), mode="drop")
            for old, new in ((st.k, k), (st.v, v))
        )
        return RowsFirst(
            k, v, jnp.minimum(st.length + lengths, S), st.overflow | (st.length + lengths > S)
        )

    def update(self, st: RowsFirst, k: Array, v: Array, active: Array) -> RowsFirst:
        return self.prefill(st, k, v, active.astype(jnp.int32))

    def attend(self, st: RowsFirst, q: Array, step: Step) -> tuple[Array, RowsFirst, Info]:
        assert step.window is None
        implementation: Any = self.implementation
        out = jax.nn.dot_product_attention(
            q.reshape(q.shape[0], 1, -1, q.shape[3]).astype(st.k.dtype),
            st.k,
            st.v,
            scale=step.logits.uncapped,
            key_value_seq_lengths=st.length,
            implementation=implementation,
        )
        read = jnp.broadcast_to(st.length.astype(jnp.float32)[:, None], q.shape[:2])
        return out.reshape(q.shape), st, Info(read, None)

    def attend_stored(self, st: RowsFirst, q: Array, step: Step) -> PartialAttention:
        assert step.window is None
        k, v = (jnp.swapaxes(a, 1, 2) for a in (st.k, st.v))
        return attend_zone(q, k, v, None, st.length, logits=step.logits)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return Full().bytes_per_token(spec)


METHODS: dict[str, Callable[[int], PerLayer]] = {
    "cudnn": lambda budget: PerLayer((), FullByCudnn()),
    "full": lambda budget: presets.full(),
    "fier": presets.fier,
    "fier:turbo4": partial(presets.fier, store="turbo4"),
    "fier:turbo4:dense_layers=0": partial(
        presets.fier, store="turbo4", layers=presets.Layers(dense=0)
    ),
    "pariskv": presets.pariskv,
    "pariskv:host": partial(presets.pariskv, store="host"),
    "pariskv:host:float8": partial(presets.pariskv, store="float8"),
    "freekv": presets.freekv,
    "freekv:tau=-1": partial(presets.freekv, tau=-1.0),
    "quest": presets.quest,
    "logquant": lambda budget: presets.logquant(),
}


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--shape", choices=list(throughput.SHAPES), default="llama-3.1-8b")
    parser.add_argument("--lengths", type=numbers, default=[8192, 32768, 131072])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument(
        "--largest",
        action="store_true",
        help="the largest batch that fits, in place of --batches",
    )
    parser.add_argument("--methods", type=names_of(METHODS), default=list(METHODS))
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--prompt",
        action="store_true",
        help="prefill prompts, in place of random keys and values",
    )
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument(
        "--block", type=int, default=64, help="decode steps that are timed together"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="default: results/end_to_end.json; with --quick nothing is written",
    )
    parser.add_argument(
        "--quick", action="store_true", help="three narrow layers in float32, without cuDNN"
    )
    given = parser.parse_args(args)
    if not given.quick and jax.default_backend() != "gpu":
        parser.error("this measures a GPU; --quick runs a small model without one")
    config, dtype = throughput.SHAPES[given.shape], "bfloat16"
    caches = {name: METHODS[name](given.budget) for name in given.methods}
    if given.quick:
        dtype, caches["cudnn"] = "float32", PerLayer((), FullByCudnn("xla"))
        config = replace(
            config,
            layers=3,
            windows=(),
            hidden_size=64,
            intermediate_size=64,
            vocab_size=64,
            head_dim=16,
        )
    model = throughput.random_model(config, dtype)
    out, rows = out_of(given, "end_to_end.json"), []
    for length in given.lengths:
        rows += throughput.sweep(
            model,
            caches,
            lengths=[length],
            batches=None if given.largest else given.batches,
            about={"model": given.shape, "digest": digest_json(repr(config)), "dtype": dtype},
            workload=throughput.Workload(
                steps=given.steps,
                block=given.block,
                chunk=length if given.prompt else None,
                synthetic=not given.prompt,
            ),
            out=None
            if out is None
            else out.with_suffix(""),  # a folder of cells next to the file of rows
        )
        for row in rows[-len(caches) * (1 if given.largest else len(given.batches)) :]:
            _report(row)
        if out is not None:
            earlier = json.loads(out.read_text())["rows"] if out.is_file() else []
            new = [row for row in rows if row not in earlier]
            write_rows(out, {}, earlier + new)


def _report(row: dict[str, Any]) -> None:
    names = (
        "cache",
        "length",
        "batch",
        "status",
        "ttft_seconds",
        "tpot_ms",
        "tpot_ms_min",
        "tpot_ms_max",
    )
    names += (
        "tokens_per_second",
        "cache_bytes_device",
        "cache_bytes_host",
        "peak_bytes",
        "warm_up_seconds",
    )
    show({name: row.get(name) for name in names})


if __name__ == "__main__":
    main()
