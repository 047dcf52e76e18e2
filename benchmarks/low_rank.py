"""The error of keys as factors of low rank: before and after RoPE, with a basis of the first
tokens or of all.

    python benchmarks/low_rank.py [--model DIR] [--text FILE] [--tokens 3072] [--learn 1024] \\
        [--out FILE]

ShadowKV factors the keys of a whole prompt before their rotation; `LowRank` learns the basis
from the first `learn` tokens, and without its `rope` from rotated keys. A model reads a text,
and this reports the relative error of the keys of all tokens past the first `learn`, by layer
and by the rank's share of the K D channels: 160 of 1024 in the paper. Runs on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from layers import save, show

import kvjax
from kvjax import models
from kvjax.generation import prefill

SHARES = (160 / 1024, 0.25, 0.5)
ROOT = Path(__file__).resolve().parents[1]


def keys_of(checkpoint: Any, tokens: np.ndarray) -> np.ndarray:
    """Keys f64[L, K, T, D] as a cache gets them."""
    spec = checkpoint.model.spec(batch=1, capacity=len(tokens))
    cache = kvjax.init(kvjax.Full(), spec, layers=checkpoint.config.layers)
    _, cache = prefill(checkpoint.model, cache, tokens[None])
    states: list[Any] = [layer.state for layer in cache.layers]
    return np.stack([np.asarray(st.tokens.k[0], np.float64) for st in states])[
        :, :, : len(tokens)
    ]


def turned_back(k: np.ndarray, rope: Any) -> np.ndarray:
    """Keys [L, K, T, D] before RoPE, up to a constant factor."""
    angle = -np.arange(k.shape[2])[:, None] * np.asarray(
        rope.frequencies(k.shape[3]), np.float64
    )
    low, high = np.split(k, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def error(k: np.ndarray, rank: int, first: int | None, past: int) -> float:
    """Relative error of keys [K, T, D] past token `past`, in the basis of the `first` tokens or
    of all.
    """
    rows = np.swapaxes(k, 0, 1).reshape(k.shape[1], -1)
    basis = np.linalg.svd(rows[:first], full_matrices=False)[2][:rank]
    rest = rows[past:]
    return float(np.linalg.norm(rest - rest @ basis.T @ basis) / np.linalg.norm(rest))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=models.shipped(), help="default: the shipped model"
    )
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE")
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--learn", type=int, default=1024)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "low_rank.json"
    )
    given = parser.parse_args(args)
    checkpoint = models.load(given.model, dtype="float32")
    tokens = np.asarray(
        checkpoint.tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"]
    )[: given.tokens]
    if len(tokens) < 2 * given.learn:
        parser.error(f"{given.text} has {len(tokens)} tokens, and {2 * given.learn} are needed")
    rotated = keys_of(checkpoint, tokens)
    kinds = {
        "before RoPE": turned_back(rotated, checkpoint.config.rope),
        "as the cache gets them": rotated,
    }
    channels, rows = rotated.shape[1] * rotated.shape[3], []
    for kind, k in kinds.items():
        for share in SHARES:
            for first, learnt in (
                (given.learn, f"the first {given.learn} tokens"),
                (None, "all tokens"),
            ):
                errors = [
                    round(error(layer, round(share * channels), first, given.learn), 4)
                    for layer in k
                ]
                row = {
                    "model": given.model.name,
                    "text": given.text.name,
                    "tokens": len(tokens),
                    "keys": kind,
                }
                row |= {
                    "share": round(share, 3),
                    "basis": learnt,
                    "error": round(float(np.mean(errors)), 4),
                }
                show(row)
                rows.append(row | {"by_layer": errors})
    save(
        given.out,
        "relative error of keys in a basis of low rank",
        rows,
        ("model", "text", "keys", "share", "basis"),
    )


if __name__ == "__main__":
    main()
