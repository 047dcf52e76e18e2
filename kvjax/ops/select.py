"""Choices of units for a step: by 1-bit keys, by pages and by 4-bit codes, scores and ranks in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.ops.op import Implementation, op
from kvjax.ops.rank import top_k, top_k_grouped
from kvjax.ops.score import centres, rerank, score_1bit, score_pages
from kvjax.partial import attention_logits
from kvjax.quant import OneBit
from kvjax.rotate import Directions, rotate_few, turned
from kvjax.selection import GroupReduce, PackedSelection, Selection, require_group_reduce


@op(static_argnames=("group_reduce", "room", "scale", "wide", "last"), derivative="zero")
def select_1bit(
    q: Array,
    keys: OneBit,
    span: tuple[Array | int, Array | int],
    pending: tuple[Array, Array | int, Array | int],
    count: Array | int,
    group_reduce: GroupReduce,
    room: int,
    *,
    scale: float,
    wide: int | None = None,
    last: int = 0,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The `count` units that a group ranks highest by 1-bit keys: `score_1bit`, then `top_k_grouped`.

    Units are the slots [start, stop) of `keys` [B, K, S, ...], `span` = (start, stop), scored for q [B, K, G, D]; and,
    from S on, the slots of `pending` = (scores f32[B, K, G, W], start, stop) without the `last` before its stop. With
    `wide`, pending[0] are keys [B, K, R, D], to be scored as they are, of which only the first `wide` may wait. Count,
    starts and stops are i32[B], or a number for all rows. At most `room` are chosen; the one that ranks lowest comes
    last, the others in any order. `implementation`: see `explain`. The kernel scores as that of `score_1bit` and ranks
    these scores in f16, where one beyond 65504 is infinite; where ranks differ by less than its rounding, it may choose
    otherwise.
    """
    arrived, start, stop = pending
    if wide is not None:
        arrived = attention_logits(q, arrived, scale)[..., :wide]
    scores = score_1bit(q, keys, scale=scale)
    parts = [(scores, span[0], span[1]), (arrived, start, stop - last)]
    picked = select_scored(parts, count, group_reduce, room)
    return PackedSelection(picked.slots, jnp.sum(picked.valid, axis=-1, dtype=jnp.int32))


@select_1bit.limit
def _select_1bit_limit(
    kernel: Any,
    *,
    q: Array,
    keys: OneBit,
    pending: Any,
    group_reduce: GroupReduce,
    room: int,
    wide: int | None,
    **_: Any,
) -> str | None:
    scores = pending[0] if wide is None else jax.ShapeDtypeStruct((*q.shape[:3], wide), jnp.float32)
    return kernel.unsupported(q, keys.bits, keys.scale, scores, group_reduce, room)


@select_1bit.mosaic
def _select_1bit_mosaic(
    kernel: Any,
    *,
    q: Array,
    keys: OneBit,
    span: Any,
    pending: Any,
    count: Any,
    group_reduce: GroupReduce,
    room: int,
    scale: float,
    wide: int | None,
    last: int,
) -> PackedSelection:
    if wide is not None and pending[0].dtype != keys.scale.dtype:
        pending, wide = (attention_logits(q, pending[0], scale)[..., :wide], *pending[1:]), None
    how: dict[str, Any] = {"scale": scale, "wide": wide, "last": last}
    return PackedSelection(*kernel.select_1bit(q, *keys, span, pending, count, group_reduce, room, **how))


