"""A hot set: tokens of a host store that recent steps selected stay on the device.

Adjacent steps select nearly the same tokens. So a step first makes resident what it selected: it finds which of its
pages are on the device already, reads the others from the host, and writes them over pages that were not used for
longest. Then it attends on the device alone, to exactly the tokens that it would have read from the host.

Pages are replaced by the clock rule: a hand goes round the places of a head, passes over places that were used since it
last came by, and stops at the others. All shapes are static, so a step of any number of misses is one program.

**Source:** the clock replacement rule (Corbato 1968); a device buffer of selected tokens beside a cache in host memory
is the hot set of SGLang's HiSparse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

from kvjax.partial import PartialAttention
from kvjax.selection import PackedSelection, Selection
from kvjax.spec import CacheSpec, keep_int
from kvjax.stores.host import HostOffload
from kvjax.stores.store import Loaded, Store


@register_dataclass
@dataclass(frozen=True)
class Hot:
    """Pages on the device. Place n of a head holds page `page[n]`, if `place` of that page says n."""

    k: Array  # dtype[B, K, n * Z, D]
    v: Array  # dtype[B, K, n * Z, D]
    page: Array  # i32[B, K, n] the page of each place; -1 for none
    place: Array  # i32[B, K, P] where each page of the history was last put
    used: Array  # bool[B, K, n] places that were used since the hand came by
    hand: Array  # i32[B, K] the place that the hand stands at
    loads: Array  # i32[B, K] pages that were read from the host, since `init`


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


@dataclass(frozen=True, kw_only=True)
class HotSet:
    """A history in `store`, of which the device keeps the `tokens` of each row and KV head that were selected last.

    A step attends to the same tokens as without the hot set. It reads from the host only the selected pages that are
    not on the device, and of a page and head only once. `tokens` must hold what one step selects;
    `benchmarks/results/hit_rates.json` has hit rates by size. In device memory it costs 2 D values of the cache's dtype
    a token of the hot set and head, and four bytes a page of the capacity.

    >>> import kvjax
    >>> policy = kvjax.Retrieval(selector=kvjax.Fier(), store=kvjax.HotSet(tokens=1024), budget=256)
    """

    tokens: int
    store: Store = HostOffload()

    def __post_init__(self) -> None:
        keep_int(self, "tokens", at_least=1)
        if self.tokens % self.store.page:
            raise ValueError(
                f"HotSet(tokens={self.tokens}) holds whole pages of {self.store}; use a multiple of {self.store.page}"
            )

    @property
    def page(self) -> int:
        return self.store.page

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.store.check(spec, chunk)

    def require_room(self, tokens: int) -> None:
        if tokens > self.tokens:
            raise ValueError(
                f"HotSet(tokens={self.tokens}) is smaller than the {tokens} tokens that a step selects for a KV head; "
                f"use at least {-(-tokens // self.page) * self.page}, or a smaller budget"
            )

    def init(self, spec: CacheSpec, slots: int) -> HotBlock:
        lead = (spec.batch, spec.kv_heads)
        hot = empty_hot(lead, self.tokens // self.page, slots // self.page, self.page, spec.head_dim, spec.dtype)
        return HotBlock(self.store.init(spec, slots), hot)

    def append(self, st: HotBlock, k: Array, v: Array, count: Array) -> HotBlock:
        # A page that is written anew, as after a row was cut back, is not what the device has of it.
        stale = st.hot.page >= (st.count // self.page)[:, None, None]
        hot = replace(st.hot, page=jnp.where(stale, -1, st.hot.page))
        return HotBlock(self.store.append(st.history, k, v, count), hot)

    def load(self, st: HotBlock, selection: Selection | PackedSelection) -> tuple[HotBlock, Loaded]:
        """See `CachingStore`."""
        slots, valid = selection.slots, selection.valid
        B, K, H, M = slots.shape
        Z, stored = self.page, valid & (slots < st.slots)
        self.require_room(H * M)
        by_page = (B, K, H * M // Z, Z)
        wanted = jnp.any(stored.reshape(by_page), axis=3)
        page = jnp.where(wanted, slots.reshape(by_page)[..., 0] // Z, -1)
        if H > 1:  # a page that several query heads selected is read once
            page, same = _once(page, st.hot.place.shape[2])
        hot, place, missed = give_places(st.hot, page)
        hot = self._read(st.history, hot, jnp.where(missed, page, -1), place)
        if H > 1:
            place = jnp.take_along_axis(place, same, axis=2)
        at = jnp.broadcast_to(place[..., None] * Z, by_page).reshape(B, K, H, M) + slots % Z
        past = self.tokens + jnp.maximum(slots - st.slots, 0)
        there = Selection(jnp.where(slots < st.slots, at, past), valid)
        return HotBlock(st.history, hot), Loaded(hot.k, hot.v, there)

    def _read(self, history: Any, hot: Hot, page: Array, place: Array) -> Hot:
        """Puts the pages i32[B, K, N] of the history, -1 for none, in their places i32[B, K, N]."""
        Z, (B, K, N) = self.page, page.shape
        slots = jnp.maximum(page, 0)[..., None] * Z + jnp.arange(Z)[None, None, None]
        valid = jnp.broadcast_to((page >= 0)[..., None], slots.shape)
        read = self.store.gather(history, Selection(slots.reshape(B, K, 1, N * Z), valid.reshape(B, K, 1, N * Z)))
        to = jnp.where(page >= 0, place, hot.page.shape[2])
        row, head = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]

        def put(buffer: Array, new: Array) -> Array:
            pages = buffer.reshape(B, K, -1, Z, buffer.shape[3])
            new = new.reshape(B, K, N, Z, buffer.shape[3]).astype(buffer.dtype)
            return pages.at[row, head, to].set(new, mode="drop").reshape(buffer.shape)

        k, v = (put(*two) for two in zip((hot.k, hot.v), read, strict=True))
        return replace(hot, k=k, v=v)

    # What reads no selection, or one that was not loaded, reads the history itself.

    def attend(self, st: HotBlock, q: Array, start: Array, *, scale: float) -> PartialAttention:
        return self.store.attend(st.history, q, start, scale=scale)

    def attend_chunk(self, st: HotBlock, q: Array, start: Array | None, *, scale: float) -> PartialAttention:
        return self.store.attend_chunk(st.history, q, start, scale=scale)

    def attend_slots(self, st: HotBlock, q: Array, selection: Selection, *, scale: float) -> PartialAttention:
        return self.store.attend_slots(st.history, q, selection, scale=scale)

    def gather(self, st: HotBlock, selection: Selection) -> tuple[Array, Array]:
        return self.store.gather(st.history, selection)

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        return self.store.decoded(k, v)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Of the history alone: the hot set's size does not grow with the context."""
        return self.store.bytes_per_token(spec)


