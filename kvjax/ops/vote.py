"""Votes for keys by their sign patterns, and the keys with the most votes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.memory import vary_with
from kvjax.numerics.blocks import put_last
from kvjax.numerics.rotate import rotate_few, turned
from kvjax.numerics.selection import PackedSelection, of_lists
from kvjax.numerics.types import Float, Int32, UInt8
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, for_gpu, op

Complement = tuple[Array | int, Array | int, Array | int]  # see `most_voted`


def _collide_limit(a: Any) -> str | None:
    _check_votes(a.ids, a.limits)
    return kernels.collide.unsupported(a.q, a.ids, a.counts, a.limits)


def _collide_mosaic(a: Any) -> Array:
    rotation = None if a.seed is None else turned(a.q.shape[-1], a.seed)
    return kernels.collide.collide(a.q, a.ids, a.counts, a.limits, turned=rotation)


def _check_votes(ids: Array, limits: Array) -> None:
    N = ids.shape[3]
    T = limits.shape[1]
    if N * T > 255:
        raise ValueError(
            f"collide counts votes in a byte; {N} subspaces x {T} limits are more than 255, so use fewer limits"
        )


@op(
    kernel=lambda: kernels.collide,
    static_argnames=("seed",),
    derivative="reference",
    limit=_collide_limit,
    mosaic=_collide_mosaic,
)
def collide(
    q: Float[Array, "B K G D"],
    ids: UInt8[Array, "B K S N"],
    counts: Int32[Array, "B K N P"],
    limits: Int32[Array, "B T"],
    *,
    seed: int | None = None,
    implementation: Implementation | None = None,
) -> UInt8[Array, "B K G S"]:
    """Votes for keys whose sign patterns score high with q, at most one vote per subspace and
    limit.

    In a subspace of D/N channels, a key is represented by its sign pattern, `ids`, one of P =
    2^(D/N); a pattern's score is the product of its signs with q. A key earns one vote for each
    of the `limits` that exceeds the number of keys in patterns of higher score; `counts` has
    the number of keys of each pattern. Several limits make nested tiers. Votes, at most N T,
    must fit in a byte. With a `seed`, q is first rotated (`kvjax.numerics.rotate`).

    Reads N bytes per key. The kernel takes subspaces of 8. If scores of patterns differ by less
    than rounding, the kernel may order them differently.
    """
    B, K, G, D = q.shape
    N = ids.shape[3]
    _check_votes(ids, limits)
    q = q if seed is None else rotate_few(q, seed)
    better = _keys_before(q.astype(jnp.float32).reshape(B, K, G, N, D // N), counts)
    earned = jnp.sum(
        better[..., None] < limits[:, None, None, None, None], axis=-1, dtype=jnp.uint8
    )
    return for_gpu(_votes, _vote_blocks, earned, ids)


def _votes(earned: Array, ids: Array) -> Array:
    """u8[B, K, G, S]: the votes that keys with patterns ids u8[B, K, S, N] get from earned
    u8[B, K, G, N, P].
    """
    index = jnp.swapaxes(ids, 2, 3)[:, :, None].astype(jnp.int32)
    index = jnp.broadcast_to(index, (*earned.shape[:4], ids.shape[2]))
    found = jnp.take_along_axis(earned, index, axis=-1, mode="promise_in_bounds")
    return jnp.sum(found, axis=3, dtype=jnp.uint8)


def _vote_blocks(earned: Array, ids: Array) -> Array:
    B, K, G, _, _ = earned.shape
    S = ids.shape[2]
    block = min(max(512, S // 64), S)

    def step(i: Array, votes: Array) -> Array:
        first = jnp.minimum(i * block, S - block)
        part = _votes(earned, lax.dynamic_slice_in_dim(ids, first, block, axis=2))
        return lax.dynamic_update_slice_in_dim(votes, part, first, axis=3)

    return lax.fori_loop(
        0, -(-S // block), step, vary_with(jnp.zeros((B, K, G, S), jnp.uint8), earned, ids)
    )


def _keys_before(q: Array, counts: Array) -> Array:
    """For q f32[B, K, G, N, m] and each of the P = 2^m sign patterns, the keys in better ones:
    i32[B, K, G, N, P].
    """
    *lead, m = q.shape
    pattern = jnp.arange(2**m, dtype=jnp.int32)
    signs = jnp.where(
        (pattern[:, None] >> jnp.arange(m, dtype=jnp.int32)[None]) & 1 == 1,
        jnp.float32(1),
        jnp.float32(-1),
    )
    scores = jnp.einsum("bkgnm,pm->bkgnp", q, signs, precision="highest")
    shape = (*lead, 2**m)
    ids = jnp.broadcast_to(pattern.reshape((1,) * len(lead) + (-1,)), shape)
    falling, keys, ids = lax.sort(
        (-scores, jnp.broadcast_to(counts[:, :, None], shape), ids), num_keys=1
    )
    before = lax.cumsum(keys, axis=keys.ndim - 1) - keys
    # patterns of equal score share the place of the first one
    ties = falling[..., 1:] == falling[..., :-1]
    before = before.at[..., 1:].set(jnp.where(ties, 0, before[..., 1:]))
    return put_last(jnp.zeros(shape, jnp.int32), ids, lax.cummax(before, axis=before.ndim - 1))


@op(
    kernel=lambda: kernels.most_voted,
    static_argnames=("room", "local"),
    derivative="zero",
    limit=lambda a: kernels.most_voted.unsupported(a.votes, a.length, a.count, a.room),
    mosaic=lambda a: PackedSelection(
        *kernels.most_voted.most_voted(
            a.votes, a.length, a.count, a.room, complement=a.complement, local=a.local
        )
    ),
)
def most_voted(
    votes: UInt8[Array, "B K G S"],
    length: Int32[Array, " B"],
    count: Int32[Array, " B"],
    room: int,
    *,
    complement: Complement | None = None,
    local: int = 0,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """Returns the `count` i32[B] slots with the most `votes` u8[B, K, G, S] among the first
    `length` i32[B]; ties: the lower.

    At most `room` of them, in order of slot, not of votes. With `complement` = (total, start,
    stop), `count` is raised so that the selected slots and the slots [start, stop - `local`) of
    another zone are at least `total` together. Each of these three is i32[B], a number for all
    rows, or i32[B, T] for the heads of T decode steps.

    Passes over the bits of the votes find the number of votes of the last place, and two
    running sums the places: nothing is sorted.
    """
    B, K, G, S = votes.shape
    count = of_lists(count, G)
    if complement is not None:
        total, start, stop = (of_lists(x, G) for x in complement)
        beside = jnp.maximum(stop - local - start, 0)  # slots of the other zone
        count = jnp.maximum(count, total - beside)
    count = jnp.broadcast_to(jnp.clip(count, 0, room), (B, 1, count.shape[2]))
    valid = jnp.arange(S, dtype=jnp.int32)[None] < length[:, None]
    votes = jnp.where(valid[:, None, None], votes.astype(jnp.int32), -1)

    least = for_gpu(partial(_least_votes, bits=4), partial(_least_votes, bits=1), votes, count)
    least = least[..., None]

    # The slots with more votes than the last leave room for so many with as many, of the lower.
    above = votes > least
    level = votes == least
    spare = count[..., None] - jnp.sum(above, axis=-1, dtype=jnp.int32, keepdims=True)
    level_rank = lax.cumsum(level.astype(jnp.int32), axis=3)
    selected = above | (level & (level_rank <= spare))

    # The place of a slot in the list is the number of selected slots before it.
    above_rank = lax.cumsum(above.astype(jnp.int32), axis=3)
    place = above_rank + jnp.minimum(level_rank, jnp.maximum(spare, 0)) - 1
    slots = lax.broadcasted_iota(jnp.int32, votes.shape, 3)
    listed = jnp.zeros((B, K, G, room), jnp.int32)
    listed = put_last(listed, jnp.where(selected, place, room), slots)
    return PackedSelection(listed, jnp.sum(selected, axis=-1, dtype=jnp.int32))


def _least_votes(votes: Array, count: Array, *, bits: int) -> Array:
    """Returns the most votes, i32[B, K, G], that at least `count` i32[B, 1, G] of votes i32[B,
    K, G, S] have; 0 if none do.

    Each pass finds some bits and compares with 2^bits - 1 numbers. A GPU takes longer to start
    a pass than to run it.
    """
    least = jnp.zeros(votes.shape[:3], jnp.int32)
    for shift in range(8 - bits, -1, -bits):
        digits = lax.broadcasted_iota(jnp.int32, (*least.shape, 2**bits - 1), 3) + 1
        higher = least[..., None] + (digits << shift)
        voted = jnp.sum(votes[:, :, :, None] >= higher[..., None], axis=-1, dtype=jnp.int32)
        least += jnp.sum(voted >= count[..., None], axis=-1, dtype=jnp.int32) << shift
    return least
