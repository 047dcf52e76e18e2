"""Stores on a context axis: each device keeps its stripes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.numerics.partial import Logits, PartialAttention, Span
from kvjax.numerics.selection import DealtSelection, PackedSelection, Selection
from kvjax.sharding.context import PREFIXES, Stripes, merge_chunk, merge_parts
from kvjax.spec import CacheSpec
from kvjax.stores.host_codes import Coded
from kvjax.stores.hot import HotSet
from kvjax.stores.prefixed import Prefixed
from kvjax.stores.store import Store, Wrapper


@singledispatch
def split_store(store: Store, stripes: Stripes) -> Store:
    """Returns the store of the whole history on a device that keeps only its stripes of it.

    `split_store.register` adds a function for a class whose tokens are not stored one by one.

    Raises:
      ValueError: a store that cannot be split.
    """
    return StripedStore(store, stripes)


@register_dataclass
@dataclass(frozen=True)
class StripedState:
    """The part of a history that a device holds. It counts the tokens of the whole history,
    because its slots are places in the whole history."""

    block: Any  # the state of the device's store, but with the count of the whole history
    parts: int = field(metadata={"static": True})

    @property
    def count(self) -> Array:
        """i32[B] tokens of the history, on all devices together."""
        return self.block.count

    @property
    def slots(self) -> int:
        """Slots of the history, on all devices together."""
        return self.block.slots * self.parts


@dataclass(frozen=True)
class StripedStore(Wrapper):
    """A `store` whose history is split over devices. Slots are places of the whole history.

    For attention over the history or over selected slots, each device attends to its own
    tokens, and the parts merge. The result of `gather` is on all devices, by one sum.
    """

    store: Store
    stripes: Stripes

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.store.recalls

    @property
    def takes_steps(self) -> bool:  # type: ignore[override]
        return self.store.takes_steps

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.stripes.check(self.store, spec)

    def init(self, spec: CacheSpec, slots: int) -> StripedState:
        return StripedState(
            self.store.init(spec, slots // self.stripes.parts), self.stripes.parts
        )

    def append(self, st: StripedState, k: Array, v: Array, count: Array) -> StripedState:
        """Tokens come in whole turns, so every device stores the same number."""
        parts = self.stripes.parts
        block = self.store.append(
            self._own(st), self.stripes.take_own(k), self.stripes.take_own(v), count // parts
        )
        return replace(st, block=replace(block, count=block.count * parts))

    def attend(
        self, st: StripedState, q: Array, start: Array, *, logits: Logits
    ) -> PartialAttention:
        part = self.store.attend(self._own(st), q, self.stripes.count_own(start), logits=logits)
        return merge_parts(part, self.stripes.axis)

    def attend_chunk(
        self, st: StripedState, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        own = None if start is None else self.stripes.count_own(start)
        return merge_chunk(
            self.store.attend_chunk(self._own(st), q, own, logits=logits), self.stripes.axis
        )

    def attend_slots(
        self, st: StripedState, q: Array, selection: Selection, *, logits: Logits
    ) -> PartialAttention:
        own = self._own_slots(st, selection)
        return merge_parts(
            self.store.attend_slots(self._own(st), q, own, logits=logits), self.stripes.axis
        )

    def attend_zones_part(
        self,
        st: StripedState,
        q: Array,
        selection: Any,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
    ) -> PartialAttention:
        """Attends to its own part of the selection; the first device also to what all devices
        have.
        """
        own = (
            selection.own
            if isinstance(selection, DealtSelection)
            else self._own_slots(st, selection)
        )

        def on_first(zone: Span) -> Span:
            """The zone on the first device; on others an empty one, which starts past its slots.
            That does not depend on the layer's count, so all layers share one kernel.
            """
            past = zone.k.shape[2] * jnp.minimum(self.stripes.device, 1)
            return zone._replace(start=zone.start + past)

        part = self.store.attend_zones_part(
            self._own(st),
            q,
            own,
            on_first(recent),
            None if sink is None else on_first(sink),
            local,
            logits=logits,
        )
        return merge_parts(part, self.stripes.axis)

    def gather(self, st: StripedState, selection: Selection) -> tuple[Array, Array]:
        k, v, valid = self.gather_own(st, selection)
        B, K = valid.shape[:2]
        # Each token is on one device; the sum of it and of the others' zeros is on all.
        here = valid.reshape(B, K, -1, 1)
        own_k = jnp.where(here, k, jnp.zeros((), k.dtype))
        own_v = jnp.where(here, v, jnp.zeros((), v.dtype))
        k, v = lax.psum((own_k, own_v), self.stripes.axis)
        return k, v

    def gather_own(self, st: StripedState, selection: Selection) -> tuple[Array, Array, Array]:
        """As `gather`, but only the keys and values that this device has, and bool[B, K, H, M]:
        which ones it has.
        """
        own = self._own_slots(st, selection)
        return *self.store.gather(self._own(st), own), own.valid

    def truncate(self, st: StripedState, count: Array) -> StripedState:
        block = self.store.truncate(self._own(st), count // self.stripes.parts)
        return replace(st, block=replace(block, count=block.count * self.stripes.parts))

    def _own(self, st: StripedState) -> Any:
        """Returns the state of the device's store."""
        return replace(st.block, count=st.count // self.stripes.parts)

    def _own_slots(self, st: StripedState, selection: Selection | PackedSelection) -> Selection:
        """Returns the part of a selection that lies on this device, in its slots; on the first
        with the recent block's.
        """
        slots, here = self.stripes.slot(selection.slots)
        # Slots past those of the history are those of the recent block.
        recent = selection.slots - st.slots
        slots = jnp.where(recent < 0, slots, recent + st.block.slots)
        here = jnp.where(recent < 0, here, self.stripes.device == 0)
        return Selection(jnp.where(here, slots, 0), selection.valid & here)


class StripedCodes(StripedStore):
    """A device's stripes of coded tokens, less the offset of the row's first keys, whichever
    device has them.
    """

    def append(self, st: StripedState, k: Array, v: Array, count: Array) -> StripedState:
        codes: Any = self.store
        parts = self.stripes.parts
        block = codes.append_coded(
            codes.learnt(self._own(st), k, count),
            self.stripes.take_own(k),
            self.stripes.take_own(v),
            count // parts,
        )
        return replace(st, block=replace(block, count=block.count * parts))


@split_store.register
def _(store: Coded, stripes: Stripes) -> Store:
    return StripedCodes(store, stripes)


@split_store.register
def _(store: HotSet, stripes: Stripes) -> Store:
    raise ValueError(
        f"{store} keeps selected tokens on one device, so it cannot be split over the {stripes.parts} devices of "
        "context; use its inner store, or split only rows and heads"
    )


@split_store.register
def _(store: Prefixed, stripes: Stripes) -> Store:
    raise ValueError(PREFIXES)