@op(static_argnames=("group_reduce", "room", "unit", "scale", "wide", "last"), derivative="zero")
def select_pages(
    q: Array,
    low: Array,
    high: Array,
    span: tuple[Array | int, Array | int],
    pending: tuple[Array, Array | int, Array | int],
    count: Array | int,
    group_reduce: GroupReduce,
    room: int,
    *,
    unit: int,
    scale: float,
    wide: int,
    last: int = 0,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The `count` pages of `unit` tokens that a group ranks highest by their boxes: `score_pages`, then
    `top_k_grouped`.

    Pages are those of corners [B, K, P, D] that have a token in [start, stop), `span` = (start, stop), scored for q
    [B, K, G, D]; and, from P on, those of `pending` = (keys [B, K, R, D], start, stop) that have a token in
    [start, stop) without the `last` before its stop, among the first `wide`, a multiple of `unit`; their score is the
    largest q.k of these. Count, starts and stops are i32[B], or a number for all rows. At most `room` pages are chosen;
    the one that ranks lowest comes last, the others in any order. `implementation`: see `explain`. The kernel scores as
    that of `score_pages`, keys that wait too; where ranks differ by less than rounding, it may choose otherwise.
    """
    keys, start, stop = pending
    scores = score_pages(q, low, high, scale=scale)
    exact = attention_logits(q, keys, scale)[..., :wide]
    there = _inside(start, stop - last, exact)
    exact = jnp.where(there, exact, -jnp.inf).reshape(*exact.shape[:3], wide // unit, unit)
    pages = jnp.any(there.reshape(*there.shape[:3], wide // unit, unit), axis=-1)
    first, end = (jnp.asarray(x, jnp.int32) for x in span)
    stored = _inside(first // unit, jnp.where(end > first, -(-end // unit), 0), scores)
    picked = top_k_grouped([(scores, stored), (jnp.max(exact, axis=-1), pages)], group_reduce, room)
    found = jnp.sum(picked.valid, axis=-1, dtype=jnp.int32)
    return PackedSelection(picked.slots, jnp.minimum(found, jnp.maximum(_by_row(count)[..., 0], 0)))


@select_pages.limit
def _select_pages_limit(
    kernel: Any,
    *,
    q: Array,
    low: Array,
    high: Array,
    pending: Any,
    group_reduce: GroupReduce,
    room: int,
    unit: int,
    wide: int,
    **_: Any,
) -> str | None:
    require_group_reduce(group_reduce)
    pages, keys = low.shape[2], pending[0].shape[2]
    if unit < 1 or wide % unit or not 0 < wide <= keys:
        raise ValueError(f"wide={wide} must be whole pages of unit={unit} among the {keys} keys that may wait")
    if room > pages + wide // unit:
        raise ValueError(f"room={room} is more than the {pages} stored and {wide // unit} pending pages there are")
    return kernel.unsupported(q, low, high, pending[0], group_reduce, room, unit, wide)


@select_pages.mosaic
def _select_pages_mosaic(
    kernel: Any,
    *,
    q: Array,
    low: Array,
    high: Array,
    span: Any,
    pending: Any,
    count: Any,
    group_reduce: GroupReduce,
    room: int,
    **how: Any,
) -> PackedSelection:
    return PackedSelection(*kernel.select_pages(q, low, high, span, pending, count, group_reduce, room, **how))


@op(static_argnames=("room", "seed", "scale", "wide", "last"), derivative="zero")
def select_4bit(
    q: Array,
    keys: Directions,
    candidates: PackedSelection,
    pending: tuple[Array, Array | int, Array | int],
    count: Array | int,
    room: int,
    *,
    seed: int,
    scale: float,
    wide: int,
    last: int = 0,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The `count` units that each query ranks highest by 4-bit codes: `rerank`, then `top_k`.

    Units are the `candidates` [B, K, G, M] among the slots of `keys` [B, K, S, ...], scored for q [B, K, G, D], rotated
    by `seed`; and, from slot S on, the slots of `pending` = (keys [B, K, R, D], start, stop) without the `last` before
    its stop, of which the first `wide` may wait, scored as they are for q. Count, start and stop are i32[B], or a
    number for all rows. At most `room` are chosen; the one that ranks lowest comes last, the others in any order.
    `implementation`: see `explain`. The kernel ranks scores in f16, as that of `select_1bit`.
    """
    arrived, start, stop = pending
    M, S = candidates.slots.shape[3], keys.signs.shape[2]
    estimates = rerank(rotate_few(q, seed), keys, candidates, scale=scale)
    late = attention_logits(q, arrived, scale)[..., :wide]
    waits = jnp.broadcast_to(_inside(start, stop - last, late), late.shape)
    valid = jnp.concatenate([candidates.valid, waits], axis=-1)
    scores = jnp.concatenate([estimates, late], axis=-1)
    picked = top_k(scores, valid, room)
    slots = jnp.take_along_axis(candidates.slots, jnp.minimum(picked.slots, M - 1), axis=-1)
    slots = jnp.where(picked.slots < M, slots, picked.slots - M + S)
    found = jnp.minimum(jnp.sum(picked.valid, axis=-1, dtype=jnp.int32), jnp.maximum(_by_row(count)[..., 0], 0))
    return PackedSelection(slots, found)


@select_4bit.limit
def _select_4bit_limit(
    kernel: Any,
    *,
    q: Array,
    keys: Directions,
    candidates: PackedSelection,
    pending: Any,
    room: int,
    wide: int,
    **_: Any,
) -> str | None:
    return kernel.unsupported(q, *keys, candidates.slots, pending[0], room, wide)


@select_4bit.mosaic
def _select_4bit_mosaic(
    kernel: Any,
    *,
    q: Array,
    keys: Directions,
    candidates: PackedSelection,
    pending: Any,
    count: Any,
    room: int,
    seed: int,
    **how: Any,
) -> PackedSelection:
    how |= {"centres": centres(), "turned": turned(q.shape[-1], seed)}
    return PackedSelection(*kernel.select_4bit(q, *keys, candidates, pending, count, room, **how))


def select_scored(
    parts: Sequence[tuple[Array, Array | int, Array | int]],
    count: Array | int,
    group_reduce: GroupReduce,
    room: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """The `count` units, at most `room`, that a group ranks highest, most first: by `top_k_grouped`, of parts (scores
    f32[B, K, G, U'], start, stop) the units [start, stop). All but scores are i32[B], or a number for all rows."""
    scored = [(scores, _inside(start, stop, scores)) for scores, start, stop in parts]
    picked = top_k_grouped(scored, group_reduce, room)
    rank = jnp.arange(room)[None, None, None]
    return Selection(picked.slots, picked.valid & (rank < _by_row(count)))


def _inside(start: Array | int, stop: Array | int, scores: Array) -> Array:
    """bool[B, 1, 1, U]: which units of scores [B, K, G, U] are in [start, stop), i32[B] or a number for all rows."""
    unit = jnp.arange(scores.shape[3])[None, None, None]
    inside = (unit >= _by_row(start)) & (unit < _by_row(stop))
    return jnp.broadcast_to(inside, (scores.shape[0], 1, 1, scores.shape[3]))


def _by_row(number: Array | int) -> Array:
    """i32[B, 1, 1, 1] of i32[B]; i32[1, 1, 1, 1] of a number."""
    return jnp.reshape(jnp.asarray(number, jnp.int32), (-1, 1, 1, 1))
