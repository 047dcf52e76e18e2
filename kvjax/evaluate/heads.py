"""Finds the retrieval heads of a model, by what its heads attend to in repeated random tokens."""

from __future__ import annotations

import numpy as np

from kvjax.evaluate import capture
from kvjax.evaluate.store import Progress
from kvjax.models import Checkpoint
from kvjax.presets.head_files import Heads
from kvjax.spec import require_int


def scores(
    checkpoint: Checkpoint,
    *,
    length: int = 256,
    repeats: int = 4,
    batch: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Echo and induction scores f64[layers, N] of each query head of a model.

    `length` random tokens are read `repeats` times, in `batch` rows of different tokens. In the
    last repetition, the echo score of a head is its mean attention to earlier copies of the
    current token, and its induction score the mean attention to the tokens after these copies.
    `progress` is called with the layers done, their number, and the layer.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891), section 3.2, which reads
    2500 random tokens four times.
    """
    length = require_int("length", length, at_least=2)
    repeats = require_int("repeats", repeats, at_least=2)
    draw = np.random.default_rng(seed).integers(
        checkpoint.config.vocab_size, size=(batch, length)
    )
    seen = capture.capture(
        checkpoint, np.tile(draw, (1, repeats)), lengths=[length * repeats], steps=length
    )
    echo: list[np.ndarray] = []
    induction: list[np.ndarray] = []
    for done, layer in enumerate(seen.layers, 1):
        q = np.asarray(layer.q, np.float64)
        k = np.asarray(layer.k, np.float64)
        B, T, N, D = q.shape
        grouped = q.reshape(B, T, k.shape[1], -1, D)
        logits = layer.scale * np.einsum("btkgd,bksd->bkgts", grouped, k)
        at = np.asarray(seen.positions)[:, None]
        slot = np.arange(k.shape[2])[None]
        visible = (
            slot <= at if layer.window is None else (slot <= at) & (slot > at - layer.window)
        )
        logits = np.where(visible, logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        same = ((at - slot) % length == 0) & (slot < at)
        after = ((at - slot) % length == length - 1) & (slot > 0) & (slot <= at - length + 1)
        for found, mask in ((echo, same), (induction, after)):
            mass = np.where(mask, weights, 0).sum(axis=-1).mean(axis=(0, 3))  # [K, G]
            found.append(mass.reshape(N))
        if progress is not None:
            progress(done, len(seen.layers), f"layer {done - 1}")
    return np.array(echo), np.array(induction)


def retrieval_heads(
    checkpoint: Checkpoint,
    *,
    echo: float = 0.01,
    induction: float = 0.14,
    length: int = 256,
    repeats: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Heads:
    """KV heads with a query head in the top share `echo` of echo scores or the top share
    `induction` of induction scores.

    `progress` is called with the layers done, their number, and the layer.

    Raises:
      ValueError: a share outside [0, 1], or repeated tokens that do not fit the model's
        positions.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891), section 3.2: 1 % echo and
    14 % induction heads. **Differs:** heads of a GQA group share keys and values, so a group
    counts if one of its query heads does.
    """
    for name, share in (("echo", echo), ("induction", induction)):
        if not 0 <= share <= 1:
            raise ValueError(
                f"retrieval_heads({name}={share!r}) is a share of the query heads in [0, 1]: 0.14 is 14 %"
            )
    K = checkpoint.config.kv_heads
    found = scores(checkpoint, length=length, repeats=repeats, seed=seed, progress=progress)
    if not np.isfinite(found).all():
        raise RuntimeError(
            "the model's queries or keys are not finite; load it in bfloat16 or float32"
        )
    chosen = np.zeros(found[0].shape, bool)
    for score, share in zip(found, (echo, induction), strict=True):
        count = int(np.ceil(share * score.size))
        chosen.reshape(-1)[np.argsort(-score.reshape(-1), kind="stable")[:count]] = True
    groups: np.ndarray = chosen.reshape(len(chosen), K, -1).max(axis=2)
    return Heads(K, tuple(tuple(np.flatnonzero(layer).tolist()) for layer in groups))
