"""The operations that a decode step spends its time in, in plain JAX.

Each is the reference for a GPU kernel of the same name and signature, and covers everything that the signature admits.
They are written to hold little: scoring expands packed keys a block at a time, and never the whole of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.blocks import Block, put
from kvjax.layouts import unpack_codes
from kvjax.memory import to_device, to_host
from kvjax.partial import (
    PartialAttention,
    Span,
    attend_part,
    attention_logits,
    empty_part,
    keep_valid,
    merge,
    part_of_logits,
)
from kvjax.quant import OneBit, QuantArray, dequantize, dequantize_1bit, slice_tokens, split_scales
from kvjax.rotate import SUBSPACE, Directions, decode, lloyd_max, rotate_few, turned
from kvjax.selection import (
    GroupReduce,
    PackedSelection,
    Selection,
    membership,
    reduce_scores,
    require_group_reduce,
    split_selection,
)

Implementation = Literal["xla", "mosaic"]

_explained: ContextVar[dict[str, str] | None] = ContextVar("explained", default=None)


def score_1bit(q: Array, keys: OneBit, *, scale: float, implementation: Implementation | None = None) -> Array:
    """f32[B, K, G, S]: scale * q.k~ of q [B, K, G, D] with every key k~ that `keys` [B, K, S, ...] decode to.

    Reads D/8 + 4 D/g bytes a key and kv head. Keys are expanded in blocks of S/64 (at least 512): on CPU at 8 heads
    x 32K tokens, D = 128, G = 4, this took 8-13 ms, one expansion of everything 57 ms and 128 MiB, and one fused
    multiply and sum 0.4-2.4 s (2026-11-21, jax 0.10.2, 2 shared cores, normal random q, uniform random codes).
    `implementation`: see `explain`. The kernel multiplies numbers of the scales' 16 bits, and sums in f32.
    """
    from kvjax.kernels_pallas import score_1bit as kernel

    reference = partial(_score_1bit, scale=scale)
    mosaic = _with_derivative(lambda q, keys: kernel.score_1bit(q, *keys, scale=scale), reference)
    return _dispatch(implementation, kernel, kernel.unsupported(q, keys.bits, keys.scale), mosaic, reference, q, keys)


def _score_1bit(q: Array, keys: OneBit, *, scale: float) -> Array:
    B, K, G, _ = q.shape
    S, groups = keys.bits.shape[2], keys.scale.shape[2]
    group = S // groups
    block = min(max(512, S // 64) // group or 1, groups)  # in groups
    q = q.astype(jnp.float32)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, groups - block)
        part = OneBit(
            lax.dynamic_slice_in_dim(keys.bits, first * group, block * group, axis=2),
            lax.dynamic_slice_in_dim(keys.scale, first, block, axis=2),
            lax.dynamic_slice_in_dim(keys.zero, first, block, axis=2),
        )
        # Without the barrier XLA widens all scales to f32 ahead of the loop: 1/8 of a bf16 key cache, twice.
        keys_f32 = dequantize_1bit(lax.optimization_barrier(part))
        s = jnp.einsum("bkgd,bksd->bkgs", q, keys_f32, precision="highest") * scale
        return lax.dynamic_update_slice_in_dim(scores, s, first * group, axis=3)

    return lax.fori_loop(0, -(-groups // block), step, jnp.zeros((B, K, G, S), jnp.float32))


def score_pages(
    q: Array, low: Array, high: Array, *, scale: float, implementation: Implementation | None = None
) -> Array:
    """f32[B, K, G, P]: scale * sum_i max(q_i low_i, q_i high_i) of q [B, K, G, D] and pages' corners [B, K, P, D].

    As high >= low, the larger product is that with `high` where q_i > 0 and with `low` elsewhere, so the score is two
    matrix products. Reads 2 D values a page and kv head; 16-bit corners are widened to f32 on the way, which for pages
    of 16 is 1/4 of the bytes of the keys, held for the time of the product. `implementation`: see `explain`. The kernel
    multiplies in the 16 bits of the corners, to which it rounds q, and sums in f32.
    """
    from kvjax.kernels_pallas import score_pages as kernel

    reference = partial(_score_pages, scale=scale)
    mosaic = _with_derivative(partial(kernel.score_pages, scale=scale), reference)
    return _dispatch(implementation, kernel, kernel.unsupported(q, low, high), mosaic, reference, q, low, high)


def _score_pages(q: Array, low: Array, high: Array, *, scale: float) -> Array:
    q = q.astype(jnp.float32)
    parts = ((jnp.maximum(q, 0.0), high), (jnp.minimum(q, 0.0), low))
    up, down = (
        jnp.einsum("bkgd,bkpd->bkgp", side, corner.astype(jnp.float32), precision="highest") for side, corner in parts
    )
    return (up + down) * scale


def top_k(scores: Array, valid: Array, k: int, *, implementation: Implementation | None = None) -> Selection:
    """The k largest of scores f32[..., U] where `valid` (broadcastable bool) is true; ties go to the lower index.

    A row with fewer than k valid units gives all of them, and the rest of its selection is not valid. `implementation`:
    see `explain`; all give the same.
    """
    from kvjax.kernels_pallas import top_k as kernel

    def mosaic(scores: Array, valid: Array) -> Selection:
        return Selection(*kernel.top_k(scores, valid, k))

    limit = kernel.unsupported(scores.shape, scores.dtype, k)
    return _dispatch(implementation, kernel, limit, mosaic, partial(_top_k, k=k), scores, valid)


def _top_k(scores: Array, valid: Array, *, k: int) -> Selection:
    valid = jnp.broadcast_to(valid, scores.shape)
    # A valid score of -inf must still come before what is not valid, and NaN must not rank first.
    low = jnp.finfo(scores.dtype).min
    ranked = jnp.where(valid, jnp.clip(jnp.nan_to_num(scores, nan=low), low), -jnp.inf)
    _, slots = lax.top_k(ranked, k)
    return Selection(slots.astype(jnp.int32), jnp.take_along_axis(valid, slots, axis=-1))


def top_k_grouped(
    parts: Sequence[tuple[Array, Array]],
    group_reduce: GroupReduce,
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """The k units of all parts that a group of heads ranks highest: `top_k` of `pick.reduce_scores`, in one kernel.

    A part has scores f32[B, K, G, U'] and `valid` bool[B, 1 or K, 1, U']; units count on from part to part. Softmax is
    over the valid units of all parts. `implementation`: see `explain`; where ranks differ by less than rounding, the
    kernel may order them otherwise.
    """
    from kvjax.kernels_pallas import top_k_grouped as kernel

    inner: Implementation | None = None if implementation is None else "xla"
    reference = partial(_top_k_grouped, group_reduce=group_reduce, k=k, implementation=inner)

    def mosaic(parts: Sequence[tuple[Array, Array]]) -> Selection:
        return Selection(*kernel.top_k_grouped(parts, group_reduce, k))

    return _dispatch(implementation, kernel, kernel.unsupported(parts, group_reduce, k), mosaic, reference, parts)


def _top_k_grouped(
    parts: Sequence[tuple[Array, Array]], *, group_reduce: GroupReduce, k: int, implementation: Implementation | None
) -> Selection:
    valid = jnp.concatenate([ok for _, ok in parts], axis=-1)
    return top_k(reduce_scores(parts, group_reduce), valid, k, implementation=implementation)


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
    from kvjax.kernels_pallas import select_1bit as kernel

    inner: Implementation | None = None if implementation is None else "xla"
    width = pending[0].shape[3] if wide is None else wide
    if wide is not None and pending[0].dtype != keys.scale.dtype:
        pending, wide = (attention_logits(q, pending[0], scale)[..., :wide], *pending[1:]), None
    reference = partial(
        _select_1bit, group_reduce=group_reduce, room=room, scale=scale, wide=wide, last=last, implementation=inner
    )

    def mosaic(
        q: Array, keys: OneBit, span: Sequence[Array], pending: Sequence[Array], count: Array
    ) -> PackedSelection:
        return PackedSelection(
            *kernel.select_1bit(q, *keys, span, pending, count, group_reduce, room, scale=scale, wide=wide, last=last)
        )

    scores = jax.ShapeDtypeStruct((*q.shape[:3], width), jnp.float32)
    limit = kernel.unsupported(q, keys.bits, keys.scale, pending[0] if wide is None else scores, group_reduce, room)
    args = lax.stop_gradient((q, keys, span, pending, count))  # a choice has no derivative
    return _dispatch(implementation, kernel, limit, mosaic, reference, *args)


def _select_1bit(
    q: Array,
    keys: OneBit,
    span: Sequence[Array],
    pending: Sequence[Array],
    count: Array,
    *,
    group_reduce: GroupReduce,
    room: int,
    scale: float,
    wide: int | None,
    last: int,
    implementation: Implementation | None,
) -> PackedSelection:
    arrived, start, stop = pending
    if wide is not None:
        arrived = attention_logits(q, arrived, scale)[..., :wide]
    scores = score_1bit(q, keys, scale=scale, implementation=implementation)
    parts = [(scores, span[0], span[1]), (arrived, start, stop - last)]
    picked = select_scored(parts, count, group_reduce, room, implementation=implementation)
    return PackedSelection(picked.slots, jnp.sum(picked.valid, axis=-1, dtype=jnp.int32))


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
    from kvjax.kernels_pallas import select_pages as kernel

    require_group_reduce(group_reduce)
    pages, keys = low.shape[2], pending[0].shape[2]
    if unit < 1 or wide % unit or not 0 < wide <= keys:
        raise ValueError(f"wide={wide} must be whole pages of unit={unit} among the {keys} keys that may wait")
    if room > pages + wide // unit:
        raise ValueError(f"room={room} is more than the {pages} stored and {wide // unit} pending pages there are")
    inner: Implementation | None = None if implementation is None else "xla"
    how: dict[str, Any] = {"unit": unit, "scale": scale, "wide": wide, "last": last}
    reference = partial(_select_pages, group_reduce=group_reduce, room=room, **how, implementation=inner)

    def mosaic(
        q: Array, low: Array, high: Array, span: Sequence[Array], pending: Sequence[Array], count: Array
    ) -> PackedSelection:
        return PackedSelection(*kernel.select_pages(q, low, high, span, pending, count, group_reduce, room, **how))

    limit = kernel.unsupported(q, low, high, pending[0], group_reduce, room, unit, wide)
    args = lax.stop_gradient((q, low, high, span, pending, count))  # a choice has no derivative
    return _dispatch(implementation, kernel, limit, mosaic, reference, *args)


def _select_pages(
    q: Array,
    low: Array,
    high: Array,
    span: Sequence[Array],
    pending: Sequence[Array],
    count: Array,
    *,
    group_reduce: GroupReduce,
    room: int,
    unit: int,
    scale: float,
    wide: int,
    last: int,
    implementation: Implementation | None,
) -> PackedSelection:
    keys, start, stop = pending
    scores = score_pages(q, low, high, scale=scale, implementation=implementation)
    exact = attention_logits(q, keys, scale)[..., :wide]
    there = _inside(start, stop - last, exact)
    exact = jnp.where(there, exact, -jnp.inf).reshape(*exact.shape[:3], wide // unit, unit)
    pages = jnp.any(there.reshape(*there.shape[:3], wide // unit, unit), axis=-1)
    first, end = (jnp.asarray(x, jnp.int32) for x in span)
    stored = _inside(first // unit, jnp.where(end > first, -(-end // unit), 0), scores)
    picked = top_k_grouped(
        [(scores, stored), (jnp.max(exact, axis=-1), pages)], group_reduce, room, implementation=implementation
    )
    found = jnp.sum(picked.valid, axis=-1, dtype=jnp.int32)
    return PackedSelection(picked.slots, jnp.minimum(found, jnp.maximum(_by_row(count)[..., 0], 0)))


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
    from kvjax.kernels_pallas import select_4bit as kernel

    inner: Implementation | None = None if implementation is None else "xla"
    reference = partial(_select_4bit, room=room, seed=seed, scale=scale, wide=wide, last=last, implementation=inner)

    def mosaic(
        q: Array, keys: Directions, candidates: PackedSelection, pending: Sequence[Array], count: Array
    ) -> PackedSelection:
        run = partial(kernel.select_4bit, centres=_centres(), turned=turned(q.shape[-1], seed))
        return PackedSelection(*run(q, *keys, candidates, pending, count, room, scale=scale, wide=wide, last=last))

    limit = kernel.unsupported(q, *keys, candidates.slots, pending[0], room, wide)
    args = lax.stop_gradient((q, keys, candidates, pending, count))  # a choice has no derivative
    return _dispatch(implementation, kernel, limit, mosaic, reference, *args)


def _select_4bit(
    q: Array,
    keys: Directions,
    candidates: PackedSelection,
    pending: Sequence[Array],
    count: Array,
    *,
    room: int,
    seed: int,
    scale: float,
    wide: int,
    last: int,
    implementation: Implementation | None,
) -> PackedSelection:
    arrived, start, stop = pending
    M, S = candidates.slots.shape[3], keys.signs.shape[2]
    estimates = rerank(rotate_few(q, seed), keys, candidates, scale=scale, implementation=implementation)
    late = attention_logits(q, arrived, scale)[..., :wide]
    waits = jnp.broadcast_to(_inside(start, stop - last, late), late.shape)
    valid = jnp.concatenate([candidates.valid, waits], axis=-1)
    scores = jnp.concatenate([estimates, late], axis=-1)
    picked = top_k(scores, valid, room, implementation=implementation)
    slots = jnp.take_along_axis(candidates.slots, jnp.minimum(picked.slots, M - 1), axis=-1)
    slots = jnp.where(picked.slots < M, slots, picked.slots - M + S)
    found = jnp.minimum(jnp.sum(picked.valid, axis=-1, dtype=jnp.int32), jnp.maximum(_by_row(count)[..., 0], 0))
    return PackedSelection(slots, found)


def _centres() -> tuple[float, ...]:
    return tuple(lloyd_max(SUBSPACE)[1].tolist())


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
    picked = top_k_grouped(scored, group_reduce, room, implementation=implementation)
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


def collide(
    q: Array,
    ids: Array,
    counts: Array,
    limits: Array,
    *,
    seed: int | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """u8[B, K, G, S] votes for keys that lie in the same part of space as q [B, K, G, D], a subspace of 8 at a time.

    In a subspace, a key is known by its sign pattern, `ids` u8[B, K, S, D/8], and a pattern's score is the product of
    its signs with q. A key earns a vote for each of the `limits` i32[B, T] that exceeds the number of keys in patterns
    of higher score; `counts` i32[B, K, D/8, 256] says how many keys a pattern has. Limits from few keys to many make
    nested tiers; one limit is plain voting. Votes, T D/8 at most, must fit in a byte. With a `seed`, q is first rotated
    (`kvjax.rotate`).

    Reads D/8 bytes a key. On CPU at 8 heads x 32K tokens, D = 128, G = 1, T = 6: 10-13 ms (2026-11-21, jax 0.10.2, 2
    shared cores, normal random keys and q). `implementation`: see `explain`. Where scores of patterns differ by less
    than rounding, the kernel may order them otherwise.
    """
    from kvjax.kernels_pallas import collide as kernel

    args = q, ids, counts, limits
    N, T = ids.shape[3], limits.shape[1]
    if N * T > 255:
        raise ValueError(f"collide counts votes in a byte; {N} subspaces x {T} limits are more than 255")
    run = partial(kernel.collide, turned=None if seed is None else turned(q.shape[-1], seed))
    reference = partial(_collide, seed=seed)
    limit, mosaic = kernel.unsupported(*args), _with_derivative(run, reference)
    return _dispatch(implementation, kernel, limit, mosaic, reference, *args)


def _collide(q: Array, ids: Array, counts: Array, limits: Array, *, seed: int | None) -> Array:
    B, K, G, D = q.shape
    S, N = ids.shape[2:]
    q = q if seed is None else rotate_few(q, seed)
    better = _keys_before(q.astype(jnp.float32).reshape(B, K, G, N, D // N), counts)
    earned = jnp.sum(better[..., None] < limits[:, None, None, None, None], axis=-1, dtype=jnp.uint8)
    block = min(max(512, S // 64), S)

    def step(i: Array, votes: Array) -> Array:
        first = jnp.minimum(i * block, S - block)
        part = jnp.swapaxes(lax.dynamic_slice_in_dim(ids, first, block, axis=2), 2, 3)  # [B, K, N, block]
        index = jnp.broadcast_to(part[:, :, None].astype(jnp.int32), (B, K, G, N, block))
        found = jnp.take_along_axis(earned, index, axis=-1, mode="promise_in_bounds")
        return lax.dynamic_update_slice_in_dim(votes, jnp.sum(found, axis=3, dtype=jnp.uint8), first, axis=3)

    return lax.fori_loop(0, -(-S // block), step, jnp.zeros((B, K, G, S), jnp.uint8))


def _keys_before(q: Array, counts: Array) -> Array:
    """i32[B, K, G, N, P]: for q f32[B, K, G, N, m] and each of the P = 2^m sign patterns, the keys in better ones."""
    *lead, m = q.shape
    pattern = jnp.arange(2**m)
    signs = jnp.where((pattern[:, None] >> jnp.arange(m)[None]) & 1 == 1, 1.0, -1.0)
    scores = jnp.einsum("bkgnm,pm->bkgnp", q, signs, precision="highest")
    shape = (*lead, 2**m)
    ids = jnp.broadcast_to(pattern.reshape((1,) * len(lead) + (-1,)), shape)
    falling, held, ids = lax.sort((-scores, jnp.broadcast_to(counts[:, :, None], shape), ids), num_keys=1)
    before = lax.cumsum(held, axis=held.ndim - 1) - held
    ties = falling[..., 1:] == falling[..., :-1]  # equal patterns share the place of their first
    before = before.at[..., 1:].set(jnp.where(ties, 0, before[..., 1:]))
    return lax.sort((ids, lax.cummax(before, axis=before.ndim - 1)), num_keys=1)[1]


def most_voted(
    votes: Array,
    length: Array,
    count: Array,
    room: int,
    *,
    fill: tuple[Array | int, Array | int, Array | int] | None = None,
    last: int = 0,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The `count` i32[B] slots with most `votes` u8[B, K, G, S] of the first `length` i32[B]; ties go to the lower.

    At most `room` of them, in order of slot, not of votes. With `fill` = (total, start, stop), each i32[B] or a number
    for all rows, count is at least what makes `total` with the slots [start, stop - `last`) of something else.

    Eight passes find the vote that the last of them has, and two running sums their places: there is no sort. On CPU at
    8 heads x 32K tokens, room 6000: 6-10 ms (as `collide`). `implementation`: see `explain`; all give the same.
    """
    from kvjax.kernels_pallas import most_voted as kernel

    def mosaic(votes: Array, length: Array, count: Array, fill: Sequence[Array] | None) -> PackedSelection:
        return PackedSelection(*kernel.most_voted(votes, length, count, room, fill=fill, last=last))

    limit, reference = kernel.unsupported(votes, length, count, room), partial(_most_voted, room=room, last=last)
    return _dispatch(implementation, kernel, limit, mosaic, reference, votes, length, count, fill)


