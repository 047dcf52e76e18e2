"""Selection by share: each device selects its part of the budget from its own tokens, without
asking the others.

    units of the budget beside sink and local window      7
    devices 0, 1, 2 select of their own                   3 | 2 | 2

An exact selection over devices takes two or three exchanges in turn before a step can attend.
By share nothing is exchanged but the parts of attention, once. As tokens are dealt in stripes,
each device has as many as any other, and most of the best units of all are among the best of
their own device.

Pending tokens, which every device has, are dealt anew in each step, in equal runs. So a budget
that is enough for all tokens selects all of them, and none is read twice. Under a sliding
window, whose few stripes may lie on some devices alone, each device gets as much of the budget
as it has tokens for, and what it leaves goes to the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import (
    Candidates,
    DealtSelection,
    PackedSelection,
    Selection,
    unpack,
)
from kvjax.selectors.selector import Selector, Wrapper
from kvjax.sharding.context import Stripes, no_share
from kvjax.sharding.context.selectors import NOWHERE, StripedSelector, split_selector


def share_selector(selector: Selector, stripes: Stripes) -> Selector:
    """Returns the selector of a device that selects its share of the budget from its stripes.

    A selector whose index every device holds whole selects exactly, and needs no exchange for it.

    Raises:
      ValueError: a selector that cannot be split, or that is split in its own way.
    """
    striped = split_selector(selector, stripes)
    if isinstance(striped, StripedSelector):
        return ShareSelector(striped)
    if striped is selector:
        return selector
    raise ValueError(no_share(selector))


@dataclass(frozen=True)
class ShareSelector(Wrapper):
    """Selects a share of the budget from the units of one device, by the selector that one
    device alone would have. The index is that of an exact selection.
    """

    selector: StripedSelector

    @property
    def takes_steps(self) -> bool:  # type: ignore[override]
        return self.selector.selector.takes_steps

    def select(self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits) -> Any:
        """A `DealtSelection`: the units that rank highest on this device, and those of all
        devices, which a step that keeps no Info does not exchange.
        """
        own_candidates = self._own_candidates(candidates)
        own = self.selector.select_own(ix, q, own_candidates, logits=logits)
        assert candidates.stored_slots is not None  # a policy over context knows them
        whole = on_all_devices(own, candidates.stored_slots, self.selector.stripes)
        return DealtSelection(*whole, own)

    def _own_candidates(self, candidates: Candidates) -> Candidates:
        """The candidates of this device, in its slots, and its share of the budget."""
        stripes = self.selector.stripes
        start, stop = candidates.span
        window = candidates.window
        if window is None:
            share = self._equal_share(candidates)
            most = -(-candidates.k_max // stripes.parts)
        else:
            start = stripes.count_own(jnp.asarray(start, jnp.int32))
            share = self._share_in_window(candidates)
            most = self._most_units(candidates)
            window = stripes.max_tokens(window)
        return replace(
            candidates,
            span=(start, stripes.count_own(stop)),
            pending=self._own_pending(candidates),
            k=share,
            k_max=most,
            window=window,
        )

    def _own_pending(self, candidates: Candidates) -> tuple[Array, Array, Array]:
        """The pending keys, and the run of them that this device offers."""
        stripes = self.selector.stripes
        keys, start, stop = candidates.pending
        first, count = self._pending_units(candidates)
        # Units of the devices before this one, of which the first ones have one more.
        before = stripes.device * (count // stripes.parts)
        before += jnp.minimum(stripes.device, count % stripes.parts)
        lowest = (first + before) * self.unit
        end = lowest + stripes.even_share(count) * self.unit
        # The stop of pending slots counts the local window, which does not compete.
        return keys, jnp.maximum(start, lowest), jnp.minimum(stop, end + candidates.local)

    def _pending_units(self, candidates: Candidates) -> tuple[Array, Array]:
        """The number of the first pending unit, and how many there are."""
        _, start, stop = candidates.pending
        first = jnp.asarray(start, jnp.int32) // self.unit
        end = -(-(stop - candidates.local) // self.unit)
        return first, jnp.maximum(end - first, 0)

    def _equal_share(self, candidates: Candidates) -> Array | int:
        """Units of the budget for this device; a number where all devices have the same, which
        costs no kernel.
        """
        stripes = self.selector.stripes
        k = candidates.k
        if isinstance(k, int) and k % stripes.parts == 0:
            return k // stripes.parts
        return stripes.even_share(jnp.asarray(k, jnp.int32))

    def _share_in_window(self, candidates: Candidates) -> Array:
        """i32[B]: units of the budget for this device, if some devices see fewer than others."""
        stripes = self.selector.stripes
        device = jnp.arange(stripes.parts, dtype=jnp.int32)[:, None]
        rows = (jnp.reshape(jnp.asarray(x, jnp.int32), (1, -1)) for x in candidates.span)
        start, stop = (stripes.count_own(x, device) for x in rows)
        stored = jnp.maximum(-(-stop // self.unit) - start // self.unit, 0)
        _, pending = self._pending_units(candidates)
        counts = stored + stripes.even_share(pending.reshape(1, -1), device)
        given = dealt_evenly(counts, jnp.asarray(candidates.k, jnp.int32).reshape(1, -1))
        return lax.dynamic_index_in_dim(given, stripes.device, keepdims=False)

    def _most_units(self, candidates: Candidates) -> int:
        """The most units that this device can select: all of the budget, if it has that many."""
        assert candidates.stored_slots is not None
        stored = candidates.stored_slots // self.selector.stripes.parts // self.unit
        return min(candidates.k_max, stored + candidates.pending_slots // self.unit)


def dealt_evenly(counts: Array, budget: Array) -> Array:
    """i32[devices, B]: how many of its `counts` i32[devices, B] each device selects, `budget`
    i32[1, B or 1] together: the same number, or all where a device has fewer. The first devices
    get one more where that does not come out even.
    """
    parts = len(counts)
    # If the i devices with the fewest units give all, each of the others gives an equal part of
    # what is left. That part is largest for the right i: with fewer, some device could not give
    # its part, and with more, some would give more than the others.
    rising = jnp.sort(counts, axis=0)
    of_fewest = jnp.cumsum(rising, axis=0) - rising  # units of the i devices with the fewest
    others = parts - jnp.arange(parts, dtype=jnp.int32)[:, None]
    level = jnp.max((budget - of_fewest) // others, axis=0, keepdims=True)

    # The remainder of the division goes to the first devices that have more.
    given = jnp.minimum(counts, level)
    spare = budget - jnp.sum(given, axis=0, keepdims=True)
    more = (counts > level).astype(jnp.int32)
    place = jnp.cumsum(more, axis=0) - more
    return given + jnp.where(place < spare, more, 0)


def on_all_devices(
    own: Selection | PackedSelection, stored_slots: int, stripes: Stripes
) -> Selection:
    """The selections of all devices as one, in slots of the whole history of `stored_slots`;
    one exchange.
    """
    slots, valid = unpack(own)
    own_stored = stored_slots // stripes.parts
    pending = slots + (stored_slots - own_stored)
    place = jnp.where(slots < own_stored, stripes.place(slots), pending)
    by_device = lax.all_gather(jnp.where(valid, place, NOWHERE), stripes.axis)
    places = jnp.moveaxis(by_device, 0, 3).reshape(*slots.shape[:3], -1)
    valid = places < NOWHERE
    return Selection(jnp.where(valid, places, 0), valid)
