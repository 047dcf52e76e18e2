"""Context parallelism: the tokens of a row are split over the devices of a mesh axis, each with
a part of the history.

    place of a token in the history    0 1 | 2 3 | 4 5 | 6 7 | 8 9 | ...      stripes of 2 tokens
    device                              0  |  1  |  0  |  1  |  0  | ...      2 devices
    slot on that device                0 1 | 0 1 | 2 3 | 2 3 | 4 5 | ...
    turn                                    0    |     1     |   2 ...

A *place* is here a slot of the whole history, which is that of the glossary where tokens leave
the recent block in order; a *slot* numbers the tokens that one device has. Stripes go to the
devices in turn, so all hold the same number of tokens; a *turn* is one stripe of each device. A
policy's store and selector are replaced by `StripedStore` and `StripedSelector`
(`stores.split_store`, `selectors.split_selector`), which take places as their slots and keep
the stripes of their device. Each device attends to its own tokens, and the parts merge by their
log-sum-exp; it offers its best units as pairs of rank and place, and counts how many of its own
are among the best of all, as one device would select. Or it selects its share of the budget
from its own units alone (`shares`).

Every device holds the whole sink and recent block, and the first attends to them. The functions
here run inside of `kvjax.sharding.placement.run_on_parts`.

**Source:** merging parts follows flash-decoding and ring attention; dealing tokens in turn
follows the decode context parallelism of vLLM and SGLang, which attend to everything.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.partial import PartialAttention

Axis: TypeAlias = str | tuple[str, ...]
PREFIXES = "a Placement cannot split the tokens of rows that share prefixes; split only rows and heads (batch, heads)"


@dataclass(frozen=True)
class Stripes:
    """How the places of a history are dealt: `tokens` at a time, to each of `parts` devices in
    turn.

    Methods that depend on a device are those of the device that runs them, in `shard_map`,
    unless they are given another.
    """

    axis: Axis  # of the mesh
    parts: int
    tokens: int

    @property
    def turn(self) -> int:
        """Tokens of one stripe of each device."""
        return self.tokens * self.parts

    @property
    def device(self) -> Array:
        """The index of this device along the axis."""
        return lax.axis_index(self.axis)

    def check(self, part: Any, spec: Any) -> None:
        """Raises ValueError if a selector or a store does not take the chunks of a history, or
        a device's part.
        """
        part.check(spec, self.turn)
        try:
            part.check(spec, self.tokens)
        except ValueError as error:
            chunk = (
                f"a chunk of {self.turn} tokens is split over {self.parts} devices of context"
            )
            raise ValueError(
                f"{chunk}: {error}, or larger chunks (`chunk` of a preset)"
            ) from error

    def count_own(self, places: Array, device: Array | None = None) -> Array:
        """How many of the first `places` tokens this device has, or another one, which is also
        the slot of its next one.
        """
        device = self.device if device is None else device
        of_last_turn = places % self.turn - device * self.tokens
        return places // self.turn * self.tokens + jnp.clip(of_last_turn, 0, self.tokens)

    def even_share(self, count: Array, device: Array | None = None) -> Array:
        """How many of `count` things are for this device, or another one, if all get equally
        many, and the first devices one more where that does not come out even.
        """
        device = self.device if device is None else device
        return (count + self.parts - 1 - device) // self.parts

    def max_tokens(self, run: int) -> int:
        """Returns the most tokens that a device can have of `run` adjacent ones."""
        turns, rest = divmod(run, self.turn)
        return turns * self.tokens + min(self.tokens, rest)

    def place(self, slot: Array) -> Array:
        """Returns the place of the token in a slot of this device."""
        turn = slot // self.tokens
        stripe = turn * self.parts + self.device
        return stripe * self.tokens + slot % self.tokens

    def slot(self, place: Array) -> tuple[Array, Array]:
        """Returns the slot of the token at a place, on the device that has it, and bool:
        whether that is this device.
        """
        stripe = place // self.tokens
        turn = stripe // self.parts
        slot = turn * self.tokens + place % self.tokens
        return slot, stripe % self.parts == self.device

    def take_own(self, tokens: Array) -> Array:
        """This device's tokens [B, K, T / parts, ...] of whole turns [B, K, T, ...]."""
        B, K, T, *rest = tokens.shape
        dealt = tokens.reshape(B, K, T // self.turn, self.parts, self.tokens, *rest)
        own = lax.dynamic_index_in_dim(dealt, self.device, axis=3, keepdims=False)
        return own.reshape(B, K, -1, *rest)

    def gather(self, units: Array, unit: int) -> Array:
        """Returns the units [..., parts * U] of all devices by place, of U units [..., U] of
        `unit` tokens on each device.
        """
        *lead, U = units.shape
        units_of_stripe = self.tokens // unit
        stripes = units.reshape(*lead, U // units_of_stripe, 1, units_of_stripe)
        of_all = lax.all_gather(stripes, self.axis)  # [parts, ..., turns, 1, units of a stripe]
        by_turn = jnp.moveaxis(
            of_all[..., 0, :], 0, -2
        )  # [..., turns, parts, units of a stripe]
        return by_turn.reshape(*lead, U * self.parts)


def no_share(what: Any) -> str:
    """Says why a placement cannot let each device select its share, for an error."""
    return (
        f"{what} makes one selection for all devices, of which none can make its share alone; use "
        'Placement(selection="exact")'
    )


def share_of_highest(marks: Array, count: Array, levels: int, stripes: Stripes) -> Array:
    """How many of the `count` tokens with the highest marks are on this device: i32[B, K, G].

    Marks u8[B, K, G, S] are those of this device's tokens, up to `levels`; 0 is no token. Ties
    go to the lower place in the whole history, so the tokens on this device are its own
    highest, with ties to the lower slot. Devices exchange how many of their tokens reach each
    level, and how many tokens of each stripe have the lowest mark among the highest.

    Args:
      count: i32[B]; fewer are counted if there are not as many tokens.
    """
    # How many tokens reach each level from 1 on, here and on all devices: [B, K, G, levels + 1].
    level = jnp.arange(1, levels + 2, dtype=jnp.uint8)[None, None, None, :, None]
    own_reach = jnp.sum(marks[..., None, :] >= level, axis=-1, dtype=jnp.int32)
    all_reach = lax.psum(own_reach, stripes.axis)
    count = jnp.minimum(count[:, None, None], all_reach[..., 0])

    # All tokens above the mark `least` are among the highest, and some of those that have it.
    least = jnp.sum(all_reach >= count[..., None], axis=-1, keepdims=True, dtype=jnp.int32)
    above = _at_level(all_reach, least)
    own_above = _at_level(own_reach, least)
    room = (count - above)[..., None]

    # Those go by place: a stripe gets what the stripes before it, on all devices, leave.
    is_tied = (marks == least.astype(jnp.uint8)).reshape(*marks.shape[:3], -1, stripes.tokens)
    tied = jnp.sum(is_tied, axis=-1, dtype=jnp.int32)  # [B, K, G, turns]
    by_turn = jnp.moveaxis(lax.all_gather(tied, stripes.axis), 0, -1)  # [..., turns, parts]
    in_order = by_turn.reshape(*tied.shape[:3], -1)
    before = (lax.cumsum(in_order, axis=3) - in_order).reshape(by_turn.shape)
    own_before = lax.dynamic_index_in_dim(before, stripes.device, axis=4, keepdims=False)
    of_tied = jnp.sum(jnp.clip(room - own_before, 0, tied), axis=-1, dtype=jnp.int32)
    return own_above + of_tied


def _at_level(reach: Array, level: Array) -> Array:
    """i32[B, K, G]: the entry `level` i32[B, K, G, 1] of i32[B, K, G, levels + 1], 0 past it."""
    return jnp.take_along_axis(reach, level, axis=-1, mode="fill", fill_value=0)[..., 0]


class Offers(NamedTuple):
    """Units that devices offer for a selection, best first and equal ones by place. An offer
    without a unit has rank 0.
    """

    rank: Array  # u32[B, K, H, n]
    place: Array  # i32[B, K, H, n] in the whole history


def count_taken(own: Offers, of_all: Offers, k: Array) -> Array:
    """How many offers of this device are among the first k of all devices: i32[B, K, H].

    `own` has n offers of each list, and `of_all` those of each device, one device after the
    other; k is broadcastable to [B, K, H, 1].
    """
    *lead, n = own.rank.shape
    if n == 0:
        return jnp.zeros(lead, jnp.int32)

    def taken(at: Array) -> Array:
        """How many of the offers at places i32[..., m] of the list are taken; none past n."""
        index = jnp.minimum(at, n - 1)
        rank = jnp.take_along_axis(own.rank, index, axis=-1)[..., None]
        place = jnp.take_along_axis(own.place, index, axis=-1)[..., None]
        ranks = of_all.rank[..., None, :]
        places = of_all.place[..., None, :]
        is_before = (ranks > rank) | ((ranks == rank) & (places < place))
        before = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
        is_taken = (before < k) & (rank[..., 0] > 0) & (at < n)
        return jnp.sum(is_taken, axis=-1, dtype=jnp.int32)

    # The taken ones come first in the list, so only the first offer of each block is compared
    # with all, and then those of the last block whose first is taken.
    block = math.isqrt(n)
    firsts = jnp.arange(0, n, block, dtype=jnp.int32)
    firsts = jnp.broadcast_to(firsts, (*lead, -(-n // block)))
    full = jnp.maximum(taken(firsts) - 1, 0) * block
    in_last = full[..., None] + jnp.arange(block, dtype=jnp.int32)[None, None, None]
    return full + taken(in_last)


def merge_parts(part: PartialAttention, axis: Axis) -> PartialAttention:
    """Returns the attention over the tokens of all devices, for the queries of a step: one
    all-gather of D + 1 numbers per query head.
    """
    of_all = lax.all_gather(jnp.concatenate([part.out, part.lse[..., None]], axis=-1), axis)
    outs = [one[..., :-1] for one in of_all]
    lses = [one[..., -1:] for one in of_all]
    top = lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    # Sums by hand, part by part: a GPU then merges in one kernel, and a reduction would be another.
    weights = [jnp.exp(lse - shift) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    mixed = functools.reduce(jnp.add, map(jnp.multiply, outs, weights))
    mean = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return PartialAttention(mean, (jnp.log(total) + shift)[..., 0])


def merge_chunk(part: PartialAttention, axis: Axis) -> PartialAttention:
    """`merge_parts` for the many queries of a chunk of prompt: a maximum and a sum over
    devices, which move less.
    """
    top = lax.pmax(lax.stop_gradient(part.lse), axis)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(part.lse - shift)[..., None]
    total = lax.psum(jnp.concatenate([part.out * weight, weight], axis=-1), axis)
    floor = jnp.finfo(jnp.float32).tiny
    out = total[..., :-1] / jnp.maximum(total[..., -1:], floor)
    return PartialAttention(out, jnp.log(total[..., -1]) + shift)