def empty_hot(lead: tuple[int, int], places: int, pages: int, page: int, head_dim: int, dtype: DTypeLike) -> Hot:
    """Room for `places` pages of `page` tokens, of a history of `pages` pages; `lead` is rows and KV heads."""
    shape = (*lead, places * page, head_dim)
    return Hot(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        page=jnp.full((*lead, places), -1, jnp.int32),
        place=jnp.zeros((*lead, pages), jnp.int32),
        used=jnp.zeros((*lead, places), bool),
        hand=jnp.zeros(lead, jnp.int32),
        loads=jnp.zeros(lead, jnp.int32),
    )


def _once(page: Array, pages: int) -> tuple[Array, Array]:
    """`page` i32[B, K, N] with -1 for all but the first of equal ones, and i32[B, K, N]: where that first one is."""
    B, K, N = page.shape
    row, head = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    order = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None, None], page.shape)
    first = (
        jnp.full((B, K, pages), N, jnp.int32).at[row, head, jnp.where(page < 0, pages, page)].min(order, mode="drop")
    )
    same = jnp.take_along_axis(first, jnp.maximum(page, 0), axis=2)
    same = jnp.where(page < 0, order, same)
    return jnp.where(same == order, page, -1), same


def give_places(hot: Hot, page: Array) -> tuple[Hot, Array, Array]:
    """Gives each page i32[B, K, N], all different but for -1, a place of its own.

    Returns the hot set with its tables brought up to date, the places i32[B, K, N], and bool[B, K, N] which pages are
    to be read from the host to them.
    """
    B, K, N = page.shape
    n = hot.page.shape[2]
    row, head = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    known = jnp.clip(jnp.take_along_axis(hot.place, jnp.maximum(page, 0), axis=2), 0, n - 1)
    hit = (page >= 0) & (jnp.take_along_axis(hot.page, known, axis=2) == page)
    missed = (page >= 0) & ~hit

    def at(places: Array, which: Array) -> tuple[Array, Array, Array]:
        return row, head, jnp.where(which, places, n)

    # Places in the order in which the hand gives them up: first those that were not used, then the used ones, each from
    # the hand on; never those of this step's hits.
    kept = jnp.zeros((B, K, n), bool).at[at(known, hit)].set(True, mode="drop")
    at_hand = hot.hand[..., None]
    idle, busy = ~kept & ~hot.used, ~kept & hot.used
    before = lax.cumsum(jnp.stack([idle, busy]).astype(jnp.int32), axis=3)
    total = before[..., -1:]
    hand_at = jnp.broadcast_to(at_hand[None], (2, B, K, 1))
    passed = jnp.where(hand_at > 0, jnp.take_along_axis(before, jnp.maximum(hand_at - 1, 0), axis=3), 0)
    rank = before - 1 - passed
    rank = jnp.where(rank < 0, rank + total, rank)
    rank = jnp.where(idle, rank[0], jnp.where(busy, total[0] + rank[1], N))
    place_of_rank = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None, None], rank.shape)
    given = jnp.zeros((B, K, N), jnp.int32).at[row, head, jnp.minimum(rank, N)].set(place_of_rank, mode="drop")

    order = lax.cumsum(missed.astype(jnp.int32), axis=2)
    misses = order[..., -1:]
    place = jnp.where(missed, jnp.take_along_axis(given, jnp.maximum(order - 1, 0), axis=2), known)
    last = jnp.take_along_axis(given, jnp.maximum(misses - 1, 0), axis=2)
    # The hand has gone round to the place that it gave last, or all the way, and what it passed counts as unused.
    distance = jnp.mod(jnp.arange(n)[None, None] - at_hand, n)
    swept = (distance <= jnp.mod(last - at_hand, n)) | (misses > total[0])
    used = hot.used & ~(swept & (misses > 0))
    used = used.at[at(place, page >= 0)].set(True, mode="drop")
    after = replace(
        hot,
        page=hot.page.at[at(place, missed)].set(page, mode="drop"),
        place=hot.place.at[row, head, jnp.where(missed, page, hot.place.shape[2])].set(place, mode="drop"),
        used=used,
        hand=jnp.where(misses > 0, jnp.mod(last + 1, n), at_hand)[..., 0],
        loads=hot.loads + misses[..., 0],
    )
    return after, place, missed
