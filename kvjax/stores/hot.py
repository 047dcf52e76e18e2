"""A hot set: tokens of a host store that recent steps selected stay on the device.

Adjacent steps select nearly the same tokens. So a step finds which of its pages are on the
device already, reads the others from the host, and writes them over pages that have gone unused
for longest. Then it attends on the device alone.

Pages are replaced by the clock rule: a hand goes round the places of a head, passes over places
that were used since it last passed, and stops at the others.

**Source:** the clock replacement rule (Corbato 1968); a device buffer of selected tokens beside
a cache in host memory is the hot set of SGLang's HiSparse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

from kvjax import ops
from kvjax.numerics.partial import Logits, PartialAttention, Span
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores.host import HostOffload
from kvjax.stores.store import Store, Wrapper, flat
from kvjax.validation import check_verbs


@register_dataclass
@dataclass(frozen=True)
class Hot:
    """Pages on the device. Place n of a head holds page `page[n]`, if `place` of that page is
    n.
    """

    k: Array  # dtype[B, K, n * Z, D]
    v: Array  # dtype[B, K, n * Z, D]
    page: Array  # i32[B, K, n] the page of each place; -1 for none
    place: Array  # i32[B, K, P] where each page of the history was last put
    used: Array  # i32[B, K, n] 0 for places not used since the hand last passed, 2 for those filled last
    hand: Array  # i32[B, K] the place that the hand points at
    loads: Array  # i32[B, K] pages that were read from the host, since `init`

    @property
    def tables(self) -> ops.HotTables:
        return ops.HotTables(self.page, self.used, self.place, self.hand, self.loads)

    def with_tables(self, tables: ops.HotTables) -> Hot:
        return replace(self, **tables._asdict())


@register_dataclass
@dataclass(frozen=True)
class HotBlock:
    """A history on the host, and the part of it that is on the device too."""

    history: Any
    hot: Hot

    @property
    def count(self) -> Array:
        """i32[B] slots [0, count) are valid."""
        return self.history.count

    @property
    def slots(self) -> int:
        return self.history.slots


class Loaded(NamedTuple):
    """Tokens on the device, and a selection of them."""

    k: Array  # dtype[B, K, X, D]
    v: Array  # dtype[B, K, X, D]
    selection: Selection | PackedSelection  # slot X + r is slot r of the recent block


@dataclass(frozen=True, kw_only=True)
class HotSet(Wrapper):
    """A history in `store`; the device also keeps, per row and KV head, the `tokens` tokens
    that were selected last.

    A step attends to the same tokens as without the hot set, and reads each page from the host
    at most once. `tokens` must be at least the tokens that one step selects. It costs, in
    device memory, 2 D values of the cache's dtype per token of the hot set and head, and four
    bytes per page of the capacity.

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=kvjax.Fier(), store=kvjax.stores.HotSet(tokens=1024), budget=256)
    """

    tokens: int
    store: Store = HostOffload()

    def __post_init__(self) -> None:
        keep_ints(self, tokens=1)
        verbs = ("init", "append", "gather", "attend_slots")
        check_verbs("HotSet(store=...)", self.store, "a store", verbs, "kvjax.HostOffload()")
        if isinstance(self.store, HotSet):
            raise ValueError(
                f"HotSet(store=...) got {self.store}, which has a hot set already; give its inner store"
            )
        if self.tokens % self.store.page:
            raise ValueError(
                f"HotSet(tokens={self.tokens}) holds whole pages of {self.store}; use a multiple of {self.store.page}"
            )

    def require_room(self, tokens: int) -> None:
        if tokens > self.tokens:
            raise ValueError(
                f"HotSet(tokens={self.tokens}) is smaller than the {tokens} tokens that a step selects for a KV head; "
                f"use at least {-(-tokens // self.page) * self.page}, or a smaller budget"
            )

    def init(self, spec: CacheSpec, slots: int) -> HotBlock:
        lead = (spec.batch, spec.kv_heads)
        hot = empty_hot(
            lead,
            self.tokens // self.page,
            slots // self.page,
            self.page,
            spec.head_dim,
            spec.dtype,
        )
        return HotBlock(self.store.init(spec, slots), hot)

    def append(self, st: HotBlock, k: Array, v: Array, count: Array) -> HotBlock:
        # Pages that are written again, as after a row was shortened, are stale on the device.
        stale = st.hot.page >= (st.count // self.page)[:, None, None]
        hot = replace(st.hot, page=jnp.where(stale, -1, st.hot.page))
        return HotBlock(self.store.append(st.history, k, v, count), hot)

    def load(
        self, st: HotBlock, selection: Selection | PackedSelection
    ) -> tuple[HotBlock, Loaded]:
        """Returns the state with all of the selection on the device, and where it is there.
        Slot S + r is slot r of the recent block.
        """
        *_, H, M = selection.slots.shape
        self.require_room(H * M)
        if not H * M:  # sink and local window use up the budget
            return st, Loaded(st.hot.k, st.hot.v, selection)
        place = self._place_tokens if self.page == H == 1 else self._place_pages
        hot, fresh, slots = place(st, selection)
        k, v = self.store.place(st.history, (hot.k, hot.v), hot.page, hot.used, fresh)
        on_device = selection._replace(slots=slots)
        return HotBlock(st.history, replace(hot, k=k, v=v)), Loaded(k, v, on_device)

    def _place_tokens(
        self, st: HotBlock, selection: Selection | PackedSelection
    ) -> tuple[Hot, Array, Array]:
        """Returns the hot set with a place for each selected token, the places, and the same as
        slots of a `Loaded`.
        """
        B, K, _, M = selection.slots.shape
        if isinstance(selection, PackedSelection):
            index = selection.slots
            found = selection.found
        else:
            index = jnp.where(selection.valid, selection.slots, -1)
            found = jnp.full((B, K, 1), M, jnp.int32)
        tables, at = ops.hot_places(st.hot.tables, index[:, :, 0], found[:, :, 0])
        return st.hot.with_tables(tables), at, at[:, :, None]

    def _place_pages(
        self, st: HotBlock, selection: Selection | PackedSelection
    ) -> tuple[Hot, Array, Array]:
        slots = selection.slots
        valid = selection.valid
        B, K, H, M = slots.shape
        Z = self.page
        stored = valid & (slots < st.slots)
        by_page = (B, K, H * M // Z, Z)
        wanted = jnp.any(stored.reshape(by_page), axis=3)
        page = jnp.where(wanted, slots.reshape(by_page)[..., 0] // Z, -1)
        if H > 1:  # a page that several query heads selected is read once
            page, same = _once(page, st.hot.place.shape[2])
        tables, at = ops.hot_places(
            st.hot.tables, page, jnp.full((B, K), page.shape[2], jnp.int32)
        )
        place = jnp.take_along_axis(at, same, axis=2) if H > 1 else at
        inside = jnp.broadcast_to(place[..., None] * Z, by_page).reshape(B, K, H, M) + slots % Z
        past = self.tokens + jnp.maximum(slots - st.slots, 0)
        return st.hot.with_tables(tables), at, jnp.where(stored, inside, past)

    def attend_zones(
        self,
        st: HotBlock,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> tuple[Array, HotBlock]:
        st, (k, v, on_device) = self.load(st, selection)
        out: Array = ops.attend_zones(
            q, k, v, on_device, recent, sink, local, sinks=sinks, logits=logits
        )
        return out, st

    def read(
        self, st: HotBlock, selection: Selection, length: int
    ) -> tuple[HotBlock, tuple[Array, Array]]:
        st, (k, v, on_device) = self.load(st, selection)
        return st, ops.gather_slots(k, v, flat(on_device, length))

    # Verbs that read no selection, or one that was not loaded, read the history itself.

    def attend(
        self, st: HotBlock, q: Array, start: Array, *, logits: Logits
    ) -> PartialAttention:
        return self.store.attend(st.history, q, start, logits=logits)

    def attend_chunk(
        self, st: HotBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        return self.store.attend_chunk(st.history, q, start, logits=logits)

    def attend_slots(
        self, st: HotBlock, q: Array, selection: Selection, *, logits: Logits
    ) -> PartialAttention:
        return self.store.attend_slots(st.history, q, selection, logits=logits)

    def gather(self, st: HotBlock, selection: Selection) -> tuple[Array, Array]:
        return self.store.gather(st.history, selection)

    def with_count(self, st: HotBlock, count: Array) -> HotBlock:
        return replace(st, history=self.store.with_count(st.history, count))

    def truncate(self, st: HotBlock, count: Array) -> HotBlock:
        """Shortens the history. Pages past `count` stay on the device until `append` writes
        them again.
        """
        return replace(st, history=self.store.truncate(st.history, count))


def empty_hot(
    lead: tuple[int, int], places: int, pages: int, page: int, head_dim: int, dtype: DTypeLike
) -> Hot:
    """An empty hot set with room for `places` pages of `page` tokens, for a history of `pages`
    pages.

    `lead` is the number of rows and of KV heads.
    """
    shape = (*lead, places * page, head_dim)
    return Hot(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        page=jnp.full((*lead, places), -1, jnp.int32),
        place=jnp.zeros((*lead, pages), jnp.int32),
        used=jnp.zeros((*lead, places), jnp.int32),
        hand=jnp.zeros(lead, jnp.int32),
        loads=jnp.zeros(lead, jnp.int32),
    )


def _once(page: Array, pages: int) -> tuple[Array, Array]:
    """`page` i32[B, K, N] with -1 for all but the first of equal pages, and i32[B, K, N]: where
    that first one is.
    """
    B, K, N = page.shape
    row = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(K, dtype=jnp.int32)[None, :, None]
    order = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None, None], page.shape)
    first = (
        jnp.full((B, K, pages), N, jnp.int32)
        .at[row, head, jnp.where(page < 0, pages, page)]
        .min(order, mode="drop")
    )
    same = jnp.take_along_axis(first, jnp.maximum(page, 0), axis=2)
    same = jnp.where(page < 0, order, same)
    return jnp.where(same == order, page, -1), same
