"""The protocols of stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.partial import PartialAttention, Span
from kvjax.numerics.selection import PackedSelection, Selection, split_selection
from kvjax.spec import CacheSpec


class Store(Protocol):
    """Keeps keys and values. Slots are filled in order of arrival: slot s holds the s-th token that was appended.

    A store may have further verbs, which policies find by the protocols below: `FusedStore`, `FusedSlotStore`,
    `MultiStepStore`, `RecallingStore`, `CachingStore`. Without them a policy computes the same attention from the verbs
    here.
    """

    @property
    def page(self) -> int:
        """Tokens that can only be read together: a selection must name whole pages. 1 if single tokens can be read."""
        ...

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError if this store cannot take chunks of `chunk` tokens in a cache of this spec."""
        ...

    def init(self, spec: CacheSpec, slots: int) -> Any:
        """An empty state of `slots` slots per row, with `count` i32[B]."""
        ...

    def append(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """Adds the first `count` i32[B] tokens of k, v [B, K, T, D]; count is a multiple of the chunk."""
        ...

    def attend(self, st: Any, q: Array, start: Array, *, scale: float) -> PartialAttention:
        """Attention of a step's q [B, K, G, D] over the slots [start, count), start i32[B]."""
        ...

    def attend_chunk(self, st: Any, q: Array, start: Array | None, *, scale: float) -> PartialAttention:
        """Attention of a chunk's q [B, K, G, T, D] over the slots [start, count), a part over Q = G*T.

        start is i32[B, T], a slot for each query, or None for slot 0. `kvjax.ops.chunk.attend_blocks` implements it for
        a store that can read a block of its slots.
        """
        ...

    def attend_slots(self, st: Any, q: Array, selection: Selection, *, scale: float) -> PartialAttention:
        """Attention of q [B, K, G, D] over the selected slots, reading only those."""
        ...

    def gather(self, st: Any, selection: Selection) -> tuple[Array, Array]:
        """Keys and values [B, K, H*M, D] of the selected slots, on the device. Slots that are not valid may give any
        value, even NaN."""
        ...

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Whole chunks k, v [B, K, T, D] as they are read after being stored; unchanged in a lossless store."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes per stored token, in one layer over all kv heads."""
        ...


@runtime_checkable
class FusedStore(Store, Protocol):
    """A store that attends to the history together with the exact tokens beside it.

    `Compressed` calls `attend_with` in place of `attend` and a merge with the attention over sink and recent block, so
    that a step needs one kernel and no partial results. Law: both give the same result, up to rounding.
    """

    def attend_with(self, st: Any, q: Array, start: Array, recent: Span, sink: Span | None, *, scale: float) -> Array:
        """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the slots [start, count), start i32[B], and over
        the spans of `recent` and `sink`."""
        ...


@runtime_checkable
class FusedSlotStore(Store, Protocol):
    """A store that attends to selected slots together with the exact tokens beside them.

    `Retrieval` calls `attend_slots_with` in place of `attend_slots` and a merge with the attention over sink, selected
    pending tokens and local window. Law: both give the same result, up to rounding.
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
        """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the selected slots, the local window and `sink`.

        Slot S + r of the selection is slot r of `recent`. The local window is the last `local` slots of the span of
        `recent`, none of which are selected.
        """
        ...


@runtime_checkable
class MultiStepStore(Store, Protocol):
    """A store that attends for several decode steps at once, each with its own selection.

    `Retrieval.decode` calls `attend_steps` in place of one `attend_slots_with` or `attend_slots` per step. Law: both
    give the same result, up to rounding. `attend_slots_beside` is an implementation for a store whose `attend_slots`
    takes any number of lists.
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
        """[B, K, T*G, D] in the dtype of q [B, K, T*G, D], each step's query heads after the previous step's.

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
    """`MultiStepStore.attend_steps`, by the `attend_slots` of a store of `slots` slots and a merge."""
    stored, pending = split_selection(selection, slots)
    history = store.attend_slots(st, q, stored, scale=scale)
    recent = recent._replace(start=jnp.maximum(recent.start, recent.stop - local))
    return ops.attend_beside(history, q, pending, recent, sink, scale=scale)


@runtime_checkable
class TruncatableStore(Store, Protocol):
    """A store that returns keys and values unchanged, so that `kvjax.truncate` can move tokens out of it."""

    def truncate(self, st: Any, count: Array) -> Any:
        """The state with the first `count` i32[B] slots of each row, whole chunks, as if no more had been appended."""
        ...


def require_truncatable(store: Store) -> TruncatableStore:
    """`store`, if it returns keys and values unchanged; else raises ValueError."""
    if not isinstance(store, TruncatableStore):
        raise ValueError(
            f"truncate cannot shorten a cache of {store}, which does not return keys and values unchanged; use the "
            "store Dense or HostOffload, or kvjax.rollback for tokens of the recent block"
        )
    return store


class Recalled(NamedTuple):
    """Tokens that an earlier step recalled and that are still on the device."""

    selection: Selection  # [B, K, 1, M]
    k: Array  # dtype[B, K, M, D]
    v: Array  # dtype[B, K, M, D]


@runtime_checkable
class RecallingStore(Store, Protocol):
    """A store outside of device memory that recalls a selection in two parts, the part that this step needs first.

    `Speculative` calls `recall` in place of `gather`. A step then waits only for the heads that attend with the
    selection now; the rest, for the next step, is read at the same time as other work of the device.
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
        """Recalls the selection: keys and values [B, K, M, D], and a function that recalls the rest.

        Keys and values are valid for heads where `urgent` bool[B, K] is true, and arbitrary for others. The function
        returns them for all heads of `rows` bool[B], or bool[B, K] by head, and those of `recalled` for other heads.

        Slot S + r of the selection is slot r of `recent`, keys and values [B, K, R, D]. After the selection comes slot
        `edge` i32[B] of `recent`, with the slots after it that make a page, or nothing where `edge` is negative; then,
        up to the M of `recalled`, any finite values. Tokens of `recalled` need not be read again.
        """
        ...


@runtime_checkable
class PlacingStore(Store, Protocol):
    """A store outside of device memory that reads pages directly to their places in a hot set.

    `HotSet` calls `place` instead of `gather` and a scatter.
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
    """A store that keeps selected tokens on the device, so that later steps need not read them again.

    A step calls `load` with its selection, and attends to the result. Law: the tokens are those that `attend_slots` of
    the same selection reads, in the same order.
    """

    def load(self, st: Any, selection: Selection | PackedSelection) -> tuple[Any, Loaded]:
        """The state with all of the selection on the device, and where it is there. Slot S + r is slot r of the recent
        block."""
        ...

    def require_room(self, tokens: int) -> None:
        """Raises ValueError if a step cannot select `tokens` tokens of a row and KV head."""
        ...
