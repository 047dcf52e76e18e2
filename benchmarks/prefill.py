"""The time that an index, or quantising, adds to the prefill of a prompt, and a flushed chunk
to a decoded token.

    python benchmarks/prefill.py [--lengths 32768,131072] [--methods fier,logquant] [--out FILE]

Two layers of Llama-3.1-8B with random bf16 weights store a prompt in one chunk, which is the
whole of their prefill: projections, cuDNN attention, MLP, and the work of the cache. `added` is
the device time over that with kvjax's Full, minus 1. `seal_us` is the time of the policy's
`flush` of a full recent block, which happens once in `chunk` tokens. Spread over these tokens,
it adds the share `seal_added` to a decoded token's whole time in a layer (attention and MLP).
Without a GPU (`--quick`) sizes are small and the clock is the host's; that only shows that the
script works.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from layers import clock, keep_counts, numbers, options, out_of, parse, save, show
from named import names_of
from throughput import SHAPES, fill, random_model

import kvjax
from kvjax import presets
from kvjax.models import Decoder, DecoderConfig
from kvjax.policies import Policy
from kvjax.policies.zones import Zoned

LAYERS = 2
FULL = SHAPES["llama-3.1-8b"]
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
POLICIES: dict[str, Callable[[], kvjax.PerLayer]] = {
    "full": presets.full,
    "fier": lambda: presets.fier(2048),
    "quest": lambda: presets.quest(2048),
    "pariskv": lambda: presets.pariskv(2048),
    "logquant": presets.logquant,
    "kivi": presets.kivi,
}


def prompt(cache: Any, model: Decoder, tokens: Array) -> tuple[Array, Any]:
    """Stores tokens [B, T] in an empty cache, and returns it as empty."""
    logits, after = model(tokens, cache, last_logits=True, first_chunk=True)
    return logits, keep_counts(cache, after)


def token(cache: Any, model: Decoder, tokens: Array) -> tuple[Array, Any]:
    logits, after = model(tokens, cache, last_logits=True)
    return logits, keep_counts(cache, after)


def seal(state: Any, policy: Zoned) -> tuple[Array, Any]:
    """Flushes the recent block, which is full in every row."""
    recent = dataclasses.replace(
        state.recent, count=jnp.full_like(state.recent.count, state.recent.slots)
    )
    after = policy.flush(dataclasses.replace(state, recent=recent))
    return after.store.count, keep_counts(state, after)


def measure(
    name: str, config: DecoderConfig, model: Decoder, length: int, batch: int, calls: int
) -> dict[str, Any]:
    policy: Policy = POLICIES[name]().rest
    chunk = policy.demote.leave if isinstance(policy, Zoned) else 0
    layered = kvjax.PerLayer((), policy)
    spec = model.spec(batch=batch, capacity=length + max(chunk, 1))
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, config.vocab_size)
    cache = kvjax.init(layered, spec, layers=LAYERS)
    stored, logits = clock(jax.jit(prompt, donate_argnums=0), cache, model, tokens, calls=calls)
    if not bool(jnp.all(jnp.isfinite(logits))):
        raise SystemExit(f"{name}: the logits are not finite")
    del cache
    row = {"method": name, "length": length, "batch": batch, "prefill_us": stored.us / LAYERS}
    cache = fill(kvjax.init(layered, spec, layers=LAYERS), length - 1)
    step, _ = clock(jax.jit(token, donate_argnums=0), cache, model, tokens[:, :1], calls=calls)
    row |= {"token_us": step.us / LAYERS, "chunk": chunk, "seal_us": 0.0}
    del cache
    if isinstance(policy, Zoned):
        (layer,) = fill(kvjax.init(layered, spec, layers=1), length - 1).layers
        sealed, _ = clock(
            jax.jit(seal, donate_argnums=0, static_argnums=1), layer.state, policy, calls=calls
        )
        row["seal_us"] = sealed.us
    return row


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "prefill.json", calls=5)
    parser.add_argument("--lengths", type=numbers, default=[32768, 131072])
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument(
        "--methods", type=names_of(POLICIES), default=list(POLICIES), help="full comes first"
    )
    given = parse(parser, args)
    small = SMALL if given.quick else {}
    config = dataclasses.replace(FULL, layers=LAYERS, windows=(), vocab_size=1024, **small)
    model = random_model(config, "float32" if given.quick else "bfloat16")
    rows: list[dict[str, Any]] = []
    for length in given.lengths:
        for batch in given.batches:
            full = None
            for name in ("full", *(name for name in given.methods if name != "full")):
                row = measure(name, config, model, length, batch, given.calls)
                full = row if full is None else full
                row["added"] = row["prefill_us"] / full["prefill_us"] - 1
                row["seal_added"] = (
                    row["seal_us"] / (row["chunk"] * row["token_us"]) if row["chunk"] else 0.0
                )
                if not rows:
                    print(" | ".join(row))
                rows.append(row)
                show(row)
                gc.collect()
            what = f"prefill, decoded token and flush of a chunk in one layer of {config}; random tokens and weights"
            save(
                out_of(given, "prefill.json"),
                what,
                rows,
                ("method", "length", "batch", "backend"),
            )


if __name__ == "__main__":
    main()
