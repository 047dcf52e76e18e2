"""The base of stores: where keys and values of the history are kept, and how a step attends to
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kvjax import ops
from kvjax.memory import growth
from kvjax.numerics.blocks import take_rows
from kvjax.numerics.derivatives import refuse_derivative
from kvjax.numerics.partial import Logits, PartialAttention, Span, merge_sinks
from kvjax.numerics.selection import PackedSelection, Selection, split_selection, unpack
from kvjax.ops.host import pages_to_read, place_pages
from kvjax.spec import CacheSpec
from kvjax.validation import refuse_former_verbs

FORMER_VERBS = {
    "over_context": "a function registered with kvjax.sharding.context.stores.split_store"
}


class Recalled(NamedTuple):
    """Tokens that an earlier step recalled and that are still on the device."""

    selection: Selection  # [B, K, 1, R], the slots of all heads one after the other, and room for the edge
    k: Array  # dtype[B, K, R, D]
    v: Array  # dtype[B, K, R, D]


class Store:
    """Keeps keys and values. Slots are filled in order of arrival: slot s holds the s-th token
    that was appended.

    A subclass is a frozen dataclass without arrays that implements `init`, `append` and
    `attend`, and `gather` if single slots can be read, as policies that select need. The other
    verbs have defaults; a store overrides those for which it has one operation. A state is a
    pytree with `count` i32[B] and the number of its `slots`.
    """

    @property
    def page(self) -> int:
        """Tokens that can only be read together: a selection must name whole pages. 1 if single
        tokens can be read.
        """
        return 1

    recalls: ClassVar[bool] = True
    """True if `Speculative` copies selected tokens; False if a step attends to them in place as
    fast.
    """

    takes_steps: ClassVar[bool] = False
    """True if `attend_zones` attends for several decode steps at once, each with its own
    selection.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_verbs(cls, FORMER_VERBS)

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError if this store cannot take chunks of `chunk` tokens in a cache of
        this spec.
        """

    def require_room(self, tokens: int) -> None:
        """Raises ValueError if a step cannot select `tokens` tokens of a row and KV head."""

    def init(self, spec: CacheSpec, slots: int) -> Any:
        """An empty state of `slots` slots per row, with `count` i32[B]."""
        raise NotImplementedError

    def append(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """Adds the first `count` i32[B] tokens of k, v [B, K, T, D]; count is a multiple of the
        chunk.
        """
        raise NotImplementedError

    def free(self, st: Any) -> Array:
        """i32[B]: slots that each row can still fill."""
        return st.slots - st.count

    def with_count(self, st: Any, count: Array) -> Any:
        """`st` with another `count` i32[B], for rows whose history a step does not read. The
        default leaves a state as it is that is no dataclass with the field `count`."""
        if not is_dataclass(st) or "count" not in {field.name for field in fields(st)}:
            return st
        counted: Any = replace(st, count=count)  # type: ignore[type-var]
        return counted

    # ------------------------------------------------------------------------------------------------- all slots

    def attend(self, st: Any, q: Array, start: Array, *, logits: Logits) -> PartialAttention:
        """Attention of a step's q [B, K, G, D] over the slots [start, count), start i32[B].

        A store implements this or `attend_chunk`; the default of each is the other.
        """
        if type(self).attend_chunk is Store.attend_chunk:
            raise NotImplementedError(
                f"{type(self).__name__} must implement attend or attend_chunk"
            )
        return self.attend_chunk(st, q[:, :, :, None], start[:, None], logits=logits)

    def attend_chunk(
        self, st: Any, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        """Attention of a chunk's q [B, K, G, T, D] over the slots [start, count), a part over Q
        = G*T.

        start is i32[B, T], a slot for each query, or None for slot 0. The default attends with
        one query after the other; `kvjax.ops.chunk.attend_blocks` is faster for a store that
        can read a block of its slots.
        """
        B, K, G, T, _ = q.shape
        start = jnp.zeros((B, T), jnp.int32) if start is None else start

        def one(x: tuple[Array, Array]) -> PartialAttention:
            return self.attend(st, *x, logits=logits)

        each = lax.map(one, (jnp.moveaxis(q, 3, 0), jnp.moveaxis(start, 1, 0)))
        return PartialAttention(
            *(jnp.moveaxis(a, 0, 3).reshape(B, K, G * T, *a.shape[4:]) for a in each)
        )

    def attend_with(
        self,
        st: Any,
        q: Array,
        start: Array,
        recent: Span,
        sink: Span | None,
        *,
        logits: Logits,
        sinks: Array | None = None,
        part: bool = False,
    ) -> Any:
        """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over the slots [start, count),
        start i32[B], over the spans of `recent` and `sink`, and with the logits `sinks` of
        `Step`; or a `part` over Q = G without these."""
        history = self.attend(st, q, start, logits=logits)
        if part:
            return ops.merge_beside(history, q, None, recent, sink, logits=logits)
        return ops.attend_beside(history, q, None, recent, sink, sinks, logits=logits)

    # -------------------------------------------------------------------------------------------- selected slots

    def gather(self, st: Any, selection: Selection) -> tuple[Array, Array]:
        """Keys and values [B, K, H*M, D] of the selected slots, on the device. Slots that are
        not valid may give any value, even NaN."""
        raise ValueError(
            f"{self} has no gather(st, selection), so no policy can select its tokens; add it, or use kvjax.Compressed,"
            " which reads all"
        )

    def read(
        self, st: Any, selection: Selection, length: int
    ) -> tuple[Any, tuple[Array, Array]]:
        """Returns the state, and the selected slots of the history as `gather` gives them,
        padded to `length` tokens.
        """
        stored, _ = split_selection(flat(selection, length), st.slots)
        return st, self.gather(st, stored)

    def attend_slots(
        self, st: Any, q: Array, selection: Selection, *, logits: Logits
    ) -> PartialAttention:
        """Attention of q [B, K, G, D] over the selected slots, reading only those."""
        return ops.attend_gathered(q, *self.gather(st, selection), selection, logits=logits)

    def attend_zones(
        self,
        st: Any,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        """Attention over the selected slots, the local window and `sink`: [B, K, G, D] in the
        dtype of q [B, K, G, D], and the state.

        Slot S + r of the selection is slot r of `recent`. The local window is the last `local`
        slots of the span of `recent`, none of which are selected. T steps at once have queries
        [B, K, T*G, D], each step's after the previous step's, lists of slots [B, K, T*H, M],
        and spans with start and stop i32[B, T].

        The default merges `attend_slots` with what lies beside it, so a new store need not
        write this. A store overrides it where one kernel reads all zones, or where reading
        changes its state, as it does in a `HotSet`. `attend` is for a step without a selection.
        """
        whole = self.attend_zones_part(st, q, selection, recent, sink, local, logits=logits)
        return merge_sinks(whole, sinks).out.astype(q.dtype), st

    def attend_zones_part(
        self,
        st: Any,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
    ) -> PartialAttention:
        """Returns the attention of `attend_zones` as a part, which merges with those of other
        devices; without sink logits.
        """
        stored, pending = split_selection(selection, st.slots)
        history = self.attend_slots(st, q, stored, logits=logits)
        recent = recent._replace(start=jnp.maximum(recent.stop - local, recent.start))
        return ops.merge_beside(history, q, pending, recent, sink, logits=logits)

    def recall(
        self,
        st: Any,
        selection: Selection,
        recent: tuple[Array, Array],
        oldest: Array,
        recalled: Recalled,
        rows: Array,
        urgent: Array | None,
    ) -> tuple[Any, tuple[Array, Array], Callable[[], tuple[Array, Array]]]:
        """Recalls the selection in two parts, the part that a step needs first.

        Returns the state, keys and values [B, K, R, D] like those of `recalled`, and a function
        that recalls the rest. Keys and values are valid for heads where `urgent` bool[B, K] is
        true, and arbitrary for others. The function returns them for all heads of `rows`
        bool[B], and those of `recalled` for other rows. A store outside of device memory may
        read the rest while other work runs; the default reads both at once. If `urgent` is
        None, all heads are urgent.

        Slot S + r of the selection is slot r of `recent`, keys and values [B, K, R, D]. After
        the selection comes slot `oldest` i32[B] of `recent`, or nothing where it is negative;
        then any finite values. Tokens of `recalled` need not be read again.
        """
        B, K, H, M = selection.slots.shape
        length = recalled.k.shape[2]
        takes = rows[:, None, None, None]
        # A row that pauses reads nothing.
        wanted = selection._replace(valid=selection.valid & takes)

        st, (history_k, history_v) = self.read(st, wanted, length)
        _, pending = split_selection(flat(wanted, length), st.slots)
        pending_k, pending_v = ops.gather_slots(*recent, pending)
        is_pending = pending.valid.reshape(B, K, -1, 1)
        is_edge = jnp.arange(length, dtype=jnp.int32)[None, None, :, None] - H * M == 0

        def joined(stored: Array, waiting: Array, zone: Array, dtype: Any) -> Array:
            """Tokens of the history and of the recent block, in the order of the selection,
            then slot `oldest` of the recent block.
            """
            edge = take_rows(zone, jnp.maximum(oldest, 0)[:, None]).astype(stored.dtype)
            selected = jnp.where(is_pending, waiting.astype(stored.dtype), stored)
            # A copy of a cache may have another dtype than a store of codes returns.
            return jnp.where(is_edge, edge, selected).astype(dtype)

        k = joined(history_k, pending_k, recent[0], recalled.k.dtype)
        v = joined(history_v, pending_v, recent[1], recalled.v.dtype)
        rest = jnp.where(takes, k, recalled.k), jnp.where(takes, v, recalled.v)
        return st, (k, v), lambda: rest

    def place(
        self, st: Any, hot: tuple[Array, Array], page: Array, used: Array, at: Array
    ) -> tuple[Array, Array]:
        """Keys and values of a hot set, [B, K, n * Z, D], with the pages that just got a place
        in `at` i32[B, K, N].

        `page` i32[B, K, n] is the page of each place, and `used` i32[B, K, n] is 2 for those
        filled last.
        """
        Z = self.page
        B, K, N = at.shape
        source, to = pages_to_read(page, used, at)
        slots = (
            jnp.maximum(source, 0)[..., None] * Z
            + jnp.arange(Z, dtype=jnp.int32)[None, None, None]
        )
        valid = jnp.broadcast_to((source >= 0)[..., None], slots.shape)
        rows = self.gather(
            st, Selection(slots.reshape(B, K, 1, N * Z), valid.reshape(B, K, 1, N * Z))
        )
        k, v = place_pages(hot, rows, to, page.shape[2])
        return k, v

    # ---------------------------------------------------------------------------------------------- whole states

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Whole chunks k, v [B, K, T, D] as they are read after being stored; unchanged in a
        lossless store.
        """
        return k, v

    @property
    def lossless(self) -> bool:
        """True if tokens are read as they were appended: unless the class has its own
        `decoded`.
        """
        return type(self).decoded is Store.decoded

    def truncate(self, st: Any, count: Array) -> Any:
        """Returns the state with the first `count` i32[B] slots of each row, whole chunks, as
        if no more had been appended.

        Only a store that returns keys and values unchanged can do so: tokens then move back to
        the recent block.
        """
        raise ValueError(
            f"truncate cannot shorten a cache of {self}, which does not return keys and values unchanged; use the "
            "store Dense or HostOffload, or kvjax.rollback for tokens of the recent block"
        )

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes per stored token, in one layer over all kv heads."""
        return growth(lambda slots: self.init(spec, slots), self.page) / spec.batch


class Wrapper(Store):
    """A base of stores that keep their tokens in another one. A subclass is a dataclass with
    `store`.
    """

    store: Store

    @property
    def page(self) -> int:
        return self.store.page

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.store.check(spec, chunk)

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        return self.store.decoded(k, v)

    @property
    def lossless(self) -> bool:
        return self.store.lossless


def flat(selection: Selection | PackedSelection, length: int) -> Selection:
    """[B, K, 1, length]: the slots of all heads one after the other, and room for more."""
    B, K, H, M = selection.slots.shape
    slots, valid = unpack(selection)
    width = ((0, 0), (0, 0), (0, 0), (0, length - H * M))
    return Selection(
        jnp.pad(slots.reshape(B, K, 1, -1), width), jnp.pad(valid.reshape(B, K, 1, -1), width)
    )


def refuse_codes(store: Store, k: Array, v: Array) -> tuple[Array, Array]:
    """k and v, whose derivative is refused."""
    k, v = refuse_derivative(
        f"{store} keeps keys and values as codes, which have no derivative; use the store Dense(), or "
        "jax.lax.stop_gradient on k and v",
        k,
        v,
    )
    return k, v
