"""The protocol of stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.partial import PartialAttention, Span
from kvjax.selection import PackedSelection, Selection, split_selection
from kvjax.spec import CacheSpec


class Store(Protocol):
    """Keeps keys and values. Slots are handed out in order of arrival; slot s holds the s-th token that came.

    A store may have further verbs, which policies find by the protocols below: `FusedStore`, `FusedSlotStore`,
    `MultiStepStore`, `RecallingStore`, `CachingStore`. Without them a policy puts the same attention together from the
    verbs here.
    """

    @property
    def page(self) -> int:
        """Tokens that can only be read together: a selection must name whole pages. 1 where any token can be read."""
        ...

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError where this store cannot take chunks of `chunk` tokens of such a cache."""
        ...

    def init(self, spec: CacheSpec, slots: int) -> Any:
        """An empty state of `slots` slots a row, with `count` i32[B]."""
        ...

    def append(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """Adds the first `count` i32[B] tokens of k, v [B, K, T, D]; count is a multiple of the chunk."""
        ...

    def attend(self, st: Any, q: Array, start: Array, *, scale: float) -> PartialAttention:
        """Attention of a step's q [B, K, G, D] over the slots [start, count), start i32[B]."""
        ...

    def attend_chunk(self, st: Any, q: Array, start: Array | None, *, scale: float) -> PartialAttention:
        """Attention of a chunk's q [B, K, G, T, D] over the slots [start, count), a part over Q = G*T.

        start is i32[B, T], a slot for each query, or None for slot 0. `kvjax.prompt.attend_blocks` does it for a store
        that can read a block of its slots.
        """
        ...

    def attend_slots(self, st: Any, q: Array, selection: Selection, *, scale: float) -> PartialAttention:
        """Attention of q [B, K, G, D] over the selected slots, reading only those."""
        ...

    def gather(self, st: Any, selection: Selection) -> tuple[Array, Array]:
        """Keys and values [B, K, H*M, D] of the selected slots, on the device. Those of slots that are not valid may be
        anything, also not finite."""
        ...

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Whole chunks k, v [B, K, T, D] as they are read once they are stored; themselves in a lossless store."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes that a stored token takes in a layer, over all kv heads."""
        ...


@runtime_checkable
class FusedStore(Store, Protocol):
    """A store that attends to the history together with the exact tokens beside it.

    `Compressed` calls `attend_with` in place of `attend` and a merge with the attention over sink and recent block, so
    that a step needs one kernel and no partial results. Law: both give the same, up to rounding.
    """

    def attend_with(self, st: Any, q: Array, start: Array, recent: Span, sink: Span | None, *, scale: float) -> Array:
        """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the slots [start, count), start i32[B], and over
        the spans of `recent` and `sink`."""
        ...


@runtime_checkable
class FusedSlotStore(Store, Protocol):
    """A store that attends to selected slots together with the exact tokens beside them.

    `Retrieval` calls `attend_slots_with` in place of `attend_slots` and a merge with the attention over sink, selected
    pending tokens and local window. Law: both give the same, up to rounding.
    """

    def attend_slots_with(
        self,
        st: Any,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        scale: float,
    ) -> Array:
        """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the selected slots, S + r being slot r of
        `recent`; over the last `local` slots of the span of `recent`, none of which are selected; and over the span of
        `sink`."""
        ...


@runtime_checkable
class MultiStepStore(Store, Protocol):
    """A store that attends for several decode steps at once, each with a selection of its own.

    `Retrieval.decode` calls `attend_steps` in place of one `attend_slots_with` or `attend_slots` a step. Law: both give
    the same, up to rounding. `attend_slots_beside` is an implementation for a store whose `attend_slots` takes any
    number of lists.
    """

    def attend_steps(
        self,
        st: Any,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        scale: float,
    ) -> Array:
        """[B, K, T*G, D] in the dtype of q [B, K, T*G, D], the query heads of one step after those of the other.

        The arguments are those of `FusedSlotStore.attend_slots_with`, of all steps: lists of slots [B, K, T*H, M], and
        spans with start and stop i32[B, T].
        """
        ...


def attend_slots_beside(
    store: Store,
    st: Any,
    slots: int,
    q: Array,
    selection: Selection | PackedSelection,
    recent: Span,
    sink: Span | None,
    local: int,
    *,
    scale: float,
) -> Array:
    """`MultiStepStore.attend_steps` by `attend_slots` of a store of `slots` slots, and a merge."""
    stored, pending = split_selection(selection, slots)
    history = store.attend_slots(st, q, stored, scale=scale)
    recent = recent._replace(start=jnp.maximum(recent.start, recent.stop - local))
    return ops.attend_beside(history, q, pending, recent, sink, scale=scale)


@runtime_checkable
class TruncatableStore(Store, Protocol):
    """A store that gives back keys and values as they came, so that `kvjax.truncate` can take tokens out of it."""

    def truncate(self, st: Any, count: Array) -> Any:
        """The first `count` i32[B] slots of each row, whole chunks, as if no others had been appended."""
        ...


def require_truncatable(store: Store) -> TruncatableStore:
    """`store`, if it gives back what it was given; else a ValueError."""
    if not isinstance(store, TruncatableStore):
        raise ValueError(
            f"truncate cannot shorten a cache of {store}, which does not give back keys and values as they "
            "came; use the store Dense or HostOffload, or rollback for tokens of the recent block"
        )
    return store


class Recalled(NamedTuple):
    """Tokens that were recalled before and are still on the device."""

    selection: Selection  # [B, K, 1, M]
    k: Array  # dtype[B, K, M, D]
    v: Array  # dtype[B, K, M, D]


@runtime_checkable
class RecallingStore(Store, Protocol):
    """A store outside of device memory that recalls a selection in two parts, first what this step needs.

    `Speculative` calls `recall` in place of `gather`. A step then waits for the heads that attend with the selection
    now, while the rest, which the next step attends with, is read beside other work of the device.
    """

    def recall(
        self,
        st: Any,
        selection: Selection,
        recent: tuple[Array, Array],
        edge: Array,
        recalled: Recalled,
        rows: Array,
        urgent: Array,
    ) -> tuple[tuple[Array, Array], Callable[[], tuple[Array, Array]]]:
        """Keys and values [B, K, M, D] of the selection for heads `urgent` bool[B, K], anything for others; and a
        function that gives them for all heads of `rows` bool[B], or for heads bool[B, K], and for others those of
        `recalled`.

        Slot S + r of the selection is slot r of `recent`, keys and values [B, K, R, D]. Slot `edge` i32[B] of it comes
        after the selection, with those after it that make a page, nothing where it is negative; up to the M of
        `recalled` then anything finite. Tokens of `recalled` need not be read again.
        """
        ...


@runtime_checkable
class PlacingStore(Store, Protocol):
    """A store outside of device memory that reads pages straight to their places in a hot set.

    `HotSet` calls `place` in place of `gather` and a scatter.
    """

    def place(self, st: Any, hot: tuple[Array, Array], page: Array, used: Array, at: Array) -> tuple[Array, Array]:
        """Keys and values of the hot set, [B, K, n * Z, D], with new pages; see `kvjax.ops.hot_load`."""
        ...


class Loaded(NamedTuple):
    """Tokens on the device, and a selection of them."""

    k: Array  # dtype[B, K, X, D]
    v: Array  # dtype[B, K, X, D]
    selection: Selection | PackedSelection  # slot X + r is slot r of the recent block


@runtime_checkable
class CachingStore(Store, Protocol):
    """A store that keeps on the device what steps select, so that later steps need not read it again.

    A step calls `load` with what it selected, and attends to what comes back. Law: the tokens are those that
    `attend_slots` of the same selection reads, in the same order.
    """

    def load(self, st: Any, selection: Selection | PackedSelection) -> tuple[Any, Loaded]:
        """The state with all of the selection on the device, and where it is there. S + r is slot r of the recent
        block."""
        ...

    def require_room(self, tokens: int) -> None:
        """Raises ValueError where a step cannot select so many tokens of a row and KV head."""
        ...
