"""Live queries of a model as it generates, parts of them, and measurements of them as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kvjax.cache.cache import init
from kvjax.evaluate.capture import Live, Recorded, read
from kvjax.evaluate.recall import Reads, mean_known
from kvjax.generation import generate
from kvjax.generation.sampling import Sampling


def take(live: Live, steps: ArrayLike) -> Live:
    """Only the steps at these indices; keys and values stay."""
    index = np.asarray(steps)
    layers = tuple(dataclasses.replace(layer, q=layer.q[:, index]) for layer in live.layers)
    return Live(layers, live.positions[index])


def windows(live: Live, count: int, steps: int) -> Live:
    """`count` runs of `steps` steps, evenly spaced from the first steps to the last."""
    T = len(live.positions)
    if count * steps > T:
        raise ValueError(
            f"windows(count={count}, steps={steps}) are more than the {T} steps that were recorded"
        )
    first = np.linspace(0, T - steps, count).astype(int)
    return take(live, (first[:, None] + np.arange(steps)).reshape(-1))


def capture_generated(
    checkpoint: Any,
    prompt: ArrayLike | Sequence[Sequence[int]],
    *,
    steps: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    key: Array | None = None,
) -> tuple[Live, np.ndarray]:
    """Live queries while the model continues a prompt i32[B, T], and the tokens i32[B, steps]
    that it generated.

    It does not end at stop tokens: the cache is measured, not the text.
    """
    start = np.asarray(prompt, np.int32)
    spec = checkpoint.model.spec(batch=len(start), capacity=start.shape[1] + steps)
    cache = init(Recorded(steps=steps), spec, layers=checkpoint.config.layers)
    done = generate(
        checkpoint.model, cache, start, max_new_tokens=steps, sampling=sampling, key=key
    )
    return read(done.cache), done.tokens


def summary(seen: Reads) -> dict[str, Any]:
    """Means as JSON: over everything, and by layer, by layer and head, by length."""
    kinds = ("recall", "head_recall", "mass", "error")
    return {
        "mean": seen.row(),
        "by_layer": {kind: [mean_known(a) for a in getattr(seen, kind)] for kind in kinds},
        "by_layer_and_head": {
            kind: [
                [mean_known(a[..., head]) for head in range(a.shape[-1])]
                for a in getattr(seen, kind)
            ]
            for kind in ("head_recall", "mass")
        },
        "by_length": {
            length: {
                kind: mean_known(getattr(seen, kind)[:, steps])
                for kind in (*kinds, "attended", "bytes")
            }
            for length, steps in seen.by_length().items()
        },
    }
