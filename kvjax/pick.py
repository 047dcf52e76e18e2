"""Choosing: from scores of units to the slots that a query attends to.

Scores come per query head. `pool` makes one score a unit and kv head of them, so that the G heads of a group read the
same tokens (1/G of the reads of a choice for each query head). Ties go to the lower slot. Softmax pooling is done on
logarithms: the order is that of the mean of the softmaxes, but scores far below the top do not underflow to a tie.

**Source:** the five rules as used by ParisKV (mean of queries), ArkVale (mean of scores), ShadowKV (max of softmax),
PQCache (sum of softmax) and FreeKV (mean of softmax). Sum and mean of softmax rank alike; both names are kept.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

Pool = Literal["mean_query", "mean_score", "max_softmax", "sum_softmax", "mean_softmax", "per_head"]
POOLS: tuple[str, ...] = get_args(Pool)


class Selection(NamedTuple):
    """The slots that a step attends to. H is 1 where a group shares them, G where each query head has its own."""

    slots: Array  # i32[B, K, H, M] store slots, unique among the valid ones; in range also where not valid
    valid: Array  # bool[B, K, H, M]


def require_pool(pool: str) -> None:
    if pool not in POOLS:
        raise ValueError(f"pool must be one of {', '.join(POOLS)}; got {pool!r}")


def pool_queries(q: Array, pool: Pool) -> Array:
    """The queries [B, K, G', D] to score for q [B, K, G, D]: their mean (G' = 1) under `mean_query`, else q."""
    return jnp.mean(q, axis=2, keepdims=True, dtype=jnp.float32).astype(q.dtype) if pool == "mean_query" else q


def pool_scores(scores: Array, valid: Array, pool: Pool) -> Array:
    """f32[B, K, H, U] ranks of units from scores f32[B, K, G, U]; -inf where `valid` bool[B, 1 or K, 1, U] is false."""
    scores = jnp.where(valid, scores, -jnp.inf)
    match pool:
        case "per_head":
            return scores
        case "mean_query" | "mean_score":
            return jnp.mean(scores, axis=2, keepdims=True)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    shares = scores - jnp.where(jnp.isneginf(total), 0.0, total)
    match pool:
        case "max_softmax":
            return jnp.max(shares, axis=2, keepdims=True)
        case "sum_softmax" | "mean_softmax":
            pooled = jax.nn.logsumexp(shares, axis=2, keepdims=True)
            return pooled - jnp.log(scores.shape[2]) if pool == "mean_softmax" else pooled
    raise AssertionError(pool)


def expand_units(units: Selection, unit: int) -> Selection:
    """Units (pages) to their tokens: M units give M * unit slots, adjacent ones together."""
    if unit == 1:
        return units
    slots = units.slots[..., None] * unit + jnp.arange(unit)
    valid = jnp.broadcast_to(units.valid[..., None], slots.shape)
    *lead, M, _ = slots.shape
    return Selection(slots.reshape(*lead, M * unit), valid.reshape(*lead, M * unit))


def membership(selection: Selection, slots: int) -> Array:
    """bool[B, K, H, S]: which of S slots are selected."""
    at = jnp.where(selection.valid, selection.slots, slots)
    flags = jnp.zeros((*at.shape[:-1], slots), bool)
    b, k, h = (jnp.arange(n).reshape(s) for n, s in zip(at.shape, ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1)), strict=False))
    return flags.at[b, k, h, at].set(True, mode="drop")


def set_recall(selection: Selection, wanted: Selection, slots: int) -> Array:
    """f32[B, K, H] share of the wanted slots that were selected; 1 where none is wanted."""
    got, want = membership(selection, slots), membership(wanted, slots)
    hit = jnp.sum(got & want, axis=-1, dtype=jnp.float32)
    return jnp.where(jnp.any(want, axis=-1), hit / jnp.maximum(jnp.sum(want, axis=-1), 1), 1.0)


def mass_recall(selection: Selection, logits: Array, valid: Array) -> Array:
    """f32[B, K, G] share of softmax mass of logits f32[B, K, G, S], where `valid` [B, S], that the selection holds."""
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], logits, -jnp.inf), axis=-1)
    return jnp.sum(jnp.where(membership(selection, logits.shape[-1]), weights, 0.0), axis=-1)
