"""Context parallelism: the tokens of a row are split over the devices of a mesh axis, each with
a part of the history.

    place of a token in the history    0 1 | 2 3 | 4 5 | 6 7 | 8 9 | ...      stripes of 2 tokens
    device                              0  |  1  |  0  |  1  |  0  | ...      2 devices

Stripes go to the devices in turn, so all hold the same number of tokens. A policy's store and
selector are replaced by `StripedStore` and `StripedSelector` (`stores.split_store`,
`selectors.split_selector`), which take slots of the whole history and keep the stripes of their
device. Each device attends to its own tokens, and the
parts merge by their log-sum-exp; it offers its best units as pairs of score and place, and
counts how many of its own are among the best of all, as one device would select. Or it selects
its share of the budget from its own units alone (`shares`).

Every device holds the whole sink and recent block, and the first attends to them. The functions
here run inside of `kvjax.sharding.placement.run_on_parts`.

**Source:** merging parts follows flash-decoding and ring attention; dealing tokens in turn
follows the decode context parallelism of vLLM and SGLang, which attend to everything.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.partial import PartialAttention

Axis: TypeAlias = str | tuple[str, ...]
PREFIXES = "a Placement cannot split the tokens of rows that share prefixes; split only rows and heads (batch, heads)"


@dataclass(frozen=True)
class Stripes:
    """How the places of a history are dealt: `tokens` at a time, to each of `parts` devices in
    turn.
    """

    axis: Axis  # of the mesh
    parts: int
    tokens: int

    @property
    def device(self) -> Array:
        """The index of this device along the axis."""
        return lax.axis_index(self.axis)

    def check(self, part: Any, spec: Any) -> None:
        """Raises ValueError if a selector or a store does not take the chunks of a history, or
        a device's part.
        """
        part.check(spec, whole := self.tokens * self.parts)
        try:
            part.check(spec, self.tokens)
        except ValueError as error:
            chunk = f"a chunk of {whole} tokens is split over {self.parts} devices of context"
            raise ValueError(
                f"{chunk}: {error}, or larger chunks (`chunk` of a preset)"
            ) from error

    def owned(self, places: Array, device: Array | None = None) -> Array:
        """How many of the first `places` tokens this device has, or another one, which is also
        the slot of its next one.
        """
        device = self.device if device is None else device
        turn = self.tokens * self.parts
        rest = places % turn - device * self.tokens
        return places // turn * self.tokens + jnp.clip(rest, 0, self.tokens)

    def share(self, count: Array, device: Array | None = None) -> Array:
        """How many of `count` things are for this device, or another one, if all get equally
        many, and the first devices one more where that does not come out even.
        """
        device = self.device if device is None else device
        return (count + self.parts - 1 - device) // self.parts

    def max_tokens(self, run: int) -> int:
        """Returns the most tokens that a device can have of `run` adjacent ones."""
        turns, rest = divmod(run, self.tokens * self.parts)
        return turns * self.tokens + min(self.tokens, rest)

    def place(self, slot: Array) -> Array:
        """Returns the place of the token in a slot of this device."""
        return (
            slot // self.tokens * self.parts + self.device
        ) * self.tokens + slot % self.tokens

    def slot(self, place: Array) -> tuple[Array, Array]:
        """Returns the slot of the token at a place, on the device that has it, and bool:
        whether that is this device.
        """
        stripe = place // self.tokens
        return (
            stripe // self.parts * self.tokens + place % self.tokens,
            stripe % self.parts == self.device,
        )

    def own(self, tokens: Array) -> Array:
        """This device's tokens [B, K, T / parts, ...] of whole turns [B, K, T, ...]."""
        B, K, T, *rest = tokens.shape
        dealt = tokens.reshape(
            B, K, T // (self.parts * self.tokens), self.parts, self.tokens, *rest
        )
        return lax.dynamic_index_in_dim(dealt, self.device, axis=3, keepdims=False).reshape(
            B, K, -1, *rest
        )

    def gather(self, units: Array, unit: int) -> Array:
        """Returns the units [..., parts * U] of all devices by place, of U units [..., U] of
        `unit` tokens on each device.
        """
        *lead, U = units.shape
        every = lax.all_gather(
            units.reshape(*lead, U * unit // self.tokens, 1, self.tokens // unit), self.axis
        )
        return jnp.moveaxis(every[..., 0, :], 0, -2).reshape(*lead, U * self.parts)


def refuse_share(what: Any) -> str:
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
    level = jnp.arange(1, levels + 2, dtype=jnp.uint8)[None, None, None, :, None]
    own = jnp.sum(marks[..., None, :] >= level, axis=-1, dtype=jnp.int32)
    every = lax.psum(own, stripes.axis)
    count = jnp.minimum(count[:, None, None], every[..., 0])
    least = jnp.sum(every >= count[..., None], axis=-1, keepdims=True, dtype=jnp.int32)
    above, own_above = (
        jnp.take_along_axis(a, least, axis=-1, mode="fill", fill_value=0)[..., 0]
        for a in (every, own)
    )

    tied = (marks == least.astype(jnp.uint8)).reshape(*marks.shape[:3], -1, stripes.tokens)
    tied = jnp.sum(tied, axis=-1, dtype=jnp.int32)
    turns = jnp.moveaxis(lax.all_gather(tied, stripes.axis), 0, -1)  # [B, K, G, turns, parts]
    flat = turns.reshape(*tied.shape[:3], -1)
    before = (lax.cumsum(flat, axis=3) - flat).reshape(turns.shape)
    before = lax.dynamic_index_in_dim(before, stripes.device, axis=4, keepdims=False)
    spare = (count - above)[..., None]
    return own_above + jnp.sum(jnp.clip(spare - before, 0, tied), axis=-1, dtype=jnp.int32)


def count_taken(own: tuple[Array, Array], every: tuple[Array, Array], k: Array) -> Array:
    """How many offers of this device are among the first k of all devices: i32[B, K, H].

    `own` are ranks u32[B, K, H, n] and places i32[B, K, H, n], highest rank first and ties by
    place, as are those of each device in `every` [B, K, H, devices * n]; k is broadcastable to
    [B, K, H, 1]. An offer without a unit ranks
    0. Those that are taken come first, so only every `block`-th offer is compared with all, and
      then one block.
    """
    *lead, n = own[0].shape
    if n == 0:
        return jnp.zeros(lead, jnp.int32)
    block = math.isqrt(n)

    def taken(at: Array) -> Array:
        rank, place = (
            jnp.take_along_axis(a, jnp.minimum(at, n - 1), axis=-1)[..., None] for a in own
        )
        ranks, places = (a[..., None, :] for a in every)
        before = jnp.sum(
            (ranks > rank) | ((ranks == rank) & (places < place)), axis=-1, dtype=jnp.int32
        )
        return jnp.sum((before < k) & (rank[..., 0] > 0) & (at < n), axis=-1, dtype=jnp.int32)

    first = jnp.broadcast_to(jnp.arange(0, n, block, dtype=jnp.int32), (*lead, -(-n // block)))
    whole = jnp.maximum(taken(first) - 1, 0) * block
    return whole + taken(
        whole[..., None] + jnp.arange(block, dtype=jnp.int32)[None, None, None]
    )


def merge_parts(part: PartialAttention, axis: Axis) -> PartialAttention:
    """Returns the attention over the tokens of all devices, for the queries of a step: one
    all-gather of D + 1 numbers per query head.
    """
    every = lax.all_gather(jnp.concatenate([part.out, part.lse[..., None]], axis=-1), axis)
    outs = [one[..., :-1] for one in every]
    lses = [one[..., -1:] for one in every]
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