def _most_voted(
    votes: Array, length: Array, count: Array, fill: Sequence[Array] | None, *, room: int, last: int
) -> PackedSelection:
    B, K, G, S = votes.shape
    if fill is not None:
        total, start, stop = fill
        count = jnp.maximum(count, total - jnp.maximum(stop - last - start, 0))
    count = jnp.clip(count, 0, room)[:, None, None]
    valid = jnp.arange(S)[None] < length[:, None]
    votes = jnp.where(valid[:, None, None], votes.astype(jnp.int32), -1)

    def narrow(i: Array, least: Array) -> Array:
        higher = least + (128 >> i)
        enough = jnp.sum(votes >= higher[..., None], axis=-1, dtype=jnp.int32) >= count
        return jnp.where(enough, higher, least)

    least = lax.fori_loop(0, 8, narrow, jnp.zeros((B, K, G), jnp.int32))[..., None]
    above, level = votes > least, votes == least
    spare = count[..., None] - jnp.sum(above, axis=-1, dtype=jnp.int32, keepdims=True)
    upto = lax.cumsum(level.astype(jnp.int32), axis=3)
    chosen = above | (level & (upto <= spare))
    place = lax.cumsum(above.astype(jnp.int32), axis=3) + jnp.minimum(upto, jnp.maximum(spare, 0)) - 1
    slots = jnp.zeros((B, K, G, room), jnp.int32)
    b, k, g, s = jnp.meshgrid(*(jnp.arange(n) for n in votes.shape), indexing="ij", sparse=True)
    slots = slots.at[b, k, g, jnp.where(chosen, place, room)].set(s, mode="drop", unique_indices=True)
    return PackedSelection(slots, jnp.sum(chosen, axis=-1, dtype=jnp.int32))


