"""Writes of tokens into the zones of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.blocks import Block, put, take_rows
from kvjax.numerics.types import Bool, Int32, Shaped
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, op


def _arrays(zone: Block) -> tuple[Array, Array, Array]:
    return zone.k, zone.v, zone.count


def _put_token_mosaic(a: Any) -> tuple[list[Block], Array]:
    stored, overflow = kernels.put_token.put_token(
        list(map(_arrays, a.zones)), a.k, a.v, a.active, a.overflow
    )
    return [Block(*zone) for zone in stored], overflow


@op(
    kernel=lambda: kernels.put_token,
    derivative="reference",
    limit=lambda a: kernels.put_token.unsupported(
        list(map(_arrays, a.zones)), a.k, a.v, a.active, a.overflow
    ),
    mosaic=_put_token_mosaic,
)
def put_token(
    zones: Sequence[Block],
    k: Shaped[Array, "B K 1 D"],
    v: Shaped[Array, "B K 1 D"],
    active: Bool[Array, " B"],
    overflow: Bool[Array, " B"],
    *,
    implementation: Implementation | None = None,
) -> tuple[list[Block], Bool[Array, " B"]]:
    """Stores the token k, v [B, K, 1, D] of each row where `active` bool[B] is true, in the
    first zone that has room.

    Returns the zones, and `overflow` bool[B], also true for rows where no zone had room. In
    place if zones are donated or a loop's carry.
    """
    after = []
    left = active
    for zone in zones:
        fits = left & (zone.count < zone.slots)
        after.append(put(zone, k, v, fits.astype(jnp.int32)))
        left = left & ~fits
    return after, overflow | left


def _put_tokens_mosaic(a: Any) -> tuple[list[Block], Array]:
    stored, overflow = kernels.put_token.put_tokens(
        list(map(_arrays, a.zones)), a.k, a.v, a.count, a.overflow
    )
    return [Block(*zone) for zone in stored], overflow


@op(
    kernel=lambda: kernels.put_token,
    derivative="reference",
    limit=lambda a: kernels.put_token.unsupported(
        list(map(_arrays, a.zones)), a.k, a.v, a.count, a.overflow
    ),
    mosaic=_put_tokens_mosaic,
)
def put_tokens(
    zones: Sequence[Block],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    count: Int32[Array, " B"],
    overflow: Bool[Array, " B"],
    *,
    implementation: Implementation | None = None,
) -> tuple[list[Block], Bool[Array, " B"]]:
    """Stores the first `count` i32[B] of the tokens k, v [B, K, T, D], which fill one zone
    after the other.

    Returns the zones, and `overflow` bool[B], also true for rows where a token had no room. In
    place if zones are donated or a loop's carry.
    """
    after: list[Block] = []
    left = count = jnp.clip(count, 0, k.shape[2])
    for zone in zones:
        mine = (k, v)
        taken = jnp.clip(left, 0, zone.slots - zone.count)
        if after:  # the tokens that earlier zones have not stored
            place = jnp.arange(k.shape[2], dtype=jnp.int32)[None] + (count - left)[:, None]
            mine = take_rows(k, place), take_rows(v, place)
        after.append(put(zone, *mine, taken))
        left = left - taken
    return after, overflow | (left > 0)
