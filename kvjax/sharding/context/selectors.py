"""Selectors on a context axis: each device indexes its stripes, and all devices make the same
selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import ops
from kvjax.numerics.blocks import take_rows, write
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import (
    SOFTMAX_REDUCES,
    Candidates,
    DealtSelection,
    PackedSelection,
    Selection,
    UnitScores,
    by_row,
    unpack,
)
from kvjax.ops.select import rank_grouped
from kvjax.selectors.paris import Directions, Paris, ParisIndex
from kvjax.selectors.planes import SignPlane
from kvjax.selectors.prefixed import PrefixedSelector
from kvjax.selectors.selector import Selector, Wrapper
from kvjax.sharding.context import PREFIXES, Offers, Stripes, count_taken, share_of_highest
from kvjax.spec import CacheSpec

NOWHERE = int(np.iinfo(np.int32).max)  # the place of units that are not valid


@singledispatch
def split_selector(selector: Selector, stripes: Stripes) -> Selector:
    """Returns the selector of the whole history on a device that has only its stripes of it.

    By default the index is split as the tokens are, since a score depends only on its own unit.
    `split_selector.register` adds a function for a class for which this does not hold.

    Raises:
      ValueError: a selector that cannot be split.
    """
    return StripedSelector(selector, stripes)


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
        return self.selector.append(ix, self.stripes.take_own(k), at // parts, count // parts)

    def truncate(self, ix: Any, count: Array) -> Any:
        return self.selector.truncate(ix, count // self.stripes.parts)

    def score(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        """Returns the scores of the units of all devices; `select` moves far less between
        devices.
        """
        return self.stripes.gather(self.score_own(ix, q, logits=logits), self.unit)

    def score_own(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        """Returns the scores f32[B, K, G, U] of the units of this device."""
        return self.selector.score(ix, q, logits=logits)

    score_visible = Selector.score_visible

    def select_own(
        self, ix: Any, q: Array, own: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        """Selects among the units of this device alone: `own` has its slots."""
        return self.selector.select(ix, q, own, logits=logits)

    def select(self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits) -> Any:
        """A `DealtSelection` of the units that rank highest on all devices, by rank; ties go to
        the lower place.
        """
        if candidates.last is not None:
            return super().select(ix, q, candidates, logits=logits)
        # A selection has no derivative, nor has the sum of `log_sum_in_one_pass`.
        q = lax.stop_gradient(q)
        start, stop = (jnp.asarray(x, jnp.int32) for x in candidates.span)
        own_span = self.stripes.count_own(start), self.stripes.count_own(stop)
        own = replace(candidates, span=own_span)
        history, pending = self._scored(ix, q, candidates, own, logits)
        units = history.scores.shape[3]

        # Each device offers its best units, and sees the offers of all.
        most = min(candidates.k_max, units + pending.scores.shape[3])
        total = self._log_sum((history, pending))
        best, rank = rank_grouped((history, pending), self.group_reduce, most, total)
        own_offers = Offers(rank, self._places(best, units))
        offers = self._offers_of_all(own_offers)

        # Its own part of the selection, which it attends to: its first offers.
        k = by_row(candidates.k)
        taken = PackedSelection(best.slots, count_taken(own_offers, offers, k))
        own_tokens = taken if self.unit == 1 else own.tokens(unpack(taken), units, self.unit)

        # The whole selection, which a step that keeps no Info does not compute.
        places = first_places(offers.rank, offers.place, candidates.k_max)
        at = jnp.arange(places.shape[3], dtype=jnp.int32)[None, None, None]
        valid = (places < NOWHERE) & (at < k)
        whole = Selection(jnp.where(valid, places, 0), valid)
        tokens = candidates.tokens(whole, units * self.stripes.parts, self.unit)
        return DealtSelection(*tokens, own_tokens)

    def _scored(
        self, ix: Any, q: Array, candidates: Candidates, own: Candidates, logits: Logits
    ) -> tuple[UnitScores, UnitScores]:
        """The scores of this device's units of the history, which are those of `own`, and of
        the pending units, which the first device offers.
        """
        scores = self.score_own(ix, q, logits=logits)
        scored = self.with_pending(candidates, q)
        pending, exist = scored.pending_units(q, logits, self.unit)
        inside = own.inside(*own.span, scores.shape[3], self.unit)
        first = self.stripes.device == 0
        return UnitScores(scores, inside), UnitScores(pending, exist & first)

    def _log_sum(self, parts: Sequence[UnitScores]) -> Array | None:
        """f32[B, K, G, 1]: the log-sum-exp of the scores of all devices; None for a rule that
        needs none.
        """
        if self.group_reduce not in SOFTMAX_REDUCES:
            return None
        of_all = lax.all_gather(log_sum_in_one_pass(parts), self.stripes.axis)
        return jax.nn.logsumexp(of_all, axis=0)[..., None]

    def _places(self, best: Selection, units: int) -> Array:
        """Returns the places of this device's best units among the units of all devices, where
        pending ones follow those of the history; NOWHERE for none.
        """
        stripes = self.stripes
        unit = self.unit
        in_history = stripes.place(best.slots * unit) // unit
        past_history = best.slots + units * (stripes.parts - 1)
        place = jnp.where(best.slots < units, in_history, past_history)
        return jnp.where(best.valid, place, NOWHERE)

    def _offers_of_all(self, own: Offers) -> Offers:
        """Returns the offers of all devices, one device after the other, in one exchange."""
        lead = own.rank.shape[:3]
        # Ranks go as i32 beside the places, so that one exchange gathers both.
        pair = jnp.stack([lax.bitcast_convert_type(own.rank, jnp.int32), own.place])
        pairs = lax.all_gather(pair, self.stripes.axis)  # i32[devices, 2, B, K, H, n]
        rank = jnp.moveaxis(pairs[:, 0], 0, 3).reshape(*lead, -1)
        place = jnp.moveaxis(pairs[:, 1], 0, 3).reshape(*lead, -1)
        return Offers(lax.bitcast_convert_type(rank, jnp.uint32), place)


@dataclass(frozen=True)
class StripedParis(StripedSelector):
    """`Paris` on one device of a context axis: it has the codes of its stripes, and the counts
    of the whole history.

    Votes follow from the counts, so each device finds those of its own keys. The candidates are
    the same as on a single device: devices exchange how many keys have how many votes, and each
    reranks its own candidates. The steps of this are those of `Paris` (`_tally`, `_counted`,
    `_votes`, `_with_estimates`), called with a device's keys.
    """

    selector: Paris

    def append(self, ix: ParisIndex, k: Array, at: Array, count: Array) -> ParisIndex:
        """Encodes all keys of the chunk on every device, counts their patterns, and stores the
        device's own keys.
        """
        paris = self.selector
        stripes = self.stripes
        # The counts of `ix` and of the chunk, beside codes of the chunk alone.
        T = k.shape[2]
        room = [jnp.zeros((*a.shape[:2], T, *a.shape[3:]), a.dtype) for a in ix.codes]
        chunk = paris.append(ix._replace(codes=Directions(*room)), k, jnp.zeros_like(at), count)

        own_at = at // stripes.parts
        own_count = count // stripes.parts
        written = [
            write(stored, stripes.take_own(new), own_at, own_count)
            for stored, new in zip(ix.codes, chunk.codes, strict=True)
        ]
        return chunk._replace(codes=Directions(*written))

    def truncate(self, ix: ParisIndex, count: Array) -> ParisIndex:
        own = self.selector.truncate(ix, count // self.stripes.parts)
        return self.selector._counted(own.codes, lax.psum(own.counts, self.stripes.axis))

    def score_own(self, ix: ParisIndex, q: Array, *, logits: Logits) -> Array:
        return self._score_seen(
            ix, q, 0, self.stripes.count_own(self.selector._length(ix.counts)), logits=logits
        )

    def score_visible(
        self, ix: ParisIndex, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Array:
        if (window := candidates.window) is None:
            return self.score(ix, q, logits=logits)
        paris = self.selector
        B, _, S, _ = ix.codes.signs.shape
        bounds = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B,)) for x in candidates.span)
        start, stop = (self.stripes.count_own(x) for x in bounds)

        # The counts of the visible tokens alone, on all devices.
        most = min(self.stripes.max_tokens(window), S)
        slot = start[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        signs = take_rows(ix.codes.signs, slot)
        counts = paris._tally(jnp.zeros_like(ix.counts), signs, slot < stop[:, None])
        visible = paris._counted(ix.codes, lax.psum(counts, self.stripes.axis))

        own = self._score_seen(visible, q, start, stop, logits=logits)
        return self.stripes.gather(own, 1)

    def select(
        self, ix: ParisIndex, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        if candidates.window is not None:
            return Selector.select(self, ix, q, candidates, logits=logits)
        return super().select(ix, q, candidates, logits=logits)

    def select_own(
        self, ix: ParisIndex, q: Array, own: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        """Votes follow from the counts of the whole history, and this device reranks its share
        of the candidates. Under a sliding window both are those of its own visible tokens.
        """
        if own.window is None:
            ix = ix._replace(candidates=self.stripes.even_share(ix.candidates))
        return self.selector.select(ix, q, own, logits=logits)

    def _score_seen(
        self, ix: ParisIndex, q: Array, start: Array | int, stop: Array, *, logits: Logits
    ) -> Array:
        """`Paris.score` of this device's keys, in a history of the slots [start, stop) of each
        device.
        """
        paris = self.selector
        votes = paris._votes(ix, q)
        B, K, G, S = votes.shape

        # The votes of seen keys from 1 on: 0 is for those that are not seen.
        slot = jnp.arange(S, dtype=jnp.int32)[None]
        past_start = slot >= jnp.reshape(jnp.asarray(start, jnp.int32), (-1, 1))
        seen = past_start & (slot < stop[:, None])
        marks = jnp.where(seen[:, None, None], votes + jnp.uint8(1), jnp.uint8(0))

        # This device's keys among those with the most votes on all devices are reranked.
        room = paris.room(S * self.stripes.parts)
        levels = ix.limits.shape[1] * ix.codes.subspaces + 1
        count = share_of_highest(marks, jnp.minimum(ix.candidates, room), levels, self.stripes)
        lists = ops.most_voted(  # the list of each head has its own length
            marks.reshape(B * K, 1, G, S),
            jnp.full(B * K, S, jnp.int32),
            count.reshape(B * K, G),
            min(room, S),
        )
        listed = PackedSelection(lists.slots.reshape(B, K, G, -1), lists.found.reshape(B, K, G))
        return paris._with_estimates(ix, q, votes, listed, logits=logits)


@split_selector.register
def _(selector: Paris, stripes: Stripes) -> StripedParis:
    return StripedParis(selector, stripes)


@split_selector.register
def _(selector: SignPlane, stripes: Stripes) -> Selector:
    raise ValueError(
        f"{selector} reads the codes of the store, which a split context cannot give; use kvjax.Fier()"
    )


@split_selector.register
def _(selector: PrefixedSelector, stripes: Stripes) -> Selector:
    raise ValueError(PREFIXES)


def log_sum_in_one_pass(parts: Sequence[UnitScores]) -> Array:
    """f32[B, K, G]: log of the sum of exponentials of all valid scores, by one kernel that reads
    each of them once.
    """
    masked = [jnp.where(part.valid, part.scores, -jnp.inf) for part in parts]
    scores = lax.stop_gradient(jnp.concatenate(masked, axis=-1))

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds two sums, each as (the largest score, the sum of exp(score - largest))."""
        top_a, total_a = a
        top_b, total_b = b
        top = jnp.maximum(top_a, top_b)
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        return top, total_a * jnp.exp(top_a - shift) + total_b * jnp.exp(top_b - shift)

    nothing = jnp.float32(-jnp.inf), jnp.float32(0)
    top, total = lax.reduce((scores, jnp.ones_like(scores)), nothing, add, dimensions=(3,))
    return jnp.log(total) + top


def first_places(rank: Array, place: Array, room: int) -> Array:
    """i32[..., room]: the places that rank highest, best first; ties go to the lower place."""
    # A sort goes up, so ~rank puts the highest first. Places differ but for NOWHERE, so it need
    # not be stable.
    _, place = lax.sort((~rank, place), num_keys=2, is_stable=False)
    return place[..., :room]
