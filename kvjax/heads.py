"""Which KV heads of a model look far back: found by a rule, saved and loaded, and turned into policies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.caches import Full, PerLayer, Policy
from kvjax.caches.per_head import PerHead
from kvjax.spec import require_int


@dataclass(frozen=True)
class Heads:
    """KV heads by layer, of a model with `kv_heads` KV heads a layer.

    >>> heads = Heads(kv_heads=4, layers=((), (1, 3)))
    >>> heads.count
    2
    """

    kv_heads: int
    layers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        require_int("Heads(kv_heads=...)", self.kv_heads, at_least=1)
        for i, layer in enumerate(self.layers):
            for head in layer:
                require_int(f"Heads(layers=...)[{i}]", head, at_least=0, at_most=self.kv_heads - 1)
        object.__setattr__(self, "layers", tuple(tuple(sorted(set(layer))) for layer in self.layers))

    @property
    def count(self) -> int:
        """KV heads in all layers."""
        return sum(map(len, self.layers))

    def policies(self, others: Policy, chosen: Policy | None = None) -> PerLayer:
        """`chosen` (default `Full()`) for these heads and `others` for all others, layer by layer."""
        chosen = Full() if chosen is None else chosen

        def one(heads: tuple[int, ...]) -> Policy:
            if len(heads) == self.kv_heads:
                return chosen
            return PerHead(heads=heads, chosen=chosen, others=others) if heads else others

        return PerLayer.of([one(heads) for heads in self.layers])

    def save(self, path: str | Path) -> None:
        """Writes a JSON file that `load` reads."""
        Path(path).write_text(json.dumps({"kv_heads": self.kv_heads, "layers": self.layers}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Heads:
        """The heads in a file that `save` wrote.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a file that `save` did not write.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(found["kv_heads"], tuple(tuple(layer) for layer in found["layers"]))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no heads of a model ({type(error).__name__}: {error}); kvjax.heads.Heads.save writes one"
            ) from error


def scores(
    checkpoint: Any, *, length: int = 64, repeats: int = 3, batch: int = 2, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Echo and induction scores f64[layers, N] of each query head of a model.

    `length` random tokens are read `repeats` times, one sequence a row. In the last repetition, the echo score of a
    head is its mean attention to earlier places of the token that it reads. The induction score is that to the tokens
    after these places.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891), section 3.2, which reads 2500 random tokens four
    times.
    """
    from kvjax.evaluate import live

    length, repeats = require_int("length", length, at_least=2), require_int("repeats", repeats, at_least=2)
    draw = np.random.default_rng(seed).integers(checkpoint.config.vocab_size, size=(batch, length))
    seen = live.capture(checkpoint, np.tile(draw, (1, repeats)), lengths=[length * repeats], steps=length)
    echo: list[np.ndarray] = []
    induction: list[np.ndarray] = []
    for layer in seen.layers:
        q, k = np.asarray(layer.q, np.float64), np.asarray(layer.k, np.float64)
        B, T, N, D = q.shape
        grouped = q.reshape(B, T, k.shape[1], -1, D)
        logits = layer.scale * np.einsum("btkgd,bksd->bkgts", grouped, k)
        at = np.asarray(seen.positions)[:, None]
        slot = np.arange(k.shape[2])[None]
        visible = slot <= at if layer.window is None else (slot <= at) & (slot > at - layer.window)
        logits = np.where(visible, logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        same = ((at - slot) % length == 0) & (slot < at)
        after = ((at - slot) % length == length - 1) & (slot > 0) & (slot <= at - length + 1)
        for found, mask in ((echo, same), (induction, after)):
            mass = np.where(mask, weights, 0).sum(axis=-1).mean(axis=(0, 3))  # [K, G]
            found.append(mass.reshape(N))
    return np.array(echo), np.array(induction)


def retrieval_heads(
    checkpoint: Any, *, echo: float = 0.01, induction: float = 0.14, length: int = 64, repeats: int = 3, seed: int = 0
) -> Heads:
    """KV heads with a query head among the share `echo` of best echo scores, or `induction` of best induction scores.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891), section 3.2: 1 % echo and 14 % induction heads.
    **Differs:** heads of a GQA group share keys and values, so a group is kept if one of its query heads is chosen.
    """
    K = checkpoint.config.kv_heads
    found = scores(checkpoint, length=length, repeats=repeats, seed=seed)
    chosen = np.zeros(found[0].shape, bool)
    for score, share in zip(found, (echo, induction), strict=True):
        count = int(np.ceil(share * score.size))
        chosen.reshape(-1)[np.argsort(-score.reshape(-1), kind="stable")[:count]] = True
    groups: np.ndarray = chosen.reshape(len(chosen), K, -1).max(axis=2)
    return Heads(K, tuple(tuple(np.flatnonzero(layer).tolist()) for layer in groups))