def rerank(
    q: Array, keys: Directions, picked: PackedSelection, *, scale: float, implementation: Implementation | None = None
) -> Array:
    """f32[B, K, G, M]: scale * q.k~ of q [B, K, G, D] with the `picked` of the keys k~ that `keys` [B, K, S, ..] code.

    Reads 3/4 D bytes a picked key, in blocks of 512. On CPU at 8 heads, M = 6000 of 32K tokens, D = 128, G = 1: 8-10 ms
    (2026-11-21, jax 0.10.2, 2 shared cores, normal random keys and q). `implementation`: see `explain`.
    """
    from kvjax.kernels_pallas import rerank as kernel

    def run(q: Array, keys: Directions, picked: PackedSelection) -> Array:
        return kernel.rerank(q, *keys, picked.slots, centres=_centres(), scale=scale)

    reference = partial(_rerank, scale=scale)
    limit, mosaic = kernel.unsupported(q, *keys, picked.slots), _with_derivative(run, reference)
    return _dispatch(implementation, kernel, limit, mosaic, reference, q, keys, picked)


def _rerank(q: Array, keys: Directions, picked: PackedSelection, *, scale: float) -> Array:
    B, K, G, M = picked.slots.shape
    block = min(512, M)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, M - block)
        index = lax.dynamic_slice_in_dim(picked.slots, first, block, axis=3).reshape(B, K, G * block, 1)
        part = Directions(*(jnp.take_along_axis(a, index, axis=2, mode="clip") for a in keys))
        decoded = decode(lax.optimization_barrier(part)).reshape(B, K, G, block, -1)
        s = jnp.einsum("bkgd,bkgsd->bkgs", q.astype(jnp.float32), decoded, precision="highest") * scale
        return lax.dynamic_update_slice_in_dim(scores, s, first, axis=3)

    return lax.fori_loop(0, -(-M // block), step, jnp.zeros((B, K, G, M), jnp.float32))


def attend_span(q: Array, span: Span, *, scale: float, implementation: Implementation | None = None) -> Array:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over `span`; 0 where it is empty.

    Keys outside of the span may hold anything. `implementation`: see `explain`. The kernel's products read q in the
    dtype of the keys; it reads nothing outside of the span.
    """
    from kvjax.kernels_pallas import attend_span as kernel

    reference = partial(_attend_span, scale=scale)
    mosaic = _with_derivative(lambda q, span: kernel.attend_span(q, *span, scale=scale), reference)
    return _dispatch(implementation, kernel, kernel.unsupported(q, *span), mosaic, reference, q, span)


def _attend_span(q: Array, span: Span, *, scale: float) -> Array:
    # Values outside of the span are finite, so they need no mask here; it would write a second copy of them.
    return attend_part(q, span.k, span.v, span.mask[:, None, None], scale=scale).out.astype(q.dtype)


def attend_slots(
    q: Array,
    k: Array,
    v: Array,
    selection: Selection,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> PartialAttention:
    """Exact attention of q [B, K, G, D] over the selected slots of k, v [B, K, S, D]; PartialAttention over Q = G.

    `implementation`: see `explain`. The kernel gathers and attends at once; its products read q in the dtype of k.
    """
    from kvjax.kernels_pallas import attend_slots as kernel

    reference = partial(_attend_slots, scale=scale)

    def run(q: Array, k: Array, v: Array, selection: Selection) -> PartialAttention:
        return PartialAttention(*kernel.attend_slots(q, k, v, *selection, scale=scale))

    limit = kernel.unsupported(q, k, v, selection.slots)
    return _dispatch(implementation, kernel, limit, _with_derivative(run, reference), reference, q, k, v, selection)


def _attend_slots(q: Array, k: Array, v: Array, selection: Selection, *, scale: float) -> PartialAttention:
    kg, vg = gather_slots(k, v, selection)
    return attend_gathered(q, kg, vg, selection, scale=scale)


def attend_zones(
    q: Array,
    k: Array,
    v: Array,
    selection: Selection | PackedSelection,
    recent: Span,
    sink: Span | None,
    local: int,
    more: tuple[Array, Array] | None = None,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Array:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over all that a step of retrieval attends to.

    That is the selected slots of k, v [B, K, S, D], slots 0 to S - 1, of `more`, keys and values of the same shape, if
    given, slots S to 2 S - 1, and of `recent`, whose slots follow; the last `local` slots of the span of `recent`, none
    of which are selected; and the span of `sink`, if there is one. `implementation`: see `explain`. The kernel's
    products read q in the dtype of k.
    """
    from kvjax.kernels_pallas import attend_zones as kernel

    inner: Implementation | None = None if implementation is None else "xla"
    reference = partial(_attend_zones, local=local, scale=scale, implementation=inner)

    def run(q: Array, k: Array, v: Array, selection: Any, recent: Span, sink: Span | None, more: Any) -> Array:
        known = selection.found if isinstance(selection, PackedSelection) else selection.valid
        return kernel.attend_zones(q, k, v, selection.slots, known, recent, sink, local, more, scale=scale)

    args = q, k, v, selection, recent, sink, more
    limit = kernel.unsupported(q, k, v, selection.slots, recent, sink, local, more)
    return _dispatch(implementation, kernel, limit, _with_derivative(run, reference), reference, *args)


def _attend_zones(
    q: Array,
    k: Array,
    v: Array,
    selection: Selection | PackedSelection,
    recent: Span,
    sink: Span | None,
    more: tuple[Array, Array] | None,
    *,
    local: int,
    scale: float,
    implementation: Implementation | None,
) -> Array:
    if more is not None:
        k, v = (jnp.concatenate(two, axis=2) for two in zip((k, v), more, strict=True))
    recent = recent._replace(start=jnp.maximum(recent.start, recent.stop - local))
    stored, pending = split_selection(selection, k.shape[2])
    history = attend_slots(q, k, v, stored, scale=scale, implementation=implementation)
    return attend_beside(history, q, pending, recent, sink, scale=scale)


def attend_beside(
    history: PartialAttention, q: Array, pending: Selection | None, recent: Span, sink: Span | None, *, scale: float
) -> Array:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: `history` and the attention over the spans of `recent` and `sink`,
    and over the slots of `recent` that `pending` has."""
    mask = recent.mask[:, None, None]
    if pending is not None:
        mask |= membership(pending, recent.k.shape[2])
    parts = [history, attend_part(q, recent.k, recent.v, mask, scale=scale)]
    if sink is not None:
        parts.append(attend_part(q, sink.k, sink.v, sink.mask[:, None, None], scale=scale))
    return merge(*parts).out.astype(q.dtype)


def gather_slots(k: Array, v: Array, selection: Selection) -> tuple[Array, Array]:
    """Keys and values [B, K, H*M, D] of the selected slots of k, v [B, K, S, D]; slots out of range are clipped."""
    index = flat_slots(selection)
    return jnp.take_along_axis(k, index, axis=2, mode="clip"), jnp.take_along_axis(v, index, axis=2, mode="clip")


def gather_quantized(code: QuantArray, selection: Selection, channels: int) -> Array:
    """f32[B, K, H*M, D], the selected tokens of codes of [B, K, S, D]: reads and decodes those rows alone."""
    index = flat_slots(selection)
    group = code.codes.shape[2] // code.scales.shape[2]
    codes = jnp.take_along_axis(code.codes, index, axis=2, mode="clip")
    scales = jnp.take_along_axis(code.scales, index // group, axis=2, mode="clip")
    return dequantize(QuantArray(codes, scales), channels)


def flat_slots(selection: Selection) -> Array:
    """i32[B, K, H*M, 1]: the slots, as an index along axis 2."""
    B, K, H, M = selection.slots.shape
    return selection.slots.reshape(B, K, H * M, 1)


def attend_gathered(q: Array, kg: Array, vg: Array, selection: Selection, *, scale: float) -> PartialAttention:
    """Attention of q [B, K, G, D] over selected tokens that were gathered: kg, vg [B, K, H*M, D], in order."""
    B, K, G, D = q.shape
    H, M = selection.slots.shape[2:]
    kg, vg = (a.reshape(B, K * H, M, a.shape[-1]) for a in (kg, vg))
    valid = selection.valid.reshape(B, K * H, M)
    part = attend_part(q.reshape(B, K * H, G // H, D), kg, keep_valid(vg, valid), valid[:, :, None], scale=scale)
    return PartialAttention(part.out.reshape(B, K, G, -1), part.lse.reshape(B, K, G))


def attend_quantized(
    q: Array,
    keys: QuantArray,
    values: QuantArray,
    start: Array,
    stop: Array,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> PartialAttention:
    """Attention of q [B, K, Q, D] over the slots [start, stop) of codes of k, v [B, K, S, D], in f32.

    start and stop are i32[B] or i32[B, Q]. Reads codes and scales a block of S/64 tokens (at least 256) at a time, so
    it never holds the decoded cache. The products are of codes: scales of keys by channel multiply the queries, those
    by token the scores, those of values the weights, Q multiplications a group in place of one for each of its values.
    With more queries than a group has values (a prompt), each block is decoded instead. Slots outside of [start, stop)
    may hold anything.

    On CPU at 8 heads x 32K tokens, D = 128, Q = 4, 2 bits: 53 ms with keys by channel in groups of 42, 73 ms by token
    in groups of 64; with each block decoded 81 and 74 ms, with the whole cache decoded first 155 and 163 ms and 252
    MiB; over f32 keys and values 28-32 ms (2026-11-21, jax 0.10.2, 2 shared cores, normal random q, k, v).
    `implementation`: see `explain`. The kernel rounds q, and products of scales with q and with weights (of keys by
    token decoded keys) to bfloat16, and sums in f32.
    """
    from kvjax.kernels_pallas import attend_quantized as kernel

    reference = partial(_attend_quantized, scale=scale)

    def run(q: Array, keys: QuantArray, values: QuantArray, start: Array, stop: Array) -> PartialAttention:
        return PartialAttention(*kernel.attend_quantized(q, keys, values, start, stop, scale=scale))

    args = q, keys, values, start, stop
    return _dispatch(
        implementation, kernel, kernel.unsupported(*args), _with_derivative(run, reference), reference, *args
    )


def attend_quantized_zones(
    q: Array,
    keys: QuantArray,
    values: QuantArray,
    start: Array,
    stop: Array,
    recent: Span,
    sink: Span | None,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Array:
    """[B, K, Q, D] in the dtype of q [B, K, Q, D]: `attend_quantized`, start and stop i32[B], and the spans of `recent`
    and `sink`, if there is one.

    `implementation`: see `explain`, of attend_quantized; its kernel takes a recent span in bfloat16 and no sink.
    """
    from kvjax.kernels_pallas import attend_quantized as kernel

    inner: Implementation | None = None if implementation is None else "xla"

    def run(*args: Any) -> Array:
        return kernel.attend_quantized(*args[:-1], scale=scale)

    def reference(*args: Any) -> Array:
        *coded, recent, sink = args
        history = attend_quantized(*coded, scale=scale, implementation=inner)
        return attend_beside(history, coded[0], None, recent, sink, scale=scale)

    args = q, keys, values, start, stop, recent, sink
    limit = kernel.unsupported(*args)
    return _dispatch(implementation, kernel, limit, _with_derivative(run, reference), reference, *args)


def _attend_quantized(
    q: Array, keys: QuantArray, values: QuantArray, start: Array, stop: Array, *, scale: float
) -> PartialAttention:
    slots, D = keys.codes.shape[2], q.shape[-1]
    group = slots // min(keys.scales.shape[2], values.scales.shape[2])
    block = min(max(256, slots // 64) // group * group or group, slots)
    folds = q.shape[2] <= slots * D // max(keys.scales[0, 0].size, values.scales[0, 0].size)
    q = q.astype(jnp.float32)
    start, stop = (a[:, None] if a.ndim == 1 else a for a in (start, stop))

    def step(i: Array, done: PartialAttention) -> PartialAttention:
        first = jnp.minimum(i * block, slots - block)  # the last block overlaps the one before: mask what is done
        slot = (first + jnp.arange(block))[None, None]
        mask = (slot >= jnp.maximum(start, i * block)[..., None]) & (slot < stop[..., None])  # [B, Q, block]
        seen = jnp.any(mask, axis=1)[:, None]
        # Without the barrier XLA widens all codes and scales ahead of the loop.
        kb, vb = lax.optimization_barrier(tuple(slice_tokens(a, first, block) for a in (keys, values)))
        if not folds:
            vf = keep_valid(dequantize(vb, D), seen)
            return merge(done, attend_part(q, dequantize(kb, D), vf, mask[:, None], scale=scale))
        logits = _scores(q, kb) * scale
        return merge(done, part_of_logits(logits, mask[:, None], lambda weights: _mix(weights, vb, seen, D)))

    blocks = (jnp.max(stop) + block - 1) // block
    return lax.fori_loop(0, blocks, step, empty_part(q.shape))


def _scores(q: Array, keys: QuantArray) -> Array:
    """f32[B, K, Q, S]: q.k~ of q f32[B, K, Q, D], from products of codes."""
    B, K, Q, D = q.shape
    groups, slices = keys.scales.shape[2:]
    codes = unpack_codes(keys.codes, D).astype(jnp.float32).reshape(B, K, groups, -1, D)
    scale, zero = split_scales(keys.scales)
    if slices == D:
        scaled = q[:, :, :, None] * scale[:, :, None]
        scores = jnp.einsum("bkqnd,bkntd->bkqnt", scaled, codes, precision="highest")
        scores += jnp.einsum("bkqd,bknd->bkqn", q, zero, precision="highest")[..., None]
        return scores.reshape(B, K, Q, -1)
    sliced, codes = q.reshape(B, K, Q, slices, -1), codes.reshape(B, K, groups, slices, -1)
    products = jnp.einsum("bkqjc,bksjc->bkqsj", sliced, codes, precision="highest")
    offsets = jnp.einsum("bkqj,bksj->bkqs", jnp.sum(sliced, axis=-1), zero, precision="highest")
    return jnp.sum(products * scale[:, :, None], axis=-1) + offsets


def _mix(weights: Array, values: QuantArray, seen: Array, channels: int) -> Array:
    """f32[B, K, Q, D]: the sum of weights f32[B, K, Q, S] times v~, values by token; `seen` bool[B, 1, S]."""
    B, K, Q, S = weights.shape
    codes = unpack_codes(values.codes, channels).astype(jnp.float32)
    scale, zero = (keep_valid(a, seen) for a in split_scales(values.scales))
    codes = codes.reshape(B, K, S, scale.shape[-1], -1)
    scaled = weights[..., None] * scale[:, :, None]
    mean = jnp.einsum("bkqsj,bksjc->bkqjc", scaled, codes, precision="highest")
    mean += jnp.einsum("bkqs,bksj->bkqj", weights, zero, precision="highest")[..., None]
    return mean.reshape(B, K, Q, channels)


def host_rows(x: Array, index: Array, *, implementation: Implementation | None = None) -> Array:
    """[B, K, N, ...] on the device: rows `index` i32[B, K, N] of x [B, K, P, ...] in host memory; zeros where it is out
    of range.

    Moves those rows and no others. XLA gathers on the host's CPU, and moves what it gathered. `implementation`: see
    `explain`; all give the same.
    """
    from kvjax.kernels_pallas import host_rows as kernel

    limit = kernel.unsupported(x, index)
    return _dispatch(implementation, kernel, limit, kernel.host_rows, _host_rows, x, index)


Parts = tuple[Array, ...]


def host_rows_first(
    x: Array,
    index: Array,
    edge: Array,
    now: Array,
    held: tuple[Array, Parts],
    recent: Parts,
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """The keys and values, [B, K, M * Z, D] each, that heads recall from host memory: of the (b, k) where `now` bool[B,
    K] is true, and of others anything. `host_rows_rest` gives all.

    Recalled are, of x [B, K, P, 2, Z, D], at place n < N what `index` i32[B, K, N] says, at place N what `edge` i32[B]
    says, and zeros at the rest. Where it says i < P, that is row i of x; P + r are the Z slots from slot r on of
    `recent`, keys and values [B, K, R, D], the last one for those past its end; and a negative number gives zeros.
    `held` = (there i32[B, K, M], (k, v)) says what lies on the device already: of the rows there[b, k, m], negative for
    none, the keys and values, [B, K, M * Z, D] each. The kernel reads them there.

    XLA reads the rows of all (b, k), as it moves as many in either case. `implementation`: see `explain`.
    """
    from kvjax.kernels_pallas import host_rows as kernel

    def reference(x: Array, index: Array, edge: Array, now: Array, held: Any, recent: Parts) -> Parts:
        return _host_recall(x, index, edge, held[0].shape[2], recent)

    limit = kernel.unsupported_recall(x, held[0], [*held[1], *recent])
    return _dispatch(implementation, kernel, limit, kernel.recall, reference, x, index, edge, now, held, recent)


def host_rows_rest(
    x: Array,
    index: Array,
    edge: Array,
    now: Array,
    held: tuple[Array, Parts],
    recent: Parts,
    ready: tuple[Array, Parts],
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """The keys and values, [B, K, M * Z, D] each: of heads `now` as in `host_rows_first`; where `which` bool[B, K] is
    true, those of `ready` = (which, (k, v)), which that gave, of the same implementation; else those of `held`.

    The kernel has few blocks, beside which others run where XLA starts them at the same time (`memory.CONCURRENT`).
    """
    from kvjax.kernels_pallas import host_rows as kernel

    def mosaic(*args: Any) -> Parts:
        config, blocks = kernel.BESIDE
        return kernel.recall(*args, config=config, blocks=blocks)

    def reference(x: Array, index: Array, edge: Array, now: Array, held: Any, recent: Parts, ready: Any) -> Parts:
        which, anew = ready  # of all heads
        heads = (now | which)[..., None, None]
        return tuple(jnp.where(heads, a, b) for a, b in zip(anew, held[1], strict=True))

    limit = kernel.unsupported_recall(x, held[0], [*held[1], *recent, *ready[1]])
    return _dispatch(implementation, kernel, limit, mosaic, reference, x, index, edge, now, held, recent, ready)


def _host_recall(x: Array, index: Array, edge: Array, places: int, recent: Parts) -> Parts:
    (B, K, P, _, Z, D), N = x.shape, index.shape[2]
    at_edge = jnp.broadcast_to(edge[:, None, None], (B, K, 1))
    nothing = jnp.full((B, K, max(places - N - 1, 0)), -1, jnp.int32)
    index = jnp.concatenate([index, at_edge, nothing], axis=2)[:, :, :places]
    rows = _host_rows(x, jnp.where(index < P, index, -1))
    slots = index[..., None] - P + jnp.arange(Z)[None, None, None]
    slots = jnp.clip(slots, 0, recent[0].shape[2] - 1).reshape(B, K, places * Z, 1)
    waits = jnp.repeat(index >= P, Z, axis=2)[..., None]
    stored = (rows[:, :, :, n].reshape(B, K, places * Z, D) for n in range(len(recent)))
    return tuple(
        jnp.where(waits, jnp.take_along_axis(zone, slots, axis=2).astype(x.dtype), old)
        for old, zone in zip(stored, recent, strict=True)
    )


def _host_rows(x: Array, index: Array) -> Array:
    row = x.shape[3:]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(3, 3 + len(row))),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    places = index[..., None]
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        places = to_host(places)
    rows = to_device(lax.gather(x, places, numbers, (1, 1, 1, *row), mode=lax.GatherScatterMode.CLIP))
    there = (index >= 0) & (index < x.shape[2])
    return jnp.where(there.reshape(*index.shape, *[1] * len(row)), rows, jnp.zeros((), x.dtype))


def host_append(
    x: Array, new: Sequence[Array], at: Array, count: Array, *, implementation: Implementation | None = None
) -> Array:
    """x [B, K, P, parts, ...] in host memory, with the first `count` i32[B] rows of each of the parts `new` [B, K, n,
    ...] at row `at` i32[B] and those after it, of n <= P. Rows at or past P are dropped.

    In place where x is donated or a loop's carry. XLA reads, changes and writes a slice for each row of the batch.
    `implementation`: see `explain`; all give the same.
    """
    from kvjax.kernels_pallas import host_append as kernel

    new = tuple(new)
    limit = kernel.unsupported(x, new, at, count)
    return _dispatch(implementation, kernel, limit, kernel.host_append, _host_append, x, new, at, count)


def _host_append(x: Array, new: Sequence[Array], at: Array, count: Array) -> Array:
    stacked = jnp.stack([part.astype(x.dtype) for part in new], axis=3)
    (B, K, P, *row), n = x.shape, stacked.shape[2]
    move = to_host if jax.typeof(x).memory_space == jax.memory.Space.Host else to_device

    # A row at a time, a slice that is read, changed and written: in host memory XLA keeps this in place on CPU and
    # GPU (a scatter too, but on a GPU it is the CPU that does it, with a warning). A slice past the end would be
    # clamped, so it starts earlier and its first rows stay as they are.
    def one_row(b: Array, x: Array) -> Array:
        first = jnp.minimum(at[b], P - n)
        source = first + jnp.arange(n) - at[b]
        fits = (source >= 0) & (source < count[b])
        where: list[Array | int] = [b, 0, first, *[0] * len(row)]
        old = to_device(lax.dynamic_slice(x, where, (1, K, n, *row)))
        mine = jnp.take(lax.dynamic_slice_in_dim(stacked, b, 1, axis=0), source, axis=2, mode="clip")
        changed = jnp.where(fits.reshape(n, *[1] * len(row)), mine, old)
        return lax.dynamic_update_slice(x, move(changed), where)

    return lax.fori_loop(0, B, one_row, x)


def put_token(
    zones: Sequence[Block],
    k: Array,
    v: Array,
    active: Array,
    overflow: Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[list[Block], Array]:
    """The zones with the token k, v [B, K, 1, D] of each row that is `active` bool[B], in the first that has room; and
    `overflow` bool[B], also true of rows where none had.

    In place where zones are donated or a loop's carry. `implementation`: see `explain`; all give the same.
    """
    from kvjax.kernels_pallas import put_token as kernel

    def mosaic(zones: Sequence[Block], *rest: Array) -> tuple[list[Block], Array]:
        made, overflow = kernel.put_token([(zone.k, zone.v, zone.count) for zone in zones], *rest)
        return [Block(*zone) for zone in made], overflow

    args = list(zones), k, v, active, overflow
    limit = kernel.unsupported([(zone.k, zone.v, zone.count) for zone in zones], *args[1:])
    return _dispatch(implementation, kernel, limit, _with_derivative(mosaic, _put_token), _put_token, *args)


def _put_token(zones: Sequence[Block], k: Array, v: Array, active: Array, overflow: Array) -> tuple[list[Block], Array]:
    after, left = [], active
    for zone in zones:
        fits = left & (zone.count < zone.slots)
        after.append(put(zone, k, v, fits.astype(jnp.int32)))
        left = left & ~fits
    return after, overflow | left


# ------------------------------------------------------------------------------------------------------ implementations


_OPERATIONS: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        attend_quantized,
        attend_slots,
        attend_span,
        attend_zones,
        collide,
        host_append,
        host_rows,
        most_voted,
        select_1bit,
        select_4bit,
        select_pages,
        put_token,
        rerank,
        score_1bit,
        score_pages,
        top_k,
        top_k_grouped,
    )
}


def explain(op: str, *args: Any, **options: Any) -> str:
    """Which implementation `op` runs for these arguments, and why: "mosaic", or "xla: ...".

    `op` is the name of an operation here that has a kernel; the rest is what it takes, with `jax.ShapeDtypeStruct` for
    any array. Under `implementation=None` a GPU runs the Pallas Mosaic GPU kernel wherever there is one: jax >= 0.11,
    compute capability 9.0, shapes that it takes, and a time that was measured. All else runs the reference ("xla"). It
    is decided for the platform that a program is lowered for. A kernel asked for by name ("mosaic") runs, measured or
    not, or raises NotImplementedError with the limit.

    >>> scores, valid = (jax.ShapeDtypeStruct((8, 65536), dtype) for dtype in (jnp.float32, bool))
    >>> explain("top_k", scores, valid, 8192).split(":")[0]
    'xla'
    """
    if op not in _OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(_OPERATIONS)}; got {op!r}")
    leaves, tree = jax.tree.flatten((args, options))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

    def run(arrays: dict[int, Array]) -> Any:
        args, options = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return _OPERATIONS[op](*args, **options)

    with explained() as found:
        jax.eval_shape(run, arrays)
    return found[op]


@contextmanager
def explained() -> Iterator[dict[str, str]]:
    """Collects, by operation, what `explain` says of those that are traced in the block."""
    found: dict[str, str] = {}
    token = _explained.set(found)
    try:
        yield found
    finally:
        _explained.reset(token)


def _answer(kernel: Any, limit: str | None) -> str:
    why = _why_not(limit) or _unmeasured(kernel)
    if why is None and jax.default_backend() != "gpu":
        why = f"the kernels are for GPUs; this process runs on {jax.default_backend()}"
    return "mosaic" if why is None else f"xla: {why}"


def _name(kernel: Any) -> str:
    """Of a kernel's module, and so of its operation."""
    return kernel.__name__.rpartition(".")[2]


def _why_not(limit: str | None) -> str | None:
    """Why no kernel can run: what this process lacks, or else `limit`."""
    from kvjax.kernels_pallas import _common

    return _common.why_not() or limit


def _unmeasured(kernel: Any) -> str | None:
    return None if kernel.MEASURED else f"the kernel {_name(kernel)} is not yet measured on a GPU: ask for it by name"


def _with_derivative(run: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a kernel, with the derivative of the reference: it has none of its own."""
    f = jax.custom_jvp(run)
    f.defjvp(lambda primals, tangents: (f(*primals), jax.jvp(reference, primals, tangents)[1]))
    return f


def _dispatch(
    implementation: Implementation | None,
    kernel: Any,
    limit: str | None,
    mosaic: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
) -> Any:
    if implementation not in (None, *get_args(Implementation)):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation must be None or one of {names}; got {implementation!r}")
    if (found := _explained.get()) is not None:
        found[_name(kernel)] = _answer(kernel, limit)
    why_not = _why_not(limit)
    if implementation == "mosaic":
        if why_not:
            raise NotImplementedError(why_not)
        return lax.platform_dependent(*args, cuda=mosaic)  # lowered for anything else: NotImplementedError
    if implementation == "xla" or _unmeasured(kernel):
        return reference(*args)
    if why_not:
        if jax.default_backend() == "gpu":
            _say_once(why_not)
        return reference(*args)
    return lax.platform_dependent(*args, cuda=mosaic, default=reference)


@cache
def _say_once(why: str) -> None:
    logging.getLogger("kvjax").warning("running the reference in plain JAX: %s", why)
