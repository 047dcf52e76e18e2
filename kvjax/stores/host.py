"""Keys and values in host memory, the keys and the values of a page together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.memory import has_host_memory, host_zeros, to_device
from kvjax.numerics.blocks import quotient, remainder
from kvjax.numerics.derivatives import refuse_derivative
from kvjax.numerics.partial import Logits, PartialAttention, Span
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.ops.chunk import attend_blocks
from kvjax.ops.host import read_pages
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores.store import Recalled, Store
from kvjax.validation import check_divides


@register_dataclass
@dataclass(frozen=True)
class HostBlock:
    """Pages of keys and values. Slot s is token s % Z of page s // Z; slots at or past count
    may hold anything.
    """

    kv: Array  # dtype[B, K, P, 2, Z, D] in host memory: the keys of a page and head, then its values
    count: Array  # i32[B] slots [0, count) are valid; in device memory

    @property
    def slots(self) -> int:
        return self.kv.shape[2] * self.kv.shape[4]

    @property
    def k(self) -> Array:
        """dtype[B, K, S, D]: all keys, moved to the device."""
        return split_parts(to_device(self.kv))[0]

    @property
    def v(self) -> Array:
        """dtype[B, K, S, D]: all values, moved to the device."""
        return split_parts(to_device(self.kv))[1]


@dataclass(frozen=True, kw_only=True)
class HostOffload(Store):
    """Keeps keys and values unchanged in pinned host memory; stored tokens take no device
    memory.

    A step moves the selected tokens, and a chunk of a prompt streams all stored tokens before
    it through the device, a block of 1024 tokens at a time. The keys and values of a page and
    kv head are adjacent, 2 * page * D values in one run, and move together; so a selector must
    select whole pages: the size of its own pages is a multiple of `page`. With page = 1 the
    store works with any selector.

    For `Speculative`, the kernel reads pages that the previous step recalled from the device,
    where they still are, and it reads pages that only the next step attends with at the same
    time as other work of the device (`recall`). Plain JAX moves the same number of pages from
    the host in either case, and waits for them.

    **Source:** FreeKV's layout in host memory, (page, head, 2, p, D); it too moves only pages
    that are not resident. **Differs:** pages lie within a head, [B, K, P, 2, p, D], as in every
    other zone; the page of a head is one run of memory in both. Only the pages of the last step
    are resident.
    """

    page: int = 1

    takes_steps = True

    def __post_init__(self) -> None:
        keep_ints(self, page=1)

    def check(self, spec: CacheSpec, chunk: int) -> None:
        check_divides(self, "the chunk of ", chunk, page=self.page)
        if not has_host_memory():
            raise ValueError(
                f"HostOffload needs pinned host memory, which the backend {jax.default_backend()!r} lacks; "
                "use the store Dense"
            )

    def init(self, spec: CacheSpec, slots: int) -> HostBlock:
        shape = (spec.batch, spec.kv_heads, slots // self.page, 2, self.page, spec.head_dim)
        return HostBlock(host_zeros(shape, spec.dtype), jnp.zeros(spec.batch, jnp.int32))

    def append(self, st: HostBlock, k: Array, v: Array, count: Array) -> HostBlock:
        k, v = refuse_derivative(
            f"{self} keeps keys and values in host memory, where they have no derivative; use the store Dense(), or "
            "jax.lax.stop_gradient on k and v",
            k,
            v,
        )
        B, K, T, D = k.shape
        Z = self.page
        n = T // self.page
        new = [a.reshape(B, K, n, Z, D).astype(st.kv.dtype) for a in (k, v)]
        pages = jnp.minimum(count, T) // Z
        kv = ops.host_append(st.kv, new, st.count // Z, pages)
        return HostBlock(kv, jnp.minimum(st.count + pages * Z, st.slots))

    def attend_chunk(
        self, st: HostBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        Z = self.page

        def read(kv: Array, first: Array | int, size: int) -> tuple[Array, Array]:
            return split_parts(read_pages(kv, first // Z, size // Z))

        return attend_blocks(
            q, st.kv, start, st.count, read=read, slots=st.slots, unit=Z, logits=logits
        )

    def gather(self, st: HostBlock, selection: Selection) -> tuple[Array, Array]:
        k, v = ops.host_rows(st.kv, self._pages(selection, st.slots))
        return k, v

    def recall(
        self,
        st: HostBlock,
        selection: Selection,
        recent: tuple[Array, Array],
        oldest: Array,
        recalled: Recalled,
        rows: Array,
        urgent: Array | None,
    ) -> tuple[HostBlock, tuple[Array, Array], Callable[[], tuple[Array, Array]]]:
        """Recalls the urgent heads first. With `memory.CONCURRENT`, the rest is read at the
        same time as other work.
        """
        before, *parts = recalled
        index = self._pages(selection, st.slots)
        known_pages = self._whole_pages(st, before)
        edge = jnp.maximum(oldest, -1)
        edge = jnp.where(edge < 0, -1, st.kv.shape[2] + edge)
        on_device = known_pages, tuple(parts)
        if urgent is None:
            # The others keep what they have: their pages are on the device.
            index = jnp.where(
                rows[:, None, None], index, self._pages(before, st.slots)[..., : index.shape[2]]
            )
            every = jnp.ones(index.shape[:2], bool)
            k, v = ops.host_rows_first(st.kv, index, edge, every, on_device, recent)
            return st, (k, v), lambda: (k, v)
        k, v = ready = ops.host_rows_first(st.kv, index, edge, urgent, on_device, recent)

        def rest() -> tuple[Array, Array]:
            others = rows[:, None] & ~urgent
            k, v = ops.host_rows_rest(
                st.kv, index, edge, others, on_device, recent, (urgent, ready)
            )
            return k, v

        return st, (k, v), rest

    def _whole_pages(self, st: HostBlock, recalled: Selection) -> Array:
        """i32[B, K, pages]: the pages whose tokens were all recalled, in order; -1 for others.

        Tokens that were pending in another order, and have been stored in a page since, are not
        in order.
        """
        by_page = (*recalled.slots.shape[:2], -1, self.page)
        slots = recalled.slots.reshape(by_page)
        valid = recalled.valid.reshape(by_page)
        first = slots[..., :1]
        whole = jnp.all(
            valid & (slots == first + jnp.arange(self.page, dtype=jnp.int32)[None, None, None]),
            axis=3,
        )
        first = first[..., 0]
        is_page = whole & (remainder(first, self.page) == 0) & (first < st.slots)
        return jnp.where(is_page, quotient(first, self.page), -1)

    def _pages(self, selection: Selection, stored: int) -> Array:
        """i32[B, K, pages] of a selection: -1 where no token of a page is valid. Pages past the
        `stored` slots are numbered on by their first slot."""
        by_page = (*selection.slots.shape[:2], -1, self.page)
        slots = selection.slots.reshape(by_page)
        valid = selection.valid.reshape(by_page)
        first = slots[..., :1]
        place = jnp.where(
            first < stored, quotient(first, self.page), first + (stored // self.page - stored)
        )
        return jnp.max(jnp.where(valid, place, -1), axis=3)

    def attend_zones(
        self,
        st: HostBlock,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> tuple[Array, HostBlock]:
        """Selected tokens of the history move to the device in the order of the selection."""
        slots = selection.slots
        stored = slots < st.slots
        k, v = self.gather(st, Selection(slots, selection.valid & stored))
        moved = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, *slots.shape[2:])
        on_device = selection._replace(
            slots=jnp.where(stored, moved, k.shape[2] + slots - st.slots)
        )
        out: Array = ops.attend_zones(
            q, k, v, on_device, recent, sink, local, sinks=sinks, logits=logits
        )
        return out, st

    def place(
        self, st: HostBlock, hot: tuple[Array, Array], page: Array, used: Array, at: Array
    ) -> tuple[Array, Array]:
        k, v = ops.hot_load(st.kv, hot, page, used, at)
        return k, v

    def truncate(self, st: HostBlock, count: Array) -> HostBlock:
        return replace(st, count=count)


def split_parts(kv: Array) -> tuple[Array, Array]:
    """Keys and values [B, K, n*Z, D] of pages [B, K, n, 2, Z, D]."""
    B, K, n, _, Z, D = kv.shape
    return kv[:, :, :, 0].reshape(B, K, n * Z, D), kv[:, :, :, 1].reshape(B, K, n * Z, D)
