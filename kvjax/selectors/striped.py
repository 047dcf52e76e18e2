"""A selector on a context axis: each device indexes its stripes, and all devices make the same selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.numerics.partial import attention_logits
from kvjax.numerics.selection import (
    SOFTMAX_REDUCES,
    Candidates,
    PackedSelection,
    Selection,
    by_row,
    log_sum,
    reduce_scores,
)
from kvjax.ops.select import top_k
from kvjax.selectors.selector import Selector, Wrapper
from kvjax.sharding.context import Stripes
from kvjax.spec import CacheSpec

NOWHERE = int(np.iinfo(np.int32).max)  # the place of units that are not valid


@dataclass(frozen=True)
class StripedSelector(Wrapper):
    """A `selector` whose index is split over devices; it selects what the selector would select on one device.

    A step scores the units of this device. Rules by softmax then need the sum over all devices: G numbers per KV head.
    Each device offers as many of its best units as a step selects, 8 bytes each. All devices sort the same offers,
    together with the pending units, which every device has.
    """

    selector: Selector
    stripes: Stripes

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.selector.check(spec, self.stripes.tokens)

    def init(self, spec: CacheSpec, slots: int) -> Any:
        return self.selector.init(spec, slots // self.stripes.parts)

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        parts = self.stripes.parts
        return self.selector.append(ix, self.stripes.own(k), at // parts, count // parts)

    def truncate(self, ix: Any, count: Array) -> Any:
        return self.selector.truncate(ix, count // self.stripes.parts)

    def score(self, ix: Any, q: Array, *, scale: float) -> Array:
        """The scores of the units of all devices; `select` moves far less between devices."""
        return self.stripes.gather(self.score_own(ix, q, scale=scale), self.unit)

    def score_own(self, ix: Any, q: Array, *, scale: float) -> Array:
        """The scores f32[B, K, G, U] of the units of this device."""
        return self.selector.score(ix, q, scale=scale)

    def score_visible(self, ix: Any, q: Array, candidates: Candidates, *, scale: float) -> Array:
        return self.score(ix, q, scale=scale)

    def select(self, ix: Any, q: Array, candidates: Candidates, *, scale: float) -> Selection | PackedSelection:
        """The units that rank highest on all devices together, by rank; ties go to the lower place."""
        if candidates.last is not None:
            return super().select(ix, q, candidates, scale=scale)
        stripes, unit, rule = self.stripes, self.unit, self.group_reduce
        scores = self.score_own(ix, q, scale=scale)
        units = scores.shape[3]
        scored = self.with_pending(candidates, q)
        pending = scored.pending_units(attention_logits(q, scored.pending[0], scale), unit)
        start, stop = (jnp.asarray(x, jnp.int32) for x in candidates.span)
        own = replace(candidates, span=(stripes.owned(start), stripes.owned(stop)))
        stored = scores, own.inside(*own.span, units, unit)

        total = None
        if rule in SOFTMAX_REDUCES:
            every = jnp.moveaxis(lax.all_gather(log_sum([stored])[..., 0], stripes.axis), 0, -1)
            total = jax.nn.logsumexp(jnp.concatenate([every, log_sum([pending])], axis=-1), axis=-1, keepdims=True)
        ranks, pending_ranks = (_ranked(part, reduce_scores([part], rule, total)) for part in (stored, pending))

        room = min(candidates.k_max, units)
        best = top_k(ranks, stored[1], room)
        rank = jnp.where(best.valid, jnp.take_along_axis(ranks, best.slots, axis=-1), -jnp.inf)
        place = jnp.where(best.valid, stripes.place(best.slots * unit) // unit, NOWHERE)
        offer = jnp.stack([lax.bitcast_convert_type(rank, jnp.int32), place], axis=-1)
        offers = jnp.moveaxis(lax.all_gather(offer, stripes.axis), 0, 3).reshape(*offer.shape[:3], -1, 2)

        last = units * stripes.parts + jnp.arange(pending_ranks.shape[3], dtype=jnp.int32)
        last = jnp.where(pending[1], last[None, None, None], NOWHERE)
        rank = jnp.concatenate([lax.bitcast_convert_type(offers[..., 0], jnp.float32), pending_ranks], axis=-1)
        place = jnp.concatenate([offers[..., 1], jnp.broadcast_to(last, pending_ranks.shape)], axis=-1)
        place = first_places(rank, place, candidates.k_max)
        valid = (place < NOWHERE) & (jnp.arange(place.shape[3])[None, None, None] < by_row(candidates.k))
        return candidates.tokens(Selection(jnp.where(valid, place, 0), valid), units * stripes.parts, unit)


def first_places(rank: Array, place: Array, room: int) -> Array:
    """i32[..., room]: the places that rank highest, best first; ties go to the lower place."""
    _, place = lax.sort((-rank, place), num_keys=2, is_stable=False)  # places differ, but for NOWHERE
    return place[..., :room]


def _ranked(part: tuple[Array, Array], ranks: Array) -> Array:
    """Ranks as `top_k` orders them: -inf for units that are not valid; valid ones are finite, NaN the lowest."""
    low = jnp.finfo(ranks.dtype).min
    return jnp.where(part[1], jnp.clip(jnp.nan_to_num(ranks, nan=low), low), -jnp.inf)
