"""A selector on a context axis: each device indexes its stripes, and all devices make the same
selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import (
    SOFTMAX_REDUCES,
    Candidates,
    DealtSelection,
    PackedSelection,
    Selection,
    by_row,
    unpack,
)
from kvjax.ops.select import rank_grouped
from kvjax.selectors.selector import Selector, Wrapper
from kvjax.sharding.context import Stripes, count_taken
from kvjax.spec import CacheSpec

NOWHERE = int(np.iinfo(np.int32).max)  # the place of units that are not valid


@dataclass(frozen=True)
class StripedSelector(Wrapper):
    """A `selector` whose index is split over devices; it selects what the selector would select
    on one device.

    A step scores the units of this device. Rules by softmax then need the sum over all devices:
    G numbers per KV head. Each device offers as many of its best units as a step selects, 8
    bytes each, and finds out how many of its own are selected. Pending units, which every
    device has, are offered by the first.
    """

    selector: Selector
    stripes: Stripes

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.stripes.check(self.selector, spec)

    def init(self, spec: CacheSpec, slots: int) -> Any:
        return self.selector.init(spec, slots // self.stripes.parts)

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        parts = self.stripes.parts
        return self.selector.append(ix, self.stripes.own(k), at // parts, count // parts)

    def truncate(self, ix: Any, count: Array) -> Any:
        return self.selector.truncate(ix, count // self.stripes.parts)

    def score(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        """The scores of the units of all devices; `select` moves far less between devices."""
        return self.stripes.gather(self.score_own(ix, q, logits=logits), self.unit)

    def score_own(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        """The scores f32[B, K, G, U] of the units of this device."""
        return self.selector.score(ix, q, logits=logits)

    score_visible = Selector.score_visible

    def select(self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits) -> Any:
        """A `DealtSelection` of the units that rank highest on all devices, by rank; ties go to
        the lower place.
        """
        if candidates.last is not None:
            return super().select(ix, q, candidates, logits=logits)
        stripes, unit, rule = self.stripes, self.unit, self.group_reduce
        q = lax.stop_gradient(
            q
        )  # a selection has no derivative, nor has the sum of `sum_in_one_pass`
        scores, scored = self.score_own(ix, q, logits=logits), self.with_pending(candidates, q)
        start, stop = (jnp.asarray(x, jnp.int32) for x in candidates.span)
        own = replace(candidates, span=(stripes.owned(start), stripes.owned(stop)))
        pending, exist = scored.pending_units(q, logits, unit)
        units = scores.shape[3]
        parts = [
            (scores, own.inside(*own.span, units, unit)),
            (pending, exist & (stripes.device == 0)),
        ]
        total = None
        if rule in SOFTMAX_REDUCES:
            every = lax.all_gather(log_sum_in_one_pass(parts), stripes.axis)
            total = jax.nn.logsumexp(every, axis=0)[..., None]
        best, rank = rank_grouped(
            parts, rule, min(candidates.k_max, units + pending.shape[3]), total
        )
        last = units * (stripes.parts - 1)  # units past those of the whole history are pending
        place = jnp.where(
            best.slots < units, stripes.place(best.slots * unit) // unit, best.slots + last
        )
        place = jnp.where(best.valid, place, NOWHERE)
        offers = lax.all_gather(
            jnp.stack([lax.bitcast_convert_type(rank, jnp.int32), place]), stripes.axis
        )
        ranks, places = (
            jnp.moveaxis(offers[:, i], 0, 3).reshape(*rank.shape[:3], -1) for i in range(2)
        )
        every = lax.bitcast_convert_type(ranks, jnp.uint32), places

        k = by_row(candidates.k)
        taken = PackedSelection(best.slots, count_taken((rank, place), every, k))
        mine = taken if unit == 1 else own.tokens(unpack(taken), units, unit)
        whole = first_places(
            *every, candidates.k_max
        )  # not computed in a step that keeps no Info
        first = (whole < NOWHERE) & (jnp.arange(whole.shape[3])[None, None, None] < k)
        tokens = candidates.tokens(
            Selection(jnp.where(first, whole, 0), first), units * stripes.parts, unit
        )
        return DealtSelection(*tokens, mine)


def log_sum_in_one_pass(parts: Sequence[tuple[Array, Array]]) -> Array:
    """f32[B, K, G]: log of the sum of exponentials of all scores, by one kernel that reads each
    of them once.
    """
    scores = lax.stop_gradient(
        jnp.concatenate([jnp.where(valid, score, -jnp.inf) for score, valid in parts], axis=-1)
    )

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(a[0], b[0])
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        return top, a[1] * jnp.exp(a[0] - shift) + b[1] * jnp.exp(b[0] - shift)

    nothing = jnp.float32(-jnp.inf), jnp.float32(0)
    top, total = lax.reduce((scores, jnp.ones_like(scores)), nothing, add, dimensions=(3,))
    return jnp.log(total) + top


def first_places(rank: Array, place: Array, room: int) -> Array:
    """i32[..., room]: the places that rank highest, best first; ties go to the lower place."""
    _, place = lax.sort(
        (~rank, place), num_keys=2, is_stable=False
    )  # places differ, but for NOWHERE
    return place[..., :room]
