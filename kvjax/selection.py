"""Choosing: from scores of units to the slots that a query attends to.

Scores come per query head. `group_reduce` makes one score a unit and kv head of them, so that the G heads of a group
read the same tokens (1/G of the reads of a choice for each query head). Ties go to the lower slot. Softmax pooling is
done on logarithms: the order is that of the mean of the softmaxes, but scores far below the top do not underflow to a
tie.

**Source:** the five rules as used by ParisKV (mean of queries), ArkVale (mean of scores), ShadowKV (max of softmax),
PQCache (sum of softmax) and FreeKV (mean of softmax). Sum and mean of softmax rank alike; both names are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

GroupReduce = Literal["mean_query", "mean_score", "max_softmax", "sum_softmax", "mean_softmax", "per_head"]
GROUP_REDUCES: tuple[str, ...] = get_args(GroupReduce)


class Selection(NamedTuple):
    """The slots that a step attends to. H is 1 where a group shares them, G where each query head has its own."""

    slots: Array  # i32[B, K, H, M] store slots, unique among the valid ones; in range also where not valid
    valid: Array  # bool[B, K, H, M]


class PackedSelection(NamedTuple):
    """A selection whose valid slots come first, in any order. What reads it needs no mask."""

    slots: Array  # i32[B, K, H, M] as in a Selection
    found: Array  # i32[B, K, H] so many, the first, are valid

    @property
    def valid(self) -> Array:
        """bool[B, K, H, M]"""
        return jnp.arange(self.slots.shape[3])[None, None, None] < self.found[..., None]

    @property
    def selection(self) -> Selection:
        return Selection(self.slots, self.valid)


def require_group_reduce(group_reduce: str) -> None:
    if group_reduce not in GROUP_REDUCES:
        raise ValueError(f"group_reduce must be one of {', '.join(GROUP_REDUCES)}; got {group_reduce!r}")


def reduce_queries(q: Array, group_reduce: GroupReduce) -> Array:
    """The queries f32[B, K, G', D] to score for q [B, K, G, D]: their mean (G' = 1) under `mean_query`, else all."""
    q = q.astype(jnp.float32)
    return jnp.mean(q, axis=2, keepdims=True) if group_reduce == "mean_query" else q


def reduce_scores(parts: Sequence[tuple[Array, Array]], group_reduce: GroupReduce) -> Array:
    """f32[B, K, H, U] ranks of the units of all parts, one part after the other.

    A part has scores f32[B, K, G, U'] and `valid` bool[B, 1 or K, 1, U']; ranks are -inf where it is false. Softmax
    is over the units of all parts together.
    """
    scores = [jnp.where(valid, score, -jnp.inf) for score, valid in parts]
    if group_reduce == "per_head":
        return jnp.concatenate(scores, axis=-1)
    if group_reduce in ("mean_query", "mean_score"):
        return jnp.concatenate([jnp.mean(s, axis=2, keepdims=True) for s in scores], axis=-1)
    totals = jnp.concatenate([jax.nn.logsumexp(s, axis=-1, keepdims=True) for s in scores], axis=-1)
    total = jax.nn.logsumexp(totals, axis=-1, keepdims=True)
    shares = [s - jnp.where(jnp.isneginf(total), 0.0, total) for s in scores]
    if group_reduce == "max_softmax":
        return jnp.concatenate([jnp.max(s, axis=2, keepdims=True) for s in shares], axis=-1)
    pooled = jnp.concatenate([jax.nn.logsumexp(s, axis=2, keepdims=True) for s in shares], axis=-1)
    return pooled - jnp.log(scores[0].shape[2]) if group_reduce == "mean_softmax" else pooled


def expand_units(units: Selection, unit: int) -> Selection:
    """Units (pages) to their tokens: M units give M * unit slots, adjacent ones together."""
    if unit == 1:
        return units
    slots = units.slots[..., None] * unit + jnp.arange(unit)[None, None, None, None]
    valid = jnp.broadcast_to(units.valid[..., None], slots.shape)
    *lead, M, _ = slots.shape
    return Selection(slots.reshape(*lead, M * unit), valid.reshape(*lead, M * unit))


def split_selection(selection: Selection | PackedSelection, slots: int) -> tuple[Selection, Selection]:
    """The part of it that lies in the first `slots` slots, and the part past them, whose slots count from there."""
    past = selection.slots >= slots
    return (
        Selection(jnp.where(past, 0, selection.slots), selection.valid & ~past),
        Selection(jnp.where(past, selection.slots - slots, 0), selection.valid & past),
    )


def membership(selection: Selection, slots: int) -> Array:
    """bool[B, K, H, S]: which of S slots are selected."""
    at = jnp.where(selection.valid, selection.slots, slots)
    flags = jnp.zeros((*at.shape[:-1], slots), bool)
    b, k, h, _ = jnp.meshgrid(*(jnp.arange(n) for n in at.shape), indexing="ij", sparse=True)
    return flags.at[b, k, h, at].set(True, mode="drop")


def set_recall(selection: Selection, wanted: Selection, slots: int) -> Array:
    """f32[B, K, H] share of the wanted slots that were selected; 1 where none is wanted."""
    got, want = membership(selection, slots), membership(wanted, slots)
    hit = jnp.sum(got & want, axis=-1, dtype=jnp.float32)
    return jnp.where(jnp.any(want, axis=-1), hit / jnp.maximum(jnp.sum(want, axis=-1, dtype=jnp.float32), 1.0), 1.0)


def mass_recall(selection: Selection, logits: Array, valid: Array) -> Array:
    """f32[B, K, G] share of softmax mass of logits f32[B, K, G, S], where `valid` [B, S], that the selection holds."""
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], logits, -jnp.inf), axis=-1)
    return jnp.sum(jnp.where(membership(selection, logits.shape[-1]), weights, 0.0), axis=-1)
