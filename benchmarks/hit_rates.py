"""Measures the share of a step's selected tokens that a hot set has, on live queries and keys
of a model.

    python benchmarks/hit_rates.py [MODEL_DIR] --text book.txt [--length 2048] [--steps 96] \\
        [--budget 128]

A policy runs the steps of each layer, along the text and along text that the model generates at
temperature 1. The tables of a hot set (`kvjax.stores.hot`) follow its selections. Sizes are in
multiples of the budget. The hit rate counts pages that were on the device over pages that were
selected, from the second step on. "adjacent" is the share of a selection that the step before
selected too: the hit rate of a store that keeps only the last recall.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measured
import numpy as np
from claims.live import capture_generated
from jax import Array, lax
from measured import write_rows
from named import names_of

from kvjax import models, ops, presets
from kvjax.attention import attention_info
from kvjax.cache.cache import LayerCache, init_layer
from kvjax.evaluate.capture import Live, LiveLayer, capture
from kvjax.evaluate.recall import store_prompt
from kvjax.generation.sampling import sampling
from kvjax.policies import PerLayer
from kvjax.spec import default_dtype
from kvjax.stores.hot import empty_hot

TIMES = (1, 2, 4, 8)  # sizes of the hot set in budgets
POLICIES: dict[str, Callable[[int], PerLayer]] = {
    "fier": lambda budget: presets.fier(budget, layers=presets.Layers(dense=2)),
    "quest": lambda budget: presets.quest(budget, layers=presets.Layers(dense=2)),
    "pariskv": lambda budget: presets.pariskv(
        budget, sink=4, local=16, dense_below=0, layers=presets.Layers(dense=2)
    ),
    "freekv": lambda budget: presets.freekv(
        budget, page=16, sink=16, local=16, layers=presets.Layers(dense=2)
    ),
}


@partial(jax.jit, static_argnums=(4, 5))
def selected(
    cache: LayerCache, layer_q: Array, kv: Any, start: Any, layer: Any, page: int
) -> Array:
    """i32[T, B, K, N] pages of the history that the steps select, -1 for none."""
    scale, window = layer

    def step(cache: Any, x: Any) -> Any:
        q, position = x
        kt, vt = (
            jnp.swapaxes(lax.dynamic_slice_in_dim(a, position, 1, axis=2), 1, 2) for a in kv
        )
        _, cache, info = attention_info(cache, q[:, None], kt, vt, scale=scale, window=window)
        zones = getattr(cache.state, "zones", cache.state)
        slots, valid = info.selection
        stored = (valid & (slots < zones.store.slots)).reshape(*slots.shape[:2], -1, page)
        first = slots.reshape(stored.shape)[..., 0] // page
        return cache, jnp.where(jnp.any(stored, axis=3), first, -1)

    return lax.scan(step, cache, (layer_q, start + jnp.arange(layer_q.shape[0])))[1]


@partial(jax.jit, static_argnums=(1, 2))
def followed(pages: Array, places: int, capacity: int) -> Array:
    """i32[T, B, K] pages that each step reads from the host."""
    _, B, K, _ = pages.shape
    hot = empty_hot((B, K), places, capacity, page=1, head_dim=1, dtype=jnp.float32)

    def step(hot: Any, page: Array) -> Any:
        tables, _ = ops.hot_places(
            hot.tables, page, jnp.full(page.shape[:2], page.shape[2], jnp.int32)
        )
        return hot.with_tables(tables), tables.loads - hot.loads

    return lax.scan(step, hot, pages)[1]


def rates(live: Live, policy: Any, budget: int, first: int) -> dict[str, float]:
    page = getattr(policy, "retrieval", policy).selector.unit
    counts: dict[str, list[float]] = {}
    for layer in live.layers[first:]:
        pages = pages_of(layer, live, policy, page)
        wanted = (pages >= 0).sum(axis=-1)[1:].sum()
        again = [np.isin(b[b >= 0], a).sum() for a, b in _pairs(pages)]
        counts.setdefault("adjacent", []).append(sum(again) / wanted)
        for times in TIMES:
            places = max(times * budget // page, pages.shape[-1])
            capacity = -(-layer.k.shape[2] // page)
            read = np.asarray(followed(jnp.asarray(pages), places, capacity))[1:].sum()
            counts.setdefault(f"{times} x", []).append(1 - read / wanted)
    return {name: round(float(np.mean(each)), 4) for name, each in counts.items()}


def _pairs(pages: np.ndarray) -> Any:
    """Each head's selections of adjacent steps."""
    heads = pages.reshape(len(pages), -1, pages.shape[-1])
    return (
        (heads[t, h], heads[t + 1, h])
        for t in range(len(heads) - 1)
        for h in range(heads.shape[1])
    )


def pages_of(layer: LiveLayer, live: Live, policy: Any, page: int) -> np.ndarray:
    start = int(live.positions[0])
    cache = store_prompt(init_layer(policy, layer.spec), layer.k, layer.v, 0, start)
    q = jnp.moveaxis(layer.q, 1, 0)
    return np.asarray(
        selected(cache, q, (layer.k, layer.v), start, (layer.scale, layer.window), page)
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        help="UTF-8 file with a long text that the model never saw",
    )
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of context at the end of the steps"
    )
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--methods", type=names_of(POLICIES), default=list(POLICIES))
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "hit_rates.json"
    )
    given = parser.parse_args(args)
    directory = given.model_dir or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    tokens = measured.read_tokens(checkpoint, given.text, given.length)
    followed_text = capture(checkpoint, [tokens], lengths=[given.length], steps=given.steps)
    prompt = tokens[: given.length - given.steps]
    written, _ = capture_generated(
        checkpoint, [prompt], steps=given.steps, sampling=sampling(1.0), key=jax.random.key(0)
    )
    head = {
        **measured.about(directory, given.text, given.dtype, [given.length], given.steps),
        "what": "share of selected pages that a hot set has; sizes in budgets; mean over layers that select",
        "budget": given.budget,
    }
    rows = []
    for name in given.methods:
        policies = POLICIES[name](given.budget)
        for along, live in (("text", followed_text), ("answer", written)):
            found = rates(live, policies.rest, given.budget, len(policies.first))
            rows.append({"method": name, "along": along, **found})
            print(" | ".join(map(str, rows[-1].values())), flush=True)
            write_rows(given.out, head, rows)


if __name__ == "__main__":
    main()
